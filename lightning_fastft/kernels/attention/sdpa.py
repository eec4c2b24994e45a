"""Attention over a packed row with torch's scaled_dot_product_attention and dense masks built once per batch.

It runs on any device, in any dtype and head width. Queries run in blocks, because the keys that a block can see are
few: those from the start of its first document to its last row.
Axes: T tokens of the pack, H query heads, G key/value heads, W width of a head.
"""

from __future__ import annotations

import torch

from lightning_fastft.packing.context import BatchContext

# Queries of a block. Fewer compute fewer hidden scores and launch more kernels (benchmarks/masked_attention.py).
QUERY_ROWS = 512


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
                q_1HTW[:, :, block.queries],
                k_1HTW[:, :, block.keys],
                v_1HTW[:, :, block.keys],
                mask_B1QT=block.mask_11RK,
                scale=scale,
            )
            for block in blocks
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
    num_repeats = q_BHQW.shape[1] // k_BGTW.shape[1]
    is_grouped = num_repeats > 1
    if is_grouped and q_BHQW.is_cuda:
        k_BGTW, v_BGTW, is_grouped = (
            k_BGTW.repeat_interleave(num_repeats, dim=1),
            v_BGTW.repeat_interleave(num_repeats, dim=1),
            False,
        )
    return torch.nn.functional.scaled_dot_product_attention(
        q_BHQW, k_BGTW, v_BGTW, attn_mask=mask_B1QT, scale=scale, enable_gqa=is_grouped
    )
