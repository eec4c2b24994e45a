"""Copy streams: copy bytes between device and host concurrently with compute, ordered by events, without host syncs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

# A position in a stream: a CUDA event, or None where copies are immediate.
Mark = Any


class CopyStreams:
    """A copy stream in each direction, and the compute stream that is current when a method is called.

    This class is for devices that share host memory: each copy is done when the method returns, and every mark has
    passed. While ``waits`` is a list, each wait of compute is appended to it as two events, before and after.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self.device = device or torch.device("cpu")
        self.waits: list[tuple[Any, Any]] | None = None

    def mark_compute(self) -> Mark:
        """Return a mark after all work queued on the compute stream."""

    def wait_compute(self, mark: Mark) -> None:
        """Let the compute stream wait for a mark."""

    def copy_out(self, host: torch.Tensor, device: torch.Tensor, *, after: Sequence[Mark]) -> Mark:
        """Copy device bytes to the host after the marks; return a mark after the copy."""
        host.copy_(device)

    def copy_in(self, device: torch.Tensor, host: torch.Tensor, *, after: Sequence[Mark]) -> Mark:
        """Copy host bytes to the device after the marks; return a mark after the copy."""
        device.copy_(host)

    def synchronize(self) -> None:
        """Synchronize the host with both streams; for teardown only."""


class CudaCopyStreams(CopyStreams):
    """Two CUDA streams ordered by events.

    Sources and targets are flat, contiguous byte tensors, so every copy is one asynchronous memcpy; host tensors must
    be pinned. The caching allocator is not informed: the caller keeps a source alive until compute has waited for its
    copy.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.out_stream = torch.cuda.Stream(device)
        self.in_stream = torch.cuda.Stream(device)

    def mark_compute(self) -> torch.cuda.Event:
        """Record an event on the current stream."""
        return self._record(torch.cuda.current_stream(self.device))

    def wait_compute(self, mark: Any) -> None:
        """Let the current stream wait for the event."""
        stream = torch.cuda.current_stream(self.device)
        before = self._record(stream, is_timed=True) if self.waits is not None else None
        stream.wait_event(mark)
        if self.waits is not None:
            self.waits.append((before, self._record(stream, is_timed=True)))

    def copy_out(self, host: torch.Tensor, device: torch.Tensor, *, after: Sequence[Any]) -> torch.cuda.Event:
        """Copy on the outward stream."""
        return self._copy(host, device, stream=self.out_stream, after=after)

    def copy_in(self, device: torch.Tensor, host: torch.Tensor, *, after: Sequence[Any]) -> torch.cuda.Event:
        """Copy on the inward stream."""
        return self._copy(device, host, stream=self.in_stream, after=after)

    def synchronize(self) -> None:
        """Wait for both streams."""
        self.out_stream.synchronize()
        self.in_stream.synchronize()

    def _copy(
        self, target: torch.Tensor, source: torch.Tensor, *, stream: torch.cuda.Stream, after: Sequence[Any]
    ) -> torch.cuda.Event:
        for mark in after:
            stream.wait_event(mark)
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
        return self._record(stream)

    def _record(self, stream: torch.cuda.Stream, *, is_timed: bool = False) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=is_timed)
        event.record(stream)
        return event


def make_copy_streams(device: torch.device) -> CopyStreams:
    """Return the streams of a device: two streams on CUDA, immediate copies elsewhere."""
    return CudaCopyStreams(device) if device.type == "cuda" else CopyStreams(device)
