"""Measure the copies of one step of the ruler, for the raw log."""

from __future__ import annotations

from lightning_fastft.monitor.report.copies import CopyUse, StepProfile, copy_use


class CopyProfile:
    """Record one step on a GPU: ``start`` before it, ``stop`` after it; on a CPU there is nothing to record.

    Args:
        is_cuda: Whether there is a GPU.
    """

    def __init__(self, *, is_cuda: bool) -> None:
        self._profile = StepProfile(is_cuda=True) if is_cuda else None

    def start(self) -> None:
        """Wait for the device, then begin."""
        if self._profile is not None:
            self._profile.start()

    def stop(self) -> CopyUse | None:
        """Wait for the device and return what the copies did; None on a CPU, or where nothing was begun."""
        trace = None if self._profile is None else self._profile.stop()
        return None if trace is None else copy_use(trace.kernels, trace.copies)
