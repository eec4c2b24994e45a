"""Attention over a packed row with the kernels of torch's scaled_dot_product_attention, in any dtype and head width.

On CUDA the memory-efficient kernel reads document offsets. Elsewhere, and for windows, images and documents that
continue prefixes, masks are dense and built once per batch. Queries run in blocks there, because the keys that a block
can see are few: those from the start of its first document to its last row.
Axes: T tokens of the pack, S1 document borders, H query heads, G key/value heads, W width of a head.
"""

from __future__ import annotations

from typing import Any

import torch

from lightning_fastft.core.once_differentiable import once_differentiable
from lightning_fastft.kernels.backends import capability_of
from lightning_fastft.kernels.launch import contiguous_rows
from lightning_fastft.packing.context import BatchContext
from lightning_fastft.packing.prefixes import VarlenArguments

# Queries of a block. Fewer compute fewer hidden scores and launch more kernels (benchmarks/masked_attention.py).
QUERY_ROWS = 512
# Limits of the memory-efficient kernel: dtypes, the oldest GPU with bf16, steps of the width.
_OFFSET_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_OFFSET_CAPABILITY = (8, 0)
_OFFSET_WIDTH_STEP = 8
# Its mask in which each query sees the keys up to its own, counted from the end of the document.
_CAUSAL_FROM_END = 2


def sdpa_attention(
    q_THW: torch.Tensor,
    k_TGW: torch.Tensor,
    v_TGW: torch.Tensor,
    *,
    context: BatchContext,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """Return attention within each document, shape (T, H, width of a value).

    Cost:
        That of offset_attention on CUDA without windows, images and prefixes, else that of block_attention.
    """
    sees_all = window is None or window >= context.max_length
    is_causal = sees_all and not context.has_prefixes and context.spans_of(window) is None
    is_able = q_THW.dtype in _OFFSET_DTYPES and capability_of(q_THW.device) >= _OFFSET_CAPABILITY
    if is_causal and is_able and q_THW.shape[2] % _OFFSET_WIDTH_STEP == v_TGW.shape[2] % _OFFSET_WIDTH_STEP == 0:
        return offset_attention(q_THW, k_TGW, v_TGW, context=context, scale=scale)
    return block_attention(q_THW, k_TGW, v_TGW, context=context, scale=scale, window=window)


def offset_attention(
    q_THW: torch.Tensor, k_TGW: torch.Tensor, v_TGW: torch.Tensor, *, context: BatchContext, scale: float
) -> torch.Tensor:
    """Return causal attention within each document by the memory-efficient kernel, on CUDA.

    Cost:
        Scores of visible keys only, half of each document; copies of keys and values for each query head, in the
        forward and again in the backward. Saves q, k, v and the output. No host sync.

    Source:
        arXiv:2112.05682 through ``aten::_efficient_attention_forward`` and ``_backward``.
    """
    ready = map(contiguous_rows, (q_THW, k_TGW, v_TGW))
    out: torch.Tensor = _OffsetAttention.apply(*ready, context.varlen(), scale)
    return out


class _OffsetAttention(torch.autograd.Function):
    """Save q, k, v, the output and its log-sum-exp; the kernel needs keys and values of every query head."""

    @staticmethod
    def forward(
        ctx: Any,
        q_THW: torch.Tensor,
        k_TGW: torch.Tensor,
        v_TGW: torch.Tensor,
        varlen: VarlenArguments,
        scale: float,
    ) -> torch.Tensor:
        num_heads = q_THW.shape[1]
        out_1THW, lse, seed, offset, *lengths = torch.ops.aten._efficient_attention_forward(
            *(x[None] for x in (q_THW, _repeat(k_TGW, num_heads), _repeat(v_TGW, num_heads))),
            None, varlen.start_S1, varlen.start_S1, varlen.max_length, varlen.max_length,
            0.0, _CAUSAL_FROM_END, True, scale=scale,
        )  # fmt: skip
        out_THW: torch.Tensor = out_1THW[0]
        ctx.save_for_backward(q_THW, k_TGW, v_TGW, out_THW, lse, seed, offset, varlen.start_S1)
        ctx.lengths, ctx.scale = lengths, scale
        return out_THW

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out_THW: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q_THW, k_TGW, v_TGW, out_THW, lse, seed, offset, start_S1 = ctx.saved_tensors
        num_heads, num_groups = q_THW.shape[1], k_TGW.shape[1]
        rows = (d_out_THW.contiguous(), q_THW, _repeat(k_TGW, num_heads), _repeat(v_TGW, num_heads))
        d_q, d_k, d_v, _ = torch.ops.aten._efficient_attention_backward(
            *(x[None] for x in rows), None, out_THW[None], start_S1, start_S1, *ctx.lengths,
            lse, 0.0, seed, offset, _CAUSAL_FROM_END, False, scale=ctx.scale,
        )  # fmt: skip
        d_k_TGW, d_v_TGW = (
            d_x[0] if num_heads == num_groups else d_x[0].unflatten(1, (num_groups, -1)).sum(2) for d_x in (d_k, d_v)
        )
        return d_q[0], d_k_TGW, d_v_TGW, None, None


def block_attention(
    q_THW: torch.Tensor,
    k_TGW: torch.Tensor,
    v_TGW: torch.Tensor,
    *,
    context: BatchContext,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """Return attention within each document through dense masks of blocks of queries.

    Masks are additive in the dtype of the queries: a bool mask would be converted again, and kept for the backward,
    in every layer.

    Cost:
        T x (QUERY_ROWS + tokens of a document before a block) scores, and as many elements of masks per (batch,
        window); no host sync.
    """
    q_1HTW, k_1HTW, v_1HTW = (x.transpose(0, 1)[None] for x in (q_THW, k_TGW, v_TGW))
    blocks = context.mask_blocks(window=window, dtype=q_THW.dtype, num_rows=QUERY_ROWS)
    out_1HTW = torch.cat(
        [
            dense_attention(
                q_1HTW[:, :, queries],
                k_1HTW[:, :, keys],
                v_1HTW[:, :, keys],
                mask_B1QT=mask_11RK,
                scale=scale,
            )
            for queries, keys, mask_11RK in blocks
        ],
        dim=2,
    )
    return out_1HTW[0].transpose(0, 1)


def dense_attention(
    q_BHQW: torch.Tensor, k_BGTW: torch.Tensor, v_BGTW: torch.Tensor, *, mask_B1QT: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """Return scaled_dot_product_attention with grouped key/value heads, shape (B, H, Q, width of a value).

    Keys and values are repeated: with a mask, CUDA's memory-efficient kernel does not support grouped heads, and
    enable_gqa would silently run the slow kernel.
    """
    num_heads, is_grouped = q_BHQW.shape[1], q_BHQW.shape[1] > k_BGTW.shape[1]
    if is_grouped and q_BHQW.is_cuda:
        k_BGTW, v_BGTW, is_grouped = _repeat(k_BGTW, num_heads), _repeat(v_BGTW, num_heads), False
    return torch.nn.functional.scaled_dot_product_attention(
        q_BHQW, k_BGTW, v_BGTW, attn_mask=mask_B1QT, scale=scale, enable_gqa=is_grouped
    )


def _repeat(x: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Return keys or values, whose heads are axis 1, for every query head; the tensor itself if heads share none."""
    num_repeats = num_heads // x.shape[1]
    return x if num_repeats == 1 else x.repeat_interleave(num_repeats, dim=1)
