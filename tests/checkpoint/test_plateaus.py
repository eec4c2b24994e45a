"""ReduceLROnPlateau in resumed runs: it moves where it does in an uninterrupted one."""

import warnings
from functools import partial

import pytest
import torch
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import Callback
from torch.optim.lr_scheduler import ReduceLROnPlateau

from tests.support.fine_tuners import tuner
from tests.support.training_parts import quiet_data, quiet_trainer

# No metric is that much better, so that the rate falls whenever it may.
NEVER_BETTER = {"patience": 0, "threshold": 10.0, "factor": 0.5}
ROWS = [{"input_ids": [number, 2, 3, 4, 5, 6]} for number in range(7, 11)]


class Watch(Callback):
    """Record the rate of each step, and save at the call of a hook of this number."""

    def __init__(self, hook="", number=0, path=None):
        self.hook, self.number, self.path, self.num_calls, self.rates = hook, number, path, 0, []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.rates.append(optimizer.param_groups[0]["lr"])

    def _count(self, hook, trainer):
        self.num_calls += hook == self.hook and not trainer.sanity_checking
        if hook == self.hook and self.num_calls == self.number and not trainer.sanity_checking:
            trainer.save_checkpoint(self.path)

    def on_train_batch_end(self, trainer, *_):
        self._count("batch", trainer)

    def on_validation_batch_end(self, trainer, *_):
        self._count("in validation", trainer)

    def on_validation_end(self, trainer, *_):
        self._count("validation", trainer)

    def on_train_epoch_end(self, trainer, *_):
        self._count("epoch", trainer)

    def on_train_end(self, trainer, *_):
        self._count("end", trainer)


def run(folder, watch, *, ckpt_path=None, **options):
    seed_everything(7, verbose=False)
    module = tuner("lora", scheduler=partial(ReduceLROnPlateau, **NEVER_BETTER))
    data = quiet_data(ROWS, max_tokens=6, val_paths=ROWS[:2])
    options = {"max_steps": -1, "max_epochs": 3, "strategy": "fastft", "num_sanity_val_steps": 0, **options}
    trainer = quiet_trainer(folder, callbacks=[watch], **options)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        trainer.fit(module, data, ckpt_path=ckpt_path)
    weights = torch.cat([each.detach().flatten() for each in module.parameters() if each.requires_grad])
    return watch.rates, weights, [each for each in found if "ReduceLROnPlateau" in str(each.message)]


@pytest.mark.parametrize(
    ("hook", "number", "options"),
    [
        ("batch", 2, {}),
        ("batch", 5, {}),
        ("validation", 1, {}),
        ("validation", 2, {}),
        ("validation", 1, {"val_check_interval": 0.5}),
        ("epoch", 1, {}),
        ("epoch", 2, {}),
    ],
)
def test_a_resumed_run_has_the_rates_and_weights_of_an_uninterrupted_one(tmp_path, hook, number, options):
    path = tmp_path / "a.ckpt"
    rates, weights, _ = run(tmp_path, Watch(hook, number, path), **options)
    # It falls after each epoch.
    assert len(set(rates)) == len(rates) // 4
    resumed, resumed_weights, said = run(tmp_path, Watch(), ckpt_path=path, **options)
    assert rates[-len(resumed) :] == resumed
    assert torch.equal(weights, resumed_weights)
    assert not said


def test_a_run_that_goes_on_behind_its_end_does_not_move_twice(tmp_path):
    path = tmp_path / "a.ckpt"
    rates, weights, _ = run(tmp_path, Watch())
    run(tmp_path, Watch("end", 1, path), max_epochs=2)
    resumed, resumed_weights, _ = run(tmp_path, Watch(), ckpt_path=path)
    assert resumed == rates[-4:]
    assert torch.equal(weights, resumed_weights)


@pytest.mark.parametrize(("hook", "number"), [("batch", 4), ("in validation", 1)])
def test_a_move_that_is_lost_is_said(tmp_path, hook, number):
    path = tmp_path / "a.ckpt"
    run(tmp_path, Watch(hook, number, path))
    resumed, _, said = run(tmp_path, Watch(), ckpt_path=path)
    assert len(said) == 1
    assert resumed == [1e-2] * 4 + [5e-3] * 4
