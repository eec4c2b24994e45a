"""Times of micro-batches and of their parts, from marks on the device's timeline, read once they have passed."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from lightning_fastft.core.marks import Mark, has_passed, ms_between
from lightning_fastft.monitor.report.sums import Curve, Spread

# In the order of a micro-batch; "between" is the time since the end of the last one: data, transfer, other callbacks,
# logging.
PARTS = ("between", "forward", "backward", "optimizer")
# Values of Batch.set_up: the loader starts in the first micro-batch of an epoch, and graphs are recorded in others.
EPOCH_START = "an epoch and its data loader began"
RECORDED = "layers were recorded as CUDA graphs"
# Most micro-batches of the warm-up and of starts of epochs that are held, in case the run has no others.
_MOST_EARLY = 64


@dataclass(kw_only=True)
class Batch:
    """A micro-batch: its contents, marks at the start of its parts, and later the times between them.

    Args:
        number: Number in this fit.
        step: Optimizer step of this fit.
        num_tokens: Tokens without padding; None if the host does not know them.
        num_documents: Documents of its packs; None as above.
        longest_document: Tokens of the longest document; None as above.
        set_up: EPOCH_START or RECORDED; "" for neither.
        is_counted: Whether its times are read; False for a profiled or watched micro-batch.
        marks: (part that begins, mark), in order; the last one is the end.
        parts_ms: Milliseconds of each part, once its marks have been read.
    """

    number: int
    step: int
    num_tokens: int | None = None
    num_documents: int | None = None
    longest_document: int | None = None
    set_up: str = ""
    is_counted: bool = True
    marks: list[tuple[str, Mark]] = field(default_factory=list)
    parts_ms: dict[str, float] = field(default_factory=dict)

    @property
    def ms(self) -> float:
        """Time of the whole micro-batch."""
        return sum(self.parts_ms.values())

    def read_marks(self) -> None:
        """Replace the marks, which have passed, by the times between them."""
        for (part, begin), (_, end) in pairwise(self.marks):
            self.parts_ms[part] = self.parts_ms.get(part, 0.0) + ms_between(begin, end)
        self.marks.clear()


class BatchTimes:
    """Sums over timed micro-batches in bounded memory.

    Args:
        num_warmup: First optimizer steps, which are counted only if there are no others.
    """

    def __init__(self, *, num_warmup: int) -> None:
        self.num_warmup = num_warmup
        self.tokens_per_s = Curve()
        self.spread = Spread()
        self.slowest: Batch | None = None
        self.has_warmup = False
        # Number and milliseconds of the micro-batches with each kind of set-up.
        self.set_ups: dict[str, tuple[int, float]] = {}
        self.num_tokens = 0
        self.seconds = 0.0
        self._parts_ms = dict.fromkeys(PARTS, 0.0)
        self._early: list[Batch] = []
        self._waiting: deque[Batch] = deque()

    def push(self, batch: Batch) -> None:
        """Add a micro-batch, whose marks are read once the last of them has passed."""
        if batch.is_counted:
            self._waiting.append(batch)

    def poll(self, *, wait: bool = False) -> None:
        """Read marks that have passed; with ``wait`` all of them, with a host sync."""
        while self._waiting:
            if not has_passed(self._waiting[0].marks[-1][1], wait=wait):
                return
            batch = self._waiting.popleft()
            batch.read_marks()
            self.add(batch)

    def add(self, batch: Batch) -> None:
        """Count a micro-batch, separately if it had a set-up."""
        if batch.num_tokens is not None:
            self.tokens_per_s.add(batch.step, float(batch.num_tokens), batch.ms / 1e3)
        if batch.step >= self.num_warmup and batch.set_up:
            num_batches, ms = self.set_ups.get(batch.set_up, (0, 0.0))
            self.set_ups[batch.set_up] = num_batches + 1, ms + batch.ms
        elif batch.step >= self.num_warmup:
            self._count(batch)
            return
        is_early = batch.step < self.num_warmup or batch.set_up == EPOCH_START
        if is_early and len(self._early) < _MOST_EARLY:
            self._early.append(batch)

    def finish(self) -> None:
        """Count the warm-up and the starts of epochs if nothing else was timed."""
        if not self.spread.num_values:
            self.has_warmup = bool(self._early)
            self.set_ups.pop(EPOCH_START, None)
            for batch in self._early:
                self._count(batch)
        self._early.clear()

    def drop(self) -> None:
        """Drop micro-batches that have not been read."""
        self._waiting.clear()

    def rate(self) -> float | None:
        """Return tokens per second over the counted micro-batches; None if tokens are not known."""
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
        """Return the slowest micro-batch for JSON, with its ratio to the median; None if none was timed.

        first_step is added to its step.
        """
        if self.slowest is None:
            return None
        batch = self.slowest
        median = self.spread.percentile(50)
        return {
            "batch": batch.number,
            "step": batch.step + first_step,
            "ms": batch.ms,
            "times_median": batch.ms / median if median else None,
            "num_tokens": batch.num_tokens,
            "num_documents": batch.num_documents,
            "longest_document": batch.longest_document,
        }

    def _count(self, batch: Batch) -> None:
        self.spread.add(batch.ms)
        for part, part_ms in batch.parts_ms.items():
            self._parts_ms[part] += part_ms
        if batch.num_tokens is not None:
            self.num_tokens += batch.num_tokens
            self.seconds += batch.ms / 1e3
        if self.slowest is None or batch.ms > self.slowest.ms:
            self.slowest = batch
