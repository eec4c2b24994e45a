"""Options of optimizers and schedulers that a resumed run has from its checkpoint: the run says which differ."""

import re
import warnings
from functools import partial

import pytest
import torch
from lightning.pytorch import seed_everything
from torch.optim import lr_scheduler

from tests.support.fine_tuners import tuner
from tests.support.training_parts import PlainModule, SaveAtStep, packed_loader, quiet_trainer, tiny_llama


def fit(module, folder, *, ckpt_path=None, **options):
    seed_everything(7, verbose=False)
    trainer = quiet_trainer(folder, strategy="fastft", **options)
    trainer.fit(module, packed_loader(), ckpt_path=ckpt_path)
    return trainer


def resume(folder, before, now):
    """Return what a run says that resumes after one step, and its Trainer."""
    fit(before(), folder, callbacks=[SaveAtStep(1, folder / "a.ckpt")], max_steps=2)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        trainer = fit(now(), folder, ckpt_path=folder / "a.ckpt", max_steps=2)
    said = (str(warning.message) for warning in found)
    return [line for line in said if "another" in line], trainer


def made(scheduler="constant", *, lr=1e-3, **options):
    optimizer = partial(torch.optim.SGD, lr=lr)
    return partial(tuner, optimizer=optimizer, learning_rate=None, warmup_share=0.0, scheduler=scheduler, **options)


def one_cycle(peak, optimizer):
    return lr_scheduler.OneCycleLR(optimizer, max_lr=peak, total_steps=9, cycle_momentum=False)


def in_sequence(step_size, milestone, optimizer):
    parts = [lr_scheduler.ConstantLR(optimizer), lr_scheduler.StepLR(optimizer, step_size)]
    return lr_scheduler.SequentialLR(optimizer, parts, [milestone])


def of_kind(kind, **options):
    return made(partial(kind, **options))


@pytest.mark.parametrize(
    ("before", "now", "lines"),
    [
        (made(), made(lr=5e-5), ["RunSchedule .*: lr was 0.001 and is 5e-05"]),
        (
            made("cosine"),
            made("linear", lr=5e-5),
            ["scheduler was 'cosine'.*this run's", "RunSchedule .*: lr was 0.001"],
        ),
        (made(), made(), []),
        (tuner, partial(tuner, learning_rate=1e-3), ["setting.*: learning_rate was 0.01 and is 0.001"]),
        (
            partial(tuner, loraplus_lr_ratio=2.0),
            partial(tuner, loraplus_lr_ratio=4.0),
            ["loraplus_lr_ratio was 2.0 and is 4.0"],
        ),
        (made(partial(one_cycle, 1e-3)), made(partial(one_cycle, 2e-3)), ["OneCycleLR .*: lr was 4e-05 and is 8e-05"]),
        (
            of_kind(lr_scheduler.CosineAnnealingLR, T_max=2),
            of_kind(lr_scheduler.CosineAnnealingLR, T_max=8, eta_min=1e-5),
            ["CosineAnnealingLR .*: T_max was 2 and is 8", "CosineAnnealingLR .*: eta_min was 0.0 and is 1e-05"],
        ),
        (
            of_kind(lr_scheduler.MultiStepLR, milestones=[2, 4]),
            of_kind(lr_scheduler.MultiStepLR, milestones=[2, 6]),
            ["MultiStepLR .*: milestones was"],
        ),
        (
            of_kind(lr_scheduler.CosineAnnealingWarmRestarts, T_0=1),
            of_kind(lr_scheduler.CosineAnnealingWarmRestarts, T_0=1),
            [],
        ),
        (
            made(partial(in_sequence, 2, 1)),
            made(partial(in_sequence, 3, 4)),
            ["SequentialLR .*: milestones was .1. and is .4.", "StepLR .*: step_size was 2 and is 3"],
        ),
        (
            made(partial(lr_scheduler.LambdaLR, lr_lambda=lambda step: 1.0)),
            made(partial(lr_scheduler.LambdaLR, lr_lambda=lambda step: 0.5)),
            [],
        ),
    ],
)
def test_what_the_checkpoint_replaces_is_said_once(tmp_path, before, now, lines):
    said, _ = resume(tmp_path, before, now)
    assert len(said) == len(lines)
    for line, text in zip(lines, said):
        assert re.search(line, text)
        assert "this run" in text or "(the checkpoint's is used)" in text


class WithRate(PlainModule):
    """A user's module whose rate is a hyperparameter, and that has no scheduler."""

    def __init__(self, lr, *, is_saved):
        super().__init__(tiny_llama(), lr=lr)
        if is_saved:
            self.save_hyperparameters("lr")


@pytest.mark.parametrize("is_saved", [False, True])
def test_the_rate_of_a_users_own_module_is_that_of_the_checkpoint_and_said(tmp_path, is_saved):
    said, trainer = resume(tmp_path, *(partial(WithRate, lr, is_saved=is_saved) for lr in (1e-2, 1e-3)))
    assert len(said) == 1
    assert re.search(r"lr was 0\.01 and is 0\.001 \(the checkpoint's is used\)", said[0])
    assert trainer.optimizers[0].param_groups[0]["lr"] == 1e-2


def by_plateau(optimizer, patience=0):
    return lr_scheduler.ReduceLROnPlateau(optimizer, patience=patience)


def test_a_rate_that_fell_on_a_plateau_is_no_other_option(tmp_path):
    class Falls(PlainModule):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            schedule = {"scheduler": by_plateau(optimizer), "monitor": "train_loss", "interval": "step"}
            return {"optimizer": optimizer, "lr_scheduler": schedule}

        def training_step(self, batch, batch_idx):
            loss = self.model(**batch).loss
            self.log("train_loss", torch.tensor(float(batch_idx)))
            return loss

    trainer = fit(Falls(tiny_llama()), tmp_path, max_steps=4)
    assert trainer.optimizers[0].param_groups[0]["lr"] < 1e-2
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        fit(Falls(tiny_llama()), tmp_path, max_steps=5, ckpt_path=tmp_path / "a.ckpt")
    assert not [each for each in found if "another option" in str(each.message)]
