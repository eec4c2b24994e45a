"""Linear layers that read the same rows, computed side by side: base weights, dense or in NF4, and their LoRA; forward and gradients without a graph.

Axes: T rows, I input columns, O output columns of all layers together, R adapter ranks of all layers together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from peft.tuners.lora.layer import LoraLayer
from torch import nn

from lightning_fastft.kernels.block_diagonal.op import MAX_COLUMNS, write_block_diagonal
from lightning_fastft.kernels.lora_linear.op import wide_product
from lightning_fastft.kernels.nf4_linear.op import dequantise_many, read_params4bit
from lightning_fastft.models.adapters import ActiveAdapter, read_adapter
from lightning_fastft.models.values import is_linear_point

# What autograd watches of one layer, in this order: weight, bias, A, B.
TENSORS_PER_LAYER = 4
# Rows of a product's operands begin at multiples of as many elements.
_ALIGNED_COLUMNS = 8
# Dense weights are copied next to their adapters from so many rows per input column on. What is saved, writing and reading the output once more in
# the forward and reading its gradient once more in the backward, is 6 bytes per row and output; the copies, one each way, are 8 per input and output.
_COPIED_FROM_ROWS_PER_INPUT = 2


class LinearPart(NamedTuple):
    """One linear layer as it stands in this pass.

    Args:
        base: The layer that holds weight and bias.
        weight: (O, I), or bitsandbytes' packed weight.
        bias: (O,); None for none.
        a_RI: Master of A; None without an adapter.
        b_OR: Master of B.
        narrow_a_RI: A in the dtype of the rows.
        narrow_b_OR: B in the dtype of the rows.
        scale: Factor on the low-rank product.
        num_outputs: O.
        is_packed: The weight is NF4, and frozen.
    """

    base: nn.Module
    weight: torch.Tensor
    bias: torch.Tensor | None
    a_RI: torch.Tensor | None
    b_OR: torch.Tensor | None
    narrow_a_RI: torch.Tensor | None
    narrow_b_OR: torch.Tensor | None
    scale: float
    num_outputs: int
    is_packed: bool

    @property
    def rank(self) -> int:
        """Rank of the adapter; 0 without one."""
        return 0 if self.narrow_a_RI is None else self.narrow_a_RI.shape[0]

    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """Return what autograd watches; a packed weight is never trained."""
        return (None if self.is_packed else self.weight, self.bias, self.a_RI, self.b_OR)


class DenseWeights:
    """One buffer per device and dtype in which packed weights are dense, or dense ones stand beside their adapters, while a product reads them."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[torch.device, torch.dtype], torch.Tensor] = {}

    def __getstate__(self) -> dict[str, Any]:
        """A copied or pickled model makes its own."""
        return vars(DenseWeights())

    def memory(self) -> list[torch.Tensor]:
        """Return the buffers as they are now; one that turns out too small is exchanged for a larger one."""
        return list(self._buffers.values())

    def gather(self, parts: Sequence[LinearPart], *, num_inputs: int, dtype: torch.dtype, num_extra: int = 0) -> torch.Tensor:
        """Return the weights of these layers below each other, shape (O, I + num_extra), valid until the next call; what is extra is not written."""
        device = parts[0].weight.device
        num_outputs, num_columns = sum(part.num_outputs for part in parts), num_inputs + num_extra
        buffer = self._buffers.get((device, dtype))
        if buffer is None or buffer.numel() < num_outputs * num_columns:
            # A tensor of inference mode could not be written outside of it, and a validation may come before the first step.
            with torch.inference_mode(mode=False):
                buffer = torch.empty(num_outputs * num_columns, dtype=dtype, device=device)
            self._buffers[device, dtype] = buffer
        dense = buffer[: num_outputs * num_columns].view(num_outputs, num_columns)
        outs = dense[:, :num_inputs].split([part.num_outputs for part in parts])
        if parts[0].is_packed:
            weights = [read_params4bit(part.weight) for part in parts]
            dequantise_many([weight for weight in weights if weight is not None], outs=outs)
        else:
            with torch.no_grad():
                for out, part in zip(outs, parts):
                    _copy_rows(out, part.weight)
        return dense

    def with_adapters(self, parts: Sequence[LinearPart], *, num_inputs: int, dtype: torch.dtype) -> torch.Tensor:
        """Return ``[W | B]``: the weights, and behind their columns the B of each layer in its rows and in the columns of its ranks, zeros elsewhere.

        One product with it adds the adapters to the base, and one gives the gradient of rows and narrow rows.
        """
        num_ranks = sum(part.rank for part in parts)
        dense = self.gather(parts, num_inputs=num_inputs, dtype=dtype, num_extra=_aligned(num_ranks))
        blocks = [dense.new_empty(part.num_outputs, 0) if part.narrow_b_OR is None else part.narrow_b_OR for part in parts]
        write_block_diagonal(dense[:, num_inputs:], blocks)
        return dense


class BaseWeight(Protocol):
    """The frozen weights of layers that read the same rows, in a format that computes by itself; what stays outside are biases and adapters."""

    def forward_product(self, parts: Sequence[LinearPart], x_TI: torch.Tensor) -> torch.Tensor:
        """Return ``x @ W^T`` of all layers side by side, in the dtype of the rows and in memory of its own."""

    def backward_product(self, parts: Sequence[LinearPart], d_TO: torch.Tensor) -> torch.Tensor:
        """Return ``d @ W``, in the dtype of the rows and in memory of its own."""


class Product(NamedTuple):
    """Output of a product, and the narrow rows of its adapters with their scales, ``scale * x @ A^T``; None without adapters."""

    y_TO: torch.Tensor
    low_TR: torch.Tensor | None


class Joint(NamedTuple):
    """Linear layers that read the same rows.

    Args:
        parts: The layers, in the order of their columns.
        dense: Where packed weights become dense.
        base: What computes the products with the weights; None to compute them in the dtype of the rows.
    """

    parts: tuple[LinearPart, ...]
    dense: DenseWeights
    base: BaseWeight | None = None

    @property
    def num_inputs(self) -> int:
        """Columns of the rows that the layers read."""
        return int(self.parts[0].base.in_features)  # type: ignore[arg-type]

    def tensors(self) -> list[torch.Tensor | None]:
        """Return what autograd watches, TENSORS_PER_LAYER for each layer."""
        return [tensor for part in self.parts for tensor in part.tensors()]

    def watched_tensors(self) -> list[torch.Tensor]:
        """Return what the gradients read and a step or a refresh writes; saved through autograd, so that writing before the backward is an error.

        Frozen weights are not among them: they may be streamed through slots that are written anew.
        """
        return [getattr(part, name) for part in self.parts for name in _watched_names(part)]

    def with_watched(self, tensors: Sequence[torch.Tensor]) -> Joint:
        """Return the same layers with the tensors of watched_tensors as autograd gave them back."""
        rest = iter(tensors)
        parts = []
        for part in self.parts:
            found: dict[str, Any] = {name: next(rest) for name in _watched_names(part)}
            parts.append(part._replace(**found))
        return self._replace(parts=tuple(parts))


def read_part(module: nn.Module, *, dtype: torch.dtype, awaits_copies: bool = False) -> LinearPart | str:
    """Return a linear layer, with the adapter that PEFT hangs around it, as a product can read it now; or why it cannot.

    Served: ``nn.Linear`` in the dtype of the rows and bitsandbytes' NF4, with at most one active plain LoRA without dropout, also merged or disabled.

    Args:
        module: A linear layer, or PEFT's layer around one.
        dtype: Of the rows.
        awaits_copies: An adapter in fp32 is no obstacle: it will have narrow copies before the first call.

    Cost:
        Host work of some microseconds; where an adapter's narrow copy is stale, that copy.
    """
    base: nn.Module = module
    adapter: ActiveAdapter | None = None
    if isinstance(module, LoraLayer):
        found = read_adapter(module, dtype=dtype)
        if isinstance(found, str) and awaits_copies:
            found = read_adapter(module, dtype=torch.float32)
        if isinstance(found, str):
            return found
        base, adapter = module.get_base_layer(), found
    obstacle = _base_obstacle(base, dtype=dtype)
    if obstacle:
        return obstacle
    linear: Any = base
    num_outputs, is_packed = int(linear.out_features), type(linear.weight) is not nn.Parameter
    if adapter is None:
        return LinearPart(linear, linear.weight, linear.bias, None, None, None, None, 0.0, num_outputs, is_packed)
    return LinearPart(linear, linear.weight, linear.bias, *adapter, num_outputs, is_packed)


def rows_for(joint: Joint, like_TI: torch.Tensor) -> torch.Tensor:
    """Return memory for rows, shape (T, I), that product reads where it lies: with room for the narrow rows behind each, where it wants that."""
    num_rows, num_inputs = like_TI.shape
    num_extra = _aligned(sum(part.rank for part in joint.parts)) if _has_augmented(joint, num_rows) else 0
    return like_TI.new_empty(num_rows, num_inputs + num_extra)[:, :num_inputs]


def product(joint: Joint, x_TI: torch.Tensor, *, addend_TO: torch.Tensor | None = None) -> Product:
    """Return ``x @ W^T + bias + scale * (x @ A^T) @ B^T`` of every layer side by side.

    Args:
        joint: The layers.
        x_TI: Rows, 2-D; in memory of rows_for they are not copied, and what lies behind them is written.
        addend_TO: Added within the product of a single layer; None for nothing.

    Cost:
        2 T I O FLOP and those of the adapters; one product for packed layers together, for dense ones where there are many rows, which are copied
        next to their adapters, and where joint.base computes, which costs a pass over the output to add addend_TO; else one per layer; no host
        synchronisation. A product of all layers without addend_TO adds their biases itself; elsewhere they cost a pass over the output.
    """
    parts = joint.parts
    if addend_TO is None and _has_augmented(joint, x_TI.shape[0]):
        return _augmented_product(joint, x_TI)
    y_TO = _base_product(joint, x_TI, addend_TO=addend_TO)
    low_TR = narrow_rows(joint, x_TI)
    if low_TR is not None:
        for part, columns, ranks in zip(parts, _columns(parts), _ranks(parts)):
            if part.narrow_b_OR is not None:
                y_TO[:, columns].addmm_(low_TR[:, ranks], part.narrow_b_OR.T)
    return Product(y_TO, low_TR)


def narrow_rows(joint: Joint, x_TI: torch.Tensor) -> torch.Tensor | None:
    """Return the narrow rows of the adapters with their scales, shape (T, R), rounded once; None without adapters."""
    a_RI = _joint_a(joint.parts)
    if a_RI is None:
        return None
    low_TR = x_TI.new_empty(x_TI.shape[0], a_RI.shape[0])
    groups = [(ranks, part.scale) for part, ranks in zip(joint.parts, _ranks(joint.parts)) if part.rank]
    if len({scale for _, scale in groups}) == 1:
        # The usual case, in one product.
        groups = [(slice(None), groups[0][1])]
    for ranks, scale in groups:
        out = low_TR[:, ranks]
        torch.addmm(out, x_TI, a_RI[ranks].T, beta=0.0, alpha=scale, out=out)
    return low_TR


def rows_gradients(joint: Joint, d_TO: torch.Tensor, *, needs_x: bool) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return the gradient of the rows, None where not needed, and low_rows_gradient's; rows of the first may be any distance apart.

    Cost:
        As input_gradient and low_rows_gradient; where adapters ride in the base's product, one product gives both.
    """
    if not needs_x:
        return None, low_rows_gradient(joint, d_TO)
    d_x_TI, d_low_TR, a_RI = rows_gradients_apart(joint, d_TO)
    return d_x_TI if d_low_TR is None or a_RI is None else d_x_TI.addmm_(d_low_TR, a_RI), d_low_TR


def rows_gradients_apart(joint: Joint, d_TO: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Return the gradient of the rows without that of their adapters, low_rows_gradient's, and A of all layers: ``first + second @ third`` is whole.

    For a caller that adds the last product where it reads the rows next: in memory it costs another pass over them.

    Cost:
        As rows_gradients without that product.
    """
    a_RI = _joint_a(joint.parts)
    if not _has_augmented(joint, d_TO.shape[0]):
        d_low_TR = low_rows_gradient(joint, d_TO)
        return _base_gradient(joint, d_TO), d_low_TR, a_RI
    num_inputs = joint.num_inputs
    d_rows = d_TO @ joint.dense.with_adapters(joint.parts, num_inputs=num_inputs, dtype=d_TO.dtype)
    d_low_TR = torch.cat([d_rows[:, num_inputs:][:, ranks] * part.scale for part, ranks in zip(joint.parts, _ranks(joint.parts)) if part.rank], dim=1)
    return d_rows[:, :num_inputs], d_low_TR, a_RI


def low_rows_gradient(joint: Joint, d_TO: torch.Tensor) -> torch.Tensor | None:
    """Return the gradient of the adapters' narrow rows, with their scales; None without adapters."""
    parts = joint.parts
    num_ranks = sum(part.rank for part in parts)
    if not num_ranks:
        return None
    d_low_TR = d_TO.new_empty(d_TO.shape[0], num_ranks)
    for part, columns, ranks in zip(parts, _columns(parts), _ranks(parts)):
        if part.narrow_b_OR is not None:
            out = d_low_TR[:, ranks]
            torch.addmm(out, d_TO[:, columns], part.narrow_b_OR, beta=0.0, alpha=part.scale, out=out)
    return d_low_TR


def input_gradient(joint: Joint, d_TO: torch.Tensor, d_low_TR: torch.Tensor | None) -> torch.Tensor:
    """Return the gradient of the rows.

    Args:
        joint: The layers.
        d_TO: Gradient of the output.
        d_low_TR: Of low_rows_gradient.

    Cost:
        2 T I O FLOP and those of the adapters; no host synchronisation.
    """
    d_x_TI, a_RI = _base_gradient(joint, d_TO), _joint_a(joint.parts)
    return d_x_TI if d_low_TR is None or a_RI is None else d_x_TI.addmm_(d_low_TR, a_RI)


def parameter_gradients(
    joint: Joint, x_TI: torch.Tensor, d_TO: torch.Tensor, low_TR: torch.Tensor | None, d_low_TR: torch.Tensor | None, *, needs: Sequence[bool]
) -> list[torch.Tensor | None]:
    """Return the gradients of Joint.tensors in the dtypes of the parameters; None where not needed.

    Args:
        joint: The layers.
        x_TI: Rows that the product read.
        d_TO: Gradient of its output.
        low_TR: Narrow rows that the product returned.
        d_low_TR: Of low_rows_gradient.
        needs: Which are needed, in the order of Joint.tensors.

    Cost:
        2 T I FLOP per rank and trained column; no host synchronisation.
    """
    parts, found = joint.parts, []
    d_a = None
    if any(needs[2::TENSORS_PER_LAYER]):
        assert d_low_TR is not None
        # One product for all layers: each gradient is a piece of rows of it.
        d_a = wide_product(d_low_TR.T, x_TI, dtype=_master_dtype(parts))
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


def _base_obstacle(base: nn.Module, *, dtype: torch.dtype) -> str:
    """Return why a base layer cannot be read; empty where it can."""
    weight, name = getattr(base, "weight", None), type(base).__name__
    if base._forward_hooks or base._forward_pre_hooks or base._backward_hooks or base._backward_pre_hooks:
        return f"{name} has hooks"
    if "forward" in vars(base):
        return f"{name} has a forward of its own"
    if isinstance(base, nn.Linear) and (type(base).forward is nn.Linear.forward or is_linear_point(base)) and type(weight) is nn.Parameter:
        return "" if weight.dtype is dtype else f"{name} holds {weight.dtype} for rows in {dtype}"
    if type(weight).__name__ != "Params4bit":
        return f"{name} is no plain linear layer"
    if weight is None or read_params4bit(weight) is None:
        return f"{name} holds no NF4 in blocks of 64"
    compute_dtype = getattr(base, "compute_dtype", None)
    is_dtype = compute_dtype in (None, dtype) and weight.quant_state.dtype is dtype  # type: ignore[union-attr]
    is_wide = base.in_features % 64 == 0  # type: ignore[operator]
    return "" if is_dtype and is_wide else f"{name} computes in {compute_dtype or weight.quant_state.dtype} on {base.in_features} columns"  # type: ignore[union-attr]


def _has_augmented(joint: Joint, num_rows: int) -> bool:
    """Whether adapters ride in the base's product: where several layers share the rows, and their weights are made dense anyway or rows are many.

    A second product for B alone would read and write the whole output again: 0.4 of 2.4 ms for 17,408 x 5,120 on an H200. A single layer with a
    residual or a long sum gains nothing. Weights that compute in a format of their own leave adapters in theirs.
    """
    parts = joint.parts
    if joint.base is not None or len(parts) == 1 or not 0 < sum(part.rank for part in parts) <= MAX_COLUMNS - _ALIGNED_COLUMNS:
        return False
    if parts[0].is_packed:
        return True
    return num_rows >= _COPIED_FROM_ROWS_PER_INPUT * joint.num_inputs and not any(part.weight.requires_grad for part in parts)


def _copy_rows(out_OI: torch.Tensor, rows_OI: torch.Tensor) -> None:
    """Copy rows, as words of 8 bytes where both lie so: between different strides a copy moves element by element."""
    per_word = 8 // rows_OI.itemsize
    fits = all(
        rows.stride(1) == 1 and all(size % per_word == 0 for size in (rows.shape[1], rows.stride(0), rows.storage_offset()))
        for rows in (out_OI, rows_OI)
    )
    if fits:
        out_OI, rows_OI = out_OI.view(torch.int64), rows_OI.view(torch.int64)
    out_OI.copy_(rows_OI)


def _base_product(joint: Joint, x_TI: torch.Tensor, *, addend_TO: torch.Tensor | None) -> torch.Tensor:
    """Return ``x @ W^T + bias`` of every layer side by side, and what is added to that of a single layer."""
    pieces = [] if joint.base is not None else _dense_pieces(joint, x_TI)
    if len(pieces) == 1 and addend_TO is None:
        return _biased_product(x_TI, pieces[0][1], joint.parts)
    if joint.base is not None:
        y_TO = joint.base.forward_product(joint.parts, x_TI)
        if addend_TO is not None:
            y_TO.add_(addend_TO)
    elif addend_TO is not None:
        ((_, weight_OI),) = pieces
        y_TO = torch.addmm(addend_TO, x_TI, weight_OI.T)
    else:
        y_TO = x_TI.new_empty(x_TI.shape[0], sum(part.num_outputs for part in joint.parts))
        for columns, weight_OI in pieces:
            torch.mm(x_TI, weight_OI.T, out=y_TO[:, columns])
    _add_bias(y_TO, joint.parts)
    return y_TO


def _base_gradient(joint: Joint, d_TO: torch.Tensor) -> torch.Tensor:
    """Return ``d @ W`` of every layer, summed."""
    if joint.base is not None:
        return joint.base.backward_product(joint.parts, d_TO)
    d_x_TI: torch.Tensor | None = None
    for columns, weight_OI in _dense_pieces(joint, d_TO):
        d_piece = d_TO[:, columns]
        d_x_TI = d_piece @ weight_OI if d_x_TI is None else d_x_TI.addmm_(d_piece, weight_OI)
    assert d_x_TI is not None
    return d_x_TI


def _augmented_product(joint: Joint, x_TI: torch.Tensor) -> Product:
    """Return ``[x | low] @ [W | B]^T``."""
    parts, (num_rows, num_inputs) = joint.parts, x_TI.shape
    num_ranks = sum(part.rank for part in parts)
    num_columns = num_inputs + _aligned(num_ranks)
    if x_TI.stride() == (num_columns, 1) and x_TI.storage_offset() == 0 and x_TI.untyped_storage().nbytes() == num_rows * num_columns * x_TI.itemsize:
        rows = x_TI.as_strided((num_rows, num_columns), (num_columns, 1))
    else:
        rows = x_TI.new_empty(num_rows, num_columns)
        rows[:, :num_inputs] = x_TI
    rows[:, num_inputs + num_ranks :] = 0.0
    low_TR = narrow_rows(joint, x_TI)
    assert low_TR is not None
    rows[:, num_inputs : num_inputs + num_ranks] = low_TR
    return Product(_biased_product(rows, joint.dense.with_adapters(parts, num_inputs=num_inputs, dtype=x_TI.dtype), parts), low_TR)


def _aligned(num_columns: int) -> int:
    return -(-num_columns // _ALIGNED_COLUMNS) * _ALIGNED_COLUMNS


def _biased_product(x_TI: torch.Tensor, weight_OI: torch.Tensor, parts: Sequence[LinearPart]) -> torch.Tensor:
    """Return ``x @ W^T + bias`` of all layers in one product; on CUDA it adds the bias to its fp32 sums, in place of another pass over the output."""
    if all(part.bias is None for part in parts):
        return x_TI @ weight_OI.T
    # As bitsandbytes does, a bias takes the dtype of the rows.
    biases = [x_TI.new_zeros(part.num_outputs) if part.bias is None else part.bias.to(x_TI.dtype) for part in parts]
    return torch.addmm(biases[0] if len(biases) == 1 else torch.cat(biases), x_TI, weight_OI.T)


def _add_bias(y_TO: torch.Tensor, parts: Sequence[LinearPart]) -> None:
    for part, columns in zip(parts, _columns(parts)):
        if part.bias is not None:
            y_TO[:, columns] += part.bias


def _dense_pieces(joint: Joint, x: torch.Tensor) -> list[tuple[slice, torch.Tensor]]:
    """Return weights as they lie: their columns of the output, and the weight as (O, I)."""
    parts = joint.parts
    if parts[0].is_packed:
        return [(slice(None), joint.dense.gather(parts, num_inputs=joint.num_inputs, dtype=x.dtype))]
    return [(columns, part.weight) for columns, part in zip(_columns(parts), parts)]


def join(parts: Sequence[LinearPart | str], dense: DenseWeights) -> Joint | str:
    """Return layers that read the same rows as one product, or why they cannot be one."""
    found = []
    for part in parts:
        if isinstance(part, str):
            return part
        found.append(part)
    if len({part.is_packed for part in found}) > 1:
        return "dense and packed layers side by side"
    if len({part.a_RI.dtype for part in found if part.a_RI is not None}) > 1:
        return "adapters in several dtypes side by side"
    return Joint(tuple(found), dense)


def _watched_names(part: LinearPart) -> list[str]:
    trained = ["weight"] if part.weight.requires_grad else []
    return trained if part.narrow_a_RI is None else [*trained, "narrow_a_RI", "narrow_b_OR"]


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
    factors = [part.narrow_a_RI for part in parts if part.narrow_a_RI is not None]
    if not factors:
        return None
    return factors[0] if len(factors) == 1 else torch.cat(factors)


def _master_dtype(parts: Sequence[LinearPart]) -> torch.dtype:
    return next(part.a_RI.dtype for part in parts if part.a_RI is not None)
