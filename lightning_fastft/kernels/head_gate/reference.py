"""Gated heads in plain PyTorch: the formula and its gradient, the reference of the Triton kernels.

Axes: T tokens, C columns of the fused projection that holds the gates, H heads, W columns of a head, I = H W.
With ``n = x * rstd * weight`` for heads with a norm, else ``n = x``: ``y = n * a(gate)``, and
``d_n = d_y * a(gate)``, ``d_gate = d_y * n * a'(gate)``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from lightning_fastft.kernels.backends import one_kernel, wide_dtype
from lightning_fastft.kernels.head_columns import HeadColumns

ACTIVATIONS = ("sigmoid", "silu")


class HeadGateForm(NamedTuple):
    """Layout of the gates, activation and norm.

    Args:
        columns: Columns of the gates in the fused projection.
        activation: "sigmoid" (gated attention) or "silu" (gated delta rule).
        has_norm: Each head passes an RMSNorm before the product with the gate.
        eps: Added to the mean square inside the norm.
    """

    columns: HeadColumns
    activation: str = "sigmoid"
    has_norm: bool = False
    eps: float = 1e-6


@one_kernel
def head_gate_forward(
    x_THW: torch.Tensor, rows_TC: torch.Tensor, weight_W: torch.Tensor | None, *, form: HeadGateForm
) -> torch.Tensor:
    """Return the gated heads, concatenated, shape (T, I), each value rounded once."""
    wide = wide_dtype(x_THW.dtype)
    x, gate = x_THW.to(wide), form.columns.read(rows_TC).to(wide)
    if weight_W is not None:
        x = x * _reciprocal_rms(x, form) * weight_W.to(wide)
    return (x * _activate(gate, form)[0]).to(x_THW.dtype).flatten(1)


@one_kernel
def head_gate_backward(
    d_y_TI: torch.Tensor,
    x_THW: torch.Tensor,
    rows_TC: torch.Tensor,
    weight_W: torch.Tensor | None,
    *,
    form: HeadGateForm,
    needs_weight: bool,
    out: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the gradients of head_gate_forward, and write the gradient of the gates into their columns of ``out``."""
    wide = wide_dtype(x_THW.dtype)
    d_y, x, gate = d_y_TI.unflatten(1, x_THW.shape[1:]).to(wide), x_THW.to(wide), form.columns.read(rows_TC).to(wide)
    activated, slope = _activate(gate, form)
    d_x, d_weight_W = d_y * activated, None
    scaled = x
    if weight_W is not None:
        rstd, weight = _reciprocal_rms(x, form), weight_W.to(wide)
        normed = x * rstd
        scaled = normed * weight
        if needs_weight:
            d_weight_W = (d_x * normed).sum(dim=(0, 1))
        d_x = d_x * weight
        d_x = rstd * (d_x - normed * (d_x * normed).mean(dim=2, keepdim=True))
    form.columns.write(out, d_y * scaled * slope)
    return d_x.to(x_THW.dtype), d_weight_W


def _activate(gate: torch.Tensor, form: HeadGateForm) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the activation of a gate and its slope."""
    share = torch.sigmoid(gate)
    if form.activation == "sigmoid":
        return share, share * (1 - share)
    return gate * share, share * (1 + gate * (1 - share))


def _reciprocal_rms(x_THW: torch.Tensor, form: HeadGateForm) -> torch.Tensor:
    return torch.rsqrt(x_THW.square().mean(dim=2, keepdim=True) + form.eps)
