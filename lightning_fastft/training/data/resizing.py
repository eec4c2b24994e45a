"""Resume inside an epoch that another number of ranks or another accumulation began.

Axes: N documents of the training data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from lightning_fastft.core.errors import ResumeError
from lightning_fastft.packing.packs import Packs, pack_best_fit_decreasing
from lightning_fastft.packing.step_plan import StepPlan
from lightning_fastft.training.data.position import EPOCH_SIZE, SIZES


class Resized(NamedTuple):
    """What a run trained of an epoch before another run with other sizes resumed its checkpoint."""

    epoch: int
    world_size: int
    accumulate: int
    micro_batches: int


def plan_rest(
    resized: Sequence[Resized],
    *,
    sizes: tuple[int, int],
    make_plan: Callable[..., StepPlan],
    length_N: np.ndarray,
    max_tokens: int,
) -> StepPlan:
    """Return the plan of the documents that earlier runs with other sizes left of an epoch.

    Args:
        resized: The earlier runs, in their order.
        sizes: World size and accumulation of the plan.
        make_plan: Plans packs (all by default) for sizes (those of this run by default).
        length_N: Tokens of each document.
        max_tokens: Length of a pack.
    """
    packs, is_left_N = None, np.ones(len(length_N), dtype=bool)
    for entry in resized:
        plan = make_plan(sizes=(entry.world_size, entry.accumulate), packs=packs)
        is_left_N[plan.epoch(entry.epoch).trained(num_micro_batches=entry.micro_batches)] = False
        (number_N,) = np.nonzero(is_left_N)
        chosen = pack_best_fit_decreasing(length_N[number_N], max_tokens=max_tokens)
        packs = Packs(document_N=number_N[chosen.document_N], start_P1=chosen.start_P1, max_tokens=max_tokens)
    return make_plan(sizes=sizes, packs=packs)


def read_resized(state_dict: Mapping[str, Any]) -> list[Resized]:
    """Return the earlier runs of the epoch that a checkpoint is in."""
    return [Resized(**entry) for entry in state_dict.get("resized", ())]


def resize(
    state_dict: Mapping[str, Any], *, make_plan: Callable[..., StepPlan], length_N: np.ndarray, max_tokens: int
) -> tuple[int, list[Resized]]:
    """Return the epoch of a checkpoint of other sizes, and what was trained of it; empty at its start.

    Raises:
        ResumeError: The saved plan was cut by limit_train_batches, so that the rest would train examples that it left
            out.
    """
    saved = state_dict["plan"]
    sizes = (int(saved[SIZES[0]]), int(saved[SIZES[1]]))
    before = make_plan(sizes=sizes)
    if before.num_micro_batches != saved[EPOCH_SIZE] or before.num_micro_batches < before.num_uncut_micro_batches:
        raise ResumeError(
            f"The checkpoint belongs to a run with {SIZES[0]}={sizes[0]} and {SIZES[1]}={sizes[1]}, whose epochs were "
            "cut by limit_train_batches. Resume with its sizes."
        )
    epoch, in_epoch = divmod(int(state_dict["micro_batches"]), before.num_micro_batches)
    resized = read_resized(state_dict)
    if resized:
        rest = plan_rest(resized, sizes=sizes, make_plan=make_plan, length_N=length_N, max_tokens=max_tokens)
        in_epoch -= before.num_micro_batches - rest.num_micro_batches
    # No checkpoint keeps half-summed gradients.
    in_epoch -= in_epoch % sizes[1]
    return epoch, [*resized, Resized(epoch, *sizes, in_epoch)] if in_epoch or resized else []
