"""CUDA graphs of any work: what was queued once is queued again by one launch, in the same memory."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch


class Recorder(Protocol):
    """Makes work on the device repeatable."""

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """Return what does that work again, in the same memory; the work itself need not be done."""


class CudaRecorder:
    """Record work as CUDA graphs that share one pool of memory, so they must run in the order in which they were
    recorded.

    Args:
        device: Where the work runs.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # What steps left in the allocator's cache cannot be used by graphs, and cannot be given back while one is
        # recorded.
        torch.cuda.empty_cache()
        self._pool: Any = None
        self._graphs: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()
        self._stream = torch.cuda.Stream(device)

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """Return a launch of what work queues; nothing runs yet."""
        graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self._device)
        generator = torch.cuda.default_generators[self._device.index]
        before = generator.clone_state()
        self._stream.wait_stream(current)
        if not self._graphs:
            # A pool ends with the last of its graphs.
            self._pool = torch.cuda.graph_pool_handle()
        with torch.cuda.stream(self._stream):
            is_done = False
            try:
                # Kernels may be compiled and loaded on the way, and other threads pin memory meanwhile.
                graph.capture_begin(pool=self._pool, capture_error_mode="relaxed")
                work()
                is_done = True
            finally:
                if not is_done:
                    # What went wrong first is what the user has to read.
                    with contextlib.suppress(RuntimeError):
                        graph.capture_end()
                    # A recording that fails never ends for the generator, which would draw nothing outside of it.
                    generator.graphsafe_set_state(before)
            graph.capture_end()
        current.wait_stream(self._stream)
        self._graphs.add(graph)
        return graph.replay
