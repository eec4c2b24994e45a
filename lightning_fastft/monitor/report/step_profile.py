"""Profile one step, and measure its copies: how long they ran, how much of that overlapped with compute, and how long
compute waited.

Compute waits for a copy if it is idle, the host has launched its next kernel, and a copy is running. Gaps caused by a
late host are counted separately. A kernel starts some microseconds after the previous one, or after its launch, even if
there is nothing to wait for; that much of every gap is not counted.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

# Token ids, labels and offsets of a batch are smaller than this, every offloaded activation is larger.
LEAST_COPY_BYTES = 2**20
# From the end of a kernel to the start of the next one, and from a launch to its start on an idle device, without any
# wait.
NEXT_KERNEL_US = 5.0
LAUNCH_US = 20.0


class Kernel(NamedTuple):
    """Work of the compute stream, in microseconds; launched is the time of its launch, -inf if the trace has none."""

    start: float
    end: float
    launched: float


class Copy(NamedTuple):
    """A copy between device and host, in microseconds."""

    direction: str
    start: float
    end: float
    num_bytes: int


class CopyUse(NamedTuple):
    """Copies of one step; times in ms.

    Args:
        step_ms: From the first kernel to the end of the last.
        busy_ms: Time in which compute was busy.
        copy_ms: Time in which a copy ran, in either direction.
        d2h_ms: Time of the copies to the host, added up.
        h2d_ms: Time of the copies to the device, added up.
        d2h_gib: Size of the copies to the host.
        h2d_gib: Size of the copies to the device.
        covered_share: Share of copy_ms during which a kernel ran; 1 without copies.
        exposed_ms: Time in which compute waited for a copy.
        hidden_share: Share of copy_ms for which compute did not wait; 1 without copies.
        late_host_ms: Time in which compute was idle because the host had not launched its next kernel.
        num_d2h: Copies to the host.
        num_h2d: Copies to the device.
    """

    step_ms: float
    busy_ms: float
    copy_ms: float
    d2h_ms: float
    h2d_ms: float
    d2h_gib: float
    h2d_gib: float
    covered_share: float
    exposed_ms: float
    hidden_share: float
    late_host_ms: float
    num_d2h: int
    num_h2d: int


class StepTrace(NamedTuple):
    """The profile of one step.

    Args:
        kernels: Work of the compute stream, in the order of its starts; on a CPU the operators.
        copies: Copies of at least 1 MiB between device and host.
        names: (name, count, total microseconds) of kernels or operators, longest first.
    """

    kernels: list[Kernel]
    copies: list[Copy]
    names: list[tuple[str, int, float]]


class StepProfile:
    """Record one step: ``start`` before it, ``stop`` after it.

    Args:
        is_cuda: Whether there is a GPU; on a CPU the operators are recorded.

    Cost:
        Two host syncs, and a trace that is written and read: about a second for each 10,000 kernels.
    """

    def __init__(self, *, is_cuda: bool) -> None:
        self._is_cuda = is_cuda
        self._profile: Any = None

    def start(self) -> None:
        """Wait for the device, then begin."""
        activity = torch.profiler.ProfilerActivity
        if self._is_cuda:
            torch.cuda.synchronize()
        self._profile = torch.profiler.profile(activities=[activity.CUDA if self._is_cuda else activity.CPU])
        self._profile.start()

    def stop(self) -> StepTrace | None:
        """Wait for the device and return the profile; None if none was started."""
        if self._profile is None:
            return None
        if self._is_cuda:
            torch.cuda.synchronize()
        profile, self._profile = self._profile, None
        profile.stop()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            profile.export_chrome_trace(str(path))
            events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
        if not self._is_cuda:
            operators = _outermost(events)
            return StepTrace(
                [Kernel(start, end, float("-inf")) for _, start, end in operators], [], _by_name(operators)
            )
        named = [
            (str(event["name"]), float(event["ts"]), float(event["ts"]) + float(event.get("dur", 0.0)))
            for event in events
            if event.get("ph") == "X" and event.get("cat") == "kernel"
        ]
        return StepTrace(*read_events(events), _by_name(named))

    def cancel(self) -> None:
        """End a recording whose step failed; nothing is read."""
        profile, self._profile = self._profile, None
        if profile is not None:
            profile.stop()


def _outermost(events: Iterable[dict[str, Any]]) -> list[tuple[str, float, float]]:
    """Return the outermost CPU operators of each thread as (name, start, end), in the order of their starts."""
    found: list[tuple[str, float, float]] = []
    ends: dict[Any, float] = {}
    operators = (event for event in events if event.get("ph") == "X" and event.get("cat") == "cpu_op")
    for event in sorted(operators, key=lambda event: (float(event["ts"]), -float(event.get("dur", 0.0)))):
        start, thread = float(event["ts"]), event.get("tid")
        end = start + float(event.get("dur", 0.0))
        if start >= ends.get(thread, float("-inf")):
            ends[thread] = end
            found.append((str(event["name"]), start, end))
    return found


def _by_name(work: Iterable[tuple[str, float, float]]) -> list[tuple[str, int, float]]:
    sums: dict[str, tuple[int, float]] = {}
    for name, start, end in work:
        count, time_us = sums.get(name, (0, 0.0))
        sums[name] = count + 1, time_us + end - start
    return sorted(((name, count, time_us) for name, (count, time_us) in sums.items()), key=lambda item: -item[2])


def shares_over_time(
    intervals: Sequence[tuple[float, float]], *, begin: float, end: float, num_slices: int
) -> list[float]:
    """Return the share of each of equal time slices that disjoint intervals, in order, cover.

    Example:
        >>> shares_over_time([(0.0, 1.0), (2.0, 2.5)], begin=0.0, end=4.0, num_slices=4)
        [1.0, 0.0, 0.5, 0.0]
    """
    width = (end - begin) / num_slices
    shares = [0.0] * num_slices
    if width <= 0:
        return shares
    for start, stop in intervals:
        first, last = (min(num_slices - 1, max(0, int((moment - begin) / width))) for moment in (start, stop))
        for number in range(first, last + 1):
            inside = min(stop, begin + (number + 1) * width) - max(start, begin + number * width)
            shares[number] += max(0.0, inside) / width
    return [min(1.0, share) for share in shares]


def read_events(events: Iterable[dict[str, Any]]) -> tuple[list[Kernel], list[Copy]]:
    """Return kernels in the order of their starts, and copies, from the events of a Chrome trace."""
    launches: dict[int, float] = {}
    work: list[tuple[dict[str, Any], float, float]] = []
    copies: list[Copy] = []
    for event in events:
        category, arguments = event.get("cat"), event.get("args", {})
        if event.get("ph") != "X" or category not in (
            "kernel",
            "gpu_memset",
            "gpu_memcpy",
            "cuda_runtime",
            "cuda_driver",
        ):
            continue
        start = float(event["ts"])
        end = start + float(event.get("dur", 0.0))
        if category.startswith("cuda_"):
            launches[int(arguments.get("correlation", -1))] = start
        elif category == "gpu_memcpy" and ("DtoH" in event["name"] or "HtoD" in event["name"]):
            num_bytes = int(arguments.get("bytes", LEAST_COPY_BYTES))
            if num_bytes >= LEAST_COPY_BYTES:
                copies.append(Copy("d2h" if "DtoH" in event["name"] else "h2d", start, end, num_bytes))
        else:
            work.append((arguments, start, end))
    kernels = [
        Kernel(start, end, launches.get(int(arguments.get("correlation", -2)), float("-inf")))
        for arguments, start, end in work
    ]
    return sorted(kernels), sorted(copies, key=lambda copy: copy.start)


def copy_use(kernels: Sequence[Kernel], copies: Sequence[Copy]) -> CopyUse:
    """Evaluate the copies of a step."""
    working = merge((kernel.start, kernel.end) for kernel in kernels)
    copying = merge((copy.start, copy.end) for copy in copies)
    waits: list[tuple[float, float]] = []
    late_us, end = 0.0, kernels[0].start if kernels else 0.0
    for kernel in kernels:
        if kernel.start > end:
            begin = max(end + NEXT_KERNEL_US, kernel.launched + LAUNCH_US)
            if begin < kernel.start:
                waits.append((begin, kernel.start))
            late_us += max(0.0, min(kernel.start, kernel.launched) - end)
        end = max(end, kernel.end)
    copy_us = total(copying)
    covered_us, exposed_us = overlap(copying, working), overlap(copying, waits)

    def summed(direction: str, value: Callable[[Copy], float]) -> float:
        return sum(value(copy) for copy in copies if copy.direction == direction)

    return CopyUse(
        step_ms=(working[-1][1] - working[0][0]) / 1e3 if working else 0.0,
        busy_ms=total(working) / 1e3,
        copy_ms=copy_us / 1e3,
        d2h_ms=summed("d2h", lambda copy: copy.end - copy.start) / 1e3,
        h2d_ms=summed("h2d", lambda copy: copy.end - copy.start) / 1e3,
        d2h_gib=summed("d2h", lambda copy: copy.num_bytes) / 2**30,
        h2d_gib=summed("h2d", lambda copy: copy.num_bytes) / 2**30,
        covered_share=covered_us / copy_us if copy_us else 1.0,
        exposed_ms=exposed_us / 1e3,
        hidden_share=1.0 - exposed_us / copy_us if copy_us else 1.0,
        late_host_ms=late_us / 1e3,
        num_d2h=sum(copy.direction == "d2h" for copy in copies),
        num_h2d=sum(copy.direction == "h2d" for copy in copies),
    )


def merge(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the union of intervals as disjoint ones, in order.

    Example:
        >>> merge([(3.0, 4.0), (0.0, 1.0), (0.5, 2.0)])
        [(0.0, 2.0), (3.0, 4.0)]
    """
    found: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


def total(intervals: Iterable[tuple[float, float]]) -> float:
    """Return the length of disjoint intervals."""
    return sum(end - start for start, end in intervals)


def overlap(first: Sequence[tuple[float, float]], second: Sequence[tuple[float, float]]) -> float:
    """Return the length of the intersection of two lists of disjoint intervals, each in order."""
    shared, one, other = 0.0, 0, 0
    while one < len(first) and other < len(second):
        start, end = max(first[one][0], second[other][0]), min(first[one][1], second[other][1])
        shared += max(0.0, end - start)
        if first[one][1] < second[other][1]:
            one += 1
        else:
            other += 1
    return shared
