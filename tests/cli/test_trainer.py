"""The command line's Trainer: a run of few steps leaves its loss, a long one is logged as seldom as Lightning would, and
the launcher says how many nodes there are.
"""

import csv
import json
import math
import os
import re
import subprocess
import sys

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint, ProgressBar, RichProgressBar, Timer

from lightning_fastft import FastFTProgressBar, FineTuner
from lightning_fastft.cli.lightning_cli import FastFTCLI
from lightning_fastft.cli.trainer import FastFTTrainer
from lightning_fastft.core.errors import OptionError
from tests.support.token_weighting_worker import CONFIG
from tests.support.two_ranks import ROOT

QUIET = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False}


def interval(*, num_batches=math.inf, **options):
    trainer = FastFTTrainer(**QUIET, **options)
    trainer.fit_loop.max_batches = num_batches
    return trainer.log_every_n_steps


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        # A tenth of the run, at least every step, at most Lightning's 50.
        ({"max_epochs": 1, "num_batches": 28}, 2),
        ({"max_epochs": 1, "num_batches": 7}, 1),
        ({"max_epochs": 1, "num_batches": 499}, 49),
        ({"max_epochs": 1, "num_batches": 10_000}, 50),
        ({"max_steps": 28, "num_batches": 10_000}, 2),
        ({"max_steps": 28}, 2),
        ({"max_steps": 1000, "max_epochs": 1, "num_batches": 40}, 4),
        # Micro-batches of a window are one step.
        ({"max_epochs": 1, "num_batches": 400, "accumulate_grad_batches": 4}, 10),
        # At least one step of every epoch, which is also what Lightning warns of.
        ({"max_epochs": 100, "num_batches": 8}, 8),
        ({"max_epochs": 100, "num_batches": 9, "accumulate_grad_batches": 4}, 3),
        # Nobody knows how long it is.
        ({"max_epochs": -1}, 50),
        ({"max_epochs": -1, "num_batches": 20}, 20),
        ({"max_epochs": 1, "num_batches": 0}, 1),
        # What is asked for is done.
        ({"log_every_n_steps": 7, "max_steps": 10}, 7),
        ({"log_every_n_steps": 0, "max_steps": 10}, 0),
        ({"log_every_n_steps": None, "max_steps": 10}, 50),
    ],
)
def test_interval_follows_the_length_of_the_run(options, steps):
    assert interval(**options) == steps


@pytest.mark.slow
@pytest.mark.parametrize("given", [[FastFTProgressBar(), Timer()], FastFTProgressBar()])
def test_bars_of_a_config_are_dropped_if_none_is_asked_for(given):
    kept = FastFTTrainer(**QUIET, callbacks=given, enable_progress_bar=False).callbacks
    assert not any(isinstance(callback, ProgressBar) for callback in kept)
    assert any(isinstance(callback, Timer) for callback in kept) == isinstance(given, list)


def test_a_second_bar_is_refused_by_name():
    with pytest.raises(OptionError, match="write RichProgressBar into a copy of the config in place of FastFT"):
        FastFTTrainer(**QUIET, callbacks=[FastFTProgressBar(), RichProgressBar()])


def test_a_callback_whose_default_is_an_enum_is_given_by_its_name():
    words = ["--model.model", json.dumps(CONFIG), "--model.init", "random", "--data.paths", "rows.jsonl"]
    words += [
        "--trainer.accelerator",
        "cpu",
        "--trainer.callbacks+=Timer",
        "--trainer.callbacks.duration",
        "00:01:00:00",
    ]
    callbacks = FastFTCLI(words, run=False).trainer.callbacks
    (timer,) = (callback for callback in callbacks if isinstance(callback, Timer))
    assert (timer._interval, timer.time_remaining()) == ("step", 3600)


def test_short_fit_leaves_its_loss_and_says_nothing_that_nobody_can_act_on(tmp_path, demo_files):
    """In a process of its own: what other libraries say they say once."""
    tuner = FineTuner(str(demo_files.model), init="random", dtype="float32")
    tuner.configure_model()
    tuner.save_pretrained(str(tmp_path / "model"))
    words = [
        "--model.model",
        "model",
        "--model.dtype",
        "float32",
        "--model.lora.r",
        "4",
        "--data.paths",
        str(demo_files.train),
    ]
    words += ["--data.max_tokens", "512", "--data.cache_dir", "null", "--data.num_workers", "0", "--data.num_proc", "1"]
    words += [
        "--trainer.accelerator",
        "cpu",
        "--trainer.max_steps",
        "28",
        "--trainer.max_epochs",
        "-1",
        "--trainer.devices",
        "1",
    ]
    words += ["--trainer.logger", "CSVLogger", "--trainer.logger.save_dir", "logs"]
    words += ["--trainer.strategy", "fastft"]
    command = [sys.executable, "-m", "lightning_fastft", "fit", *words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    # The command registers the strategy for its trainer.
    assert done.returncode == 0, done.stderr
    # Phases are reported from the first second on.
    assert re.search(r"^importing: \d+\.\d s$", done.stderr, re.MULTILINE)
    with (tmp_path / "logs/lightning_logs/version_0/metrics.csv").open() as file:
        losses = [float(row["train_loss"]) for row in csv.DictReader(file) if row["train_loss"]]
    assert len(losses) >= 10
    assert losses[-1] < losses[0]
    for words in (
        "logging interval",
        "LeafSpec",
        "is_gradient_checkpointing",
        "💡",
        "kernels-community",
        "TPU available",
    ):
        assert words not in done.stderr
    assert "GPU available" in done.stderr
    # What is ours and what Lightning says of the run is told as ever.
    assert "packed attention" in done.stderr
    assert "`max_steps=28` reached" in done.stderr


TORCHRUN = {"TORCHELASTIC_RUN_ID": "job", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}
SRUN = {
    "SLURM_JOB_ID": "7",
    "SLURM_NTASKS": "6",
    "SLURM_NTASKS_PER_NODE": "2",
    "SLURM_NNODES": "3",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_NUM_TASKS": "6",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "MASTER_ADDR": "127.0.0.1",
}


@pytest.mark.parametrize(
    ("launcher", "options", "num_nodes"),
    [
        (TORCHRUN, {"devices": 2}, 2),
        ({**TORCHRUN, "WORLD_SIZE": "2"}, {"devices": 2}, 1),
        (SRUN, {"devices": 2}, 3),
        # Shipped configs are for one device, and "auto" is one on a CPU.
        (TORCHRUN, {"devices": 1}, 2),
        (SRUN, {"devices": "auto"}, 3),
        ({}, {"devices": 2}, 1),
        ({"NODE_RANK": "1"}, {"devices": 1, "num_nodes": 2}, 2),
    ],
)
def test_numbers_of_nodes_and_devices_are_those_of_the_launcher(monkeypatch, launcher, options, num_nodes):
    for name, value in launcher.items():
        monkeypatch.setenv(name, value)
    trainer = FastFTTrainer(**QUIET, strategy="ddp", **options)
    assert trainer.num_nodes == trainer.strategy.num_nodes == num_nodes
    assert trainer.num_devices == (2 if launcher.keys() != {"NODE_RANK"} else 1)


@pytest.mark.parametrize(
    ("launcher", "message"),
    [(TORCHRUN, "started 4 processes"), (SRUN, "started 6 processes"), ({"NODE_RANK": "1"}, "--trainer.num_nodes 2")],
)
def test_ranks_that_would_train_alone_are_refused(monkeypatch, launcher, message):
    for name, value in launcher.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(OptionError, match=message):
        FastFTTrainer(**QUIET, strategy="fastft", devices=1)


def test_several_nodes_with_a_strategy_for_one_device_are_refused():
    with pytest.raises(OptionError, match="2 nodes"):
        FastFTTrainer(**QUIET, strategy="fastft", devices=1, num_nodes=2)


def test_two_checkpoint_callbacks_of_equal_settings_are_refused_with_both_folders(tmp_path):
    first, second = ModelCheckpoint(tmp_path / "a", save_last=True), ModelCheckpoint(tmp_path / "b")
    with pytest.raises(OptionError, match=r"(?s)/a and .*/b.*write its options into the config"):
        FastFTTrainer(accelerator="cpu", callbacks=[first, second])
    other = ModelCheckpoint(tmp_path / "b", monitor="val_loss")
    assert {first, other} <= set(FastFTTrainer(accelerator="cpu", callbacks=[first, other]).callbacks)
