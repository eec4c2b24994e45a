"""Read rows of the format stepwise: a prompt, the steps of one answer, and a label for each step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lightning_fastft.packing.rows.completion_rows import PromptRow
from lightning_fastft.packing.rows.parsing import check_text
from lightning_fastft.packing.rows.rejects import (
    ALL_MASKED_TRUNCATED,
    LENGTHS_DIFFER,
    NO_COMPLETION,
    NO_PROMPT,
    NOT_A_SHARE,
    WRONG_TYPE,
    RowRejectedError,
)
from lightning_fastft.packing.store.completion_store import Segments

_NUMBERS = (bool, int, float, np.bool_, np.integer, np.floating)


def read_steps(row: Mapping[str, Any]) -> PromptRow:
    """Return the prompt, the steps as completions, and their labels, from 0 to 1, as scores.

    Raises:
        RowRejectedError: A value has a wrong type, a label is not from 0 to 1, or steps and labels differ in number.

    Example:
        >>> read_steps({"prompt": "2+2+2?", "completions": ["2+2=4.", "4+2=7."], "labels": [True, 0]}).scores
        (1.0, 0.0)
    """
    steps, labels = row["completions"], row["labels"]
    for column, value in (("completions", steps), ("labels", labels)):
        if not isinstance(value, (list, tuple, np.ndarray)):
            raise RowRejectedError(WRONG_TYPE, f"{column} must be a list, got {type(value).__name__}")
    if not len(steps):
        raise RowRejectedError(NO_COMPLETION, "completions is an empty list")
    if len(steps) != len(labels):
        raise RowRejectedError(LENGTHS_DIFFER, f"{len(steps)} completions and {len(labels)} labels")
    return PromptRow(
        check_text(row["prompt"], column="prompt"),
        [check_text(step, column=f"completions[{number}]") for number, step in enumerate(steps)],
        tuple(_read_label(label, column=f"labels[{number}]") for number, label in enumerate(labels)),
    )


def join_steps(
    prompt: np.ndarray, steps: Sequence[np.ndarray], *, labels: tuple[float, ...]
) -> tuple[np.ndarray, np.ndarray, Segments]:
    """Return the ids, trained flags and segments of an example; the last token of each step is trained.

    Raises:
        RowRejectedError: The prompt or a step has no token.
    """
    if not len(prompt):
        raise RowRejectedError(NO_PROMPT, "it has no token")
    for number, ids in enumerate(steps):
        if not len(ids):
            raise RowRejectedError(NO_COMPLETION, f"completions[{number}] has no token")
    lengths = (len(prompt), *map(len, steps))
    is_trained = np.zeros(sum(lengths), dtype=bool)
    is_trained[np.cumsum(lengths)[1:] - 1] = True
    return np.concatenate([prompt, *steps]), is_trained, Segments(lengths, labels, is_stepwise=True)


def cut_steps(
    input_ids: np.ndarray, is_trained: np.ndarray, completions: Segments, *, max_tokens: int
) -> tuple[np.ndarray, np.ndarray, Segments]:
    """Return the prompt and the first steps that fit into max_tokens as a whole.

    Raises:
        RowRejectedError: No step fits.
    """
    end_M = np.cumsum(completions.segment_lengths)
    num_kept = int((end_M <= max_tokens).sum())
    if num_kept < 2:
        raise RowRejectedError(
            ALL_MASKED_TRUNCATED, f"the first step ends at token {end_M[1]}, max_tokens={max_tokens}"
        )
    end = int(end_M[num_kept - 1])
    kept = completions._replace(
        segment_lengths=completions.segment_lengths[:num_kept], scores=completions.scores[: num_kept - 1]
    )
    return input_ids[:end], is_trained[:end], kept


def _read_label(value: object, *, column: str) -> float:
    if not isinstance(value, _NUMBERS):
        raise RowRejectedError(
            WRONG_TYPE, f"{column} must be true, false or a number from 0 to 1, got {value!r} ({type(value).__name__})"
        )
    label = float(value)
    if not 0 <= label <= 1:
        raise RowRejectedError(NOT_A_SHARE, f"{column} is {label:g}")
    return label
