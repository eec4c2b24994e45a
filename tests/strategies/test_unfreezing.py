"""Callbacks that unfreeze layers during a run: schedules include their groups, resumed runs continue to train them, and
ranks average their gradients.
"""

import math

import pytest
import torch
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import BackboneFinetuning, Callback
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM

from lightning_fastft.callbacks.gradient_health import GradientHealth
from lightning_fastft.core.errors import OptionError
from lightning_fastft.strategies.registry import register_strategies
from lightning_fastft.training.fine_tuner import FineTuner
from lightning_fastft.training.optimization.schedules import RunSchedule
from tests.strategies.unfreezing_worker import NUM_EPOCHS, NUM_RANKS, Unfreeze, train
from tests.support.fine_tuners import CONFIG, LORA
from tests.support.training_parts import PlainModule, packed_batches, quiet_trainer, tiny_llama
from tests.support.two_ranks import run_two_ranks

register_strategies()

NUM_BATCHES = 4


def plain():
    return PlainModule(tiny_llama())


def tuner(**options):
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**CONFIG)).train()
    return FineTuner(model, learning_rate=1e-2, **options)


MODULES = {
    "module": plain,
    "tuner": tuner,
    "tuner, two groups": lambda: tuner(weight_decay=0.1, scheduler="linear"),
    "tuner, AdamW": lambda: tuner(optimizer=torch.optim.AdamW, scheduler="constant"),
}


class Rates(Callback):
    """Keeps the rates of every step, and saves after one of them."""

    def __init__(self, step=0, path=None):
        self.step, self.path, self.rates = step, path, []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.rates.append([group["lr"] for group in optimizer.param_groups])

    def on_train_batch_end(self, trainer, *args):
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


def run(make, folder, *, callbacks, **options):
    seed_everything(3, verbose=False)
    module = make()
    # All batches are equal, because a plain loader begins an epoch anew.
    loader = DataLoader(packed_batches(1) * NUM_BATCHES, batch_size=None)
    trainer = quiet_trainer(folder, strategy="fastft", max_epochs=NUM_EPOCHS, max_steps=-1, callbacks=callbacks)
    trainer.fit(module, loader, **options)
    return module, trainer


@pytest.mark.parametrize("name", MODULES)
def test_unfrozen_layers_are_trained_at_the_rates_of_the_schedule(name, tmp_path):
    rates = Rates()
    module, trainer = run(MODULES[name], tmp_path, callbacks=[Unfreeze(), rates])
    first = NUM_BATCHES
    num_groups = len(trainer.optimizers[0].param_groups)
    assert [len(step) for step in rates.rates] == [num_groups - 1] * first + [num_groups] * first * 2
    for step in rates.rates[first:]:
        assert step[-1] == pytest.approx(step[0] / 2, rel=1e-12)
    seed_everything(3, verbose=False)
    for (key, before), after in zip(MODULES[name]().named_parameters(), module.parameters(), strict=True):
        assert not torch.equal(before, after), key


@pytest.mark.parametrize("step", [2, 4, 6, 8, 9])
@pytest.mark.parametrize("name", MODULES)
def test_resumed_run_continues_to_train_unfrozen_layers(name, step, tmp_path):
    path = tmp_path / "a.ckpt"
    whole, _ = run(MODULES[name], tmp_path, callbacks=[Unfreeze(), Rates(step, path)])
    resumed, _ = run(MODULES[name], tmp_path, callbacks=[Unfreeze()], ckpt_path=path)
    for (key, value), other in zip(whole.named_parameters(), resumed.parameters(), strict=True):
        assert other.requires_grad, key
        assert torch.equal(value, other), key


class FreezeFirstLayer(Callback):
    """Freezes a layer in the middle of the run, and trains it again later."""

    def on_train_batch_start(self, trainer, pl_module, *args):
        if trainer.global_step in (3, 8):
            for name, parameter in pl_module.named_parameters():
                if "layers.0." in name:
                    parameter.requires_grad = trainer.global_step == 8


@pytest.mark.parametrize("step", [2, 5, 9])
@pytest.mark.parametrize("name", MODULES)
def test_resumed_run_leaves_layers_frozen_that_were_frozen_in_the_middle(name, step, tmp_path):
    path = tmp_path / "a.ckpt"
    whole, _ = run(MODULES[name], tmp_path, callbacks=[FreezeFirstLayer(), GradientHealth(), Rates(step, path)])
    resumed, _ = run(MODULES[name], tmp_path, callbacks=[FreezeFirstLayer(), GradientHealth()], ckpt_path=path)
    for (key, value), other in zip(whole.named_parameters(), resumed.parameters(), strict=True):
        assert torch.equal(value, other), key


def test_flags_that_a_new_run_chooses_itself_are_left_alone(tmp_path):
    path = tmp_path / "a.ckpt"
    run(plain, tmp_path, callbacks=[Unfreeze(), Rates(6, path)])

    def frozen():
        module = PlainModule(tiny_llama())
        module.model.lm_head.requires_grad_(False)
        # The optimizer of the checkpoint has it.
        module.configure_optimizers = lambda: torch.optim.AdamW(module.parameters(), weight_decay=0.0)
        return module

    module, _ = run(frozen, tmp_path, callbacks=[Unfreeze()], ckpt_path=path)
    assert [key for key, value in module.named_parameters() if not value.requires_grad] == ["model.lm_head.weight"]


def test_rates_that_a_callback_sets_follow_the_schedule():
    weights = [torch.nn.Parameter(torch.ones(1)) for _ in range(2)]
    optimizer = torch.optim.SGD(weights[:1], lr=1.0)
    schedule = RunSchedule(optimizer, lambda step: 1 / (1 + step))
    steps = []
    for step in range(6):
        if step == 2:
            optimizer.add_param_group({"params": weights[1:], "lr": 0.1})
        if step == 4:
            optimizer.param_groups[1]["lr"] = 1.0
        optimizer.step()
        schedule.step()
        steps.append([group["lr"] for group in optimizer.param_groups])
    assert [step[0] for step in steps] == [1 / (2 + step) for step in range(6)]
    expected = [0.3 / 4, 0.3 / 5, 5 / 6, 5 / 7]
    assert all(math.isclose(step[1], value) for step, value in zip(steps[2:], expected, strict=True))


@pytest.mark.parametrize("callback", [Unfreeze(), BackboneFinetuning()], ids=lambda callback: type(callback).__name__)
def test_unfreezing_the_base_of_adapters_is_refused(callback, tmp_path):
    with pytest.raises(OptionError, match="modules_to_save"):
        run(lambda: tuner(lora=LORA), tmp_path, callbacks=[callback])


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("unfreezing")
    run_two_ranks("tests.strategies.unfreezing_worker", folder)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(NUM_RANKS)]


@pytest.mark.slow
def test_ranks_average_the_gradients_of_unfrozen_layers(two_ranks):
    first, second = (rank["weights"] for rank in two_ranks)
    one_process = train("fastft")
    for name, value in first.items():
        assert torch.equal(value, second[name]), name
        torch.testing.assert_close(value, one_process[name], rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.slow
def test_finetuning_callbacks_are_refused_where_parameters_are_shards(two_ranks):
    assert all("Unfreeze" in rank["refused"] and "fastft_ddp" in rank["refused"] for rank in two_ranks)
