"""Determine without a host sync whether the layers of a model are launch-bound."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

# Number of observed micro-batches.
_NUM_WATCHED = 2
# Share of layers with an idle device from which training counts as launch-bound.
_LATE_SHARE = 0.5


class LaunchBoundProbe:
    """Observe the forward of two micro-batches, layer by layer.

    After a layer is queued, the probe asks whether the device has finished the previous layer. If so, less than one
    layer of work is queued and the device will soon be idle: training is launch-bound. Otherwise the host is many
    layers ahead.

    Args:
        make_mark: Returns a mark with ``record`` and ``query``; by default an event of the current CUDA device.

    Cost:
        Host: one event and one query per layer in the observed micro-batches. No host sync.

    Example:
        >>> class Done:
        ...     def record(self): ...
        ...     def query(self): return True
        >>> pace = LaunchBoundProbe(Done)
        >>> while pace.begin_batch():
        ...     for _ in range(3):
        ...         pace.layer_queued()
        >>> pace.is_launch_bound, pace.describe()
        (True, 'the device waited for the host at 100 % of layers')
    """

    def __init__(self, make_mark: Callable[[], Any] = torch.cuda.Event) -> None:
        self._make_mark = make_mark
        self._marks: list[Any] = []
        self._num_batches = 0
        self._num_layers = 0
        self._num_asked = self._num_done = 0

    def begin_batch(self) -> bool:
        """Return whether to observe the next forward; after the first False it stays False."""
        if self._num_batches == _NUM_WATCHED:
            self._marks = []
            return False
        self._num_batches += 1
        self._num_layers = 0
        return True

    def layer_queued(self) -> None:
        """Call after the forward of each layer of an observed micro-batch."""
        if not self._marks:
            self._marks = [self._make_mark(), self._make_mark()]
        if self._num_layers:
            self._num_asked += 1
            self._num_done += self._marks[0].query()
        self._num_layers += 1
        self._marks.reverse()
        self._marks[0].record()

    @property
    def is_launch_bound(self) -> bool:
        """Whether the device waited for the host in most layers."""
        return self._num_done > _LATE_SHARE * self._num_asked

    def describe(self) -> str:
        """Return the observed share as text."""
        share = self._num_done / self._num_asked if self._num_asked else 0.0
        return f"the device waited for the host at {share:.0%} of layers".replace("%", " %")
