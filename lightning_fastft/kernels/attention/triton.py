"""Causal attention over a packed row on a GPU, in tiles of the row.

Axes: T tokens of the pack, H query heads, G key/value heads, W width of a head; M queries and N keys of a tile.

Torch's flash kernels launch as many programs for each document as the longest one needs, and most of them find no
work. Here a tile may span several documents, and every program has work. ``start_M`` is the first key that each query
of a tile sees. A tile of queries visits its keys in three ranges: from ``min(start_M)`` to ``max(start_M)`` with a
mask, from there to the tile without one, and in the tile itself with a mask.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from lightning_fastft.kernels.launch import launch
from lightning_fastft.kernels.sizes import ceil_div

LOG2_E = tl.constexpr(1.4426950408889634)


class Tiles(NamedTuple):
    """Tile of one step of a program, and its launch options.

    Args:
        queries: M.
        keys: N.
        num_warps: Warps of a program.
        num_stages: Pipeline stages: tiles of loads in flight at once.
    """

    queries: int
    keys: int
    num_warps: int
    num_stages: int


# By the width of a head, the fastest of ten or more on an H200 (packs of 8,192 tokens, documents of 512 on average). A
# program of the first two kernels has one tile of queries and loops over keys, so that keys must divide queries. A
# program of the third has one tile of keys, and queries must divide keys.
FORWARD_TILES = {64: Tiles(64, 32, 4, 4), 128: Tiles(64, 64, 4, 2)}
QUERY_GRAD_TILES = {64: Tiles(64, 32, 4, 3), 128: Tiles(64, 64, 4, 2)}
KEY_GRAD_TILES = {64: Tiles(32, 64, 4, 3), 128: Tiles(32, 64, 4, 3)}


@triton.jit
def _first_keys(rows, num_tokens, start_ptr, document_ptr, window, HAS_WINDOW: tl.constexpr):
    """Return the first key that each query sees; rows behind the pack repeat its last one."""
    document = tl.load(document_ptr + tl.minimum(rows, num_tokens - 1))
    first = tl.load(start_ptr + document).to(tl.int32)
    if HAS_WINDOW:
        first = tl.maximum(first, rows - window + 1)
    return first


@triton.jit
def _load_rows(ptr, rows, num_tokens, stride, WIDTH: tl.constexpr, IS_INSIDE: tl.constexpr):
    """Return rows of one head, shape (rows, WIDTH); zeros behind the pack."""
    ptrs = ptr + rows[:, None].to(tl.int64) * stride + tl.arange(0, WIDTH)[None, :]
    if IS_INSIDE:
        return tl.load(ptrs)
    return tl.load(ptrs, mask=rows[:, None] < num_tokens, other=0.0)


@triton.jit
def _forward_step(
    acc, max_score, denominator, q, k_ptr, v_ptr, first_key, rows, start_M, num_tokens, k_stride, v_stride, scale,
    IS_MASKED: tl.constexpr, WIDTH: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Add a tile of keys to the softmax so far: the sum of weighted values, the largest score and the denominator.

    Scores count in powers of 2. A new largest score rescales what was summed before.
    """
    keys = first_key + tl.arange(0, BLOCK_N)
    k = _load_rows(k_ptr, keys, num_tokens, k_stride, WIDTH, not IS_MASKED)
    score = tl.dot(q, k.T)
    if IS_MASKED:
        is_seen = (keys[None, :] >= start_M[:, None]) & (keys[None, :] <= rows[:, None])
        score = tl.where(is_seen, score, float("-inf"))
    new_max = tl.maximum(max_score, tl.max(score, axis=1) * scale)
    # A query that has seen no key yet has no finite score.
    shift = tl.where(new_max == float("-inf"), 0.0, new_max) if IS_MASKED else new_max
    weight = tl.exp2(score * scale - shift[:, None])
    rescale = tl.exp2(max_score - shift)
    denominator = denominator * rescale + tl.sum(weight, axis=1)
    v = _load_rows(v_ptr, keys, num_tokens, v_stride, WIDTH, not IS_MASKED)
    acc = tl.dot(weight.to(v.dtype), v, acc * rescale[:, None])
    return acc, new_max, denominator


@triton.jit(do_not_specialize=["num_tokens", "window"])
def _forward_kernel(
    q_ptr, k_ptr, v_ptr, start_ptr, document_ptr, sink_ptr, out_ptr, lse_ptr,
    q_stride, q_stride_head, k_stride, k_stride_head, v_stride, v_stride_head,
    num_tokens, window, scale,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SINK: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Run one program per tile of queries of one head."""
    head = (tl.program_id(0) % NUM_HEADS).to(tl.int64)
    tile_start = tl.program_id(0) // NUM_HEADS * BLOCK_M
    rows = tile_start + tl.arange(0, BLOCK_M)
    start_M = _first_keys(rows, num_tokens, start_ptr, document_ptr, window, HAS_WINDOW)
    q = _load_rows(q_ptr + head * q_stride_head, rows, num_tokens, q_stride, WIDTH, False)
    k_ptr += head // GROUP * k_stride_head
    v_ptr += head // GROUP * v_stride_head
    begin = tl.min(start_M) // BLOCK_N * BLOCK_N
    # Whole tiles of keys that every query of this tile sees.
    begin_unmasked = tl.minimum(tl.cdiv(tl.max(start_M), BLOCK_N) * BLOCK_N, tile_start)
    acc = tl.zeros((BLOCK_M, WIDTH), dtype=tl.float32)
    max_score = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
    denominator = tl.zeros((BLOCK_M,), dtype=tl.float32)
    scale *= LOG2_E
    for first_key in range(begin, begin_unmasked, BLOCK_N):
        acc, max_score, denominator = _forward_step(
            acc, max_score, denominator, q, k_ptr, v_ptr, first_key, rows, start_M, num_tokens, k_stride, v_stride,
            scale, True, WIDTH, BLOCK_N,
        )  # fmt: skip
    for first_key in range(begin_unmasked, tile_start, BLOCK_N):
        acc, max_score, denominator = _forward_step(
            acc, max_score, denominator, q, k_ptr, v_ptr, first_key, rows, start_M, num_tokens, k_stride, v_stride,
            scale, False, WIDTH, BLOCK_N,
        )  # fmt: skip
    for first_key in range(tile_start, tl.minimum(tile_start + BLOCK_M, num_tokens), BLOCK_N):
        acc, max_score, denominator = _forward_step(
            acc, max_score, denominator, q, k_ptr, v_ptr, first_key, rows, start_M, num_tokens, k_stride, v_stride,
            scale, True, WIDTH, BLOCK_N,
        )  # fmt: skip
    if HAS_SINK:
        # The sink is one more score in the denominator, and has no value.
        sink = tl.load(sink_ptr + head).to(tl.float32) * LOG2_E
        new_max = tl.maximum(max_score, sink)
        rescale = tl.exp2(max_score - new_max)
        denominator = denominator * rescale + tl.exp2(sink - new_max)
        acc *= rescale[:, None]
        max_score = new_max
    inside = rows < num_tokens
    # A query behind the pack may have seen no key.
    denominator = tl.where(inside, denominator, 1.0)
    out_ptrs = out_ptr + (rows[:, None].to(tl.int64) * NUM_HEADS + head) * WIDTH + tl.arange(0, WIDTH)[None, :]
    tl.store(out_ptrs, (acc / denominator[:, None]).to(out_ptr.dtype.element_ty), mask=inside[:, None])
    tl.store(lse_ptr + head * num_tokens + rows, (max_score + tl.log2(denominator)) / LOG2_E, mask=inside)


@triton.jit
def _query_grad_step(
    d_q, q, d_out, lse, delta, k_ptr, v_ptr, first_key, rows, start_M, num_tokens, k_stride, v_stride, scale,
    IS_MASKED: tl.constexpr, WIDTH: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Add ``d_score @ k`` of a tile of keys: d_score = weight * (d_out @ v.T - delta), without the factor scale."""
    keys = first_key + tl.arange(0, BLOCK_N)
    k = _load_rows(k_ptr, keys, num_tokens, k_stride, WIDTH, not IS_MASKED)
    v = _load_rows(v_ptr, keys, num_tokens, v_stride, WIDTH, not IS_MASKED)
    weight = tl.exp2(tl.dot(q, k.T) * scale - lse[:, None])
    if IS_MASKED:
        is_seen = (keys[None, :] >= start_M[:, None]) & (keys[None, :] <= rows[:, None])
        weight = tl.where(is_seen, weight, 0.0)
    d_score = weight * (tl.dot(d_out, v.T) - delta[:, None])
    return tl.dot(d_score.to(k.dtype), k, d_q)


@triton.jit(do_not_specialize=["num_tokens", "window"])
def _query_grad_kernel(
    q_ptr, k_ptr, v_ptr, start_ptr, document_ptr, out_ptr, lse_ptr, d_out_ptr, d_q_ptr, delta_ptr,
    q_stride, q_stride_head, k_stride, k_stride_head, v_stride, v_stride_head, d_out_stride, d_out_stride_head,
    num_tokens, window, scale,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, HAS_WINDOW: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Run one program per tile of queries of one head, which also stores delta, the row sums of d_out * out."""
    head = (tl.program_id(0) % NUM_HEADS).to(tl.int64)
    tile_start = tl.program_id(0) // NUM_HEADS * BLOCK_M
    rows = tile_start + tl.arange(0, BLOCK_M)
    inside = rows < num_tokens
    start_M = _first_keys(rows, num_tokens, start_ptr, document_ptr, window, HAS_WINDOW)
    q = _load_rows(q_ptr + head * q_stride_head, rows, num_tokens, q_stride, WIDTH, False)
    d_out = _load_rows(d_out_ptr + head * d_out_stride_head, rows, num_tokens, d_out_stride, WIDTH, False)
    out = _load_rows(out_ptr + head * WIDTH, rows, num_tokens, NUM_HEADS * WIDTH, WIDTH, False)
    delta = tl.sum(out.to(tl.float32) * d_out.to(tl.float32), axis=1)
    tl.store(delta_ptr + head * num_tokens + rows, delta, mask=inside)
    lse = tl.load(lse_ptr + head * num_tokens + rows, mask=inside, other=0.0) * LOG2_E
    k_ptr += head // GROUP * k_stride_head
    v_ptr += head // GROUP * v_stride_head
    begin = tl.min(start_M) // BLOCK_N * BLOCK_N
    begin_unmasked = tl.minimum(tl.cdiv(tl.max(start_M), BLOCK_N) * BLOCK_N, tile_start)
    d_q = tl.zeros((BLOCK_M, WIDTH), dtype=tl.float32)
    log_scale = scale * LOG2_E
    for first_key in range(begin, begin_unmasked, BLOCK_N):
        d_q = _query_grad_step(
            d_q, q, d_out, lse, delta, k_ptr, v_ptr, first_key, rows, start_M, num_tokens, k_stride, v_stride,
            log_scale, True, WIDTH, BLOCK_N,
        )  # fmt: skip
    for first_key in range(begin_unmasked, tile_start, BLOCK_N):
        d_q = _query_grad_step(
            d_q, q, d_out, lse, delta, k_ptr, v_ptr, first_key, rows, start_M, num_tokens, k_stride, v_stride,
            log_scale, False, WIDTH, BLOCK_N,
        )  # fmt: skip
    for first_key in range(tile_start, tl.minimum(tile_start + BLOCK_M, num_tokens), BLOCK_N):
        d_q = _query_grad_step(
            d_q, q, d_out, lse, delta, k_ptr, v_ptr, first_key, rows, start_M, num_tokens, k_stride, v_stride,
            log_scale, True, WIDTH, BLOCK_N,
        )  # fmt: skip
    d_q_ptrs = d_q_ptr + (rows[:, None].to(tl.int64) * NUM_HEADS + head) * WIDTH + tl.arange(0, WIDTH)[None, :]
    tl.store(d_q_ptrs, (d_q * scale).to(d_q_ptr.dtype.element_ty), mask=inside[:, None])


@triton.jit
def _key_grad_step(
    d_k, d_v, k, v, q_ptr, d_out_ptr, lse_ptr, delta_ptr, start_ptr, document_ptr, first_row, keys, num_tokens, window,
    q_stride, d_out_stride, scale,
    HAS_WINDOW: tl.constexpr, IS_MASKED: tl.constexpr, WIDTH: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Add ``d_score @ q`` and ``weight @ d_out`` of a tile of queries; d_score without the factor scale.

    Scores are transposed, keys by queries.
    """
    rows = first_row + tl.arange(0, BLOCK_M)
    q = _load_rows(q_ptr, rows, num_tokens, q_stride, WIDTH, not IS_MASKED)
    d_out = _load_rows(d_out_ptr, rows, num_tokens, d_out_stride, WIDTH, not IS_MASKED)
    inside = rows < num_tokens
    lse = tl.load(lse_ptr + rows, mask=inside, other=0.0) * LOG2_E
    delta = tl.load(delta_ptr + rows, mask=inside, other=0.0)
    weight = tl.exp2(tl.dot(k, q.T) * scale - lse[None, :])
    if IS_MASKED:
        start_M = _first_keys(rows, num_tokens, start_ptr, document_ptr, window, HAS_WINDOW)
        is_seen = (keys[:, None] >= start_M[None, :]) & (keys[:, None] <= rows[None, :]) & inside[None, :]
        weight = tl.where(is_seen, weight, 0.0)
    d_v = tl.dot(weight.to(d_out.dtype), d_out, d_v)
    d_score = weight * (tl.dot(v, d_out.T) - delta[None, :])
    d_k = tl.dot(d_score.to(q.dtype), q, d_k)
    return d_k, d_v


@triton.jit(do_not_specialize=["num_tokens", "window"])
def _key_grad_kernel(
    q_ptr, k_ptr, v_ptr, start_ptr, document_ptr, lse_ptr, d_out_ptr, delta_ptr, d_k_ptr, d_v_ptr,
    q_stride, q_stride_head, k_stride, k_stride_head, v_stride, v_stride_head, d_out_stride, d_out_stride_head,
    num_tokens, window, scale,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, HAS_WINDOW: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Run one program per tile of keys and query head; the caller sums over the query heads that share a key.

    One program for all of these heads is slower: 656 us instead of 349 on an H200, in packs of 8,192 tokens with 32
    query and 4 key heads of width 128.
    """
    head = (tl.program_id(0) % NUM_HEADS).to(tl.int64)
    tile_start = tl.program_id(0) // NUM_HEADS * BLOCK_N
    keys = tile_start + tl.arange(0, BLOCK_N)
    k = _load_rows(k_ptr + head // GROUP * k_stride_head, keys, num_tokens, k_stride, WIDTH, False)
    v = _load_rows(v_ptr + head // GROUP * v_stride_head, keys, num_tokens, v_stride, WIDTH, False)
    # The last query that sees a key is the last one of its document or window.
    last_key = tl.minimum(tile_start + BLOCK_N, num_tokens) - 1
    end = tl.load(start_ptr + tl.load(document_ptr + last_key) + 1).to(tl.int32)
    end_unmasked = tl.load(start_ptr + tl.load(document_ptr + tile_start) + 1).to(tl.int32)
    if HAS_WINDOW:
        end = tl.minimum(end, last_key + window)
        end_unmasked = tl.minimum(end_unmasked, tile_start + window)
    end_own = tl.minimum(tile_start + BLOCK_N, end)
    # Between its own tile and here, every query sees every key of the tile.
    end_unmasked = tl.maximum(end_unmasked // BLOCK_M * BLOCK_M, tile_start + BLOCK_N)
    d_k = tl.zeros((BLOCK_N, WIDTH), dtype=tl.float32)
    d_v = tl.zeros((BLOCK_N, WIDTH), dtype=tl.float32)
    log_scale = scale * LOG2_E
    q_ptr += head * q_stride_head
    d_out_ptr += head * d_out_stride_head
    lse_ptr += head * num_tokens
    delta_ptr += head * num_tokens
    for first_row in range(tile_start, end_own, BLOCK_M):
        d_k, d_v = _key_grad_step(
            d_k, d_v, k, v, q_ptr, d_out_ptr, lse_ptr, delta_ptr, start_ptr, document_ptr, first_row, keys,
            num_tokens, window, q_stride, d_out_stride, log_scale, HAS_WINDOW, True, WIDTH, BLOCK_M,
        )  # fmt: skip
    for first_row in range(tile_start + BLOCK_N, end_unmasked, BLOCK_M):
        d_k, d_v = _key_grad_step(
            d_k, d_v, k, v, q_ptr, d_out_ptr, lse_ptr, delta_ptr, start_ptr, document_ptr, first_row, keys,
            num_tokens, window, q_stride, d_out_stride, log_scale, HAS_WINDOW, False, WIDTH, BLOCK_M,
        )  # fmt: skip
    for first_row in range(end_unmasked, end, BLOCK_M):
        d_k, d_v = _key_grad_step(
            d_k, d_v, k, v, q_ptr, d_out_ptr, lse_ptr, delta_ptr, start_ptr, document_ptr, first_row, keys,
            num_tokens, window, q_stride, d_out_stride, log_scale, HAS_WINDOW, True, WIDTH, BLOCK_M,
        )  # fmt: skip
    inside = keys[:, None] < num_tokens
    offs = (keys[:, None].to(tl.int64) * NUM_HEADS + head) * WIDTH + tl.arange(0, WIDTH)[None, :]
    tl.store(d_k_ptr + offs, (d_k * scale).to(d_k_ptr.dtype.element_ty), mask=inside)
    tl.store(d_v_ptr + offs, d_v.to(d_v_ptr.dtype.element_ty), mask=inside)


class Documents(NamedTuple):
    """The documents of a pack.

    Args:
        start_S1: First token of each document, and T. Shape (S + 1,), int32, on the device.
        document_T: Index of each token's document. Shape (T,), an integer dtype, on the device.
    """

    start_S1: torch.Tensor
    document_T: torch.Tensor


def attend(
    q_THW: torch.Tensor,
    k_TGW: torch.Tensor,
    v_TGW: torch.Tensor,
    documents: Documents,
    *,
    scale: float,
    window: int | None,
    sink_H: torch.Tensor | None,
    tiles: Tiles | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return attention within each document, shape (T, H, W), and the log of each denominator, shape (H, T) in fp32.

    The last axis of the inputs must be contiguous. Tiles are by default those measured for 16-bit heads of width 64 and
    128.
    """
    num_tokens, num_heads, width = q_THW.shape
    out_THW = q_THW.new_empty(q_THW.shape)
    lse_HT = q_THW.new_empty((num_heads, num_tokens), dtype=torch.float32)
    tiles = tiles or FORWARD_TILES[width]
    launch(
        _forward_kernel,
        (ceil_div(num_tokens, tiles.queries) * num_heads,),
        *(q_THW, k_TGW, v_TGW, *documents, out_THW if sink_H is None else sink_H, out_THW, lse_HT),
        *_numbers(q_THW, k_TGW, v_TGW, scale=scale, window=window),
        HAS_SINK=sink_H is not None,
        **_constants(q_THW, k_TGW, window=window, tiles=tiles),
    )
    return out_THW, lse_HT


def attend_backward(
    q_THW: torch.Tensor,
    k_TGW: torch.Tensor,
    v_TGW: torch.Tensor,
    documents: Documents,
    *,
    scale: float,
    window: int | None,
    out_THW: torch.Tensor,
    lse_HT: torch.Tensor,
    d_out_THW: torch.Tensor,
    tiles: tuple[Tiles, Tiles] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of queries, and of keys and values per query head, all (T, H, W), and the row sums of
    d_out_THW * out_THW, shape (H, T) in fp32, which give the gradient of sinks.

    out_THW must be contiguous, and so must the last axis of d_out_THW. ``tiles`` has those of the query gradients and
    those of the key gradients.
    """
    num_tokens, num_heads, width = q_THW.shape
    d_q_THW, d_k_THW, d_v_THW = (q_THW.new_empty(q_THW.shape) for _ in range(3))
    delta_HT = torch.empty_like(lse_HT)
    by_queries, by_keys = tiles or (QUERY_GRAD_TILES[width], KEY_GRAD_TILES[width])
    numbers = _numbers(q_THW, k_TGW, v_TGW, d_out_THW, scale=scale, window=window)
    launch(
        _query_grad_kernel,
        (ceil_div(num_tokens, by_queries.queries) * num_heads,),
        *(q_THW, k_TGW, v_TGW, *documents, out_THW, lse_HT, d_out_THW, d_q_THW, delta_HT),
        *numbers,
        **_constants(q_THW, k_TGW, window=window, tiles=by_queries),
    )
    launch(
        _key_grad_kernel,
        (ceil_div(num_tokens, by_keys.keys) * num_heads,),
        *(q_THW, k_TGW, v_TGW, *documents, lse_HT, d_out_THW, delta_HT, d_k_THW, d_v_THW),
        *numbers,
        **_constants(q_THW, k_TGW, window=window, tiles=by_keys),
    )
    return d_q_THW, d_k_THW, d_v_THW, delta_HT


def _numbers(*heads: torch.Tensor, scale: float, window: int | None) -> tuple[int | float, ...]:
    """Return the strides of tokens and heads, the number of tokens, the window (0 for none) and the scale."""
    strides = (stride for x_THW in heads for stride in x_THW.stride()[:2])
    return (*strides, heads[0].shape[0], window or 0, float(scale))


def _constants(q_THW: torch.Tensor, k_TGW: torch.Tensor, *, window: int | None, tiles: Tiles) -> dict[str, int | bool]:
    """Return the compile-time constants that all kernels share, and the launch options."""
    num_heads, width = q_THW.shape[1:]
    return {
        "NUM_HEADS": num_heads,
        "GROUP": num_heads // k_TGW.shape[1],
        "HAS_WINDOW": window is not None,
        "WIDTH": width,
        "BLOCK_M": tiles.queries,
        "BLOCK_N": tiles.keys,
        "num_warps": tiles.num_warps,
        "num_stages": tiles.num_stages,
    }
