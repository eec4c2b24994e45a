"""Rows of a table that stays in host memory: what an embedding does, without the table on the device.

Axes: T tokens of the pack, V rows of the table, D model width.
"""

from __future__ import annotations

import torch

from lightning_fastft.core.checks import check_tensor
from lightning_fastft.core.errors import ShapeError
from lightning_fastft.kernels.host_gather import reference

_TABLE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def host_gather(weight_VD: torch.Tensor, token_T: torch.Tensor) -> torch.Tensor:
    """Return the rows of a host table on the device of the tokens, bit for bit.

    A token outside the table gives a row of NaN on CUDA, where an error would need a host sync, and an error elsewhere.

    Args:
        weight_VD: The frozen table. Shape (V, D); bf16, fp16 or fp32; in host memory, pinned where the tokens are on
            CUDA; last axis contiguous.
        token_T: Rows to read. Shape (T,), int64 or int32, contiguous; any order, any number of times.

    Returns:
        Shape (T, D), dtype of weight_VD, device of token_T; no gradient.

    Raises:
        ShapeError: A shape, dtype or layout is wrong, the table requires a gradient, or it is not where the device can
            read it.

    Cost:
        T x D values over the bus once per call, written once; no copy of the table; no host sync.

    Source:
        own

    Example:
        >>> host_gather(torch.tensor([[1.0], [2.0]]), torch.tensor([1, 0, 1])).flatten()
        tensor([2., 1., 2.])
    """
    check_tensor("weight_VD", weight_VD, ndim=2, dtypes=_TABLE_DTYPES)
    check_tensor("token_T", token_T, ndim=1, dtypes=(torch.int64, torch.int32))
    if weight_VD.requires_grad:
        raise ShapeError("weight_VD requires a gradient; only a frozen table can stay on the host.")
    if weight_VD.device.type != "cpu":
        raise ShapeError(
            f"weight_VD is on {weight_VD.device}; this operation reads host memory. Use torch.nn.functional.embedding "
            "there."
        )
    if (weight_VD.shape[1] > 1 and weight_VD.stride(1) != 1) or not token_T.is_contiguous():
        raise ShapeError(
            f"weight_VD has strides {weight_VD.stride()} and token_T {token_T.stride()}; the last axis of both must be "
            "contiguous."
        )
    if not token_T.is_cuda:
        return reference.gather_rows(weight_VD, token_T)
    if weight_VD.numel() and not weight_VD.is_pinned():
        raise ShapeError(
            "weight_VD is in pageable host memory, which a CUDA device cannot read. Pin it (PinnedSlab or "
            "Tensor.pin_memory())."
        )

    from lightning_fastft.kernels.host_gather import triton

    return triton.gather_rows(weight_VD, token_T)
