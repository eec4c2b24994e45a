"""Losses of optimizer steps in bounded memory, on one rank and over all ranks."""

from __future__ import annotations

import math
from collections import deque

import numpy as np

from lightning_fastft.monitor.report.sums import Curve

# "First" and "final" loss are means over at most this many optimizer steps.
NUM_ENDS = 20


class StepLosses:
    """Losses of optimizer steps: a curve, the first and the last ones, and their means over ranks after the run.

    Under accumulation a micro-batch's loss is its sum divided by (labelled tokens of the window / micro-batches), so a
    single one also depends on its number of labelled tokens. The loss of a step is the mean over the micro-batches,
    which is the mean over the window's labelled tokens.

    A rank records its part of the loss: the sum over its labelled tokens of a step, divided by (labelled tokens of all
    ranks / ranks). The plain mean over ranks is therefore the training loss over the labelled tokens of all ranks.

    Example:
        >>> losses = [StepLosses(), StepLosses()]
        >>> for rank, values in enumerate([(3.0, 1.0), (5.0, 2.0)]):
        ...     for step, value in enumerate(values):
        ...         losses[rank].add(step, value, is_last=True)
        >>> losses[0].take_mean(np.stack([one.to_array() for one in losses]))
        True
        >>> [value for *_, value in losses[0].curve.points()], losses[0].first(1), losses[0].final(1)
        ([4.0, 1.5], 4.0, 1.5)
    """

    def __init__(self) -> None:
        self.curve = Curve()
        self.num_not_finite = 0
        # The current step, with sum and number of its micro-batches.
        self._step, self._sum, self._num = 0, 0.0, 0
        # Steps and their finite losses.
        self._first: dict[int, float] = {}
        self._last: deque[tuple[int, float]] = deque(maxlen=NUM_ENDS)

    def add(self, step: int, loss: float, *, is_last: bool, num_micro_batches: int | None = None) -> None:
        """Add the loss of a micro-batch.

        Args:
            step: Its optimizer step.
            loss: Its loss.
            is_last: Whether it is the last one of its optimizer step.
            num_micro_batches: As in ``end_step``.
        """
        self.num_not_finite += not math.isfinite(loss)
        if step != self._step:
            # The last micro-batch of an earlier step may have had no loss.
            self._step, self._sum, self._num = step, 0.0, 0
        self._sum, self._num = self._sum + loss, self._num + 1
        if is_last:
            self.end_step(step, num_micro_batches=num_micro_batches)

    def end_step(self, step: int, *, num_micro_batches: int | None = None) -> None:
        """Record the loss of an optimizer step; no-op if no micro-batch of it was added.

        Args:
            step: The optimizer step.
            num_micro_batches: Divisor of the sum of its losses; None for the number of added micro-batches.
        """
        if step != self._step or not self._num:
            return
        mean = self._sum / (self._num if num_micro_batches is None else num_micro_batches)
        self._sum, self._num = 0.0, 0
        is_finite = math.isfinite(mean)
        # A step without a finite loss is recorded too, so that curves of all ranks have the same steps.
        self.curve.add(step, mean if is_finite else 0.0, weight=float(is_finite))
        if is_finite:
            if len(self._first) < NUM_ENDS:
                self._first[step] = mean
            self._last.append((step, mean))

    def first(self, num_steps: int) -> float | None:
        """Return the mean of the first finite losses, of at most this many steps; None without any."""
        return _mean(list(self._first.values())[:num_steps])

    def final(self, num_steps: int) -> float | None:
        """Return the mean of the last finite losses."""
        return _mean([loss for _, loss in self._last][-num_steps:])

    def to_array(self) -> np.ndarray:
        """Return all values as an array of the same size on every rank, for the gather."""
        ends_E2 = np.full((2, NUM_ENDS, 2), -1.0)
        for end_E2, noted in zip(ends_E2, (list(self._first.items()), list(self._last))):
            end_E2[: len(noted)] = np.reshape(noted, (-1, 2))
        return np.concatenate([[self.num_not_finite], ends_E2.ravel(), self.curve.to_array().ravel()])

    def take_mean(self, array_RV: np.ndarray) -> bool:
        """Replace the values of this rank by means over ranks; drop points without a finite loss on a rank.

        Returns:
            Whether all ranks recorded the same steps; if not, nothing changes.
        """
        num_ends = 1 + 4 * NUM_ENDS
        curve_RPC = array_RV[:, num_ends:].reshape(len(array_RV), -1, 5)
        if not (curve_RPC[:, :, :3] == curve_RPC[:1, :, :3]).all():
            return False
        self.curve.take_mean(curve_RPC)
        self.num_not_finite = int(array_RV[:, 0].sum())
        first_REC, last_REC = array_RV[:, 1:num_ends].reshape(len(array_RV), 2, NUM_ENDS, 2).swapaxes(0, 1)
        self._first = _common_means(first_REC)
        self._last = deque(_common_means(last_REC).items(), maxlen=NUM_ENDS)
        return True


def _common_means(steps_REC: np.ndarray) -> dict[int, float]:
    """Return the mean over ranks of the steps that all ranks have; step -1 means no step."""
    by_rank = [{int(step): float(loss) for step, loss in steps_EC if step >= 0} for steps_EC in steps_REC]
    common = [step for step in by_rank[0] if all(step in losses for losses in by_rank)]
    return {step: sum(losses[step] for losses in by_rank) / len(by_rank) for step in common}


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None
