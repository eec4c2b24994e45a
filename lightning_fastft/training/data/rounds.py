"""Rounds of rollouts: which prompts are sampled, and how their rollouts are packed on all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from lightning_fastft.checkpoint.ranks import on_all_ranks
from lightning_fastft.core.errors import FastFTError
from lightning_fastft.packing.collate import PackedBatch, collate
from lightning_fastft.packing.completions import Completions
from lightning_fastft.packing.document import Document, split_document
from lightning_fastft.packing.packs import pack_best_fit_decreasing, split_to_multiple
from lightning_fastft.packing.step_plan import mix_bits
from lightning_fastft.packing.stream import EMPTY_PACK_TOKENS


def draw_sampled(number: int, *, share: float, prompts_per_round: int, seed: int) -> list[bool]:
    """Return for each prompt of a round whether its completions are sampled; the same for any number of ranks."""
    place_N = np.arange(prompts_per_round, dtype=np.uint64) + np.uint64(number * prompts_per_round)
    # The highest 53 bits, a fraction below 1 that a double holds exactly.
    draw_N = (mix_bits(place_N, seed=seed, stream=-1) >> np.uint64(11)) * 2.0**-53
    drawn: list[bool] = (draw_N < share).tolist()
    return drawn


def choose_prompts(number: int, *, num_prompts: int, prompts_per_round: int, seed: int) -> list[int]:
    """Return the prompts of a round: each epoch over the prompts has its own order."""
    begin = number * prompts_per_round
    chosen: list[int] = []
    orders: dict[int, np.ndarray] = {}
    for place in range(begin, begin + prompts_per_round):
        epoch, within = divmod(place, num_prompts)
        if epoch not in orders:
            key_N = mix_bits(np.arange(num_prompts, dtype=np.uint64), seed=seed, stream=2 + epoch)
            orders[epoch] = np.argsort(key_N, kind="stable")
        chosen.append(int(orders[epoch][within]))
    return chosen


def pack_round(
    documents: Sequence[Document],
    weight_N: np.ndarray,
    *,
    max_tokens: int,
    pad_to_max: bool,
    shares_prompts: bool,
    accumulate: int,
    seed: int,
    device: torch.device,
) -> list[PackedBatch]:
    """Return the packs of a round on the device: as many on every rank, in whole accumulation windows."""
    lengths = [split_document(document, shares_prompt=shares_prompts) for document in documents]
    length_N = np.array([sum(len(part.input_ids) for part in parts) for parts in lengths], dtype=np.int64)
    packs = pack_best_fit_decreasing(length_N, max_tokens=max_tokens)
    num_packs = -(-int(_gather(len(packs)).max()) // accumulate) * accumulate
    packs = split_to_multiple(packs, length_N, multiple=num_packs)
    # Best fit puts the longest rollouts first; every window is to have its share of them.
    order = np.argsort(mix_bits(np.arange(num_packs, dtype=np.uint64), seed=seed, stream=0), kind="stable")
    weights = np.array([packs.sum_per_pack(weight_N)[number] for number in order])
    window_RW = _gather(weights.reshape(-1, accumulate).sum(axis=1))
    world_size, total_W = len(window_RW), window_RW.sum(axis=0)
    batches = []
    for place, number in enumerate(order):
        chosen = [documents[index] for index in packs[int(number)]]
        total = float(total_W[place // accumulate])
        batch = collate(
            chosen,
            pad_to=max_tokens if pad_to_max else None if chosen else EMPTY_PACK_TOKENS,
            num_items=total / (accumulate * world_size) if total else 1.0,
            shares_prompts=shares_prompts,
        )
        if not chosen:
            batch.context.completions = Completions.none()
        batches.append(batch.to(device))
    return batches


def _gather(value: Any) -> np.ndarray:
    """Return the values of all ranks, stacked."""
    return np.stack(on_all_ranks(lambda: np.asarray(value), error=FastFTError))
