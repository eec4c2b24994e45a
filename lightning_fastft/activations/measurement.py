"""Measure the segments of a model in its first forwards, for the planner."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from lightning_fastft.activations.probe import Meter, SavedBytesProbe, StepProbe, scale_cost
from lightning_fastft.activations.segments import KEEP, RECOMPUTE, Segment, SegmentObserver
from lightning_fastft.activations.slots import align
from lightning_fastft.activations.streams import CopyStreams
from lightning_fastft.planner.step import SegmentPlan, StepCost

_NOT_BEGUN, _COUNT_SAVED, _WARM_UP, _TIME_STEP, _DONE = range(5)


class Measurement:
    """Measure one step in three forwards: count saved bytes, warm up, and time.

    The first forward keeps the last segment of each kind and counts what it saves. The second one compiles kernels and
    fills the allocator, and it finds the last value point of each segment. The third one, with its backward, is timed;
    the second one is timed too, and the shorter time of each part counts, because a step alone may be disturbed. These
    times exclude waits for copies. An interrupted forward or backward is measured again. A longer pack does not restart
    the measurement, so that all ranks end it at the same forward; ``read`` scales the costs instead. If memory is too
    small for a kept segment, ``stop_keeping`` skips the first forward.

    Args:
        layers: Decoder layers, in order.
        segments: Their segments.
        measures_gap: Whether reserved memory counts: the second forward then frees the allocator's cache first.
        find_streams: Returns the copy streams that compute may wait for; None if there are none.

    ``lean`` is the plan of the segments that are not kept; all recompute, from inputs on the device or on the host.

    Cost:
        Three steps in which every other segment is recomputed; ``read`` has one device sync.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        segments: Sequence[Segment],
        *,
        measures_gap: bool,
        find_streams: Callable[[], CopyStreams | None],
    ) -> None:
        self._segments = segments
        self._find_streams = find_streams
        self._measures_gap = measures_gap
        self._kinds = _kinds(layers)
        self._keeps = True
        self.lean: Sequence[SegmentPlan] = [RECOMPUTE] * len(segments)
        # Reserved memory beyond what the timed step had allocated.
        self.gap_bytes = 0
        self._phase = _NOT_BEGUN
        # Sizes of the hidden states of the packs in which bytes and times were measured.
        self._counted_bytes = self._warm_bytes = self._timed_bytes = 0
        self._saved: SavedBytesProbe | None = None
        self._warm: StepProbe | None = None
        self._step: StepProbe | None = None

    @property
    def has_begun(self) -> bool:
        """Whether the first forward has begun."""
        return self._phase > _NOT_BEGUN

    @property
    def is_running(self) -> bool:
        """Whether the first forward has begun and the timed step has not ended."""
        return _NOT_BEGUN < self._phase < _DONE

    @property
    def is_done(self) -> bool:
        """Whether the costs can be read, or were read."""
        return self._phase == _DONE

    @property
    def counted(self) -> set[int]:
        """The segments that the first forward keeps: the last of each kind, whose backward comes first."""
        return set({kind: index for index, kind in enumerate(self._kinds)}.values()) if self._keeps else set()

    @property
    def is_keeping(self) -> bool:
        """Whether the current step keeps segments."""
        return self._phase == _COUNT_SAVED

    def meter(self, device: torch.device) -> Meter:
        """Return the clock and the allocator of a device."""
        return Meter(device)

    def restart(self) -> None:
        """Measure again from the next forward on."""
        self._observe(None)
        self._phase = _NOT_BEGUN

    def stop_keeping(self) -> None:
        """Measure again from the next forward on without a kept segment.

        What a kept segment saves is then taken to be all that its recompute and backward use, an upper bound.
        """
        self._keeps = False
        self.restart()

    def begin_forward(self, device: torch.device, *, num_bytes: int) -> bool:
        """Prepare the segments for the forward that begins now; return whether the timed step has just ended."""
        if self._keeps and (self._phase == _NOT_BEGUN or (self._phase == _COUNT_SAVED and not self._is_counted())):
            self._phase = _COUNT_SAVED
            self._begin_count(device, num_bytes=num_bytes)
        elif self._phase in (_NOT_BEGUN, _COUNT_SAVED):
            self._phase = _WARM_UP
            self._recompute()
            if self._measures_gap:
                # Memory that loading left in the allocator is not part of the gap of a step.
                self.meter(device).free_cache()
            self._warm, self._warm_bytes = StepProbe(self.meter(device)), num_bytes
            self._observe(self._warm)
        elif self._phase == _WARM_UP:
            assert self._warm is not None
            self._warm.step_ends()
            self._phase = _TIME_STEP
            self._begin_timing(device, num_bytes=num_bytes)
        elif self._phase == _TIME_STEP:
            assert self._step is not None
            self._step.step_ends()
            if self._step.has_backward:
                self._observe(None)
                self.gap_bytes = self._step.gap_bytes
                self._phase = _DONE
                return True
            self._begin_timing(device, num_bytes=num_bytes)
        return False

    def read(self, *, longest_bytes: int, extra_bytes: int, weight_bytes: Sequence[int]) -> StepCost:
        """Return the costs of a step with the longest pack.

        extra_bytes will be in use later and are not yet.
        """
        assert self._step is not None
        saved_bytes: list[int | None] = [None] * len(self._kinds)
        if self._keeps:
            assert self._saved is not None
            counted = {self._kinds[index]: num_bytes for index, num_bytes in self._saved.saved_bytes.items()}
            saved_bytes = [counted[kind] * self._timed_bytes // self._counted_bytes for kind in self._kinds]
        cost = self._step.read(
            self._segments,
            input_bytes=align(self._timed_bytes),
            saved_bytes=saved_bytes,
            extra_bytes=extra_bytes,
            weight_bytes=weight_bytes,
        )
        self._step = self._warm = None
        return scale_cost(cost, longest_bytes / self._timed_bytes, input_bytes=align(longest_bytes))

    def _begin_count(self, device: torch.device, *, num_bytes: int) -> None:
        """Keep the last segment of each kind for one forward."""
        self._counted_bytes = num_bytes
        self._saved = SavedBytesProbe(self.meter(device))
        self._recompute()
        for index in self.counted:
            self._segments[index].plan = KEEP
            self._segments[index].observer = self._saved

    def _begin_timing(self, device: torch.device, *, num_bytes: int) -> None:
        self._timed_bytes = num_bytes
        previous = self._warm if self._warm_bytes == num_bytes else None
        self._step = StepProbe(self.meter(device), previous=previous)
        self._observe(self._step)

    def _recompute(self) -> None:
        for segment, plan in zip(self._segments, self.lean):
            segment.plan = plan

    def _is_counted(self) -> bool:
        assert self._saved is not None
        return len(self._saved.saved_bytes) == len(set(self._kinds))

    def _observe(self, observer: SegmentObserver | None) -> None:
        for segment in self._segments:
            segment.observer = observer
        streams = self._find_streams()
        if streams is not None:
            streams.waits = observer.waits if isinstance(observer, StepProbe) else None


def _kinds(layers: Sequence[nn.Module]) -> list[int]:
    """Number the layers by kind; layers with equal modules and parameters are one kind."""
    seen: dict[tuple[Any, ...], int] = {}
    found = []
    for layer in layers:
        structure = tuple((name, type(module).__name__) for name, module in layer.named_modules())
        shapes = tuple((name, tuple(parameter.shape)) for name, parameter in layer.named_parameters())
        found.append(seen.setdefault((structure, shapes), len(seen)))
    return found
