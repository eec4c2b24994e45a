"""Gradients of queries, keys and decays in chunked linear attention on a GPU.

Axes: T tokens, H heads of queries and keys, J = H * GROUP heads of values, K and V their widths, N chunks of C tokens.
One program runs per chunk, query head and block of K. Tiles of scores are computed twice, the second time transposed:
Triton 3.4 to 3.7.0 multiplies the transpose of a computed tile wrongly on Hopper (triton-lang/triton, fla-org issue
640).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lightning_fastft.kernels.chunk_gradients.reference import CHUNK, ChunkInputs
from lightning_fastft.kernels.launch import launch
from lightning_fastft.kernels.sizes import ceil_div, next_power_of_2

# A layer of Qwen3.5-9B on an H200 takes 481 us; 668 on 4 warps, 644 with blocks of 32 values, 458 with blocks of 128
# keys, and 1,026 with blocks of 128 values (python -m benchmarks.chunk_gradients).
BLOCK_KEYS = 64
# Bytes of a row of values in a block: 64 values in 16 bits or 32 in fp32, which fit 99 KiB of shared memory.
BLOCK_VALUE_BYTES = 128
NUM_WARPS = 8
NUM_STAGES = 2
# tl.dot needs at least this size along each axis.
_MIN_BLOCK = 16


@triton.jit
def _chunk_gradients_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    d_out_ptr,
    d_value_ptr,
    state_ptr,
    d_state_ptr,
    decay_ptr,
    start_ptr,
    chunk_ptr,
    d_q_ptr,
    d_k_ptr,
    d_w_ptr,
    d_decay_ptr,
    num_tokens,
    scale,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    HAS_W: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Compute the gradients of one chunk. With scores s_ij = exp2(decay_i - decay_j) * scale for j <= i:
    d_q_i = scale * exp2(decay_i) * state d_out_i + sum_j s_ij (d_out_i . v_j) k_j;
    d_k_j = exp2(decay_last - decay_j) * d_state v_j + sum_i s_ij (d_out_i . v_j) q_i;
    d_w_i = -state d_value_i; d_decay_i = d_q_i . q_i - d_k_i . k_i, and at the last token the gradient of the state.
    """
    num_key_blocks = tl.cdiv(KEYS, BLOCK_K)
    chunk, key_block = (tl.program_id(0) // num_key_blocks).to(tl.int64), tl.program_id(0) % num_key_blocks
    head = tl.program_id(1)
    document, place = tl.load(chunk_ptr + 2 * chunk), tl.load(chunk_ptr + 2 * chunk + 1).to(tl.int64)
    end = tl.load(start_ptr + document + 1).to(tl.int64)
    begin = tl.load(start_ptr + document).to(tl.int64) + place * BLOCK_C
    rows = begin + tl.arange(0, BLOCK_C)
    last_row = tl.minimum(begin + BLOCK_C, end) - 1
    keys = key_block * BLOCK_K + tl.arange(0, BLOCK_K)
    inside_rows, inside_keys = rows < end, keys < KEYS
    inside = inside_rows[:, None] & inside_keys[None, :]
    inside_pairs = inside_rows[:, None] & inside_rows[None, :]
    is_seen = (rows[:, None] >= rows[None, :]) & inside_pairs
    sees = (rows[:, None] <= rows[None, :]) & inside_pairs

    places = (rows[:, None] * HEADS + head) * KEYS + keys[None, :]
    q = tl.load(q_ptr + places, mask=inside, other=0.0)
    k = tl.load(k_ptr + places, mask=inside, other=0.0)
    d_q = tl.zeros((BLOCK_C, BLOCK_K), dtype=tl.float32)
    d_k = tl.zeros((BLOCK_C, BLOCK_K), dtype=tl.float32)
    for member in range(GROUP):
        value_head = head * GROUP + member
        d_q_member = tl.zeros((BLOCK_C, BLOCK_K), dtype=tl.float32)
        d_k_member = tl.zeros((BLOCK_C, BLOCK_K), dtype=tl.float32)
        d_w = tl.zeros((BLOCK_C, BLOCK_K), dtype=tl.float32)
        d_score = tl.zeros((BLOCK_C, BLOCK_C), dtype=tl.float32)
        d_score_t = tl.zeros((BLOCK_C, BLOCK_C), dtype=tl.float32)
        d_last = 0.0
        for first in range(0, VALUES, BLOCK_V):
            values = first + tl.arange(0, BLOCK_V)
            inside_values = values < VALUES
            value_places = (rows[:, None] * (HEADS * GROUP) + value_head) * VALUES + values[None, :]
            inside_tile = inside_rows[:, None] & inside_values[None, :]
            state_places = (chunk * (HEADS * GROUP) + value_head) * (KEYS * VALUES) + keys[None, :] * VALUES
            inside_state = inside_values[:, None] & inside_keys[None, :]
            v = tl.load(v_ptr + value_places, mask=inside_tile, other=0.0)
            d_out = tl.load(d_out_ptr + value_places, mask=inside_tile, other=0.0)
            # The state is read transposed: the axis of values comes first.
            state = tl.load(state_ptr + state_places + values[:, None], mask=inside_state, other=0.0)
            d_state = tl.load(d_state_ptr + state_places + values[:, None], mask=inside_state, other=0.0)
            d_last += tl.sum(state.to(tl.float32) * d_state.to(tl.float32))
            d_score = tl.dot(d_out, tl.trans(v), d_score, input_precision="ieee")
            d_score_t = tl.dot(v, tl.trans(d_out), d_score_t, input_precision="ieee")
            d_q_member = tl.dot(d_out, state.to(d_out.dtype), d_q_member, input_precision="ieee")
            d_k_member = tl.dot(v, d_state.to(v.dtype), d_k_member, input_precision="ieee")
            if HAS_W:
                d_value = tl.load(d_value_ptr + value_places, mask=inside_tile, other=0.0)
                d_w = tl.dot(d_value, state.to(d_value.dtype), d_w, input_precision="ieee")
        if HAS_W:
            w_places = (rows[:, None] * (HEADS * GROUP) + value_head) * KEYS + keys[None, :]
            tl.store(d_w_ptr + w_places, (-d_w).to(d_w_ptr.dtype.element_ty), mask=inside)

        decay_places = decay_ptr + rows * (HEADS * GROUP) + value_head
        decay = tl.load(decay_places, mask=inside_rows, other=0.0).to(tl.float32)
        decay_last = tl.load(decay_ptr + last_row * (HEADS * GROUP) + value_head).to(tl.float32)
        d_q_member *= (tl.exp2(decay) * scale)[:, None]
        d_k_member *= tl.where(inside_rows, tl.exp2(decay_last - decay), 0.0)[:, None]
        d_last = d_last * tl.exp2(decay_last) + tl.sum(d_k_member * k.to(tl.float32))
        # Masked entries may overflow and are replaced.
        difference = decay[:, None] - decay[None, :]
        d_score = tl.where(is_seen, d_score * tl.exp2(difference) * scale, 0.0).to(k.dtype)
        d_score_t = tl.where(sees, d_score_t * tl.exp2(-difference) * scale, 0.0).to(q.dtype)
        d_q_member = tl.dot(d_score, k, d_q_member, input_precision="ieee")
        d_k_member = tl.dot(d_score_t, q, d_k_member, input_precision="ieee")
        d_decay = tl.sum(d_q_member * q.to(tl.float32), axis=1) - tl.sum(d_k_member * k.to(tl.float32), axis=1)
        d_decay = tl.where(rows == last_row, d_decay + d_last, d_decay)
        decay_row = key_block.to(tl.int64) * num_tokens + rows
        tl.store(d_decay_ptr + decay_row * (HEADS * GROUP) + value_head, d_decay, mask=inside_rows)
        d_q += d_q_member
        d_k += d_k_member
    tl.store(d_q_ptr + places, d_q.to(d_q_ptr.dtype.element_ty), mask=inside)
    tl.store(d_k_ptr + places, d_k.to(d_k_ptr.dtype.element_ty), mask=inside)


def chunk_gradients(inputs: ChunkInputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Return the gradients; same contract as the reference."""
    q_THK, k_THK, v_TJV, d_out_TJV, state_NJKV, d_state_NJKV, decay_TJ, start_S1, chunk_N2, scale, d_value_TJV = inputs
    num_tokens, num_heads, num_keys = q_THK.shape
    _, num_value_heads, num_values = v_TJV.shape
    block_keys = min(max(next_power_of_2(num_keys), _MIN_BLOCK), BLOCK_KEYS)
    num_key_blocks = ceil_div(num_keys, block_keys)
    d_q_THK, d_k_THK = torch.empty_like(q_THK), torch.empty_like(k_THK)
    d_w_TJK = None if d_value_TJV is None else q_THK.new_empty(num_tokens, num_value_heads, num_keys)
    # One partial gradient per block of K.
    d_decay_PTJ = torch.empty(num_key_blocks, num_tokens, num_value_heads, dtype=torch.float32, device=q_THK.device)
    if chunk_N2.shape[0]:
        launch(
            _chunk_gradients_kernel,
            (chunk_N2.shape[0] * num_key_blocks, num_heads),
            q_THK,
            k_THK,
            v_TJV,
            d_out_TJV,
            v_TJV if d_value_TJV is None else d_value_TJV,
            state_NJKV,
            d_state_NJKV,
            decay_TJ,
            start_S1,
            chunk_N2,
            d_q_THK,
            d_k_THK,
            d_q_THK if d_w_TJK is None else d_w_TJK,
            d_decay_PTJ,
            num_tokens,
            scale,
            HEADS=num_heads,
            GROUP=num_value_heads // num_heads,
            KEYS=num_keys,
            VALUES=num_values,
            HAS_W=d_w_TJK is not None,
            BLOCK_C=CHUNK,
            BLOCK_K=block_keys,
            BLOCK_V=min(max(next_power_of_2(num_values), _MIN_BLOCK), BLOCK_VALUE_BYTES // v_TJV.element_size()),
            num_warps=NUM_WARPS,
            num_stages=NUM_STAGES,
        )
    return d_q_THK, d_k_THK, d_w_TJK, d_decay_PTJ[0] if num_key_blocks == 1 else d_decay_PTJ.sum(0)
