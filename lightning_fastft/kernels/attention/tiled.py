"""Attention over a packed row with our own kernels, in tiles of the row instead of tiles of its longest document.

The gradients of attention sinks are exact.
Axes: T tokens of the pack, S1 document borders, H query heads, G key/value heads, W width of a head.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from lightning_fastft.kernels.attention.flash import Collect, Remember
from lightning_fastft.kernels.launch import aligned_rows, contiguous_rows
from lightning_fastft.packing.context import BatchContext

if TYPE_CHECKING:
    from lightning_fastft.kernels.attention.triton import Documents

# Widths of a head for which tiles were measured.
HEAD_WIDTHS = (64, 128)


def tiled_attention(
    q_THW: torch.Tensor,
    k_TGW: torch.Tensor,
    v_TGW: torch.Tensor,
    *,
    context: BatchContext,
    scale: float,
    window: int | None,
    sink_H: torch.Tensor | None,
    remember: Remember | None = None,
    collect: Collect | None = None,
) -> torch.Tensor:
    """Return attention within each document, shape (T, H, W), fp16 or bf16 on CUDA.

    With ``collect``, which receives the gradients of keys and values per query head, both (T, H, W), the backward does
    not sum them, and autograd gets none. Equal inputs give equal bits, in the backward too.

    Cost:
        Scores of visible keys, and of the hidden ones in tiles at the borders of documents; in the backward they are
        computed twice, once for the queries and once for the keys. Memory linear in T: the backward holds keys and
        values of every query head, 4 T H W bytes. No host sync. Forward and backward of 32 query and 4 key heads of
        width 128 on an H200, 8,192 tokens: 0.84 ms in 19 documents, torch's flash kernels 1.20 ms; 5.1 and 6.5 ms in
        one document (``python -m benchmarks.attention_backends`` measures them).

    Source:
        own, after arXiv:2307.08691
    """
    from lightning_fastft.kernels.attention.triton import Documents

    window = None if window is None or window >= context.max_length else window
    documents = Documents(context.start_S1, context.document_T)
    heads = (contiguous_rows(x_THW) for x_THW in (q_THW, k_TGW, v_TGW))
    out_THW: torch.Tensor = _TiledAttention.apply(*heads, sink_H, documents, scale, window, remember, collect)
    return out_THW


class _TiledAttention(torch.autograd.Function):
    """Attention of the kernels. Saves q, k, v, the output, the log of each denominator (fp32) and the sinks."""

    @staticmethod
    def forward(
        ctx: Any,
        q_THW: torch.Tensor,
        k_TGW: torch.Tensor,
        v_TGW: torch.Tensor,
        sink_H: torch.Tensor | None,
        documents: Documents,
        scale: float,
        window: int | None,
        remember: Remember | None,
        collect: Collect | None,
    ) -> torch.Tensor:
        from lightning_fastft.kernels.attention import triton

        def compute() -> tuple[torch.Tensor, ...]:
            return triton.attend(q_THW, k_TGW, v_TGW, documents, scale=scale, window=window, sink_H=sink_H)

        out_THW, lse_HT = compute() if remember is None else remember(compute)
        ctx.save_for_backward(q_THW, k_TGW, v_TGW, out_THW, lse_HT, sink_H, *documents)
        ctx.scale, ctx.window, ctx.collect = scale, window, collect
        return out_THW

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        from lightning_fastft.kernels.attention import triton

        q_THW, k_TGW, v_TGW, out_THW, lse_HT, sink_H, *borders = ctx.saved_tensors
        d_q_THW, *shares, delta_HT = triton.attend_backward(
            q_THW, k_TGW, v_TGW, triton.Documents(*borders), scale=ctx.scale, window=ctx.window, out_THW=out_THW,
            lse_HT=lse_HT, d_out_THW=aligned_rows(grads[0]),
        )  # fmt: skip
        d_k_TGW = d_v_TGW = d_sink_H = None
        if ctx.collect is not None and q_THW.shape[1] > k_TGW.shape[1]:
            ctx.collect(*shares)
        else:
            d_k_TGW, d_v_TGW = (_sum_shares(share_THW, k_TGW.shape[1]) for share_THW in shares)
        if sink_H is not None and ctx.needs_input_grad[3]:
            d_sink_H = -(torch.exp(sink_H.float()[:, None] - lse_HT) * delta_HT).sum(dim=1).to(sink_H.dtype)
        return d_q_THW, d_k_TGW, d_v_TGW, d_sink_H, None, None, None, None, None


def _sum_shares(share_THW: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
    """Return the sums over the query heads that share a key, added in fp32."""
    num_tokens, num_heads, width = share_THW.shape
    return share_THW if num_heads == num_kv_heads else share_THW.view(num_tokens, num_kv_heads, -1, width).sum(dim=2)
