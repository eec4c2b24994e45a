"""Let the ranks of a run agree that an action failed on one of them, or that one of them received a signal."""

from __future__ import annotations

import atexit
import gc
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from lightning_fastft.core.errors import FastFTError

T = TypeVar("T")


def on_all_ranks(
    action: Callable[[], T], *, error: type[FastFTError], group: dist.ProcessGroup | None = None
) -> list[T]:
    """Run an action on every rank and return the results of all ranks; if it fails on one rank, it fails on all.

    Args:
        action: The action of this rank; its result is pickled.
        error: Raised if another rank failed; a rank that failed itself raises its own error.
        group: Process group of all ranks; None is the default group, whose results cost a host sync. A background
            thread needs its own group.

    Example:
        >>> on_all_ranks(lambda: 3, error=FastFTError)
        [3]
    """
    num_ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if num_ranks == 1:
        return [action()]
    result: T | None = None
    reports: list[Any] = [None] * num_ranks
    try:
        result = action()
    finally:
        failure = sys.exc_info()[1]
        own = (result, None if failure is None else f"{type(failure).__name__}: {failure}")
        dist.all_gather_object(reports, own, group=group)
    failures = [f"rank {rank}: {failed}" for rank, (_, failed) in enumerate(reports) if failed is not None]
    if failures:
        raise error("; ".join(failures))
    return [found for found, _ in reports]


def destroy_groups_at_exit(is_wanted: bool = True) -> None:
    """Destroy the process groups before the interpreter is finalised, as Lightning does only for NCCL.

    Threads of a gloo group release tensors created by Python. During finalisation this aborts the process ("terminate
    called without an active exception") after all work is done. ``is_wanted=False`` cancels it: a rank that
    failed must not wait for collectives that other ranks have not joined.
    """
    atexit.unregister(_destroy_groups)
    if is_wanted and dist.is_available() and dist.is_initialized():
        atexit.register(_destroy_groups)


def _destroy_groups() -> None:
    if dist.is_initialized():
        # DistributedDataParallel references the group in a reference cycle.
        gc.collect()
        dist.destroy_process_group()


class RankVote:
    """Share a signal of one rank with all ranks by an asynchronous all-reduce, read one optimizer step later.

    Cost:
        With several ranks an all-reduce of 8 bytes on the host per optimizer step; nothing with one rank.
    """

    def __init__(self) -> None:
        self._group: Any = None
        self._pending: tuple[torch.Tensor, Any] | None = None

    def open(self) -> None:
        """Create the process group. All ranks must call this."""
        self.close()
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            # A gloo group on the host: reading a result on the device would be a host sync.
            self._group = dist.new_group(backend="gloo")

    def agree(self, number: int) -> int:
        """Return the signal that all ranks agree on, 0 for none, and start the vote of this step."""
        if self._group is None:
            return number
        answer = self._read()
        vote = torch.tensor([number], dtype=torch.int64)
        self._pending = (vote, dist.all_reduce(vote, op=dist.ReduceOp.MAX, group=self._group, async_op=True))
        return answer

    def everywhere(self, is_so: bool) -> bool:
        """Return whether a condition holds on every rank. All ranks must call this; the host waits for all of them."""
        return bool(self.fewest(int(is_so)))

    def fewest(self, number: int) -> int:
        """Return the minimum over all ranks. All ranks must call this; the host waits for all of them."""
        if self._group is None:
            return number
        vote = torch.tensor([number], dtype=torch.int64)
        dist.all_reduce(vote, op=dist.ReduceOp.MIN, group=self._group)
        # The tensor is on the host, and this is called only before the first step and before a validation.
        return int(vote.item())

    def close(self) -> None:
        """Finish the pending vote and destroy the process group."""
        self._read()
        group, self._group = self._group, None
        if group is not None and dist.is_initialized():
            dist.destroy_process_group(group)

    def drop(self) -> None:
        """Forget the process group, because other ranks may be gone."""
        self._pending = self._group = None

    def _read(self) -> int:
        pending, self._pending = self._pending, None
        if pending is None:
            return 0
        vote, work = pending
        work.wait()
        # The tensor is on the host; only the line above may wait, for other ranks.
        return int(vote.item())
