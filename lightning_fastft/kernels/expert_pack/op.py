"""Conversion of expert adapters between expert-last and expert-first layout: the public functions.

PEFT stores the second factor of an expert adapter with the expert as the fastest axis; grouped products need the expert
as the first axis.

Axes: E experts, R adapter rank, O columns of the factor.
"""

from __future__ import annotations

import torch

from lightning_fastft.core.checks import check_float, check_layout, do_ranges_overlap
from lightning_fastft.core.errors import ShapeError
from lightning_fastft.kernels.backends import FLOATING, must_check, uses_triton
from lightning_fastft.kernels.expert_pack import reference


def pack_expert_first(
    b_ORE: torch.Tensor,
    *,
    dtype: torch.dtype | None = None,
    scale: float = 1.0,
    out: torch.Tensor | None = None,
    backend: str = "auto",
    is_checked: bool = True,
) -> torch.Tensor:
    """Return ``scale * b`` with the expert as the first axis instead of the last: ``out[e, r, o] = scale * b[o, r,
    e]``.

    Without a scale, values are only cast. With a scale, the product is fp32 (float64 for float64) and rounded once.

    Args:
        b_ORE: Shape (O, R, E), contiguous; bf16, fp16, fp32 or float64.
        dtype: Dtype of the result, one of those above; None for the dtype of out, or of b_ORE.
        scale: Factor on every value.
        out: Output tensor, shape (E, R, O), contiguous, on the device of b_ORE, sharing no memory with it; None for new
            memory.
        backend: "triton" (CUDA; not float64), "reference" (plain PyTorch), or "auto": the first if possible, else the
            second.
        is_checked: Validate the arguments. Pass False only for arguments that are known to be valid.

    Returns:
        out_ERO: Shape (E, R, O), contiguous; device of b_ORE; no gradient.

    Raises:
        ShapeError: A shape, dtype, device or layout is wrong.
        OptionError: scale is not finite, or backend does not support these tensors.

    Cost:
        Reads b_ORE and writes the result once, in one launch; no host sync.

    Source:
        own

    Example:
        >>> pack_expert_first(torch.tensor([[[1.0, 2.0]], [[3.0, 4.0]]])).tolist()
        [[[1.0, 3.0]], [[2.0, 4.0]]]
    """
    return _exchange("b_ORE", b_ORE, dtype=dtype, scale=scale, out=out, backend=backend, is_checked=is_checked)


def unpack_expert_last(
    d_ERO: torch.Tensor,
    *,
    dtype: torch.dtype | None = None,
    scale: float = 1.0,
    out: torch.Tensor | None = None,
    backend: str = "auto",
    is_checked: bool = True,
) -> torch.Tensor:
    """Return ``scale * d`` with the expert as the last axis instead of the first: ``out[o, r, e] = scale * d[e, r,
    o]``.

    It is the inverse of pack_expert_first.

    Args:
        d_ERO: Shape (E, R, O), contiguous; bf16, fp16, fp32 or float64.
        dtype: Dtype of the result, one of those above; None for the dtype of out, or of d_ERO.
        scale: Factor on every value.
        out: Output tensor, shape (O, R, E), contiguous, on the device of d_ERO, sharing no memory with it; None for new
            memory.
        backend: "triton" (CUDA; not float64), "reference" (plain PyTorch), or "auto": the first if possible, else the
            second.
        is_checked: Validate the arguments. Pass False only for arguments that are known to be valid.

    Returns:
        out_ORE: Shape (O, R, E), contiguous; device of d_ERO; no gradient.

    Raises:
        ShapeError: A shape, dtype, device or layout is wrong.
        OptionError: scale is not finite, or backend does not support these tensors.

    Cost:
        Reads d_ERO and writes the result once, in one launch; no host sync.

    Source:
        own

    Example:
        >>> unpack_expert_last(torch.tensor([[[1.0, 3.0]], [[2.0, 4.0]]]), scale=2.0).tolist()
        [[[2.0, 4.0]], [[6.0, 8.0]]]
    """
    return _exchange("d_ERO", d_ERO, dtype=dtype, scale=scale, out=out, backend=backend, is_checked=is_checked)


def _exchange(
    name: str,
    source: torch.Tensor,
    *,
    dtype: torch.dtype | None,
    scale: float,
    out: torch.Tensor | None,
    backend: str,
    is_checked: bool,
) -> torch.Tensor:
    """Check the arguments and run the chosen backend; both directions exchange the first and the last axis."""
    dtype = dtype or (source.dtype if out is None else out.dtype)
    if must_check(is_checked):
        _check(name, source, dtype=dtype, scale=scale, out=out)
    if out is None:
        out = torch.empty(source.shape[::-1], dtype=dtype, device=source.device)
    # The kernel supports float64 neither as input nor as output.
    widest = torch.float64 if torch.float64 in (source.dtype, dtype) else source.dtype
    with torch.no_grad():
        if not uses_triton(backend, source.device, dtype=widest):
            return reference.exchange_ends(source, scale=scale, out=out)

        from lightning_fastft.kernels.expert_pack import triton

        return triton.exchange_ends(source, scale=scale, out=out)


def _check(name: str, source: torch.Tensor, *, dtype: torch.dtype, scale: float, out: torch.Tensor | None) -> None:
    """Raise on a source that the kernel would read wrongly, or an output tensor that cannot hold the result."""
    check_layout(name, source, (None, None, None), dtypes=FLOATING)
    check_float("scale", scale, low=-float("inf"))
    if dtype not in FLOATING:
        raise ShapeError(f"dtype is {dtype}; allowed are bf16, fp16, fp32 and float64.")
    if out is not None:
        check_layout("out", out, source.shape[::-1], dtypes=(dtype,), like=source)
        if do_ranges_overlap(out, source):
            raise ShapeError("out shares memory with the source. Give separate memory, or None.")
