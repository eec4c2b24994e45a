"""Whether a checkpoint's position belongs to the plan of this run, and whether all ranks have one plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_fastft.core.errors import DataError

# Begins the identity of the data in a checkpoint; older versions wrote other ones.
BY_CONTENT = "tokens:"
# Parts of a plan's identity that may change between a checkpoint and its resumption, and the part that follows from
# them.
SIZES, EPOCH_SIZE = ("world_size", "accumulate_grad_batches"), "micro_batches_per_epoch"


def compare_plans(saved: Mapping[str, Any], current: Mapping[str, Any]) -> tuple[str, bool]:
    """Describe the differences of two plan descriptions; return also whether only sizes differ.

    Warn where data cannot be compared.
    """
    if "data" in saved and not str(saved["data"]).startswith(BY_CONTENT):
        rank_zero_warn(
            "The checkpoint names its data by path and time, as older versions did. It cannot be checked that the data "
            "is the same."
        )
        saved = {**saved, "data": current["data"]}
    changed = [name for name, value in current.items() if saved.get(name) != value]
    lines = [f"{name} was {saved.get(name)!r} and is {current[name]!r}" for name in changed]
    return "; ".join(lines), bool(set(changed) & {*SIZES}) and set(changed) <= {*SIZES, EPOCH_SIZE}


def check_ranks_agree(description: Mapping[str, Any]) -> None:
    """Stop all ranks before the first step if one of them read other data: uneven ranks hang until a timeout.

    Raises:
        DataError: Plans differ.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return
    world_size = torch.distributed.get_world_size()
    if world_size == 1:
        return
    descriptions: list[Any] = [None] * world_size
    torch.distributed.all_gather_object(descriptions, description)
    for rank, other in enumerate(descriptions):
        if other != descriptions[0]:
            raise DataError(f"Rank 0 plans {descriptions[0]}, rank {rank} plans {other}. Give all ranks the same data.")
