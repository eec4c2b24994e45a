"""Linear layers that read the same rows, computed side by side: base weights, dense or in NF4, and their LoRA; forward and gradients without a graph.

Axes: T rows, I input columns, O output columns of all layers together, R adapter ranks of all layers together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from peft.tuners.lora.layer import LoraLayer
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import WeakIdKeyDictionary

from lightning_fastft.kernels.block_diagonal.op import MAX_COLUMNS, write_block_diagonal
from lightning_fastft.kernels.lora_linear.op import wide_product
from lightning_fastft.kernels.low_rank_add.op import add_low_rank
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


class _Room(NamedTuple):
    """Memory that weights share with their adapters: its rows and columns, and the row in which a weight begins."""

    num_rows: int
    num_columns: int
    first_row: int


class DenseWeights:
    """Where products find weights together with their adapters.

    One buffer per device and dtype in which packed weights become dense, and into which dense ones are copied, while a product reads them; dense ones
    that were settled are read where they lie.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[torch.device, torch.dtype], torch.Tensor] = {}
        # By parameter. The memory is the parameter's own: whoever gives it other memory frees this.
        self._rooms: Any = WeakIdKeyDictionary()
        # Of the rows that were last given out with room behind each.
        self._wide_rows: Any = None

    def __reduce__(self) -> tuple[Any, ...]:
        """A copied or pickled model makes its own."""
        return DenseWeights, ()

    def memory(self) -> list[torch.Tensor]:
        """Return the buffers as they are now; one that turns out too small is exchanged for a larger one."""
        return list(self._buffers.values())

    def gather(
        self, parts: Sequence[LinearPart], *, num_inputs: int, dtype: torch.dtype, num_extra: int = 0, num_extra_rows: int = 0
    ) -> torch.Tensor:
        """Return the weights of these layers below each other, valid until the next call.

        The shape is (O + num_extra_rows, I + num_extra); what is extra is not written.
        """
        device = parts[0].weight.device
        num_outputs = sum(part.num_outputs for part in parts)
        num_rows, num_columns = num_outputs + num_extra_rows, num_inputs + num_extra
        buffer = self._buffers.get((device, dtype))
        if buffer is None or buffer.numel() < num_rows * num_columns:
            # A tensor of inference mode could not be written outside of it, and a validation may come before the first step.
            with torch.inference_mode(mode=False):
                buffer = torch.empty(num_rows * num_columns, dtype=dtype, device=device)
            self._buffers[device, dtype] = buffer
        dense = buffer[: num_rows * num_columns].view(num_rows, num_columns)
        outs = dense[:num_outputs, :num_inputs].split([part.num_outputs for part in parts])
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
        num_extra = _aligned(sum(part.rank for part in parts))
        settled = self.settled(parts)
        if settled is not None and settled.shape[1] >= num_inputs + num_extra:
            dense = settled[:, : num_inputs + num_extra]
        else:
            dense = self.gather(parts, num_inputs=num_inputs, dtype=dtype, num_extra=num_extra)
        blocks = [dense.new_empty(part.num_outputs, 0) if part.narrow_b_OR is None else part.narrow_b_OR for part in parts]
        write_block_diagonal(dense[:, num_inputs:], blocks)
        return dense

    def above_adapter(self, part: LinearPart, a_RI: torch.Tensor, *, num_inputs: int) -> torch.Tensor:
        """Return the weight of a layer, and A below it, zeros below that up to an aligned number of rows.

        One product with it gives the whole gradient of the rows that the layer reads, from that of its output and that of the narrow rows behind it.
        """
        num_ranks = a_RI.shape[0]
        num_rows = part.num_outputs + _aligned(num_ranks)
        settled = self.settled((part,))
        if settled is not None and settled.shape[0] >= num_rows:
            dense = settled[:num_rows]
        else:
            dense = self.gather((part,), num_inputs=num_inputs, dtype=a_RI.dtype, num_extra_rows=_aligned(num_ranks))
        dense[part.num_outputs : part.num_outputs + num_ranks] = a_RI
        dense[part.num_outputs + num_ranks :] = 0.0
        return dense

    def rows_with_room(self, like_TD: torch.Tensor, num_extra: int) -> torch.Tensor:
        """Return memory for rows like these, with room behind each that ``with_room`` finds again, also behind autograd."""
        memory = like_TD.new_empty(like_TD.shape[0], like_TD.shape[1] + num_extra)
        self._wide_rows = StorageWeakRef(memory.untyped_storage())
        return memory[:, : like_TD.shape[1]]

    def with_room(self, rows_TD: torch.Tensor, num_extra: int) -> torch.Tensor | None:
        """Return rows together with the room behind each, if they are those that were last given out and lie there as they did; else None."""
        num_rows, num_columns = rows_TD.shape[0], rows_TD.shape[1] + num_extra
        if self._wide_rows is None or rows_TD.stride() != (num_columns, 1) or rows_TD.storage_offset():
            return None
        is_own = self._wide_rows == StorageWeakRef(rows_TD.untyped_storage())
        return rows_TD.as_strided((num_rows, num_columns), (num_columns, 1)) if is_own else None

    def settle(self, parts: Sequence[LinearPart]) -> Callable[[], None] | None:
        """Move frozen dense weights into memory that has room for their adapters: beside B, or those of one layer no wider than its rows above A.

        Parameters stay the same objects with the same values; what changes is where they lie and, beside B, how far apart their rows are.

        Returns:
            What moves them back into memory of their own; None where nothing was moved: weights are packed, trained, sharded, views of other
            memory, or without adapters.

        Cost:
            One copy of the weights; memory for the adapters for good, and for these weights twice while they are moved.
        """
        weights, num_ranks = [part.weight for part in parts], sum(part.rank for part in parts)
        num_outputs, num_inputs = sum(part.num_outputs for part in parts), int(parts[0].base.in_features)  # type: ignore[arg-type]
        is_beside, is_above = _ride_along(parts), len(parts) == 1 and num_ranks > 0 and num_inputs >= num_outputs
        if parts[0].is_packed or not (is_beside or is_above) or not all(_has_own_memory(weight) for weight in weights):
            return None
        extra = _aligned(num_ranks)
        num_rows, num_columns = (num_outputs, num_inputs + extra) if is_beside else (num_outputs + extra, num_inputs)
        memory = torch.empty(num_rows, num_columns, dtype=weights[0].dtype, device=weights[0].device)
        first = 0
        for weight in weights:
            place = memory[first : first + weight.shape[0], :num_inputs]
            _copy_rows(place, weight.data)
            weight.data = place
            self._rooms[weight] = _Room(num_rows, num_columns, first)
            first += weight.shape[0]

        def give_back() -> None:
            if self.settled(parts) is not None:
                for weight in weights:
                    weight.data = weight.data.clone(memory_format=torch.contiguous_format)
            for weight in weights:
                self._rooms.pop(weight, None)

        return give_back

    def settled(self, parts: Sequence[LinearPart]) -> torch.Tensor | None:
        """Return the memory in which these weights lie with room for their adapters; None where they lie elsewhere, or do so by now."""
        first = parts[0].weight
        room = self._rooms.get(first)
        if room is None or first.untyped_storage().nbytes() != room.num_rows * room.num_columns * first.itemsize:
            return None
        for part in parts:
            weight, own = part.weight, self._rooms.get(part.weight)
            is_there = own is not None and weight.stride(0) == room.num_columns and weight.storage_offset() == own.first_row * room.num_columns
            if not is_there or weight.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
                return None
        return first.detach().as_strided((room.num_rows, room.num_columns), (room.num_columns, 1), 0)


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


def gradients_for(joint: Joint, like_TO: torch.Tensor) -> torch.Tensor:
    """Return memory for gradients of a layer's output, shape (T, O), that rows_gradients reads where it lies, its narrow rows behind each row.

    Only what was asked for last has this room; a gradient that came another way, or for a layer of another rank, is copied. Several layers stand for
    one with as many ranks as any of them.
    """
    return joint.dense.rows_with_room(like_TO, _aligned(max(part.rank for part in joint.parts)))


def product(joint: Joint, x_TI: torch.Tensor, *, addend_TO: torch.Tensor | None = None) -> Product:
    """Return ``x @ W^T + bias + scale * (x @ A^T) @ B^T`` of every layer side by side.

    Args:
        joint: The layers.
        x_TI: Rows, 2-D; in memory of rows_for they are not copied, and what lies behind them is written.
        addend_TO: Added within the product of a single layer; None for nothing.

    Cost:
        2 T I O FLOP and those of the adapters; one product for packed layers together, for dense ones where there are many rows, which are copied
        next to their adapters, and where joint.base computes; else one per layer; no host synchronisation. A product of all layers without addend_TO
        adds their biases itself; elsewhere they cost a pass over the output, and so does an adapter outside of the product, addend_TO included.
    """
    if addend_TO is None and _has_augmented(joint, x_TI.shape[0]):
        return _augmented_product(joint, x_TI)
    low_TR = narrow_rows(joint, x_TI)
    if low_TR is None:
        return Product(_base_product(joint, x_TI, addend_TO=addend_TO), None)
    y_TO = _base_product(joint, x_TI, addend_TO=None)
    for part, columns, ranks in zip(joint.parts, _columns(joint.parts), _ranks(joint.parts)):
        if part.narrow_b_OR is not None:
            piece_TO = y_TO[:, columns]
            add_low_rank(piece_TO, low_TR[:, ranks], part.narrow_b_OR.T, residual_TN=addend_TO, out=piece_TO)
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
        2 T I O FLOP and those of the adapters; where adapters ride in the base's product, one product gives both.
    """
    if not needs_x:
        return None, low_rows_gradient(joint, d_TO)
    d_x_TI, d_low_TR, a_RI = rows_gradients_apart(joint, d_TO)
    if d_low_TR is not None and a_RI is not None:
        add_low_rank(d_x_TI, d_low_TR, a_RI, out=d_x_TI)
    return d_x_TI, d_low_TR


def rows_gradients_apart(joint: Joint, d_TO: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Return the gradient of the rows, perhaps without that of their adapters, low_rows_gradient's, and A of all layers.

    ``first + second @ third`` is whole: for a caller that adds the product where it reads the rows next, because in memory it costs another pass over
    them. The third is None where the first is whole.

    Cost:
        As rows_gradients without that product. For a single layer that narrows its rows by far, a copy of d_TO, where there is no room behind its
        rows, and of a dense weight that is not settled: less than that pass.
    """
    num_rows, num_inputs = d_TO.shape[0], joint.num_inputs
    if _has_appended(joint, d_TO):
        d_low_TR = low_rows_gradient(joint, d_TO)
        assert d_low_TR is not None
        return _appended_gradient(joint, d_TO, d_low_TR), d_low_TR, None
    a_RI = _joint_a(joint.parts)
    if not _has_augmented(joint, num_rows):
        d_low_TR = low_rows_gradient(joint, d_TO)
        return _base_gradient(joint, d_TO), d_low_TR, a_RI
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


def parameter_gradients(
    joint: Joint,
    x_TI: torch.Tensor,
    d_TO: torch.Tensor,
    low_TR: torch.Tensor | None,
    d_low_TR: torch.Tensor | None,
    *,
    needs: Sequence[bool],
    factor_I: torch.Tensor | None = None,
) -> list[torch.Tensor | None]:
    """Return the gradients of Joint.tensors in the dtypes of the parameters; None where not needed.

    Args:
        joint: The layers.
        x_TI: Rows that the product read.
        d_TO: Gradient of its output.
        low_TR: Narrow rows that the product returned.
        d_low_TR: Of low_rows_gradient.
        needs: Which are needed, in the order of Joint.tensors.
        factor_I: What the columns of x_TI are multiplied with in the rows that the product read; None for 1. Not where a weight is needed.

    Cost:
        2 T I FLOP per rank and trained column; no host synchronisation.
    """
    parts, found = joint.parts, []
    d_a = None
    if any(needs[2::TENSORS_PER_LAYER]):
        assert d_low_TR is not None
        # One product for all layers: each gradient is a piece of rows of it.
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
    """Whether adapters ride in the base's product: where outputs are wider than the rows, and weights are made dense anyway, settled, or rows many.

    A second product for B alone would read and write the whole output again: 0.4 of 2.4 ms for 17,408 x 5,120 on an H200. Weights that compute in a
    format of their own leave adapters in theirs.
    """
    parts = joint.parts
    if joint.base is not None or not _ride_along(parts):
        return False
    if parts[0].is_packed or joint.dense.settled(parts) is not None:
        return True
    return num_rows >= _COPIED_FROM_ROWS_PER_INPUT * joint.num_inputs and not any(part.weight.requires_grad for part in parts)


def _ride_along(parts: Sequence[LinearPart]) -> bool:
    """Whether there are adapters of a wide output, and no more ranks than one matrix of them takes."""
    is_wide = len(parts) > 1 or parts[0].num_outputs > int(parts[0].base.in_features)  # type: ignore[arg-type]
    return is_wide and 0 < sum(part.rank for part in parts) <= MAX_COLUMNS - _ALIGNED_COLUMNS


def _has_appended(joint: Joint, d_TO: torch.Tensor) -> bool:
    """Whether the gradient of the rows is one product with the adapter below the weight.

    What is saved, the addition where those rows are read next, was 0.6 ms for 32,768 x 14,336 on an H200. The copies, where they are needed, move 4
    bytes per row and output, and per input and output where weights are neither packed nor settled: 0.2 ms with 4,096 outputs.
    """
    parts = joint.parts
    if joint.base is not None or len(parts) > 1 or not parts[0].rank:
        return False
    has_place = parts[0].is_packed or joint.dense.settled(parts) is not None
    if not _narrows_by_far(parts[0]):
        return has_place and joint.dense.with_room(d_TO, _aligned(parts[0].rank)) is not None
    return has_place or (d_TO.shape[0] >= _COPIED_FROM_ROWS_PER_INPUT * parts[0].num_outputs and not parts[0].weight.requires_grad)


def _narrows_by_far(part: LinearPart) -> bool:
    return int(part.base.in_features) >= 2 * part.num_outputs  # type: ignore[arg-type]


def _has_own_memory(weight: torch.Tensor) -> bool:
    """Whether a weight is frozen, whole, and nothing else lies in its memory."""
    if weight.requires_grad or type(weight.data) is not torch.Tensor or not weight.is_contiguous():
        return False
    return weight.untyped_storage().nbytes() == weight.nbytes


def _appended_gradient(joint: Joint, d_TO: torch.Tensor, d_low_TR: torch.Tensor) -> torch.Tensor:
    """Return ``[d | d_low] @ [W; A]``."""
    (part,), (num_rows, num_outputs), num_ranks = joint.parts, d_TO.shape, d_low_TR.shape[1]
    rows = joint.dense.with_room(d_TO, _aligned(num_ranks))
    if rows is None:
        rows = d_TO.new_empty(num_rows, num_outputs + _aligned(num_ranks))
        rows[:, :num_outputs] = d_TO
    rows[:, num_outputs : num_outputs + num_ranks] = d_low_TR
    rows[:, num_outputs + num_ranks :] = 0.0
    assert part.narrow_a_RI is not None
    return rows @ joint.dense.above_adapter(part, part.narrow_a_RI, num_inputs=joint.num_inputs)


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
