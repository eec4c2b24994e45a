"""Runs that save to a URL: refused before the first step if they cannot, resumed to the bit, stopped."""

import os
import shutil

import fsspec
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO

from lightning_fastft.callbacks.watchdog import Watchdog
from lightning_fastft.checkpoint import remote
from lightning_fastft.checkpoint.io import VerifiedCheckpointIO
from lightning_fastft.checkpoint.places import prepare_places
from lightning_fastft.checkpoint.stops import RunStopped
from lightning_fastft.core.errors import CheckpointNotSavedError, OptionError, UnsafeCheckpointError
from lightning_fastft.monitor.run_report import RunReport
from lightning_fastft.strategies.fsdp2 import FastFTFSDPStrategy
from tests.checkpoint.faulty_files import DriverError, FaultyFiles, register
from tests.parity.resume_worker import differences, train
from tests.support.training_parts import PlainModule, packed_loader, quiet_trainer, tiny_llama
from tests.support.two_ranks import run_two_ranks

pytestmark = pytest.mark.filterwarnings("ignore:Resumed with another setting", "ignore::UserWarning:lightning.*")


class Stop(Callback):
    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step == (2 if trainer.ckpt_path else 1):
            os.kill(os.getpid(), 15)


class Fail(Callback):
    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step == 2:
            raise KeyError("planted")


@pytest.fixture
def bucket(tmp_path, monkeypatch):
    """A folder in memory; the current folder is one in which nothing must appear."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    files = fsspec.filesystem("memory")
    yield "memory://bucket/runs"
    files.rm("/bucket", recursive=True) if files.exists("/bucket") else None
    assert not list((tmp_path / "here").iterdir())


@pytest.fixture
def store(tmp_path):
    register()
    FaultyFiles.reset()
    yield tmp_path / "store"
    FaultyFiles.reset()


def saver(folder, **options):
    options = {"save_last": True, "save_top_k": -1, "every_n_train_steps": 1, "filename": "{step}", **options}
    return ModelCheckpoint(str(folder), **options)


def fit(folder, *callbacks, ckpt_path=None, **options):
    options = {"strategy": "fastft", "max_steps": 4, "enable_checkpointing": True, **options}
    trainer = quiet_trainer(folder, callbacks=list(callbacks), **options)
    trainer.fit(PlainModule(tiny_llama()), packed_loader(6), ckpt_path=ckpt_path)
    return trainer


def names_in(url):
    files, place = fsspec.core.url_to_fs(url)
    return sorted(os.path.basename(name) for name in files.ls(place, detail=False))


# Before the first step.


@pytest.mark.parametrize("error", [PermissionError, DriverError])
def test_folder_that_cannot_be_written_to_is_refused_before_the_first_step(store, tmp_path, monkeypatch, error):
    def refuse(*args, **kwargs):
        raise error("denied")

    monkeypatch.setattr(FaultyFiles, "pipe_file", refuse)
    with pytest.raises(CheckpointNotSavedError, match=r"cannot be saved to faulty:.*denied"):
        fit(tmp_path, saver(f"faulty://{store}"), Fail())


def test_sharded_checkpoints_refuse_a_url_before_the_first_step(bucket, tmp_path):
    options = {"enable_checkpointing": True, "callbacks": [saver(bucket)]}
    trainer = quiet_trainer(tmp_path, strategy=FastFTFSDPStrategy(), **options)
    with pytest.raises(UnsafeCheckpointError, match="local or mounted"):
        prepare_places(trainer, VerifiedCheckpointIO())


def test_report_is_refused_where_the_folder_is_remote(bucket, tmp_path):
    with pytest.raises(OptionError, match="RunReport"):
        fit("memory://bucket", RunReport(), plugins=[TorchCheckpointIO()], enable_checkpointing=False)
    with pytest.raises(OptionError, match="local"):
        RunReport("s3://bucket/run.html")


# What is saved, and what is removed.


def test_worse_checkpoints_are_removed_and_last_is_replaced(bucket, tmp_path):
    callback = saver(bucket, save_top_k=2, monitor="step", mode="max")
    trainer = fit(tmp_path, callback)
    assert names_in(bucket) == ["last.ckpt", "step=3.ckpt", "step=4.ckpt"]
    assert [len(names_in(f"{bucket}/{name}")) for name in names_in(bucket)] == [1, 1, 1]
    assert trainer.strategy.checkpoint_io.load_checkpoint(callback.best_model_path)["global_step"] == 4


def test_checkpoints_of_default_root_dir_go_to_its_url(bucket):
    trainer = fit(bucket)
    (name,) = names_in(f"{bucket}/checkpoints")
    assert trainer.strategy.checkpoint_io.load_checkpoint(f"{bucket}/checkpoints/{name}")["global_step"] == 4


def test_asynchronous_saves_are_uploaded(bucket, tmp_path):
    fit(tmp_path, saver(bucket), plugins=[AsyncCheckpointIO()])
    assert VerifiedCheckpointIO().load_checkpoint(f"{bucket}/last.ckpt")["global_step"] == 4


def test_failed_upload_ends_the_run_and_the_one_before_is_resumed(store, tmp_path):
    folder = f"faulty://{store}"

    def fail_third(steps):
        if steps[-1] == f"half {remote.RECORD}" and steps.count(steps[-1]) == 3:
            raise DriverError("the connection is gone")

    FaultyFiles.fault = staticmethod(fail_third)
    with pytest.raises(CheckpointNotSavedError, match="connection is gone"):
        fit(tmp_path, saver(folder, save_last=False))
    FaultyFiles.reset()
    trainer = fit(tmp_path, saver(folder), ckpt_path=f"{folder}/step=2.ckpt")
    assert trainer.global_step == 4


# Resume.


@pytest.mark.parametrize("stop", [3, 8])
def test_run_resumed_from_a_url_equals_the_one_that_went_on(bucket, tmp_path, stop):
    whole = train("lora", "one", bucket, keep=True)
    assert differences(whole, train("lora", "one", tmp_path, ckpt_path=f"{bucket}/step={stop}.ckpt"), after=stop) == []


def test_last_is_the_newest_of_the_urls(bucket, tmp_path):
    fit(tmp_path, saver(bucket), max_steps=2)
    with pytest.raises(RunStopped) as stopped:
        fit(tmp_path, saver(bucket, save_last=False, save_top_k=0), Stop(), max_steps=6, ckpt_path="last")
    assert stopped.value.path == f"{bucket}/stopped-step=3.ckpt"
    trainer = fit(tmp_path, saver(bucket), max_steps=5, ckpt_path="last")
    assert trainer.ckpt_path == stopped.value.path
    assert trainer.global_step == 5


def test_last_without_one_begins_anew(bucket, tmp_path):
    with pytest.warns(UserWarning, match="no last checkpoint"):
        assert fit(tmp_path, saver(bucket), ckpt_path="last").global_step == 4


def test_last_is_what_an_exception_left_at_its_url(bucket, tmp_path):
    with pytest.raises(KeyError):
        fit(tmp_path, OnExceptionCheckpoint(f"{bucket}/failed"), Fail())
    callbacks = [OnExceptionCheckpoint(f"{bucket}/failed")]
    trainer = fit(tmp_path, *callbacks, ckpt_path="last")
    assert trainer.ckpt_path == f"{bucket}/failed/on_exception.ckpt"


def flip(place):
    (save,) = place.iterdir()
    data = bytearray((save / remote.DATA).read_bytes())
    data[len(data) // 2] ^= 1
    (save / remote.DATA).write_bytes(data)


def tear(place):
    (save,) = place.iterdir()
    (save / remote.RECORD).unlink()


@pytest.mark.parametrize(("damage", "is_said"), [(flip, True), (tear, False)])
def test_last_passes_over_what_is_damaged_or_torn(store, tmp_path, recwarn, damage, is_said):
    """Where a record is missing there is no checkpoint, as if that save had never begun."""
    folder = f"faulty://{store}"
    fit(tmp_path, saver(folder), max_steps=3)
    for name in ("step=1", "step=2"):
        shutil.rmtree(store / f"{name}.ckpt")
    fit(tmp_path, saver(folder, save_top_k=0), max_steps=4, ckpt_path=f"{folder}/step=3.ckpt")
    damage(store / "last.ckpt") if damage is flip else None
    if damage is tear:
        # The stopped run before it is then the newest that counts.
        tear(store / "last.ckpt")
        shutil.move(store / "step=3.ckpt", store / "stopped-step=3.ckpt")
    trainer = fit(tmp_path, saver(folder), max_steps=5, ckpt_path="last")
    assert trainer.ckpt_path == f"{folder}/{'stopped-step=3' if damage is tear else 'step=3'}.ckpt"
    assert any("is damaged" in str(entry.message) for entry in recwarn) == is_said


def test_stop_under_another_checkpoint_io_is_saved_to_the_url(bucket, tmp_path):
    with pytest.raises(RunStopped) as stopped:
        fit(tmp_path, ModelCheckpoint(bucket), Watchdog(), Stop(), plugins=[TorchCheckpointIO()])
    assert stopped.value.path == f"{bucket}/stopped-step=2.ckpt"
    assert fsspec.filesystem("memory").isfile(stopped.value.path)


# Two ranks.


@pytest.mark.slow
def test_one_rank_uploads_and_both_hear_of_a_failure(tmp_path):
    run_two_ranks("tests.checkpoint.remote_worker", tmp_path)
    told = [torch.load(tmp_path / f"rank{rank}", weights_only=True) for rank in range(2)]
    assert [entry["error"] for entry in told] == ["CheckpointNotSavedError"] * 2
    assert [entry["resumed_at"] for entry in told] == [2, 2]
    assert [entry["uploads"] > 0 for entry in told] == [True, False]
