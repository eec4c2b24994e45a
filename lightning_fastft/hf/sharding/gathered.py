"""Sharded units that stay gathered, so that FSDP2 communicates less for them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from lightning_fastft.activations.frozen_weights import GatheredWeights
from lightning_fastft.core.patcher import ModelPatcher
from lightning_fastft.hf.sharding.stand_ins import gathered_bytes, is_trained


def gathered_weights(model: nn.Module, layers: Sequence[nn.Module], patcher: ModelPatcher) -> GatheredWeights | None:
    """Return the units of a sharded model that can stay gathered, frozen ones first; None if there are none.

    Of the frozen units, that of the model itself, with embedding and head, comes first: no compute overlaps with its
    gather at the start of a step. Where it is trained it is excluded, because FSDP2 never shards it between forward and
    backward. Undoing the patcher shards every unit again.

    Cost:
        A unit that stays gathered takes its whole size in addition to its shard. A frozen one is gathered once, and
        again after a checkpoint. A trained one stays gathered from a forward to its backward, because its shards change
        in each step. Other units are gathered in every forward and every backward.
    """
    units = [module for module in (model, *layers) if isinstance(module, FSDPModule) and gathered_bytes(module)]
    frozen = [unit for unit in units if not is_trained(unit)]
    trained = [unit for unit in units if is_trained(unit) and unit is not model]
    if not (frozen or trained):
        return None
    patcher.add_undo(partial(_release, frozen, trained, root=model))
    return GatheredWeights(
        lambda: tuple(map(gathered_bytes, [*frozen, *trained])),
        num_frozen=len(frozen),
        keep=partial(_keep, frozen, trained, root=model),
        agree=_agree,
    )


def _keep(frozen: Sequence[FSDPModule], trained: Sequence[FSDPModule], num_kept: int, *, root: nn.Module) -> None:
    """Keep the first units gathered, and shard the others after each use, as FSDP2 does from the start."""
    for number, unit in enumerate([*frozen, *trained]):
        is_kept = number < num_kept
        # FSDP2 never shards its root between forward and backward.
        unit.set_reshard_after_forward(not is_kept and unit is not root, recurse=False)
        unit.set_reshard_after_backward(not is_kept or number >= len(frozen), recurse=False)


def _release(frozen: Sequence[FSDPModule], trained: Sequence[FSDPModule], *, root: nn.Module) -> None:
    _keep(frozen, trained, 0, root=root)
    for unit in (*frozen, *trained):
        unit.reshard()


def _agree(number: int) -> int:
    """Return the minimum over all ranks: a rank that gathers alone would hang."""
    found: list[int | None] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(found, number)
    return min(each for each in found if each is not None)
