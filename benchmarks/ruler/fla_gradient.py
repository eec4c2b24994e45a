"""Compute with our kernel the one gradient that fla-core refuses on Hopper with Triton 3.4 to 3.7.0, for peers.

fla-core's chunk_bwd_dqkwg raises there (fla-org issue 640), so no system that trains gated delta rules with it would
have a row. All else in fla-core is unchanged.
"""

from __future__ import annotations

from typing import Any

import torch

from lightning_fastft.kernels.chunk_gradients.op import chunk_gradients
from lightning_fastft.kernels.chunk_gradients.reference import CHUNK, ChunkInputs


def install_fla_gradient() -> bool:
    """Replace chunk_bwd_dqkwg in this process; return False without fla-core."""
    try:
        import fla.ops.gated_delta_rule.chunk as chunk
    except ImportError:
        return False
    chunk.chunk_bwd_dqkwg = _gradients
    return True


def _gradients(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    do: torch.Tensor,
    h: torch.Tensor,
    dh: torch.Tensor,
    w: torch.Tensor,
    g: torch.Tensor,
    dv: torch.Tensor,
    scale: float,
    cu_seqlens: torch.Tensor | None = None,
    chunk_indices: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, ...]:
    """Return what fla-core's function returns, for packed rows or rows of one length."""
    num_rows, num_tokens = q.shape[:2]
    if cu_seqlens is None or chunk_indices is None:
        num_chunks = -(-num_tokens // CHUNK)
        cu_seqlens = torch.arange(num_rows + 1, device=q.device, dtype=torch.int32) * num_tokens
        places = torch.arange(num_rows * num_chunks, device=q.device, dtype=torch.int32)
        chunk_indices = torch.stack([places // num_chunks, places % num_chunks], dim=1)
    rows = (x.flatten(0, 1).contiguous() for x in (q, k, v, do, h, dh, g))
    d_value = dv.flatten(0, 1).contiguous()
    gradients = chunk_gradients(ChunkInputs(*rows, cu_seqlens, chunk_indices, scale, d_value_TJV=d_value))
    return tuple(x.unflatten(0, (num_rows, num_tokens)) for x in gradients if x is not None)
