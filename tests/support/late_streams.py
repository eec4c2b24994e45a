"""Copy streams for tests on a CPU that put every copy off as long as its order allows."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch


class LateStreams:
    """A copy runs as late as the order of marks allows, so a wait that is missing shows as wrong bytes.

    Args:
        seed: None runs every copy at the last moment; a number lets some copies run early, at random.
    """

    def __init__(self, *, seed: int | None = None) -> None:
        self.device = torch.device("cpu")
        self.num_copies = 0
        self._random = None if seed is None else random.Random(seed)
        self._out: deque[_LateCopy] = deque()
        self._in: deque[_LateCopy] = deque()

    def mark_compute(self) -> None:
        """Return the present: compute on a CPU has done what it was given."""
        self._run_some()

    def wait_compute(self, mark: Any) -> None:
        """Run what the mark stands for."""
        if mark is not None:
            mark.run()

    def copy_out(self, host: torch.Tensor, device: torch.Tensor, *, after: Sequence[Any]) -> _LateCopy:
        """Queue the copy."""
        return self._queue(self._out, host, device, after)

    def copy_in(self, device: torch.Tensor, host: torch.Tensor, *, after: Sequence[Any]) -> _LateCopy:
        """Queue the copy."""
        return self._queue(self._in, device, host, after)

    def synchronize(self) -> None:
        """Run everything."""
        for stream in (self._out, self._in):
            while stream:
                stream[-1].run()

    def _queue(
        self, stream: deque[_LateCopy], target: torch.Tensor, source: torch.Tensor, after: Sequence[Any]
    ) -> _LateCopy:
        self.num_copies += 1
        copy = _LateCopy(stream, target, source, [mark for mark in after if mark is not None])
        stream.append(copy)
        self._run_some()
        return copy

    def _run_some(self) -> None:
        for stream in (self._out, self._in):
            while self._random is not None and stream and self._random.random() < 0.3:
                stream[0].run()


class _LateCopy:
    """One queued copy; running it runs what lies before it in its stream and what it waits for."""

    def __init__(
        self, stream: deque[_LateCopy], target: torch.Tensor, source: torch.Tensor, after: list[_LateCopy]
    ) -> None:
        self._lane, self._after = stream, after
        # Let go of once copied, as a real copy would.
        self._tensors: tuple[torch.Tensor, torch.Tensor] | None = (target, source)

    def run(self) -> None:
        """Run every earlier copy of the stream, what this one waits for, then itself; once."""
        while self._tensors is not None:
            first = self._lane[0]
            for mark in first._after:
                mark.run()
            # Running a mark of the other stream may have run this one already.
            if self._lane and self._lane[0] is first:
                self._lane.popleft()
                assert first._tensors is not None
                target, source = first._tensors
                target.copy_(source)
                first._tensors = None
