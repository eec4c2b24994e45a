"""The gated delta rule of packed documents on a GPU: kernels of fla-core, and our kernel for one of the gradients.

fla-core's own function raises in its backward on Hopper with Triton 3.4 to 3.7.0, which compile one of its kernels
wrongly (fla-org issue 640). ``kernels/chunk_gradients`` replaces that kernel for every version of Triton.

Axes: T tokens, G heads of queries and keys, H heads of values, W columns of a head, N chunks of documents.
"""

from __future__ import annotations

from typing import Any

import torch

from lightning_fastft.core.once_differentiable import once_differentiable
from lightning_fastft.kernels.chunk_gradients.op import chunk_gradients
from lightning_fastft.kernels.chunk_gradients.reference import CHUNK, ChunkInputs
from lightning_fastft.mixers.fla_functions import fla_functions
from lightning_fastft.packing.chunks import Chunks


def delta_rule(
    q_TGW: torch.Tensor,
    k_TGW: torch.Tensor,
    v_THW: torch.Tensor,
    g_TH: torch.Tensor,
    beta_TH: torch.Tensor,
    chunks: Chunks,
) -> torch.Tensor:
    """Return the output of the gated delta rule, each document from an empty state; differentiable.

    ``S[t] = exp(g) S[t - 1] + k (beta (v - k^T exp(g) S[t - 1]))^T`` and ``out = S^T q / sqrt(width)``.

    Args:
        q_TGW: Queries of unit length. Shape (T, G, W); bf16, fp16, or fp32 (multiplied in Triton's default precision,
            which ``install_mixers`` sets).
        k_TGW: Keys of unit length, like q_TGW.
        v_THW: Values. Shape (T, H, W), H a multiple of G; dtype of q_TGW.
        g_TH: Natural logarithms of the decays. Shape (T, H), fp32.
        beta_TH: Strengths of the updates. Shape (T, H).
        chunks: Documents and chunks of the pack, on the device of the queries.

    Returns:
        Shape (T, H, W), dtype of v_THW, contiguous.

    Raises:
        ImportError: fla-core is not installed.

    Cost:
        Six launches forward and eleven backward; no host sync. Saves the inputs and T * H * 64 values; the backward
        recomputes the states, N * H * W * W values.

    Source:
        Gated delta networks, arXiv 2412.06464; fla-core.
    """
    return _DeltaRule.apply(q_TGW, k_TGW, v_THW, g_TH, beta_TH, chunks)


class _DeltaRule(torch.autograd.Function):
    """Save the inputs, the summed decays and the inverse of each chunk's triangular matrix."""

    @staticmethod
    def forward(
        ctx: Any,
        q_TGW: torch.Tensor,
        k_TGW: torch.Tensor,
        v_THW: torch.Tensor,
        g_TH: torch.Tensor,
        beta_TH: torch.Tensor,
        chunks: Chunks,
    ) -> torch.Tensor:
        fla = fla_functions(q_TGW.device)
        ctx.chunks, ctx.g_dtype = chunks, g_TH.dtype
        places = _chunk_arguments(chunks)
        q, k, v, g, beta = (x[None].contiguous() for x in (q_TGW, k_TGW, v_THW, g_TH, beta_TH))
        decay = fla.chunk_local_cumsum(g, chunk_size=CHUNK, scale=fla.RCP_LN2, **places)
        w, u, inverse = fla.chunk_gated_delta_rule_fwd_intra(k=k, v=v, g=decay, beta=beta, chunk_size=CHUNK, **places)
        state, value, _ = fla.chunk_gated_delta_rule_fwd_h(
            k=k, w=w, u=u, g=decay, chunk_size=CHUNK, chunk_offsets=chunks.first_S1, **places
        )
        ctx.save_for_backward(q, k, v, decay, beta, inverse)
        out: torch.Tensor = fla.chunk_fwd_o(
            q=q, k=k, v=value, h=state, g=decay, scale=_scale(q), chunk_size=CHUNK, **places
        )
        return out[0].to(v_THW.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out_THW: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        fla = fla_functions(d_out_THW.device)
        q, k, v, decay, beta, inverse = ctx.saved_tensors
        chunks: Chunks = ctx.chunks
        places, scale, d_out = _chunk_arguments(chunks), _scale(q), d_out_THW[None].contiguous()
        w, u = fla.recompute_w_u_fwd(k=k, v=v, beta=beta, A=inverse, g=decay, **places)
        state, value, _ = fla.chunk_gated_delta_rule_fwd_h(
            k=k, w=w, u=u, g=decay, chunk_size=CHUNK, chunk_offsets=chunks.first_S1, **places
        )
        d_value = fla.chunk_bwd_dv_local(q=q, k=k, g=decay, do=d_out, scale=scale, chunk_size=CHUNK, **places)
        d_state, _, d_value = fla.chunk_gated_delta_rule_bwd_dhu(
            q=q,
            k=k,
            w=w,
            g=decay,
            do=d_out,
            dv=d_value,
            scale=scale,
            chunk_size=CHUNK,
            chunk_offsets=chunks.first_S1,
            **places,
        )
        tensors = q[0], k[0], value[0], d_out[0], state[0], d_state[0], decay[0], chunks.start_S1, chunks.index_C2
        inputs = ChunkInputs(*tensors, scale=scale, d_value_TJV=d_value[0])
        d_q_THK, d_k_THK, d_w_TJK, d_decay_TJ = chunk_gradients(inputs, is_checked=False)
        assert d_w_TJK is not None
        d_k, d_v, d_beta, d_decay = fla.prepare_wy_repr_bwd(
            k=k, v=v, beta=beta, g=decay, A=inverse, dw=d_w_TJK[None], du=d_value, **places
        )
        d_g = fla.chunk_local_cumsum(d_decay.add_(d_decay_TJ[None]), chunk_size=CHUNK, reverse=True, **places)
        return d_q_THK, d_k_THK.add_(d_k[0]), d_v[0], d_g[0].to(ctx.g_dtype), d_beta[0], None


def _chunk_arguments(chunks: Chunks) -> dict[str, torch.Tensor]:
    """Return the arguments that describe documents and chunks to fla-core's functions."""
    return {"cu_seqlens": chunks.start_S1, "chunk_indices": chunks.index_C2}


def _scale(q: torch.Tensor) -> float:
    return float(q.shape[-1] ** -0.5)
