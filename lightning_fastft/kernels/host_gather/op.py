"""Embedding lookup in a table that stays in host memory.

Axes: T tokens of the pack, V rows of the table, D model width.
"""

from __future__ import annotations

import torch

from lightning_fastft.core.checks import check_layout
from lightning_fastft.core.errors import ShapeError
from lightning_fastft.kernels.backends import TRITON_DTYPES
from lightning_fastft.kernels.host_gather import reference


def host_gather(weight_VD: torch.Tensor, token_T: torch.Tensor) -> torch.Tensor:
    """Return rows of a host table, bit for bit, on the device of the tokens.

    A token outside the table gives a row of NaN on CUDA, where an error would need a host sync, and raises elsewhere.

    Args:
        weight_VD: The frozen table. Shape (V, D); bf16, fp16 or fp32; in host memory, pinned if the tokens are on
            CUDA; last axis contiguous.
        token_T: Rows to read. Shape (T,), int64 or int32, contiguous; any order, any number of times.

    Returns:
        Shape (T, D), dtype of weight_VD, device of token_T; no gradient.

    Raises:
        ShapeError: A shape, dtype or layout is wrong, the table requires a gradient, or the device cannot read its
            memory.

    Cost:
        Reads T x D values over the bus and writes them once per call; no copy of the table; no host sync.

    Example:
        >>> host_gather(torch.tensor([[1.0], [2.0]]), torch.tensor([1, 0, 1])).flatten()
        tensor([2., 1., 2.])
    """
    check_layout("weight_VD", weight_VD, (None, None), dtypes=TRITON_DTYPES, num_strided=1)
    check_layout("token_T", token_T, (None,), dtypes=(torch.int64, torch.int32))
    if weight_VD.requires_grad:
        raise ShapeError("weight_VD requires a gradient; only a frozen table can stay on the host.")
    if weight_VD.device.type != "cpu":
        raise ShapeError(
            f"weight_VD is on {weight_VD.device}; this operation reads host memory. Use torch.nn.functional.embedding "
            "for it."
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
