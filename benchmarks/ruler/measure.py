"""Measure a step: its time, its memory and its host syncs."""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

_WAIT_MESSAGE = "synchronizing CUDA operation"


class StepClock:
    """Measure the time from the end of one step to the end of the next, without a sync in between.

    On a GPU each mark is an event on the current stream, read after the last step, so a launch-bound step takes
    longer.

    Args:
        is_cuda: Whether steps run on a GPU.
    """

    def __init__(self, *, is_cuda: bool) -> None:
        self._is_cuda = is_cuda
        self._marks: list[Any] = []

    def mark(self) -> None:
        """Mark the end of a step."""
        if self._is_cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def read_ms(self) -> list[float]:
        """Sync with the device and return the milliseconds between marks."""
        if self._is_cuda:
            torch.cuda.synchronize()
            return [before.elapsed_time(after) for before, after in zip(self._marks, self._marks[1:])]
        return [(after - before) * 1e3 for before, after in zip(self._marks, self._marks[1:])]


class HostWaits(AbstractContextManager):
    """Count host syncs by torch's sync debug mode; 0 on a CPU.

    This mode does not see ``torch.cuda.synchronize()``, so that function is wrapped while this is open.

    Args:
        is_cuda: Whether there is a GPU.
    """

    def __init__(self, *, is_cuda: bool) -> None:
        self._is_cuda = is_cuda
        self.count = 0
        self.places: list[str] = []

    def count_so_far(self) -> int:
        """Return the count while this is open."""
        return self._num_full + sum(_WAIT_MESSAGE in str(w.message) for w in self._seen) if self._is_cuda else 0

    def __enter__(self) -> HostWaits:
        if self._is_cuda:
            self._catch = warnings.catch_warnings(record=True)
            self._seen = self._catch.__enter__()
            warnings.simplefilter("always")
            self._old_mode = torch.cuda.get_sync_debug_mode()
            torch.cuda.set_sync_debug_mode("warn")
            self._synchronize = torch.cuda.synchronize
            self._num_full = 0
            torch.cuda.synchronize = self._counted_synchronize
        return self

    def __exit__(self, *exception: object) -> None:
        if self._is_cuda:
            torch.cuda.synchronize = self._synchronize
            torch.cuda.set_sync_debug_mode(self._old_mode)
            waits = [warning for warning in self._seen if _WAIT_MESSAGE in str(warning.message)]
            self._catch.__exit__(None, None, None)
            self.count = len(waits) + self._num_full
            self.places = sorted(
                {f"{warning.filename.rpartition('site-packages/')[2]}:{warning.lineno}" for warning in waits}
            )

    def _counted_synchronize(self, *arguments: Any, **keywords: Any) -> None:
        self._num_full += 1
        self._synchronize(*arguments, **keywords)


def percentile(values: Sequence[float], share: float) -> float:
    """Return the quantile of a share, by linear interpolation.

    Example:
        >>> percentile([1.0, 2.0, 3.0], 0.5)
        2.0
    """
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def summarise_ms(values: Sequence[float]) -> dict[str, float]:
    """Return median, mean, p10, p90 and count."""
    return {
        "median": statistics.median(values),
        "mean": statistics.fmean(values),
        "p10": percentile(values, 0.1),
        "p90": percentile(values, 0.9),
        "n": len(values),
    }


def pinned_host_gib(*, is_cuda: bool) -> float:
    """Return the peak of torch's pinned host memory since the last reset, in GiB, rounded up as its allocator does; 0
    on a CPU.

    Memory that a system pins by itself is not included.
    """
    return torch.cuda.host_memory_stats()["allocated_bytes.peak"] / 2**30 if is_cuda else 0.0


def device_memory_gib(*, is_cuda: bool) -> float:
    """Return the memory in use on the device now as the driver and nvidia-smi report it, in GiB; 0 on a CPU.

    It includes reserved memory, the CUDA context and allocations by libraries, of every process on the device.
    """
    if not is_cuda:
        return 0.0
    num_free, num_total = torch.cuda.mem_get_info()
    return (num_total - num_free) / 2**30


def peak_memory_gib(*, is_cuda: bool) -> dict[str, float]:
    """Return the peaks of the caching allocator since the last reset, in GiB; zeros on a CPU."""
    if not is_cuda:
        return {"allocated": 0.0, "reserved": 0.0}
    return {
        "allocated": torch.cuda.max_memory_allocated() / 2**30,
        "reserved": torch.cuda.max_memory_reserved() / 2**30,
    }
