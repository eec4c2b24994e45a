"""One row of the table of an AdamW step: its tensors, and what they must fulfil."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from lightning_fastft.core.checks import check_tensor
from lightning_fastft.core.errors import ShapeError
from lightning_fastft.core.shards import local_values
from lightning_fastft.kernels.adamw_step import codes
from lightning_fastft.kernels.adamw_step.rounding import NUM_HALVES

_PARAM_DTYPES = (torch.float32, torch.bfloat16)
_OWNER_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_COPY_DTYPES = (torch.bfloat16, torch.float16)
_WRITTEN = ("params", "exp_avgs", "exp_avg_sqs", "copies", "exp_avg_absmaxs", "exp_avg_sq_absmaxs")


class TableRow(NamedTuple):
    """One tensor of a table: the master, its two moments, its copy or None, and the tensor whose ``grad`` is its
    gradient.

    8-bit moments have the largest magnitudes of their blocks (``codes``); fp32 moments have None. A row whose moments
    are on the meta device counts for the norm and is not stepped. A row can be a piece of its owner: ``start`` is its
    first element in the gradient, None for a whole one. ``number`` and ``first`` identify its elements for stochastic
    rounding: the number of the tensor, and the place of the first element in the whole tensor.
    """

    param: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    copy: torch.Tensor | None
    owner: torch.Tensor
    exp_avg_absmax: torch.Tensor | None = None
    exp_avg_sq_absmax: torch.Tensor | None = None
    number: int = 0
    first: int = 0
    start: int | None = None

    @property
    def is_stepped(self) -> bool:
        """Return whether a step writes the row."""
        return not self.exp_avg.is_meta

    def places(self) -> tuple[torch.Tensor | None, ...]:
        """Return the tensors that a step writes, in the order of _WRITTEN; None for a missing one."""
        if not self.is_stepped:
            return (self.param,)
        return self.param, self.exp_avg, self.exp_avg_sq, self.copy, self.exp_avg_absmax, self.exp_avg_sq_absmax

    def written(self) -> list[torch.Tensor]:
        """Return the tensors that a step writes."""
        return [tensor for tensor in self.places() if tensor is not None]


def check_rows(rows: Sequence[TableRow]) -> None:
    """Raise on tensors that one step cannot update together."""
    for index, row in enumerate(rows):
        _check_row(index, row)
        if row.param.device != rows[0].param.device:
            raise ShapeError(
                f"params[{index}] is on {row.param.device}, params[0] on {rows[0].param.device}; make one table per "
                "device."
            )
    _check_apart(rows)


def _check_row(index: int, row: TableRow) -> None:
    """Raise on tensors whose elements a flat walk over memory would mismatch."""
    param, exp_avg, exp_avg_sq, copy, owner, *absmaxs = row[:7]
    average_dtypes = (torch.float32,) if absmaxs == [None, None] else (torch.uint8,)
    if not isinstance(param, torch.Tensor):
        raise ShapeError(f"params[{index}] must be a tensor, got {type(param).__name__}.")
    averages = (("exp_avgs", exp_avg, average_dtypes), ("exp_avg_sqs", exp_avg_sq, average_dtypes))
    if row.first % NUM_HALVES:
        raise ShapeError(
            f"firsts[{index}] is {row.first}; random numbers come in groups of {NUM_HALVES}, so a shard or piece must "
            f"start at a multiple of {NUM_HALVES}."
        )
    for kind, tensor, dtypes in (
        ("params", param, _PARAM_DTYPES),
        *(averages if row.is_stepped else ()),
        *(() if copy is None else (("copies", copy, _COPY_DTYPES),)),
    ):
        _check_like(f"{kind}[{index}]", tensor, param, dtypes)
        _check_memory(f"{kind}[{index}]", tensor)
    for kind, absmax_B in zip(_WRITTEN[4:], absmaxs) if torch.uint8 in average_dtypes else ():
        _check_absmax(f"{kind}[{index}]", absmax_B, param)
    own = local_values(owner)
    if row.start is None:
        _check_like(f"owners[{index}]", own, param, _OWNER_DTYPES)
    elif row.start + param.numel() > own.numel() or own.device != param.device or own.dtype not in _OWNER_DTYPES:
        raise ShapeError(
            f"owners[{index}] is {tuple(own.shape)} on {own.device}; its row needs {param.numel()} elements from "
            f"{row.start} on, on {param.device}."
        )
    if not owner.is_leaf:
        raise ShapeError(
            f"owners[{index}] is not a leaf tensor and gets no gradient; give the parameter whose grad autograd writes."
        )


def _check_like(name: str, tensor: torch.Tensor, param: torch.Tensor, dtypes: Sequence[torch.dtype]) -> None:
    """Raise on a tensor with another shape or device than its master."""
    check_tensor(name, tensor, ndim=param.ndim, dtypes=dtypes)
    if tensor.shape != param.shape or tensor.device != param.device:
        raise ShapeError(
            f"{name} is {tuple(tensor.shape)} on {tensor.device}; its master is {tuple(param.shape)} on "
            f"{param.device}. Both must match."
        )


def _check_absmax(name: str, absmax_B: torch.Tensor | None, param: torch.Tensor) -> None:
    """Raise on anything but one magnitude per block of 8-bit moments."""
    if absmax_B is None:
        raise ShapeError(
            f"{name} is None, but the tensor has the other one; each 8-bit moment needs one number per block."
        )
    if not isinstance(absmax_B, torch.Tensor):
        raise ShapeError(f"{name} must be a tensor, got {type(absmax_B).__name__}.")
    check_tensor(name, absmax_B, ndim=absmax_B.ndim, dtypes=(torch.float32,))
    size = codes.num_blocks(param.numel())
    if absmax_B.numel() != size or absmax_B.device != param.device:
        raise ShapeError(
            f"{name} is {tuple(absmax_B.shape)} on {absmax_B.device}; {param.numel()} values in blocks of "
            f"{codes.BLOCK} have ({size},) on "
            f"{param.device}."
        )
    _check_memory(name, absmax_B)


def check_gradient(index: int, grad: torch.Tensor, row: TableRow) -> torch.Tensor:
    """Return the values of a gradient on this rank; raise unless they are contiguous, with the shape of the owner's.

    A gradient must be sharded as its owner; a sum that is still partial is not.
    """
    owner = row.owner
    placements = [getattr(tensor, "placements", None) for tensor in (grad, owner)]
    if placements[0] != placements[1]:
        raise ShapeError(
            f"The gradient of owners[{index}] has placements {placements[0]}, its tensor {placements[1]}; call "
            "redistribute on the gradient."
        )
    grad, param, device = local_values(grad), local_values(owner), row.param.device
    if grad.numel() != param.numel() or grad.device != device or grad.dtype not in _OWNER_DTYPES:
        raise ShapeError(
            f"The gradient of owners[{index}] is {tuple(grad.shape)}, {grad.dtype} on {grad.device}; "
            f"it must have the shape {tuple(param.shape)}, fp32, bf16 or fp16, on {device}."
        )
    _check_memory(f"The gradient of owners[{index}]", grad)
    return grad


def _check_memory(name: str, tensor: torch.Tensor) -> None:
    """Raise on a tensor that has no address or is not contiguous."""
    if tensor.layout is not torch.strided or not tensor.is_contiguous():
        raise ShapeError(
            f"{name} is not contiguous (layout {tensor.layout}); one step walks memory from end to end: call "
            ".contiguous() on it."
        )
    # In the table an address of 0 means no gradient.
    if tensor.numel() and not tensor.data_ptr():
        raise ShapeError(
            f"{name} ({type(tensor).__name__} on {tensor.device}) has no memory address; for a DTensor give to_local()."
        )


def _check_apart(rows: Sequence[TableRow]) -> None:
    """Raise on memory that two programs would write."""
    ranges = sorted(_byte_ranges(rows))
    for (_, end, name), (begin, _, other) in itertools.pairwise(ranges):
        if begin < end:
            raise ShapeError(f"{name} and {other} share memory; each tensor that a step writes needs separate memory.")


def _byte_ranges(rows: Sequence[TableRow]) -> Iterator[tuple[int, int, str]]:
    """Yield the first and one past the last byte address that a step writes, and the name of the tensor."""
    for index, row in enumerate(rows):
        for kind, tensor in zip(_WRITTEN, row.places()):
            if tensor is not None and tensor.numel():
                yield tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes, f"{kind}[{index}]"
