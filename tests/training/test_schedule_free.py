"""Schedule-free optimizers: steps at y, everything else at the average x, and runs that saves do not change."""

import functools
import os
import signal

import pytest
import torch
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging, ModelCheckpoint
from safetensors.torch import load_file
from torch.utils.data import DataLoader

from lightning_fastft.callbacks.finite_guard import FiniteGuard
from lightning_fastft.callbacks.gradient_health import GradientHealth
from lightning_fastft.core.errors import OptionError
from lightning_fastft.core.optimizer_twin import measure_state
from lightning_fastft.strategies.packed_steps import missing_optimizer_bytes
from lightning_fastft.training.fine_tuner import FineTuner
from lightning_fastft.training.samplers import Sampled
from tests.support.fine_tuners import trainable, tuner, word_tokenizer
from tests.support.schedule_free import ScheduleFreeSGD
from tests.support.training_parts import packed_batches, quiet_trainer
from tests.training.test_rollouts import make_parts

NAMES = ("ScheduleFreeSGD", "AdamWScheduleFree", "RAdamScheduleFree", "SGDScheduleFree")


def factory_of(name):
    if name == "ScheduleFreeSGD":
        return functools.partial(ScheduleFreeSGD, lr=0.1)
    return functools.partial(getattr(pytest.importorskip("schedulefree"), name), lr=0.1 if "SGD" in name else 1e-2)


def make_tuner(mode="lora", *, name="ScheduleFreeSGD", **options):
    options = {"learning_rate": None, "scheduler": "constant", "warmup_share": 0.0, **options}
    return tuner(mode, optimizer=factory_of(name), **options)


def values(module):
    return {name: parameter.detach().clone() for name, parameter in trainable(module).items()}


def assert_same(one, other):
    assert one.keys() == other.keys()
    assert [name for name, tensor in one.items() if not torch.equal(tensor, other[name])] == []


def average_of(module, optimizer):
    """The average that a switch at this moment gives, from the parameters at y and the optimizer's own z."""
    beta = optimizer.param_groups[0].get("beta", optimizer.param_groups[0].get("betas", [0.9])[0])
    return {
        name: parameter.detach().lerp(optimizer.state[parameter]["z"], 1 - 1 / beta)
        if "z" in optimizer.state[parameter]
        else parameter.detach().clone()
        for name, parameter in trainable(module).items()
    }


class Watch(Callback):
    """y and x behind each step, and the weights that are there when a validation runs."""

    def __init__(self):
        self.points, self.averages, self.validated = [], [], []

    def on_train_batch_end(self, trainer, pl_module, *args):
        self.points.append(values(pl_module))
        self.averages.append(average_of(pl_module, trainer.optimizers[0]))

    def on_validation_batch_start(self, trainer, pl_module, *args):
        if self.points:
            self.validated.append((len(self.points), values(pl_module)))

    on_validation_end = on_validation_batch_start


def fit(module, folder, *, num_steps=6, callbacks=(), ckpt_path=None, has_validation=False, **options):
    seed_everything(7, verbose=False)
    trainer = quiet_trainer(
        folder, max_steps=num_steps, callbacks=list(callbacks), gradient_clip_val=1.0,
        **{"strategy": "fastft", "enable_checkpointing": True, "num_sanity_val_steps": 0, **options},
    )  # fmt: skip
    # One batch again and again: which comes next is the data module's.
    loaders = [DataLoader(packed_batches(1) * 12, batch_size=None)]
    if has_validation:
        loaders.append(DataLoader(packed_batches(1, seed=5), batch_size=None))
    trainer.fit(module, *loaders, ckpt_path=ckpt_path)
    return trainer


def saving(folder, *, every=1):
    return ModelCheckpoint(folder, filename="{step}", every_n_train_steps=every, save_top_k=-1)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("mode", ["lora_bf16", "full"])
def test_validations_saves_and_the_end_have_the_average_and_change_nothing(tmp_path, mode, name):
    plain, watched = Watch(), Watch()
    module = make_tuner(mode, name=name)
    fit(module, tmp_path, callbacks=[plain, ModelCheckpoint(tmp_path / "plain", every_n_epochs=100)])
    busy = make_tuner(mode, name=name)
    trainer = fit(
        busy, tmp_path, callbacks=[watched, saving(tmp_path, every=2)], has_validation=True, val_check_interval=1,
        num_sanity_val_steps=1,
    )  # fmt: skip
    for before, after in zip(plain.points, watched.points):
        assert_same(before, after)
    assert len(watched.validated) == 12
    for num_steps, seen in watched.validated:
        assert_same(seen, watched.averages[num_steps - 1])
    assert any(not torch.equal(watched.points[-1][key], tensor) for key, tensor in watched.averages[-1].items())
    assert_same(values(busy), watched.averages[-1])
    assert_same(values(module), plain.averages[-1])
    for step in (2, 4, 6):
        weights = torch.load(tmp_path / f"step={step}.ckpt", weights_only=True)["state_dict"]
        for key, expected in watched.averages[step - 1].items():
            assert torch.equal(weights[key], expected), (step, key)
    # In another form than those that the run computed with, if it did.
    found = trainer.validate(busy, DataLoader(packed_batches(1, seed=5), batch_size=None), verbose=False)
    assert found[0]["val_loss"] == pytest.approx(float(trainer.callback_metrics["val_loss"]))


def test_the_loss_of_a_validation_is_that_of_the_average(tmp_path):
    losses = []

    class Losses(Callback):
        def on_validation_end(self, trainer, pl_module):
            losses.append(float(trainer.callback_metrics["val_loss"]))

    module = make_tuner("lora_bf16")
    fit(module, tmp_path, callbacks=[Losses(), saving(tmp_path)], has_validation=True, val_check_interval=3)
    other = make_tuner("lora_bf16")
    trainer = quiet_trainer(tmp_path, strategy="fastft")
    loader = DataLoader(packed_batches(1, seed=5), batch_size=None)
    for step, loss in zip((3, 6), losses, strict=True):
        found = trainer.validate(other, loader, ckpt_path=tmp_path / f"step={step}.ckpt", verbose=False)
        assert found[0]["val_loss"] == loss


def test_compute_copies_follow_each_switch(tmp_path):
    """Recorded CUDA graphs read them where they are, and run none of the checks of a forward."""
    checked = []

    class Switch(Callback):
        def on_train_batch_end(self, trainer, pl_module, *args):
            for switch in (pl_module.use_average, pl_module.use_gradient_point):
                switch()
                copies = pl_module.low_precision_adapters._copies()
                checked.extend(torch.equal(copy.tensor, copy.master.bfloat16()) for copy in copies)

    fit(make_tuner("lora_bf16"), tmp_path, callbacks=[Switch()], num_steps=2)
    assert checked == [True] * 28 * 4


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("mode", ["lora_bf16", "full"])
@pytest.mark.parametrize("has_validation", [True, False])
def test_a_run_is_resumed_to_the_bit(tmp_path, mode, name, has_validation):
    """From checkpoints of a validation (which are saved at x) and of steps; with windows of two batches."""
    options = {"has_validation": has_validation, "accumulate_grad_batches": 2, "num_steps": 5}
    if has_validation:
        options["val_check_interval"] = 2
    whole, parts, again = make_tuner(mode, name=name), Watch(), Watch()
    keep = ModelCheckpoint(tmp_path, filename="{step}", save_top_k=-1, every_n_train_steps=3)
    first = fit(whole, tmp_path, callbacks=[parts, keep], **options)
    resumed = make_tuner(mode, name=name)
    second = fit(resumed, tmp_path / "b", callbacks=[again], ckpt_path=tmp_path / "step=3.ckpt", **options)
    assert_same(again.points[-1], parts.points[-1])
    assert_same(values(resumed), values(whole))
    for parameter, twin in zip(trainable(resumed).values(), trainable(whole).values()):
        states = [run.optimizers[0].state[each] for run, each in ((second, parameter), (first, twin))]
        assert all(torch.equal(tensor, states[1][key]) for key, tensor in states[0].items())


def test_a_stopped_run_and_a_finished_one_are_continued_to_the_bit(tmp_path):
    class Stop(Callback):
        def on_train_batch_end(self, trainer, pl_module, *args):
            if trainer.global_step == 2:
                os.kill(os.getpid(), signal.SIGUSR1)

    whole = Watch()
    fit(make_tuner(), tmp_path / "whole", callbacks=[whole])
    stopped = make_tuner()
    with pytest.raises(SystemExit):
        fit(stopped, tmp_path / "a", callbacks=[Stop(), ModelCheckpoint(tmp_path / "a", every_n_epochs=9)])
    assert_same(values(stopped), whole.averages[1])
    (file,) = (tmp_path / "a").glob("stopped-step=*.ckpt")
    module = make_tuner()
    trainer = fit(module, tmp_path / "b", ckpt_path=file)
    assert_same(values(module), whole.averages[-1])
    trainer.validate(module, DataLoader(packed_batches(1), batch_size=None), verbose=False)
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    longer, twin = Watch(), Watch()
    fit(make_tuner(), tmp_path / "c", num_steps=8, callbacks=[twin])
    with pytest.warns(UserWarning, match="max_steps"):
        fit(make_tuner(), tmp_path / "d", num_steps=8, callbacks=[longer], ckpt_path=tmp_path / "end.ckpt")
    assert_same(longer.points[-1], twin.points[-1])


def test_files_of_adapters_have_the_average(tmp_path):
    class Export(Callback):
        def on_train_batch_end(self, trainer, pl_module, *args):
            pl_module.save_pretrained(str(tmp_path / f"adapter-{trainer.global_step}"))

    watch, module = Watch(), make_tuner()
    fit(module, tmp_path, callbacks=[watch, Export(), saving(tmp_path)])
    module.save_pretrained(str(tmp_path / "end"))
    FineTuner.load_from_checkpoint(tmp_path / "step=3.ckpt")
    for folder, step in (("adapter-3", 3), ("end", 6)):
        saved = load_file(tmp_path / folder / "adapter_model.safetensors")
        found = {key.removeprefix("base_model."): tensor for key, tensor in saved.items()}
        expected = {
            key.removeprefix("model.base_model.").replace(".default", ""): tensor
            for key, tensor in watch.averages[step - 1].items()
        }
        assert_same(found, expected)


def test_a_run_that_fails_leaves_the_average(tmp_path):
    class Fail(Callback):
        def on_train_batch_end(self, trainer, pl_module, *args):
            if trainer.global_step == 3:
                raise RuntimeError("planned")

    watch, module = Watch(), make_tuner("lora_bf16")
    with pytest.raises(RuntimeError, match="planned"):
        fit(module, tmp_path, callbacks=[watch, Fail()])
    assert_same(values(module), watch.averages[-1])


def test_a_second_fit_begins_at_the_average(tmp_path):
    module, watch = make_tuner(), Watch()
    fit(module, tmp_path)
    average = values(module)
    fit(module, tmp_path, num_steps=1, callbacks=[watch])
    assert all(not torch.equal(watch.points[0][key], tensor) for key, tensor in average.items() if "lora_B" in key)
    twin = make_tuner()
    twin.configure_model()
    for key, parameter in trainable(twin).items():
        parameter.data.copy_(average[key])
    other = Watch()
    fit(twin, tmp_path, num_steps=1, callbacks=[other])
    assert_same(watch.points[0], other.points[0])


@pytest.mark.filterwarnings("ignore:A checkpoint was saved inside an accumulation window")
@pytest.mark.parametrize("hook", ["on_after_backward", "on_before_optimizer_step", "on_before_zero_grad"])
def test_a_save_within_a_step_changes_nothing(tmp_path, hook):
    within = []

    class Save(Callback):
        def save(self, trainer, *args):
            if trainer.global_step == 2:
                trainer.save_checkpoint(tmp_path / "within.ckpt")

        def on_before_backward(self, trainer, pl_module, loss):
            loss.register_hook(lambda _: within.append(values(pl_module)))

    setattr(Save, hook, Save.save)
    plain, watch = Watch(), Watch()
    options = {"accumulate_grad_batches": 2, "num_steps": 3, "enable_checkpointing": False}
    fit(make_tuner(), tmp_path, callbacks=[plain], **options)
    if hook == "on_before_zero_grad":
        # Between forward and backward; torch refuses changed weights of its own functions, whatever their values.
        with pytest.raises(RuntimeError, match="inplace"):
            fit(make_tuner(), tmp_path, callbacks=[watch, Save()], **options)
        # Functions of ours read them in the backward.
        assert_same(within[-1], plain.points[len(within) - 2])
        return
    fit(make_tuner(), tmp_path, callbacks=[watch, Save()], **options)
    assert_same(plain.points[-1], watch.points[-1])


def test_rollouts_are_of_the_point_where_gradients_are_taken(tmp_path):
    """Whether a checkpoint was saved before a round or not."""
    sampled, watch = [], Watch()

    def sampler(policy, prompts, *, num_completions, seed, **_):
        sampled.append(values(policy))
        return [[Sampled([2 + (seed + number) % 10, 1]) for number in range(num_completions)] for _ in prompts]

    def reward(*, prompts, completions, answer):
        return [float(number % 2) for number in range(len(completions))]

    policy, data = make_parts(
        learning_rate=None,
        tuner_options={"optimizer": functools.partial(ScheduleFreeSGD, lr=1.0)},
        sampler=sampler,
        rewards=reward,
        max_new_tokens=2,
    )
    trainer = quiet_trainer(
        tmp_path, max_steps=4, strategy="fastft", callbacks=[watch, saving(tmp_path)], enable_checkpointing=True
    )
    trainer.fit(policy, data)
    assert any(not torch.equal(watch.averages[2][name], tensor) for name, tensor in watch.points[2].items())
    for found, expected in zip(sampled[1:], watch.points):
        assert_same(found, expected)


def test_gradient_health_sees_tensors_move(tmp_path):
    health = GradientHealth(num_steps=4)
    fit(make_tuner("lora_bf16"), tmp_path, callbacks=[health, saving(tmp_path)])
    assert "28 tensors moved" in health.status().reason


def test_an_optimizer_of_a_subclass_needs_no_option(tmp_path):
    module, watch = make_tuner(scheduler="cosine"), Watch()
    module.configure_optimizers = lambda: ScheduleFreeSGD(trainable(module).values())
    fit(module, tmp_path, callbacks=[watch])
    assert_same(values(module), watch.averages[-1])
    with pytest.raises(OptionError, match="EMAWeightAveraging"):
        fit(module, tmp_path, callbacks=[EMAWeightAveraging()])


def test_texts_are_written_by_the_average(tmp_path, monkeypatch):
    seen = []

    class Write(Callback):
        def on_train_batch_end(self, trainer, pl_module, *args):
            pl_module.generate(["w3 w4"], max_new_tokens=1)

    def generate(model, **options):
        seen.append(values(model))
        return [""]

    monkeypatch.setattr("lightning_fastft.hf.generation.generate_texts", generate)
    watch = Watch()
    fit(make_tuner(tokenizer=word_tokenizer()), tmp_path, callbacks=[watch, Write()], num_steps=3)
    for found, expected in zip(seen, watch.averages, strict=True):
        assert_same(found, {name.removeprefix("model."): tensor for name, tensor in expected.items()})


@pytest.mark.parametrize("scheduler", ["cosine", "linear"])
def test_a_falling_schedule_is_refused(tmp_path, scheduler):
    with pytest.raises(OptionError, match="scheduler='constant'"):
        fit(make_tuner(scheduler=scheduler), tmp_path)


def test_a_second_average_is_refused(tmp_path):
    with pytest.raises(OptionError, match="EMAWeightAveraging"):
        fit(make_tuner(), tmp_path, callbacks=[EMAWeightAveraging()])


def test_shards_are_refused(tmp_path):
    with pytest.raises(OptionError, match="fastft_ddp"):
        fit(make_tuner("full"), tmp_path, strategy="fastft_fsdp")


@pytest.mark.parametrize("name", NAMES)
def test_a_bad_step_is_skipped(tmp_path, name):
    class Spoil(Callback):
        def on_after_backward(self, trainer, pl_module):
            if trainer.global_step == 1:
                next(iter(trainable(pl_module).values())).grad.view(-1)[0] = float("nan")

    guard, watch = FiniteGuard(unsupported="wait"), Watch()
    with pytest.warns(UserWarning, match="step 2 was skipped"):
        fit(make_tuner(name=name), tmp_path, callbacks=[Spoil(), guard, watch], num_steps=3)
    assert guard.num_skipped == 1
    assert_same(watch.points[0], watch.points[1])
    assert all(torch.isfinite(tensor).all() for tensor in watch.points[2].values())


@pytest.mark.parametrize("name", NAMES)
def test_the_step_is_measured_on_the_meta_device(name):
    params = [torch.nn.Parameter(torch.ones(64, 64)) for _ in range(2)]
    num_tensors = 1 if "SGD" in name else 2
    optimizer = factory_of(name)(params)
    assert [each.device for each in measure_state(optimizer)] == [num_tensors * 4 * 4096] * 2
    assert missing_optimizer_bytes([optimizer]) == 2 * 2 * 4 * 4096
    assert not optimizer.param_groups[0]["train_mode"]
