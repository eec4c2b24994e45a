"""Whether the device waits for the host while the layers of a model run, found out without a wait."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

# Micro-batches that are watched.
_NUM_WATCHED = 2
# From this share of layers on, the device is said to wait for the host.
_LATE_SHARE = 0.5


class Mark(Protocol):
    """A place in the work of the device; torch.cuda.Event is one."""

    def record(self) -> Any:
        """Put the mark behind what is queued."""

    def query(self) -> bool:
        """Whether the device has come past it."""


class LaunchBoundProbe:
    """Watch the forwards of a few micro-batches, layer by layer.

    When a layer is queued, the device is asked whether it is done with the layer before. If it is, it has less than one
    layer of work left and will soon be idle: the host is late. A host that is ahead is ahead by many layers, so that
    nothing lies between the two.

    Args:
        make_mark: Returns a mark; by default an event of the current CUDA device.

    Cost:
        Host: an event and a question per layer in the two micro-batches that are watched. No host synchronisation.

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

    def __init__(self, make_mark: Callable[[], Mark] = torch.cuda.Event) -> None:
        self._make_mark = make_mark
        self._marks: list[Mark] = []
        self._num_batches = 0
        self._num_layers = 0
        self._num_asked = self._num_done = 0

    def begin_batch(self) -> bool:
        """Return whether the forward that begins is to be watched; once it is not, none is any more."""
        if self._num_batches == _NUM_WATCHED:
            self._marks = []
            return False
        self._num_batches += 1
        self._num_layers = 0
        return True

    def layer_queued(self) -> None:
        """Call behind the forward of every layer of a micro-batch that is watched."""
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
        """Whether the device waited for the host at most layers."""
        return self._num_done > _LATE_SHARE * self._num_asked

    def describe(self) -> str:
        """Return what was seen."""
        share = self._num_done / self._num_asked if self._num_asked else 0.0
        return f"the device waited for the host at {share:.0%} of layers".replace("%", " %")
