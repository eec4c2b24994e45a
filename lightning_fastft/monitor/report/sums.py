"""Statistics of a long run in bounded memory: curves, a spread of times, lengths of documents."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise
from typing import Any

import numpy as np

MOST_POINTS = 512
# Ratio of neighbouring bins of a spread; its percentiles are exact to half a percent.
_BIN_FACTOR = 1.01
# Most bins of document lengths; if the longest is more than this many times the shortest, bins grow geometrically.
_MOST_LENGTHS = 12
_MOST_SPAN = 8
# Values of PackSums that add up over ranks.
_SUMMED = ("num_packs", "num_tokens", "num_real_tokens", "num_labelled", "num_documents")


class Curve:
    """A curve over any number of steps in bounded memory.

    A point is a sum of values over neighbouring steps divided by the sum of their weights: a mean if weights are 1. At
    max_points points, neighbours are merged in pairs, and later points take twice as many values. So all points but the
    last cover equally many values, and no value is lost.

    Example:
        >>> curve = Curve(max_points=2)
        >>> for step in range(5):
        ...     curve.add(step, float(step))
        >>> curve.points()
        [(0, 3, 1.5), (4, 4, 4.0)]
    """

    def __init__(self, *, max_points: int = MOST_POINTS) -> None:
        assert max_points % 2 == 0
        self.max_points = max_points
        self.values_per_point = 1
        # First step, last step, values, sum, weight.
        self._sums: list[list[float]] = []

    def add(self, step: int, value: float, weight: float = 1.0) -> None:
        """Add the sum and the weight of a step."""
        if self._sums and self._sums[-1][2] < self.values_per_point:
            last = self._sums[-1]
            last[1], last[2], last[3], last[4] = step, last[2] + 1, last[3] + value, last[4] + weight
            return
        if len(self._sums) == self.max_points:
            self._sums = [
                [one[0], other[1], one[2] + other[2], one[3] + other[3], one[4] + other[4]]
                for one, other in zip(self._sums[::2], self._sums[1::2])
            ]
            self.values_per_point *= 2
        self._sums.append([step, step, 1, value, weight])

    def to_array(self) -> np.ndarray:
        """Return first step, last step, number of values, sum and weight of each point, shape (max_points, 5).

        Rows after the last point are zero.
        """
        array_PC = np.zeros((self.max_points, 5))
        array_PC[: len(self._sums)] = np.reshape(self._sums, (-1, 5))
        return array_PC

    def take_mean(self, array_RPC: np.ndarray) -> None:
        """Replace the curve by the mean of curves with the same steps; a point needs weight in all of them."""
        sum_RP, weight_RP = (array_RPC[:, : len(self._sums), column] for column in (3, 4))
        for row, sums, weights in zip(self._sums, sum_RP.T, weight_RP.T):
            row[3:] = [float(np.mean(sums / weights)), 1.0] if weights.all() else [0.0, 0.0]

    def points(self) -> list[tuple[int, int, float]]:
        """Return the points whose weight is not 0, in their order."""
        return [(int(first), int(last), value / weight) for first, last, _, value, weight in self._sums if weight > 0]

    def to_dict(self, *, first_step: int = 0) -> dict[str, Any]:
        """Return plain values for JSON; first_step is added to every step."""
        points = [[first + first_step, last + first_step, value] for first, last, value in self.points()]
        return {"values_per_point": self.values_per_point, "points": points}


class Spread:
    """Percentiles of any number of positive values, exact to half a percent, in bounded memory.

    Example:
        >>> spread = Spread()
        >>> for value in (1.0, 2.0, 100.0):
        ...     spread.add(value)
        >>> round(spread.percentile(50), 1)
        2.0
    """

    def __init__(self) -> None:
        self.num_values = 0
        self.total = 0.0
        self._count: Counter[int] = Counter()

    def add(self, value: float) -> None:
        """Count a value; values of 0 or less count as the smallest."""
        self.num_values += 1
        self.total += value
        self._count[round(math.log(max(value, 1e-9)) / math.log(_BIN_FACTOR))] += 1

    def percentile(self, percent: float) -> float:
        """Return a quantile of the values; 0 without values."""
        left = percent / 100 * self.num_values
        for number in sorted(self._count):
            left -= self._count[number]
            if left <= 0:
                return _BIN_FACTOR**number
        return 0.0


class PackSums:
    """Fill of packs and lengths of documents, from the host's side of batch contexts."""

    def __init__(self) -> None:
        self.num_packs = self.num_tokens = self.num_real_tokens = self.num_labelled = self.num_documents = (
            self.longest
        ) = 0
        # Number of documents of each length.
        self._count = np.zeros(64, dtype=np.int64)
        # Ranks whose packs are counted here.
        self.num_ranks = 1

    def add(self, context: Any) -> tuple[int, int]:
        """Count a pack, and return the number of its documents and the length of the longest, without padding.

        Reads host integers only.
        """
        context = context.whole
        start_S1 = context.start_host_S1.numpy().astype(np.int64)
        length_S = np.diff(start_S1)[start_S1[:-1] < context.num_real_tokens]
        self.num_packs += 1
        self.num_tokens += context.num_tokens
        self.num_real_tokens += context.num_real_tokens
        self.num_labelled += context.num_labelled
        self.num_documents += len(length_S)
        longest = int(length_S.max(initial=0))
        self.longest = max(self.longest, longest)
        if longest >= len(self._count):
            self._count = np.pad(self._count, (0, 2 * longest - len(self._count)))
        np.add.at(self._count, length_S, 1)
        return len(length_S), longest

    def to_array(self) -> np.ndarray:
        """Return all values except the counts by length, for the gather; the last is the longest document."""
        return np.array([*(getattr(self, name) for name in _SUMMED), self.longest], dtype=np.float64)

    def count_lengths(self, longest: int) -> np.ndarray:
        """Return the number of documents of each length from 0 to longest, for the gather."""
        count_L = np.zeros(longest + 1)
        held = min(len(count_L), len(self._count))
        count_L[:held] = self._count[:held]
        return count_L

    def take_sums(self, array_RV: np.ndarray, count_RL: np.ndarray, *, num_alike: int) -> None:
        """Replace the values of this rank by sums over all ranks; groups of num_alike ranks count the same packs."""
        sum_V = array_RV.sum(axis=0) // num_alike
        for name, value in zip(_SUMMED, sum_V.tolist()):
            setattr(self, name, int(value))
        self.longest = int(array_RV[:, -1].max())
        self._count = (count_RL.sum(axis=0) // num_alike).astype(np.int64)
        self.num_ranks = len(array_RV)

    def to_dict(self, *, max_tokens: int | None, limit: str = "") -> dict[str, Any] | None:
        """Return plain values for JSON; None if there was no pack.

        Args:
            max_tokens: Most tokens of a pack; None if not known, and then fill is None too.
            limit: Why there are no fewer packs, as from ``find_limit``.
        """
        if not self.num_packs:
            return None
        return {
            "num_packs": self.num_packs,
            "num_tokens": self.num_tokens,
            "num_real_tokens": self.num_real_tokens,
            "num_labelled": self.num_labelled,
            "num_documents": self.num_documents,
            "max_tokens": max_tokens,
            "limit": limit,
            "num_ranks": self.num_ranks,
            "fill": None if max_tokens is None else self.num_real_tokens / (self.num_packs * max_tokens),
            "padding": 1 - self.num_real_tokens / self.num_tokens,
            "mean_document_tokens": self.num_real_tokens / max(1, self.num_documents),
            "longest_document_tokens": self.longest,
            "lengths": self._lengths(),
        }

    def _lengths(self) -> list[dict[str, int]]:
        """Return the numbers of documents by length, in bins."""
        found = np.flatnonzero(self._count)
        if not len(found):
            return []
        low, end = int(found[0]), int(found[-1]) + 1
        if end > _MOST_SPAN * low:
            edges = np.unique(np.round(np.geomspace(low, end, _MOST_LENGTHS + 1)).astype(int)).tolist()
        else:
            edges = [*range(low, end, math.ceil((end - low) / _MOST_LENGTHS)), end]
        return [
            {"low": first, "high": after - 1, "count": int(self._count[first:after].sum())}
            for first, after in pairwise(edges)
        ]
