"""Write checkpoints of sharded models in a background thread during training."""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

# DefaultStager of torch 2.11 drops its copies after each save and fails in the next one.
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.utils._pytree import tree_leaves

from lightning_fastft.checkpoint.folders import begin_folder, save_folder, take_pieces, write_folder
from lightning_fastft.checkpoint.ranks import on_all_ranks
from lightning_fastft.core.errors import CheckpointNotSavedError
from lightning_fastft.core.shards import local_values


class FolderWriter:
    """Copy the shards of a save to host memory, and write them in a thread; one save at a time.

    The commit record and the rename follow once every rank has written. Until then an empty folder reserves the name,
    so that Lightning chooses another one; nothing loads it. Every rank must call each method in the same order.

    Args:
        device: Device of the shards. For CUDA the copies are in pinned memory, and the step waits only for them.
        timeout: Timeout of the thread's process group; None is torch's default.

    Cost:
        Host memory for the shards of this rank from the first save until ``close``.

    Source:
        torch.distributed.checkpoint: its stager and ``save``; ``async_save`` returns before the folder is committed.
    """

    def __init__(self, device: torch.device, timeout: timedelta | None) -> None:
        self._device, self._on_gpu = device, device.type == "cuda"
        self._stager = StateDictStager(pin_memory=self._on_gpu)
        self._is_staged = False
        # The collectives of the thread must not mix with those of the training.
        self._group: Any = dist.new_group(backend="gloo", timeout=timeout)
        # Each thread has its own current device.
        self._thread = ThreadPoolExecutor(1, "fastft-save", functools.partial(_use_device, device))
        self._written: Future[None] | None = None

    def save(self, checkpoint: dict[str, Any], path: Path, *, host_bytes: int) -> None:
        """Wait for the previous save and start one; later changes of the tensors do not affect it.

        The path is the same on all ranks. If the copies of this rank need more than host_bytes, the save is
        synchronous.

        Raises:
            CheckpointNotSavedError: This save failed before it wrote, or the previous one failed; on all ranks.
        """
        failure = self.finish()
        if failure is not None:
            raise failure
        if not self._has_room(checkpoint, host_bytes):
            save_folder(checkpoint, path)
            return
        pieces = take_pieces(checkpoint)
        with ExitStack() as stack:
            part = begin_folder(checkpoint, path, stack, holds_name=True)
            staged: dict[str, Any] = {}

            def stage() -> None:
                staged.update(self._stager.stage(pieces, non_blocking=self._on_gpu))
                if self._on_gpu:
                    torch.cuda.synchronize(self._device)

            on_all_ranks(stage, error=CheckpointNotSavedError)
            self._is_staged = True
            self._written = self._thread.submit(self._write, staged, part, path, stack.pop_all())

    def then(self, action: Callable[[], None]) -> None:
        """Run an action of this rank once the save is committed, and never if it fails."""
        written = self._written
        if written is None:
            action()
            return

        def run() -> None:
            # An error of the save or of the action is raised by the next save.
            written.result()
            action()

        self._written = self._thread.submit(run)

    def finish(self) -> BaseException | None:
        """Wait for the save, and return its error; None if it was committed, or if there was none."""
        written, self._written = self._written, None
        return None if written is None else written.exception()

    def close(self) -> None:
        """Free the copies and destroy the process group, after ``finish``."""
        self._thread.shutdown()
        self._stager.close()
        if dist.is_initialized():
            dist.destroy_process_group(self._group)

    def _write(self, pieces: dict[str, Any], part: Path, path: Path, stack: ExitStack) -> None:
        with stack:
            write_folder(pieces, part, path, group=self._group)

    def _has_room(self, checkpoint: dict[str, Any], host_bytes: int) -> bool:
        """Return whether every rank has memory for its copies; allocated copies are reused."""
        if self._is_staged:
            return True
        states = [checkpoint["state_dict"], checkpoint.get("optimizer_states", [])]
        num_bytes = sum(local_values(leaf).nbytes for leaf in tree_leaves(states) if isinstance(leaf, torch.Tensor))
        found = on_all_ranks(lambda: (num_bytes, host_bytes), error=CheckpointNotSavedError)
        short = [rank for rank, (needed, room) in enumerate(found) if needed > room]
        if short:
            needed, room = (value / 2**30 for value in found[short[0]])
            rank_zero_warn(
                f"Training waits for this checkpoint: writing it in the background needs {needed:.1f} GiB of host "
                f"memory on rank {short[0]}, which has {room:.1f} GiB for it. async_save=False silences this."
            )
        return not short


def _use_device(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.set_device(device)
