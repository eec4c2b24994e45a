"""Products of sorted rows with one matrix per expert: the public functions.

Axes: N rows, sorted by expert, E experts, I input columns, O output columns, R adapter rank.
"""

from __future__ import annotations

from collections.abc import Collection

import torch

from lightning_fastft.core.checks import check_choice, check_float, check_int, check_layout, check_rows_apart
from lightning_fastft.core.errors import OptionError, ShapeError
from lightning_fastft.kernels.backends import (
    FLOATING,
    TRITON_DTYPES,
    choose_module,
    must_check,
    plain_numbers,
)
from lightning_fastft.kernels.expert_rows.op import gather_rows
from lightning_fastft.kernels.fp8_linear.op import ALIGNED_COLUMNS
from lightning_fastft.kernels.fp8_linear.reference import FP8
from lightning_fastft.kernels.grouped_mm import reference
from lightning_fastft.kernels.grouped_mm.choice import (
    check_forced,
    choose_backend,
    choose_grad_backend,
    why_not_torch,
    why_not_torch_grad,
)
from lightning_fastft.kernels.grouped_mm.reference import (
    Fp8Scales,
    GatheredRows,
    RowAddend,
    Rows,
    rows_of,
)

BACKENDS = ("auto", "torch", "triton", "reference")


def grouped_mm(
    x_NI: Rows,
    weight_EIO: torch.Tensor,
    end_E: torch.Tensor,
    *,
    bias_EO: torch.Tensor | None = None,
    low_NR: torch.Tensor | None = None,
    low_ERO: torch.Tensor | None = None,
    low_scale: float = 1.0,
    out: torch.Tensor | None = None,
    backend: str = "auto",
    is_checked: bool = True,
) -> torch.Tensor:
    """Return the product of each row with the matrix of its expert, plus an optional bias and scaled low-rank product.

    ``y[n] = x[n] @ weight[e(n)] + bias[e(n)] + low_scale * low[n] @ low_ERO[e(n)]``, where expert e owns the rows
    end_E[e - 1] to end_E[e]. Sums are fp32; "triton" and "reference" round once, "torch" rounds the product before it
    adds. Rows from end_E[-1] on are not written and hold arbitrary values.

    Args:
        x_NI: Rows sorted by expert. Shape (N, I); bf16, fp16, fp32 or, on a CPU, float64; last axis contiguous. Or
            GatheredRows, which "triton" reads in place and the others copy first.
        weight_EIO: One matrix per expert. Shape (E, I, O); dtype of x_NI; any view with a stride of 1 along I or O.
        end_E: One past the last row of each expert. Shape (E,); int32, contiguous; non-decreasing, at most N.
        bias_EO: Shape (E, O); dtype of x_NI; last axis contiguous.
        low_NR: Rows of the low-rank product, sorted as x_NI. Shape (N, R); dtype of x_NI; last axis contiguous; given
            with low_ERO or not at all.
        low_ERO: Matrices of the low-rank product. Shape (E, R, O); dtype of x_NI; contiguous.
        low_scale: Factor on the low-rank product.
        out: Output tensor. Shape (N, O); dtype of x_NI; last axis contiguous; shares no memory with the other
            arguments.
        backend: "torch" (torch.nn.functional.grouped_mm), "triton" (our own kernel), "reference" (a loop over experts),
            or "auto" (choose_backend).
        is_checked: As in ``must_check``.

    Returns:
        out, or a new tensor: shape (N, O), dtype and device of x_NI; no gradient.

    Raises:
        ShapeError: Shapes, dtypes, devices or layouts do not match; on a CPU also if end_E decreases or exceeds N.
        OptionError: backend is unknown or cannot run these tensors, or low_scale is not finite.

    Cost:
        2 N I O FLOP. Reads x_NI and the weights and writes the result once; "torch" reads and writes the result once
        more for bias and low-rank product, or to fill out if there are neither. No host sync on CUDA.

    Source:
        own; the low-rank product as in LoRA (arXiv 2106.09685)

    Example:
        >>> x, weight = torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([[[1.0]], [[10.0]]])
        >>> grouped_mm(x, weight, torch.tensor([1, 3], dtype=torch.int32)).flatten()
        tensor([ 1., 20., 30.])
    """
    addend = RowAddend(bias_EO, low_NR, low_ERO, low_scale)
    if must_check(is_checked):
        check_float("low_scale", low_scale, low=-float("inf"))
        _check_product(x_NI, weight_EIO, end_E, addend=addend, out_NO=out)
    name = backend
    if name == "auto":
        name = choose_backend(x_NI, weight_EIO, has_addend=not addend.is_empty)
    else:
        check_choice("backend", name, BACKENDS)
        check_forced(name, rows_of(x_NI), why_not_torch(x_NI, weight_EIO) if name == "torch" else None)
    with plain_numbers(end_E.device.type):
        if name == "torch":
            return _torch_product(_copy_rows(x_NI, end_E), weight_EIO, end_E, addend=addend, out_NO=out)
        out_NO = weight_EIO.new_empty(x_NI.shape[0], weight_EIO.shape[2]) if out is None else out
        if name == "reference" or end_E.is_meta:
            return reference.grouped_mm(x_NI, weight_EIO, end_E, addend=addend, out_NO=out_NO)
        from lightning_fastft.kernels.grouped_mm import triton

        return triton.grouped_mm(x_NI, weight_EIO, end_E, addend=addend, out_NO=out_NO)


def grouped_mm_fp8(
    x_NI: Rows,
    weight_EOI: torch.Tensor,
    end_E: torch.Tensor,
    *,
    scales: Fp8Scales,
    dtype: torch.dtype,
    bias_EO: torch.Tensor | None = None,
    low_NR: torch.Tensor | None = None,
    low_ERO: torch.Tensor | None = None,
    low_scale: float = 1.0,
    backend: str = "auto",
    is_checked: bool = True,
) -> torch.Tensor:
    """Return ``grouped_mm`` of e4m3 rows and matrices; their scales are factors of each sum.

    ``y[n] = x_scale[n] * weight_scale[e(n)] * x[n] @ weight[e(n)]^T`` plus the bias and the scaled low-rank product of
    ``grouped_mm``, rounded once. Rows from end_E[-1] on are not written and hold arbitrary values.

    Args:
        x_NI: Rows as in ``grouped_mm``, e4m3.
        weight_EOI: One matrix per expert. Shape (E, O, I), e4m3, contiguous; O and I multiples of 16.
        end_E: As in ``grouped_mm``.
        scales: Factor on each row of the tensor that holds the rows, and on each matrix.
        dtype: Dtype of the result and of the addend: bf16, fp16 or fp32.
        bias_EO: As in ``grouped_mm``, in dtype.
        low_NR: As in ``grouped_mm``, in dtype.
        low_ERO: As in ``grouped_mm``, in dtype.
        low_scale: As in ``grouped_mm``; 0 skips the low-rank product.
        backend: "auto" or "reference".
        is_checked: As in ``must_check``.

    Returns:
        Shape (N, O), contiguous, in dtype; no gradient.

    Raises:
        ShapeError: Shapes, dtypes, devices or layouts do not match.
        OptionError: backend is unknown or cannot run these tensors, low_scale is not finite, or O or I is not a
            multiple of 16.

    Cost:
        2 N I O FLOP in fp8; reads rows and weights and writes the result once. No host sync with "triton"; "reference"
        reads end_E on the host, and multiplies fp32 copies.

    Source:
        own; e4m3: arXiv 2209.05433

    Example:
        >>> x, weight = (torch.full(shape, 0.5).to(torch.float8_e4m3fn) for shape in ((2, 16), (2, 16, 16)))
        >>> scales = Fp8Scales(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 4.0]))
        >>> ends = torch.tensor([1, 2], dtype=torch.int32)
        >>> grouped_mm_fp8(x, weight, ends, scales=scales, dtype=torch.bfloat16)[:, 0]
        tensor([ 4., 32.], dtype=torch.bfloat16)
    """
    addend = RowAddend(bias_EO, low_NR, low_ERO, low_scale)
    if must_check(is_checked):
        check_float("low_scale", low_scale, low=-float("inf"))
        _check_fp8(x_NI, weight_EOI, end_E, scales=scales, dtype=dtype, addend=addend)
    with plain_numbers(end_E.device.type):
        out_NO = weight_EOI.new_empty(x_NI.shape[0], weight_EOI.shape[1], dtype=dtype)
        return choose_module(reference, out_NO, backend=backend).grouped_mm(
            x_NI, weight_EOI.transpose(1, 2), end_E, addend=addend, out_NO=out_NO, scales=scales
        )


def grouped_weight_grad(
    x_NI: Rows,
    d_NO: Rows,
    end_E: torch.Tensor,
    *,
    dtype: torch.dtype | None = None,
    scale: float = 1.0,
    row_weight_N: torch.Tensor | None = None,
    backend: str = "auto",
    is_checked: bool = True,
) -> torch.Tensor:
    """Return the gradient of each expert's matrix: ``g[e] = scale * (w * x)[rows of e]^T @ d[rows of e]``, exactly 0
    for an expert without rows.

    Sums are fp32, scaled and rounded once. The weights w are multiplied in fp32 with the rows of the thinner operand,
    which are then rounded to their dtype again. Rows from end_E[-1] on are ignored, whatever they and their weights
    hold.

    Args:
        x_NI: Inputs of the product, sorted by expert. Shape (N, I); bf16, fp16, fp32 or, on a CPU, float64; last axis
            contiguous. Or GatheredRows.
        d_NO: Gradient of the product. Shape (N, O); dtype of x_NI; last axis contiguous. Or GatheredRows; if both
            operands are, their slots must be the same.
        end_E: One past the last row of each expert. Shape (E,); int32, contiguous; non-decreasing, at most N.
        dtype: Dtype of the gradient, one that x_NI may have; None for the dtype of x_NI, the only one "torch" supports.
        scale: Factor on the whole gradient.
        row_weight_N: Factor on each row. Shape (N,); any floating dtype, any stride; None for 1.
        backend: "torch", "triton", "reference" or "auto" (choose_grad_backend).
        is_checked: As in ``must_check``.

    Returns:
        Shape (E, I, O), contiguous, device of x_NI; no gradient.

    Raises:
        ShapeError: Shapes, dtypes, devices or layouts do not match; on a CPU also if end_E decreases or exceeds N.
        OptionError: backend is unknown or cannot run these tensors, or scale is not finite.

    Cost:
        2 N I O FLOP; no host sync on CUDA. Scale and weights cost no pass in "triton"; "torch" makes a copy of the
        weighted rows and one more pass over a scaled gradient.

    Example:
        >>> x, d = torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([[1.0], [1.0], [2.0]])
        >>> grouped_weight_grad(x, d, torch.tensor([1, 3, 3], dtype=torch.int32)).flatten()
        tensor([1., 8., 0.])
    """
    like = rows_of(x_NI)
    dtype = dtype or like.dtype
    if must_check(is_checked):
        _check_grad(x_NI, d_NO, end_E, dtype=dtype, scale=scale, row_weight_N=row_weight_N)
    name = backend
    if name == "auto":
        name = choose_grad_backend(x_NI, d_NO, num_experts=end_E.shape[0], dtype=dtype)
    else:
        check_choice("backend", name, BACKENDS)
        num_experts = end_E.shape[0]
        misfit = why_not_torch_grad(x_NI, d_NO, num_experts=num_experts, dtype=dtype) if name == "torch" else None
        check_forced(name, like, misfit)
    with plain_numbers(end_E.device.type):
        if name == "torch":
            weighted_NI, weighted_NO = reference.weigh_rows(
                _copy_rows(x_NI, end_E), _copy_rows(d_NO, end_E), row_weight_N
            )
            grad_EIO = torch.nn.functional.grouped_mm(weighted_NI.T, weighted_NO, offs=end_E)
            return grad_EIO if scale == 1.0 else grad_EIO.mul_(scale)
        if name == "reference" or end_E.is_meta:
            return reference.grouped_weight_grad(x_NI, d_NO, end_E, dtype=dtype, scale=scale, row_weight_N=row_weight_N)
        from lightning_fastft.kernels.grouped_mm import triton

        return triton.grouped_weight_grad(x_NI, d_NO, end_E, dtype=dtype, scale=scale, row_weight_N=row_weight_N)


def _check_grad(
    x_NI: Rows,
    d_NO: Rows,
    end_E: torch.Tensor,
    *,
    dtype: torch.dtype,
    scale: float,
    row_weight_N: torch.Tensor | None,
) -> None:
    """Raise on operands without common rows, and on numbers for which the gradient is not defined."""
    like = rows_of(x_NI)
    _check_rows("x_NI", x_NI, (None, None), like=like)
    _check_rows("d_NO", d_NO, (None, None), like=like)
    if d_NO.shape[0] != x_NI.shape[0]:
        raise ShapeError(f"x_NI has {x_NI.shape[0]} rows, d_NO {d_NO.shape[0]}; both operands need the same rows.")
    check_layout("end_E", end_E, (None,), dtypes=(torch.int32,), like=like)
    if (
        isinstance(x_NI, GatheredRows)
        and isinstance(d_NO, GatheredRows)
        and (x_NI.slot_N is not d_NO.slot_N or x_NI.num_slots_per_row != d_NO.num_slots_per_row)
    ):
        raise ShapeError(
            "x_NI and d_NO are gathered by different slots; both operands of a gradient need the same rows."
        )
    if dtype not in FLOATING or (dtype is torch.float64) != (like.dtype is torch.float64):
        raise ShapeError(
            f"dtype is {dtype} for rows in {like.dtype}; allowed are bf16, fp16 and fp32, and float64 for rows in "
            "float64."
        )
    check_float("scale", scale, low=-float("inf"))
    if row_weight_N is not None:
        check_layout("row_weight_N", row_weight_N, (x_NI.shape[0],), dtypes=FLOATING, like=like, num_strided=1)


def _copy_rows(rows: Rows, end_E: torch.Tensor) -> torch.Tensor:
    """Return rows as a tensor of shape (N, I); gathered rows without an expert hold arbitrary values."""
    return (
        gather_rows(rows.x_TI, rows.slot_N, num_experts_per_token=rows.num_slots_per_row, end_E=end_E, is_checked=False)
        if isinstance(rows, GatheredRows)
        else rows
    )


def _torch_product(
    x_NI: torch.Tensor, weight_EIO: torch.Tensor, end_E: torch.Tensor, *, addend: RowAddend, out_NO: torch.Tensor | None
) -> torch.Tensor:
    """Run torch's grouped GEMM, then one pass for all addends, which computes the low-rank product tile by tile and
    never stores it.
    """
    y_NO = torch.nn.functional.grouped_mm(x_NI, weight_EIO, offs=end_E)
    if addend.is_empty:
        return y_NO if out_NO is None else out_NO.copy_(y_NO)
    add_to_rows = reference.add_to_rows
    if x_NI.is_cuda:
        from lightning_fastft.kernels.grouped_mm import triton

        add_to_rows = triton.add_to_rows
    return add_to_rows(y_NO, end_E, addend=addend, out_NO=y_NO if out_NO is None else out_NO)


def _check_product(
    x_NI: Rows, weight_EIO: torch.Tensor, end_E: torch.Tensor, *, addend: RowAddend, out_NO: torch.Tensor | None
) -> None:
    """Raise on arguments that a kernel would read or write wrongly."""
    like = rows_of(x_NI)
    _check_rows("x_NI", x_NI, (None, None), like=like)
    num_experts, num_inputs, num_outputs = check_layout(
        "weight_EIO", weight_EIO, (None, x_NI.shape[1], None), like=like, num_strided=3
    ).shape
    if not any(stride == 1 or size <= 1 for stride, size in zip(weight_EIO.stride()[1:], (num_inputs, num_outputs))):
        raise ShapeError(
            f"weight_EIO has strides {weight_EIO.stride()}; one of its last two axes must be contiguous. Call "
            ".contiguous() once."
        )
    _check_borders(end_E, addend, sizes=(x_NI.shape[0], num_experts, num_outputs), like=like)
    if out_NO is not None:
        _check_rows("out", out_NO, (x_NI.shape[0], num_outputs), like=like)
        check_rows_apart("out", out_NO)


def _check_borders(end_E: torch.Tensor, addend: RowAddend, *, sizes: tuple[int, int, int], like: torch.Tensor) -> None:
    """Raise on the ends of N rows for E experts, and on an addend of O columns, that a kernel would read wrongly; like
    has the dtype of the addend.
    """
    num_rows, num_experts, num_outputs = sizes
    check_layout("end_E", end_E, (num_experts,), dtypes=(torch.int32,), like=like)
    bias_EO, low_NR, low_ERO, _ = addend
    if bias_EO is not None:
        _check_rows("bias_EO", bias_EO, (num_experts, num_outputs), like=like)
    if (low_NR is None) != (low_ERO is None):
        raise ShapeError("low_NR and low_ERO must be given together; one of them is None.")
    if low_NR is not None and low_ERO is not None:
        rank = check_layout("low_ERO", low_ERO, (num_experts, None, num_outputs), like=like).shape[1]
        if rank == 0:
            raise ShapeError(f"low_ERO has shape {tuple(low_ERO.shape)}; its rank must be above 0.")
        _check_rows("low_NR", low_NR, (num_rows, rank), like=like)


def _check_fp8(
    x_NI: Rows,
    weight_EOI: torch.Tensor,
    end_E: torch.Tensor,
    *,
    scales: Fp8Scales,
    dtype: torch.dtype,
    addend: RowAddend,
) -> None:
    """Raise on arguments of a product in e4m3 that a kernel would read wrongly."""
    check_choice("dtype", dtype, TRITON_DTYPES)
    num_experts, num_outputs, num_inputs = check_layout(
        "weight_EOI", weight_EOI, (None, None, None), dtypes=(FP8,)
    ).shape
    _check_rows("x_NI", x_NI, (None, num_inputs), like=weight_EOI, dtypes=(FP8,))
    for name, scale, size in (
        ("x", scales.x_scale_T, len(rows_of(x_NI))),
        ("weight", scales.weight_scale_E, num_experts),
    ):
        check_layout(f"scale of {name}", scale, (size,), dtypes=(torch.float32,), like=weight_EOI)
    _check_borders(
        end_E, addend, sizes=(x_NI.shape[0], num_experts, num_outputs), like=weight_EOI.new_empty(0, dtype=dtype)
    )
    if num_outputs % ALIGNED_COLUMNS or num_inputs % ALIGNED_COLUMNS:
        raise OptionError(
            f"Products in fp8 need multiples of {ALIGNED_COLUMNS} columns, and a matrix is {num_outputs} x "
            f"{num_inputs}."
        )


def _check_rows(
    name: str,
    rows: Rows,
    shape: tuple[int | None, int | None],
    *,
    like: torch.Tensor,
    dtypes: Collection[torch.dtype] = FLOATING,
) -> None:
    """Raise on rows, gathered or not, that a kernel would read wrongly."""
    if rows_of(rows).is_cuda and rows_of(rows).dtype is torch.float64:
        raise ShapeError(f"{name} is float64 on a GPU; float64 runs on a CPU only, allowed are bf16, fp16 and fp32.")
    if not isinstance(rows, GatheredRows):
        check_layout(name, rows, shape, dtypes={like.dtype}.intersection(dtypes), like=like, num_strided=1)
        return
    _check_rows(name, rows.x_TI, shape, like=like, dtypes=dtypes)
    check_int(f"num_slots_per_row of {name}", rows.num_slots_per_row, low=1)
    num_slots = rows.x_TI.shape[0] * rows.num_slots_per_row
    check_layout(f"slot_N of {name}", rows.slot_N, (num_slots,), dtypes=(torch.int32, torch.int64), like=like)
