"""Memory with weights next to their adapters, and rows next to their low-rank rows, so that one GEMM reads both.

Axes: T rows, I input columns, O output columns of all layers together, R adapter ranks of all layers together.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_fastft.fused.linear_parts import LinearPart
from lightning_fastft.kernels.block_diagonal.op import MAX_COLUMNS, write_block_diagonal
from lightning_fastft.kernels.nf4_linear.op import dequantise_many, read_params4bit

# Rows of GEMM operands begin at multiples of this many elements.
_ALIGNED_COLUMNS = 8


class PaddedBuffer:
    """Rows with room after each for the low-rank rows of adapters, so that one GEMM reads both without a copy.

    Rows in the memory returned last are recognised by their storage; other rows are copied.
    """

    def __init__(self) -> None:
        self._memory: weakref.ref[torch.UntypedStorage] | None = None
        self._num_columns = 0

    def give(self, like_TI: torch.Tensor, *, num_ranks: int) -> torch.Tensor:
        """Return uninitialised memory for rows like these, with room for the ranks after each."""
        num_rows, self._num_columns = like_TI.shape
        memory = like_TI.new_empty(num_rows, self._num_columns + aligned(num_ranks))
        self._memory = weakref.ref(memory.untyped_storage())
        return memory[:, : self._num_columns]

    def has_room(self, rows_TI: torch.Tensor, *, num_ranks: int) -> bool:
        """Return whether these rows are in the memory returned last, with room for this many ranks."""
        num_columns = rows_TI.shape[1]
        if self._memory is None or num_columns != self._num_columns or rows_TI.storage_offset():
            return False
        return rows_TI.stride() == (num_columns + aligned(num_ranks), 1) and self._memory() is rows_TI.untyped_storage()

    def with_low(self, rows_TI: torch.Tensor, low_TR: torch.Tensor) -> torch.Tensor:
        """Return ``[rows | low]`` with zeros up to an aligned column; rows without room are copied."""
        (num_rows, num_columns), num_ranks = rows_TI.shape, low_TR.shape[1]
        num_whole = num_columns + aligned(num_ranks)
        if self.has_room(rows_TI, num_ranks=num_ranks):
            whole = rows_TI.as_strided((num_rows, num_whole), (num_whole, 1))
        else:
            whole = rows_TI.new_empty(num_rows, num_whole)
            whole[:, :num_columns] = rows_TI
        whole[:, num_columns : num_columns + num_ranks] = low_TR
        if num_columns + num_ranks < num_whole:
            whole[:, num_columns + num_ranks :] = 0.0
        return whole


class FusedWeightBuffer:
    """The weights of one GEMM in memory with room for their adapters, until they are moved back."""

    def __init__(self, weights: Sequence[torch.Tensor], memory: torch.Tensor) -> None:
        # Weak references: neither the weights nor their memory are kept alive.
        self._weights = [weakref.ref(weight) for weight in weights]
        self._memory = StorageWeakRef(memory.untyped_storage())
        self.num_rows, self.num_columns = memory.shape
        self.num_bytes = memory.untyped_storage().nbytes()
        self.addresses = [weight.data_ptr() for weight in weights]
        # The copies of adapters next to the weights, and their versions when they were written.
        self._written: list[tuple[weakref.ref[torch.Tensor], int]] = []

    def must_write(self, copies: Sequence[torch.Tensor], *, are_tracked: bool) -> bool:
        """Return whether these copies are not next to the weights yet; the caller then writes them.

        Args:
            copies: Low-precision copies of the adapters.
            are_tracked: Whether every write to them raises their version counters.
        """
        if copies[0].is_cuda and torch.cuda.is_current_stream_capturing():
            # Each replay of a CUDA graph must write what an optimizer step changes, and the capture writes nothing.
            return True
        written, self._written = self._written, []
        if not are_tracked:
            return True
        self._written = [(weakref.ref(copy), copy._version) for copy in copies]
        return len(written) != len(copies) or any(
            reference() is not copy or version != copy._version for (reference, version), copy in zip(written, copies)
        )

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is in this buffer."""
        return bool(self._memory == StorageWeakRef(tensor.untyped_storage()))

    def is_there(self) -> bool:
        """Return whether a weight is still in the buffer; loading, merging and streaming move weights elsewhere."""
        return any(weight is not None and self.holds(weight) for weight in (reference() for reference in self._weights))

    def give_back(self) -> None:
        """Move the weights that are still in the buffer to separate memory; if memory is short, warn and keep them."""
        for reference in self._weights:
            weight = reference()
            if weight is None or not self.holds(weight):
                continue
            try:
                with torch.inference_mode(mode=False), torch.no_grad():
                    weight.data = weight.data.clone(memory_format=torch.contiguous_format)
            except torch.OutOfMemoryError:
                warnings.warn(
                    f"A weight of shape {tuple(weight.shape)} stays next to its adapter, with a row stride of "
                    f"{weight.stride(0)}, because the device has no memory for a contiguous copy. It computes and "
                    "loads correctly; call .contiguous() on it before you write it with safetensors.",
                    stacklevel=2,
                )


class DenseWeights:
    """Dense weights next to their adapters, as GEMMs read them.

    One scratch buffer per device and dtype holds dequantised weights, or copies of dense weights, while a GEMM reads
    them. Weights in a fused buffer are read without a copy.

    Attributes:
        rows: Rows that GEMMs read.
        gradients: Gradients of outputs that GEMMs read.
    """

    def __init__(self) -> None:
        self.rows, self.gradients = PaddedBuffer(), PaddedBuffer()
        self._buffers: dict[tuple[torch.device, torch.dtype], torch.Tensor] = {}
        # By storage, which tensors on the meta device have too. The parameters own the memory; giving them other memory
        # frees it.
        self._fused: dict[int, FusedWeightBuffer] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        """Drop the buffers from a copy or pickle; a copied model allocates its own."""
        return DenseWeights, ()

    def memory(self) -> list[torch.Tensor]:
        """Return the present buffers; a buffer that is too small is replaced by a larger one."""
        return list(self._buffers.values())

    def gather(
        self,
        parts: Sequence[LinearPart],
        *,
        num_inputs: int,
        dtype: torch.dtype,
        num_extra: int = 0,
        num_extra_rows: int = 0,
    ) -> torch.Tensor:
        """Return the weights of these layers below each other, valid until the next call.

        The shape is (O + num_extra_rows, I + num_extra); the extra rows and columns are uninitialised.
        """
        device = parts[0].weight.device
        num_outputs = sum(part.num_outputs for part in parts)
        num_rows, num_columns = num_outputs + num_extra_rows, num_inputs + num_extra
        buffer = self._buffers.get((device, dtype))
        if buffer is None or buffer.numel() < num_rows * num_columns:
            # A validation may come first, and an inference tensor could not be written in a training step.
            with torch.inference_mode(mode=False):
                buffer = torch.empty(num_rows * num_columns, dtype=dtype, device=device)
            self._buffers[device, dtype] = buffer
        dense = buffer[: num_rows * num_columns].view(num_rows, num_columns)
        outs = dense[:num_outputs, :num_inputs].split([part.num_outputs for part in parts])
        if parts[0].is_packed:
            weights = [read_params4bit(part.weight) for part in parts]
            dequantise_many([weight for weight in weights if weight is not None], outs=outs, is_checked=False)
        else:
            with torch.no_grad():
                for out, part in zip(outs, parts):
                    _copy_rows(out, part.weight)
        return dense

    def with_adapters(self, parts: Sequence[LinearPart], *, dtype: torch.dtype) -> torch.Tensor:
        """Return ``[W | B]``: the weights, then a block-diagonal matrix of the B of each layer.

        One GEMM with it adds the adapters to the base, and one gives the gradients of rows and low-rank rows.
        """
        num_inputs, num_extra = parts[0].num_inputs, aligned(_num_ranks(parts))
        fused = self._fused_of(parts)
        if fused is not None and fused.num_columns >= num_inputs + num_extra:
            dense = _memory_of(parts, fused, (fused.num_rows, num_inputs + num_extra))
            copies = [part.copy_b_OR for part in parts if part.copy_b_OR is not None]
            if not fused.must_write(copies, are_tracked=_are_tracked(parts)):
                return dense
        else:
            dense = self.gather(parts, num_inputs=num_inputs, dtype=dtype, num_extra=num_extra)
        blocks = [dense.new_empty(part.num_outputs, 0) if part.copy_b_OR is None else part.copy_b_OR for part in parts]
        write_block_diagonal(dense[:, num_inputs:], blocks, is_checked=False)
        return dense

    def above_adapter(self, part: LinearPart, a_RI: torch.Tensor) -> torch.Tensor:
        """Return the weight of a layer, A below it, and zeros up to an aligned number of rows.

        One GEMM with it gives the whole gradient of the rows that the layer reads, from those of its output and of the
        low-rank rows.
        """
        num_outputs, num_ranks = part.num_outputs, a_RI.shape[0]
        fused = self._fused_of((part,))
        if fused is not None and fused.num_rows >= num_outputs + aligned(num_ranks):
            dense = _memory_of((part,), fused, (num_outputs + aligned(num_ranks), fused.num_columns))
            if not fused.must_write([a_RI], are_tracked=_are_tracked((part,))):
                return dense
        else:
            dense = self.gather(
                (part,), num_inputs=part.num_inputs, dtype=a_RI.dtype, num_extra_rows=aligned(num_ranks)
            )
        dense[num_outputs : num_outputs + num_ranks] = a_RI
        if num_outputs + num_ranks < len(dense):
            dense[num_outputs + num_ranks :] = 0.0
        return dense

    def fuse_buffer(self, parts: Sequence[LinearPart]) -> FusedWeightBuffer | None:
        """Move frozen dense weights into a fused buffer with room for their adapters.

        The room is for B after the columns, or, for one layer with no more outputs than inputs, for A below the rows.
        Parameters stay the same objects with the same values; their addresses change and, with room for B, their
        strides. A tensor that shared a weight's memory (``weight.data``) no longer does.

        Returns:
            An object that moves them back; None if nothing was moved because weights are packed, trained, sharded or
            views of larger memory, there are no adapters, or the device lacks memory.

        Cost:
            One copy of the weights; memory for the adapters from then on, and for these weights twice during the move.
        """
        weights, num_ranks = [part.weight for part in parts], _num_ranks(parts)
        num_outputs, num_inputs = sum(part.num_outputs for part in parts), parts[0].num_inputs
        is_beside, is_above = can_augment(parts), len(parts) == 1 and num_ranks > 0 and num_inputs >= num_outputs
        if parts[0].is_packed or not (is_beside or is_above) or not all(_has_own_memory(weight) for weight in weights):
            return None
        extra = aligned(num_ranks)
        num_rows, num_columns = (num_outputs, num_inputs + extra) if is_beside else (num_outputs + extra, num_inputs)
        with torch.inference_mode(mode=False), torch.no_grad():
            try:
                # Zeros, because a checkpoint may contain the room.
                memory = torch.zeros(num_rows, num_columns, dtype=weights[0].dtype, device=weights[0].device)
            except torch.OutOfMemoryError:
                return None
            first = 0
            for weight in weights:
                place = memory[first : first + weight.shape[0], :num_inputs]
                _copy_rows(place, weight.data)
                weight.data = place
                first += weight.shape[0]
        found = self._fused[_storage_id(memory)] = FusedWeightBuffer(weights, memory)
        return found

    def has_room_beside(self, parts: Sequence[LinearPart]) -> bool:
        """Return whether these weights are in a fused buffer with room for B of their ranks; takes microseconds."""
        fused = self._fused_of(parts)
        return fused is not None and fused.num_columns >= parts[0].num_inputs + aligned(_num_ranks(parts))

    def has_room_below(self, part: LinearPart) -> bool:
        """Return whether this weight is in a fused buffer with room for A of its rank; takes microseconds."""
        fused = self._fused_of((part,))
        return fused is not None and fused.num_rows >= part.num_outputs + aligned(part.rank)

    def _fused_of(self, parts: Sequence[LinearPart]) -> FusedWeightBuffer | None:
        """Return the fused buffer that weights are in."""
        fused = self._fused.get(_storage_id(parts[0].weight))
        if fused is None or len(parts) != len(fused.addresses):
            return None
        for part, address in zip(parts, fused.addresses):
            if part.weight.data_ptr() != address or part.weight.stride(0) != fused.num_columns:
                return None
        # Freed memory may belong to another weight with the same address, but not with this size.
        return fused if parts[0].weight.untyped_storage().nbytes() == fused.num_bytes else None


def _memory_of(parts: Sequence[LinearPart], fused: FusedWeightBuffer, shape: tuple[int, int]) -> torch.Tensor:
    """Return the first rows and columns of the fused buffer that weights are in.

    As ``.data``, because a write into the room changes no weight and must not change its version counter.
    """
    return parts[0].weight.data.as_strided(shape, (fused.num_columns, 1), 0)


def _are_tracked(parts: Sequence[LinearPart]) -> bool:
    """Return whether every write to the adapters in compute dtype raises their version counters.

    It does for low-precision copies. Masters in the compute dtype are written by optimizers that raise none.
    """
    pairs = [(part.b_OR, part.copy_b_OR) for part in parts]
    return all(master is None or copy is None or master.dtype is not copy.dtype for master, copy in pairs)


def aligned(num_columns: int) -> int:
    """Return the number of columns that these ranks take in a GEMM operand."""
    return -(-num_columns // _ALIGNED_COLUMNS) * _ALIGNED_COLUMNS


def can_augment(parts: Sequence[LinearPart]) -> bool:
    """Return whether adapters have a wide output and few enough ranks for one block-diagonal matrix."""
    is_wide = len(parts) > 1 or parts[0].num_outputs > parts[0].num_inputs
    return is_wide and 0 < _num_ranks(parts) <= MAX_COLUMNS - _ALIGNED_COLUMNS


def _num_ranks(parts: Sequence[LinearPart]) -> int:
    return sum(part.rank for part in parts)


def _storage_id(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _has_own_memory(weight: torch.Tensor) -> bool:
    """Return whether a weight is frozen, unsharded, and as large as its memory."""
    if weight.requires_grad or type(weight.data) is not torch.Tensor or not weight.is_contiguous():
        return False
    return weight.untyped_storage().nbytes() == weight.nbytes


def _copy_rows(out_OI: torch.Tensor, rows_OI: torch.Tensor) -> None:
    """Copy rows, in words of 8 bytes if both are aligned; a copy between other strides moves single elements."""
    per_word = 8 // rows_OI.itemsize
    fits = all(
        rows.stride(1) == 1
        and all(size % per_word == 0 for size in (rows.shape[1], rows.stride(0), rows.storage_offset()))
        for rows in (out_OI, rows_OI)
    )
    if fits:
        out_OI, rows_OI = out_OI.view(torch.int64), rows_OI.view(torch.int64)
    out_OI.copy_(rows_OI)
