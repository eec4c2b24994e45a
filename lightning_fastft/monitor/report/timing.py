"""Times of micro-batches and of their parts, from marks on the device's timeline that are read after they have
passed.
"""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

from lightning_fastft.core.marks import Mark, has_passed, ms_between
from lightning_fastft.monitor.report.sums import Curve, Spread

# In the order of a micro-batch; "between" is what lies between the end of one and the start of the next: data,
# transfer, other callbacks, logging.
PARTS = ("between", "forward", "backward", "optimizer")
# Values of Batch.set_up: the loader starts in the first micro-batch of an epoch, and graphs are recorded in others.
EPOCH_START = "an epoch and its data loader began"
RECORDED = "layers were recorded as CUDA graphs"
# Batches held until it is known whether there are others than those of the warm-up and the starts of epochs.
_MOST_EARLY = 64


class Batch(NamedTuple):
    """What a micro-batch held, None where it cannot be known from the host, and what was made once while it ran."""

    number: int
    step: int
    num_tokens: int | None
    num_documents: int | None
    longest_document: int | None
    set_up: str = ""


class Timed(NamedTuple):
    """A micro-batch and the milliseconds of its parts, by their names."""

    batch: Batch
    parts_ms: dict[str, float]

    @property
    def ms(self) -> float:
        """Time of the whole micro-batch."""
        return sum(self.parts_ms.values())


class Clock:
    """Marks of one micro-batch: each begins a part."""

    def __init__(self, batch: Batch, *, is_counted: bool) -> None:
        self.batch = batch
        self.is_counted = is_counted
        self.marks: list[tuple[str, Mark]] = []

    def begin(self, part: str, mark: Mark) -> None:
        """Begin a part, which ends the one before it."""
        self.marks.append((part, mark))


class BatchTimes:
    """Sums over timed micro-batches in bounded memory.

    Args:
        num_warmup: Optimizer steps at the start that are left out, unless there are no others.
    """

    def __init__(self, *, num_warmup: int) -> None:
        self.num_warmup = num_warmup
        self.tokens_per_s = Curve()
        self.spread = Spread()
        self.slowest: Timed | None = None
        self.has_warmup = False
        # What was made once, with how many micro-batches that took, and their milliseconds.
        self.set_ups: dict[str, tuple[int, float]] = {}
        self.num_tokens = 0
        self.seconds = 0.0
        self._parts_ms = dict.fromkeys(PARTS, 0.0)
        self._early: list[Timed] = []
        self._waiting: deque[Clock] = deque()

    def push(self, clock: Clock) -> None:
        """Take the marks of a micro-batch; they are read when the last of them has passed."""
        if clock.is_counted:
            self._waiting.append(clock)

    def poll(self, *, wait: bool = False) -> None:
        """Read what has passed.

        With wait, at the end of a run, after the device; otherwise the host waits for nothing.
        """
        while self._waiting:
            if not has_passed(self._waiting[0].marks[-1][1], wait=wait):
                return
            clock = self._waiting.popleft()
            parts_ms: dict[str, float] = {}
            for (part, begin), (_, end) in zip(clock.marks, clock.marks[1:]):
                parts_ms[part] = parts_ms.get(part, 0.0) + ms_between(begin, end)
            self.add(Timed(clock.batch, parts_ms))

    def add(self, timed: Timed) -> None:
        """Count a micro-batch; one in which something was made once is counted apart."""
        if timed.batch.num_tokens is not None:
            self.tokens_per_s.add(timed.batch.step, float(timed.batch.num_tokens), timed.ms / 1e3)
        if timed.batch.step >= self.num_warmup and timed.batch.set_up:
            num_batches, ms = self.set_ups.get(timed.batch.set_up, (0, 0.0))
            self.set_ups[timed.batch.set_up] = num_batches + 1, ms + timed.ms
        elif timed.batch.step >= self.num_warmup:
            self._count(timed)
            return
        is_early = timed.batch.step < self.num_warmup or timed.batch.set_up == EPOCH_START
        if is_early and len(self._early) < _MOST_EARLY:
            self._early.append(timed)

    def finish(self) -> None:
        """Count the warm-up and the starts of epochs where nothing else was timed."""
        if not self.spread.num_values:
            self.has_warmup = bool(self._early)
            self.set_ups.pop(EPOCH_START, None)
            for timed in self._early:
                self._count(timed)
        self._early.clear()

    def drop(self) -> None:
        """Forget what has not been read."""
        self._waiting.clear()

    def rate(self) -> float | None:
        """Return tokens per second over the counted micro-batches; None where tokens are not known."""
        return self.num_tokens / self.seconds if self.num_tokens and self.seconds > 0 else None

    def to_dict(self, *, is_cuda: bool) -> dict[str, Any]:
        """Return plain values for JSON."""
        num_batches = self.spread.num_values
        total_ms = sum(self._parts_ms.values())
        names = {
            "between": "waiting for data, transfer, logging",
            "forward": "forward",
            "backward": "backward",
            "optimizer": "clipping and optimizer",
        }
        parts = [
            {
                "kind": part,
                "name": names[part],
                "mean_ms": self._parts_ms[part] / num_batches,
                "share": self._parts_ms[part] / total_ms,
            }
            for part in PARTS
            if num_batches and total_ms > 0
        ]
        percentiles = {f"p{percent}_ms": self.spread.percentile(percent) for percent in (10, 50, 90)}
        clock = "CUDA events" if is_cuda else "the clock of the host"
        set_ups = [{"what": what, "num_batches": number, "ms": ms} for what, (number, ms) in self.set_ups.items()]
        return {
            "num_batches": num_batches,
            "has_warmup": self.has_warmup,
            "clock": clock,
            "parts": parts,
            "set_ups": set_ups,
            **percentiles,
        }

    def slowest_to_dict(self, *, first_step: int = 0) -> dict[str, Any] | None:
        """Return the slowest micro-batch beside the median; None where none was timed. first_step is added to its
        step.
        """
        if self.slowest is None:
            return None
        batch = self.slowest.batch
        median = self.spread.percentile(50)
        return {
            "batch": batch.number,
            "step": batch.step + first_step,
            "ms": self.slowest.ms,
            "times_median": self.slowest.ms / median if median else None,
            "num_tokens": batch.num_tokens,
            "num_documents": batch.num_documents,
            "longest_document": batch.longest_document,
        }

    def _count(self, timed: Timed) -> None:
        self.spread.add(timed.ms)
        for part, part_ms in timed.parts_ms.items():
            self._parts_ms[part] += part_ms
        if timed.batch.num_tokens is not None:
            self.num_tokens += timed.batch.num_tokens
            self.seconds += timed.ms / 1e3
        if self.slowest is None or timed.ms > self.slowest.ms:
            self.slowest = timed
