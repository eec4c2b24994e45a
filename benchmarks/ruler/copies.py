"""Measure the copies of one step of the ruler, for the raw log."""

from __future__ import annotations

from lightning_fastft.monitor.report.step_profile import CopyUse, StepProfile, copy_use


class CopyProfile:
    """Record one step on a GPU: call ``start`` before it and ``stop`` after it. No-op on a CPU.

    Args:
        is_cuda: Whether there is a GPU.
    """

    def __init__(self, *, is_cuda: bool) -> None:
        self._profile = StepProfile(is_cuda=True) if is_cuda else None

    def start(self) -> None:
        """Sync with the device, then start."""
        if self._profile is not None:
            self._profile.start()

    def stop(self) -> CopyUse | None:
        """Sync with the device and return a summary of the copies; None on a CPU or without ``start``."""
        trace = None if self._profile is None else self._profile.stop()
        return None if trace is None else copy_use(trace.kernels, trace.copies)
