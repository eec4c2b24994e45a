"""Other tensors that FSDP2 gathers in place of frozen weights, such as their e4m3 values.

FSDP2 asks the local tensor of a weight for what it gathers (``fsdp_pre_all_gather``, ``fsdp_post_all_gather``), but
only when a unit is used for the first time. A unit that was used before must forget its buffers. Only this file uses
FSDP2's own records of a unit; it is written for torch 2.11 to 2.15.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from lightning_fastft.core.errors import UnsupportedModelError
from lightning_fastft.core.patcher import ModelPatcher
from lightning_fastft.core.shards import local_values

_PRE, _POST = "fsdp_pre_all_gather", "fsdp_post_all_gather"


def num_local_bytes(module: nn.Module) -> int:
    """Return the size of this rank's shard of the weight of a module."""
    weight = module._parameters["weight"]
    return 0 if weight is None else local_values(weight).nbytes


def gather_instead(
    unit: FSDPModule, values: Mapping[nn.Module, torch.Tensor], patcher: ModelPatcher, *, parks_weights: bool
) -> None:
    """Let FSDP2 gather these values in place of the frozen weights of some modules of a unit.

    While a unit is gathered, ``module.weight`` is the whole of the values, in their dtype. While it is sharded,
    ``module.weight`` is the sharded weight, also for state dicts. Undoing the patcher restores it on its device.

    Args:
        unit: FSDP module whose unit the weights belong to.
        values: For each module the values of this rank, shape (rows of a full shard, columns), in a dtype of one byte.
        patcher: Undoes it, without communication.
        parks_weights: Move the shards of the weights to host memory until then.

    Cost:
        With parks_weights one copy of each shard to pageable host memory, and one back.
    """
    unit.reshard()
    # By parameter: a module may have been swapped for one that shares its parameters.
    found = {id(record.sharded_param): record for group in _groups_of(unit) for record in group.fsdp_params}
    records = [found[id(module._parameters["weight"])] for module in values]
    patcher.add_undo(partial(_renew, records))
    for module in values if parks_weights else ():
        _park(module, patcher)
    for record, values_OI in zip(records, values.values()):
        # It may replace the local tensor by a padded one.
        record.reset_sharded_param()
        rows_OI = local_values(record.sharded_param)
        stand_in = _StandIn(record.sharded_param, values_OI)
        patcher.set_attribute(rows_OI, _PRE, stand_in.before_gather)
        patcher.set_attribute(rows_OI, _POST, stand_in.after_gather)
    _renew(records)
    patcher.add_undo(partial(_reshard, unit))


def gathered_bytes(unit: FSDPModule) -> int:
    """Return the size of the weights of a unit as FSDP2 gathers them."""
    return sum(
        _gathered_bytes(record.sharded_param, record.mp_policy.param_dtype)
        for group in _groups_of(unit)
        for record in group.fsdp_params
    )


def is_trained(unit: FSDPModule) -> bool:
    """Return whether a weight of a unit is trained."""
    return any(record.sharded_param.requires_grad for group in _groups_of(unit) for record in group.fsdp_params)


def find_uncast(unit: FSDPModule) -> list[nn.Parameter]:
    """Return the weights of a unit that FSDP2 gathers in their own dtype."""
    return [
        record.sharded_param
        for group in _groups_of(unit)
        for record in group.fsdp_params
        if record.mp_policy.param_dtype is None
    ]


def _groups_of(unit: FSDPModule) -> list[Any]:
    """Return the groups of weights of a unit: none if all are in units inside it; older torch has one at most."""
    state: Any = unit._get_fsdp_state()  # type: ignore[attr-defined]
    groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
    return [group for group in groups if group is not None]


def _gathered_bytes(weight: torch.Tensor, compute_dtype: torch.dtype | None) -> int:
    stand_in = getattr(getattr(local_values(weight), _PRE, None), "__self__", None)
    dtype = stand_in.values_OI.dtype if isinstance(stand_in, _StandIn) else compute_dtype or weight.dtype
    return weight.numel() * dtype.itemsize


class _StandIn:
    """What FSDP2 gathers for one weight."""

    def __init__(self, weight: torch.Tensor, values_OI: torch.Tensor) -> None:
        self.values_OI = values_OI
        # Operators on a DTensor raise its own version, those on its shard the other one.
        self._watched = (weight, local_values(weight))
        self._versions = [each._version for each in self._watched]

    def before_gather(self, mesh: Any, size: Any, stride: Any, module: Any, policy: Any) -> tuple[Any, None]:
        if [each._version for each in self._watched] != self._versions:
            raise UnsupportedModelError(
                "Frozen weights were written during the run, and FSDP2 gathers their earlier values in fp8. Load "
                "weights before the run, or set FusedKernels(base_compute='model_dtype')."
            )
        # Bytes, because some backends do not send e4m3.
        return (self.values_OI.view(torch.uint8),), None

    def after_gather(self, gathered: Any, metadata: Any, dtype: Any, *, out: torch.Tensor | None = None) -> Any:
        # FSDP2 gathers into the same memory each time, and frees it.
        return (gathered[0].view(self.values_OI.dtype), ()) if out is None else None


def _park(module: nn.Module, patcher: ModelPatcher) -> None:
    """Replace the sharded weight of a module by one whose shard is in host memory, and free the shard."""
    weight = module._parameters["weight"]
    assert weight is not None
    with torch.no_grad():
        parked = nn.Parameter(weight.detach().to("cpu", copy=True), requires_grad=False)
    storage = local_values(weight).untyped_storage()
    num_bytes = storage.nbytes()

    def restore() -> None:
        storage.resize_(num_bytes)
        with torch.no_grad():
            local_values(weight).copy_(local_values(parked))
        module._parameters["weight"] = weight

    patcher.add_undo(restore)
    module._parameters["weight"] = parked
    storage.resize_(0)


def _renew(records: list[Any]) -> None:
    """Make FSDP2 read the present weights of a sharded unit, and allocate its buffers again."""
    for record in records:
        record.reset_sharded_param()
        record.all_gather_outputs = []
        vars(record).pop("_unsharded_param", None)
        record._init_extensions()


def _reshard(unit: FSDPModule) -> None:
    """Shard a unit, also one that stays gathered or whose forward failed."""
    unit.set_reshard_after_forward(True, recurse=False)
    unit.reshard()
