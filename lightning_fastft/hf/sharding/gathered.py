"""Units of frozen weights that stay gathered, so that FSDP2 communicates nothing for them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lightning_fastft.activations.frozen_weights import GatheredWeights
from lightning_fastft.core.patcher import ModelPatcher
from lightning_fastft.hf.sharding.stand_ins import gathered_bytes


def gathered_weights(model: nn.Module, layers: Sequence[nn.Module], patcher: ModelPatcher) -> GatheredWeights | None:
    """Return the frozen units of a sharded model that can stay gathered; None if there are none.

    The unit of the model itself, with embedding and head, comes first: no compute overlaps with its gather at the start
    of a step. Units with trained weights are skipped, because their shards change in each step. Undoing the patcher
    shards every unit again.

    Cost:
        A unit that stays gathered takes its whole size in addition to its shard. It is gathered once, and again after a
        checkpoint. Until then every forward and every backward gathers it.
    """
    units = [module for module in (model, *layers) if isinstance(module, FSDPModule)]
    frozen = [unit for unit in units if _frozen_bytes(unit, inner=units)]
    if not frozen:
        return None
    patcher.add_undo(partial(_release, frozen, root=model))
    return GatheredWeights(
        lambda: tuple(_frozen_bytes(unit, inner=units) for unit in frozen),
        keep=partial(_keep, frozen, root=model),
        agree=_agree,
    )


def _frozen_bytes(unit: nn.Module, *, inner: Sequence[nn.Module]) -> int:
    """Return the size of the sharded weights of a unit as they are gathered, without units inside it; 0 if one of them
    is trained.
    """
    foreign = {
        id(parameter)
        for other in inner
        if other is not unit and any(other is module for module in unit.modules())
        for parameter in other.parameters()
    }
    own = [each for each in unit.parameters() if id(each) not in foreign and isinstance(each, DTensor)]
    if any(parameter.requires_grad for parameter in own):
        return 0
    return sum(map(gathered_bytes, own))


def _keep(units: Sequence[FSDPModule], num_kept: int, *, root: nn.Module) -> None:
    """Keep the first units gathered, and shard the others after each use, as FSDP2 does from the start."""
    for number, unit in enumerate(units):
        is_kept = number < num_kept
        # FSDP2 never shards its root between forward and backward.
        unit.set_reshard_after_forward(not is_kept and unit is not root, recurse=False)
        unit.set_reshard_after_backward(not is_kept, recurse=False)


def _release(units: Sequence[FSDPModule], *, root: nn.Module) -> None:
    _keep(units, 0, root=root)
    for unit in units:
        unit.reshard()


def _agree(number: int) -> int:
    """Return the minimum over all ranks: a rank that gathers alone would hang."""
    found: list[int | None] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(found, number)
    return min(each for each in found if each is not None)
