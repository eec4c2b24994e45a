"""Compile recorded launches in threads, while the main thread does other work."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import torch

from lightning_fastft.core.phases import LOGGER
from lightning_fastft.kernels.launch import Launch


class Compilation:
    """Kernels that are being compiled for a device; their first launches in this process then find them loaded.

    Triton holds Python's lock for a tenth of the time of a kernel; its compilers, ptxas and the C compiler of the
    launchers run beside the main thread.

    Args:
        launches: What to compile. The first kernel is compiled alone, because it loads Triton's driver;
            launches of one kernel are compiled one after the other.
        device: CUDA device of the run.
        num_threads: At least 1.

    Cost:
        A thread per kernel, at most num_threads, until ``wait`` or ``cancel``.
    """

    def __init__(self, launches: Sequence[Launch], *, device: torch.device, num_threads: int) -> None:
        by_kernel: dict[int, list[Launch]] = {}
        for launch in launches:
            by_kernel.setdefault(id(launch.kernel), []).append(launch)
        self._pool = ThreadPoolExecutor(num_threads, "fastft-compile")
        self._futures: list[Future[Any]] = []
        for group in by_kernel.values():
            self._futures.append(self._pool.submit(_compile, group, device=device, after=self._futures[:1]))

    def wait(self) -> None:
        """Wait for all kernels; log once if some failed: their first launches compile them again, and raise."""
        errors = [error for future in self._futures if (error := future.exception()) is not None]
        self.cancel()
        if errors:
            LOGGER.info(f"{len(errors)} kernels were not compiled ahead of the first step: {errors[0]!r:.300}")

    def cancel(self) -> None:
        """Start no other kernel, and wait for those that are being compiled."""
        self._pool.shutdown(cancel_futures=True)
        self._futures = []


def _compile(launches: Sequence[Launch], *, device: torch.device, after: Sequence[Future[Any]]) -> None:
    wait(after)
    # The current device of a new thread is device 0.
    torch.cuda.set_device(device)
    for launch in launches:
        launch.compile()
