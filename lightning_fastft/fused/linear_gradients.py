"""Gradients of fused linear layers, without autograd: of the rows that they read and of their parameters.

Axes: T rows, I input columns, O output columns of all layers together, R adapter ranks of all layers together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lightning_fastft.fused.linear_parts import TENSORS_PER_LAYER
from lightning_fastft.fused.linears import (
    COPIED_FROM_ROWS_PER_INPUT,
    FusedLinear,
    dense_pieces,
    has_augmented,
)
from lightning_fastft.kernels.fp8_linear.reference import Fp8Rows
from lightning_fastft.kernels.lora_linear.op import wide_product
from lightning_fastft.kernels.low_rank_add.op import add_low_rank


def gradients_for(fused_linear: FusedLinear, like_TO: torch.Tensor) -> torch.Tensor:
    """Return memory for gradients of an output, shape (T, O), that rows_gradients reads without a copy.

    Each row has room for the low-rank rows of one layer with the largest rank of these. A weight in e4m3 does not use
    it. Only the memory returned last has this room; other gradients are copied if they need it.
    """
    num_ranks = 0 if fused_linear.base is not None else fused_linear.max_rank
    return fused_linear.dense.gradients.give(like_TO, num_ranks=num_ranks)


def quantised_gradient(fused_linear: FusedLinear, d_TO: torch.Tensor | Fp8Rows, *, needs: Sequence[bool]) -> Any:
    """Return the gradient of an output for the ``d`` of rows_gradients and parameter_gradients, which then share it.

    None if they read the rows themselves, or only one of them reads a quantised gradient.
    """
    if isinstance(d_TO, Fp8Rows):
        return d_TO
    if fused_linear.base is None or not any(needs[::TENSORS_PER_LAYER]):
        return None
    return fused_linear.base.quantise_gradient(fused_linear.parts, d_TO)


def rows_gradients(
    fused_linear: FusedLinear, d_TO: torch.Tensor | Fp8Rows, *, needs_x: bool, d: Any = None
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return the gradient of the rows, None if not needed, and the result of low_rows_gradient.

    The rows of the first result may have any stride. ``d`` is the result of quantised_gradient.

    Cost:
        2 T I O FLOP and those of the adapters; one GEMM gives both if the adapters are part of the base's GEMM.
    """
    if not needs_x:
        return None, low_rows_gradient(fused_linear, d_TO)
    d_x_TI, d_low_TR, a_RI = rows_gradients_apart(fused_linear, d_TO, d=d)
    if d_low_TR is not None and a_RI is not None:
        add_low_rank(d_x_TI, d_low_TR, a_RI, out=d_x_TI, is_checked=False)
    return d_x_TI, d_low_TR


def rows_gradients_apart(
    fused_linear: FusedLinear, d_TO: torch.Tensor | Fp8Rows, *, d: Any = None
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Return the gradient of the rows without the part of the adapters, the result of low_rows_gradient, and all A.

    The whole gradient is ``first + second @ third``. A caller that reads the rows next adds the product there and saves
    a pass over them. If the third is None, the first is the whole gradient.

    Cost:
        That of rows_gradients without that product. For a single layer with far fewer outputs than inputs, a copy of
        d_TO if its rows have no room, and of a dense weight outside of a fused buffer; both cost less than that pass.
    """
    if isinstance(d_TO, Fp8Rows):
        return _base_gradient(fused_linear, d_TO, d=d_TO), None, None
    num_rows, num_inputs = d_TO.shape[0], fused_linear.num_inputs
    if _has_appended(fused_linear, d_TO):
        d_low_TR = low_rows_gradient(fused_linear, d_TO)
        assert d_low_TR is not None
        return _appended_gradient(fused_linear, d_TO, d_low_TR), d_low_TR, None
    a_RI = fused_linear.concatenated_a()
    if not has_augmented(fused_linear, num_rows):
        d_low_TR = low_rows_gradient(fused_linear, d_TO)
        return _base_gradient(fused_linear, d_TO, d=d), d_low_TR, a_RI
    d_rows = d_TO @ fused_linear.dense.with_adapters(fused_linear.parts, dtype=d_TO.dtype)
    d_x_TI, d_low_TR = d_rows[:, :num_inputs], d_rows[:, num_inputs : num_inputs + fused_linear.num_ranks]
    if len(fused_linear.scales) == 1:
        return d_x_TI, d_low_TR * fused_linear.scales[0], a_RI
    pieces = d_low_TR.split([part.rank for part in fused_linear.parts], dim=1)
    return d_x_TI, torch.cat([piece * part.scale for piece, part in zip(pieces, fused_linear.parts)], dim=1), a_RI


def low_rows_gradient(fused_linear: FusedLinear, d_TO: torch.Tensor | Fp8Rows) -> torch.Tensor | None:
    """Return the gradient of the adapters' low-rank rows, with their scales; None without adapters."""
    parts = fused_linear.parts
    if not fused_linear.num_ranks or isinstance(d_TO, Fp8Rows):
        return None
    d_low_TR = d_TO.new_empty(d_TO.shape[0], fused_linear.num_ranks)
    if len(parts) == 1 and parts[0].copy_b_OR is not None:
        torch.addmm(d_low_TR, d_TO, parts[0].copy_b_OR, beta=0.0, alpha=parts[0].scale, out=d_low_TR)
        return d_low_TR
    for part, columns, ranks in zip(parts, fused_linear.columns, fused_linear.ranks):
        if part.copy_b_OR is not None:
            out = d_low_TR[:, ranks]
            torch.addmm(out, d_TO[:, columns], part.copy_b_OR, beta=0.0, alpha=part.scale, out=out)
    return d_low_TR


def parameter_gradients(
    fused_linear: FusedLinear,
    x_TI: torch.Tensor | Fp8Rows,
    d_TO: torch.Tensor | Fp8Rows,
    low_TR: torch.Tensor | None,
    d_low_TR: torch.Tensor | None,
    *,
    needs: Sequence[bool],
    factor_I: torch.Tensor | None = None,
    d: Any = None,
    d_magnitudes: Sequence[torch.Tensor | None] = (),
) -> list[torch.Tensor | None]:
    """Return the gradients of FusedLinear.tensors in the dtypes of the parameters; None where not needed.

    Args:
        fused_linear: The layers.
        x_TI: Rows that the product read.
        d_TO: Gradient of its output; with DoRA before the scale.
        low_TR: Low-rank rows that the product returned.
        d_low_TR: Result of low_rows_gradient.
        needs: Whether each gradient is needed, in the order of FusedLinear.tensors.
        factor_I: Factor of the columns of x_TI in the rows that the product read; None for 1. Not allowed if the
            gradient of a weight is needed.
        d: Result of quantised_gradient.
        d_magnitudes: Gradients of the magnitudes of DoRA; empty without.

    Cost:
        2 T I FLOP per rank and trained column; no host sync. Weights in e4m3 have one GEMM for all trained weights.
    """
    parts, d_a = fused_linear.parts, None
    found: list[torch.Tensor | None] = []
    if any(needs[2::TENSORS_PER_LAYER]):
        assert d_low_TR is not None
        assert isinstance(x_TI, torch.Tensor)
        # One GEMM for all layers; the gradient of each layer is a block of its rows.
        d_a = wide_product(d_low_TR.t(), x_TI, dtype=next(part.a_RI.dtype for part in parts if part.a_RI is not None))
        if factor_I is not None:
            d_a.mul_(factor_I)
    d_weights = _weight_gradients(fused_linear, x_TI, d_TO, needs=needs[::TENSORS_PER_LAYER], d=d)
    d_pieces = _pieces(d_TO, fused_linear.output_sizes, axis=1)
    d_a_pieces, low_pieces = (
        _pieces(rows, fused_linear.rank_sizes, axis=axis) for rows, axis in ((d_a, 0), (low_TR, 1))
    )
    for place, (part, d_piece, d_a_piece, low_piece) in enumerate(zip(parts, d_pieces, d_a_pieces, low_pieces)):
        _, needs_bias, needs_a, needs_b, _ = needs[place * TENSORS_PER_LAYER : (place + 1) * TENSORS_PER_LAYER]
        d_b = None
        if needs_b and low_piece is not None and part.b_OR is not None and d_piece is not None:
            d_b = wide_product(d_piece.t(), low_piece, dtype=part.b_OR.dtype)
        found += (
            d_weights[place],
            d_piece.sum(0) if needs_bias and d_piece is not None else None,
            d_a_piece if needs_a else None,
            d_b,
            d_magnitudes[place] if d_magnitudes else None,
        )
    return found


def _weight_gradients(
    fused_linear: FusedLinear,
    x_TI: torch.Tensor | Fp8Rows,
    d_TO: torch.Tensor | Fp8Rows,
    *,
    needs: Sequence[bool],
    d: Any,
) -> list[torch.Tensor | None]:
    """Return the gradient of the weight of each layer, None where not needed."""
    parts, base = fused_linear.parts, fused_linear.base
    if not any(needs):
        return [None] * len(parts)
    if base is None:
        assert isinstance(d_TO, torch.Tensor)
        assert isinstance(x_TI, torch.Tensor)
        return [
            d_piece.t() @ x_TI if is_needed else None
            for d_piece, is_needed in zip(_pieces(d_TO, fused_linear.output_sizes, axis=1), needs)
        ]
    if d is None:
        assert isinstance(d_TO, torch.Tensor)
        d = base.quantise_gradient(parts, d_TO)
    d_weight_OI = base.weight_gradient(parts, d, x_TI)
    return [d_weight_OI[rows] if is_needed else None for rows, is_needed in zip(fused_linear.columns, needs)]


def _pieces(matrix: Any, sizes: list[int], *, axis: int) -> Sequence[Any]:
    """Return the share of each layer along an axis; that of a single layer without a view, and None of no tensor."""
    if not isinstance(matrix, torch.Tensor):
        return [None] * len(sizes)
    return [matrix] if len(sizes) == 1 else matrix.split_with_sizes(sizes, axis)


def _has_appended(fused_linear: FusedLinear, d_TO: torch.Tensor) -> bool:
    """Return whether the gradient of the rows is one GEMM with A below the weight.

    This saves the addition at the next read of those rows: 0.6 ms for 32,768 x 14,336 on an H200 (python -m
    benchmarks.row_kernels --only "expert_gate backward" --rows 32768 --expert-width 14336). Copies move 4 bytes per row
    and output, and per input and output if weights are neither packed nor in a fused buffer.
    """
    part = fused_linear.parts[0]
    if fused_linear.base is not None or len(fused_linear.parts) > 1 or not part.rank:
        return False
    has_place = part.is_packed or fused_linear.has_room(is_below=True)
    if part.num_inputs < 2 * part.num_outputs:
        return has_place and fused_linear.dense.gradients.has_room(d_TO, num_ranks=part.rank)
    return has_place or (
        d_TO.shape[0] >= COPIED_FROM_ROWS_PER_INPUT * part.num_outputs and not part.weight.requires_grad
    )


def _appended_gradient(fused_linear: FusedLinear, d_TO: torch.Tensor, d_low_TR: torch.Tensor) -> torch.Tensor:
    """Return ``[d | d_low] @ [W; A]``."""
    (part,) = fused_linear.parts
    assert part.copy_a_RI is not None
    return fused_linear.dense.gradients.with_low(d_TO, d_low_TR) @ fused_linear.dense.above_adapter(
        part, part.copy_a_RI
    )


def _base_gradient(fused_linear: FusedLinear, d_TO: torch.Tensor | Fp8Rows, *, d: Any) -> torch.Tensor:
    """Return ``d @ W`` of every layer, summed."""
    parts, base = fused_linear.parts, fused_linear.base
    if isinstance(d_TO, Fp8Rows):
        assert base is not None
        return base.backward_product(parts, d_TO, dtype=parts[0].weight.dtype)
    if base is not None:
        return base.backward_product(parts, base.quantise_gradient(parts, d_TO) if d is None else d, dtype=d_TO.dtype)
    d_x_TI: torch.Tensor | None = None
    for columns, weight_OI in dense_pieces(fused_linear, d_TO):
        d_piece = d_TO[:, columns]
        d_x_TI = d_piece @ weight_OI if d_x_TI is None else d_x_TI.addmm_(d_piece, weight_OI)
    assert d_x_TI is not None
    return d_x_TI
