"""Repeat key and value heads for the query heads that share them, for kernels without grouped-query attention.

Axes: T tokens, H query heads, G key/value heads, W width of a head.
"""

from __future__ import annotations

from types import ModuleType

import torch

from lightning_fastft.core.checks import check_int, check_tensor
from lightning_fastft.core.errors import ShapeError
from lightning_fastft.kernels.backends import TRITON_DTYPES, uses_triton
from lightning_fastft.kernels.repeat_heads import reference

_DTYPES = (*TRITON_DTYPES, torch.float64)


def repeat_heads(x_TGW: torch.Tensor, num_heads: int, *, backend: str = "auto") -> torch.Tensor:
    """Return each head repeated once per query head that shares it; no graph.

    Args:
        x_TGW: Keys or values. Shape (T, G, W); bf16, fp16, fp32 or float64; the heads of a token contiguous, any token
            stride.
        num_heads: H, a multiple of G.
        backend: "triton" (CUDA; not for float64), "reference" (plain PyTorch), or "auto": the first if possible, else
            the second.

    Returns:
        Shape (T, H, W), contiguous: heads g H / G to (g + 1) H / G - 1 are head g.

    Raises:
        ShapeError: A shape, dtype or layout is wrong, or the heads cannot be shared evenly.
        OptionError: num_heads is not a positive integer, or the backend is unknown or does not support this tensor.

    Cost:
        Reads T G W values and writes T H W in one launch; no host sync.

    Source:
        own

    Example:
        >>> repeat_heads(torch.tensor([[[1.0], [2.0]]]), 4)[0, :, 0]
        tensor([1., 1., 2., 2.])
    """
    check_tensor("x_TGW", x_TGW, ndim=3, dtypes=_DTYPES)
    check_int("num_heads", num_heads, low=1)
    num_kv_heads, width = x_TGW.shape[1:]
    if num_kv_heads == 0 or num_heads % num_kv_heads:
        raise ShapeError(f"{num_heads} query heads cannot share the {num_kv_heads} heads of x_TGW evenly.")
    if width and x_TGW.stride()[1:] != (width, 1) and x_TGW.numel():
        raise ShapeError(
            f"x_TGW has strides {x_TGW.stride()}; the heads of a token must be contiguous: call .contiguous() on it."
        )
    with torch.no_grad():
        return _choose(backend, x_TGW).repeat_heads(x_TGW, num_heads)


def _choose(backend: str, x_TGW: torch.Tensor) -> ModuleType:
    """Return the module of the backend."""
    if not uses_triton(backend, x_TGW.device, dtype=x_TGW.dtype):
        return reference
    from lightning_fastft.kernels.repeat_heads import triton

    return triton
