"""Compute linear layers that read the same rows in one GEMM, without autograd: base weights, dense or NF4, and LoRA.

Axes: T rows, I input columns, O output columns of all layers together, R adapter ranks of all layers together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch

from lightning_fastft.fused.dense_weights import DenseWeights, rides_along
from lightning_fastft.fused.linear_parts import TENSORS_PER_LAYER, LinearPart
from lightning_fastft.kernels.lora_linear.op import wide_product
from lightning_fastft.kernels.low_rank_add.op import add_low_rank

# From this many rows per input column on, dense weights are copied next to their adapters. That saves 6 bytes per row
# and output (one more write and read of the output, and one more read of its gradient); the two copies cost 8 bytes per
# input and output.
_COPIED_FROM_ROWS_PER_INPUT = 2


class BaseWeight(Protocol):
    """Frozen weights of layers that read the same rows, in a format that computes its own products.

    Biases and adapters are not included.
    """

    def forward_product(self, parts: Sequence[LinearPart], x_TI: torch.Tensor) -> torch.Tensor:
        """Return ``x @ W^T`` of all layers, concatenated, in the dtype of the rows and in new memory."""

    def backward_product(self, parts: Sequence[LinearPart], d_TO: torch.Tensor) -> torch.Tensor:
        """Return ``d @ W``, in the dtype of the rows and in new memory."""


class Product(NamedTuple):
    """Output of a product, and the low-rank rows of its adapters, ``scale * x @ A^T``; None without adapters."""

    y_TO: torch.Tensor
    low_TR: torch.Tensor | None


class FusedLinear(NamedTuple):
    """Linear layers that read the same rows.

    Args:
        parts: The layers, in the order of their columns.
        dense: Dense weights next to their adapters: dequantised, copied, or in a fused buffer.
        base: Computes the products with the weights; None to compute them in the dtype of the rows.
    """

    parts: tuple[LinearPart, ...]
    dense: DenseWeights
    base: BaseWeight | None = None

    @property
    def num_inputs(self) -> int:
        """Columns of the rows that the layers read."""
        return self.parts[0].num_inputs

    def tensors(self) -> list[torch.Tensor | None]:
        """Return the tensors that autograd tracks, TENSORS_PER_LAYER for each layer."""
        return [tensor for part in self.parts for tensor in part.tensors()]

    def watched_tensors(self) -> list[torch.Tensor]:
        """Return tensors that the gradients read and an optimizer step writes.

        Autograd saves them, so that a write before the backward is an error. Frozen weights are not included, because
        streaming overwrites their slots.
        """
        return [getattr(part, name) for part in self.parts for name in _watched_names(part)]

    def with_watched(self, tensors: Sequence[torch.Tensor]) -> FusedLinear:
        """Return the same layers with the saved tensors of watched_tensors."""
        rest = iter(tensors)
        parts = []
        for part in self.parts:
            found: dict[str, Any] = {name: next(rest) for name in _watched_names(part)}
            parts.append(part._replace(**found))
        return self._replace(parts=tuple(parts))


def rows_for(fused_linear: FusedLinear, like_TI: torch.Tensor) -> torch.Tensor:
    """Return memory for rows, shape (T, I), that product reads without a copy; it may have room for low-rank rows."""
    if not _has_augmented(fused_linear, like_TI.shape[0]):
        return torch.empty_like(like_TI, memory_format=torch.contiguous_format)
    return fused_linear.dense.rows.give(like_TI, num_ranks=sum(part.rank for part in fused_linear.parts))


def gradients_for(fused_linear: FusedLinear, like_TO: torch.Tensor) -> torch.Tensor:
    """Return memory for gradients of an output, shape (T, O), that rows_gradients reads without a copy.

    Each row has room for the low-rank rows of one layer with the largest rank of these. A ``BaseWeight`` does not use
    it. Only the memory returned last has this room; other gradients are copied if they need it.
    """
    num_ranks = 0 if fused_linear.base is not None else max(part.rank for part in fused_linear.parts)
    return fused_linear.dense.gradients.give(like_TO, num_ranks=num_ranks)


def product(
    fused_linear: FusedLinear, x_TI: torch.Tensor, *, addend_TO: torch.Tensor | None = None, factor: float = 1.0
) -> Product:
    """Return ``x @ W^T + bias + scale * (x @ A^T) @ B^T`` of all layers, concatenated.

    Rows in memory of rows_for are not copied, and the room after them is written. addend_TO is for a single layer; only
    with it there is a factor of the product.

    Cost:
        2 T I O FLOP and those of the adapters; no host sync. All layers share one GEMM if they are packed, in a fused
        buffer, computed by fused_linear.base, or dense with many rows (then copied next to their adapters); else each
        layer has its own. One GEMM without addend_TO also adds the biases; otherwise they cost a pass over the output,
        and so do an adapter outside of the GEMM and addend_TO.
    """
    if addend_TO is None and _has_augmented(fused_linear, x_TI.shape[0]):
        return _augmented_product(fused_linear, x_TI)
    low_TR = low_rank_rows(fused_linear, x_TI)
    if low_TR is None:
        return Product(_base_product(fused_linear, x_TI, addend_TO=addend_TO, factor=factor), None)
    y_TO = _base_product(fused_linear, x_TI, addend_TO=None, factor=factor)
    added_TR = low_TR if factor == 1.0 else low_TR * factor
    for part, columns, ranks in zip(fused_linear.parts, _columns(fused_linear.parts), _ranks(fused_linear.parts)):
        if part.copy_b_OR is not None:
            piece_TO = y_TO[:, columns]
            add_low_rank(
                piece_TO, added_TR[:, ranks], part.copy_b_OR.T, residual_TN=addend_TO, out=piece_TO, is_checked=False
            )
    return Product(y_TO, low_TR)


def low_rank_rows(fused_linear: FusedLinear, x_TI: torch.Tensor) -> torch.Tensor | None:
    """Return the low-rank rows of the adapters with their scales, shape (T, R), rounded once; None without adapters."""
    a_RI = _joint_a(fused_linear.parts)
    if a_RI is None:
        return None
    low_TR = x_TI.new_empty(x_TI.shape[0], a_RI.shape[0])
    groups = [(ranks, part.scale) for part, ranks in zip(fused_linear.parts, _ranks(fused_linear.parts)) if part.rank]
    if len({scale for _, scale in groups}) == 1:
        # The usual case: one product.
        groups = [(slice(None), groups[0][1])]
    for ranks, scale in groups:
        out = low_TR[:, ranks]
        torch.addmm(out, x_TI, a_RI[ranks].T, beta=0.0, alpha=scale, out=out)
    return low_TR


def rows_gradients(
    fused_linear: FusedLinear, d_TO: torch.Tensor, *, needs_x: bool
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return the gradient of the rows, None if not needed, and the result of low_rows_gradient.

    The rows of the first result may have any stride.

    Cost:
        2 T I O FLOP and those of the adapters; one GEMM gives both if the adapters are part of the base's GEMM.
    """
    if not needs_x:
        return None, low_rows_gradient(fused_linear, d_TO)
    d_x_TI, d_low_TR, a_RI = rows_gradients_apart(fused_linear, d_TO)
    if d_low_TR is not None and a_RI is not None:
        add_low_rank(d_x_TI, d_low_TR, a_RI, out=d_x_TI, is_checked=False)
    return d_x_TI, d_low_TR


def rows_gradients_apart(
    fused_linear: FusedLinear, d_TO: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Return the gradient of the rows without the part of the adapters, the result of low_rows_gradient, and all A.

    The whole gradient is ``first + second @ third``. A caller that reads the rows next adds the product there and saves
    a pass over them. If the third is None, the first is the whole gradient.

    Cost:
        That of rows_gradients without that product. For a single layer with far fewer outputs than inputs, a copy of
        d_TO if its rows have no room, and of a dense weight outside of a fused buffer; both cost less than that pass.
    """
    num_rows, num_inputs = d_TO.shape[0], fused_linear.num_inputs
    if _has_appended(fused_linear, d_TO):
        d_low_TR = low_rows_gradient(fused_linear, d_TO)
        assert d_low_TR is not None
        return _appended_gradient(fused_linear, d_TO, d_low_TR), d_low_TR, None
    a_RI = _joint_a(fused_linear.parts)
    if not _has_augmented(fused_linear, num_rows):
        d_low_TR = low_rows_gradient(fused_linear, d_TO)
        return _base_gradient(fused_linear, d_TO), d_low_TR, a_RI
    d_rows = d_TO @ fused_linear.dense.with_adapters(fused_linear.parts, dtype=d_TO.dtype)
    d_low_TR = torch.cat(
        [
            d_rows[:, num_inputs:][:, ranks] * part.scale
            for part, ranks in zip(fused_linear.parts, _ranks(fused_linear.parts))
            if part.rank
        ],
        dim=1,
    )
    return d_rows[:, :num_inputs], d_low_TR, a_RI


def low_rows_gradient(fused_linear: FusedLinear, d_TO: torch.Tensor) -> torch.Tensor | None:
    """Return the gradient of the adapters' low-rank rows, with their scales; None without adapters."""
    parts = fused_linear.parts
    num_ranks = sum(part.rank for part in parts)
    if not num_ranks:
        return None
    d_low_TR = d_TO.new_empty(d_TO.shape[0], num_ranks)
    for part, columns, ranks in zip(parts, _columns(parts), _ranks(parts)):
        if part.copy_b_OR is not None:
            out = d_low_TR[:, ranks]
            torch.addmm(out, d_TO[:, columns], part.copy_b_OR, beta=0.0, alpha=part.scale, out=out)
    return d_low_TR


def parameter_gradients(
    fused_linear: FusedLinear,
    x_TI: torch.Tensor,
    d_TO: torch.Tensor,
    low_TR: torch.Tensor | None,
    d_low_TR: torch.Tensor | None,
    *,
    needs: Sequence[bool],
    factor_I: torch.Tensor | None = None,
) -> list[torch.Tensor | None]:
    """Return the gradients of FusedLinear.tensors in the dtypes of the parameters; None where not needed.

    Args:
        fused_linear: The layers.
        x_TI: Rows that the product read.
        d_TO: Gradient of its output.
        low_TR: Low-rank rows that the product returned.
        d_low_TR: Result of low_rows_gradient.
        needs: Whether each gradient is needed, in the order of FusedLinear.tensors.
        factor_I: Factor of the columns of x_TI in the rows that the product read; None for 1. Not allowed if the
            gradient of a weight is needed.

    Cost:
        2 T I FLOP per rank and trained column; no host sync.
    """
    parts, found = fused_linear.parts, []
    d_a = None
    if any(needs[2::TENSORS_PER_LAYER]):
        assert d_low_TR is not None
        # One GEMM for all layers; the gradient of each layer is a block of its rows.
        d_a = wide_product(d_low_TR.T, x_TI, dtype=_master_dtype(parts))
        if factor_I is not None:
            d_a.mul_(factor_I)
    for place, (part, columns, ranks) in enumerate(zip(parts, _columns(parts), _ranks(parts))):
        needs_weight, needs_bias, needs_a, needs_b = needs[place * TENSORS_PER_LAYER : (place + 1) * TENSORS_PER_LAYER]
        d_piece = d_TO[:, columns]
        found.append(d_piece.T @ x_TI if needs_weight else None)
        found.append(d_piece.sum(0) if needs_bias else None)
        found.append(d_a[ranks] if needs_a and d_a is not None else None)
        if needs_b and low_TR is not None and part.b_OR is not None:
            found.append(wide_product(d_piece.T, low_TR[:, ranks], dtype=part.b_OR.dtype))
        else:
            found.append(None)
    return found


def _has_augmented(fused_linear: FusedLinear, num_rows: int) -> bool:
    """Return whether adapters are part of the base's GEMM.

    They are if outputs are wider than the rows, and weights are dequantised anyway, or in a fused buffer, or rows are
    many. A second GEMM for B would read and write the whole output again: 0.4 of 2.4 ms for 17,408 x 5,120 on an H200.
    The products of a ``BaseWeight`` never include adapters.
    """
    parts = fused_linear.parts
    if fused_linear.base is not None or not rides_along(parts):
        return False
    if parts[0].is_packed or fused_linear.dense.has_room_beside(parts):
        return True
    return num_rows >= _COPIED_FROM_ROWS_PER_INPUT * fused_linear.num_inputs and not any(
        part.weight.requires_grad for part in parts
    )


def _has_appended(fused_linear: FusedLinear, d_TO: torch.Tensor) -> bool:
    """Return whether the gradient of the rows is one GEMM with A below the weight.

    This saves the addition at the next read of those rows: 0.6 ms for 32,768 x 14,336 on an H200 (python -m
    benchmarks.row_kernels --only "expert_gate backward" --rows 32768 --expert-width 14336). Copies move 4 bytes per row
    and output, and per input and output if weights are neither packed nor in a fused buffer.
    """
    part = fused_linear.parts[0]
    if fused_linear.base is not None or len(fused_linear.parts) > 1 or not part.rank:
        return False
    has_place = part.is_packed or fused_linear.dense.has_room_below(part)
    if part.num_inputs < 2 * part.num_outputs:
        return has_place and fused_linear.dense.gradients.has_room(d_TO, num_ranks=part.rank)
    return has_place or (
        d_TO.shape[0] >= _COPIED_FROM_ROWS_PER_INPUT * part.num_outputs and not part.weight.requires_grad
    )


def _appended_gradient(fused_linear: FusedLinear, d_TO: torch.Tensor, d_low_TR: torch.Tensor) -> torch.Tensor:
    """Return ``[d | d_low] @ [W; A]``."""
    (part,) = fused_linear.parts
    assert part.copy_a_RI is not None
    return fused_linear.dense.gradients.with_low(d_TO, d_low_TR) @ fused_linear.dense.above_adapter(
        part, part.copy_a_RI
    )


def _base_product(
    fused_linear: FusedLinear, x_TI: torch.Tensor, *, addend_TO: torch.Tensor | None, factor: float
) -> torch.Tensor:
    """Return ``factor * (x @ W^T + bias)`` of all layers, concatenated, plus the addend of a single layer."""
    pieces = [] if fused_linear.base is not None else _dense_pieces(fused_linear, x_TI)
    if len(pieces) == 1 and addend_TO is None and factor == 1.0:
        return _biased_product(x_TI, pieces[0][1], fused_linear.parts)
    if fused_linear.base is not None:
        y_TO = fused_linear.base.forward_product(fused_linear.parts, x_TI)
        if factor != 1.0:
            y_TO.mul_(factor)
        if addend_TO is not None:
            y_TO.add_(addend_TO)
    elif addend_TO is not None or factor != 1.0:
        ((_, weight_OI),) = pieces
        summand, beta = (x_TI.new_empty(1), 0.0) if addend_TO is None else (addend_TO, 1.0)
        y_TO = torch.addmm(summand, x_TI, weight_OI.T, beta=beta, alpha=factor)
    else:
        y_TO = x_TI.new_empty(x_TI.shape[0], sum(part.num_outputs for part in fused_linear.parts))
        for columns, weight_OI in pieces:
            torch.mm(x_TI, weight_OI.T, out=y_TO[:, columns])
    _add_bias(y_TO, fused_linear.parts, factor=factor)
    return y_TO


def _base_gradient(fused_linear: FusedLinear, d_TO: torch.Tensor) -> torch.Tensor:
    """Return ``d @ W`` of every layer, summed."""
    if fused_linear.base is not None:
        return fused_linear.base.backward_product(fused_linear.parts, d_TO)
    d_x_TI: torch.Tensor | None = None
    for columns, weight_OI in _dense_pieces(fused_linear, d_TO):
        d_piece = d_TO[:, columns]
        d_x_TI = d_piece @ weight_OI if d_x_TI is None else d_x_TI.addmm_(d_piece, weight_OI)
    assert d_x_TI is not None
    return d_x_TI


def _augmented_product(fused_linear: FusedLinear, x_TI: torch.Tensor) -> Product:
    """Return ``[x | low] @ [W | B]^T``."""
    low_TR = low_rank_rows(fused_linear, x_TI)
    assert low_TR is not None
    rows = fused_linear.dense.rows.with_low(x_TI, low_TR)
    return Product(
        _biased_product(
            rows, fused_linear.dense.with_adapters(fused_linear.parts, dtype=x_TI.dtype), fused_linear.parts
        ),
        low_TR,
    )


def _biased_product(x_TI: torch.Tensor, weight_OI: torch.Tensor, parts: Sequence[LinearPart]) -> torch.Tensor:
    """Return ``x @ W^T + bias`` of all layers in one GEMM, which adds the bias to its fp32 sums on CUDA."""
    if all(part.bias is None for part in parts):
        return x_TI @ weight_OI.T
    # As in bitsandbytes, a bias takes the dtype of the rows.
    biases = [x_TI.new_zeros(part.num_outputs) if part.bias is None else part.bias.to(x_TI.dtype) for part in parts]
    return torch.addmm(biases[0] if len(biases) == 1 else torch.cat(biases), x_TI, weight_OI.T)


def _add_bias(y_TO: torch.Tensor, parts: Sequence[LinearPart], *, factor: float) -> None:
    for part, columns in zip(parts, _columns(parts)):
        if part.bias is not None:
            y_TO[:, columns].add_(part.bias, alpha=factor)


def _dense_pieces(fused_linear: FusedLinear, x: torch.Tensor) -> list[tuple[slice, torch.Tensor]]:
    """Return the output columns and the weight, shape (O, I), of each layer or packed group."""
    parts = fused_linear.parts
    if parts[0].is_packed:
        return [(slice(None), fused_linear.dense.gather(parts, num_inputs=fused_linear.num_inputs, dtype=x.dtype))]
    return [(columns, part.weight) for columns, part in zip(_columns(parts), parts)]


def fuse_linears(parts: Sequence[LinearPart | str], dense: DenseWeights) -> FusedLinear | str:
    """Return layers that read the same rows as one FusedLinear, or why that is impossible."""
    found = []
    for part in parts:
        if isinstance(part, str):
            return part
        found.append(part)
    if len({part.is_packed for part in found}) > 1:
        return "dense and packed layers read the same rows"
    if len({part.a_RI.dtype for part in found if part.a_RI is not None}) > 1:
        return "adapters of the same rows have several dtypes"
    return FusedLinear(tuple(found), dense)


def _watched_names(part: LinearPart) -> list[str]:
    trained = ["weight"] if part.weight.requires_grad else []
    return trained if part.copy_a_RI is None else [*trained, "copy_a_RI", "copy_b_OR"]


def _columns(parts: Sequence[LinearPart]) -> list[slice]:
    return _slices([part.num_outputs for part in parts])


def _ranks(parts: Sequence[LinearPart]) -> list[slice]:
    return _slices([part.rank for part in parts])


def _slices(sizes: Sequence[int]) -> list[slice]:
    ends, start = [], 0
    for size in sizes:
        ends.append(slice(start, start + size))
        start += size
    return ends


def _joint_a(parts: Sequence[LinearPart]) -> torch.Tensor | None:
    """Return A of all layers below each other."""
    factors = [part.copy_a_RI for part in parts if part.copy_a_RI is not None]
    if not factors:
        return None
    return factors[0] if len(factors) == 1 else torch.cat(factors)


def _master_dtype(parts: Sequence[LinearPart]) -> torch.dtype:
    return next(part.a_RI.dtype for part in parts if part.a_RI is not None)
