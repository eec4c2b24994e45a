"""Monitors that cannot work are named before training, and no others."""

import contextlib
import sys
import warnings
from types import SimpleNamespace

import pytest
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from lightning_fastft import FineTuner
from lightning_fastft.checkpoint.lightning_internals import wrap_monitored
from lightning_fastft.core.errors import OptionError
from lightning_fastft.core.patcher import ModelPatcher
from tests.support.token_weighting_worker import CONFIG
from tests.support.training_parts import VOCAB_SIZE, PlainModule, packed_loader, quiet_trainer, tiny_llama


def fit(tmp_path, module, callback, *callbacks, **options):
    options = {
        "strategy": "fastft",
        "enable_checkpointing": isinstance(callback, ModelCheckpoint),
        "max_steps": -1,
        "max_epochs": 1,
        **options,
    }
    trainer = quiet_trainer(tmp_path, callbacks=[callback, *callbacks], **options)
    trainer.fit(module, packed_loader(6), packed_loader(2, seed=9))
    return trainer


def tuner():
    return FineTuner({**CONFIG, "vocab_size": VOCAB_SIZE}, init="random", dtype="float32", scheduler="constant")


@pytest.mark.parametrize(
    "options", [{"max_steps": 4}, {"max_steps": 2, "accumulate_grad_batches": 2}], ids=["4 of 6", "2 windows of 2"]
)
def test_early_stopping_that_would_end_in_an_error_is_refused_before_the_first_step(tmp_path, options):
    module = PlainModule(tiny_llama())
    with pytest.raises(OptionError, match="val_check_interval"):
        fit(tmp_path, module, EarlyStopping("val_loss"), **options)
    assert module.trainer.global_step == 0


@pytest.mark.parametrize(
    "options",
    [
        {"max_steps": 6},
        {"max_steps": 8, "max_epochs": 2},
        {"max_steps": 4, "val_check_interval": 2},
        {},
        {"max_steps": 4, "monitor": "train_loss"},
        {"max_steps": 4, "strict": False},
    ],
    ids=["whole epoch", "second epoch", "validated before", "no max_steps", "metric of training", "not strict"],
)
def test_early_stopping_that_works_is_left_alone(tmp_path, options):
    monitor, strict = options.pop("monitor", "val_loss"), options.pop("strict", True)
    trainer = fit(tmp_path, PlainModule(tiny_llama()), EarlyStopping(monitor, strict=strict), **options)
    assert trainer.global_step == options.get("max_steps", 6)


@pytest.mark.parametrize(
    "make",
    [EarlyStopping, lambda monitor, **options: ModelCheckpoint(monitor=monitor, save_last=True)],
    ids=["EarlyStopping", "ModelCheckpoint"],
)
@pytest.mark.parametrize(("monitor", "is_named"), [("val_los", True), ("val_loss", False), ("train_loss", False)])
def test_monitor_that_a_fine_tuner_does_not_log_is_named(tmp_path, make, monitor, is_named):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        # A ModelCheckpoint without its metric ends in Lightning's own error, an epoch later.
        with contextlib.suppress(MisconfigurationException):
            fit(tmp_path, tuner(), make(monitor, strict=False))
    named = [str(entry.message) for entry in caught if "monitors" in str(entry.message)]
    assert bool(named) == is_named
    assert all("'val_loss'" in message for message in named)


@pytest.mark.parametrize("options", [{}, {"val_check_interval": 2}], ids=["read after an epoch", "read after it"])
def test_early_stopping_without_a_validation_is_refused_before_the_first_step(tmp_path, options):
    module = tuner()
    with pytest.raises(OptionError, match=r"EarlyStopping.*no validation"):
        fit(tmp_path, module, EarlyStopping("val_loss"), limit_val_batches=0, **options)
    assert module.trainer.global_step == 0
    # Training metrics need no validation, and a callback that is not strict waits for its metric.
    for callback in (EarlyStopping("train_loss"), EarlyStopping("val_loss", strict=False)):
        assert fit(tmp_path, tuner(), callback, limit_val_batches=0).global_step == 6


class LogsTheMetric(Callback):
    """A callback of the user that logs the metric without a validation."""

    def on_train_epoch_end(self, trainer, pl_module):
        pl_module.log("val_loss", 1.0)


def test_early_stopping_may_read_what_a_callback_of_the_user_logs(tmp_path):
    callbacks = [LogsTheMetric(), EarlyStopping("val_loss")]
    assert fit(tmp_path, tuner(), *callbacks, limit_val_batches=0).global_step == 6


class LogsMore(Callback):
    """A callback of the user that logs a name like one of the module's."""

    def on_validation_batch_end(self, trainer, pl_module, *args):
        pl_module.log("val_los", 1.0)


def test_strict_early_stopping_on_a_misspelled_name_is_refused_before_the_first_step(tmp_path):
    module = tuner()
    with pytest.raises(OptionError, match="'val_loss'"):
        fit(tmp_path, module, EarlyStopping("val_los"))
    assert module.trainer.global_step == 0
    # Code of the user may log the name.
    with pytest.warns(UserWarning, match="monitors 'val_los'"):
        assert fit(tmp_path, tuner(), EarlyStopping("val_los"), LogsMore()).global_step == 6


@pytest.mark.parametrize(
    ("monitor", "options", "match"),
    [
        ("val_los", {}, "'val_loss'"),
        ("val_loss", {"limit_val_batches": 0}, "save nothing"),
        ("val_loss", {"max_steps": 4}, "val_check_interval"),
    ],
    ids=["misspelled", "no validation", "ends before a validation"],
)
def test_a_checkpoint_that_would_never_be_saved_is_refused_before_the_first_step(tmp_path, monitor, options, match):
    module = tuner()
    with pytest.raises(OptionError, match=match):
        fit(tmp_path, module, ModelCheckpoint(tmp_path, monitor=monitor), **options)
    assert module.trainer.global_step == 0
    saver = ModelCheckpoint(tmp_path, monitor="val_loss")
    fit(tmp_path, tuner(), saver, max_steps=4, val_check_interval=4)
    assert saver.best_model_path


def test_a_logger_of_wandb_without_a_login_is_refused_before_the_model_is_built(tmp_path, monkeypatch):
    class UsageError(Exception):
        pass

    class NotLoggedIn(CSVLogger):
        @property
        def experiment(self):
            raise UsageError("No API key configured")

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(errors=SimpleNamespace(UsageError=UsageError)))
    module = PlainModule(tiny_llama())
    trainer = quiet_trainer(tmp_path, strategy="fastft", logger=NotLoggedIn(tmp_path))
    with pytest.raises(OptionError, match="wandb login"):
        trainer.fit(module, packed_loader(2))


@pytest.mark.parametrize("interrupted", [False, True])
def test_a_save_after_an_exception_waits_for_no_other_rank(interrupted):
    callback, patcher, num_agreed = ModelCheckpoint(), ModelPatcher(), 0
    loop = SimpleNamespace(epoch_loop=SimpleNamespace(_get_monitor_value=None))
    trainer = SimpleNamespace(
        callbacks=[callback],
        fit_loop=loop,
        interrupted=interrupted,
        callback_metrics={},
        current_epoch=0,
        global_step=3,
    )

    def agree(metrics):
        nonlocal num_agreed
        num_agreed += 1
        return metrics

    wrap_monitored(trainer, patcher, agree)
    assert callback._monitor_candidates(trainer)["step"] == 3
    assert num_agreed == (not interrupted)
    patcher.undo()
    assert "_monitor_candidates" not in vars(callback)
