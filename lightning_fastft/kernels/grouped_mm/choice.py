"""The choice between torch's grouped GEMM and our kernel.

Axes: N rows, sorted by expert, E experts, I input columns, O output columns.
"""

from __future__ import annotations

import torch

from lightning_fastft.core.errors import OptionError
from lightning_fastft.kernels.backends import GPU_TYPES, capability_of
from lightning_fastft.kernels.grouped_mm.reference import THIN_COLUMNS, GatheredRows, Rows, rows_of

# torch's grouped GEMM reached 637 to 694 TFLOP/s on an H200, 0.9 of a dense product, but an addend costs one more pass
# over its result, and gathered rows one before it. Our kernel adds and gathers in its only pass. With an addend it took
# 0.74 to 0.98 of torch's time on the H200; it is not measured on other GPUs. python -m benchmarks.moe_layer times whole
# layers with both.
_ONE_PASS_CAPABILITIES = (9,)
# Wider products of gathered rows gain more from torch's grouped GEMM than the copy costs. On an H100 with 8,192 tokens
# ours took 0.02 to 0.13 ms more than torch's GEMM alone with 768 to 2,880 columns, and 0.19 ms more with 5,760
# (python -m benchmarks.grouped_products). The copy was not timed alone: 0.13 to 0.16 ms is the time of a bf16 layer
# without its products, less that of the same layer in fp8, which copies no rows (python -m benchmarks.moe_layer).
_GATHERED_COLUMNS = 2880
# CUTLASS kernels exist for these major compute capabilities; on others torch loops over experts on the host, with host
# syncs (GroupedMMUtils.h).
_TORCH_CAPABILITIES = (9, 10)
# On 10.x the gradient of an expert without rows is not 0 (https://github.com/pytorch/pytorch/issues/172439).
_TORCH_GRAD_CAPABILITIES = (9,)
# "Can't process more than 1024 groups", checked as "below 1024" (GroupMM.cu).
_MAX_TORCH_EXPERTS = 1023
_ALIGNMENT_BYTES = 16


def choose_backend(x_NI: Rows, weight_EIO: torch.Tensor, *, has_addend: bool = False) -> str:
    """Return the backend that grouped_mm picks under "auto".

    On a CPU it is "reference". On CUDA it is "torch" if its kernel supports the tensors (bf16 on compute capability 9.x
    or 10.x, strides and sizes in multiples of 16 bytes), there are more than 64 output columns, and on 9.x nothing is
    added and rows are in order or there are more than 2,880 output columns; else "triton". Only dtype, device, layout
    and order of the rows matter; has_addend says that a bias or a low-rank product will be added.

    Returns:
        "torch", "triton" or "reference".

    Cost:
        None on the device; no host sync.

    Example:
        >>> choose_backend(torch.zeros(3, 8), torch.zeros(2, 8, 8))
        'reference'
    """
    if weight_EIO.device.type not in GPU_TYPES:
        return "reference"
    # Tiles of torch's grouped GEMM suit wide results: with 16 columns it took 0.14 ms, while reading the rows takes
    # 0.06 ms (H200).
    if weight_EIO.shape[2] <= THIN_COLUMNS:
        return "triton"
    is_copied = isinstance(x_NI, GatheredRows) and weight_EIO.shape[2] <= _GATHERED_COLUMNS
    if (has_addend or is_copied) and capability_of(weight_EIO.device)[0] in _ONE_PASS_CAPABILITIES:
        return "triton"
    return "triton" if why_not_torch(x_NI, weight_EIO) else "torch"


def choose_grad_backend(x_NI: Rows, d_NO: Rows, *, num_experts: int, dtype: torch.dtype | None = None) -> str:
    """Return the backend that grouped_weight_grad picks under "auto".

    The rules of choose_backend apply, with "torch" on compute capability 9.x only (on 10.x it gives experts without
    rows a gradient), and only if neither operand is thin.

    Returns:
        "torch", "triton" or "reference".

    Cost:
        None on the device; no host sync.

    Example:
        >>> choose_grad_backend(torch.zeros(3, 8), torch.zeros(3, 8), num_experts=2)
        'reference'
    """
    like = rows_of(x_NI)
    if like.device.type not in GPU_TYPES:
        return "reference"
    if min(x_NI.shape[1], d_NO.shape[1]) <= THIN_COLUMNS:
        return "triton"
    return "triton" if why_not_torch_grad(x_NI, d_NO, num_experts=num_experts, dtype=dtype or like.dtype) else "torch"


def why_not_torch(x_NI: Rows, weight_EIO: torch.Tensor) -> str | None:
    """Return why torch's grouped GEMM does not support these tensors, or would loop on the host; None if it runs in one
    launch.
    """
    misfit = _device_misfit(rows_of(x_NI), capabilities=_TORCH_CAPABILITIES) or _size_misfit(
        weight_EIO.dtype, num_experts=weight_EIO.shape[0], sizes=(x_NI.shape[0], *weight_EIO.shape[1:])
    )
    return misfit or _layout_misfit("x_NI", x_NI) or _layout_misfit("weight_EIO", weight_EIO)


def why_not_torch_grad(x_NI: Rows, d_NO: Rows, *, num_experts: int, dtype: torch.dtype) -> str | None:
    """Return why torch's grouped GEMM does not support a weight gradient; None if it does."""
    like = rows_of(x_NI)
    if dtype is not like.dtype:
        return f"its result has the dtype of its inputs, {like.dtype}, not {dtype}"
    misfit = _device_misfit(like, capabilities=_TORCH_GRAD_CAPABILITIES) or _size_misfit(
        like.dtype, num_experts=num_experts, sizes=(x_NI.shape[0], x_NI.shape[1], d_NO.shape[1])
    )
    return misfit or _layout_misfit("x_NI", x_NI) or _layout_misfit("d_NO", d_NO)


def _device_misfit(x_NI: torch.Tensor, *, capabilities: tuple[int, ...]) -> str | None:
    """Return why the device does not support the dtype; on CUDA only bf16 on the newest devices has a kernel."""
    if x_NI.device.type not in GPU_TYPES:
        return "it does not support float64" if x_NI.dtype is torch.float64 else None
    major, minor = capability_of(x_NI.device)
    if x_NI.dtype is torch.bfloat16 and major in capabilities:
        return None
    allowed = " and ".join(f"{capability}.x" for capability in capabilities)
    is_wrong = x_NI.dtype is torch.bfloat16 and major in _TORCH_CAPABILITIES
    fault = (
        "gives experts without rows a gradient" if is_wrong else "loops over the experts with a host sync in each call"
    )
    return f"it supports bf16 on compute capability {allowed}, got {x_NI.dtype} on {major}.{minor}, where it {fault}"


def _size_misfit(dtype: torch.dtype, *, num_experts: int, sizes: tuple[int, int, int]) -> str | None:
    """Return why sizes are not supported: columns need multiples of 16 bytes, and only single experts may be empty."""
    if not 1 <= num_experts <= _MAX_TORCH_EXPERTS:
        return f"it supports 1 to {_MAX_TORCH_EXPERTS} experts, got {num_experts}"
    step = _ALIGNMENT_BYTES // dtype.itemsize
    if min(sizes) == 0 or any(size % step for size in sizes[1:]):
        return (
            f"it needs at least one row, and columns in multiples of {step} above 0, got {sizes[0]} rows, "
            f"{sizes[1]} and {sizes[2]} columns"
        )
    return None


def _layout_misfit(name: str, tensor: Rows) -> str | None:
    """Return why a layout is not supported by TMA.

    One of the last two axes needs stride 1. The other one, and the first of three axes, need strides in multiples of 16
    bytes without overlap.
    """
    if isinstance(tensor, GatheredRows):
        # Gathered rows are copied first, and are then contiguous.
        return None
    *outer, slow, fast = tensor.stride()
    slow_size, fast_size = tensor.shape[-2:]
    if fast != 1:
        slow, fast, fast_size = fast, slow, slow_size
    step = _ALIGNMENT_BYTES // tensor.dtype.itemsize
    # Allocations are aligned. torch.compile knows the storage offset, but not the address.
    is_aligned = all(stride % step == 0 for stride in (slow, *outer, tensor.storage_offset()))
    if fast == 1 and slow >= fast_size and is_aligned:
        return None
    return (
        f"{name} with strides {tuple(tensor.stride())} does not start every row at a multiple of "
        f"{_ALIGNMENT_BYTES} "
        "bytes"
    )


def check_forced(name: str, x_NI: torch.Tensor, misfit: str | None) -> None:
    """Raise on an explicit backend that cannot run these tensors, or would need a host sync."""
    if name == "reference" and x_NI.is_cuda:
        raise OptionError(
            'backend="reference" reads end_E on the host, which is a host sync on CUDA. Use "auto", "torch" or '
            '"triton".'
        )
    if name == "triton" and not x_NI.is_cuda:
        raise OptionError(
            f'backend="triton" needs tensors on CUDA, got {x_NI.device}. Use "auto", "reference" or "torch".'
        )
    if misfit:
        other = "triton" if x_NI.is_cuda else "reference"
        raise OptionError(f'backend="torch" cannot run: {misfit}. Use "auto" or "{other}".')
