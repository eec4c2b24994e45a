"""Record device work as CUDA graphs and replay it with one launch, in the same memory."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import Any

import torch


class CudaRecorder:
    """Record work as CUDA graphs that share a memory pool, so they must run in the order of recording.

    Args:
        device: Device of the work.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None
        self._graphs: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()
        self._stream = torch.cuda.Stream(device)

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """Return the launch of the recorded work; nothing runs yet."""
        graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self._device)
        generator = torch.cuda.default_generators[self._device.index]
        before = generator.clone_state()
        self._stream.wait_stream(current)
        if not self._graphs:
            # Graphs cannot use the memory in the allocator's cache, and it cannot be freed during a recording. Dropped
            # graphs may still run in theirs.
            torch.cuda.synchronize(self._device)
            torch.cuda.empty_cache()
            # The allocator frees a pool with its last graph.
            self._pool = torch.cuda.graph_pool_handle()
        with torch.cuda.stream(self._stream):
            is_done = False
            try:
                # The work may compile and load kernels, and other threads may pin memory.
                graph.capture_begin(pool=self._pool, capture_error_mode="relaxed")
                work()
                is_done = True
            finally:
                if not is_done:
                    # The first error is the one to report.
                    with contextlib.suppress(RuntimeError):
                        graph.capture_end()
                    # Otherwise the generator stays in capture mode after a failed recording.
                    generator.graphsafe_set_state(before)
            graph.capture_end()
        current.wait_stream(self._stream)
        self._graphs.add(graph)
        return graph.replay
