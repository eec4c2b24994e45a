"""Marks on the timeline of a device, which are read after the device has passed them."""

from __future__ import annotations

import time

import torch

Mark = torch.cuda.Event | float


def mark_time(device: torch.device) -> Mark:
    """Return a CUDA event recorded on the current stream, or the host's clock on other devices."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def has_passed(mark: Mark, *, wait: bool = False) -> bool:
    """Return whether the device has reached a mark: without a host sync, or with wait after one."""
    if not isinstance(mark, torch.cuda.Event):
        return True
    if wait:
        mark.synchronize()
        return True
    return mark.query()


def ms_between(begin: Mark, end: Mark) -> float:
    """Return the milliseconds between two marks that have passed."""
    if isinstance(begin, torch.cuda.Event) and isinstance(end, torch.cuda.Event):
        return begin.elapsed_time(end)
    assert isinstance(begin, float)
    assert isinstance(end, float)
    return 1e3 * (end - begin)
