"""Compute linear layers that read the same rows in one GEMM, without autograd: base weights, dense or NF4, and LoRA.

Axes: T rows, I input columns, O output columns of all layers together, R adapter ranks of all layers together.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch

from lightning_fastft.core.checks import is_same_memory
from lightning_fastft.fused.column_scales import scale_output
from lightning_fastft.fused.dense_weights import DenseWeights, rides_along
from lightning_fastft.fused.linear_parts import TENSORS_PER_LAYER, LinearPart
from lightning_fastft.kernels.expert_gate.reference import GateForm, QuantisedGateGradients
from lightning_fastft.kernels.fp8_linear.reference import Fp8Rows
from lightning_fastft.kernels.lora_linear.op import wide_product
from lightning_fastft.kernels.low_rank_add.op import add_low_rank
from lightning_fastft.kernels.rms_norm.reference import NormForm

# From this many rows per input column on, dense weights are copied next to their adapters. That saves 6 bytes per row
# and output (one more write and read of the output, and one more read of its gradient); the two copies cost 8 bytes per
# input and output.
_COPIED_FROM_ROWS_PER_INPUT = 2


class BaseWeight(Protocol):
    """Weights of layers that read the same rows, in a format that computes its own products.

    Biases and adapters are not included.
    """

    def quantises(self, parts: Sequence[LinearPart]) -> bool:
        """Return whether the products read quantised rows, which the kernel that computes the rows may write."""

    def quantised_norm(
        self, parts: Sequence[LinearPart], x_TI: torch.Tensor, weight_I: torch.Tensor, form: NormForm
    ) -> Fp8Rows:
        """Return normed rows as the products read them."""

    def quantised_gate(self, parts: Sequence[LinearPart], gate_up_TP: torch.Tensor, form: GateForm) -> Fp8Rows:
        """Return gated rows as the products read them."""

    def quantised_gate_gradients(
        self, parts: Sequence[LinearPart], d_act_TF: torch.Tensor, gate_up_TP: torch.Tensor, form: GateForm
    ) -> QuantisedGateGradients:
        """Return the gradient of gate_up, the output of these layers, and gated rows, as the products read them."""

    def forward_product(self, parts: Sequence[LinearPart], x_TI: torch.Tensor | Fp8Rows) -> torch.Tensor:
        """Return ``x @ W^T`` of all layers, concatenated, in the dtype of the rows and in new memory."""

    def quantise_gradient(self, parts: Sequence[LinearPart], d_TO: torch.Tensor) -> Any:
        """Return the gradient of the output as the other products read it."""

    def backward_product(self, parts: Sequence[LinearPart], d: Any, *, dtype: torch.dtype) -> torch.Tensor:
        """Return ``d @ W``, in this dtype and in new memory."""

    def weight_gradient(self, parts: Sequence[LinearPart], d: Any, x_TI: torch.Tensor | Fp8Rows) -> torch.Tensor:
        """Return ``d^T @ x`` of all layers, below each other, in the dtype of the rows and in new memory."""


class Product(NamedTuple):
    """Output of a product, and the low-rank rows of its adapters, ``scale * x @ A^T``; None without adapters."""

    y_TO: torch.Tensor
    low_TR: torch.Tensor | None


class _Linears(NamedTuple):
    parts: tuple[LinearPart, ...]
    dense: DenseWeights
    base: BaseWeight | None = None


class FusedLinear(_Linears):
    """Linear layers that read the same rows.

    Args:
        parts: The layers, in the order of their columns.
        dense: Dense weights next to their adapters: dequantised, copied, or in a fused buffer.
        base: Computes the products with the weights; None to compute them in the dtype of the rows.
    """

    # The properties are computed once: a FusedLinear serves many steps.

    @functools.cached_property
    def num_inputs(self) -> int:
        """Columns of the rows that the layers read."""
        return self.parts[0].num_inputs

    @functools.cached_property
    def num_ranks(self) -> int:
        """Ranks of all adapters together."""
        return sum(part.rank for part in self.parts)

    @functools.cached_property
    def max_rank(self) -> int:
        """The largest rank of an adapter."""
        return max(part.rank for part in self.parts)

    @functools.cached_property
    def columns(self) -> list[slice]:
        """Output columns of each layer."""
        return _slices([part.num_outputs for part in self.parts])

    @functools.cached_property
    def ranks(self) -> list[slice]:
        """Low-rank columns of each layer."""
        return _slices([part.rank for part in self.parts])

    @functools.cached_property
    def scales(self) -> list[float]:
        """Different factors on the low-rank products."""
        return list({part.scale for part in self.parts if part.rank})

    @functools.cached_property
    def is_scaled(self) -> bool:
        """Whether a layer is DoRA, whose output is scaled by column."""
        return any(part.factors_2O is not None for part in self.parts)

    @functools.cached_property
    def rides_along(self) -> bool:
        """Whether the GEMM of the weights can include the adapters."""
        return self.base is None and rides_along(self.parts)

    @functools.cached_property
    def is_trained(self) -> bool:
        """Whether the weight of a layer is trained."""
        return any(part.weight.requires_grad for part in self.parts)

    @functools.cached_property
    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """The tensors that autograd tracks, TENSORS_PER_LAYER for each layer."""
        return tuple(tensor for part in self.parts for tensor in part.tensors())

    @functools.cached_property
    def watched_tensors(self) -> tuple[torch.Tensor, ...]:
        """Tensors that the gradients read and an optimizer step writes.

        Autograd saves them, so that a write before the backward is an error. Frozen weights are not included, because
        streaming overwrites their slots.
        """
        return tuple(getattr(part, name) for part in self.parts for name in _watched_names(part))

    def with_watched(self, tensors: Sequence[torch.Tensor]) -> FusedLinear:
        """Return the same layers with the saved tensors of watched_tensors."""
        if all(map(is_same_memory, tensors, self.watched_tensors)):
            return self
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
    return fused_linear.dense.rows.give(like_TI, num_ranks=fused_linear.num_ranks)


def quantised_norm(
    fused_linear: FusedLinear, x_TI: torch.Tensor, weight_I: torch.Tensor, *, form: NormForm
) -> Fp8Rows | None:
    """Return normed rows for product and parameter_gradients, in one kernel; None if they read other rows."""
    parts, base = fused_linear.parts, fused_linear.base
    return None if base is None or not base.quantises(parts) else base.quantised_norm(parts, x_TI, weight_I, form)


def quantised_gate(fused_linear: FusedLinear, gate_up_TP: torch.Tensor, *, form: GateForm) -> Fp8Rows | None:
    """Return gated rows for product and parameter_gradients, in one kernel; None if they read other rows."""
    parts, base = fused_linear.parts, fused_linear.base
    return None if base is None or not base.quantises(parts) else base.quantised_gate(parts, gate_up_TP, form)


def quantised_gate_gradients(
    gate_up: FusedLinear, down: FusedLinear, d_act_TF: torch.Tensor, gate_up_TP: torch.Tensor, *, form: GateForm
) -> QuantisedGateGradients | None:
    """Return the gradient of gate_up's output for rows_gradients and parameter_gradients of gate_up, and gated rows for
    those of down, in one kernel; None if they read others.
    """
    parts, base = gate_up.parts, gate_up.base
    if base is None or down.base is None or not (base.quantises(parts) and down.base.quantises(down.parts)):
        return None
    # The gradient of a bias is a sum of rows before they are quantised.
    if any(part.bias is not None for part in parts):
        return None
    return base.quantised_gate_gradients(parts, d_act_TF, gate_up_TP, form)


def gradients_for(fused_linear: FusedLinear, like_TO: torch.Tensor) -> torch.Tensor:
    """Return memory for gradients of an output, shape (T, O), that rows_gradients reads without a copy.

    Each row has room for the low-rank rows of one layer with the largest rank of these. A ``BaseWeight`` does not use
    it. Only the memory returned last has this room; other gradients are copied if they need it.
    """
    num_ranks = 0 if fused_linear.base is not None else fused_linear.max_rank
    return fused_linear.dense.gradients.give(like_TO, num_ranks=num_ranks)


def product(
    fused_linear: FusedLinear,
    x_TI: torch.Tensor | Fp8Rows,
    *,
    addend_TO: torch.Tensor | None = None,
    factor: float = 1.0,
) -> Product:
    """Return ``x @ W^T + bias + scale * (x @ A^T) @ B^T`` of all layers, concatenated; with DoRA scaled by column.

    Rows are 2-D, or the result of quantised_norm or quantised_gate. Those in memory of rows_for are not copied, and the
    room after them is written. addend_TO is for a single layer; only with it there is a factor of the product.

    Cost:
        2 T I O FLOP and those of the adapters; no host sync. All layers share one GEMM if they are packed, in a fused
        buffer, computed by fused_linear.base, or dense with many rows (then copied next to their adapters); else each
        layer has its own. One GEMM without addend_TO also adds the biases; otherwise they cost a pass over the output,
        and so do an adapter outside of the GEMM and addend_TO. DoRA costs
        one more pass.
    """
    if fused_linear.is_scaled:
        out = unscaled_product(fused_linear, x_TI)
        return out._replace(
            y_TO=scale_output(fused_linear.parts, out.y_TO, addend_TO=addend_TO, alpha=factor, out=out.y_TO)
        )
    return unscaled_product(fused_linear, x_TI, addend_TO=addend_TO, factor=factor)


def unscaled_product(
    fused_linear: FusedLinear,
    x_TI: torch.Tensor | Fp8Rows,
    *,
    addend_TO: torch.Tensor | None = None,
    factor: float = 1.0,
) -> Product:
    """Return product without the scale of DoRA."""
    if isinstance(x_TI, Fp8Rows):
        return Product(_base_product(fused_linear, x_TI, addend_TO=addend_TO, factor=factor), None)
    if addend_TO is None and _has_augmented(fused_linear, x_TI.shape[0]):
        return _augmented_product(fused_linear, x_TI)
    low_TR = low_rank_rows(fused_linear, x_TI)
    if low_TR is None:
        return Product(_base_product(fused_linear, x_TI, addend_TO=addend_TO, factor=factor), None)
    y_TO = _base_product(fused_linear, x_TI, addend_TO=None, factor=factor)
    added_TR = low_TR if factor == 1.0 else low_TR * factor
    for part, columns, ranks in zip(fused_linear.parts, fused_linear.columns, fused_linear.ranks):
        if part.copy_b_OR is not None:
            piece_TO = y_TO[:, columns]
            add_low_rank(
                piece_TO, added_TR[:, ranks], part.copy_b_OR.T, residual_TN=addend_TO, out=piece_TO, is_checked=False
            )
    return Product(y_TO, low_TR)


def low_rank_rows(fused_linear: FusedLinear, x_TI: torch.Tensor | Fp8Rows) -> torch.Tensor | None:
    """Return the low-rank rows of the adapters with their scales, shape (T, R), rounded once; None without adapters."""
    a_RI = _joint_a(fused_linear.parts)
    if a_RI is None or isinstance(x_TI, Fp8Rows):
        return None
    low_TR = x_TI.new_empty(x_TI.shape[0], a_RI.shape[0])
    if len(fused_linear.scales) == 1:
        # The usual case: one product.
        return torch.addmm(low_TR, x_TI, a_RI.T, beta=0.0, alpha=fused_linear.scales[0], out=low_TR)
    for part, ranks in zip(fused_linear.parts, fused_linear.ranks):
        if part.rank:
            out = low_TR[:, ranks]
            torch.addmm(out, x_TI, a_RI[ranks].T, beta=0.0, alpha=part.scale, out=out)
    return low_TR


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
    a_RI = _joint_a(fused_linear.parts)
    if not _has_augmented(fused_linear, num_rows):
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
        2 T I FLOP per rank and trained column; no host sync. A ``BaseWeight`` has one GEMM for all trained weights.
    """
    parts, found = fused_linear.parts, []
    d_a = None
    if any(needs[2::TENSORS_PER_LAYER]):
        assert d_low_TR is not None
        assert isinstance(x_TI, torch.Tensor)
        # One GEMM for all layers; the gradient of each layer is a block of its rows.
        d_a = wide_product(d_low_TR.T, x_TI, dtype=next(part.a_RI.dtype for part in parts if part.a_RI is not None))
        if factor_I is not None:
            d_a.mul_(factor_I)
    d_weights = _weight_gradients(fused_linear, x_TI, d_TO, needs=needs[::TENSORS_PER_LAYER], d=d)
    for place, (part, columns, ranks) in enumerate(zip(parts, fused_linear.columns, fused_linear.ranks)):
        _, needs_bias, needs_a, needs_b, _ = needs[place * TENSORS_PER_LAYER : (place + 1) * TENSORS_PER_LAYER]
        d_piece = _piece(d_TO, columns, parts) if isinstance(d_TO, torch.Tensor) else None
        found.append(d_weights[place])
        found.append(d_piece.sum(0) if needs_bias and d_piece is not None else None)
        found.append((d_a if len(parts) == 1 else d_a[ranks]) if needs_a and d_a is not None else None)
        if needs_b and low_TR is not None and part.b_OR is not None and d_piece is not None:
            found.append(wide_product(d_piece.T, _piece(low_TR, ranks, parts), dtype=part.b_OR.dtype))
        else:
            found.append(None)
        found.append(d_magnitudes[place] if d_magnitudes else None)
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
            _piece(d_TO, columns, parts).T @ x_TI if is_needed else None
            for columns, is_needed in zip(fused_linear.columns, needs)
        ]
    if d is None:
        assert isinstance(d_TO, torch.Tensor)
        d = base.quantise_gradient(parts, d_TO)
    d_weight_OI = base.weight_gradient(parts, d, x_TI)
    return [d_weight_OI[rows] if is_needed else None for rows, is_needed in zip(fused_linear.columns, needs)]


def _piece(rows: torch.Tensor, columns: slice, parts: Sequence[LinearPart]) -> torch.Tensor:
    """Return the columns of one layer; those of a single layer without a view, which costs the host microseconds."""
    return rows if len(parts) == 1 else rows[:, columns]


def _has_augmented(fused_linear: FusedLinear, num_rows: int) -> bool:
    """Return whether adapters are part of the base's GEMM.

    They are if outputs are wider than the rows, and weights are dequantised anyway, or in a fused buffer, or rows are
    many. A second GEMM for B would read and write the whole output again: 0.4 of 2.4 ms for 17,408 x 5,120 on an H200.
    The products of a ``BaseWeight`` never include adapters.
    """
    if not fused_linear.rides_along:
        return False
    if fused_linear.parts[0].is_packed or fused_linear.dense.has_room_beside(fused_linear.parts):
        return True
    return num_rows >= _COPIED_FROM_ROWS_PER_INPUT * fused_linear.num_inputs and not fused_linear.is_trained


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
    fused_linear: FusedLinear, x_TI: torch.Tensor | Fp8Rows, *, addend_TO: torch.Tensor | None, factor: float
) -> torch.Tensor:
    """Return ``factor * (x @ W^T + bias)`` of all layers, concatenated, plus the addend of a single layer."""
    if fused_linear.base is not None:
        y_TO = fused_linear.base.forward_product(fused_linear.parts, x_TI)
        if factor != 1.0:
            y_TO.mul_(factor)
        if addend_TO is not None:
            y_TO.add_(addend_TO)
        _add_bias(y_TO, fused_linear, factor=factor)
        return y_TO
    assert isinstance(x_TI, torch.Tensor)
    pieces = _dense_pieces(fused_linear, x_TI)
    if len(pieces) == 1 and addend_TO is None and factor == 1.0:
        return _biased_product(x_TI, pieces[0][1], fused_linear.parts)
    if addend_TO is not None or factor != 1.0:
        ((_, weight_OI),) = pieces
        summand, beta = (x_TI.new_empty(1), 0.0) if addend_TO is None else (addend_TO, 1.0)
        y_TO = torch.addmm(summand, x_TI, weight_OI.T, beta=beta, alpha=factor)
    else:
        y_TO = x_TI.new_empty(x_TI.shape[0], fused_linear.columns[-1].stop)
        for columns, weight_OI in pieces:
            torch.mm(x_TI, weight_OI.T, out=y_TO[:, columns])
    _add_bias(y_TO, fused_linear, factor=factor)
    return y_TO


def _base_gradient(fused_linear: FusedLinear, d_TO: torch.Tensor | Fp8Rows, *, d: Any) -> torch.Tensor:
    """Return ``d @ W`` of every layer, summed."""
    parts, base = fused_linear.parts, fused_linear.base
    if isinstance(d_TO, Fp8Rows):
        assert base is not None
        return base.backward_product(parts, d_TO, dtype=parts[0].weight.dtype)
    if base is not None:
        return base.backward_product(parts, base.quantise_gradient(parts, d_TO) if d is None else d, dtype=d_TO.dtype)
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


def _add_bias(y_TO: torch.Tensor, fused_linear: FusedLinear, *, factor: float) -> None:
    for part, columns in zip(fused_linear.parts, fused_linear.columns):
        if part.bias is not None:
            y_TO[:, columns].add_(part.bias, alpha=factor)


def _dense_pieces(fused_linear: FusedLinear, x: torch.Tensor) -> list[tuple[slice, torch.Tensor]]:
    """Return the output columns and the weight, shape (O, I), of each layer or packed group."""
    parts = fused_linear.parts
    if parts[0].is_packed:
        return [(slice(None), fused_linear.dense.gather(parts, num_inputs=fused_linear.num_inputs, dtype=x.dtype))]
    return [(columns, part.weight) for columns, part in zip(fused_linear.columns, parts)]


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
    scaled = [] if part.factors_2O is None else ["factors_2O"]
    return trained if part.copy_a_RI is None else [*trained, "copy_a_RI", "copy_b_OR", *scaled]


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
