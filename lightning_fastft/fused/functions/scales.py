"""Gradients of a projection before the scale of DoRA.

Axes: T tokens, O output columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lightning_fastft.fused.column_scales import unscaled_gradient
from lightning_fastft.fused.linear_gradients import gradients_for
from lightning_fastft.fused.linears import FusedLinear


def before_scale(
    fused_linear: FusedLinear,
    d_TO: Any,
    saved_TO: torch.Tensor | None,
    *,
    needs: Sequence[bool],
    is_scaled: bool = True,
    in_place: bool = False,
) -> tuple[Any, Sequence[torch.Tensor | None]]:
    """Return the gradient of the products and those of the magnitudes; without DoRA the gradient as it is and ().

    Args:
        fused_linear: The layers.
        d_TO: Gradient of their output.
        saved_TO: What was saved for the magnitudes: the output, or the products.
        needs: Whether each gradient of FusedLinear.tensors is needed.
        is_scaled: Whether saved_TO is the output.
        in_place: Whether the gradient may be overwritten.
    """
    if not fused_linear.is_scaled:
        return d_TO, ()
    out = d_TO if in_place else gradients_for(fused_linear, d_TO)
    return unscaled_gradient(fused_linear.parts, d_TO, saved_TO, needs=needs, is_scaled=is_scaled, out=out)
