"""Mixtures: which examples of several weighted sources an epoch trains, and how often.

Axes: E sources (entries of the mixture), N documents, M documents of an epoch, repeats included.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from lightning_fastft.core.errors import DataError
from lightning_fastft.packing.step_plan import mix_bits

_STREAM = 0x4D495854
# Repeats of an example in one epoch; more are a slip in the weights.
MOST_REPEATS = 10_000


class MixedSource(NamedTuple):
    """One source of a mixture, as an epoch trains it.

    Args:
        name: Path of the source.
        weight: Its share of the tokens of an epoch, as asked for: all weights are divided by their sum.
        share: Its share of the tokens, as planned.
        num_documents: Examples of the source.
        num_trained: Documents that an epoch trains, repeats included.
    """

    name: str
    weight: float
    share: float
    num_documents: int
    num_trained: int

    def __str__(self) -> str:
        """Return a line for a log or a report."""
        times = self.num_trained / self.num_documents
        how_often = "once" if self.num_trained == self.num_documents else f"{times:.2f} times on average"
        return (
            f"{self.name}: {100 * self.share:.2f} % of the tokens of an epoch (weight {100 * self.weight:.2f} %), each "
            f"of {self.num_documents} examples {how_often}"
        )


def mix_sources(
    weights: Mapping[str, float], *, length_N: np.ndarray, source_N: np.ndarray, seed: int
) -> tuple[np.ndarray, list[MixedSource]]:
    """Return the documents of an epoch, ascending, and what each source has of it.

    The weights are shares of tokens. Each example is trained at least once per epoch: the source with the most tokens
    for its weight once, the others as often as their weights say. Where that is not a whole number, the examples with
    one repeat more are chosen by position and seed. Every epoch has the same documents.

    Raises:
        DataError: A source has no document, or its weight repeats it too often.

    Example:
        >>> length_N, source_N = np.array([4, 4, 4, 4, 8]), np.array([0, 0, 0, 0, 1])
        >>> mix_sources({"a": 0.5, "b": 0.5}, length_N=length_N, source_N=source_N, seed=0)[0]
        array([0, 1, 2, 3, 4, 4])
    """
    names = list(weights)
    weight_E = np.array(list(weights.values()), dtype=np.float64)
    weight_E /= weight_E.sum()
    num_tokens_E = np.bincount(source_N, weights=length_N, minlength=len(names))
    if not num_tokens_E.all():
        raise DataError(
            f"The source {names[int(num_tokens_E.argmin())]} of the mixture has no example to train on. Remove it, or "
            "repair its rows."
        )
    target_E = weight_E * (num_tokens_E / weight_E).max()
    times_E = target_E / num_tokens_E
    if times_E.max() > MOST_REPEATS:
        raise DataError(
            f"The weights of the mixture repeat each example of {names[int(times_E.argmax())]} {times_E.max():.0f} "
            f"times per epoch; at most {MOST_REPEATS} are allowed. Lower its weight."
        )
    chosen = [
        _choose(np.flatnonzero(source_N == number), length_N=length_N, target=target, seed=seed)
        for number, target in enumerate(target_E.tolist())
    ]
    index_M = np.sort(np.concatenate(chosen))
    planned_E = np.array([length_N[index].sum() for index in chosen])
    share_E = planned_E / planned_E.sum()
    num_documents_E = np.bincount(source_N, minlength=len(names)).tolist()
    lines = [
        MixedSource(name, weight, share, num_documents, len(index))
        for name, weight, share, num_documents, index in zip(
            names, weight_E.tolist(), share_E.tolist(), num_documents_E, chosen
        )
    ]
    return index_M, lines


def _choose(number_N: np.ndarray, *, length_N: np.ndarray, target: float, seed: int) -> np.ndarray:
    """Return documents of one source with repeats, whose tokens are as close to the target as whole examples allow."""
    own_N = length_N[number_N]
    # Rounding of the quotient must not take a whole repeat away.
    num_whole = max(1, int(target / own_N.sum() + 1e-9))
    order_N = np.argsort(mix_bits(number_N.astype(np.uint64), seed=seed, stream=_STREAM), kind="stable")
    sum_N1 = np.concatenate([[0], np.cumsum(own_N[order_N])])
    num_more = int(np.abs(sum_N1 - (target - num_whole * own_N.sum())).argmin())
    return np.concatenate([np.repeat(number_N, num_whole), number_N[order_N[:num_more]]])
