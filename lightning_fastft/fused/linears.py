"""Compute linear layers that read the same rows in one GEMM, without autograd: base weights, dense or NF4, and LoRA.

Axes: T rows, I input columns, O output columns of all layers together, R adapter ranks of all layers together.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from lightning_fastft.core.checks import is_same_memory
from lightning_fastft.fused.column_scales import scale_output
from lightning_fastft.fused.dense_weights import DenseWeights, can_augment
from lightning_fastft.fused.joined_copies import joined
from lightning_fastft.fused.linear_parts import LinearPart, join_biases
from lightning_fastft.kernels.expert_gate.op import gate_forward_quantised
from lightning_fastft.kernels.expert_gate.reference import GateForm
from lightning_fastft.kernels.fp8_linear.reference import Fp8Rows
from lightning_fastft.kernels.low_rank_add.op import add_low_rank
from lightning_fastft.kernels.rms_norm.op import rms_norm_quantised
from lightning_fastft.kernels.rms_norm.reference import NormForm

if TYPE_CHECKING:
    from lightning_fastft.fused.fp8_weights import Fp8Weight

# From this many rows per input column on, dense weights are copied next to their adapters. That saves 6 bytes per row
# and output (one more write and read of the output, and one more read of its gradient); the two copies cost 8 bytes per
# input and output.
COPIED_FROM_ROWS_PER_INPUT = 2


@dataclasses.dataclass(frozen=True, eq=False)
class FusedLinear:
    """Linear layers that read the same rows.

    Args:
        parts: The layers, in the order of their columns.
        dense: Dense weights next to their adapters: dequantised, copied, or in a fused buffer.
        base: The weights in e4m3, which compute their own products; None to compute in the dtype of the rows.
    """

    parts: tuple[LinearPart, ...]
    dense: DenseWeights
    base: Fp8Weight | None = None

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
    def output_sizes(self) -> list[int]:
        """Number of output columns of each layer."""
        return [part.num_outputs for part in self.parts]

    @functools.cached_property
    def rank_sizes(self) -> list[int]:
        """Rank of the adapter of each layer."""
        return [part.rank for part in self.parts]

    @functools.cached_property
    def columns(self) -> list[slice]:
        """Output columns of each layer."""
        return _slices(self.output_sizes)

    @functools.cached_property
    def ranks(self) -> list[slice]:
        """Low-rank columns of each layer."""
        return _slices(self.rank_sizes)

    @functools.cached_property
    def scales(self) -> list[float]:
        """Different factors on the low-rank products."""
        return list({part.scale for part in self.parts if part.rank})

    @functools.cached_property
    def is_scaled(self) -> bool:
        """Whether a layer is DoRA, whose output is scaled by column."""
        return any(part.factors_2O is not None for part in self.parts)

    @functools.cached_property
    def can_augment(self) -> bool:
        """Whether the GEMM of the weights can include the adapters."""
        return self.base is None and can_augment(self.parts)

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

    @functools.cached_property
    def _joined_a(self) -> torch.Tensor | None:
        """A of all layers as one tensor, if it is one, or if ``join_copies`` has put them in one memory."""
        return joined([part.copy_a_RI for part in self.parts if part.copy_a_RI is not None])

    def concatenated_a(self) -> torch.Tensor | None:
        """Return A of all layers below each other; None without adapters."""
        if self._joined_a is not None or not self.num_ranks:
            return self._joined_a
        return torch.cat([part.copy_a_RI for part in self.parts if part.copy_a_RI is not None])

    def has_room(self, *, is_below: bool) -> bool:
        """Return whether the weights are in a fused buffer with room for B next to them, or for A of one layer below.

        It is looked up again only if a weight has moved; always on the meta device, where tensors have no addresses.
        """
        addresses = None if self.parts[0].weight.is_meta else [part.weight.data_ptr() for part in self.parts]
        if addresses is None or vars(self).get("_addresses") != addresses:
            has_below = len(self.parts) == 1 and self.dense.has_room_below(self.parts[0])
            vars(self).update(_addresses=addresses, _rooms=(self.dense.has_room_beside(self.parts), has_below))
        return bool(vars(self)["_rooms"][is_below])

    def with_watched(self, tensors: Sequence[torch.Tensor]) -> FusedLinear:
        """Return the same layers with the saved tensors of watched_tensors."""
        if all(map(is_same_memory, tensors, self.watched_tensors)):
            return self
        rest = iter(tensors)
        parts = []
        for part in self.parts:
            found: dict[str, Any] = {name: next(rest) for name in _watched_names(part)}
            parts.append(part._replace(**found))
        return dataclasses.replace(self, parts=tuple(parts))


def rows_for(fused_linear: FusedLinear, like_TI: torch.Tensor) -> torch.Tensor:
    """Return memory for rows, shape (T, I), that product reads without a copy; it may have room for low-rank rows."""
    if not has_augmented(fused_linear, like_TI.shape[0]):
        return torch.empty_like(like_TI, memory_format=torch.contiguous_format)
    return fused_linear.dense.rows.give(like_TI, num_ranks=fused_linear.num_ranks)


def quantised_norm(
    fused_linear: FusedLinear, x_TI: torch.Tensor, weight_I: torch.Tensor, *, form: NormForm
) -> Fp8Rows | None:
    """Return normed rows for product and parameter_gradients, in one kernel; None if they read other rows."""
    if not _quantises(fused_linear):
        return None
    return rms_norm_quantised(x_TI, weight_I, form=form, round_scales_to_power_of_2=True, is_checked=False)


def quantised_gate(fused_linear: FusedLinear, gate_up_TP: torch.Tensor, *, form: GateForm) -> Fp8Rows | None:
    """Return gated rows for product and parameter_gradients, in one kernel; None if they read other rows."""
    if not _quantises(fused_linear):
        return None
    return gate_forward_quantised(gate_up_TP, form=form, round_scales_to_power_of_2=True, is_checked=False)


def quantised_gate_gradients(
    gate_up: FusedLinear, down: FusedLinear, d_act_TF: torch.Tensor, gate_up_TP: torch.Tensor, *, form: GateForm
) -> tuple[Fp8Rows, Fp8Rows | None] | None:
    """Return the gradient of gate_up's output for rows_gradients and parameter_gradients of gate_up, and gated rows for
    those of down, in one kernel; None if they read others.
    """
    parts, base = gate_up.parts, gate_up.base
    # The gradient of a bias is a sum of rows before they are quantised.
    if base is None or not (_quantises(gate_up) and _quantises(down)) or any(part.bias is not None for part in parts):
        return None
    return base.quantised_gate_gradients(parts, d_act_TF, gate_up_TP, form)


def _quantises(fused_linear: FusedLinear) -> bool:
    return fused_linear.base is not None and fused_linear.base.quantises(fused_linear.parts)


def product(
    fused_linear: FusedLinear,
    x_TI: torch.Tensor | Fp8Rows,
    *,
    addend_TO: torch.Tensor | None = None,
    factor: float = 1.0,
) -> tuple[torch.Tensor, ...]:
    """Return ``x @ W^T + bias + scale * (x @ A^T) @ B^T`` of all layers, concatenated; with DoRA scaled by column.

    Rows are 2-D, or the result of quantised_norm or quantised_gate. Those in memory of rows_for are not copied, and the
    room after them is written. addend_TO is for a single layer; only with it there is a factor of the product.

    Returns:
        y_TO: The output.
        low_TR: Low-rank rows of the adapters, ``scale * x @ A^T``; absent without adapters or with quantised rows.

    Cost:
        2 T I O FLOP and those of the adapters; no host sync. All layers share one GEMM if they are packed, in a fused
        buffer, computed by fused_linear.base, or dense with many rows (then copied next to their adapters); else each
        layer has its own. One GEMM without addend_TO also adds the biases; otherwise they cost a pass over the output,
        and so do an adapter outside of the GEMM and addend_TO. DoRA costs one more pass.
    """
    if fused_linear.is_scaled:
        y_TO, *low = unscaled_product(fused_linear, x_TI)
        return scale_output(fused_linear.parts, y_TO, addend_TO=addend_TO, alpha=factor, out=y_TO), *low
    return unscaled_product(fused_linear, x_TI, addend_TO=addend_TO, factor=factor)


def unscaled_product(
    fused_linear: FusedLinear,
    x_TI: torch.Tensor | Fp8Rows,
    *,
    addend_TO: torch.Tensor | None = None,
    factor: float = 1.0,
) -> tuple[torch.Tensor, ...]:
    """Return product without the scale of DoRA."""
    if isinstance(x_TI, Fp8Rows):
        return (_base_product(fused_linear, x_TI, addend_TO=addend_TO, factor=factor),)
    if addend_TO is None and has_augmented(fused_linear, x_TI.shape[0]):
        return _augmented_product(fused_linear, x_TI)
    low_TR = low_rank_rows(fused_linear, x_TI)
    if low_TR is None:
        return (_base_product(fused_linear, x_TI, addend_TO=addend_TO, factor=factor),)
    y_TO = _base_product(fused_linear, x_TI, addend_TO=None, factor=factor)
    added_TR = low_TR if factor == 1.0 else low_TR * factor
    for part, columns, ranks in zip(fused_linear.parts, fused_linear.columns, fused_linear.ranks):
        if part.copy_b_OR is not None:
            piece_TO = y_TO[:, columns]
            add_low_rank(
                piece_TO, added_TR[:, ranks], part.copy_b_OR.t(), residual_TN=addend_TO, out=piece_TO, is_checked=False
            )
    return y_TO, low_TR


def low_rank_rows(fused_linear: FusedLinear, x_TI: torch.Tensor | Fp8Rows) -> torch.Tensor | None:
    """Return the low-rank rows of the adapters with their scales, shape (T, R), rounded once; None without adapters."""
    a_RI = fused_linear.concatenated_a()
    if a_RI is None or isinstance(x_TI, Fp8Rows):
        return None
    low_TR = x_TI.new_empty(x_TI.shape[0], a_RI.shape[0])
    if len(fused_linear.scales) == 1:
        # The usual case: one product.
        return torch.addmm(low_TR, x_TI, a_RI.t(), beta=0.0, alpha=fused_linear.scales[0], out=low_TR)
    for part, ranks in zip(fused_linear.parts, fused_linear.ranks):
        if part.rank:
            out = low_TR[:, ranks]
            torch.addmm(out, x_TI, a_RI[ranks].t(), beta=0.0, alpha=part.scale, out=out)
    return low_TR


def has_augmented(fused_linear: FusedLinear, num_rows: int) -> bool:
    """Return whether adapters are part of the base's GEMM.

    They are if outputs are wider than the rows, and the weights are dequantised anyway or in a fused buffer, or there
    are many rows. A second GEMM for B would read and write the whole output again: 0.4 of 2.4 ms for 17,408 x 5,120 on
    an H200. The products in e4m3 never include adapters.
    """
    if not fused_linear.can_augment:
        return False
    if fused_linear.parts[0].is_packed or fused_linear.has_room(is_below=False):
        return True
    return num_rows >= COPIED_FROM_ROWS_PER_INPUT * fused_linear.num_inputs and not fused_linear.is_trained


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
    pieces = dense_pieces(fused_linear, x_TI)
    if len(pieces) == 1 and addend_TO is None and factor == 1.0:
        return _biased_product(x_TI, pieces[0][1], fused_linear.parts)
    if addend_TO is not None or factor != 1.0:
        ((_, weight_OI),) = pieces
        summand, beta = (x_TI.new_empty(1), 0.0) if addend_TO is None else (addend_TO, 1.0)
        y_TO = torch.addmm(summand, x_TI, weight_OI.t(), beta=beta, alpha=factor)
    else:
        y_TO = x_TI.new_empty(x_TI.shape[0], fused_linear.columns[-1].stop)
        for columns, weight_OI in pieces:
            torch.mm(x_TI, weight_OI.t(), out=y_TO[:, columns])
    _add_bias(y_TO, fused_linear, factor=factor)
    return y_TO


def _augmented_product(fused_linear: FusedLinear, x_TI: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return ``[x | low] @ [W | B]^T``."""
    low_TR = low_rank_rows(fused_linear, x_TI)
    assert low_TR is not None
    rows = fused_linear.dense.rows.with_low(x_TI, low_TR)
    weight_OI = fused_linear.dense.with_adapters(fused_linear.parts, dtype=x_TI.dtype)
    return _biased_product(rows, weight_OI, fused_linear.parts), low_TR


def _biased_product(x_TI: torch.Tensor, weight_OI: torch.Tensor, parts: Sequence[LinearPart]) -> torch.Tensor:
    """Return ``x @ W^T + bias`` of all layers in one GEMM, which adds the bias to its fp32 sums on CUDA."""
    bias_O = join_biases(parts, x_TI)
    return x_TI @ weight_OI.t() if bias_O is None else torch.addmm(bias_O, x_TI, weight_OI.t())


def _add_bias(y_TO: torch.Tensor, fused_linear: FusedLinear, *, factor: float) -> None:
    for part, columns in zip(fused_linear.parts, fused_linear.columns):
        if part.bias is not None:
            y_TO[:, columns].add_(part.bias, alpha=factor)


def dense_pieces(fused_linear: FusedLinear, x: torch.Tensor) -> list[tuple[slice, torch.Tensor]]:
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
