"""FastFTProgressBar: loss and tokens per second from values that have arrived, none read from the device."""

import io
import json
import logging
import re
import warnings
from unittest import mock

import lightning.pytorch as pl
import numpy as np
import pytest
import torch

from lightning_fastft.checkpoint.lightning_internals import drop_step_value
from lightning_fastft.monitor.progress_bar import FastFTProgressBar
from lightning_fastft.monitor.run_report import RunReport
from lightning_fastft.strategies.registry import register_strategies
from tests.support.training_parts import PlainModule, SaveAtStep, packed_loader, quiet_data, tiny_llama

register_strategies()


class RecordingBar(FastFTProgressBar):
    def __init__(self, **options):
        super().__init__(**options)
        self.seen = []

    def get_metrics(self, trainer, pl_module):
        shown = super().get_metrics(trainer, pl_module)
        self.seen.append(shown)
        return shown


def fit(tmp_path, module, bar, *, accelerator="cpu", callbacks=(), ckpt_path=None, **options):
    trainer = pl.Trainer(
        default_root_dir=tmp_path,
        accelerator=accelerator,
        devices=1,
        strategy="fastft",
        callbacks=[bar, *callbacks],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        **{"max_epochs": 1, **options},
        num_sanity_val_steps=0,
    )
    trainer.fit(module, packed_loader(6), packed_loader(2, seed=30), ckpt_path=ckpt_path)
    return trainer


class KeepsLosses(PlainModule):
    def __init__(self, model):
        super().__init__(model)
        self.losses = []

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.losses.append(float(loss))
        return loss


class FailsIn(PlainModule):
    def __init__(self, model, hook):
        super().__init__(model)
        self.failing = hook

    def training_step(self, batch, batch_idx):
        if self.failing == "training" and batch_idx == 2:
            raise RuntimeError("planted")
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        if self.failing == "validation":
            raise RuntimeError("planted")


@pytest.mark.parametrize("hook", ["training", "validation"])
def test_an_error_begins_on_a_line_of_its_own(tmp_path, capsys, hook):
    with pytest.raises(RuntimeError, match="planted"):
        fit(tmp_path, FailsIn(tiny_llama(), hook), FastFTProgressBar())
    assert capsys.readouterr().out.endswith("\n")


class Speaks(pl.Callback):
    """Logs a message inside training and inside validation."""

    def on_train_batch_end(self, *args):
        logging.getLogger("lightning.pytorch.utilities").warning("said in training")

    def on_validation_batch_end(self, *args):
        logging.getLogger("lightning_fastft.monitor").warning("said in validation")


def test_log_messages_have_lines_of_their_own(tmp_path, monkeypatch):
    console = io.StringIO()
    monkeypatch.setattr("sys.stdout", console)
    handler = logging.StreamHandler(console)
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning_fastft")]
    for logger in loggers:
        logger.addHandler(handler)
    try:
        fit(tmp_path, PlainModule(tiny_llama()), FastFTProgressBar(), callbacks=[Speaks()])
    finally:
        for logger in loggers:
            logger.removeHandler(handler)
    assert not handler.filters
    text = console.getvalue()
    for words in ("said in training", "said in validation", "`Trainer.fit` stopped"):
        assert words in text
        assert not re.search(rf"[^\r\n]{words}", text)


@pytest.mark.parametrize("accumulate", [1, 2, 4])
def test_shows_the_loss_of_the_step_and_tokens_per_second(tmp_path, accumulate):
    """That of a whole window, whose micro-batches alone say how many labels they have as much as how well they
    are predicted.
    """
    module, bar = KeepsLosses(tiny_llama()), RecordingBar()
    fit(tmp_path, module, bar, accumulate_grad_batches=accumulate)
    truth, shown = [], None
    for end in range(1, 7):
        # The last window of the epoch may be a short one.
        if end % accumulate == 0 or end == 6:
            window = module.losses[(end - 1) // accumulate * accumulate : end]
            shown = f"{sum(window) / len(window):.3f}"
        truth.append(shown)
    assert [metrics.get("loss") for metrics in bar.seen[:6]] == truth
    assert float(bar.seen[5]["tok/s"].replace(",", "")) > 0


class KeepsMeans(PlainModule):
    """Keeps the labelled tokens of each pack, and the mean loss over these alone."""

    def __init__(self, model):
        super().__init__(model)
        self.weights, self.means = [], []

    def training_step(self, batch, batch_idx):
        with torch.no_grad():
            self.means.append(float(self.model(**{**batch, "num_items_in_batch": None}).loss))
        self.weights.append(batch.context.num_labelled)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(
    "options",
    [{"limit_train_batches": 5, "max_epochs": 2}, {"overfit_batches": 5, "max_epochs": 2}, {"fast_dev_run": 5}],
)
def test_a_window_that_a_limit_cuts_is_shown_as_the_mean_over_its_labelled_tokens(tmp_path, options):
    rng = np.random.default_rng(0)
    rows = [{"input_ids": rng.integers(1, 90, size=size).tolist()} for size in rng.integers(3, 30, size=40)]
    module, bar, report = KeepsMeans(tiny_llama()), RecordingBar(), RunReport(tmp_path / "run.html", profile_step=None)
    trainer = pl.Trainer(
        default_root_dir=tmp_path,
        accelerator="cpu",
        strategy="fastft",
        callbacks=[bar, report],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        accumulate_grad_batches=2,
        **options,
    )
    trainer.fit(module, quiet_data(rows, max_tokens=32))
    windows = [slice(begin + i, begin + min(i + 2, 5)) for begin in range(0, len(module.means), 5) for i in (0, 2, 4)]
    truth = [np.average(module.means[window], weights=module.weights[window]) for window in windows]
    points = json.loads(report.json_path.read_text())["curves"]["loss"]["points"]
    assert [point[2] for point in points] == pytest.approx(truth, rel=1e-4)
    shown = dict.fromkeys(metrics["loss"] for metrics in bar.seen if "loss" in metrics)
    assert list(shown) == [f"{point[2]:.3f}" for point in points]


class LogsReward(KeepsLosses):
    def training_step(self, batch, batch_idx):
        self.log("train_reward", torch.tensor(float(batch_idx)))
        self.log("train_length", 3.0)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("accumulate", [1, 4])
def test_shows_named_training_values_as_means_of_a_step(tmp_path, accumulate):
    bar = RecordingBar(names=["train_reward", "train_absent"])
    fit(tmp_path, LogsReward(tiny_llama()), bar, accumulate_grad_batches=accumulate)
    found = [metrics.get("reward") for metrics in bar.seen[:6]]
    truth = {1: ["0", "1.000", "2.000", "3.000", "4.000", "5.000"], 4: [None] * 3 + ["1.500"] * 2 + ["4.500"]}
    assert found == truth[accumulate]
    assert all(not {"length", "absent", "train_reward"} & set(metrics) for metrics in bar.seen)


@pytest.mark.parametrize("refresh_rate", [1, 3])
def test_a_value_that_some_micro_batches_do_not_log_is_the_mean_of_the_others(tmp_path, refresh_rate):
    """As the rewards of "kto", whose micro-batch may have no completion with one of the labels."""

    class LogsSome(KeepsLosses):
        def training_step(self, batch, batch_idx):
            for name, is_logged in (("train_good", batch_idx in (0, 2, 3)), ("train_bad", batch_idx in (1, 3))):
                if is_logged:
                    self.log(name, float(1 + batch_idx))
                else:
                    drop_step_value(self.trainer, name)
            return super().training_step(batch, batch_idx)

    bar = RecordingBar(refresh_rate=refresh_rate, names=["train_good", "train_bad"])
    fit(tmp_path, LogsSome(tiny_llama()), bar, accumulate_grad_batches=2)
    found = [(metrics["good"], metrics["bad"]) for metrics in bar.seen if "good" in metrics]
    steps = [("1.000", "2.000"), ("3.500", "4.000")]
    assert list(dict.fromkeys(found)) == (steps if refresh_rate == 1 else steps[:1])


def test_a_step_whose_last_micro_batch_has_no_loss_is_in_no_other(tmp_path):
    class SkipsOne(KeepsLosses):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return None if batch_idx == 1 else loss

    module, bar = SkipsOne(tiny_llama()), RecordingBar()
    fit(tmp_path, module, bar, accumulate_grad_batches=2)
    shown = dict.fromkeys(metrics["loss"] for metrics in bar.seen if "loss" in metrics)
    assert list(shown) == [f"{sum(module.losses[begin : begin + 2]) / 2:.3f}" for begin in (2, 4)]


def test_refresh_inside_a_window_shows_the_last_whole_step(tmp_path):
    module, bar = KeepsLosses(tiny_llama()), RecordingBar(refresh_rate=3)
    fit(tmp_path, module, bar, accumulate_grad_batches=2)
    shown = [metrics["loss"] for metrics in bar.seen if "loss" in metrics]
    assert shown[0] == f"{sum(module.losses[:2]) / 2:.3f}"
    assert shown[-1] == f"{sum(module.losses[4:6]) / 2:.3f}"


def test_micro_batches_are_shown_under_manual_optimization_of_anybodys(tmp_path):
    class Manual(KeepsLosses):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            return {"loss": super().training_step(batch, batch_idx).detach()}

    module, bar = Manual(tiny_llama()), RecordingBar()
    fit(tmp_path, module, bar)
    assert [metrics["loss"] for metrics in bar.seen[:6]] == [f"{loss:.3f}" for loss in module.losses]


def test_shows_what_validation_logs_for_the_bar_and_nothing_else(tmp_path):
    class Module(PlainModule):
        def training_step(self, batch, batch_idx):
            self.log("lr", 0.5, prog_bar=True)
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch, batch_idx):
            super().validation_step(batch, batch_idx)
            self.log("F1", 0.25, prog_bar=True)

    bar = RecordingBar()
    fit(tmp_path, Module(tiny_llama()), bar, val_check_interval=3)
    after_validation = [metrics for metrics in bar.seen if "F1" in metrics]
    assert after_validation
    assert {metrics["F1"] for metrics in after_validation} == {"0.250"}
    assert all("val_loss" not in metrics and "lr" not in metrics for metrics in bar.seen)


def test_values_that_have_not_arrived_are_not_waited_for(tmp_path):
    bar = RecordingBar()
    with mock.patch.object(bar._reader, "poll", return_value=[]):
        fit(tmp_path, PlainModule(tiny_llama()), bar)
    assert all("loss" not in metrics for metrics in bar.seen)


def test_refresh_rate_limits_the_copies(tmp_path):
    bar = RecordingBar(refresh_rate=3)
    with mock.patch.object(bar._reader, "push", wraps=bar._reader.push) as push:
        fit(tmp_path, PlainModule(tiny_llama()), bar)
    assert push.call_count == 2


class StrictBar(RecordingBar):
    """On a GPU, an error at every wait for the device inside the hook."""

    def on_train_batch_end(self, trainer, pl_module, *args):
        if pl_module.device.type == "cpu":
            super().on_train_batch_end(trainer, pl_module, *args)
            return
        torch.cuda._sleep(50_000_000)
        torch.cuda.set_sync_debug_mode("error")
        try:
            super().on_train_batch_end(trainer, pl_module, *args)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("accelerator", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.alone])])
def test_shows_losses_without_a_wait_for_the_device(tmp_path, accelerator):
    bar = StrictBar()
    fit(tmp_path, PlainModule(tiny_llama()), bar, accelerator=accelerator)
    assert accelerator == "cpu" or bar.seen[0] == {}
    assert "loss" in bar.seen[-1]


class RecordsBar(pl.Callback):
    """Epoch, position and number of batches on the bar, before and after each batch."""

    def __init__(self, bar):
        self.bar, self.seen = bar, []

    def note(self):
        shown = self.bar.train_progress_bar
        self.seen.append((shown.desc, shown.n, shown.total, shown.initial))

    def on_train_batch_start(self, *args):
        self.note()

    def on_train_batch_end(self, *args):
        self.note()


def test_bar_of_an_epoch_that_is_resumed_has_epoch_position_and_total(tmp_path):
    path, options = tmp_path / "half.ckpt", {"max_epochs": 2}
    fit(tmp_path, PlainModule(tiny_llama()), FastFTProgressBar(), callbacks=[SaveAtStep(10, path)], **options)
    bar = FastFTProgressBar()
    records = RecordsBar(bar)
    with pytest.warns(UserWarning, match="not resumable"):
        fit(tmp_path, PlainModule(tiny_llama()), bar, callbacks=[records], ckpt_path=path, **options)
    # Steps 11 and 12 of 2 x 6; the rate does not count the four batches of the epoch before them.
    assert records.seen == [
        ("Epoch 1: ", 4, 6, 4),
        ("Epoch 1: ", 5, 6, 4),
        ("Epoch 1: ", 5, 6, 4),
        ("Epoch 1: ", 6, 6, 4),
    ]


class SaveOnceAtStep(SaveAtStep):
    def on_train_batch_end(self, trainer, *args):
        if not self.path.exists():
            super().on_train_batch_end(trainer, *args)


@pytest.mark.parametrize("max_epochs", [-1, 3])
@pytest.mark.parametrize(("first", "totals"), [(0, [6, 4]), (2, [6, 4]), (4, [4])])
def test_bar_ends_where_max_steps_ends_the_run(tmp_path, first, totals, max_epochs):
    """Three steps of two micro-batches in the first epoch, two in the second."""
    path, options = tmp_path / "saved.ckpt", {"max_steps": 5, "max_epochs": max_epochs, "accumulate_grad_batches": 2}
    if first:
        fit(
            tmp_path, PlainModule(tiny_llama()), FastFTProgressBar(), callbacks=[SaveOnceAtStep(first, path)], **options
        )
    bar = FastFTProgressBar()
    records = RecordsBar(bar)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not resumable")
        fit(tmp_path, PlainModule(tiny_llama()), bar, callbacks=[records], ckpt_path=path if first else None, **options)
    assert list(dict.fromkeys((epoch, total) for epoch, _, total, _ in records.seen)) == [
        (f"Epoch {2 - len(totals) + number}: ", total) for number, total in enumerate(totals)
    ]
    assert records.seen[-1][1] == totals[-1]


@pytest.mark.parametrize("steps", [(2,), (0, 1), (2, 1)])
def test_bar_of_a_module_that_steps_by_hand_ends_where_its_steps_end(tmp_path, steps):
    """Batches take these numbers of steps in turn; max_steps ends the run after four of six batches."""

    class Manual(PlainModule):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            self.manual_backward(loss)
            for _ in range(steps[batch_idx % len(steps)]):
                self.optimizers().step()

    bar = FastFTProgressBar()
    records = RecordsBar(bar)
    max_steps = sum(steps[number % len(steps)] for number in range(4))
    fit(tmp_path, Manual(tiny_llama()), bar, callbacks=[records], max_steps=max_steps)
    assert records.seen[0][2] == 6
    assert records.seen[-1][1:3] == (4, 4)
    assert all(total >= position for _, position, total, _ in records.seen)
