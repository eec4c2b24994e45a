"""Completions: which completion of which example each labelled row of a pack belongs to.

Axes: R labelled rows padded to a bucket, C completions (C1 = C + 1 offsets), G examples (a prompt with completions).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from lightning_fastft.core.errors import ShapeError
from lightning_fastft.core.linear_map import linear_map


class Completions:
    """Hold the completions of one pack, for losses that compare or weigh whole completions.

    The rows of a completion are consecutive among the labelled rows, so sums over completions are segment sums, which
    are the same in every run.

    Args:
        num_rows: Labelled rows of each completion, in the order of the pack.
        num_completions: Completions of each example; their sum is the length of num_rows.
        scores: A number per completion (``Document.scores``).
        last_tokens: Place in the pack of the last token of each completion, whether it is labelled or not.
        num_padded_rows: Labelled rows of the pack, with their padding.
        log_prob_R: Log-probability of each labelled row's target under the model that wrote it; NaN where it is not
            known, 0 in the padding. None if no row's is known.

    Raises:
        ShapeError: The lengths of the arguments do not fit each other.

    Example:
        >>> completions = Completions(
        ...     num_rows=[2, 1], num_completions=[2], scores=[1.0, 0.0], last_tokens=[3, 5], num_padded_rows=4
        ... )
        >>> completions.sum(torch.tensor([1.0, 2.0, 5.0, 0.0])).tolist(), completions.completion_R.tolist()
        ([3.0, 5.0], [0, 0, 1, 2])
    """

    def __init__(
        self,
        *,
        num_rows: Sequence[int],
        num_completions: Sequence[int],
        scores: Sequence[float],
        last_tokens: Sequence[int],
        num_padded_rows: int,
        log_prob_R: torch.Tensor | None = None,
    ) -> None:
        is_complete = sum(num_completions) == len(num_rows) == len(scores) == len(last_tokens)
        if not is_complete or sum(num_rows) > num_padded_rows:
            raise ShapeError(
                f"{len(num_completions)} examples have {sum(num_completions)} completions, {len(num_rows)} completions "
                f"have {sum(num_rows)} of {num_padded_rows} rows, and there are {len(scores)} scores and "
                f"{len(last_tokens)} last tokens."
            )
        if log_prob_R is not None and log_prob_R.shape != (num_padded_rows,):
            raise ShapeError(f"log_prob_R must have shape ({num_padded_rows},), got {tuple(log_prob_R.shape)}.")
        self.num_completions = len(num_rows)
        self.num_examples = len(num_completions)
        self.num_rows = sum(num_rows)
        self.num_trained = sum(count > 0 for count in num_rows)
        # Host copies: what a loss asks for without a sync.
        self.completions_per_example = tuple(num_completions)
        self.scores = tuple(scores)
        self.has_unequal_scores = _differ(scores, num_completions, num_rows)
        count_C = torch.as_tensor(num_rows, dtype=torch.int64)
        self.count_C = count_C.to(torch.float32)
        self.start_C1 = torch.nn.functional.pad(count_C.cumsum(0), (1, 0))
        owner_R = torch.repeat_interleave(torch.arange(self.num_completions), count_C)
        self.completion_R = torch.nn.functional.pad(
            owner_R, (0, num_padded_rows - len(owner_R)), value=self.num_completions
        )
        self.example_C = torch.repeat_interleave(
            torch.arange(self.num_examples), torch.as_tensor(num_completions, dtype=torch.int64)
        )
        self.last_token_C = torch.as_tensor(last_tokens, dtype=torch.int64)
        self.score_C = torch.as_tensor(scores, dtype=torch.float32)
        self.length_G = torch.as_tensor(num_completions, dtype=torch.int64)
        self.log_prob_R = log_prob_R
        # Log-probabilities before the first of several updates from the same completions; for RolloutDataModule.
        self.old_log_prob_R: torch.Tensor | None = None

    _TENSORS = (
        "count_C", "start_C1", "completion_R", "example_C", "last_token_C", "score_C", "length_G", "log_prob_R",
        "old_log_prob_R",
    )  # fmt: skip

    @classmethod
    def none(cls) -> Completions:
        """Return the completions of a pack of padding alone."""
        return cls(num_rows=[], num_completions=[], scores=[], last_tokens=[], num_padded_rows=0)

    def map(self, move: Callable[[torch.Tensor], torch.Tensor]) -> Completions:
        """Return a copy whose tensors went through a function, such as a move to a device."""
        other = object.__new__(Completions)
        other.__dict__.update(self.__dict__)
        for name in self._TENSORS:
            tensor = getattr(self, name)
            setattr(other, name, None if tensor is None else move(tensor))
        return other

    def sum(self, value_R: torch.Tensor) -> torch.Tensor:
        """Return the sum of a value over each completion's rows, shape (C,), differentiable.

        Values of padding rows are not read.

        Cost:
            One pass over the rows; no host sync, the same result in every run.
        """
        # Unsafe: the lengths are those of this object, and a check would sync.
        return torch.segment_reduce(value_R[: self.num_rows], "sum", offsets=self.start_C1, unsafe=True, initial=0.0)

    def mean(self, value_R: torch.Tensor) -> torch.Tensor:
        """Return the mean of a value over each completion's rows, shape (C,); 0 for a completion without rows."""
        return self.sum(value_R) / self.count_C.clamp(min=1.0)

    def example_mean(self, value_C: torch.Tensor) -> torch.Tensor:
        """Return, for each completion, the mean of a value over its example's completions, shape (C,)."""
        mean_G = torch.segment_reduce(value_C, "mean", lengths=self.length_G, unsafe=True, initial=0.0)
        return mean_G[self.example_C]

    def spread(self, value_C: torch.Tensor) -> torch.Tensor:
        """Return each row's value of its completion, shape (R,); 0 in padding rows. Differentiable."""
        rows: torch.Tensor = linear_map(
            lambda value_C: torch.nn.functional.pad(value_C, (0, 1))[self.completion_R],
            # A sum over the rows of a completion, the same in every run.
            lambda d_rows_R: (self.sum(d_rows_R),),
            value_C,
        )
        return rows


def _differ(scores: Sequence[float], num_completions: Sequence[int], num_rows: Sequence[int]) -> bool:
    """Return whether the scores of any example with labelled rows differ."""
    start = 0
    for count in num_completions:
        if len(set(scores[start : start + count])) > 1 and any(num_rows[start : start + count]):
            return True
        start += count
    return False
