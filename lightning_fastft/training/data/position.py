"""The position of a run in its plan, and the plan that a checkpoint's position belongs to."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_fastft.checkpoint.lightning_internals import batch_progress, set_batches_of_epoch, take_back_batches
from lightning_fastft.core.errors import DataError, ResumeError
from lightning_fastft.packing.step_plan import StepPlan

log = logging.getLogger(__name__)

# Goes up when the same arguments give another plan: a position saved under the old rule is refused.
PLAN_VERSION = 1
# Begins the identity of the data in a checkpoint; older versions wrote other ones.
BY_CONTENT = "tokens:"
# Parts of a plan's identity that may change between a checkpoint and its resumption, and the part that follows from
# them.
SIZES, EPOCH_SIZE = ("world_size", "accumulate_grad_batches"), "micro_batches_per_epoch"


def describe_plan(plan: StepPlan, *, content_digest: str, **options: Any) -> dict[str, Any]:
    """Return the settings without which a position has no meaning, under the names that a user sets.

    Args:
        plan: The plan of the training data.
        content_digest: Of the training data. The same rows in another file are the same data.
        **options: Further settings that change the packs.
    """
    return {
        "data": f"{BY_CONTENT}{content_digest}",
        **options,
        "world_size": plan.world_size,
        "accumulate_grad_batches": plan.accumulate,
        "micro_batches_per_epoch": plan.num_micro_batches,
        "plan_version": PLAN_VERSION,
    }


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


def align_position(trainer: Trainer, plan: StepPlan, *, position: int, moves_progress: bool) -> int:
    """Bring a position and Lightning's progress to the same micro-batch, at the start of an accumulation window.

    With moves_progress the position counts and the progress follows, because they were saved with other sizes.

    Returns:
        The position.

    Raises:
        ResumeError: The two are of different runs.
    """
    in_epoch = position % plan.num_micro_batches
    if moves_progress:
        set_batches_of_epoch(trainer, in_epoch)
    num_behind = batch_progress(trainer).current.ready % plan.num_micro_batches
    if num_behind == 0 and in_epoch:
        # The last epoch was cut short (a second fit, or on_train_batch_start returned -1): an epoch of the trainer is
        # an epoch of the plan.
        return position + plan.num_micro_batches - in_epoch
    if num_behind != in_epoch:
        raise ResumeError(
            f"The plan is at micro-batch {in_epoch} of its epoch and the trainer at {num_behind}: the checkpoint is of "
            "another run."
        )
    if num_replayed := in_epoch % plan.accumulate:
        # No checkpoint keeps half-summed gradients: the window is trained again from its start.
        log.warning(
            "The checkpoint is inside an accumulation window; its %d micro-batches are trained again.", num_replayed
        )
        take_back_batches(trainer, num_replayed)
    return position - num_replayed
