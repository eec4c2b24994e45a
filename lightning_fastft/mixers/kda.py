"""Kimi delta attention on a packed batch: fla-core's ``chunk_kda`` with the offsets of the documents.

Axes: T tokens of the pack, H heads, W width of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import torch

from lightning_fastft.packing.context import BatchContext


def _delta_attention(
    query_1THW: torch.Tensor,
    key_1THW: torch.Tensor,
    value_1THW: torch.Tensor,
    *,
    g: torch.Tensor,
    beta: torch.Tensor,
    use_qk_l2norm_in_kernel: bool,
    context: BatchContext,
    **keywords: Any,
) -> tuple[torch.Tensor, None]:
    """Compute transformers' ``chunk_kimi_delta_attention``, each document from an empty state.

    Cost:
        No host sync: in its graph mode ``chunk_kda`` finds the chunks on the device, with space for the largest
        possible number. Otherwise it reads their number on the host.
    """
    from fla.ops.kda import chunk_kda

    out_1THW, _ = chunk_kda(
        query_1THW,
        key_1THW,
        value_1THW,
        g=g,
        beta=beta,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        cu_seqlens=context.start_S1,
        use_graph=True,
    )
    return out_1THW, None


FUNCTIONS: MappingProxyType[str, Callable[..., Any]] = MappingProxyType(
    {"chunk_kimi_delta_attention": _delta_attention}
)
