"""Mamba-2 on a packed batch: the scan of ``kernels/state_scan`` replaces transformers' chunked scan.

The kernel is our own. fla-core's ``simple_gla`` computes the same recurrence, but it reads the number of chunks on the
host three times per layer, and it needs B and C copied to every head and saved for the backward. With 128 heads in 8
groups, states of 128 and heads of 64 the copies are four times the size of x. Our scan saves only its inputs.

Axes: T tokens of the pack, H heads, W width of a head, G groups of heads with the same B and C, N width of a state.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import torch
from torch.nn.functional import softplus

from lightning_fastft.core.errors import UnsupportedModelError
from lightning_fastft.kernels.chunk_gradients.reference import CHUNK
from lightning_fastft.kernels.state_scan.op import state_scan
from lightning_fastft.packing.context import BatchContext


def _scan(
    x_1THW: torch.Tensor,
    dt_1TH: torch.Tensor,
    a_H: torch.Tensor,
    b_1TGN: torch.Tensor,
    c_1TGN: torch.Tensor,
    *,
    D: torch.Tensor,
    dt_bias: torch.Tensor,
    dt_softplus: bool,
    dt_limit: tuple[float, float],
    context: BatchContext,
    z: torch.Tensor | None = None,
    **keywords: Any,
) -> torch.Tensor:
    """Compute transformers' ``mamba2_chunk_scan``, each document from an empty state.

    Time steps are computed in fp32, as in mamba_ssm's kernels.
    """
    if z is not None or not dt_softplus:
        raise UnsupportedModelError(
            "This version of transformers calls the scan of Mamba-2 with a gate, or without softplus on the time "
            "steps; our GPU kernel supports neither. Train this model with one document per row."
        )
    dt_TH = softplus(dt_1TH[0].float() + dt_bias.float()).clamp(*dt_limit)
    y_THW = state_scan(
        x_1THW[0],
        dt_TH,
        a_H.float(),
        b_1TGN[0],
        c_1TGN[0],
        D.float(),
        chunks=context.chunks(CHUNK),
        is_checked=False,
    )
    return y_THW[None]


def _skip(*arguments: Any, **keywords: Any) -> None:
    """Return None like transformers' ``mamba2_split_conv1d_scan_combined`` without mamba_ssm; separate steps run."""


FUNCTIONS: MappingProxyType[str, Callable[..., Any]] = MappingProxyType(
    {"mamba2_split_conv1d_scan_combined": _skip, "mamba2_chunk_scan": _scan}
)
