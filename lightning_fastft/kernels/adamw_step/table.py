"""The table of tensors that one AdamW step updates: their addresses on the device, and what they must fulfil.

Axes: R rows of the table, one per tensor; A kinds of address; C chunks of all tensors, at most ``CHUNK`` elements each.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from typing import NamedTuple

import torch

from lightning_fastft.core.errors import OptionError
from lightning_fastft.core.shards import local_values
from lightning_fastft.kernels.adamw_step import codes
from lightning_fastft.kernels.adamw_step.rows import TableRow, check_gradient, check_rows

# 4096 elements on 8 warps: 16 of each matrix per thread, all in flight at once; a multiple of the blocks of 8-bit
# moments. Not yet measured; candidates: python -m benchmarks.row_kernels --only adamw_step --tiles.
CHUNK = 4096
# Bytes of a thread's vector access; a multiple of this many elements is aligned in any dtype.
ALIGNMENT = 16

_GRADIENT_OF, _DTYPE_OF = operator.attrgetter("grad"), operator.attrgetter("dtype")


class TableGroup(NamedTuple):
    """Chunks of all rows with one combination of dtypes, for one launch: the row of each chunk, and its index in the
    row; ``stepped`` has those of the rows that are stepped.
    """

    param_dtype: torch.dtype
    grad_dtype: torch.dtype
    copy_dtype: torch.dtype | None
    average_dtype: torch.dtype
    rows: tuple[int, ...]
    row_C: torch.Tensor
    index_C: torch.Tensor
    stepped: tuple[torch.Tensor, torch.Tensor]


class TensorTable:
    """The tensors of an optimizer step as addresses on their device, built once.

    The table holds the tensors, but no gradient: each call reads ``owner.grad`` again, so gradients may be freed and
    allocated again between steps. If an address has changed, a new table is copied from pinned memory that is allocated
    for this copy. PyTorch's pinned allocator reuses that memory only after the copy (by event), and the device
    allocator reuses the old table in stream order. So no memory in use is overwritten, and there is no host sync. All
    calls on a table must therefore be on one stream, or on streams that the caller has ordered.

    Args:
        params: Masters, updated in place. Any shape; fp32 or bf16; contiguous; all on one device.
        exp_avgs: First moments. Shapes of params; fp32, or codes of the signed map in uint8; contiguous.
        exp_avg_sqs: Second moments. Shapes of params; fp32, or codes of the unsigned map in uint8; contiguous.
        copies: Low-precision copies for compute, bf16 or fp16, contiguous, or None for a tensor without one; None if no
            tensor has one.
        owners: Tensors whose ``grad`` is the gradient. Shapes of params; fp32, bf16 or fp16. None for params
            themselves. A DTensor is read as the shard of this rank, and so is its gradient.
        exp_avg_absmaxs: The largest magnitude of each block of 256 values of 8-bit first moments, B numbers of any
            shape, fp32, contiguous; None for a tensor with fp32 moments, and None if all tensors have fp32 moments.
        exp_avg_sq_absmaxs: The same for second moments.
        numbers: Number of each tensor for stochastic rounding; None for 0.
        firsts: Place of the first element of each row in its whole tensor, a multiple of 8; None for 0.
        starts: First element of a row that is a piece of its owner; None for whole ones.

    Raises:
        ShapeError: A shape, dtype, device or layout is wrong, tensors that are written share memory, or a gradient
            cannot be read.
        OptionError: The lists have different lengths.

    Cost:
        9 numbers of 8 bytes per tensor and 2 of 4 bytes per chunk of 4096 elements on the device; sorts the tensors
        once; no host sync.

    Source:
        own

    Example:
        >>> param = torch.nn.Parameter(torch.ones(5000))
        >>> table = TensorTable([param], exp_avgs=[torch.zeros(5000)], exp_avg_sqs=[torch.zeros(5000)])
        >>> table.num_chunks
        2
    """

    def __init__(
        self,
        params: Sequence[torch.Tensor],
        *,
        exp_avgs: Sequence[torch.Tensor],
        exp_avg_sqs: Sequence[torch.Tensor],
        copies: Sequence[torch.Tensor | None] | None = None,
        owners: Sequence[torch.Tensor] | None = None,
        exp_avg_absmaxs: Sequence[torch.Tensor | None] | None = None,
        exp_avg_sq_absmaxs: Sequence[torch.Tensor | None] | None = None,
        numbers: Sequence[int] | None = None,
        firsts: Sequence[int] | None = None,
        starts: Sequence[int | None] | None = None,
    ) -> None:
        nothing, zeros = [None] * len(params), [0] * len(params)
        lists: dict[str, Sequence[object]] = {
            "params": params,
            "exp_avgs": exp_avgs,
            "exp_avg_sqs": exp_avg_sqs,
            "copies": nothing if copies is None else copies,
            "owners": params if owners is None else owners,
            "exp_avg_absmaxs": nothing if exp_avg_absmaxs is None else exp_avg_absmaxs,
            "exp_avg_sq_absmaxs": nothing if exp_avg_sq_absmaxs is None else exp_avg_sq_absmaxs,
            "numbers": zeros if numbers is None else numbers,
            "firsts": zeros if firsts is None else firsts,
            "starts": nothing if starts is None else starts,
        }
        lengths = {name: len(entries) for name, entries in lists.items()}
        if len(set(lengths.values())) != 1:
            raise OptionError(f"Every list must have one entry per tensor, got {lengths}.")
        self.rows = tuple(TableRow(*row) for row in zip(*lists.values()))  # type: ignore[arg-type]
        check_rows(self.rows)
        # Collected once, because every step reads them: the tensors that a step writes, per row and all together, the
        # masters, and the tensors with the gradients.
        self.written = [row.written() for row in self.rows]
        self._all_written = list(itertools.chain.from_iterable(self.written))
        self._params, self._owners = [row.param for row in self.rows], [row.owner for row in self.rows]
        self.device = torch.device("cpu")
        self.groups: tuple[TableGroup, ...] = ()
        self.aligned: tuple[bool, ...] = ()
        self._fits: list[bool] = []
        self._layout: list[object] = []
        self._grad_layout: list[object] | None = None
        self._grad_addresses: list[int] = []
        self.refresh()

    @property
    def num_chunks(self) -> int:
        """Return the number of chunks of all tensors."""
        return sum(len(group.row_C) for group in self.groups)

    def gradients(self) -> list[torch.Tensor | None]:
        """Return the gradient of each row; None for a row without gradient.

        Raises:
            ShapeError: A gradient has another size or dtype, is not contiguous, or is not a plain tensor on the device.
        """
        found: list[torch.Tensor | None] = []
        for index, row in enumerate(self.rows):
            grad = row.owner.grad
            if grad is not None:
                grad = check_gradient(index, grad, row)
            found.append(grad)
        return found

    def refresh(self, *, only_gradients: bool = False) -> None:
        """Copy the addresses that have changed to the device, without a host sync.

        Args:
            only_gradients: Skip the addresses of what a step writes, for a caller that reads gradients alone.

        Raises:
            ShapeError: The table no longer supports a tensor.

        Cost:
            About 1 microsecond of host time per tensor, measured with 392 tensors; copies 8 bytes per tensor if
            gradients have moved.
        """
        grads: list[torch.Tensor | None] = list(map(_GRADIENT_OF, self._owners))
        grad_layout: list[object] = [None if grad is None else _describe_gradient(grad) for grad in grads]
        is_new = grad_layout != self._grad_layout
        layout = self._layout if only_gradients and not is_new else self._read_layout()
        is_new = is_new or layout != self._layout
        if is_new:
            # A tensor may have changed since the table was built. Gradients like those before have passed the checks.
            grads = self.gradients()
            check_rows(self.rows)
            self._build(grads)
        addresses = [
            0 if grad is None else _address(local_values(grad), row.start) for grad, row in zip(grads, self.rows)
        ]
        if is_new or addresses != self._grad_addresses:
            self.grad_address_R = _send(torch.tensor(addresses, dtype=torch.int64), self.device)
            self.aligned = tuple(
                all(self._fits[row] and addresses[row] % ALIGNMENT == 0 for row in group.rows) for group in self.groups
            )
        # Set last, so that a table whose rebuild failed does not count as current.
        self._layout, self._grad_layout, self._grad_addresses = layout, grad_layout, addresses

    def _build(self, grads: Sequence[torch.Tensor | None]) -> None:
        """Copy the addresses, sizes and chunks of all rows to the device."""
        self.device = self.rows[0].param.device if self.rows else self.device
        columns = [
            [row.param.data_ptr() for row in self.rows],
            [row.exp_avg.data_ptr() if row.is_stepped else 0 for row in self.rows],
            [row.exp_avg_sq.data_ptr() if row.is_stepped else 0 for row in self.rows],
            [0 if row.copy is None else row.copy.data_ptr() for row in self.rows],
            [row.param.numel() for row in self.rows],
            [0 if row.exp_avg_absmax is None else row.exp_avg_absmax.data_ptr() for row in self.rows],
            [0 if row.exp_avg_sq_absmax is None else row.exp_avg_sq_absmax.data_ptr() for row in self.rows],
            [row.number for row in self.rows],
            [row.first for row in self.rows],
        ]
        self.address_AR = _send(torch.tensor(columns, dtype=torch.int64), self.device)
        has_codes = any(row.exp_avg_absmax is not None for row in self.rows)
        self.code_table = _send(codes.kernel_table(), self.device) if has_codes else None
        self._fits = [_fits_vectors(row, tensors) for row, tensors in zip(self.rows, self.written)]
        keys = [_dtypes(row, grad) for row, grad in zip(self.rows, grads)]
        self.groups = tuple(
            self._group(key, [index for index, other in enumerate(keys) if other == key]) for key in dict.fromkeys(keys)
        )

    def _read_layout(self) -> list[object]:
        """Return everything about what a step writes; a change of it needs a rebuild of the table."""
        # Without a frame of Python per tensor.
        return [
            *map(torch.Tensor.numel, self._params),
            *map(torch.Tensor.data_ptr, self._all_written),
            *map(_DTYPE_OF, self._all_written),
        ]

    def _group(
        self, key: tuple[torch.dtype, torch.dtype, torch.dtype | None, torch.dtype], rows: list[int]
    ) -> TableGroup:
        """Return the chunks of rows, in the order of the rows."""
        num_chunks_R = torch.tensor([-(-self.rows[row].param.numel() // CHUNK) for row in rows], dtype=torch.int64)
        row_C = torch.tensor(rows, dtype=torch.int32).repeat_interleave(num_chunks_R)
        first_R = num_chunks_R.cumsum(0) - num_chunks_R
        index_C = (torch.arange(len(row_C)) - first_R.repeat_interleave(num_chunks_R)).to(torch.int32)
        sent = _send(row_C, self.device), _send(index_C, self.device)
        stepped = sent
        if not all(self.rows[row].is_stepped for row in rows):
            chosen_C = torch.tensor([row.is_stepped for row in self.rows])[row_C.long()]
            stepped = _send(row_C[chosen_C], self.device), _send(index_C[chosen_C], self.device)
        return TableGroup(*key, tuple(rows), *sent, stepped)


def _send(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a tensor to the device without a host sync; TensorTable explains why the copy is safe."""
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)


def _address(grad: torch.Tensor, start: int | None) -> int:
    """Return the address of a row's first element in a gradient."""
    return grad.data_ptr() if start is None else grad.data_ptr() + start * grad.element_size()


def _dtypes(
    row: TableRow, grad: torch.Tensor | None
) -> tuple[torch.dtype, torch.dtype, torch.dtype | None, torch.dtype]:
    """Return the dtypes of a row, which one launch has in common."""
    copy_dtype = None if row.copy is None else row.copy.dtype
    return row.param.dtype, row.owner.dtype if grad is None else grad.dtype, copy_dtype, row.exp_avg.dtype


def _fits_vectors(row: TableRow, tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether the written tensors and the length of the row are aligned for vector access."""
    return all(number % ALIGNMENT == 0 for number in (row.param.numel(), *[tensor.data_ptr() for tensor in tensors]))


def _describe_gradient(grad: torch.Tensor) -> tuple[object, ...]:
    """Return everything about a gradient that its checks read, which take longer."""
    if type(grad) is not torch.Tensor:
        local = local_values(grad)
        return type(grad), getattr(grad, "placements", None), *(() if local is grad else _describe_gradient(local))
    is_flat = grad.layout is torch.strided and grad.is_contiguous()
    return grad.numel(), grad.dtype, grad.device, is_flat
