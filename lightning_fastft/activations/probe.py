"""Measure times, sizes and peaks of every segment in one step under checkpointing, for the planner."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from lightning_fastft.activations.budgets import is_unified
from lightning_fastft.activations.segments import Segment, SegmentObserver, Tensors
from lightning_fastft.activations.slots import align
from lightning_fastft.core.marks import Mark, has_passed, mark_time, ms_between
from lightning_fastft.planner.step import Machine, SegmentCost, StepCost, ValueCost

# Large enough for full copy speed, small enough to pin in 0.1 s.
_BANDWIDTH_BYTES = 64 * 2**20
_BANDWIDTH_COPIES = 6


class Meter:
    """Clock of a device, whose times are read later, and its allocator; zeros without a counting allocator (CPU)."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.is_counted = device.type == "cuda"

    def now(self) -> Mark:
        """Mark a time."""
        return mark_time(self._device)

    def ms_between(self, begin: Mark, end: Mark) -> float:
        """Return the milliseconds between two times; syncs with the later one."""
        has_passed(end, wait=True)
        return ms_between(begin, end)

    def allocated(self) -> int:
        """Return the bytes allocated now."""
        return torch.cuda.memory_allocated(self._device) if self.is_counted else 0

    def start_peak(self) -> int:
        """Reset the peak; return the bytes allocated now."""
        if self.is_counted:
            torch.cuda.reset_peak_memory_stats(self._device)
        return self.allocated()

    def peak(self) -> int:
        """Return the peak bytes allocated since the reset."""
        return torch.cuda.max_memory_allocated(self._device) if self.is_counted else 0

    def reserved(self) -> int:
        """Return the bytes that the allocator has reserved."""
        return torch.cuda.memory_reserved(self._device) if self.is_counted else 0

    def free_cache(self) -> None:
        """Return the unused blocks to the device, with a device sync."""
        if self.is_counted:
            torch.cuda.empty_cache()

    def num_retries(self) -> int:
        """Return how often the allocator was at its limit and had to free its cache to go on."""
        return int(torch.cuda.memory_stats(self._device)["num_alloc_retries"]) if self.is_counted else 0


class SavedBytesProbe(SegmentObserver):
    """Measure the memory that autograd saves for a kept segment: keep one segment of each kind for one forward."""

    def __init__(self, meter: Meter) -> None:
        self.saved_bytes: dict[int, int] = {}
        self._meter = meter

    @contextmanager
    def around_kept(self, segment: Segment) -> Iterator[None]:
        """Count while the segment's forward runs."""
        storages: dict[int, int] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            if not isinstance(tensor if tensor._base is None else tensor._base, torch.nn.Parameter):
                storage = tensor.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
            # Without a backward, an operator that saves its own output would never be freed.
            return tensor.detach()

        before = self._meter.allocated()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            yield
        counted = sum(storages.values())
        # The allocator also counts tensors that functions hold without saving them; the output belongs to the next
        # segment.
        self.saved_bytes[segment.index] = self._meter.allocated() - before if self._meter.is_counted else counted


class _Times(NamedTuple):
    """Times of a step in ms, by segment where it is a list, without waits for copies."""

    forward: list[float]
    backward: list[float]
    recompute: list[float]
    values: list[dict[str, float]]
    head: float
    other: float

    def shorter(self, step: _Times) -> _Times:
        """Return the shorter time of each part of two steps."""
        values = [
            {name: min(ms, others.get(name, ms)) for name, ms in mine.items()}
            for mine, others in zip(self.values, step.values)
        ]
        return _Times(
            list(map(min, self.forward, step.forward)),
            list(map(min, self.backward, step.backward)),
            list(map(min, self.recompute, step.recompute)),
            values,
            min(self.head, step.head),
            min(self.other, step.other),
        )


class StepProbe(SegmentObserver):
    """Record times and memory of a forward and backward in which every segment is recomputed.

    Of two probes of the same work, the previous one and this, the shorter time of each part counts.

    ``waits`` has the start and end of each wait of compute for a copy. Segment times exclude them, because the planner
    adds the waits of a plan itself.
    """

    def __init__(self, meter: Meter, *, previous: StepProbe | None = None) -> None:
        self._meter = meter
        self._previous = previous
        self.waits: list[tuple[Any, Any]] = []
        # Start of each wait from the start of the step, and its length; read once.
        self._waited_ms: list[tuple[float, float]] | None = None
        self._moments: dict[tuple[str, int], Any] = {}
        self._values: dict[int, dict[str, list[Any]]] = defaultdict(dict)
        self._forward_peak: dict[int, int] = {}
        self._backward_peak: dict[int, int] = {}
        self._entry_bytes, self._is_first_hosted = 0, False
        self._backward_segment: int | None = None
        self.base_bytes = 0
        self._head_bytes = 0
        self.head_peak_bytes = 0
        # Reserved memory at the end of the step, minus the peak of allocated memory.
        self.gap_bytes = 0
        self._most_bytes = 0
        self._awaited: set[int] = set()
        self._reached: set[int] = set()

    @property
    def has_backward(self) -> bool:
        """Whether the backward has reached all of its segments; False after an exception."""
        return bool(self._awaited) and self._awaited == self._reached

    def forward_begins(self, segment: Segment) -> None:
        """Record the start of a forward."""
        self._entry_bytes = self._meter.start_peak()
        if segment.index == 0:
            self.base_bytes = self._entry_bytes
            self._is_first_hosted = segment.plan.input_place == "host"
        self._note("forward", segment)

    def forward_ends(self, segment: Segment) -> None:
        """Record the end of a forward; the head follows the last one."""
        self._note("forward end", segment)
        self._forward_peak[segment.index] = self._peak() - self._entry_bytes
        self._head_bytes = self._meter.start_peak()

    def backward_awaited(self, segment: Segment) -> None:
        """Record that the backward will reach a segment."""
        self._awaited.add(segment.index)

    def backward_begins(self, segment: Segment) -> None:
        """Record that the backward has reached a segment, and the peak of the segment after it."""
        self._note("backward", segment)
        if self._backward_segment is None:
            self.head_peak_bytes = self._peak() - self._head_bytes
        else:
            self._end_backward()
        self._entry_bytes = self._meter.start_peak()
        self._backward_segment = segment.index
        self._reached.add(segment.index)

    def recompute_begins(self, segment: Segment) -> None:
        """Record the start of a recompute."""
        self._note("recompute", segment)

    def recompute_ends(self, segment: Segment) -> None:
        """Record the end of a recompute."""
        self._note("recompute end", segment)

    def value_begins(self, segment: Segment, name: str) -> None:
        """Record the start of a value."""
        self._values[segment.index].setdefault(name, [0, []])[1].append([self._meter.now(), None])

    def value_ends(self, segment: Segment, name: str, tensors: Tensors) -> None:
        """Record the end and size of a value."""
        entry = self._values[segment.index][name]
        entry[0] += sum(align(tensor.nbytes) for tensor in tensors)
        entry[1][-1][1] = self._meter.now()

    def step_ends(self) -> None:
        """Record the start of the next forward, which ends this step."""
        self._moments["step end", 0] = self._meter.now()
        if self._backward_segment is not None:
            self._end_backward()
        self.gap_bytes = max(0, self._meter.reserved() - self._most_bytes)

    def read(
        self,
        segments: Sequence[Segment],
        *,
        input_bytes: int,
        saved_bytes: Sequence[int | None],
        extra_bytes: int,
        weight_bytes: Sequence[int],
    ) -> StepCost:
        """Return the costs of the step.

        Args:
            segments: All of them, in order.
            input_bytes: Size of the hidden states between two segments.
            saved_bytes: Size of the saved tensors of each segment if it is kept, with its output; None for all that its
                recompute and backward use.
            extra_bytes: Memory that will be in use later and is not yet.
            weight_bytes: Size of the frozen weights of each segment.

        Cost:
            One device sync.
        """
        times = self._times(segments)
        if self._previous is not None and self._previous.has_backward:
            times = times.shorter(self._previous._times(segments))
        costs = [
            self._segment_cost(
                segment, times=times, input_bytes=input_bytes, counted=saved_bytes[segment.index], weight_bytes=weight
            )
            for segment, weight in zip(segments, weight_bytes)
        ]
        return StepCost(
            segments=tuple(costs),
            base_bytes=max(0, self.base_bytes - input_bytes) + extra_bytes,
            # With the last output. Until the last layer has run, the model holds the embeddings, the first input.
            head_peak_bytes=self.head_peak_bytes + (2 if self._is_first_hosted else 1) * input_bytes,
            head_ms=times.head,
            other_ms=times.other,
        )

    def _times(self, segments: Sequence[Segment]) -> _Times:
        indices, last = [segment.index for segment in segments], segments[-1].index
        forward = [self._between(("forward", index), ("forward end", index)) for index in indices]
        recompute = [self._between(("recompute", index), ("recompute end", index)) for index in indices]
        backward = self._backward_times(len(segments))
        values = [
            {
                name: sum(self._meter.ms_between(begin, end) for begin, end in moments)
                for name, (_, moments) in self._values[index].items()
            }
            for index in indices
        ]
        head = self._between(("forward end", last), ("backward", last))
        total = self._between(("forward", 0), ("step end", 0))
        other = max(0.0, total - head - sum(forward) - sum(recompute) - sum(backward))
        return _Times(forward, backward, recompute, values, head, other)

    def _segment_cost(
        self, segment: Segment, *, times: _Times, input_bytes: int, counted: int | None, weight_bytes: int
    ) -> SegmentCost:
        index = segment.index
        backward_bytes = self._backward_peak.get(index, 0)
        # Without its output, which the next one counts.
        saved_bytes = backward_bytes if counted is None else max(0, counted - input_bytes)
        values = [
            ValueCost(name, num_bytes, times.values[index][name])
            for name, (num_bytes, _) in self._values[index].items()
            # The last point is never recomputed, so holding its value saves nothing.
            if segment.last_point is None or not name.startswith(segment.last_point)
        ]
        return SegmentCost(
            input_bytes=input_bytes,
            saved_bytes=saved_bytes,
            forward_ms=times.forward[index],
            backward_ms=times.backward[index],
            recompute_ms=times.recompute[index],
            values=tuple(values),
            forward_peak_bytes=self._forward_peak.get(index, 0),
            # Each backward begins with the gradient of the output.
            backward_peak_bytes=max(0, backward_bytes - saved_bytes) + input_bytes,
            weight_bytes=weight_bytes,
        )

    def _backward_times(self, num_segments: int) -> list[float]:
        """Return the backward time of each segment without recompute.

        The end of the first segments is not observed; they take the median of the others.
        """
        found: dict[int, float] = {}
        for index in range(1, num_segments):
            if ("backward", index) in self._moments and ("backward", index - 1) in self._moments:
                whole = self._between(("backward", index), ("backward", index - 1))
                found[index] = max(0.0, whole - self._between(("recompute", index), ("recompute end", index)))
        usual = statistics.median(found.values()) if found else 0.0
        return [found.get(index, usual) for index in range(num_segments)]

    def _between(self, begin: tuple[str, int], end: tuple[str, int]) -> float:
        if begin not in self._moments or end not in self._moments:
            return 0.0
        start, stop = (self._meter.ms_between(self._moments["forward", 0], self._moments[key]) for key in (begin, end))
        if self._waited_ms is None:
            self._waited_ms = [
                (self._meter.ms_between(self._moments["forward", 0], before), self._meter.ms_between(before, after))
                for before, after in self.waits
            ]
        return max(0.0, stop - start - sum(length for moment, length in self._waited_ms if start <= moment < stop))

    def _end_backward(self) -> None:
        assert self._backward_segment is not None
        self._backward_peak[self._backward_segment] = self._peak() - self._entry_bytes
        self._backward_segment = None

    def _peak(self) -> int:
        peak = self._meter.peak()
        self._most_bytes = max(self._most_bytes, peak)
        return peak

    def _note(self, what: str, segment: Segment) -> None:
        self._moments[what, segment.index] = self._meter.now()


def scale_cost(cost: StepCost, factor: float, *, input_bytes: int) -> StepCost:
    """Return the costs of a step for another pack length: times, activations and transients scale, weights do not."""
    if factor == 1:
        return cost
    segments = tuple(
        SegmentCost(
            input_bytes=input_bytes,
            saved_bytes=round(segment.saved_bytes * factor),
            forward_ms=segment.forward_ms * factor,
            backward_ms=segment.backward_ms * factor,
            recompute_ms=segment.recompute_ms * factor,
            values=tuple(
                ValueCost(value.name, align(math.ceil(value.num_bytes * factor)), value.rebuild_ms * factor)
                for value in segment.values
            ),
            forward_peak_bytes=round(segment.forward_peak_bytes * factor),
            backward_peak_bytes=round(segment.backward_peak_bytes * factor),
            weight_bytes=segment.weight_bytes,
        )
        for segment in cost.segments
    )
    return cost._replace(
        segments=segments, head_peak_bytes=round(cost.head_peak_bytes * factor), head_ms=cost.head_ms * factor
    )


def measure_machine(device: torch.device) -> Machine:
    """Return the copy rates of a device while both directions are busy.

    Cost:
        On CUDA two pinned buffers of 64 MiB and about 20 ms, with device syncs; for set-up only.
    """
    if device.type != "cuda":
        return Machine(device.type, 1e10, 1e10)
    host_out, host_in = (torch.empty(_BANDWIDTH_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2))
    on_device = [torch.empty(_BANDWIDTH_BYTES, dtype=torch.uint8, device=device) for _ in range(2)]
    streams = [torch.cuda.Stream(device) for _ in range(2)]
    torch.cuda.synchronize(device)
    events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
    for stream in streams:
        events.append((torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)))
        with torch.cuda.stream(stream):
            # The first copy is not timed, because it wakes the copy engine.
            for number in range(_BANDWIDTH_COPIES + 1):
                if number == 1:
                    events[-1][0].record()
                if stream is streams[0]:
                    host_out.copy_(on_device[0], non_blocking=True)
                else:
                    on_device[1].copy_(host_in, non_blocking=True)
            events[-1][1].record()
    torch.cuda.synchronize(device)
    seconds = [begin.elapsed_time(end) / 1e3 for begin, end in events]
    d2h, h2d = (_BANDWIDTH_COPIES * _BANDWIDTH_BYTES / second for second in seconds)
    return Machine(torch.cuda.get_device_name(device), d2h, h2d, is_unified=is_unified(device))
