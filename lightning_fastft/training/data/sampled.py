"""Completions of a sampler: checked before they reach the device, and judged by rewards."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from lightning_fastft.core.errors import DataError
from lightning_fastft.training.data.rollouts import PROMPT
from lightning_fastft.training.samplers import Sampled

# Keywords of reward functions beside the columns of the rows.
PROMPTS, COMPLETIONS, COMPLETION_IDS = "prompts", "completions", "completion_ids"


def check_columns(columns: Sequence[str]) -> None:
    """Refuse columns that have the name of another keyword of reward functions.

    Raises:
        DataError: One has.
    """
    taken = [name for name in (PROMPTS, COMPLETIONS, COMPLETION_IDS) if name in columns]
    if taken:
        raise DataError(
            f"The rows have the column {taken[0]!r}. Reward functions get the columns of the rows by name, and "
            f"{taken[0]} is what was sampled for them: rename the column."
        )


def check_groups(
    groups: Sequence[Sequence[Sampled]], *, num_prompts: int, num_completions: int, max_new_tokens: int, vocab_size: int
) -> None:
    """Refuse what a sampler must not return, before it reaches the device.

    Raises:
        DataError: Completions are missing or left over, or one is too long or has an impossible token.
    """
    counts = [len(group) for group in groups]
    if counts != [num_completions] * num_prompts:
        raise DataError(
            f"The sampler returned {counts} completions for {num_prompts} prompts; it must return "
            f"num_completions={num_completions} for each."
        )
    for ids in (sampled.input_ids for group in groups for sampled in group):
        if len(ids) > max_new_tokens:
            raise DataError(
                f"The sampler returned a completion of {len(ids)} tokens, and max_new_tokens is {max_new_tokens}."
            )
        if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
            raise DataError(
                f"The sampler returned token ids from {min(ids)} to {max(ids)}, and the embedding has "
                f"{vocab_size} rows."
            )


def judge(
    rows: Sequence[Mapping[str, Any]],
    groups: Sequence[Sequence[Sampled]],
    *,
    rewards: Sequence[Callable[..., Any]],
    columns: Sequence[str],
    tokenizer: Any,
) -> list[list[float]]:
    """Return the summed rewards of each group's completions; 0 without reward functions. Rows without one of the
    columns have None in it. A function that takes ``completion_ids`` also gets the token ids of each completion.

    Raises:
        DataError: A reward function returned another count, or values that are not finite numbers.
    """
    if not rewards:
        return [[0.0] * len(group) for group in groups]
    texts = [tokenizer.decode(sampled.input_ids, skip_special_tokens=True) for group in groups for sampled in group]
    repeated = [row for row, group in zip(rows, groups) for _ in group]
    lists = {name: [row.get(name) for row in repeated] for name in columns}
    ids = [list(sampled.input_ids) for group in groups for sampled in group]
    total = np.zeros(len(texts))
    for reward in rewards:
        more = {COMPLETION_IDS: ids} if _takes(reward, COMPLETION_IDS) else {}
        found = reward(prompts=[row[PROMPT] for row in repeated], completions=texts, **more, **lists)
        name = getattr(reward, "__name__", type(reward).__name__)
        try:
            values = _to_numbers(found)
        except (TypeError, ValueError) as error:
            raise DataError(
                f"The reward {name} must return a list of numbers, one for each completion. What it returned cannot "
                f"be read as numbers: {error}"
            ) from error
        if values.shape != total.shape:
            raise DataError(
                f"The reward {name} returned an array of shape {values.shape} for {len(texts)} completions; it must "
                "return one finite number for each."
            )
        wrong = np.flatnonzero(~np.isfinite(values))
        if len(wrong):
            raise DataError(
                f"The reward {name} returned {values[wrong[0]]} for the completion {texts[wrong[0]]!r:.200}; it must "
                "return one finite number for each."
            )
        total += values
    ends = np.cumsum([len(group) for group in groups])
    return [part.tolist() for part in np.split(total, ends[:-1])]


def _takes(function: Callable[..., Any], keyword: str) -> bool:
    """Return whether a function takes a keyword; False where Python does not know its signature."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False
    return keyword in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values())


def _to_numbers(found: Any) -> np.ndarray:
    """Return what a reward function returned as float64: also tensors of any device and dtype, as of a reward model."""
    if isinstance(found, torch.Tensor):
        return found.detach().to("cpu", torch.float64).numpy()
    if isinstance(found, (list, tuple)):
        lists = [value.reshape(-1).tolist() if isinstance(value, torch.Tensor) else [value] for value in found]
        found = [values[0] if len(values) == 1 else values for values in lists]
    return np.asarray(found, dtype=np.float64)
