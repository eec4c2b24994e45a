"""Repeat key and value heads for the query heads that share them, for kernels without grouped-query attention.

Axes: T tokens, H query heads, G key/value heads, W width of a head.
"""

from __future__ import annotations

import torch

from lightning_fastft.core.checks import check_int, check_layout
from lightning_fastft.core.errors import ShapeError
from lightning_fastft.kernels.backends import FLOATING, choose_module, must_check, no_graph
from lightning_fastft.kernels.repeat_heads import reference


def repeat_heads(x_TGW: torch.Tensor, num_heads: int, *, is_checked: bool = True) -> torch.Tensor:
    """Return each head repeated once per query head that shares it; no graph.

    Args:
        x_TGW: Keys or values. Shape (T, G, W); bf16, fp16, fp32 or float64; the heads of a token contiguous, any token
            stride.
        num_heads: H, a multiple of G.
        is_checked: As in ``must_check``.

    Returns:
        Shape (T, H, W), contiguous: heads g H / G to (g + 1) H / G - 1 are head g.

    Raises:
        ShapeError: A shape, dtype or layout is wrong, or the heads cannot be shared evenly.
        OptionError: num_heads is not a positive integer.

    Cost:
        Reads T G W values and writes T H W in one launch; no host sync.

    Example:
        >>> repeat_heads(torch.tensor([[[1.0], [2.0]]]), 4)[0, :, 0]
        tensor([1., 1., 2., 2.])
    """
    if must_check(is_checked):
        num_kv_heads = check_layout("x_TGW", x_TGW, (None, None, None), dtypes=FLOATING, num_strided=1).shape[1]
        check_int("num_heads", num_heads, low=1)
        if num_kv_heads == 0 or num_heads % num_kv_heads:
            raise ShapeError(f"{num_heads} query heads cannot share the {num_kv_heads} heads of x_TGW evenly.")
    with no_graph():
        return choose_module(reference, x_TGW).repeat_heads(x_TGW, num_heads)
