"""How the ranks of a run agree: that something failed on one of them, and that one of them was asked to stop."""

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


def on_all_ranks(action: Callable[[], T], *, error: type[FastFTError]) -> list[T]:
    """Run action on every rank and return all results by rank; where it fails on one rank it fails on all, so that none
    waits for the others.

    Args:
        action: What this rank does; its result is pickled.
        error: What is raised where another rank failed; a rank that failed itself raises its own error.

    Example:
        >>> on_all_ranks(lambda: 3, error=FastFTError)
        [3]
    """
    num_ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if num_ranks == 1:
        return [action()]
    result, reports = None, [None] * num_ranks
    try:
        result = action()
    finally:
        failure = sys.exc_info()[1]
        dist.all_gather_object(reports, (result, None if failure is None else f"{type(failure).__name__}: {failure}"))
    failures = [f"rank {rank}: {report[1]}" for rank, report in enumerate(reports) if report[1] is not None]  # type: ignore[index]
    if failures:
        raise error("; ".join(failures))
    return [report[0] for report in reports]  # type: ignore[index]


def destroy_groups_at_exit(is_wanted: bool = True) -> None:
    """Let this process leave its process groups before the interpreter is finalised, as Lightning does for NCCL alone.

    Threads of a gloo group let go of tensors that Python made. One that does so while the interpreter is finalised
    aborts the process ("terminate called without an active exception"), after everything was done and saved.

    Args:
        is_wanted: False takes it back. A rank that failed must not wait for collectives which the others have not
            joined.
    """
    atexit.unregister(_destroy_groups)
    if is_wanted and dist.is_available() and dist.is_initialized():
        atexit.register(_destroy_groups)


def _destroy_groups() -> None:
    if dist.is_initialized():
        # DistributedDataParallel holds the group in a circle of references.
        gc.collect()
        dist.destroy_process_group()


class RankVote:
    """Tell all ranks of a signal that one of them got, without a wait: what is asked at one step is answered at the
    next.

    Cost:
        With several ranks a sum of 8 bytes on the host per optimizer step, begun at one and read at the next; nothing
        with one.
    """

    def __init__(self) -> None:
        self._group: Any = None
        self._pending: tuple[torch.Tensor, Any] | None = None

    def open(self) -> None:
        """Join the other ranks; all of them make this call."""
        self.close()
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            # On the host: a result on a device could not be read without waiting for it.
            self._group = dist.new_group(backend="gloo")

    def agree(self, number: int) -> int:
        """Return the signal on which all ranks agree now, 0 for none."""
        if self._group is None:
            return number
        answer = self._read()
        vote = torch.tensor([number], dtype=torch.int64)
        self._pending = (vote, dist.all_reduce(vote, op=dist.ReduceOp.MAX, group=self._group, async_op=True))
        return answer

    def everywhere(self, is_so: bool) -> bool:
        """Return whether something is so on every rank; all of them make this call, and wait for each other on
        the host.
        """
        if self._group is None:
            return is_so
        return bool(self.fewest(int(is_so)))

    def fewest(self, number: int) -> int:
        """Return the smallest number of all ranks; all of them make this call, and wait for each other on the host."""
        if self._group is None:
            return number
        vote = torch.tensor([number], dtype=torch.int64)
        dist.all_reduce(vote, op=dist.ReduceOp.MIN, group=self._group)
        # The vote lies on the host, and this is asked before the first step and before a validation.
        return int(vote.item())

    def close(self) -> None:
        """Leave the other ranks."""
        self._read()
        group, self._group = self._group, None
        if group is not None and dist.is_initialized():
            dist.destroy_process_group(group)

    def drop(self) -> None:
        """Forget the other ranks, which may be gone."""
        self._pending = self._group = None

    def _read(self) -> int:
        pending, self._pending = self._pending, None
        if pending is None:
            return 0
        vote, work = pending
        work.wait()
        # The vote lies on the host: what may wait is the line above, for the other ranks.
        return int(vote.item())
