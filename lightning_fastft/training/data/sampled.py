"""Completions of a sampler: checked before they reach the device, judged by rewards, and made rollouts.

Axes: C completions of all groups.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from lightning_fastft.core.checks import check_float
from lightning_fastft.core.errors import DataError, OptionError
from lightning_fastft.packing.document import Document
from lightning_fastft.training.data.rollouts import PROMPT, make_rollout
from lightning_fastft.training.samplers import Sampled, takes_keyword

# Keywords of reward functions beside the columns of the rows.
PROMPTS, COMPLETIONS, COMPLETION_IDS, MESSAGES = "prompts", "completions", "completion_ids", "completion_messages"


def check_columns(columns: Sequence[str]) -> None:
    """Refuse columns that have the name of another keyword of reward functions.

    Raises:
        DataError: One has.
    """
    taken = [name for name in (PROMPTS, COMPLETIONS, COMPLETION_IDS, MESSAGES) if name in columns]
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


def check_reward_weights(weights: Sequence[float] | None, *, num_rewards: int) -> list[float]:
    """Return one weight for each reward function, 1 where none are given.

    Raises:
        OptionError: There are more or fewer, or one is not a finite number.
    """
    if weights is None:
        return [1.0] * num_rewards
    if not isinstance(weights, (list, tuple)) or len(weights) != num_rewards:
        raise OptionError(
            f"reward_weights must be a list with one number for each of the {num_rewards} reward functions, got "
            f"{weights!r}."
        )
    return [float(check_float("reward_weights", weight, low=-1e6, high=1e6)) for weight in weights]


def judge(
    rows: Sequence[Mapping[str, Any]],
    groups: Sequence[Sequence[Sampled]],
    *,
    rewards: Sequence[Callable[..., Any]],
    weights: Sequence[float] | None = None,
    columns: Sequence[str],
    tokenizer: Any,
    messages: Sequence[Sequence[list[dict[str, Any]]]] | None = None,
) -> list[list[float | None]]:
    """Return the weighted sum of the rewards of each group's completions; 0 without reward functions.

    A function that returns None for a completion does not count for it; a completion for which all do has None. Rows
    without one of the columns have None in it. A function that takes ``completion_ids`` also gets the token ids of each
    completion, and one that takes ``completion_messages`` its turns, if there are tools.

    Raises:
        DataError: A reward function returned another count, or values that are neither finite numbers nor None.
    """
    if not rewards:
        return [[0.0] * len(group) for group in groups]
    texts = [tokenizer.decode(sampled.input_ids, skip_special_tokens=True) for group in groups for sampled in group]
    repeated = [row for row, group in zip(rows, groups) for _ in group]
    lists = {name: [row.get(name) for row in repeated] for name in columns}
    ids = [list(sampled.input_ids) for group in groups for sampled in group]
    offered: dict[str, list[Any]] = {COMPLETION_IDS: ids}
    if messages is not None:
        offered[MESSAGES] = [turns for group in messages for turns in group]
    total_C, is_judged_C = np.zeros(len(texts)), np.zeros(len(texts), dtype=bool)
    for reward, weight in zip(rewards, weights or [1.0] * len(rewards)):
        more = {name: values for name, values in offered.items() if takes_keyword(reward, name)}
        found = reward(prompts=[row[PROMPT] for row in repeated], completions=texts, **more, **lists)
        values_C, applies_C = _read_rewards(found, texts, name=getattr(reward, "__name__", type(reward).__name__))
        total_C += weight * values_C
        is_judged_C |= applies_C
    ends = np.cumsum([len(group) for group in groups])
    summed = [value if is_judged else None for value, is_judged in zip(total_C.tolist(), is_judged_C.tolist())]
    return [summed[end - len(group) : end] for group, end in zip(groups, ends)]


def make_rollouts(
    prompts: Sequence[Sequence[int]],
    groups: Sequence[Sequence[Sampled]],
    rewards: Sequence[Sequence[float | None]],
    *,
    end_ids: Sequence[int] | None = None,
    sampler_clip: float | None,
    sampler: Callable[..., Any],
) -> list[Document | None]:
    """Return each prompt with its completions that have a reward; None for a prompt that has none.

    With end_ids, completions that end with another token are not trained, as in ``make_rollout``.

    Raises:
        OptionError: sampler_clip needs log-probabilities of the sampler, and there are none.
    """
    rollouts: list[Document | None] = []
    for prompt, group, scores in zip(prompts, groups, rewards):
        kept = [(sampled, score) for sampled, score in zip(group, scores) if score is not None]
        if len(kept) < len(group):
            # On any rank; one text, which Python shows once.
            warnings.warn(
                "All reward functions returned None for some completions. These are left out: they are not trained, "
                "and count neither in the mean of their group nor in that of the step.",
                stacklevel=2,
            )
        rollout = make_rollout(prompt, *zip(*kept), end_ids=end_ids) if kept else None
        if rollout is not None and sampler_clip is None:
            # Nothing corrects for the sampler: it is taken for the policy, however many steps a round has.
            rollout = rollout._replace(log_probs=None)
        elif rollout is not None and rollout.log_probs is None:
            name = getattr(sampler, "__name__", type(sampler).__name__)
            raise OptionError(
                f"sampler_clip={sampler_clip} corrects by the log-probabilities that a sampler returns, and {name} "
                "returned none. Leave sampler_clip out, or give a sampler with log-probabilities: VllmSampler, or a "
                "function of yours like sample_with_model."
            )
        rollouts.append(rollout)
    return rollouts


def _read_rewards(found: Any, texts: Sequence[str], *, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the reward of each completion, 0 where the function returned None, and where it returned a number."""
    try:
        values_C, applies_C = _to_numbers(found)
    except (TypeError, ValueError) as error:
        raise DataError(
            f"The reward {name} must return a list of numbers, one for each completion. What it returned cannot "
            f"be read as numbers: {error}"
        ) from error
    if values_C.shape != (len(texts),):
        raise DataError(
            f"The reward {name} returned an array of shape {values_C.shape} for {len(texts)} completions; it must "
            "return one finite number for each."
        )
    wrong = np.flatnonzero(~np.isfinite(values_C))
    if len(wrong):
        raise DataError(
            f"The reward {name} returned {values_C[wrong[0]]} for the completion {texts[wrong[0]]!r:.200}; it must "
            "return one finite number for each, or None where it does not apply."
        )
    return values_C, applies_C


def _to_numbers(found: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return what a reward function returned as float64, 0 for None, and which entries are not None.

    Tensors of any device and dtype are read, as a reward model returns them.
    """
    if isinstance(found, torch.Tensor):
        found = found.detach().to("cpu", torch.float64).numpy()
    if not isinstance(found, (list, tuple)):
        found = np.asarray(found)
        found = found.tolist() if found.ndim and found.dtype == object else found
    if isinstance(found, (list, tuple)):
        lists = [value.reshape(-1).tolist() if isinstance(value, torch.Tensor) else [value] for value in found]
        found = [values[0] if len(values) == 1 else values for values in lists]
        applies = np.array([value is not None for value in found], dtype=bool)
        return np.asarray([0.0 if value is None else value for value in found], dtype=np.float64), applies
    values = found.astype(np.float64)
    return values, np.ones(values.shape, dtype=bool)
