"""Rows in expert order and back, in plain PyTorch.

Axes: T tokens of the pack, K experts per token, N routed slots (T * K), E experts, D model width.
"""

from __future__ import annotations

import torch

from lightning_fastft.kernels.backends import one_kernel, wide_dtype


@one_kernel
def gather_rows(
    x_TD: torch.Tensor, slot_N: torch.Tensor, *, num_experts_per_token: int, end_E: torch.Tensor | None = None
) -> torch.Tensor:
    """Return ``x_TD[slot_N // K]``, also of rows from ``end_E[-1]`` on.

    Raises:
        IndexError: A slot is outside the tokens.
    """
    return x_TD.index_select(0, slot_N.div(num_experts_per_token, rounding_mode="floor"))


@one_kernel
def combine_rows(
    y_ND: torch.Tensor,
    place_TK: torch.Tensor,
    end_E: torch.Tensor,
    *,
    weight_TK: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the sum over k, in ascending order, of ``weight_TK[:, k] * y_ND[place_TK[:, k]]``, rounded once.

    Arithmetic is fp32 (float64 for float64 rows). A place from end_E[-1] on contributes exactly 0, whatever its row and
    weight hold.
    """
    wide = wide_dtype(y_ND.dtype)
    num_tokens, num_choices = place_TK.shape
    sum_TD = torch.zeros(num_tokens, y_ND.shape[1], dtype=wide, device=y_ND.device)
    for choice in range(num_choices):
        place_T = place_TK[:, choice]
        value_TD = y_ND.index_select(0, place_T.clamp(max=y_ND.shape[0] - 1)).to(wide)
        if weight_TK is not None:
            value_TD = weight_TK[:, choice, None].to(wide) * value_TD
        sum_TD += torch.where((place_T < end_E[-1])[:, None], value_TD, 0.0)
    return sum_TD.to(y_ND.dtype)
