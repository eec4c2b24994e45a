"""Remote folders: refused before the first step where checkpoints are verified; with Lightning's own CheckpointIO
a stop goes where it is said.
"""

import os

import fsspec
import pytest
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO

from lightning_fastft.callbacks.watchdog import Watchdog
from lightning_fastft.checkpoint.stops import RunStopped
from lightning_fastft.core.errors import OptionError, UnsafeCheckpointError
from lightning_fastft.monitor.run_report import RunReport
from tests.support.training_parts import PlainModule, packed_loader, quiet_trainer, tiny_llama

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:lightning.*")


class Stop(Callback):
    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == 1:
            os.kill(os.getpid(), 15)


@pytest.fixture
def bucket(tmp_path, monkeypatch):
    """A folder in memory; the current folder is one in which nothing must appear."""
    monkeypatch.chdir(tmp_path)
    files = fsspec.filesystem("memory")
    yield "memory://bucket/runs"
    files.rm("/bucket", recursive=True) if files.exists("/bucket") else None


def make_trainer(folder, *callbacks, **options):
    return quiet_trainer(
        folder, strategy="fastft", max_steps=4, callbacks=list(callbacks), **{"enable_checkpointing": True, **options}
    )


def test_verified_checkpoints_refuse_a_remote_folder_before_the_first_step(bucket, tmp_path):
    trainer = make_trainer(tmp_path, ModelCheckpoint(bucket))
    with pytest.raises(UnsafeCheckpointError, match="TorchCheckpointIO"):
        trainer.fit(PlainModule(tiny_llama()), packed_loader(4))
    assert trainer.global_step == 0


def test_stop_is_saved_to_the_remote_folder_and_nowhere_else(bucket, tmp_path):
    trainer = make_trainer(tmp_path, ModelCheckpoint(bucket), Watchdog(), Stop(), plugins=[TorchCheckpointIO()])
    with pytest.raises(RunStopped) as stopped:
        trainer.fit(PlainModule(tiny_llama()), packed_loader(4))
    assert stopped.value.path == f"{bucket}/stopped-step=2.ckpt"
    assert fsspec.filesystem("memory").exists(stopped.value.path)
    assert not list(tmp_path.glob("memory*"))


def test_report_is_refused_where_the_folder_is_remote(bucket, tmp_path):
    trainer = make_trainer("memory://bucket", RunReport(), plugins=[TorchCheckpointIO()], enable_checkpointing=False)
    with pytest.raises(OptionError, match="RunReport"):
        trainer.fit(PlainModule(tiny_llama()), packed_loader(4))
    with pytest.raises(OptionError, match="local"):
        RunReport("s3://bucket/run.html")
    assert not list(tmp_path.iterdir())
