"""Attention over a packed row with FlexAttention and a block mask: soft caps on a GPU; forward only on a CPU.

Axes: T tokens of the pack, H query heads, G key/value heads, W width of a head.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from lightning_fastft.packing.context import BatchContext

# Windows, gradients on and off, grouped heads, and static and dynamic sizes: one model can need more compiled variants
# than torch's default limit of 8.
MAX_VARIANTS = 64


def flex_attention(
    q_THW: torch.Tensor,
    k_TGW: torch.Tensor,
    v_TGW: torch.Tensor,
    *,
    context: BatchContext,
    scale: float,
    window: int | None,
    softcap: float | None,
    sink_H: torch.Tensor | None,
) -> torch.Tensor:
    """Return attention within each document, shape (T, H, width of a value).

    A sink only takes part in the denominator, so the output is scaled by sigmoid(lse - sink); FlexAttention
    differentiates through lse.

    Cost:
        Memory linear in T on CUDA, T x T on a CPU; compiled once per process, dtype and head shape on CUDA; no host
        sync after that.

    Source:
        arXiv:2412.05496.
    """
    from torch.nn.attention.flex_attention import AuxRequest

    attend = _compiled_flex_attention() if q_THW.is_cuda else _flex_attention()
    with torch._dynamo.config.patch(recompile_limit=MAX_VARIANTS) if q_THW.is_cuda else nullcontext():
        out_1HTW, aux = attend(
            *(x.transpose(0, 1)[None] for x in (q_THW, k_TGW, v_TGW)),
            score_mod=None if softcap is None else _softcap_score(softcap),
            block_mask=context.block_mask(window=window),
            scale=scale,
            enable_gqa=q_THW.shape[1] != k_TGW.shape[1],
            return_aux=AuxRequest(lse=True),
        )
    out_THW = out_1HTW[0].transpose(0, 1)
    if sink_H is None:
        return out_THW
    share_TH = torch.sigmoid(aux.lse[0] - sink_H.float()[:, None]).t()
    return (out_THW * share_TH[..., None]).to(q_THW.dtype)


@functools.cache
def _softcap_score(softcap: float) -> Callable[..., torch.Tensor]:
    """Return the same function object for equal caps, so that the compiled kernel is reused."""

    def cap(
        score: torch.Tensor, batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> torch.Tensor:
        return softcap * torch.tanh(score / softcap)

    return cap


def _flex_attention() -> Callable[..., Any]:
    # Imported on first use: it imports torch's higher-order operators, which plain attention never needs.
    from torch.nn.attention.flex_attention import flex_attention as attend

    return attend


@functools.cache
def _compiled_flex_attention() -> Callable[..., Any]:
    """Return the compiled FlexAttention; a compilation that fails raises.

    An eager run would materialise every score. Sizes become dynamic at the second pack; dynamic=True from the start
    would make the soft cap a run-time number inside the kernel as well.
    """
    return torch.compile(_flex_attention(), fullgraph=True)
