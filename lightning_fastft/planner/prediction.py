"""Predict peak memory and time of a training step under a plan, by simulation."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from lightning_fastft.core.checks import check_int
from lightning_fastft.core.errors import OptionError
from lightning_fastft.planner.step import (
    EndBytes,
    Interval,
    Machine,
    Prediction,
    SegmentCost,
    SegmentPlan,
    StepCost,
    ValueCost,
    check_segments,
)

# Streamed weights rotate through three device slots: for the previous layer, which may still be read, the current one,
# and the next one, which is being copied.
NUM_WEIGHT_SLOTS = 3
# An output layer on the host is copied in this many parts, one in the forward of each of the last layers: it is larger
# than what one forward hides, and a whole copy would delay the weights of the next layer.
NUM_HEAD_PARTS = 8
_MS_PER_S = 1e3


def predict(cost: StepCost, segments: Sequence[SegmentPlan], *, machine: Machine, buffers: int = 2) -> Prediction:
    """Return the predicted cost of a step under a plan.

    The simulation runs forward, head and backward with one copy stream in each direction, both first in first out. At
    most the bytes of one segment are in flight to the host; compute waits for the remaining copies when the backward
    starts. In the backward the first ``buffers - 1`` segments with tensors on the host are fetched at its start, and
    each later one when the segment ``buffers - 1`` places before it starts. Compute waits for an input at the start of
    its segment and for a value at its place in the recompute. Streamed weights are fetched one layer ahead, except at
    the start of the forward and of the backward, where the three slots already hold the next weights. A streamed output
    layer is fetched in parts, in the forwards of the last ``NUM_HEAD_PARTS`` segments.

    Args:
        cost: Measured costs of the step.
        segments: Plan of each segment, in forward order.
        machine: Copy speeds.
        buffers: Number of staging slots on the device; 1 copies serially.

    Raises:
        OptionError: The number of segments differs from the cost, a value name is unknown, or a kept segment has
            tensors on the host.

    Cost:
        Below 5 ms for 64 segments with 10 values each.
    """
    check_segments(cost, segments)
    model = StepModel(cost, machine=machine, buffers=buffers)
    intervals: list[Interval] = []
    footprint = model.footprint(segments)
    prediction = model.simulate(footprint, intervals)
    intervals.sort(key=lambda interval: (interval.start_ms, interval.end_ms, interval.stream))
    forwards, backwards = model.labels
    labels = [*forwards, "head", *reversed(backwards), "other"]
    return prediction._replace(memory=tuple(zip(labels, footprint.memory)), streams=tuple(intervals))


class Footprint(NamedTuple):
    """Memory of a step, and its time without waits, a lower bound; both are known before the simulation."""

    works: list[_Work]
    streamed: list[int]
    host_bytes: int
    staging_bytes: int
    memory: list[int]
    compute_ms: float

    @property
    def peak_bytes(self) -> int:
        """Largest device memory."""
        return max(self.memory)


class _HostTensor(NamedTuple):
    """A tensor on the host: when the forward produces it and when the backward needs it."""

    label: str
    num_bytes: int
    exists_ms: float
    needed_ms: float


class _Work(NamedTuple):
    """Work of a segment under its plan."""

    host: tuple[_HostTensor, ...]
    host_bytes: int
    held_bytes: int
    live_bytes: int
    forward_bytes: int
    rebuilt_ms: float


class StepModel:
    """Simulate many plans of one step; the work of a segment under a plan is computed once.

    Args:
        cost: Measured costs of the step.
        machine: Copy speeds.
        buffers: Number of staging slots on the device.
    """

    def __init__(self, cost: StepCost, *, machine: Machine, buffers: int = 2) -> None:
        check_int("buffers", buffers, low=1)
        if not machine.is_unified and min(machine.d2h_bytes_per_s, machine.h2d_bytes_per_s) <= 0:
            raise OptionError(
                f"Copies of {machine.name} must move more than 0 bytes per second, got {machine.d2h_bytes_per_s}, "
                f"{machine.h2d_bytes_per_s}."
            )
        self.cost = cost
        self.machine = machine
        self.buffers = buffers
        self._works: dict[tuple[int, SegmentPlan], _Work] = {}
        numbers = range(len(cost.segments))
        self.labels = [[f"{phase} {number}" for number in numbers] for phase in ("forward", "backward")]
        self._own_ms = cost.least_ms

    def footprint(self, segments: Sequence[SegmentPlan]) -> Footprint:
        """Return the memory and the time without waits of a plan that fits the segments, without a simulation."""
        works = [self._work(number, plan) for number, plan in enumerate(segments)]
        staging = max(work.host_bytes for work in works)
        costs = self.cost.segments
        streamed = [number for number, plan in enumerate(segments) if plan.is_streamed and costs[number].weight_bytes]
        sizes = [costs[number].weight_bytes for number in streamed]
        ends = self.cost.ends if streamed else EndBytes()
        moved_bytes = sum(sizes) + ends.total
        base = self.cost.base_bytes - moved_bytes + _slot_bytes(sizes)
        # The model holds the embeddings, the first input, until its last layer has run.
        embedded = costs[0].input_bytes if segments[0].input_place == "host" else 0
        return Footprint(
            works=works,
            streamed=streamed,
            host_bytes=sum(work.host_bytes for work in works) + moved_bytes,
            staging_bytes=staging,
            memory=self._memory(works, base=base, staging=staging, head=ends.head, embedded=embedded),
            compute_ms=self._own_ms + sum(work.rebuilt_ms for work in works),
        )

    def run(self, segments: Sequence[SegmentPlan]) -> Prediction:
        """Return the cost of a plan that fits the segments, without memory over time and streams."""
        return self.simulate(self.footprint(segments))

    def simulate(self, footprint: Footprint, intervals: list[Interval] | None = None) -> Prediction:
        """Return the cost of a plan from its footprint, as ``run``; append the work of each stream to intervals."""
        works = footprint.works
        clock = _Clock(self.machine, limit_bytes=footprint.staging_bytes, intervals=intervals)
        sizes = [self.cost.segments[number].weight_bytes for number in footprint.streamed]
        weights = _WeightStream(clock, sizes, footprint.streamed)
        head_bytes, arrival = self.cost.ends.head if footprint.streamed else 0, 0.0
        num_parts, left_bytes = num_head_parts(len(works)), head_bytes
        for number, work in enumerate(works):
            if left_bytes and number >= len(works) - num_parts:
                part_bytes = min(left_bytes, math.ceil(head_bytes / num_parts))
                arrival = clock.copy_in("head", part_bytes)
                left_bytes -= part_bytes
            self._forward(clock, weights, number, work)
        clock.begin("head")
        if left_bytes:
            arrival = clock.copy_in("head", left_bytes)
        clock.wait(arrival)
        clock.compute(self.cost.head_ms)
        self._backward(clock, weights, works)
        clock.begin("other")
        clock.compute(self.cost.other_ms)
        clock.begin("")
        return Prediction(
            step_ms=clock.now,
            exposed_ms=clock.waited,
            host_bytes=footprint.host_bytes,
            staging_bytes=footprint.staging_bytes,
            peak_bytes=footprint.peak_bytes,
        )

    def _forward(self, clock: _Clock, weights: _WeightStream, number: int, work: _Work) -> None:
        clock.begin(self.labels[0][number])
        weights.use(number, direction=1)
        done_ms = 0.0
        for tensor in work.host:
            clock.compute(tensor.exists_ms - done_ms)
            done_ms = tensor.exists_ms
            clock.copy_out(tensor.label, tensor.num_bytes)
        clock.compute(self.cost.segments[number].forward_ms - done_ms)

    def _backward(self, clock: _Clock, weights: _WeightStream, works: list[_Work]) -> None:
        groups = [number for number in range(len(works) - 1, -1, -1) if works[number].host]
        arrivals: dict[int, list[float]] = {}
        clock.begin(self.labels[1][-1])
        clock.wait(clock.out_free)
        for number in groups[: self.buffers - 1]:
            arrivals[number] = self._fetch(clock, works[number])
        # Maps a segment to the one that is fetched when its backward starts.
        after = dict(zip(groups, groups[self.buffers - 1 :]))
        for number in range(len(works) - 1, -1, -1):
            clock.begin(self.labels[1][number])
            weights.use(number, direction=-1)
            if number in after:
                arrivals[after[number]] = self._fetch(clock, works[after[number]])
            done_ms = 0.0
            for tensor, arrival in zip(works[number].host, arrivals.get(number, ())):
                clock.compute(tensor.needed_ms - done_ms)
                done_ms = tensor.needed_ms
                clock.wait(arrival)
            clock.compute(works[number].rebuilt_ms + self.cost.segments[number].backward_ms - done_ms)

    @staticmethod
    def _fetch(clock: _Clock, work: _Work) -> list[float]:
        return [clock.copy_in(tensor.label, tensor.num_bytes) for tensor in work.host]

    def _memory(self, works: list[_Work], *, base: int, staging: int, head: int, embedded: int) -> list[int]:
        """Return device memory over time; memory of earlier segments grows in the forward, shrinks in the backward.

        head is the size of an output layer that comes to the device in the last forwards, embedded that of a first
        input that a forward holds beside its copy on the host.
        """
        forward: list[int] = []
        backward: list[int] = []
        base += self.buffers * staging
        update = [base + self.cost.update_peak_bytes] if self.cost.update_peak_bytes else []
        sent_bytes = 0
        for work, cost in zip(works, self.cost.segments):
            # A source is freed when a newer one replaces it, so sources of up to one segment stay until the backward.
            sent_bytes = min(staging, sent_bytes + work.host_bytes)
            forward.append(base + work.forward_bytes + sent_bytes + (embedded if forward else 0))
            backward.append(base + work.live_bytes + cost.backward_peak_bytes)
            base += work.held_bytes
        for number in range(len(works) - num_head_parts(len(works)), len(works)):
            forward[number] += head
        return [*forward, base + head + self.cost.head_peak_bytes + sent_bytes, *reversed(backward), *update]

    def _work(self, number: int, plan: SegmentPlan) -> _Work:
        work = self._works.get((number, plan))
        if work is None:
            work = self._works[number, plan] = _work_of(self.cost.segments[number], plan, number)
        return work


def num_head_parts(num_segments: int) -> int:
    """Return in how many of the last forwards parts of a streamed output layer are copied; never in the first one.

    Example:
        >>> [num_head_parts(num_segments) for num_segments in (1, 2, 40)]
        [0, 1, 8]
    """
    return min(NUM_HEAD_PARTS, num_segments - 1)


def _slot_bytes(sizes: list[int]) -> int:
    """Return the bytes of the device slots through which weights of these sizes are streamed."""
    return min(NUM_WEIGHT_SLOTS, len(sizes)) * max(sizes, default=0)


def _work_of(cost: SegmentCost, plan: SegmentPlan, number: int) -> _Work:
    if plan.is_kept:
        held = cost.input_bytes + cost.saved_bytes
        return _Work(
            host=(),
            host_bytes=0,
            held_bytes=held,
            live_bytes=held,
            forward_bytes=held + cost.forward_peak_bytes,
            rebuilt_ms=0.0,
        )
    places = dict(plan.values)
    values_ms = sum(value.rebuild_ms for value in cost.values)
    # Work that belongs to no value (norms, the last projection) is distributed over the values in proportion.
    rest_ms = max(0.0, cost.recompute_ms - values_ms)
    host, held_bytes, rebuilt_ms = [], 0, 0.0
    if plan.input_place == "host":
        host.append(_HostTensor(f"input {number}", cost.input_bytes, 0.0, 0.0))
    else:
        held_bytes += cost.input_bytes
    progress = _progress(cost.values, values_ms)
    for value, begin, end in zip(cost.values, progress, progress[1:]):
        place = places.get(value.name)
        if place == "host":
            exists_ms, needed_ms = cost.forward_ms * min(end, 1.0), rest_ms * begin + rebuilt_ms
            host.append(_HostTensor(f"{value.name} {number}", value.num_bytes, exists_ms, needed_ms))
        elif place == "device":
            held_bytes += value.num_bytes
        else:
            rebuilt_ms += value.rebuild_ms
    host_bytes = sum(tensor.num_bytes for tensor in host)
    return _Work(
        host=tuple(host),
        host_bytes=host_bytes,
        held_bytes=held_bytes,
        # Tensors from the host are read in the staging slot, which is counted separately. A value that the backward
        # frees before its peak is not part of it, and is subtracted all the same: up to 1.5 times the hidden states.
        live_bytes=cost.input_bytes + cost.saved_bytes - host_bytes,
        forward_bytes=held_bytes + cost.forward_peak_bytes,
        rebuilt_ms=rest_ms + rebuilt_ms,
    )


def _progress(values: Sequence[ValueCost], values_ms: float) -> list[float]:
    """Return the share of a layer's work that is done before each value, and after the last one."""
    if not values_ms:
        return [index / max(1, len(values)) for index in range(len(values) + 1)]
    return [done_ms / values_ms for done_ms in accumulate((value.rebuild_ms for value in values), initial=0.0)]


class _Clock:
    """Compute and the two copy streams, each first in first out."""

    def __init__(self, machine: Machine, *, limit_bytes: int, intervals: list[Interval] | None) -> None:
        self._limit_bytes = limit_bytes
        self.now = self.waited = self.out_free = self.in_free = 0.0
        self._out_ms_per_byte = _MS_PER_S / machine.d2h_bytes_per_s if machine.d2h_bytes_per_s else 0.0
        self._in_ms_per_byte = _MS_PER_S / machine.h2d_bytes_per_s if machine.h2d_bytes_per_s else 0.0
        self._in_flight: deque[tuple[float, int]] = deque()
        self._in_flight_bytes = 0
        self._intervals = intervals
        self._label, self._label_start = "", 0.0

    def begin(self, label: str) -> None:
        """Mark the start of other compute work."""
        self._close(self.now)
        self._label = label

    def compute(self, duration_ms: float) -> None:
        """Advance compute by some work."""
        self.now += duration_ms

    def wait(self, until_ms: float) -> None:
        """Let compute wait until a time, if it is later."""
        if until_ms > self.now:
            self._close(until_ms)
            self.waited += until_ms - self.now
            self.now = until_ms

    def copy_out(self, label: str, num_bytes: int) -> None:
        """Queue a copy to the host; compute waits for the oldest copies if too many bytes are in flight."""
        while self._in_flight_bytes + num_bytes > self._limit_bytes:
            oldest_end, oldest_bytes = self._in_flight.popleft()
            self.wait(oldest_end)
            self._in_flight_bytes -= oldest_bytes
        start = max(self.now, self.out_free)
        self.out_free = start + num_bytes * self._out_ms_per_byte
        self._in_flight.append((self.out_free, num_bytes))
        self._in_flight_bytes += num_bytes
        if self._intervals is not None:
            self._intervals.append(Interval("d2h", label, start, self.out_free))

    def copy_in(self, label: str, num_bytes: int) -> float:
        """Queue a copy to the device; return its end time."""
        start = max(self.now, self.in_free)
        self.in_free = start + num_bytes * self._in_ms_per_byte
        if self._intervals is not None:
            self._intervals.append(Interval("h2d", label, start, self.in_free))
        return self.in_free

    def _close(self, restart_ms: float) -> None:
        if self._intervals is not None and self.now > self._label_start:
            self._intervals.append(Interval("compute", self._label, self._label_start, self.now))
        self._label_start = restart_ms


class _WeightStream:
    """Frozen weights, copied one layer ahead; forward and backward start with their first weights in the slots."""

    def __init__(self, clock: _Clock, sizes: list[int], numbers: list[int]) -> None:
        self._clock, self._sizes, self._numbers = clock, sizes, numbers
        self._order = {number: order for order, number in enumerate(numbers)}
        self._ready = [0.0] * len(sizes)

    def use(self, number: int, *, direction: int) -> None:
        """Wait for the weights of a segment, and start to copy those of the next streamed one."""
        order = self._order.get(number)
        if order is None:
            return
        self._clock.wait(self._ready[order])
        following = order + direction
        is_held = following < NUM_WEIGHT_SLOTS if direction > 0 else following >= len(self._sizes) - NUM_WEIGHT_SLOTS
        if 0 <= following < len(self._sizes) and not is_held:
            self._ready[following] = self._clock.copy_in(f"weights {self._numbers[following]}", self._sizes[following])
