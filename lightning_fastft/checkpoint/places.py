"""Check the checkpoint folders of a run's callbacks before the first step."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy

from lightning_fastft.checkpoint import remote
from lightning_fastft.checkpoint.io import VerifiedCheckpointIO
from lightning_fastft.checkpoint.ranks import on_all_ranks
from lightning_fastft.core.checks import local_path
from lightning_fastft.core.errors import CheckpointNotSavedError
from lightning_fastft.core.files import find_write_obstacle

if TYPE_CHECKING:
    from lightning.fabric.plugins import CheckpointIO
    from lightning.pytorch import Trainer


def prepare_places(trainer: Trainer, io: CheckpointIO) -> None:
    """Check that every folder of ModelCheckpoint can be written to. All ranks must call this.

    Raises:
        UnsafeCheckpointError: A folder is neither local nor mounted, and the strategy saves sharded checkpoints.
        CheckpointNotSavedError: A folder cannot be created or written to.

    Cost:
        For each URL, an object of a few bytes is written and removed.
    """
    if not isinstance(io, VerifiedCheckpointIO) or getattr(trainer, "fast_dev_run", False):
        return
    callbacks = [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, ModelCheckpoint)]
    places = [str(callback.dirpath) for callback in callbacks if callback.dirpath is not None and _saves(callback)]
    # Sharded runs convert the URL to a Path, and their ranks write to one folder.
    takes_urls = not isinstance(trainer.strategy, ModelParallelStrategy)
    urls = [place for place in places if takes_urls and remote.is_remote(place)]
    folders = [local_path(place, use="saved to") for place in places if place not in urls]

    def check() -> None:
        for folder in folders if trainer.is_global_zero else ():
            check_writable(folder)
        for url in urls if trainer.is_global_zero else ():
            remote.check_writable(url)

    on_all_ranks(check, error=CheckpointNotSavedError)
    for folder in folders:
        io.own(folder)
    for url in urls:
        io.own_remote(url)


def check_writable(folder: Path) -> None:
    """Check that a folder can be created and written to, and leave none behind.

    Raises:
        CheckpointNotSavedError: With the path that prevents it.
    """
    obstacle = find_write_obstacle(folder)
    if obstacle:
        raise CheckpointNotSavedError(
            f"Checkpoints cannot be saved to {folder}: {obstacle}. Set ModelCheckpoint(dirpath=...) to another folder."
        )


def _saves(callback: ModelCheckpoint) -> bool:
    return bool(callback.save_top_k or callback.save_last or callback.save_on_exception)
