"""Completions of several turns: the model calls tools, reads their results and goes on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from lightning_fastft.packing.step_plan import mix_bits
from lightning_fastft.training.data.sampled import check_groups
from lightning_fastft.training.data.tools import Tools
from lightning_fastft.training.samplers import Sampled


class _Completion:
    """A completion while turns are added to it, with its turns and the results of tools as messages."""

    def __init__(self, prompt: Sequence[int], row: Mapping[str, Any]) -> None:
        self.prompt, self.row = list(prompt), row
        self.input_ids: list[int] = []
        self.log_probs: list[float] | None = []
        self.is_trained: list[bool] = []
        self.messages: list[dict[str, Any]] = []

    def add_turn(self, turn: Sampled, *, tools: Tools, max_new_tokens: int) -> None:
        """Add what the model wrote, up to the length of a completion."""
        room = max_new_tokens - len(self.input_ids)
        ids = list(turn.input_ids[:room])
        self.messages.append(tools.read(ids, prompt=self.prompt + self.input_ids, row=self.row))
        self.input_ids += ids
        self.is_trained += [True] * len(ids) if turn.is_trained is None else turn.is_trained[:room]
        known = self.log_probs is not None and turn.log_probs is not None
        self.log_probs = [*(self.log_probs or ()), *(turn.log_probs or ())[:room]] if known else None

    def add_results(self, *, tools: Tools, max_new_tokens: int) -> bool:
        """Call the tools of the last turn and add their results; return whether there were any, and room for more.

        Results that leave no room for a turn are not added: the completion ends with its calls.
        """
        if not tools.ends_turn(self.input_ids) or not self.messages[-1].get("tool_calls"):
            return False
        results = tools.answer(self.messages[-1])
        ids = tools.encode(results, row=self.row)
        if len(self.input_ids) + len(ids) >= max_new_tokens:
            return False
        self.messages += results
        self.input_ids += ids
        self.is_trained += [False] * len(ids)
        self.log_probs = None if self.log_probs is None else self.log_probs + [0.0] * len(ids)
        return True


def sample_turns(
    sampler: Callable[..., Any],
    tuner: Any,
    prompts: Sequence[Sequence[int]],
    rows: Sequence[Mapping[str, Any]],
    *,
    tools: Tools | None,
    max_tool_turns: int | None,
    num_completions: int,
    max_new_tokens: int,
    seed: int,
    **options: Any,
) -> tuple[list[list[Sampled]], list[list[list[dict[str, Any]]]] | None]:
    """Return checked completions of prompts, and with tools their messages.

    Args:
        sampler: As in ``RolloutDataModule``.
        tuner: For the sampler.
        prompts: Token ids.
        rows: Of the prompts.
        tools: Without any, completions have one turn.
        max_tool_turns: Most turns of a completion whose calls are answered.
        num_completions: For each prompt.
        max_new_tokens: Most tokens of a completion, with the results of tools.
        seed: Of the first turn; later ones draw from others.
        options: Of the sampler.

    Raises:
        DataError: The sampler returned what it must not.
    """

    def sample(prompts: Sequence[Sequence[int]], **sizes: int) -> list[list[Sampled]]:
        return _sample_checked(sampler, tuner, prompts, **sizes, **options)

    groups = sample(prompts, num_completions=num_completions, max_new_tokens=max_new_tokens, seed=seed)
    if tools is None:
        return groups, None
    written = []
    for prompt, row, group in zip(prompts, rows, groups):
        for first in group:
            completion = _Completion(prompt, row)
            completion.add_turn(first, tools=tools, max_new_tokens=max_new_tokens)
            written.append(completion)
    active, num_turns = written, 0
    while max_tool_turns is None or num_turns < max_tool_turns:
        active = [each for each in active if each.add_results(tools=tools, max_new_tokens=max_new_tokens)]
        if not active:
            break
        num_turns += 1
        turns = sample(
            [each.prompt + each.input_ids for each in active],
            num_completions=1,
            max_new_tokens=max(max_new_tokens - len(each.input_ids) for each in active),
            seed=int(mix_bits(np.array([num_turns], dtype=np.uint64), seed=seed, stream=0)[0] >> np.uint64(1)),
        )
        for completion, (turn,) in zip(active, turns):
            completion.add_turn(turn, tools=tools, max_new_tokens=max_new_tokens)
    sampled = iter(written)
    grouped = [[next(sampled) for _ in group] for group in groups]
    return (
        [[Sampled(each.input_ids, each.log_probs, each.is_trained) for each in group] for group in grouped],
        [[each.messages for each in group] for group in grouped],
    )


def _sample_checked(
    sampler: Callable[..., Any],
    tuner: Any,
    prompts: Sequence[Sequence[int]],
    *,
    num_completions: int,
    max_new_tokens: int,
    **options: Any,
) -> list[list[Sampled]]:
    """Return what a sampler wrote, checked."""
    groups: list[list[Sampled]] = sampler(
        tuner, prompts, num_completions=num_completions, max_new_tokens=max_new_tokens, **options
    )
    check_groups(
        groups, num_prompts=len(prompts), num_completions=num_completions, max_new_tokens=max_new_tokens,
        vocab_size=tuner.vocab_size,
    )  # fmt: skip
    return groups
