"""Store the prompts, completions, scores and log-probabilities of a data set as flat arrays.

Axes: N examples, M segments (the prompt and the completions of each example), C completions of all examples, T tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from lightning_fastft.core.errors import DataError


class Segments(NamedTuple):
    """How one example divides into a prompt and completions; the fields are those of Document.

    Args:
        segment_lengths: Tokens of the prompt, then of each completion, all at least 1.
        scores: One number per completion.
        log_probs: Log-probability of each token, float32, shape (length,), 0 in the prompt; None if not known.
        is_stepwise: Whether the completions are steps of one answer, each behind all earlier ones.
    """

    segment_lengths: tuple[int, ...]
    scores: tuple[float, ...]
    log_probs: np.ndarray | None = None
    is_stepwise: bool = False

    @property
    def num_packed(self) -> int:
        """Tokens that the example takes in a pack, where each completion begins with the prompt's last token; steps
        are in a row.
        """
        if self.is_stepwise:
            return sum(self.segment_lengths)
        return sum(self.segment_lengths) - 1 + len(self.scores)


class CompletionStore:
    """The completions of a data set, in memory or memory-mapped.

    Args:
        arrays: segment_lengths: tokens of the prompt, then of each completion, example after example. first_segment:
            number of the first segment of each example, and the number of segments. scores: one per completion.
            log_probs: one per token of the data set, NaN throughout an example where they are not known; absent if no
            example has them. is_stepwise: 1 for examples whose completions are steps; absent if there are none.
    """

    # Dtype of each file of a folder; the last two are optional.
    DTYPES = {
        "segment_lengths": np.int32,
        "first_segment": np.int64,
        "scores": np.float32,
        "log_probs": np.float32,
        "is_stepwise": np.uint8,
    }

    def __init__(self, arrays: Mapping[str, np.ndarray]) -> None:
        self.arrays = dict(arrays)
        self._length_M = np.asarray(self.arrays["segment_lengths"])
        self._first_N1 = np.asarray(self.arrays["first_segment"])
        self._score_C = self.arrays["scores"]
        self._log_prob_T = self.arrays.get("log_probs")
        steps = self.arrays.get("is_stepwise")
        num_examples = len(self._first_N1) - 1
        # Whether the completions of each example are steps, bool.
        self.is_stepwise_N = np.zeros(num_examples, dtype=bool) if steps is None else np.asarray(steps).astype(bool)

    @property
    def num_prompt_tokens_N(self) -> np.ndarray:
        """Tokens of each prompt, int64."""
        return self._length_M[self._first_N1[:-1]].astype(np.int64)

    @property
    def num_completions_N(self) -> np.ndarray:
        """Completions of each example, int64."""
        return np.diff(self._first_N1) - 1

    @property
    def num_completion_tokens_N(self) -> np.ndarray:
        """Tokens of all completions of each example, int64."""
        total_N = np.add.reduceat(self._length_M, self._first_N1[:-1], dtype=np.int64)
        return total_N - self.num_prompt_tokens_N

    def read(self, example: int, *, start: int) -> Segments:
        """Return the completions of one example."""
        first, last = int(self._first_N1[example]), int(self._first_N1[example + 1])
        lengths = tuple(self._length_M[first:last].tolist())
        # Each earlier example has one segment more than it has scores: its prompt.
        scores = tuple(self._score_C[first - example : last - example - 1].tolist())
        if self._log_prob_T is None:
            return Segments(lengths, scores, is_stepwise=bool(self.is_stepwise_N[example]))
        log_prob_T = np.array(self._log_prob_T[start : start + sum(lengths)])
        return Segments(
            lengths,
            scores,
            None if np.isnan(log_prob_T[0]) else log_prob_T,
            is_stepwise=bool(self.is_stepwise_N[example]),
        )

    def check_bounds(self, *, length_N: np.ndarray) -> None:
        """Raise DataError if lengths are inconsistent, which would cause reads out of bounds."""
        num_examples, num_segments = len(length_N), len(self._length_M)
        if len(self._first_N1) != num_examples + 1 or self._first_N1[0] != 0 or self._first_N1[-1] != num_segments:
            raise DataError("its completions have impossible offsets")
        if int(self.num_completions_N.min(initial=1)) < 1:
            raise DataError("it has examples without completions")
        if int(self._length_M.min(initial=1)) < 1:
            raise DataError("it has empty prompts or completions")
        if (self.num_prompt_tokens_N + self.num_completion_tokens_N != length_N).any():
            raise DataError("its completions have impossible lengths")
        if len(self._score_C) != num_segments - num_examples:
            raise DataError("its scores and completions differ in number")
        if self._log_prob_T is not None and len(self._log_prob_T) != int(length_N.sum()):
            raise DataError("its log-probabilities and tokens differ in number")
        if len(self.is_stepwise_N) != num_examples:
            raise DataError("its marks of steps and examples differ in number")


def pack_completions(examples: Sequence[Segments]) -> dict[str, np.ndarray]:
    """Return the arrays of a CompletionStore by name; none if there is no example."""
    if not examples:
        return {}
    arrays: dict[str, np.ndarray] = {
        "segment_lengths": np.asarray([n for each in examples for n in each.segment_lengths], dtype=np.int32),
        "first_segment": np.cumsum([0, *(len(each.segment_lengths) for each in examples)], dtype=np.int64),
        "scores": np.asarray([score for each in examples for score in each.scores], dtype=np.float32),
    }
    if any(each.log_probs is not None for each in examples):
        arrays["log_probs"] = np.concatenate(
            [
                np.full(sum(each.segment_lengths), np.nan, np.float32) if each.log_probs is None else each.log_probs
                for each in examples
            ]
        )
    if any(each.is_stepwise for each in examples):
        arrays["is_stepwise"] = np.asarray([each.is_stepwise for each in examples], dtype=np.uint8)
    return arrays
