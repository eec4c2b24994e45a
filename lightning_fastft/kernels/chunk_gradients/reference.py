"""Gradients of queries, keys and decays in chunked linear attention, chunk by chunk in plain PyTorch.

Axes: T tokens, H heads of queries and keys, J heads of values, K and V their widths, N chunks, S documents.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from lightning_fastft.kernels.backends import one_kernel, wide_dtype

# Tokens of a chunk.
CHUNK = 64


class ChunkInputs(NamedTuple):
    """What the gradients of a chunked linear attention are computed from.

    Args:
        q_THK: Queries. Shape (T, H, K); bf16, fp16, fp32 or float64, contiguous.
        k_THK: Keys, like q_THK.
        v_TJV: Values, after the prediction of the state was subtracted. Shape (T, J, V), J a multiple of H; dtype of
            q_THK, contiguous.
        d_out_TJV: Gradient of the output, like v_TJV.
        state_NJKV: State at the start of each chunk. Shape (N, J, K, V), any floating dtype, contiguous.
        d_state_NJKV: Gradient of the state at the end of each chunk, like state_NJKV.
        decay_TJ: Binary logarithms of the decays, summed inside each chunk. Shape (T, J), fp32 or float64, contiguous.
        start_S1: First token of each document, and T. Shape (S + 1,), int32 or int64.
        chunk_N2: Document of each chunk and index of the chunk in it, in pack order. Shape (N, 2), int32 or int64.
        scale: Factor on the queries.
        d_value_TJV: Gradient of v_TJV if values are ``u - w state``; None otherwise.
    """

    q_THK: torch.Tensor
    k_THK: torch.Tensor
    v_TJV: torch.Tensor
    d_out_TJV: torch.Tensor
    state_NJKV: torch.Tensor
    d_state_NJKV: torch.Tensor
    decay_TJ: torch.Tensor
    start_S1: torch.Tensor
    chunk_N2: torch.Tensor
    scale: float
    d_value_TJV: torch.Tensor | None = None


@one_kernel
def chunk_gradients(inputs: ChunkInputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Return the gradients, computed in fp32 (float64 for float64) and rounded once."""
    q_THK, k_THK, v_TJV, d_out_TJV, state_NJKV, d_state_NJKV, decay_TJ, start_S1, chunk_N2, scale, d_value_TJV = inputs
    wide = wide_dtype(q_THK.dtype)
    if q_THK.device.type == "meta":
        # Offsets have no values there.
        w_shape = *v_TJV.shape[:2], q_THK.shape[2]
        d_w_TJK = None if d_value_TJV is None else q_THK.new_empty(w_shape)
        return torch.empty_like(q_THK), torch.empty_like(k_THK), d_w_TJK, torch.empty_like(decay_TJ, dtype=wide)
    num_members = v_TJV.shape[1] // q_THK.shape[1]
    # Repeat the heads of queries and keys to the number of value heads.
    q_TJK, k_TJK = (x.to(wide).repeat_interleave(num_members, dim=1) for x in (q_THK, k_THK))
    d_q_TJK, d_k_TJK = torch.zeros_like(q_TJK), torch.zeros_like(k_TJK)
    d_w_TJK = None if d_value_TJV is None else torch.zeros_like(q_TJK)
    d_decay_TJ = torch.zeros(decay_TJ.shape, dtype=wide, device=decay_TJ.device)
    starts = start_S1.tolist()
    for number, (document, place) in enumerate(chunk_N2.tolist()):
        begin = starts[document] + place * CHUNK
        rows = slice(begin, min(begin + CHUNK, starts[document + 1]))
        # Heads come first; products run over tokens.
        q, k, v, d_out = (x[rows].to(wide).transpose(0, 1) for x in (q_TJK, k_TJK, v_TJV, d_out_TJV))
        state_T, d_state_T = (x[number].to(wide).transpose(1, 2) for x in (state_NJKV, d_state_NJKV))
        decay = decay_TJ[rows].to(wide).T
        last = decay[:, -1:]
        # tril: a token attends to itself and earlier tokens; the exponentials of other differences could overflow.
        difference = (decay[:, :, None] - decay[:, None, :]).tril()
        d_score = (d_out @ v.transpose(1, 2) * difference.exp2()).tril() * scale
        d_q = d_out @ state_T * (scale * decay.exp2())[..., None] + d_score @ k
        d_k_state = v @ d_state_T * (last - decay).exp2()[..., None]
        d_k = d_k_state + d_score.transpose(1, 2) @ q
        d_decay = (d_q * q).sum(-1) - (d_k * k).sum(-1)
        d_decay[:, -1] += last[:, 0].exp2() * (state_T * d_state_T).sum((1, 2)) + (d_k_state * k).sum((1, 2))
        d_q_TJK[rows], d_k_TJK[rows], d_decay_TJ[rows] = d_q.transpose(0, 1), d_k.transpose(0, 1), d_decay.T
        if d_w_TJK is not None and d_value_TJV is not None:
            d_w_TJK[rows] = -(d_value_TJV[rows].to(wide).transpose(0, 1) @ state_T).transpose(0, 1)
    d_q_THK, d_k_THK = (d.unflatten(1, (-1, num_members)).sum(2).to(q_THK.dtype) for d in (d_q_TJK, d_k_TJK))
    return d_q_THK, d_k_THK, None if d_w_TJK is None else d_w_TJK.to(q_THK.dtype), d_decay_TJ
