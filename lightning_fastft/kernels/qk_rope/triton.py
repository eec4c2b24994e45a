"""Norm and rotation of query and key heads on a GPU: one pass over memory forward, one backward.

Axes: T tokens; C columns of q, k and v side by side; W columns of a head, walked as pairs (first, second) and the rest
    that is not rotated.
A program takes one token and walks its heads in tiles, so cos, sin and weights are read once. For the gradients of
weights, each program sums its own tokens, and a second small kernel sums the programs in order, without atomics.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl

from lightning_fastft.kernels.launch import launch
from lightning_fastft.kernels.qk_rope.reference import Heads, Rope, RopeForm
from lightning_fastft.kernels.sizes import ceil_div, next_power_of_2

# 2048 values on 4 warps: one 16-byte read per thread and half of the pairs in bf16; 67 % of 4.2 TB/s on an H200 at
# 8,192 x 7,168 (python -m benchmarks.row_kernels --only qk_rope). Other tiles are not measured.
MAX_TILE = 2048
# The backward also holds a second tile, the weights and their sums in registers.
MAX_TILE_BACKWARD = 1024
BLOCK_COPY = 1024
NUM_WARPS = 4
# With gradients of weights, this many programs share the tokens: a few per multiprocessor. Not yet measured.
MAX_PARTIALS = 1024
BLOCK_PARTIALS = 512
# 32 bytes of fp32: the smallest memory transaction.
BLOCK_SUM_COLUMNS = 8


@triton.jit
def _load_heads(
    row_ptrs,
    inside_rows,
    FORM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    """Return the first and the second column of each pair, and the columns that are not rotated, in fp32.

    Interleaved pairs are read as one tile and split in registers. Without unrotated columns, their tile is 0.
    """
    if FORM.is_interleaved:
        cols = tl.arange(0, 2 * BLOCK_P)
        inside = inside_rows[:, None] & (cols < FORM.rotary_width)[None, :]
        pairs = tl.load(row_ptrs[:, None] + cols[None, :], mask=inside, other=0.0)
        first, second = tl.split(tl.reshape(pairs, (BLOCK_H, BLOCK_P, 2)))
    else:
        cols = tl.arange(0, BLOCK_P)
        inside = inside_rows[:, None] & (cols < FORM.rotary_width // 2)[None, :]
        ptrs = row_ptrs[:, None] + cols[None, :]
        first = tl.load(ptrs, mask=inside, other=0.0)
        second = tl.load(ptrs + FORM.rotary_width // 2, mask=inside, other=0.0)
    rest = tl.zeros((BLOCK_H, BLOCK_REST), dtype=tl.float32)
    if FORM.rotary_width < FORM.head_width:
        cols = FORM.rotary_width + tl.arange(0, BLOCK_REST)
        inside = inside_rows[:, None] & (cols < FORM.head_width)[None, :]
        rest = tl.load(row_ptrs[:, None] + cols[None, :], mask=inside, other=0.0).to(tl.float32)
    return first.to(tl.float32), second.to(tl.float32), rest


@triton.jit
def _store_heads(
    row_ptrs, first, second, rest, inside_rows, FORM: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_REST: tl.constexpr
):
    """Write the columns at the positions they were read from, rounded to the dtype of the output."""
    first = first.to(row_ptrs.dtype.element_ty)
    second = second.to(row_ptrs.dtype.element_ty)
    if FORM.is_interleaved:
        cols = tl.arange(0, 2 * BLOCK_P)
        inside = inside_rows[:, None] & (cols < FORM.rotary_width)[None, :]
        tl.store(row_ptrs[:, None] + cols[None, :], tl.interleave(first, second), mask=inside)
    else:
        cols = tl.arange(0, BLOCK_P)
        inside = inside_rows[:, None] & (cols < FORM.rotary_width // 2)[None, :]
        ptrs = row_ptrs[:, None] + cols[None, :]
        tl.store(ptrs, first, mask=inside)
        tl.store(ptrs + FORM.rotary_width // 2, second, mask=inside)
    if FORM.rotary_width < FORM.head_width:
        cols = FORM.rotary_width + tl.arange(0, BLOCK_REST)
        inside = inside_rows[:, None] & (cols < FORM.head_width)[None, :]
        tl.store(row_ptrs[:, None] + cols[None, :], rest.to(row_ptrs.dtype.element_ty), mask=inside)


@triton.jit
def _load_angles(row_ptr, FORM: tl.constexpr, BLOCK_P: tl.constexpr):
    """Return cos or sin of each pair's first and second column, one row.

    Interleaved pairs share one angle, which is in the first half.
    """
    cols = tl.arange(0, BLOCK_P)
    inside = cols < FORM.rotary_width // 2
    first = tl.load(row_ptr + cols, mask=inside, other=0.0).to(tl.float32)
    second = first
    if not FORM.is_interleaved:
        second = tl.load(row_ptr + FORM.rotary_width // 2 + cols, mask=inside, other=0.0).to(tl.float32)
    return first[None, :], second[None, :]


@triton.jit
def _head_mean(pair_terms, rest_terms, FORM: tl.constexpr):
    """Return the mean over each head, given the sums of pairs and the terms of the columns that are not rotated."""
    total = tl.sum(pair_terms, axis=1)
    if FORM.rotary_width < FORM.head_width:
        total += tl.sum(rest_terms, axis=1)
    return total * (1.0 / FORM.head_width)


@triton.jit
def _reciprocal_rms(first, second, rest, inside_heads, FORM: tl.constexpr):
    """Return the normalising factor of each head, one column; 0, never NaN, for masked heads.

    It is computed once per head, so correct rounding costs little.
    """
    root = tl.sqrt_rn(_head_mean(first * first + second * second, rest * rest, FORM) + FORM.eps)
    return tl.where(inside_heads, tl.div_rn(tl.full(root.shape, 1.0, tl.float32), root), 0.0)[:, None]


@triton.jit
def _apply_norm(values, scale, weight, dtype: tl.constexpr, IS_WEIGHT_WIDE: tl.constexpr):
    """Return the normed values times their weight, rounded between the two if the form says so."""
    values *= scale
    if not IS_WEIGHT_WIDE:
        values = values.to(dtype).to(tl.float32)
    return values * weight


@triton.jit
def _load_weight(weight_ptr, FORM: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_REST: tl.constexpr):
    """Return the norm's weights for the first, second and unrotated columns, one row each."""
    one_row = tl.arange(0, 1)
    first, second, rest = _load_heads(weight_ptr + one_row, one_row < 1, FORM, 1, BLOCK_P, BLOCK_REST)
    return first + FORM.weight_offset, second + FORM.weight_offset, rest + FORM.weight_offset


@triton.jit
def _copy_columns(in_ptr, out_ptr, NUM_COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    """Copy adjacent columns of one row."""
    for start in range(0, NUM_COLUMNS, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        tl.store(out_ptr + cols, tl.load(in_ptr + cols, mask=cols < NUM_COLUMNS), mask=cols < NUM_COLUMNS)


@triton.jit
def _add_shares(
    in_ptr, out_ptr, NUM_COLUMNS: tl.constexpr, HEAD_WIDTH: tl.constexpr, NUM_SHARES: tl.constexpr, BLOCK: tl.constexpr
):
    """Write heads of one row, each the sum of adjacent shares, in their order."""
    for start in range(0, NUM_COLUMNS, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        inside = cols < NUM_COLUMNS
        ptrs = in_ptr + cols // HEAD_WIDTH * (NUM_SHARES * HEAD_WIDTH) + cols % HEAD_WIDTH
        total = tl.load(ptrs, mask=inside).to(tl.float32)
        for share in tl.static_range(1, NUM_SHARES):
            total += tl.load(ptrs + share * HEAD_WIDTH, mask=inside).to(tl.float32)
        tl.store(out_ptr + cols, total.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _forward_heads(
    in_ptr,
    out_ptr,
    weight_ptr,
    angles,
    NUM_HEADS: tl.constexpr,
    IN_STEP: tl.constexpr,
    FORM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    """Norm and rotate the heads of one token that share their weights."""
    cos_first, cos_second, sin_first, sin_second = angles
    if FORM.has_norm:
        weight_first, weight_second, weight_rest = _load_weight(weight_ptr, FORM, BLOCK_P, BLOCK_REST)

    for start in range(0, NUM_HEADS, BLOCK_H):
        heads = start + tl.arange(0, BLOCK_H)
        inside_heads = heads < NUM_HEADS
        in_heads = in_ptr + heads * IN_STEP
        out_heads = out_ptr + heads * FORM.head_width
        first, second, rest = _load_heads(in_heads, inside_heads, FORM, BLOCK_H, BLOCK_P, BLOCK_REST)
        if FORM.has_norm:
            scale = _reciprocal_rms(first, second, rest, inside_heads, FORM)
            first = _apply_norm(first, scale, weight_first, in_ptr.dtype.element_ty, FORM.is_weight_wide)
            second = _apply_norm(second, scale, weight_second, in_ptr.dtype.element_ty, FORM.is_weight_wide)
            rest = _apply_norm(rest, scale, weight_rest, in_ptr.dtype.element_ty, FORM.is_weight_wide)

        # Explicit FMAs fix which product is rounded: the compiler's choice depended on the alignment of the rows.
        rotated_first = tl.fma(first, cos_first, -(second * sin_first))
        rotated_second = tl.fma(second, cos_second, first * sin_second)
        _store_heads(out_heads, rotated_first, rotated_second, rest, inside_heads, FORM, BLOCK_P, BLOCK_REST)


@triton.jit
def _forward_kernel(
    in_ptr,
    cos_ptr,
    sin_ptr,
    q_weight_ptr,
    k_weight_ptr,
    q_out_ptr,
    k_out_ptr,
    v_out_ptr,
    in_stride,
    cos_stride,
    sin_stride,
    q_out_stride,
    k_out_stride,
    v_out_stride,
    FORM: tl.constexpr,
    QUERY_STEP: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Run one program per token."""
    token = tl.program_id(0).to(tl.int64)
    cos_first, cos_second = _load_angles(cos_ptr + token * cos_stride, FORM, BLOCK_P)
    sin_first, sin_second = _load_angles(sin_ptr + token * sin_stride, FORM, BLOCK_P)
    angles = (cos_first, cos_second, sin_first, sin_second)
    q_in_ptr = in_ptr + token * in_stride
    k_in_ptr = q_in_ptr + FORM.num_heads * QUERY_STEP
    q_out_ptr += token * q_out_stride
    k_out_ptr += token * k_out_stride
    _forward_heads(
        q_in_ptr, q_out_ptr, q_weight_ptr, angles, FORM.num_heads, QUERY_STEP, FORM, BLOCK_Q, BLOCK_P,
        BLOCK_REST,
    )  # fmt: skip
    _forward_heads(
        k_in_ptr, k_out_ptr, k_weight_ptr, angles, FORM.num_kv_heads, FORM.head_width, FORM, BLOCK_K, BLOCK_P,
        BLOCK_REST,
    )  # fmt: skip
    num_columns: tl.constexpr = FORM.num_kv_heads * FORM.head_width
    _copy_columns(k_in_ptr + num_columns, v_out_ptr + token * v_out_stride, num_columns, BLOCK_V)


@triton.jit
def _backward_heads(
    d_ptr,
    in_ptr,
    out_ptr,
    weight_ptr,
    terms,
    angles,
    NUM_HEADS: tl.constexpr,
    RAW_STEP: tl.constexpr,
    NUM_SHARES: tl.constexpr,
    FORM: tl.constexpr,
    NEEDS_WEIGHT: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    """Write the gradient of the raw heads of one token that share their weights; return the sums of the weights'
    gradients with this token added.
    """
    cos_first, cos_second, sin_first, sin_second = angles
    first_terms, second_terms, rest_terms = terms
    if FORM.has_norm:
        weight_first, weight_second, weight_rest = _load_weight(weight_ptr, FORM, BLOCK_P, BLOCK_REST)

    for start in range(0, NUM_HEADS, BLOCK_H):
        heads = start + tl.arange(0, BLOCK_H)
        inside_heads = heads < NUM_HEADS
        d_heads = d_ptr + heads * (NUM_SHARES * FORM.head_width)
        in_heads = in_ptr + heads * RAW_STEP
        out_heads = out_ptr + heads * RAW_STEP
        rotated_first, rotated_second, d_rest = _load_heads(d_heads, inside_heads, FORM, BLOCK_H, BLOCK_P, BLOCK_REST)
        for share in tl.static_range(1, NUM_SHARES):
            share_first, share_second, share_rest = _load_heads(
                d_heads + share * FORM.head_width, inside_heads, FORM, BLOCK_H, BLOCK_P, BLOCK_REST
            )
            rotated_first += share_first
            rotated_second += share_second
            d_rest += share_rest
        if FORM.has_norm:
            first, second, rest = _load_heads(in_heads, inside_heads, FORM, BLOCK_H, BLOCK_P, BLOCK_REST)

        # The transposed map: the inverse rotation times the factor that cos and sin may carry.
        d_first = tl.fma(rotated_first, cos_first, rotated_second * sin_second)
        d_second = tl.fma(rotated_second, cos_second, -(rotated_first * sin_first))
        if FORM.has_norm:
            scale = _reciprocal_rms(first, second, rest, inside_heads, FORM)
            first *= scale
            second *= scale
            rest *= scale
            if NEEDS_WEIGHT:
                first_terms += d_first * first
                second_terms += d_second * second
                rest_terms += d_rest * rest
            d_first *= weight_first
            d_second *= weight_second
            d_rest *= weight_rest
            mean = _head_mean(d_first * first + d_second * second, d_rest * rest, FORM)[:, None]
            d_first = scale * (d_first - first * mean)
            d_second = scale * (d_second - second * mean)
            d_rest = scale * (d_rest - rest * mean)

        _store_heads(out_heads, d_first, d_second, d_rest, inside_heads, FORM, BLOCK_P, BLOCK_REST)
    return first_terms, second_terms, rest_terms


@triton.jit
def _store_partial(
    partial_ptr, first, second, rest, FORM: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_REST: tl.constexpr
):
    """Write one program's sum over its tokens and heads."""
    one_row = tl.arange(0, 1)
    first, second = tl.sum(first, axis=0)[None, :], tl.sum(second, axis=0)[None, :]
    rest = tl.sum(rest, axis=0)[None, :]
    _store_heads(partial_ptr + one_row, first, second, rest, one_row < 1, FORM, BLOCK_P, BLOCK_REST)


@triton.jit
def _backward_kernel(
    d_q_ptr,
    d_k_ptr,
    d_v_ptr,
    in_ptr,
    cos_ptr,
    sin_ptr,
    q_weight_ptr,
    k_weight_ptr,
    out_ptr,
    partial_ptr,
    d_q_stride,
    d_k_stride,
    d_v_stride,
    in_stride,
    cos_stride,
    sin_stride,
    out_stride,
    num_tokens,
    FORM: tl.constexpr,
    QUERY_STEP: tl.constexpr,
    NUM_SHARES: tl.constexpr,
    NEEDS_WEIGHT: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Run programs that take every num_programs-th token; one program per token if no weight needs a gradient."""
    q_first = tl.zeros((BLOCK_Q, BLOCK_P), dtype=tl.float32)
    q_second = tl.zeros((BLOCK_Q, BLOCK_P), dtype=tl.float32)
    q_rest = tl.zeros((BLOCK_Q, BLOCK_REST), dtype=tl.float32)
    k_first = tl.zeros((BLOCK_K, BLOCK_P), dtype=tl.float32)
    k_second = tl.zeros((BLOCK_K, BLOCK_P), dtype=tl.float32)
    k_rest = tl.zeros((BLOCK_K, BLOCK_REST), dtype=tl.float32)
    num_columns: tl.constexpr = FORM.num_kv_heads * FORM.head_width
    token = tl.program_id(0).to(tl.int64)
    while token < num_tokens:
        cos_first, cos_second = _load_angles(cos_ptr + token * cos_stride, FORM, BLOCK_P)
        sin_first, sin_second = _load_angles(sin_ptr + token * sin_stride, FORM, BLOCK_P)
        angles = (cos_first, cos_second, sin_first, sin_second)
        q_in_ptr = in_ptr + token * in_stride
        q_out_ptr = out_ptr + token * out_stride
        k_in_ptr = q_in_ptr + FORM.num_heads * QUERY_STEP
        k_out_ptr = q_out_ptr + FORM.num_heads * QUERY_STEP
        q_first, q_second, q_rest = _backward_heads(
            d_q_ptr + token * d_q_stride, q_in_ptr, q_out_ptr, q_weight_ptr, (q_first, q_second, q_rest), angles,
            FORM.num_heads, QUERY_STEP, 1, FORM, NEEDS_WEIGHT, BLOCK_Q, BLOCK_P, BLOCK_REST,
        )  # fmt: skip
        k_first, k_second, k_rest = _backward_heads(
            d_k_ptr + token * d_k_stride, k_in_ptr, k_out_ptr, k_weight_ptr, (k_first, k_second, k_rest), angles,
            FORM.num_kv_heads, FORM.head_width, NUM_SHARES, FORM, NEEDS_WEIGHT, BLOCK_K, BLOCK_P, BLOCK_REST,
        )  # fmt: skip
        v_out_ptr = k_out_ptr + num_columns
        if NUM_SHARES > 1:
            _add_shares(d_v_ptr + token * d_v_stride, v_out_ptr, num_columns, FORM.head_width, NUM_SHARES, BLOCK_V)
        else:
            _copy_columns(d_v_ptr + token * d_v_stride, v_out_ptr, num_columns, BLOCK_V)
        token += tl.num_programs(0)

    if NEEDS_WEIGHT:
        q_partial_ptr = partial_ptr + tl.program_id(0).to(tl.int64) * (2 * FORM.head_width)
        _store_partial(q_partial_ptr, q_first, q_second, q_rest, FORM, BLOCK_P, BLOCK_REST)
        _store_partial(q_partial_ptr + FORM.head_width, k_first, k_second, k_rest, FORM, BLOCK_P, BLOCK_REST)


@triton.jit
def _add_partials_kernel(
    partial_ptr, sum_ptr, num_partials, num_columns, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr
):
    """Run one program per tile of columns, which sums all partial sums in order."""
    cols = tl.program_id(0) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    terms = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), dtype=tl.float32)
    for start in range(0, num_partials, BLOCK_ROWS):
        rows = (start + tl.arange(0, BLOCK_ROWS)).to(tl.int64)
        inside = (rows < num_partials)[:, None] & (cols < num_columns)[None, :]
        terms += tl.load(partial_ptr + rows[:, None] * num_columns + cols[None, :], mask=inside, other=0.0)
    tl.store(sum_ptr + cols, tl.sum(terms, axis=0), mask=cols < num_columns)


def qk_rope_heads(qkv_TC: torch.Tensor, rope: Rope) -> Heads:
    """Return q, k and v in three tensors; same contract as the reference."""
    cos_TW, sin_TW, q_weight_W, k_weight_W, form = rope
    num_tokens = qkv_TC.shape[0]
    heads = Heads(*[qkv_TC.new_empty(num_tokens, count, form.head_width) for count in form.head_counts])
    if num_tokens == 0:
        return heads
    launch(
        _forward_kernel,
        (num_tokens,),
        qkv_TC,
        cos_TW,
        sin_TW,
        qkv_TC if q_weight_W is None else q_weight_W,
        qkv_TC if k_weight_W is None else k_weight_W,
        *heads,
        qkv_TC.stride(0),
        cos_TW.stride(0),
        sin_TW.stride(0),
        *[each.stride(0) for each in heads],
        **_form_constants(form),
        **_block_sizes(form, max_tile=MAX_TILE, max_copy=BLOCK_COPY),
        num_warps=NUM_WARPS,
    )
    return heads


def qk_rope_backward(
    d_heads: Heads,
    qkv_TC: torch.Tensor | None,
    rope: Rope,
    *,
    needs_weight: bool,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Return the gradients of the raw projection and of the norms' weights; same contract as the reference."""
    cos_TW, sin_TW, q_weight_W, k_weight_W, form = rope
    d_q, d_k, d_v = d_heads
    num_tokens, device = d_q.shape[0], d_q.device
    out_TC = torch.empty((num_tokens, form.num_columns), dtype=d_q.dtype, device=device) if out is None else out
    num_programs = min(num_tokens, MAX_PARTIALS) if needs_weight else num_tokens
    partial_PW = (
        torch.empty(num_programs, 2 * form.head_width, dtype=torch.float32, device=device) if needs_weight else None
    )
    raw_TC = out_TC if qkv_TC is None else qkv_TC
    if num_programs > 0:
        launch(
            _backward_kernel,
            (num_programs,),
            d_q,
            d_k,
            d_v,
            raw_TC,
            cos_TW,
            sin_TW,
            d_q if q_weight_W is None else q_weight_W,
            d_q if k_weight_W is None else k_weight_W,
            out_TC,
            out_TC if partial_PW is None else partial_PW,
            d_q.stride(0),
            d_k.stride(0),
            d_v.stride(0),
            raw_TC.stride(0),
            cos_TW.stride(0),
            sin_TW.stride(0),
            out_TC.stride(0),
            num_tokens,
            **_form_constants(form),
            **_block_sizes(form, max_tile=MAX_TILE_BACKWARD, max_copy=BLOCK_COPY),
            NUM_SHARES=d_k.shape[1] // form.num_kv_heads,
            NEEDS_WEIGHT=needs_weight,
            num_warps=NUM_WARPS,
        )
    if partial_PW is None:
        return out_TC, None, None
    return out_TC, *_add_partials(partial_PW).split(form.head_width)


def _add_partials(partial_PW: torch.Tensor) -> torch.Tensor:
    """Return the sum of the rows as one row; zeros if there are none."""
    num_partials, num_columns = partial_PW.shape
    sum_W = torch.empty(num_columns, dtype=torch.float32, device=partial_PW.device)
    launch(
        _add_partials_kernel,
        (ceil_div(num_columns, BLOCK_SUM_COLUMNS),),
        partial_PW,
        sum_W,
        num_partials,
        num_columns,
        BLOCK_ROWS=BLOCK_PARTIALS,
        BLOCK_COLUMNS=BLOCK_SUM_COLUMNS,
        num_warps=NUM_WARPS,
    )
    return sum_W


@functools.cache
def _form_constants(form: RopeForm) -> dict[str, Any]:
    """Return the compile-time constants of the form, shared by both kernels."""
    return {"FORM": form._replace(rotary_width=form.num_rotated), "QUERY_STEP": form.query_step}


@functools.cache
def _block_sizes(form: RopeForm, *, max_tile: int, max_copy: int) -> dict[str, int]:
    """Return the tile sizes: as many heads at once as fit, but no more than the form has."""
    block_pairs = next_power_of_2(form.num_rotated // 2)
    block_rest = next_power_of_2(max(form.head_width - form.num_rotated, 1))
    max_heads = max(max_tile // (2 * max(block_pairs, block_rest // 2)), 1)
    return {
        "BLOCK_Q": min(next_power_of_2(form.num_heads), max_heads),
        "BLOCK_K": min(next_power_of_2(form.num_kv_heads), max_heads),
        "BLOCK_P": block_pairs,
        "BLOCK_REST": block_rest,
        "BLOCK_V": min(next_power_of_2(form.num_kv_heads * form.head_width), max_copy),
    }
