"""RunReport: true figures, the same in HTML and JSON, whatever ends the run; safe to open and to pass on."""

import json
import math
import os
import re
import signal
import sys
import time
from html.parser import HTMLParser
from unittest import mock

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from lightning_fastft import FusedKernels, HostWaitDetector, RunReport
from lightning_fastft.checkpoint.lightning_internals import drop_step_value
from lightning_fastft.checkpoint.resume import ExactResume
from lightning_fastft.core import marks
from lightning_fastft.core.async_reader import AsyncScalarReader
from lightning_fastft.core.errors import OptionError
from lightning_fastft.core.status import Status
from lightning_fastft.monitor import run_report
from lightning_fastft.monitor.report import content
from lightning_fastft.monitor.report.findings import describe_profile
from lightning_fastft.monitor.report.losses import StepLosses
from lightning_fastft.monitor.report.page import render_page
from lightning_fastft.monitor.report.step_profile import StepTrace, read_events
from lightning_fastft.monitor.report.verdict import _describe_change
from lightning_fastft.packing.collate import Document, collate
from lightning_fastft.planner.plan import make_plan
from lightning_fastft.planner.step import Machine, SegmentCost, StepCost, ValueCost
from lightning_fastft.strategies.single_device import FastFTStrategy
from lightning_fastft.training.data.describe import describe_data
from tests.monitor.run_report_worker import (
    GONE_AT,
    NUM_MICRO_BATCHES,
    NUM_RANKS,
    NUM_STEPS,
    Still,
    batches_of,
    count_labelled,
    documents_of,
)
from tests.support.host_waits import count_host_waits
from tests.support.training_parts import (
    PlainModule,
    packed_batches,
    packed_loader,
    quiet_data,
    quiet_trainer,
    tiny_llama,
)
from tests.support.two_ranks import run_two_ranks

VOID = {"meta", "rect", "line", "polyline", "path", "br"}
HOSTILE = '<script>alert("1")</script><img src=x onerror=alert(2)>'


class Page(HTMLParser):
    """Tags that are open and close as they should, the figures, and every attribute."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.attributes, self.figures, self.text = [], [], [], [], ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag == "data":
            self.figures.append(float(dict(attrs)["value"]))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag, tag

    def handle_data(self, data):
        if not self.open or self.open[-1] not in ("style",):
            self.text += data


def numbers_in(value):
    if isinstance(value, dict):
        return {number for part in value.values() for number in numbers_in(part)}
    if isinstance(value, list):
        return {number for part in value for number in numbers_in(part)}
    return {float(value)} if isinstance(value, (int, float)) and not isinstance(value, bool) else set()


class Clock:
    """A millisecond passes at each look, and as much as is slept: a busy machine changes nothing."""

    now = 0.0

    def perf_counter(self):
        self.now += 0.001
        return self.now

    def sleep(self, seconds):
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(marks, "time", made)
    return made


class Keeps(PlainModule):
    """Keeps its losses; sleeps in one step, or fails in it."""

    def __init__(self, *, sleep_at=None, fail_at=None, error=None, sleep=time.sleep):
        super().__init__(tiny_llama())
        self.losses, self.sleep_at, self.fail_at, self.error, self.sleep = [], sleep_at, fail_at, error, sleep

    def training_step(self, batch, batch_idx):
        if batch_idx == self.fail_at:
            raise self.error
        if batch_idx == self.sleep_at:
            self.sleep(0.15)
        loss = super().training_step(batch, batch_idx)
        self.losses.append(float(loss.detach()))
        return loss


def fit(tmp_path, module=None, report=None, *, loader=None, callbacks=(), strategy=None, ckpt_path=None, **options):
    report = report or RunReport(tmp_path / "run.html", profile_step=None)
    options.setdefault("max_steps", 8)
    trainer = quiet_trainer(
        tmp_path,
        strategy=strategy or FastFTStrategy(),
        callbacks=[report, *callbacks],
        num_sanity_val_steps=0,
        **options,
    )
    trainer.fit(
        module or Keeps(),
        *(loader if isinstance(loader, tuple) else (loader or packed_loader(8),)),
        ckpt_path=ckpt_path,
    )
    return trainer


def read(tmp_path, name="run"):
    return json.loads((tmp_path / f"{name}.json").read_text()), (tmp_path / f"{name}.html").read_text()


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """One whole run with a profiled and a watched step; reads on a line of the user's."""

    class Reads(Keeps):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            loss.item()  # the user's own wait
            return loss

    torch.manual_seed(0)
    folder, module = tmp_path_factory.mktemp("report"), Reads()
    fit(folder, module, RunReport(folder / "run.html", profile_step=4), max_steps=12, loader=packed_loader(12))
    return (module, *read(folder))


def test_every_figure_of_the_page_is_in_the_json_and_the_heads_are_on_the_page(finished):
    _, data, text = finished
    page, known = Page(text), numbers_in(data)
    assert len(page.figures) > 40
    assert set(page.figures) <= known, set(page.figures) - known
    heads = [
        data["head"][name] for name in ("tokens_per_s", "peak_memory_gib", "final_loss", "first_loss", "num_steps")
    ]
    heads += [
        data["packing"]["padding"],
        data["slowest"]["ms"],
        data["profile"]["busy_ms"],
        data["waits"]["per_step"],
        data["times"]["p50_ms"],
    ]
    heads += [part["mean_ms"] for part in data["times"]["parts"]] + [data["curves"]["loss"]["points"][-1][2]]
    assert set(map(float, heads)) <= set(page.figures)
    assert all(sentence in page.text for sentence in data["outcome"]["verdict"])
    assert all(status["reason"] in page.text for status in data["statuses"])
    assert data["resumed"] is data["validation"] is None
    assert "went on from" not in page.text
    assert "Last validation" not in page.text
    assert (data["schema"], data["schema_version"]) == ("lightning_fastft.run_report", 2)


def test_page_loads_nothing_and_runs_nothing(finished):
    _, _, text = finished
    page = Page(text)
    assert not {"script", "link", "img", "iframe", "object", "embed", "base", "form"} & set(page.tags)
    assert not [
        value for name, value in page.attributes if name in ("src", "href", "srcset", "action") or name.startswith("on")
    ]
    assert not re.search(r"https?:|//\w|url\(|@import", text)
    assert '<meta name="viewport" content="width=device-width' in text
    assert "prefers-color-scheme: dark" in text
    assert "max-width: 600px" in text
    # Tables scroll inside themselves.
    assert text.count("<table") == text.count('<div class="scroll"><table')


def test_losses_tokens_and_packs_are_those_of_the_run(finished):
    module, data, _ = finished
    losses = module.losses
    assert [point[2] for point in data["curves"]["loss"]["points"]] == pytest.approx(losses)
    assert data["head"]["first_loss"] == pytest.approx(sum(losses[:3]) / 3)
    assert data["head"]["final_loss"] == pytest.approx(sum(losses[-3:]) / 3)
    assert data["head"]["first_step_loss"] == pytest.approx(losses[0])
    contexts = [batch.context for batch in packed_batches(12)]
    lengths = np.concatenate([np.diff(context.start_host_S1.numpy()) for context in contexts])
    packing = data["packing"]
    assert (packing["num_packs"], packing["num_documents"], packing["longest_document_tokens"]) == (
        12,
        len(lengths),
        int(lengths.max()),
    )
    assert packing["num_real_tokens"] == int(lengths.sum())
    assert packing["num_labelled"] == sum(context.num_labelled for context in contexts)
    for bar in packing["lengths"]:
        assert bar["count"] == int(((lengths >= bar["low"]) & (lengths <= bar["high"])).sum())
    assert sum(bar["count"] for bar in packing["lengths"]) == len(lengths)
    assert data["head"]["num_trained"] == sum(parameter.numel() for parameter in module.parameters())


def test_padding_is_no_document_and_no_token(tmp_path):
    fit(tmp_path, loader=packed_loader(8, pad_to=96))
    data, _ = read(tmp_path)
    contexts = [batch.context for batch in packed_batches(8)]
    packing, num_real = data["packing"], sum(context.num_tokens for context in contexts)
    assert (packing["num_documents"], packing["num_tokens"], packing["num_real_tokens"]) == (8 * 3, 8 * 96, num_real)
    assert packing["longest_document_tokens"] == max(context.max_length for context in contexts)
    assert (packing["fill"], packing["max_tokens"]) == (None, None)
    assert packing["padding"] == pytest.approx(1 - num_real / (8 * 96))
    assert data["slowest"]["num_tokens"] == contexts[data["slowest"]["step"]].num_tokens
    assert any("of the tokens in the packs are padding" in sentence for sentence in data["outcome"]["verdict"])
    assert not any("full" in sentence for sentence in data["outcome"]["verdict"])


@pytest.mark.parametrize("pad_to_max", [False, True])
def test_fill_is_the_share_of_max_tokens_that_the_data_module_tells(tmp_path, pad_to_max):
    rows = [{"input_ids": list(range(1, 41))} for _ in range(12)]
    datamodule = quiet_data(rows, max_tokens=96, pad_to_max=pad_to_max)
    report = RunReport(tmp_path / "run.html", profile_step=None)
    trainer = quiet_trainer(tmp_path, strategy=FastFTStrategy(), callbacks=[report], max_steps=4)
    trainer.fit(Keeps(), datamodule=datamodule)
    data, text = read(tmp_path)
    told = re.search(r"fill ([\d.]+) %", describe_data(datamodule))[1]
    assert data["packing"]["fill"] == pytest.approx(80 / 96)
    assert f"{100 * data['packing']['fill']:.2f}" == told
    assert "Packs of 96 tokens are 83.3 % full" in " ".join(Page(text).text.split())
    assert any(line.startswith("Packs are only 83 % full") for line in data["outcome"]["verdict"])


# Packs of 96 tokens. Of documents of 40 no three fit, and of 65 no two; 250 tokens need three packs; and a window of
# three packs splits one of two.
@pytest.mark.parametrize(
    ("lengths", "accumulate", "limit", "end"),
    [
        ([40] * 12, 1, "documents", "no more of the documents fit into one of 96 tokens. Another max_tokens"),
        ([65] * 5, 1, "documents", "no more of the documents fit"),
        ([90, 90, 60, 10], 1, "tokens", None),
        ([25] * 6, 3, "", "Packs are only 52 % full."),
    ],
)
def test_packs_that_are_as_full_as_can_be_are_no_fault(tmp_path, lengths, accumulate, limit, end):
    rows = [{"input_ids": list(range(1, length + 1))} for length in lengths]
    report = RunReport(tmp_path / "run.html", profile_step=None)
    options = {"accumulate_grad_batches": accumulate, "max_epochs": 1, "max_steps": -1}
    trainer = quiet_trainer(tmp_path, strategy=FastFTStrategy(), callbacks=[report], **options)
    trainer.fit(Keeps(), datamodule=quiet_data(rows, max_tokens=96))
    data, _ = read(tmp_path)
    assert data["packing"]["fill"] < 0.9
    assert data["packing"]["limit"] == limit
    told = [line for line in data["outcome"]["verdict"] if "full" in line]
    assert len(told) == (end is not None)
    assert all(end in line for line in told)


def test_what_was_made_once_in_a_batch_is_told_apart(tmp_path, monkeypatch):
    num_recordings = 0

    def record(trainer, pl_module, loss):
        nonlocal num_recordings
        num_recordings += trainer.global_step in (4, 6)

    monkeypatch.setattr(FusedKernels, "num_recordings", property(lambda self: num_recordings))
    callbacks = [FusedKernels(), LambdaCallback(on_before_backward=record)]
    fit(tmp_path, loader=packed_loader(10), callbacks=callbacks)
    data, text = read(tmp_path)
    ((what, num_batches, ms),) = [tuple(made.values()) for made in data["times"]["set_ups"]]
    assert (what, num_batches) == ("layers were recorded as CUDA graphs", 2)
    assert ms > 0
    assert data["slowest"]["step"] not in (4, 6)
    assert "Not counted: 2 in which layers were recorded as CUDA graphs" in " ".join(Page(text).text.split())


def test_times_leave_out_warmup_and_disturbed_steps(finished):
    _, data, _ = finished
    times = data["times"]
    # 12 batches: 3 of warm-up, 1 profiled, 1 watched.
    assert (times["num_batches"], times["has_warmup"]) == (7, False)
    assert sum(part["share"] for part in times["parts"]) == pytest.approx(1)
    assert {part["kind"] for part in times["parts"] if part["mean_ms"] > 0} == {
        "between",
        "forward",
        "backward",
        "optimizer",
    }
    assert times["p10_ms"] <= times["p50_ms"] <= times["p90_ms"] <= data["slowest"]["ms"] * 1.01
    assert data["head"]["tokens_per_s"] > 0
    assert data["slowest"]["step"] in {3, *range(6, 12)}


class LogsReward(Keeps):
    def training_step(self, batch, batch_idx):
        self.log("train_reward", torch.tensor(float(batch_idx)))
        if batch_idx >= 4:
            self.log("train_late", math.nan)
        return super().training_step(batch, batch_idx)


def test_what_training_logs_is_drawn_as_means_of_steps(tmp_path):
    report = RunReport(tmp_path / "run.html", profile_step=None)
    fit(tmp_path, LogsReward(), report, max_steps=4, accumulate_grad_batches=2)
    data, page = json.loads(report.json_path.read_text()), Page(report.html_path.read_text())
    reward, late = data["logged"]
    assert reward["points"] == [[0, 0, 0.5], [1, 1, 2.5], [2, 2, 4.5], [3, 3, 6.5]]
    assert (reward["name"], reward["first"], reward["final"]) == ("train_reward", 0.5, 6.5)
    assert (late["name"], late["first"], late["points"]) == ("train_late", None, [])
    assert "train_reward" in page.text
    # A policy is judged by its rewards: the mean of its loss is near 0 in every step.
    assert "The reward rose from 0.5 to 6.5 (the first and the last step)." in data["outcome"]["verdict"]
    assert set(page.figures) <= numbers_in(data)


def test_a_value_that_the_last_micro_batch_does_not_log_is_in_its_step(tmp_path):
    class LogsFirst(Keeps):
        def training_step(self, batch, batch_idx):
            if batch_idx % 2:
                drop_step_value(self.trainer, "train_reward")
            else:
                self.log("train_reward", float(batch_idx))
            return super().training_step(batch, batch_idx)

    report = RunReport(tmp_path / "run.html", profile_step=None)
    fit(tmp_path, LogsFirst(), report, max_steps=2, accumulate_grad_batches=2)
    (reward,) = json.loads(report.json_path.read_text())["logged"]
    assert reward["points"] == [[0, 0, 0.0], [1, 1, 2.0]]


def test_batches_in_the_making_are_no_waits(tmp_path):
    """The thread that reads ahead computes on the host, also while the watched step runs."""
    rows = [{"input_ids": [1 + row % 40, 2, 3]} for row in range(400)]
    data = quiet_data(rows, max_tokens=8, num_workers=1)
    report = RunReport(tmp_path / "run.html", profile_step=0)
    trainer = quiet_trainer(tmp_path, strategy=FastFTStrategy(), callbacks=[report], max_steps=4)
    trainer.fit(PlainModule(tiny_llama()), datamodule=data)
    waits = json.loads(report.json_path.read_text())["waits"]
    assert waits["num_steps"] == 1
    assert [row["place"] for row in waits["rows"] if "packing" in row["place"]] == []


def test_profile_and_host_waits_are_of_the_steps_asked_for(finished):
    _, data, _ = finished
    profile, waits = data["profile"], data["waits"]
    assert profile["step"] == 4
    assert 0 < profile["busy_ms"] <= profile["step_ms"]
    assert max(profile["lanes"][0]["shares"]) > 0
    assert any("aten::" in row["name"] for row in profile["longest"])
    assert (waits["num_steps"], waits["is_prediction"]) == (1, True)
    # Both reads of the user's module; what the callbacks of this package read has been copied to the host.
    assert [row["per_step"] for row in waits["rows"]] == [1, 1]
    assert all("test_run_report.py" in row["place"] for row in waits["rows"])
    assert "the user's own wait" in " ".join(row["text"] for row in waits["rows"])


def test_findings_of_a_detector_of_the_users_are_shown(tmp_path):
    detector = HostWaitDetector(steps=[2, 3])
    fit(tmp_path, callbacks=[detector])
    data, _ = read(tmp_path)
    assert (data["waits"]["num_steps"], data["waits"]["per_step"]) == (2, sum(detector.waits.values()) / 2)
    assert data["times"]["num_batches"] == 8 - 3 - 1


def test_slowest_pack_and_verdict(tmp_path, clock):
    fit(tmp_path, Keeps(sleep_at=6, sleep=clock.sleep))
    data, _ = read(tmp_path)
    context = packed_batches(8)[6].context
    slowest = data["slowest"]
    assert (slowest["step"], slowest["num_tokens"], slowest["num_documents"]) == (6, context.num_real_tokens, 3)
    assert slowest["longest_document"] == context.max_length
    assert slowest["ms"] >= 150
    assert slowest["times_median"] == pytest.approx(slowest["ms"] / data["times"]["p50_ms"])
    parts = {part["kind"]: part["mean_ms"] for part in data["times"]["parts"]}
    assert parts["forward"] >= 150 / 5
    assert data["outcome"]["verdict"][0] == "The run finished after 8 optimizer steps."


def test_first_batch_of_an_epoch_is_no_slow_pack(tmp_path, clock):
    """Beside it the loader begins, whatever the pack holds."""
    fit(tmp_path, Keeps(sleep_at=0, sleep=clock.sleep), loader=packed_loader(4), max_epochs=4, max_steps=-1)
    data, text = read(tmp_path)
    assert data["slowest"]["batch"] % 4 != 0
    ((what, num_batches, ms),) = [tuple(made.values()) for made in data["times"]["set_ups"]]
    assert (what, num_batches, data["times"]["num_batches"]) == ("an epoch and its data loader began", 3, 16 - 3 - 3)
    assert ms >= 3 * 150
    assert "Not counted: 3 in which an epoch and its data loader began" in " ".join(Page(text).text.split())


def test_epochs_of_one_batch_are_timed_all_the_same(tmp_path):
    fit(tmp_path, loader=packed_loader(1), max_epochs=6, max_steps=-1)
    data, _ = read(tmp_path)
    assert (data["times"]["num_batches"], data["times"]["set_ups"]) == (6, [])
    assert data["head"]["tokens_per_s"] > 0


def signal_at(number, batch_idx):
    return LambdaCallback(
        on_train_batch_start=lambda trainer, module, batch, index: (
            os.kill(os.getpid(), number) if index == batch_idx else None
        )
    )


@pytest.mark.parametrize("is_resume_first", [False, True])
def test_run_that_a_signal_stopped_was_saved_and_did_not_fail(tmp_path, caplog, is_resume_first):
    """Whether ExactResume ends the run before or after the report has counted the step."""
    report = RunReport(tmp_path / "run.html", profile_step=None)
    caplog.set_level("INFO")
    # Its files are older than the one of the stop.
    checkpoint = ModelCheckpoint(tmp_path, every_n_train_steps=1, save_last=True)
    callbacks = [ExactResume(), report, checkpoint] if is_resume_first else [report, checkpoint]
    trainer = quiet_trainer(
        tmp_path,
        strategy=FastFTStrategy(),
        callbacks=[signal_at(signal.SIGTERM, 4), *callbacks],
        max_steps=8,
        enable_checkpointing=True,
    )
    with pytest.raises(SystemExit) as ended:
        trainer.fit(Keeps(), packed_loader(8))
    path = str(tmp_path / "stopped-step=5.ckpt")
    data, text = read(tmp_path)
    outcome = data["outcome"]
    assert ended.value.code == 143
    assert (outcome["state"], outcome["error"], outcome["level"]) == ("stopped", None, "warn")
    assert outcome["stop"] == {"signal": "SIGTERM", "step": 5, "checkpoint": path, "exit_code": 143}
    assert f"last checkpoint {path}\n" in caplog.text
    assert outcome["verdict"][0] == (
        f"The run was stopped by SIGTERM after 5 optimizer steps; saved at {path}; go on with --ckpt_path {path} (in "
        "Python: ckpt_path= of fit)."
    )
    assert (data["head"]["num_steps"], data["head"]["last_step"]) == (5, 5)
    assert "SystemExit" not in text + json.dumps(data)
    assert "failed" not in Page(text).text


def test_resumed_run_says_from_where_it_went_on(tmp_path):
    with pytest.raises(SystemExit):
        fit(tmp_path, callbacks=[signal_at(signal.SIGTERM, 4)])
    path, module = tmp_path / "stopped-step=5.ckpt", Keeps(sleep_at=8)
    loader = packed_loader(12)
    with pytest.warns(UserWarning, match="max_steps was 8 and is 12"):
        fit(
            tmp_path,
            module,
            RunReport(tmp_path / "run.html", profile_step=1),
            loader=loader,
            ckpt_path=path,
            max_steps=12,
        )
    data, text = read(tmp_path)
    assert data["resumed"] == {"step": 5, "checkpoint": str(path)}
    assert (data["head"]["num_steps"], data["head"]["last_step"]) == (7, 12)
    assert [point[:2] for point in data["curves"]["loss"]["points"]] == [[step, step] for step in range(5, 12)]
    assert [point[0] for point in data["curves"]["tokens_per_s"]["points"]][-1] == 11
    assert data["profile"]["step"] == 6
    assert data["slowest"]["step"] == 8
    assert (
        data["outcome"]["verdict"][0]
        == f"The run went on from step 5 (checkpoint {path}) to 12, and finished after 7 optimizer steps."
    )
    shown = " ".join(Page(text).text.split())
    chart = text[text.index('aria-label="Tokens per second"') :].partition("</section>")[0]
    steps = re.findall(r'data-tip="step (\d+): ', chart)
    assert (steps[0], steps[-1]) == ("5", "11")
    assert "from step 5 on" in shown


def test_last_validation_is_on_the_page(tmp_path):
    class Validates(Keeps):
        def validation_step(self, batch, batch_idx):
            self.model(**batch)
            self.log("val_loss", torch.tensor(float(self.trainer.global_step)))
            self.log("val_accuracy", 0.25)
            self.log("other", 1.0)

        def training_step(self, batch, batch_idx):
            self.log("value_loss", 2.0)
            return super().training_step(batch, batch_idx)

    fit(tmp_path, Validates(), loader=(packed_loader(8), packed_loader(1)), val_check_interval=3, max_steps=6)
    data, text = read(tmp_path)
    assert data["validation"]["step"] == 6
    assert {metric["name"]: metric["value"] for metric in data["validation"]["metrics"]} == {
        "val_loss": 6.0,
        "val_accuracy": 0.25,
    }
    shown = " ".join(Page(text).text.split())
    assert re.search(r"Last validation, after step 6: val_\w+ [\d.]+, val_\w+ [\d.]+", shown)


def test_validation_that_is_not_finite_is_a_fault(tmp_path):
    class Validates(Keeps):
        def validation_step(self, batch, batch_idx):
            self.model(**batch)
            self.log("val_loss", float("nan") if self.trainer.global_step == 6 else 1.0)

    fit(tmp_path, Validates(), loader=(packed_loader(8), packed_loader(1)), val_check_interval=3, max_steps=6)
    outcome = read(tmp_path)[0]["outcome"]
    assert outcome["level"] == "bad"
    assert "val_loss was not finite in 1 validation." in outcome["verdict"]


def test_resumed_run_with_nothing_left_to_train_says_so(tmp_path):
    checkpoint = ModelCheckpoint(tmp_path, filename="all", every_n_train_steps=8)
    fit(tmp_path, callbacks=[checkpoint], enable_checkpointing=True)
    fit(tmp_path, ckpt_path=tmp_path / "all.ckpt")
    data, _ = read(tmp_path)
    assert data["resumed"] == {"step": 8, "checkpoint": str(tmp_path / "all.ckpt")}
    assert (data["head"]["num_steps"], data["head"]["last_step"]) == (0, 8)
    assert data["outcome"]["level"] == "warn"


def test_values_that_differ_are_shown_with_digits_that_differ():
    assert _describe_change(10.8358, 10.8413) == "10.836 to 10.841"
    assert _describe_change(2.5, 1.25) == "2.5 to 1.25"
    assert _describe_change(2.0, 2.0) == "2 to 2"


def test_end_of_a_fit_is_told_in_one_line(tmp_path, caplog):
    checkpoint = ModelCheckpoint(tmp_path / "saved", filename="{step}", save_last=True)
    caplog.set_level("INFO")
    fit(tmp_path, callbacks=[checkpoint], enable_checkpointing=True)
    head = read(tmp_path)[0]["head"]
    (told,) = (message for message in caplog.messages if "Run report: " in message)
    first, second = told.splitlines()
    loss = f"loss {head['first_loss']:.4g} to {head['final_loss']:.4g}"
    assert first.startswith(
        f"8 optimizer steps; {loss} (means of the first 2 and the last 2 steps; the first step alone "
    )
    assert first.endswith(f"; {head['tokens_per_s']:,.0f} tokens/s; last checkpoint {tmp_path / 'saved' / 'last.ckpt'}")
    assert second == f"Run report: {tmp_path / 'run.html'}"


def test_best_checkpoint_is_told_where_one_is_watched_for(tmp_path, caplog):
    checkpoint = ModelCheckpoint(tmp_path / "saved", monitor="train_loss", every_n_train_steps=1)
    caplog.set_level("INFO")
    fit(tmp_path, callbacks=[checkpoint], enable_checkpointing=True)
    assert read(tmp_path)[0]["checkpoints"] == {"best": checkpoint.best_model_path}
    assert f"; best checkpoint {checkpoint.best_model_path}\n" in caplog.text


@pytest.mark.parametrize("reads", [0, 1, 2])
def test_what_only_logged_steps_read_is_named_and_no_verdict(tmp_path, reads):
    class Reads(Keeps):
        def training_step(self, batch, batch_idx):
            loss = PlainModule.training_step(self, batch, batch_idx)
            for _ in range(reads):
                loss.item()
            return loss

    logger = CSVLogger(tmp_path)
    fit(tmp_path, Reads(), RunReport(tmp_path / "run.html", profile_step=4), logger=logger, log_every_n_steps=1)
    data, text = read(tmp_path)
    (logged,) = (row for row in data["waits"]["rows"] if row["is_logging"])
    assert "reading what self.log was given (train_loss), on logged steps only" in Page(text).text
    assert "apply_func" not in logged["place"] + str(logged["library"])
    told = [sentence for sentence in data["outcome"]["verdict"] if "would wait" in sentence]
    times = {0: [], 1: ["1 time a step"], 2: ["2 times a step"]}[reads]
    assert told == [f"On a GPU the host would wait {number}; the table names the lines." for number in times]


class SlowLoader(torch.utils.data.DataLoader):
    sleep = None

    def __iter__(self):
        for batch in super().__iter__():
            self.sleep(0.05)
            yield batch


def test_waiting_for_data_is_told_apart(tmp_path, clock):
    loader = SlowLoader(packed_batches(8), batch_size=None)
    loader.sleep = clock.sleep
    fit(tmp_path, loader=loader)
    data, _ = read(tmp_path)
    (between,) = (part for part in data["times"]["parts"] if part["kind"] == "between")
    assert between["mean_ms"] >= 45
    assert any("between micro-batches" in sentence for sentence in data["outcome"]["verdict"])


def test_validation_is_in_no_time(tmp_path, clock):
    class Validates(Keeps):
        def validation_step(self, batch, batch_idx):
            clock.sleep(0.2)
            super().validation_step(batch, batch_idx)

    fit(tmp_path, Validates(), loader=(packed_loader(8), packed_loader(1)), val_check_interval=4, limit_val_batches=1)
    data, _ = read(tmp_path)
    (between,) = (part for part in data["times"]["parts"] if part["kind"] == "between")
    assert between["mean_ms"] < 20
    assert data["slowest"]["ms"] < 200


def test_loss_of_a_step_is_the_mean_over_the_labelled_tokens_of_its_window(tmp_path):
    """Micro-batches of 1 and 30 labelled tokens: alone, each loss is scaled by its share."""
    rng = np.random.default_rng(0)
    documents = []
    for num_labelled in (1, 30, 30, 1):
        ids = rng.integers(1, 90, size=40)
        documents.append(Document(ids, np.where(np.arange(40) >= 40 - num_labelled, ids, -100)))
    loader = torch.utils.data.DataLoader(
        [collate([document], num_items=31 / 2) for document in documents], batch_size=None
    )

    class Still(Keeps):
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.0)

    module = Still()
    fit(tmp_path, module, loader=loader, max_steps=2, accumulate_grad_batches=2)
    data, text = read(tmp_path)
    singly = [module.model(**collate([document])).loss.item() for document in documents]
    truth = [(singly[0] + 30 * singly[1]) / 31, (30 * singly[2] + singly[3]) / 31]
    assert [point[2] for point in data["curves"]["loss"]["points"]] == pytest.approx(truth, rel=1e-4)
    assert (data["head"]["first_loss"], data["head"]["final_loss"]) == pytest.approx(truth, rel=1e-4)
    assert (data["head"]["num_steps"], data["head"]["num_batches"]) == (2, 4)
    assert "Each point is one optimizer step." in Page(text).text


@pytest.mark.parametrize(
    ("error", "state"), [(ArithmeticError("broken " + HOSTILE), "failed"), (KeyboardInterrupt(), "interrupted")]
)
def test_report_is_written_when_the_run_is_ended(tmp_path, error, state):
    with pytest.raises(SystemExit if state == "interrupted" else ArithmeticError):
        fit(tmp_path, Keeps(fail_at=5, error=error), RunReport(tmp_path / "run.html", profile_step=5))
    data, text = read(tmp_path)
    assert data["outcome"]["state"] == state
    assert data["outcome"]["error"]["type"] == type(error).__name__
    assert data["outcome"]["verdict"][0].startswith(
        f"The run {'was interrupted' if state == 'interrupted' else 'failed'} after 5 optimizer steps"
    )
    assert data["outcome"]["level"] == ("warn" if state == "interrupted" else "bad")
    assert (data["head"]["num_steps"], len(data["curves"]["loss"]["points"]), data["times"]["num_batches"]) == (5, 5, 2)
    assert {"packed attention", "loss head"} <= {
        status["name"] for status in data["statuses"] if status["state"] == "active"
    }
    assert not torch.autograd._profiler_enabled()
    assert "script" not in Page(text).tags


def test_error_of_the_report_does_not_replace_the_error_of_the_run(tmp_path):
    broken = mock.patch.object(content, "describe_model", side_effect=RuntimeError("no model"))
    with broken, pytest.warns(UserWarning, match="could not be written"), pytest.raises(ArithmeticError):
        fit(tmp_path, Keeps(fail_at=1, error=ArithmeticError()))


def test_full_disk_does_not_end_a_trained_run(tmp_path):
    with (
        mock.patch("lightning_fastft.packing.store.dataset.replace_file", side_effect=OSError("No space left")),
        pytest.warns(UserWarning, match="No space"),
    ):
        fit(tmp_path, max_steps=2)


def test_folder_that_cannot_be_is_refused_before_training(tmp_path):
    (tmp_path / "file").write_text("")
    module = Keeps()
    with pytest.raises(OSError, match="file"):
        fit(tmp_path, module, RunReport(tmp_path / "file" / "run.html"))
    assert not module.losses


def test_hostile_texts_are_escaped_and_secrets_are_nowhere(tmp_path, monkeypatch):
    token = "hf_" + "a" * 20
    monkeypatch.setattr(
        sys,
        "argv",
        ["train.py", "--hf_token", token, "--api_key=abc123", f"--name={HOSTILE}", "--data.max_tokens=4096"],
    )
    monkeypatch.setenv("SECRET_FOR_TEST", "environment-is-not-read")

    class Hostile(Keeps):
        def __init__(self, name, api_key, password):
            super().__init__()
            self.save_hyperparameters()
            self.model.config._name_or_path = name

    class Refuses(pl.Callback):
        def status(self):
            return Status(HOSTILE, "refused", f"see ftp://me:hunter2@host/{HOSTILE} {token}", HOSTILE)

    fit(tmp_path, Hostile(HOSTILE, "abc123", "hunter3"), callbacks=[Refuses()], max_steps=2)
    data, text = read(tmp_path)
    page = Page(text)
    assert not {"script", "img"} & set(page.tags)
    assert page.text.count('<script>alert("1")</script>') >= 4
    assert data["head"]["name"] == HOSTILE
    both = text + json.dumps(data)
    assert not [
        secret for secret in (token, "abc123", "hunter2", "hunter3", "environment-is-not-read") if secret in both
    ]
    assert data["options"]["module"]["api_key"] == "[removed]"
    assert "--data.max_tokens=4096" in data["command"]
    assert any("Refused:" in sentence for sentence in data["outcome"]["verdict"])


def test_losses_that_are_not_finite_are_counted_and_the_json_stays_strict(tmp_path):
    class Breaks(Keeps):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return loss * float("nan") if batch_idx == 2 else loss

    fit(tmp_path, Breaks(), max_steps=4)
    data, _ = read(tmp_path)
    assert data["curves"]["loss"]["num_not_finite"] >= 1
    assert data["outcome"]["level"] == "bad"
    assert "NaN" not in (tmp_path / "run.json").read_text()


def test_second_fit_begins_afresh(tmp_path):
    report = RunReport(tmp_path / "run.html", profile_step=1)
    fit(tmp_path, report=report, max_steps=6)
    fit(tmp_path, report=report, max_steps=4)
    data, _ = read(tmp_path)
    assert (data["head"]["num_steps"], data["packing"]["num_packs"], len(data["curves"]["loss"]["points"])) == (4, 4, 4)


def test_module_of_anybodys_under_a_foreign_strategy(tmp_path):
    class Linear(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(4, 1)
            self.automatic_optimization = False

        def training_step(self, batch, batch_idx):
            for _ in range(2):
                self.manual_backward(self.linear(batch).square().mean())
                self.optimizers().step()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    report = RunReport(profile_step=None)
    fit(
        tmp_path, Linear(), report, loader=torch.utils.data.DataLoader(torch.randn(8, 4)), strategy="auto", max_steps=16
    )
    assert report.html_path == tmp_path / "run_report.html"
    data, text = read(tmp_path, "run_report")
    assert (data["head"]["tokens_per_s"], data["head"]["final_loss"], data["packing"], data["head"]["num_steps"]) == (
        None,
        None,
        None,
        16,
    )
    assert "unknown" in Page(text).text
    assert {part["kind"] for part in data["times"]["parts"] if part["mean_ms"] > 0} == {
        "between",
        "forward",
        "backward",
        "optimizer",
    }


class ByHand(PlainModule):
    """Steps with each of its optimizers num_steps times in each window of batches, and returns the loss of a batch."""

    automatic_optimization = False

    def __init__(self, *, num_steps=1, num_optimizers=1, num_summed=1):
        super().__init__(tiny_llama())
        self.num_steps, self.num_optimizers, self.num_summed, self.losses = num_steps, num_optimizers, num_summed, []

    def configure_optimizers(self):
        return [torch.optim.SGD(self.parameters(), lr=0.1) for _ in range(self.num_optimizers)]

    def training_step(self, batch, batch_idx):
        optimizers = self.optimizers()
        for optimizer in (optimizers if isinstance(optimizers, list) else [optimizers]) * self.num_steps:
            loss = self.model(**batch).loss
            self.manual_backward(loss / self.num_summed)
            if (batch_idx + 1) % self.num_summed == 0:
                optimizer.step()
                optimizer.zero_grad()
        self.losses.append(float(loss.detach()))
        return loss.detach()


@pytest.mark.parametrize("options", [{"num_steps": 2}, {"num_optimizers": 2}])
def test_steps_are_those_of_lightning_where_a_batch_has_two_by_hand(tmp_path, options):
    module = ByHand(**options)
    report = RunReport(tmp_path / "run.html", profile_step=3)
    fit(tmp_path, module, report, loader=(packed_loader(8), packed_loader(1)), max_steps=16)
    data, text = read(tmp_path)
    head, page = data["head"], " ".join(Page(text).text.split())
    assert (head["num_steps"], head["last_step"], head["num_batches"]) == (16, 16, 8)
    assert [point[:2] for point in data["curves"]["loss"]["points"]] == [[2 * step] * 2 for step in range(8)]
    assert data["validation"]["step"] == 16
    rates = [[point[0] for point in rate["points"]] for rate in data["learning_rates"]]
    assert rates == ([[*range(0, 16, 2)], [*range(1, 16, 2)]] if module.num_optimizers == 2 else [[*range(16)]])
    assert (data["profile"]["step"], data["waits"]["num_steps"]) == (6, 1)
    assert head["first_loss"] == pytest.approx(sum(module.losses[:2]) / 2)
    assert "means of the first 2 and the last 2 batches; the first batch alone" in page
    for sentence in ("Each point is one batch.", "watched batch."):
        assert sentence in page


def test_steps_of_a_resumed_run_that_steps_twice_in_a_batch_follow_those_of_the_checkpoint(tmp_path):
    trainer = fit(tmp_path, ByHand(num_steps=2), loader=packed_loader(4), max_steps=8)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    with pytest.warns(UserWarning, match="max_steps was 8 and is 16"):
        fit(tmp_path, ByHand(num_steps=2), loader=packed_loader(8), max_steps=16, ckpt_path=tmp_path / "a.ckpt")
    data, _ = read(tmp_path)
    assert (data["resumed"]["step"], data["head"]["num_steps"], data["head"]["last_step"]) == (8, 8, 16)
    assert [point[0] for point in data["curves"]["loss"]["points"]] == [8, 10, 12, 14]


def test_gradients_summed_by_hand_have_the_mean_loss_and_a_profile_of_the_step(tmp_path, monkeypatch):
    rows = [{"input_ids": [*range(1, 20)], "labels": [*range(1, 20)]} for _ in range(12)]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = quiet_data(tmp_path / "train.jsonl", max_tokens=20)
    module, report = ByHand(num_summed=3), RunReport(tmp_path / "run.html", profile_step=1)
    stop, read_after = run_report.StepProfile.stop, []
    monkeypatch.setattr(
        run_report.StepProfile, "stop", lambda profile: (read_after.append(len(module.losses)), stop(profile))[1]
    )
    fit(tmp_path, module, report, loader=(data,), max_steps=4)
    report, _ = read(tmp_path)
    losses = [point[2] for point in report["curves"]["loss"]["points"]]
    assert losses == pytest.approx([sum(module.losses[first : first + 3]) / 3 for first in range(0, 12, 3)])
    assert (read_after, report["profile"]["step"]) == ([6], 1)


def test_plan_is_drawn_layer_by_layer(tmp_path):
    mib = 2**20
    values = (ValueCost("attention", 80 * mib, 4.0), ValueCost("mlp.up_proj", 140 * mib, 3.0))
    cost = StepCost(
        (SegmentCost(40 * mib, 900 * mib, 12.0, 24.0, 11.0, values, 200 * mib, 400 * mib, 0),) * 6,
        2048 * mib,
        300 * mib,
        60.0,
        20.0,
    )
    plan = make_plan(
        cost, vram_budget_bytes=5000 * mib, host_budget_bytes=4096 * mib, machine=Machine("test", 20e9, 20e9)
    )
    with mock.patch.object(run_report, "_find_plans", return_value=[(cost, plan)]):
        fit(tmp_path, max_steps=2)
    data, text = read(tmp_path)
    (shown,) = data["plans"]
    assert [layer["is_kept"] for layer in shown["layers"]] == [segment.is_kept for segment in plan.segments]
    assert [tuple(moment) for moment in shown["memory"]] == list(plan.prediction.memory)
    assert shown["peak_gib"] == plan.prediction.peak_bytes / 2**30
    picture = text[text.index('aria-label="device memory over a step"') :].partition("</svg>")[0]
    heights = [float(height) for height in re.findall(r'height="([\d.]+)"><title>', picture)]
    assert heights == pytest.approx(
        [150 * num_bytes / plan.prediction.peak_bytes for _, num_bytes in plan.prediction.memory], abs=0.01
    )
    assert Page(text).text.count("predicted peak") == 1


def test_plans_are_found_where_the_strategy_keeps_them():
    stack, unplanned = mock.Mock(cost="cost", plan="plan"), mock.Mock(cost=None, plan=None)
    trainer = mock.Mock(callbacks=[], strategy=mock.Mock())
    trainer.strategy.packed_steps.activations.stacks = [unplanned, stack]
    assert run_report._find_plans(trainer) == [("cost", "plan")]


def test_only_rank_zero_writes(tmp_path):
    with mock.patch.object(pl.Trainer, "is_global_zero", False):
        fit(tmp_path, report=RunReport(tmp_path / "other" / "run.html"), max_steps=2)
    assert not (tmp_path / "other").exists()


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two_ranks")
    run_two_ranks("tests.monitor.run_report_worker", folder)
    return folder


def losses_of_parts(step):
    """Sums over the labelled tokens of each part of a step, and the tokens."""
    module, parts = Still(), [documents_of(step, part) for part in range(NUM_MICRO_BATCHES * NUM_RANKS)]
    # One document at a time: outside of a run nothing keeps the documents of a pack apart.
    sums = [
        sum(module.model(**collate([document])).loss.item() * count_labelled([document]) for document in documents)
        for documents in parts
    ]
    return np.array(sums), np.array([count_labelled(documents) for documents in parts])


@pytest.mark.slow
def test_loss_of_several_ranks_is_the_mean_over_the_labelled_tokens_of_all(two_ranks):
    data, text = read(two_ranks / "whole")
    sums_and_numbers = [losses_of_parts(step) for step in range(NUM_STEPS)]
    truth = [sums.sum() / numbers.sum() for sums, numbers in sums_and_numbers]
    of_rank_0 = [sums[::NUM_RANKS].sum() * NUM_RANKS / numbers.sum() for sums, numbers in sums_and_numbers]
    loss = data["curves"]["loss"]
    assert [point[2] for point in loss["points"]] == pytest.approx(truth, rel=1e-4)
    assert of_rank_0 != pytest.approx(truth, rel=0.1), "the ranks are to differ"
    assert (data["head"]["first_loss"], data["head"]["final_loss"]) == pytest.approx((truth[0], truth[-1]), rel=1e-4)
    assert (loss["ranks"], loss["why_alone"]) == ([0, 1], "")
    assert [rank["rank"] for rank in data["ranks"]] == [0, 1]
    assert data["head"]["peak_memory_gib"] == max(rank["peak_memory_gib"] for rank in data["ranks"]) > 0
    assert data["head"]["tokens_per_s"] == pytest.approx(sum(rank["tokens_per_s"] for rank in data["ranks"]))
    assert "The mean over all 2 ranks" in " ".join(Page(text).text.split())


@pytest.mark.slow
def test_packs_of_several_ranks_are_those_of_all(two_ranks):
    data, text = read(two_ranks / "whole")
    packing = data["packing"]
    contexts = [batch.context for rank in range(NUM_RANKS) for batch in batches_of(rank)]
    lengths = np.concatenate([np.diff(context.start_host_S1.numpy()) for context in contexts])
    assert (packing["num_packs"], packing["num_ranks"]) == (len(contexts), NUM_RANKS)
    assert packing["num_documents"] == len(lengths) == sum(bar["count"] for bar in packing["lengths"])
    assert packing["num_real_tokens"] == packing["num_tokens"] == int(lengths.sum())
    assert packing["num_labelled"] == sum(context.num_labelled for context in contexts)
    assert packing["longest_document_tokens"] == int(lengths.max())
    for bar in packing["lengths"]:
        assert bar["count"] == int(((lengths >= bar["low"]) & (lengths <= bar["high"])).sum())
    assert "Of the packs of all ranks" in " ".join(Page(text).text.split())
    alone, text = read(two_ranks / "broken")
    assert alone["packing"]["num_ranks"] == 1
    assert "Of the packs of rank 0" in " ".join(Page(text).text.split())


@pytest.mark.slow
def test_samples_of_ddp_and_fsdp_are_those_of_the_model_alone(two_ranks):
    answers = json.loads((two_ranks / "fastft_ddp" / "answers.json").read_text())
    assert all(answers)
    for strategy in ("fastft_ddp", "fastft_fsdp"):
        prompts = read(two_ranks / strategy)[0]["samples"]["prompts"]
        assert [[answer["text"] for answer in prompt["answers"]] for prompt in prompts] == [
            [one] * 2 for one in answers
        ]


@pytest.mark.slow
def test_report_of_a_run_whose_other_rank_is_gone_says_that_it_is_rank_zeros_alone(two_ranks):
    data, text = read(two_ranks / "broken")
    assert (data["outcome"]["state"], data["head"]["num_steps"]) == ("failed", GONE_AT)
    loss = data["curves"]["loss"]
    sums, numbers = losses_of_parts(0)
    assert loss["points"][0][2] == pytest.approx(sums[::NUM_RANKS].sum() * NUM_RANKS / numbers.sum(), rel=1e-4)
    assert (len(loss["points"]), loss["ranks"]) == (GONE_AT, [0])
    assert loss["why_alone"] == "the run ended before the other ranks could be asked"
    assert (
        "Of rank 0 alone, scaled by its share of the labels, as are the first and the last loss above: "
        f"{loss['why_alone']}." in " ".join(Page(text).text.split())
    )


def test_ranks_that_noted_different_steps_are_told(tmp_path):
    def gather(self, own_V):
        other = StepLosses()
        other.add(0, 1.0, is_last=True)
        losses_V = torch.from_numpy(other.to_array())
        # Lengths of documents, which are gathered too, are fewer.
        is_lengths = len(own_V) < len(losses_V)
        return torch.stack([own_V, own_V if is_lengths else torch.cat([own_V[: -len(losses_V)], losses_V])])

    with mock.patch.object(FastFTStrategy, "all_gather", gather), mock.patch.object(pl.Trainer, "world_size", 2):
        fit(tmp_path)
    data, text = read(tmp_path)
    assert (data["curves"]["loss"]["ranks"], len(data["curves"]["loss"]["points"])) == ([0], 8)
    assert data["curves"]["loss"]["why_alone"] == "the ranks recorded different steps"
    assert "Of rank 0 alone" in " ".join(Page(text).text.split())


def test_hooks_read_nothing_from_the_device(tmp_path):
    """Of what the dispatcher sees in steps, nothing is the callback's; the host's own offsets it may read."""

    class Counts(pl.Callback):
        def on_train_start(self, *args):
            self.waits = count_host_waits()
            self.waits.__enter__()

        def on_train_end(self, *args):
            self.waits.__exit__()

    counts, report = Counts(), RunReport(tmp_path / "run.html", profile_step=None)
    with mock.patch.object(AsyncScalarReader, "poll", return_value=[]):
        trainer = quiet_trainer(tmp_path, strategy=FastFTStrategy(), callbacks=[counts, report], max_steps=4)
        trainer.fit(PlainModule(tiny_llama()), packed_loader(4))
    assert not [origin for origin in counts.waits.origin if "run_report.py" in origin or "timing.py" in origin]
    assert {origin.partition(":")[0] for origin in counts.waits.origin if "report/" in origin} == {"numpy"}


def trace_events():
    def event(category, start, duration, correlation=0, name="kernel", **arguments):
        return {
            "ph": "X",
            "cat": category,
            "ts": start,
            "dur": duration,
            "name": name,
            "args": {"correlation": correlation, **arguments},
        }

    return [
        event("cuda_runtime", 0, 5, 1),
        event("kernel", 100, 100, 1),
        event("cuda_runtime", 10, 5, 2),
        event("kernel", 400, 100, 2),
        event("gpu_memcpy", 150, 250, 3, "Memcpy DtoH (Device -> Pinned)", bytes=2**24),
        event("gpu_memcpy", 0, 9, 4, "Memcpy HtoD", bytes=8),
    ]


def test_lanes_of_a_gpu_profile_are_on_the_page(finished):
    _, data, _ = finished
    trace = StepTrace(*read_events(trace_events()), [("kernel", 2, 200.0)])
    profile = describe_profile(trace, step=4, is_cuda=True, why_not="")
    assert [lane["name"] for lane in profile["lanes"]] == ["compute", "copies to the host", "copies to the device"]
    compute, down, up = (
        [sum(lane["shares"][i * 50 : (i + 1) * 50]) / 50 for i in range(4)] for lane in profile["lanes"]
    )
    assert compute == pytest.approx([1, 0, 0, 1])
    assert down == pytest.approx([0.5, 1, 1, 0])
    assert up == [0, 0, 0, 0]
    page = Page(render_page({**data, "profile": profile}))
    assert {profile["hidden_share"], profile["exposed_ms"], profile["d2h_gib"]} <= set(page.figures)
    assert math.isclose(profile["d2h_gib"], 2**24 / 2**30)


@pytest.mark.parametrize(
    "options", [{"path": "run.txt"}, {"path": "folder"}, {"profile_step": -1}, {"profile_step": 1.5}]
)
def test_refuses_options_that_cannot_be(options):
    with pytest.raises(OptionError):
        RunReport(**options)


@pytest.mark.gpu
@pytest.mark.alone
def test_gpu_report_has_device_times_lanes_and_adds_no_wait(tmp_path):
    detector = HostWaitDetector(steps=[6, 7])
    module = PlainModule(tiny_llama())
    fit(
        tmp_path,
        module,
        RunReport(tmp_path / "run.html", profile_step=4),
        callbacks=[detector],
        max_steps=12,
        accelerator="gpu",
        loader=torch.utils.data.DataLoader(packed_batches(12), batch_size=None, pin_memory=True),
    )
    data, text = read(tmp_path)
    Page(text)
    assert data["times"]["clock"] == "CUDA events"
    assert data["times"]["num_batches"] == 12 - 3 - 1 - 2
    assert [lane["kind"] for lane in data["profile"]["lanes"]] == ["compute", "d2h", "h2d"]
    assert data["profile"]["busy_ms"] > 0
    assert len(data["curves"]["loss"]["points"]) == 12
    assert data["head"]["tokens_per_s"] > 0
    assert not [
        wait
        for wait in detector.waits
        if "lightning_fastft/callbacks" in wait.place.file or "lightning_fastft/monitor" in wait.place.file
    ]
