"""The gated delta rule inside a fused decoder layer.

Axes: T tokens, D model width, C columns of the fused projection.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from lightning_fastft.activations.segments import Session
from lightning_fastft.fused.functions.projections import norm_project, project_add
from lightning_fastft.fused.functions.rows import Norm
from lightning_fastft.fused.linears import FusedLinear
from lightning_fastft.hf.mixers import MixerFamily
from lightning_fastft.kernels.delta_inputs.reference import DeltaForm, DeltaParameters
from lightning_fastft.mixers.gated_delta import gated_delta
from lightning_fastft.packing.context import BatchContext

# Layers of a mixer that follow its projections.
_OTHERS = ("conv1d", "norm", "out_proj")


def mix_delta(
    mixer: Any,
    x_TD: torch.Tensor,
    *,
    norm: Norm | None,
    projections: FusedLinear,
    last: FusedLinear,
    context: BatchContext,
    session: Session | None,
) -> torch.Tensor:
    """Return the residual stream after the mixer.

    Args:
        mixer: The gated delta layer.
        x_TD: The residual stream.
        norm: The norm before the mixer; None without one.
        projections: All projections of its input, as one product.
        last: Its output projection.
        context: Metadata of the pack.
        session: Activations of the step; None keeps them.

    Cost:
        That of norm_project, gated_delta and project_add.
    """
    rows_TC, x_TD = norm_project(x_TD, norm, projections, session=session)
    out_TI = gated_delta(
        rows_TC,
        DeltaParameters(mixer.conv1d.weight.squeeze(1), mixer.A_log, mixer.dt_bias),
        mixer.norm.weight,
        form=_form(mixer),
        eps=float(mixer.norm.variance_epsilon),
        family=MixerFamily(type(mixer).__name__, "gated delta rule"),
        context=context,
    )
    return project_add(out_TI, x_TD, last, session=session)


def delta_modules(mixer: Any, projections: Sequence[str]) -> list[nn.Module]:
    """Return the modules whose own forward does not run."""
    return [mixer, *(mixer._modules[name] for name in (*projections, *_OTHERS))]


def delta_obstacle(mixer: Any, projections: Sequence[str]) -> str:
    """Return why a mixer cannot be fused, or ""."""
    name = type(mixer).__name__
    found, known = set(mixer._modules), {*projections, *_OTHERS}
    if found != known or {own for own, _ in mixer.named_parameters(recurse=False)} != {"A_log", "dt_bias"}:
        return f"{name} has unknown or missing parts: {', '.join(sorted(found ^ known)) or 'parameters'}"
    convolution = mixer.conv1d
    if type(convolution) is not nn.Conv1d or convolution.bias is not None or set(convolution.dilation) != {1}:
        return f"the convolution of {name} has an adapter, a bias or a dilation"
    if mixer.activation != "silu" or getattr(mixer.norm, "activation", "silu") != "silu":
        return f"the activation of {name} is not silu"
    return ""


def _form(mixer: Any) -> DeltaForm:
    return DeltaForm(
        num_key_heads=mixer.num_k_heads,
        num_heads=mixer.num_v_heads,
        key_width=mixer.head_k_dim,
        value_width=mixer.head_v_dim,
        is_grouped="in_proj_qkvz" in mixer._modules,
    )
