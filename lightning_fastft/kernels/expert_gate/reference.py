"""The gate of an expert in plain PyTorch: the formula and its gradient, the reference of the Triton kernels.

Axes: N routed slots, sorted by expert; F expert width; P = 2 F columns that hold gate and up; R ranks of a low-rank
    product.
Every form is ``share(gate) * gate * up``. For tanh-GELU the share is ``sigmoid(2 u)``, which equals
``(1 + tanh(u)) / 2``.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch.torch_version import TorchVersion

from lightning_fastft.kernels.backends import one_kernel, wide_dtype
from lightning_fastft.kernels.fp8_linear.reference import Fp8Rows, quantise_rows

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "clamped")
# tanh-GELU: u = sqrt(2 / pi) * (gate + 0.044715 * gate^3), arXiv 1606.08415.
TANH_SCALE = math.sqrt(2.0 / math.pi)
TANH_CUBE = 0.044715
# torch.clamp passes the gradient of a value on its bound up to torch 2.13, and none since torch 2.14.
CLAMP_PASSES_BOUND = TorchVersion(torch.__version__) < "2.14"


class GateForm(NamedTuple):
    """Form of the activation between the two products of an expert.

    Args:
        is_interleaved: True if gate and up columns alternate (``gate = [..., ::2]``, gpt-oss); False if the halves are
            gate and up.
        activation: "silu", "gelu" or "gelu_tanh" for ``a(gate) * up``; "clamped" for ``(up + 1) * gate * sigmoid(alpha
            * gate)`` of clamped values.
        limit: "clamped" only: gate is clamped from above, up from both sides.
        alpha: "clamped" only: steepness of the sigmoid.

    Source:
        GLU variants, arXiv 2002.05202; "clamped" as in gpt-oss (transformers, modeling_gpt_oss.py).

    Example:
        >>> GateForm(is_interleaved=True, activation="clamped").limit
        7.0
    """

    is_interleaved: bool = False
    activation: str = "silu"
    limit: float = 7.0
    alpha: float = 1.702


class LowRankRows(NamedTuple):
    """Addend of the gradient of the activation: ``low[n] @ factor``.

    Args:
        low_NR: Low-rank rows, already scaled. Shape (N, R); dtype of the gradient; last axis contiguous, any row
            stride.
        factor_RF: Matrix that multiplies low_NR. Shape (R, F); dtype of the gradient; last axis contiguous, any row
            stride.
    """

    low_NR: torch.Tensor
    factor_RF: torch.Tensor


@one_kernel
def gate_forward(gate_up_NP: torch.Tensor, *, form: GateForm, end_E: torch.Tensor | None = None) -> torch.Tensor:
    """Return the activation, rounded once from fp32 (float64 for float64); for all rows; end_E is ignored."""
    gate_NF, up_NF = split_columns(gate_up_NP.to(wide_dtype(gate_up_NP.dtype)), form)
    gate_NF, factor_NF = _clamp(gate_NF, up_NF, form)
    return (_glu(gate_NF, form) * factor_NF).to(gate_up_NP.dtype)


@one_kernel
def gate_forward_quantised(gate_up_NP: torch.Tensor, *, form: GateForm, round_scales_to_power_of_2: bool) -> Fp8Rows:
    """Return the rounded activation in e4m3."""
    act_NF = gate_forward(gate_up_NP, form=form)
    return quantise_rows(act_NF, factor_I=None, round_scales_to_power_of_2=round_scales_to_power_of_2)


@one_kernel
def gate_backward_quantised(
    d_act_NF: torch.Tensor,
    gate_up_NP: torch.Tensor,
    *,
    form: GateForm,
    factor_P: torch.Tensor,
    round_scales_to_power_of_2: bool,
    need_act: bool,
) -> tuple[Fp8Rows, Fp8Rows | None]:
    """Return the rounded gradients times the factor, and the rounded activation, in e4m3."""
    d_gate_up_NP, act_NF, _ = gate_backward(d_act_NF, gate_up_NP, form=form, need_act=need_act)
    d_gate_up, act = (
        None
        if rows is None
        else quantise_rows(rows, factor_I=factor, round_scales_to_power_of_2=round_scales_to_power_of_2)
        for rows, factor in ((d_gate_up_NP, factor_P), (act_NF, None))
    )
    assert d_gate_up is not None
    return d_gate_up, act


@one_kernel
def gate_backward(
    d_act_NF: torch.Tensor,
    gate_up_NP: torch.Tensor,
    *,
    form: GateForm,
    weight_N: torch.Tensor | None = None,
    addend: LowRankRows | None = None,
    need_act: bool = False,
    end_E: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Return the gradients of ``weight * (activation @ W)``, given the gradient of the activation without its
    weight; for all rows; end_E is ignored.
    """
    dtype, wide = gate_up_NP.dtype, wide_dtype(gate_up_NP.dtype)
    raw_gate_NF, raw_up_NF = split_columns(gate_up_NP.to(wide), form)
    gate_NF, factor_NF = _clamp(raw_gate_NF, raw_up_NF, form)
    glu_NF = _glu(gate_NF, form)
    act_NF = glu_NF * factor_NF
    d_act_NF = d_act_NF.to(wide)
    if addend is not None:
        d_act_NF = d_act_NF + addend.low_NR.to(wide) @ addend.factor_RF.to(wide)
    d_weight_N = None
    if weight_N is not None:
        d_weight_N = (d_act_NF * act_NF).sum(dim=1)
        d_act_NF = d_act_NF * weight_N.to(wide)[:, None]
    d_gate_NF = d_act_NF * factor_NF * (_share(gate_NF, form) + gate_NF * _share_slope(gate_NF, form))
    d_up_NF = d_act_NF * glu_NF
    if form.activation == "clamped":
        size_NF, limit = raw_up_NF.abs(), form.limit
        is_gate_inside_NF = raw_gate_NF <= limit if CLAMP_PASSES_BOUND else raw_gate_NF < limit
        is_up_inside_NF = size_NF <= limit if CLAMP_PASSES_BOUND else size_NF < limit
        d_gate_NF = torch.where(is_gate_inside_NF, d_gate_NF, 0.0)
        d_up_NF = torch.where(is_up_inside_NF, d_up_NF, 0.0)
    d_gate_up_NP = torch.empty(gate_up_NP.shape, dtype=dtype, device=gate_up_NP.device)
    d_gate_view_NF, d_up_view_NF = split_columns(d_gate_up_NP, form)
    d_gate_view_NF.copy_(d_gate_NF)
    d_up_view_NF.copy_(d_up_NF)
    return d_gate_up_NP, act_NF.to(dtype) if need_act else None, d_weight_N


def split_columns(gate_up_NP: torch.Tensor, form: GateForm) -> tuple[torch.Tensor, torch.Tensor]:
    """Return views of the columns of the gate and of the up projection."""
    if form.is_interleaved:
        return gate_up_NP[:, ::2], gate_up_NP[:, 1::2]
    num_columns = gate_up_NP.shape[1] // 2
    return gate_up_NP[:, :num_columns], gate_up_NP[:, num_columns:]


def _clamp(gate_NF: torch.Tensor, up_NF: torch.Tensor, form: GateForm) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gate and the factor on its activation, clamped if the form says so."""
    if form.activation != "clamped":
        return gate_NF, up_NF
    return gate_NF.clamp(max=form.limit), up_NF.clamp(min=-form.limit, max=form.limit) + 1


def _glu(gate_NF: torch.Tensor, form: GateForm) -> torch.Tensor:
    """Return the gate times its share; torch's silu rounds once less than the product."""
    return torch.nn.functional.silu(gate_NF) if form.activation == "silu" else gate_NF * _share(gate_NF, form)


def _share(gate_NF: torch.Tensor, form: GateForm) -> torch.Tensor:
    """Return the share of the gate that the activation passes."""
    if form.activation == "gelu":
        return 0.5 * (1 + torch.erf(gate_NF * math.sqrt(0.5)))
    return torch.sigmoid(_exponent(gate_NF, form))


def _share_slope(gate_NF: torch.Tensor, form: GateForm) -> torch.Tensor:
    """Return the derivative of the share; sigmoid(-x) is 1 - sigmoid(x) without cancellation."""
    if form.activation == "gelu":
        return torch.exp(-0.5 * gate_NF * gate_NF) / math.sqrt(2.0 * math.pi)
    exponent_NF = _exponent(gate_NF, form)
    slope_NF = torch.sigmoid(exponent_NF) * torch.sigmoid(-exponent_NF)
    if form.activation == "gelu_tanh":
        return slope_NF * (2.0 * TANH_SCALE * (1 + 3.0 * TANH_CUBE * gate_NF * gate_NF))
    return slope_NF * form.alpha if form.activation == "clamped" else slope_NF


def _exponent(gate_NF: torch.Tensor, form: GateForm) -> torch.Tensor:
    """Return the argument of the sigmoid."""
    if form.activation == "gelu_tanh":
        return 2.0 * TANH_SCALE * (gate_NF + TANH_CUBE * gate_NF * gate_NF * gate_NF)
    return gate_NF * form.alpha if form.activation == "clamped" else gate_NF
