"""DoRA in fused linear layers: columns of the output times magnitude over row norm.

Axes: T rows, O output columns of all layers together.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lightning_fastft.fused.linear_parts import TENSORS_PER_LAYER, LinearPart, join_biases
from lightning_fastft.kernels.backends import wide_dtype
from lightning_fastft.kernels.column_scale.op import (
    magnitude_gradient,
    offset_of,
    scale_columns,
    scale_columns_backward,
)


def scale_output(
    parts: Sequence[LinearPart],
    x_TO: torch.Tensor,
    *,
    addend_TO: torch.Tensor | None,
    alpha: float,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return ``addend + alpha * output`` of layers of which one is DoRA, from products of weights and adapters.

    Cost:
        That of scale_columns.
    """
    factors_2O, bias_O = _factors(parts, x_TO), join_biases(parts, x_TO)
    offset_O = None if bias_O is None else offset_of(bias_O, factors_2O[0])
    return scale_columns(
        x_TO, factors_2O[0], offset_N=offset_O, addend_TN=addend_TO, alpha=alpha, out=out, is_checked=False
    )


def unscaled_gradient(
    parts: Sequence[LinearPart],
    d_TO: torch.Tensor,
    saved_TO: torch.Tensor | None,
    *,
    needs: Sequence[bool],
    is_scaled: bool,
    out: torch.Tensor | None,
) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    """Return the gradient before the scale, and that of each magnitude, None where not needed.

    Args:
        parts: The layers.
        d_TO: Gradient of their output.
        saved_TO: Output, or the products before the scale; may be None if no magnitude is trained.
        needs: Whether each gradient is needed, in the order of FusedLinear.tensors.
        is_scaled: Whether saved_TO is the output.
        out: Memory for the first result, which may be d_TO; None for new memory.

    Cost:
        That of scale_columns_backward.
    """
    needs_magnitude = needs[TENSORS_PER_LAYER - 1 :: TENSORS_PER_LAYER]
    factors_2O, bias_O = _factors(parts, d_TO), join_biases(parts, d_TO)
    d_x_TN, products_N, totals_N = scale_columns_backward(
        d_TO,
        saved_TO if any(needs_magnitude) else None,
        factors_2O[0],
        needs_totals=bias_O is not None and any(needs_magnitude),
        out=out,
        is_checked=False,
    )
    if products_N is None:
        return d_x_TN, [None] * len(parts)
    d_magnitudes_O = magnitude_gradient(products_N, totals_N, factors_2O, bias_N=bias_O, is_scaled=is_scaled)
    pieces = d_magnitudes_O.split([part.num_outputs for part in parts])
    return d_x_TN, [
        piece.to(part.magnitude_O.dtype) if is_needed and part.magnitude_O is not None else None
        for piece, part, is_needed in zip(pieces, parts, needs_magnitude)
    ]


def _factors(parts: Sequence[LinearPart], like_TO: torch.Tensor) -> torch.Tensor:
    """Return the row factors of all layers side by side, 1 for layers without DoRA."""
    wide = wide_dtype(like_TO.dtype)
    found = [
        like_TO.new_ones(2, part.num_outputs, dtype=wide) if part.factors_2O is None else part.factors_2O.to(wide)
        for part in parts
    ]
    return found[0] if len(found) == 1 else torch.cat(found, dim=1)
