"""The scan of Mamba-2 in plain PyTorch, document by document; on the meta device, its shapes kernel by kernel.

Axes: T tokens of the pack, S documents (S1 = S + 1 offsets), C chunks of documents, H heads, W width of a head,
    G groups of heads with the same B and C, N width of a state.
"""

from __future__ import annotations

import torch

from lightning_fastft.kernels.backends import one_kernel
from lightning_fastft.packing.chunks import Chunks

Tensors = tuple[torch.Tensor, ...]


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


def scan_forward(*inputs: torch.Tensor, chunks: Chunks) -> torch.Tensor:
    """Return outputs without values, on the meta device; the states on entry to each chunk are temporary memory."""
    return _scan_kernel((_run_states(inputs, chunks), inputs), (_empty_like(inputs[0]),))[0]


def scan_backward(d_y_THW: torch.Tensor, *inputs: torch.Tensor, chunks: Chunks) -> Tensors:
    """Return gradients of the six inputs without values; states and their gradients are temporary memory."""
    x_THW, dt_TH, a_H, b_TGN, c_TGN, skip_H = inputs
    read = _run_states(inputs, chunks), _run_states(inputs, chunks), d_y_THW, inputs
    d_x_THW, d_dt_TH, d_a_H, d_skip_H = _scan_kernel(read, tuple(map(_empty_like, (x_THW, dt_TH, a_H, skip_H))))
    d_b_TGN, d_c_TGN = _scan_kernel(read, (_empty_like(b_TGN), _empty_like(c_TGN)))
    return d_x_THW, d_dt_TH, d_a_H, d_b_TGN, d_c_TGN, d_skip_H


def _run_states(inputs: Tensors, chunks: Chunks) -> torch.Tensor:
    """Return the states of all chunks, shape (C, H, N, W) for C chunks."""
    x_THW, dt_TH, _, b_TGN, *_ = inputs
    states = x_THW.new_empty(len(chunks.index_C2), x_THW.shape[1], b_TGN.shape[2], x_THW.shape[2])
    return _scan_kernel((x_THW, dt_TH, b_TGN), (states,))[0]


def _empty_like(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@one_kernel
def _scan_kernel(read: tuple[Tensors | torch.Tensor, ...], outs: Tensors) -> Tensors:
    return outs
