"""Apply plans to the segments of a model: the offload engine and the copy streams."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from lightning_fastft.activations.engine import OffloadEngine
from lightning_fastft.activations.segments import RECOMPUTE, Segment
from lightning_fastft.activations.streams import CopyStreams, make_copy_streams
from lightning_fastft.core.errors import OptionError
from lightning_fastft.planner.step import SegmentPlan, StepCost


class PlanExecutor:
    """Apply plans to the segments of a model, and own the offload engine and the copy streams."""

    def __init__(self, segments: Sequence[Segment], *, buffers: int) -> None:
        self.engine: OffloadEngine | None = None
        # Fill each freed slot with NaN, for tests.
        self.is_poisoned = False
        self.make_copy_streams: Callable[[torch.device], CopyStreams] = make_copy_streams
        self._segments = segments
        self._buffers = buffers
        # The copy streams; None if there are none yet.
        self.streams: CopyStreams | None = None

    def apply(
        self, plan: Sequence[SegmentPlan], *, device: torch.device, input_bytes: int, cost: StepCost | None = None
    ) -> None:
        """Apply a plan from the next forward on, with a new engine for its sizes.

        cost has the sizes of the values in the plan; None if only inputs are offloaded.

        Raises:
            HostMemoryError: Pinned memory cannot be allocated; every segment is then recomputed.
        """
        if len(plan) != len(self._segments):
            raise OptionError(f"The plan has {len(plan)} segments, the model has {len(self._segments)} decoder layers.")
        sizes = [_host_bytes(entry, index, cost=cost, input_bytes=input_bytes) for index, entry in enumerate(plan)]
        self.close_engine()
        if any(sizes):
            self.engine = OffloadEngine(
                self.streams_of(device),
                host_bytes=sum(sizes),
                slot_bytes=max(sizes),
                buffers=self._buffers,
                is_poisoned=self.is_poisoned,
            )
        for segment, entry in zip(self._segments, plan):
            segment.follow(entry, self.engine)

    def close_engine(self) -> None:
        """Recompute every segment, and free pinned and staging memory; a second call does nothing."""
        engine, self.engine = self.engine, None
        for segment in self._segments:
            segment.follow(RECOMPUTE, None)
        if engine is not None:
            engine.close()

    def streams_of(self, device: torch.device) -> CopyStreams:
        """Return the copy streams of a device, which activations and weights share."""
        if self.streams is None or self.streams.device != device:
            self.streams = self.make_copy_streams(device)
        return self.streams

    def describe(self) -> list[str]:
        """Return short texts for the kept layers, offloaded tensors and held values of the present plan."""
        kept = sum(segment.plan.is_kept for segment in self._segments)
        inputs = sum(segment.plan.input_place == "host" for segment in self._segments)
        places = [place for segment in self._segments for place in segment.places.values()]
        parts = [f"{kept} of {len(self._segments)} layers kept"]
        if inputs or "host" in places:
            parts.append(f"{inputs} layer inputs and {places.count('host')} values on the host")
        if "device" in places:
            parts.append(f"{places.count('device')} values held")
        return parts


def _host_bytes(entry: SegmentPlan, index: int, *, cost: StepCost | None, input_bytes: int) -> int:
    """Return the bytes of a segment that its plan offloads."""
    num_bytes = input_bytes if entry.input_place == "host" else 0
    if cost is not None:
        sizes = {value.name: value.num_bytes for value in cost.segments[index].values}
        num_bytes += sum(sizes[name] for name, place in entry.values if place == "host")
    return num_bytes
