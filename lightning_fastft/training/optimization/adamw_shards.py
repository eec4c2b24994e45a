"""FusedAdamW on sharded parameters (DTensor): norms over the ranks of a tensor, and 8-bit moments in whole blocks.

A step writes the shards of its rank. Only the norm of all gradients needs other ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from lightning_fastft.core.errors import ShapeError
from lightning_fastft.kernels.adamw_step.codes import BLOCK, num_blocks

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# The groups of ranks over which a tensor is sharded, one per axis of its mesh; groups of copies are not included.
Groups = tuple["ProcessGroup", ...]


def is_sharded(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a DTensor."""
    return hasattr(tensor, "placements")


def shard_groups(param: torch.Tensor) -> Groups:
    """Return the groups of ranks whose shards make up a parameter; none for a whole one."""
    if not is_sharded(param):
        return ()
    mesh = param.device_mesh  # type: ignore[attr-defined]
    return tuple(
        mesh.get_group(axis)
        for axis, placement in enumerate(param.placements)  # type: ignore[attr-defined]
        if placement.is_shard() and mesh.size(axis) > 1
    )


def join_norms(norms: Mapping[Groups, Sequence[torch.Tensor]], *, device: torch.device | None) -> torch.Tensor:
    """Return the L2 norm of all gradients from the norms of this rank's shards.

    Args:
        norms: Norms by the groups that share the gradients, shape (), fp32; the same keys in the same order on all
            ranks, also if a rank has no norm.
        device: Device of the result; norms may be empty.

    Cost:
        One all-reduce of one float64 number per group; no host sync.
    """
    if not any(norms):
        whole = [norm for held in norms.values() for norm in held]
        if not whole:
            return torch.zeros((), device=device)
        return whole[0] if len(whole) == 1 else torch.linalg.vector_norm(torch.stack(whole))
    totals = []
    for groups, held in norms.items():
        # In float64 squares of fp32 numbers cannot overflow, and the order of ranks does not change the fp32 result.
        squares = [norm.double().square() for norm in held]
        total = torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64, device=device)
        for group in groups:
            torch.distributed.all_reduce(total, group=group)
        totals.append(total)
    return torch.stack(totals).sum().sqrt().float()


def has_whole_blocks(param: torch.Tensor) -> bool:
    """Return whether any number of ranks can shard the 8-bit moments of a parameter: it is whole, or sharded by rows of
    whole blocks.
    """
    if not is_sharded(param):
        return True
    from torch.distributed.tensor import Shard

    placements = param.placements  # type: ignore[attr-defined]
    # Subclasses of Shard order rows differently.
    is_by_rows = all(each.is_replicate() or (type(each) is Shard and each.dim == 0) for each in placements)
    return is_by_rows and _row_size(param) % BLOCK == 0


def first_element(param: torch.Tensor) -> int:
    """Return the index in the whole parameter of the first element on this rank; 0 for a whole parameter.

    Raises:
        ShapeError: Shards are not blocks of whole rows.
    """
    if not is_sharded(param):
        return 0
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    placements = param.placements  # type: ignore[attr-defined]
    if not all(each.is_replicate() or (type(each) is Shard and each.dim == 0) for each in placements):
        raise ShapeError(f"Stochastic rounding needs parameters sharded by rows, got {placements}.")
    shape, offsets = compute_local_shape_and_global_offset(
        param.shape,
        param.device_mesh,  # type: ignore[attr-defined]
        placements,
    )
    return offsets[0] * _row_size(param) if math.prod(shape) else 0


def block_shape(param: torch.Tensor) -> tuple[int, ...]:
    """Return the shape of the largest magnitudes of a parameter's blocks: by rows if rows are whole blocks, so that
    magnitudes are sharded like their moments.

    Example:
        >>> block_shape(torch.ones(8, 512)), block_shape(torch.ones(8, 48))
        ((8, 2), (2,))
    """
    row_size = _row_size(param)
    if row_size and row_size % BLOCK == 0:
        return param.shape[0], row_size // BLOCK
    return (num_blocks(param.numel()),)


def zeros_beside(param: torch.Tensor, shape: Iterable[int], *, dtype: torch.dtype) -> torch.Tensor:
    """Return zeros on the device of a parameter, sharded as the parameter is."""
    shape = tuple(shape)
    if not is_sharded(param):
        return torch.zeros(shape, dtype=dtype, device=param.device)
    if shape == param.shape:
        return torch.zeros_like(param, dtype=dtype, memory_format=torch.contiguous_format)
    from torch.distributed.tensor import zeros

    return zeros(
        shape,
        dtype=dtype,
        device_mesh=param.device_mesh,  # type: ignore[attr-defined]
        placements=param.placements,  # type: ignore[attr-defined]
    )


def _row_size(param: torch.Tensor) -> int:
    return math.prod(param.shape[1:])
