"""Attention over a packed row by its definition, in plain PyTorch; every backend is tested against it.

Axes: T tokens of the pack, H query heads, G key/value heads, W width of a head.
"""

from __future__ import annotations

import torch


def masked_attention(
    q_THW: torch.Tensor,
    k_TGW: torch.Tensor,
    v_TGW: torch.Tensor,
    *,
    mask_TT: torch.Tensor,
    scale: float,
    softcap: float | None = None,
    sink_H: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return softmax(softcap(scale * q k^T) + mask) v, with an optional learned sink in the denominator.

    Softmax runs in float32, or in float64 for float64 inputs; everything is differentiable by autograd.

    Args:
        q_THW: Queries, shape (T, H, W), any floating dtype and device.
        k_TGW: Keys, shape (T, G, W); H is a multiple of G, and head h reads key head h // (H / G).
        v_TGW: Values, shape (T, G, any width).
        mask_TT: True where the query of the row attends to the key of the column. Shape (T, T), bool; every row has at
            least one True.
        scale: Factor on the scores.
        softcap: Scores become softcap * tanh(score / softcap); None for no cap.
        sink_H: One logit per query head that takes part in the softmax and carries no value; None for no sink.

    Returns:
        Shape (T, H, width of a value), dtype and device of q_THW.

    Cost:
        H x T x T scores in float32; no host sync.

    Source:
        arXiv:1706.03762; soft cap arXiv:2408.00118; sinks arXiv:2309.17453 in the learned form of gpt-oss
        (arXiv:2508.10925).
    """
    num_repeats = q_THW.shape[1] // k_TGW.shape[1]
    compute_dtype = torch.promote_types(q_THW.dtype, torch.float32)
    q_HTW, k_HTW, v_HTW = (
        x.to(compute_dtype).transpose(0, 1)
        for x in (q_THW, k_TGW.repeat_interleave(num_repeats, dim=1), v_TGW.repeat_interleave(num_repeats, dim=1))
    )
    score_HTT = q_HTW @ k_HTW.transpose(1, 2) * scale
    if softcap is not None:
        score_HTT = softcap * torch.tanh(score_HTT / softcap)
    score_HTT = score_HTT.masked_fill(~mask_TT, float("-inf"))
    if sink_H is not None:
        sink_HT1 = sink_H.to(compute_dtype)[:, None, None].expand(-1, score_HTT.shape[1], 1)
        share_HTT = torch.cat([score_HTT, sink_HT1], dim=-1).softmax(dim=-1)[..., :-1]
    else:
        share_HTT = score_HTT.softmax(dim=-1)
    return (share_HTT @ v_HTW).transpose(0, 1).to(q_THW.dtype)
