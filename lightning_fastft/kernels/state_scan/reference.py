"""The scan of Mamba-2 in plain PyTorch, document by document.

Axes: T tokens of the pack, S documents (S1 = S + 1 offsets), C chunks of documents, H heads, W width of a head,
    G groups of heads with the same B and C, N width of a state.
"""

from __future__ import annotations

import torch

from lightning_fastft.packing.chunks import Chunks


def scan(
    x_THW: torch.Tensor,
    dt_TH: torch.Tensor,
    a_H: torch.Tensor,
    b_TGN: torch.Tensor,
    c_TGN: torch.Tensor,
    skip_H: torch.Tensor,
    *,
    chunks: Chunks,
) -> torch.Tensor:
    """Return the outputs of each document, which starts from an empty state.

    For head h of group g: ``state_t = exp(dt_t a) state_(t-1) + dt_t b_t x_t^T`` and ``y_t = c_t state_t + skip x_t``.
    Written out, that is ``y_i = sum over j <= i of (c_i . b_j) exp(a (dt_(j+1) + ... + dt_i)) dt_j x_j + skip x_i``.
    """
    lengths = chunks.start_S1.diff().tolist()
    documents = zip(*(tensor.split(lengths) for tensor in (x_THW, dt_TH, b_TGN, c_TGN)))
    return torch.cat([_scan_document(*document, a_H=a_H, skip_H=skip_H) for document in documents])


def _scan_document(
    x_THW: torch.Tensor,
    dt_TH: torch.Tensor,
    b_TGN: torch.Tensor,
    c_TGN: torch.Tensor,
    *,
    a_H: torch.Tensor,
    skip_H: torch.Tensor,
) -> torch.Tensor:
    num_heads_per_group = x_THW.shape[1] // b_TGN.shape[1]
    sum_HT = (dt_TH * a_H).T.cumsum(1)
    is_later_TT = torch.ones(len(x_THW), len(x_THW), dtype=torch.bool, device=x_THW.device).triu(1)
    decay_HTT = (sum_HT[:, :, None] - sum_HT[:, None, :]).masked_fill(is_later_TT, float("-inf")).exp()
    score_HTT = torch.einsum("ign,jgn->gij", c_TGN, b_TGN).repeat_interleave(num_heads_per_group, dim=0)
    weight_HTT = (score_HTT * decay_HTT * dt_TH.T[:, None, :]).to(x_THW.dtype)
    y_THW = torch.einsum("hij,jhw->ihw", weight_HTT, x_THW)
    return (y_THW + skip_H[:, None] * x_THW).to(x_THW.dtype)
