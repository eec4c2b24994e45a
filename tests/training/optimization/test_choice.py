"""The optimizer and the schedule of a FineTuner."""

import functools
import gc

import pytest
import torch
from lightning.pytorch.callbacks import Callback, GradientAccumulationScheduler, ModelCheckpoint
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.trainer_pt_utils import get_parameter_names

from lightning_fastft.core.errors import OptionError
from lightning_fastft.kernels.adamw_step.op import TensorTable
from lightning_fastft.strategies.registry import register_strategies
from lightning_fastft.training.fine_tuner import FineTuner
from lightning_fastft.training.optimizer import FusedAdamW
from tests.support.fine_tuners import CONFIG, MODES, fit, trainable, tuner
from tests.support.sizes import sizes
from tests.support.tiny_models import build_tiny
from tests.support.training_parts import VOCAB_SIZE, packed_loader, quiet_trainer

register_strategies()

COHERE = AutoConfig.for_model(
    "cohere", **sizes(vocab=VOCAB_SIZE, width=32, inner=40, layers=2, heads=4, key_heads=2), use_qk_norm=True
)


def shares(module, num_steps=-1, *, folder=None, num_batches=4, callbacks=(), ckpt_path=None, **options):
    """Learning rates of a run, as shares of the peak, recorded by the optimizer itself."""
    found = []

    class Record(Callback):
        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            found.append(optimizer.param_groups[0]["lr"] / module.learning_rate)

    options = {"accumulate_grad_batches": 2, **options}
    trainer = quiet_trainer(folder, max_steps=num_steps, strategy="fastft", callbacks=[Record(), *callbacks], **options)
    trainer.fit(module, packed_loader(num_batches), ckpt_path=ckpt_path)
    return found


@pytest.mark.filterwarnings("ignore:Resumed with another setting")
def test_a_resumed_run_with_steps_of_another_size_ends_its_schedule(tmp_path):
    """Of 3 epochs of 12 batches, a step has other numbers of batches in the second, and again in the third."""
    module = tuner(warmup_steps=0, scheduler="linear")

    def run(accumulate, *, after=None):
        saving = ModelCheckpoint(tmp_path, filename="{step}", save_top_k=-1)
        return shares(
            module, num_batches=12, max_epochs=3, callbacks=[saving], accumulate_grad_batches=accumulate,
            folder=tmp_path, enable_checkpointing=True,
            ckpt_path=None if after is None else tmp_path / f"step={after}.ckpt",
        )  # fmt: skip

    def falling(num_steps, *, num_done=0):
        return pytest.approx([1 - step / num_steps for step in range(num_done, num_steps)])

    assert run(2) == falling(18)
    assert run(4, after=6) == falling(9, num_done=3)
    assert run(1, after=6) == falling(36, num_done=12)
    assert run(4, after=9) == falling(9, num_done=6)
    assert run(2, after=9) == falling(18, num_done=12)
    # A module that was resumed starts a run of its own at the beginning.
    assert run(2) == falling(18)


@pytest.mark.filterwarnings("ignore:Resumed with another setting")
def test_a_number_of_steps_stays_the_length_of_a_resumed_schedule(tmp_path):
    saving = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=2, save_top_k=-1)
    options = {"folder": tmp_path, "enable_checkpointing": True, "num_batches": 4}
    plain = {"warmup_steps": 0, "scheduler": "linear"}
    shares(tuner(**plain), 8, callbacks=[saving], **options)
    found = shares(tuner(**plain), 8, accumulate_grad_batches=4, ckpt_path=tmp_path / "step=2.ckpt", **options)
    assert found == pytest.approx([1 - step / 8 for step in range(2, 8)])


@pytest.mark.filterwarnings("ignore:Resumed with another setting")
@pytest.mark.parametrize("num_epochs", [2, 4])
def test_a_run_that_goes_on_for_longer_has_its_own_rate_from_its_first_step(tmp_path, num_epochs):
    saving = ModelCheckpoint(tmp_path, filename="{step}", save_top_k=-1)
    options = {"folder": tmp_path, "enable_checkpointing": True, "num_batches": 4}
    plain = {"warmup_steps": 0, "scheduler": "linear"}
    shares(tuner(**plain), max_epochs=num_epochs, callbacks=[saving], **options)
    found = shares(tuner(**plain), max_epochs=3, ckpt_path=tmp_path / "step=4.ckpt", **options)
    # At the end of two epochs the rate of the first run is 0; of four, it is half of the peak.
    assert found == pytest.approx([1 - step / 6 for step in range(4, 6)])


@pytest.mark.filterwarnings("ignore:Resumed with another setting")
def test_a_second_fit_of_a_trainer_says_that_its_schedule_ends_too_early(tmp_path):
    module, saved = tuner(warmup_steps=0, scheduler="linear"), tmp_path / "a.ckpt"
    trainer = quiet_trainer(tmp_path, max_epochs=1, max_steps=-1, strategy="fastft")
    trainer.fit(module, packed_loader(4))
    trainer.save_checkpoint(saved)
    trainer.fit_loop.max_epochs = 2
    with pytest.warns(UserWarning, match="trained 4 of 8 optimizer steps"):
        trainer.fit(module, packed_loader(4))
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.5 * module.learning_rate)
    # A checkpoint brings its place in the schedule.
    trainer.fit(module, packed_loader(4), ckpt_path=saved)
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.0


def test_schedules_rise_and_fall_as_described():
    assert shares(tuner(warmup_steps=3), 7) == pytest.approx(
        [1 / 3, 2 / 3, 1.0, 0.904508, 0.654508, 0.345492, 0.095492], abs=1e-6
    )
    assert shares(tuner(warmup_share=0.5, scheduler="linear", min_learning_rate_share=0.2), 4) == pytest.approx(
        [0.5, 1.0, 0.733333, 0.466667], abs=1e-6
    )
    assert shares(tuner(warmup_steps=0, scheduler="constant"), 3) == pytest.approx([1.0, 1.0, 1.0])
    assert shares(tuner(warmup_steps=100), 2) == pytest.approx([0.01, 0.02])


def test_scheduler_of_the_users_own_moves_per_step_or_epoch(tmp_path):
    halve = {"scheduler": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)}
    assert shares(tuner(**halve), 3) == pytest.approx([1.0, 0.5, 0.25])
    assert shares(tuner(**halve, scheduler_interval="epoch"), 5) == pytest.approx([1.0, 1.0, 0.5, 0.5, 0.25])
    plateau = tuner(scheduler=lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0))
    trainer = quiet_trainer(tmp_path, strategy="fastft", max_steps=-1, max_epochs=2)
    trainer.fit(plateau, packed_loader(2), packed_loader(1))
    assert trainer.lr_scheduler_configs[0].monitor == "val_loss"


def steps_down(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 1)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"scheduler_interval": "epoch"}, "scheduler_interval='epoch'.*scheduler='cosine'"),
        ({"scheduler": "constant", "scheduler_interval": "epoch"}, "scheduler_interval='epoch'.*scheduler='constant'"),
        ({"scheduler": steps_down, "warmup_share": 0.1}, "warmup_share=0.1"),
        ({"scheduler": steps_down, "warmup_steps": 3}, "warmup_steps=3"),
        ({"optimizer": torch.optim.Rprop, "weight_decay": 0.1}, "weight_decay=0.1 has no effect on Rprop"),
    ],
)
def test_options_without_an_effect_are_refused(tmp_path, options, named):
    with pytest.raises(OptionError, match=named):
        fit(tuner(**options), tmp_path)


@pytest.mark.parametrize(
    "options",
    [
        {"scheduler": steps_down, "warmup_share": 0.0},
        {"optimizer": torch.optim.Rprop, "weight_decay": 0.0},
        {"optimizer": torch.optim.RMSprop, "weight_decay": 0.1},
    ],
)
def test_options_that_do_what_they_say_are_taken(tmp_path, options):
    assert fit(tuner(**options), tmp_path, max_steps=1).global_step == 1


def test_a_tuner_without_the_scheduler_of_its_checkpoint_is_loaded_and_refused_by_a_fit(tmp_path):
    module = tuner(scheduler=steps_down, scheduler_interval="epoch")
    fit(module, tmp_path, max_steps=1).save_checkpoint(tmp_path / "a.ckpt")
    loaded = FineTuner.load_from_checkpoint(tmp_path / "a.ckpt")
    with pytest.raises(OptionError, match="scheduler_interval"):
        fit(loaded, tmp_path)


def test_a_callback_that_changes_accumulation_is_refused_unless_steps_are_counted(tmp_path):
    run = functools.partial(shares, folder=tmp_path, accumulate_grad_batches=1, max_epochs=2)
    with pytest.raises(OptionError, match="GradientAccumulationScheduler"):
        run(tuner(), callbacks=[GradientAccumulationScheduler({1: 2})])
    found = run(tuner(scheduler="linear", warmup_share=0.0), 6, callbacks=[GradientAccumulationScheduler({1: 2})])
    assert found == pytest.approx([1 - step / 6 for step in range(6)])
    assert len(run(tuner(scheduler="constant"), callbacks=[GradientAccumulationScheduler({1: 2})])) == 6


def test_schedule_without_an_end_is_refused(tmp_path):
    with pytest.raises(OptionError, match="max_steps"):
        fit(tuner(), tmp_path, max_steps=-1, max_epochs=-1)
    trainer = fit(
        tuner(scheduler="constant", warmup_steps=2), tmp_path, max_steps=-1, max_epochs=-1, max_time={"seconds": 0.01}
    )
    assert trainer.optimizers[0].param_groups[0]["lr"] <= 1e-2


def built_optimizer(tmp_path, **options):
    return fit(tuner(**{"learning_rate": None, **options}), tmp_path, max_steps=1).optimizers[0]


@pytest.mark.parametrize("mode", ["full", "lora", "lora_bf16"])
def test_default_optimizer_of_fp32_masters_is_adamw_in_one_pass(tmp_path, mode):
    optimizer = built_optimizer(tmp_path, mode=mode)
    assert type(optimizer) is FusedAdamW
    assert {(group["initial_lr"], group["weight_decay"]) for group in optimizer.param_groups} == {(2e-4, 0.0)}
    # After the run the optimizer holds nothing but its state.
    gc.collect()
    assert not any(type(each) is TensorTable for each in gc.get_objects())


@pytest.mark.parametrize(
    "options", [{"mode": "full", "dtype": "bfloat16"}, {"mode": "lora_bf16", "adapter_dtype": "bfloat16"}]
)
def test_default_optimizer_of_narrow_weights_keeps_their_averages_narrow(tmp_path, options):
    optimizer = built_optimizer(tmp_path, **options)
    assert type(optimizer) is torch.optim.AdamW
    assert all(group["fused"] for group in optimizer.param_groups)
    assert {state["exp_avg"].dtype for state in optimizer.state.values()} == {torch.bfloat16}


def test_optimizer_of_the_users_own_keeps_its_options_unless_ours_are_given(tmp_path):
    def make(parameters):
        return torch.optim.SGD(parameters, lr=0.3, weight_decay=0.2)

    assert built_optimizer(tmp_path, optimizer=make).param_groups[0]["initial_lr"] == 0.3
    assert built_optimizer(tmp_path, optimizer=make).param_groups[0]["weight_decay"] == 0.2
    group = built_optimizer(tmp_path, optimizer=make, learning_rate=0.1, weight_decay=0.5).param_groups[0]
    assert (group["initial_lr"], group["weight_decay"]) == (0.1, 0.5)


def test_weight_decay_spares_vectors(tmp_path):
    optimizer = built_optimizer(tmp_path, lora=None, weight_decay=0.1)
    for group in optimizer.param_groups:
        assert {parameter.ndim > 1 for parameter in group["params"]} == {group["weight_decay"] == 0.1}
    assert len(optimizer.param_groups) == 2


@pytest.mark.parametrize(
    ("family", "spared"),
    [("gpt_oss", {"gate_up_proj_bias", "down_proj_bias"}), ("cohere", {"q_norm.weight", "k_norm.weight"})],
)
def test_weight_decay_spares_biases_and_norms_that_are_matrices(tmp_path, family, spared):
    model = AutoModelForCausalLM.from_config(COHERE) if family == "cohere" else build_tiny(family, attention="eager")
    module = FineTuner(model, weight_decay=0.1)
    groups = fit(module, tmp_path, max_steps=1).optimizers[0].param_groups
    decay_of = {parameter: group["weight_decay"] for group in groups for parameter in group["params"]}
    names = [name for name, parameter in module.named_parameters() if decay_of[parameter] == 0.0]
    # Of transformers' Trainer, which decays vectors with other names (sinks).
    patterns = [r"bias", r"layernorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]
    decayed = get_parameter_names(model, [torch.nn.LayerNorm], patterns)
    assert set(names) == {
        f"model.{name}" for name, weight in model.named_parameters() if name not in decayed or weight.ndim == 1
    }
    found = [name for name, parameter in module.named_parameters() if decay_of[parameter] == 0.0 and parameter.ndim > 1]
    assert len(found) == 2 * len(spared)
    assert all(name.endswith(tuple(spared)) for name in found)


def test_model_with_nothing_to_train_is_refused(tmp_path):
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**CONFIG)).requires_grad_(False)
    with pytest.raises(OptionError, match="no trainable parameter"):
        fit(FineTuner(model), tmp_path)


@pytest.mark.covering
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("weight_decay", [None, 0.1])
def test_optimizer_holds_every_live_trainable_parameter_once(tmp_path, mode, weight_decay):
    module = tuner(mode, weight_decay=weight_decay)
    trainer = fit(module, tmp_path)
    held = [id(parameter) for group in trainer.optimizers[0].param_groups for parameter in group["params"]]
    assert sorted(held) == sorted(id(parameter) for parameter in trainable(module).values())
    assert held
