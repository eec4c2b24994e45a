"""The scan of Mamba-2 on a GPU, in chunks of one document each.

Axes: T tokens of the pack, C chunks (L tokens of a chunk), H heads (of G groups), W width of a head, N width of a
    state.
Inside a chunk the scan is a product of L x L weights. One state of N x W values is passed from chunk to chunk; it
starts at zero in each document. The forward computes the states on entry to each chunk, then the outputs. The backward
recomputes these states, then their gradients from the last chunk to the first, then the gradients of the inputs of each
head, and of B and C, which sum over the heads of a group in a fixed order.

With ``s_t`` the sum of ``dt a`` from the chunk's first token to t, ``s`` the sum over the chunk, ``P_ij = (c_i . b_j)
(d_y_i . x_j) exp(s_i - s_j)`` for j <= i, ``E`` the state on entry and ``d_S`` the gradient of the state on leaving:
    d_x_j = sum_i (c_i . b_j) exp(s_i - s_j) dt_j d_y_i + exp(s - s_j) dt_j b_j d_S + skip d_y_j
    d_b_j = sum_i (d_y_i . x_j) exp(s_i - s_j) dt_j c_i + exp(s - s_j) dt_j d_S x_j
    d_c_i = sum_j (d_y_i . x_j) exp(s_i - s_j) dt_j b_j + exp(s_i) E d_y_i
    d_dt_j = sum_i P_ij + exp(s - s_j) b_j d_S x_j + a d_(dt a)_j
    d_(dt a)_t = sum over j < t <= i of P_ij dt_j + sum over i >= t of exp(s_i) c_i E d_y_i
                 + sum over j < t of exp(s - s_j) dt_j b_j d_S x_j + exp(s) <E, d_S>
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lightning_fastft.kernels.launch import launch
from lightning_fastft.kernels.sizes import ceil_div, next_power_of_2
from lightning_fastft.packing.chunks import Chunks

# Tiles of the state's axes; with chunks of 64 tokens every product is 64 x 64 x 64. Not measured yet.
MIN_BLOCK, MAX_BLOCK = 16, 64
# Number of heads whose gradients of B and C one program sums; PyTorch sums the fp32 partials.
MAX_HEADS_PER_PROGRAM = 8
STATE_WARPS, OUTPUT_WARPS, GRADIENT_WARPS = 4, 4, 8


@triton.jit
def _load(ptr, rows, stride, cols, inside_rows, num_columns):
    """Return a tile of rows and columns, 0 outside."""
    inside = inside_rows[:, None] & (cols < num_columns)[None, :]
    return tl.load(ptr + rows[:, None] * stride + cols[None, :], mask=inside, other=0.0)


@triton.jit
def _load_state(ptr, ns, ws, NUM_N: tl.constexpr, NUM_W: tl.constexpr):
    """Return a tile of a state, 0 outside."""
    return tl.load(
        ptr + ns[:, None] * NUM_W + ws[None, :], mask=(ns < NUM_N)[:, None] & (ws < NUM_W)[None, :], other=0.0
    )


@triton.jit
def _find_rows(chunk, start_ptr, index_ptr, BLOCK_L: tl.constexpr):
    """Return the tokens of a chunk and whether each belongs to its document."""
    document = tl.load(index_ptr + chunk * 2)
    rows = tl.load(start_ptr + document) + tl.load(index_ptr + chunk * 2 + 1) * BLOCK_L + tl.arange(0, BLOCK_L)
    return rows.to(tl.int64), rows < tl.load(start_ptr + document + 1)


@triton.jit
def _sum_later(logs):
    """Return the sum over the later tokens of the chunk, without cancellation near the end of the chunk."""
    return tl.cumsum(logs, reverse=True) - logs


@triton.jit
def _sum_logs(logs):
    """Return the sums up to each token, and their rounding errors in fp32."""
    sums = tl.cumsum(logs.to(tl.float64))
    rounded = sums.to(tl.float32)
    return rounded, (sums - rounded.to(tl.float64)).to(tl.float32)


@triton.jit
def _decay(sums, lost, is_seen):
    """Return the decay from each token to each later token, without cancellation between long sums."""
    logs = (sums[:, None] - sums[None, :]) + (lost[:, None] - lost[None, :])
    return tl.exp(tl.where(is_seen, logs, float("-inf")))


@triton.jit
def _states_kernel(
    x_ptr,
    dt_ptr,
    a_ptr,
    b_ptr,
    start_ptr,
    first_ptr,
    state_ptr,
    x_stride,
    b_stride,
    NUM_H: tl.constexpr,
    NUM_G: tl.constexpr,
    NUM_N: tl.constexpr,
    NUM_W: tl.constexpr,
    IS_REVERSED: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """Write the state on entry to each chunk of one document and head; if reversed, its gradient on exit.

    If reversed, x is the gradient of the output and b is c.
    """
    document, head = tl.program_id(0) // NUM_H, tl.program_id(0) % NUM_H
    ns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    ws = tl.program_id(2) * BLOCK_W + tl.arange(0, BLOCK_W)
    inside = (ns < NUM_N)[:, None] & (ws < NUM_W)[None, :]
    start, end = tl.load(start_ptr + document), tl.load(start_ptr + document + 1)
    chunk = tl.load(first_ptr + document).to(tl.int64)
    num_chunks = tl.load(first_ptr + document + 1) - tl.load(first_ptr + document)
    step = NUM_H * NUM_N * NUM_W
    if IS_REVERSED:
        chunk += num_chunks - 1
        step = -step
    state_ptrs = state_ptr + (chunk * NUM_H + head) * (NUM_N * NUM_W) + ns[:, None] * NUM_W + ws[None, :]
    a = tl.load(a_ptr + head)
    x_ptr += head * NUM_W
    b_ptr += head // (NUM_H // NUM_G) * NUM_N

    state = tl.zeros((BLOCK_N, BLOCK_W), dtype=tl.float32)
    for number in range(num_chunks):
        tl.store(state_ptrs, state.to(state_ptr.dtype.element_ty), mask=inside)
        state_ptrs += step
        place = num_chunks - 1 - number if IS_REVERSED else number
        rows = (start + place * BLOCK_L + tl.arange(0, BLOCK_L)).to(tl.int64)
        inside_rows = rows < end
        dt = tl.load(dt_ptr + rows * NUM_H + head, mask=inside_rows, other=0.0)
        logs = dt * a
        weight = tl.exp(tl.cumsum(logs)) if IS_REVERSED else dt * tl.exp(_sum_later(logs))
        x = _load(x_ptr, rows, x_stride, ws, inside_rows, NUM_W)
        b = _load(b_ptr, rows, b_stride, ns, inside_rows, NUM_N)
        weighted = (b * weight[:, None]).to(x.dtype)
        state = tl.dot(tl.trans(weighted), x, state * tl.exp(tl.sum(logs)), input_precision="ieee")


@triton.jit
def _output_kernel(
    x_ptr,
    dt_ptr,
    a_ptr,
    b_ptr,
    c_ptr,
    skip_ptr,
    start_ptr,
    index_ptr,
    state_ptr,
    y_ptr,
    x_stride,
    b_stride,
    c_stride,
    NUM_H: tl.constexpr,
    NUM_G: tl.constexpr,
    NUM_N: tl.constexpr,
    NUM_W: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """Write the outputs of one chunk, head and tile of its width."""
    chunk, head = (tl.program_id(0) // NUM_H).to(tl.int64), tl.program_id(0) % NUM_H
    rows, inside_rows = _find_rows(chunk, start_ptr, index_ptr, BLOCK_L)
    ws = tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W)
    dt = tl.load(dt_ptr + rows * NUM_H + head, mask=inside_rows, other=0.0)
    sums, lost = _sum_logs(dt * tl.load(a_ptr + head))
    state_ptr += (chunk * NUM_H + head) * (NUM_N * NUM_W)
    group = head // (NUM_H // NUM_G)

    y = tl.zeros((BLOCK_L, BLOCK_W), dtype=tl.float32)
    scores = tl.zeros((BLOCK_L, BLOCK_L), dtype=tl.float32)
    for first in tl.range(0, NUM_N, BLOCK_N, num_stages=1):
        ns = first + tl.arange(0, BLOCK_N)
        b = _load(b_ptr + group * NUM_N, rows, b_stride, ns, inside_rows, NUM_N)
        c = _load(c_ptr + group * NUM_N, rows, c_stride, ns, inside_rows, NUM_N)
        scores = tl.dot(c, tl.trans(b), scores, input_precision="ieee")
        y = tl.dot(c, _load_state(state_ptr, ns, ws, NUM_N, NUM_W), y, input_precision="ieee")
    y *= tl.exp(sums)[:, None]
    places = tl.arange(0, BLOCK_L)
    is_seen = places[:, None] >= places[None, :]
    decay = _decay(sums, lost, is_seen)
    x = _load(x_ptr + head * NUM_W, rows, x_stride, ws, inside_rows, NUM_W)
    y = tl.dot((scores * decay * dt[None, :]).to(x.dtype), x, y, input_precision="ieee")
    y += tl.load(skip_ptr + head) * x.to(tl.float32)
    tl.store(
        y_ptr + (rows[:, None] * NUM_H + head) * NUM_W + ws[None, :],
        y.to(y_ptr.dtype.element_ty),
        mask=inside_rows[:, None] & (ws < NUM_W)[None, :],
    )


@triton.jit
def _head_gradient_kernel(
    d_y_ptr,
    x_ptr,
    dt_ptr,
    a_ptr,
    b_ptr,
    c_ptr,
    skip_ptr,
    start_ptr,
    index_ptr,
    state_ptr,
    d_state_ptr,
    d_x_ptr,
    d_dt_ptr,
    d_a_ptr,
    d_skip_ptr,
    x_stride,
    b_stride,
    c_stride,
    NUM_H: tl.constexpr,
    NUM_G: tl.constexpr,
    NUM_N: tl.constexpr,
    NUM_W: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """Write the gradients of x and dt of one chunk and head, and its partial gradients of a and skip."""
    chunk, head = (tl.program_id(0) // NUM_H).to(tl.int64), tl.program_id(0) % NUM_H
    rows, inside_rows = _find_rows(chunk, start_ptr, index_ptr, BLOCK_L)
    group = head // (NUM_H // NUM_G)
    x_ptr += head * NUM_W
    d_y_ptr += head * NUM_W
    d_x_ptr += head * NUM_W
    b_ptr += group * NUM_N
    c_ptr += group * NUM_N
    state_ptr += (chunk * NUM_H + head) * (NUM_N * NUM_W)
    d_state_ptr += (chunk * NUM_H + head) * (NUM_N * NUM_W)
    a, skip = tl.load(a_ptr + head), tl.load(skip_ptr + head)
    dt = tl.load(dt_ptr + rows * NUM_H + head, mask=inside_rows, other=0.0)
    sums, lost = _sum_logs(dt * a)
    enter, leave = tl.exp(sums), tl.exp(_sum_later(dt * a))
    places = tl.arange(0, BLOCK_L)
    is_seen = places[:, None] >= places[None, :]
    decay = _decay(sums, lost, is_seen)

    scores = tl.zeros((BLOCK_L, BLOCK_L), dtype=tl.float32)
    for first in tl.range(0, NUM_N, BLOCK_N, num_stages=1):
        ns = first + tl.arange(0, BLOCK_N)
        b = _load(b_ptr, rows, b_stride, ns, inside_rows, NUM_N)
        c = _load(c_ptr, rows, c_stride, ns, inside_rows, NUM_N)
        scores = tl.dot(c, tl.trans(b), scores, input_precision="ieee")
    scores *= decay

    d_scores = tl.zeros((BLOCK_L, BLOCK_L), dtype=tl.float32)
    # Per token: the contribution of the entry state to the output, and of the token to the exit state.
    entered = tl.zeros((BLOCK_L,), dtype=tl.float32)
    left = tl.zeros((BLOCK_L,), dtype=tl.float32)
    d_skip = tl.zeros((BLOCK_L,), dtype=tl.float32)
    d_total = tl.zeros((BLOCK_N,), dtype=tl.float32)
    for first_w in tl.range(0, NUM_W, BLOCK_W, num_stages=1):
        ws = first_w + tl.arange(0, BLOCK_W)
        x = _load(x_ptr, rows, x_stride, ws, inside_rows, NUM_W)
        d_y = _load(d_y_ptr, rows, NUM_H * NUM_W, ws, inside_rows, NUM_W)
        d_scores = tl.dot(d_y, tl.trans(x), d_scores, input_precision="ieee")
        read = tl.zeros((BLOCK_L, BLOCK_W), dtype=tl.float32)
        d_x = tl.zeros((BLOCK_L, BLOCK_W), dtype=tl.float32)
        for first in tl.range(0, NUM_N, BLOCK_N, num_stages=1):
            ns = first + tl.arange(0, BLOCK_N)
            b = _load(b_ptr, rows, b_stride, ns, inside_rows, NUM_N)
            c = _load(c_ptr, rows, c_stride, ns, inside_rows, NUM_N)
            state = _load_state(state_ptr, ns, ws, NUM_N, NUM_W)
            d_state = _load_state(d_state_ptr, ns, ws, NUM_N, NUM_W)
            read = tl.dot(c, state, read, input_precision="ieee")
            d_x = tl.dot(b, d_state, d_x, input_precision="ieee")
            d_total += tl.sum(state.to(tl.float32) * d_state.to(tl.float32), axis=1)
        wide_x, wide_d_y = x.to(tl.float32), d_y.to(tl.float32)
        entered += tl.sum(read * wide_d_y, axis=1)
        left += tl.sum(d_x * wide_x, axis=1)
        d_skip += tl.sum(wide_x * wide_d_y, axis=1)
        weights = tl.trans(scores * dt[None, :]).to(d_y.dtype)
        d_x = tl.dot(weights, d_y, d_x * (leave * dt)[:, None], input_precision="ieee") + skip * wide_d_y
        tl.store(
            d_x_ptr + rows[:, None] * (NUM_H * NUM_W) + ws[None, :],
            d_x.to(d_x_ptr.dtype.element_ty),
            mask=inside_rows[:, None] & (ws < NUM_W)[None, :],
        )

    pairs = scores * d_scores
    # A token paired with itself does not decay.
    decayed = tl.where(places[:, None] > places[None, :], pairs * dt[None, :], 0.0)
    left_dt = left * leave * dt
    d_sums = tl.sum(decayed, axis=1) - tl.sum(decayed, axis=0) + enter * entered
    d_logs = tl.cumsum(d_sums, reverse=True) + (tl.cumsum(left_dt) - left_dt) + tl.exp(tl.sum(dt * a)) * tl.sum(d_total)
    d_dt = tl.sum(pairs, axis=0) + left * leave + a * d_logs
    tl.store(d_dt_ptr + rows * NUM_H + head, d_dt, mask=inside_rows)
    tl.store(d_a_ptr + chunk * NUM_H + head, tl.sum(dt * d_logs))
    tl.store(d_skip_ptr + chunk * NUM_H + head, tl.sum(d_skip))


@triton.jit
def _group_gradient_kernel(
    d_y_ptr,
    x_ptr,
    dt_ptr,
    a_ptr,
    b_ptr,
    c_ptr,
    start_ptr,
    index_ptr,
    state_ptr,
    d_state_ptr,
    d_b_ptr,
    d_c_ptr,
    x_stride,
    b_stride,
    c_stride,
    NUM_H: tl.constexpr,
    NUM_G: tl.constexpr,
    NUM_N: tl.constexpr,
    NUM_W: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """Write the gradients of a tile of b and c of one chunk, summed over HEADS heads of a group."""
    num_parts = NUM_H // HEADS
    chunk, part = (tl.program_id(0) // num_parts).to(tl.int64), tl.program_id(0) % num_parts
    rows, inside_rows = _find_rows(chunk, start_ptr, index_ptr, BLOCK_L)
    ns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    group = part * HEADS // (NUM_H // NUM_G)
    b = _load(b_ptr + group * NUM_N, rows, b_stride, ns, inside_rows, NUM_N)
    c = _load(c_ptr + group * NUM_N, rows, c_stride, ns, inside_rows, NUM_N)
    places = tl.arange(0, BLOCK_L)
    is_seen = places[:, None] >= places[None, :]

    d_b = tl.zeros((BLOCK_L, BLOCK_N), dtype=tl.float32)
    d_c = tl.zeros((BLOCK_L, BLOCK_N), dtype=tl.float32)
    for number in tl.range(0, HEADS, num_stages=1):
        head = part * HEADS + number
        dt = tl.load(dt_ptr + rows * NUM_H + head, mask=inside_rows, other=0.0)
        logs = dt * tl.load(a_ptr + head)
        sums, lost = _sum_logs(logs)
        enter, leave = tl.exp(sums), tl.exp(_sum_later(logs)) * dt
        state_ptrs = (chunk * NUM_H + head) * (NUM_N * NUM_W)
        d_scores = tl.zeros((BLOCK_L, BLOCK_L), dtype=tl.float32)
        for first_w in tl.range(0, NUM_W, BLOCK_W, num_stages=1):
            ws = first_w + tl.arange(0, BLOCK_W)
            x = _load(x_ptr + head * NUM_W, rows, x_stride, ws, inside_rows, NUM_W)
            d_y = _load(d_y_ptr + head * NUM_W, rows, NUM_H * NUM_W, ws, inside_rows, NUM_W)
            d_scores = tl.dot(d_y, tl.trans(x), d_scores, input_precision="ieee")
            state = _load_state(state_ptr + state_ptrs, ns, ws, NUM_N, NUM_W)
            d_state = _load_state(d_state_ptr + state_ptrs, ns, ws, NUM_N, NUM_W)
            d_c += enter[:, None] * tl.dot(d_y, tl.trans(state), input_precision="ieee")
            d_b += leave[:, None] * tl.dot(x, tl.trans(d_state), input_precision="ieee")
        decay = _decay(sums, lost, is_seen)
        weights = (d_scores * decay * dt[None, :]).to(b.dtype)
        d_c = tl.dot(weights, b, d_c, input_precision="ieee")
        d_b = tl.dot(tl.trans(weights), c, d_b, input_precision="ieee")

    places_out = (rows[:, None] * num_parts + part) * NUM_N + ns[None, :]
    inside = inside_rows[:, None] & (ns < NUM_N)[None, :]
    tl.store(d_b_ptr + places_out, d_b, mask=inside)
    tl.store(d_c_ptr + places_out, d_c, mask=inside)


def scan_forward(
    x_THW: torch.Tensor,
    dt_TH: torch.Tensor,
    a_H: torch.Tensor,
    b_TGN: torch.Tensor,
    c_TGN: torch.Tensor,
    skip_H: torch.Tensor,
    *,
    chunks: Chunks,
) -> torch.Tensor:
    """Return the outputs; same contract as the reference."""
    y_THW = torch.empty(x_THW.shape, dtype=x_THW.dtype, device=x_THW.device)
    sizes = _sizes(x_THW, b_TGN, chunks=chunks)
    state = _states(x_THW, dt_TH, a_H, b_TGN, chunks=chunks, is_reversed=False)
    num_chunks, num_heads = len(chunks.index_C2), x_THW.shape[1]
    launch(
        _output_kernel,
        (num_chunks * num_heads, ceil_div(x_THW.shape[2], sizes["BLOCK_W"])),
        x_THW,
        dt_TH,
        a_H,
        b_TGN,
        c_TGN,
        skip_H,
        chunks.start_S1,
        chunks.index_C2,
        state,
        y_THW,
        x_THW.stride(0),
        b_TGN.stride(0),
        c_TGN.stride(0),
        **sizes,
        num_warps=OUTPUT_WARPS,
    )
    return y_THW


def scan_backward(
    d_y_THW: torch.Tensor,
    x_THW: torch.Tensor,
    dt_TH: torch.Tensor,
    a_H: torch.Tensor,
    b_TGN: torch.Tensor,
    c_TGN: torch.Tensor,
    skip_H: torch.Tensor,
    *,
    chunks: Chunks,
) -> tuple[torch.Tensor, ...]:
    """Return the gradients of x, dt, a, b, c and skip, each like its input, but dt, a and skip in fp32.

    d_y_THW is contiguous.
    """
    sizes = _sizes(x_THW, b_TGN, chunks=chunks)
    (num_tokens, num_heads, _), (_, num_groups, num_n) = x_THW.shape, b_TGN.shape
    num_chunks = len(chunks.index_C2)
    state = _states(x_THW, dt_TH, a_H, b_TGN, chunks=chunks, is_reversed=False)
    d_state = _states(d_y_THW, dt_TH, a_H, c_TGN, chunks=chunks, is_reversed=True)
    d_x_THW = torch.empty(x_THW.shape, dtype=x_THW.dtype, device=x_THW.device)
    d_dt_TH = dt_TH.new_empty(num_tokens, num_heads)
    d_a_CH, d_skip_CH = (dt_TH.new_empty(num_chunks, num_heads) for _ in range(2))
    strides = (x_THW.stride(0), b_TGN.stride(0), c_TGN.stride(0))
    documents = (chunks.start_S1, chunks.index_C2, state, d_state)
    launch(
        _head_gradient_kernel,
        (num_chunks * num_heads,),
        d_y_THW,
        x_THW,
        dt_TH,
        a_H,
        b_TGN,
        c_TGN,
        skip_H,
        *documents,
        d_x_THW,
        d_dt_TH,
        d_a_CH,
        d_skip_CH,
        *strides,
        **sizes,
        num_warps=GRADIENT_WARPS,
        # A fused multiply-add rounds differently in threads that hold the same sum (triton-lang/triton#7264), and these
        # threads write to the same place.
        enable_fp_fusion=False,
    )
    heads = _heads_per_program(num_heads // num_groups)
    d_b_parts, d_c_parts = (dt_TH.new_empty(num_tokens, num_heads // heads, num_n) for _ in range(2))
    launch(
        _group_gradient_kernel,
        (num_chunks * num_heads // heads, ceil_div(num_n, sizes["BLOCK_N"])),
        d_y_THW,
        x_THW,
        dt_TH,
        a_H,
        b_TGN,
        c_TGN,
        *documents,
        d_b_parts,
        d_c_parts,
        *strides,
        HEADS=heads,
        **sizes,
        num_warps=GRADIENT_WARPS,
    )
    d_b_TGN, d_c_TGN = (
        parts.view(num_tokens, num_groups, -1, num_n).sum(2).to(b_TGN.dtype) for parts in (d_b_parts, d_c_parts)
    )
    return d_x_THW, d_dt_TH, d_a_CH.sum(0), d_b_TGN, d_c_TGN, d_skip_CH.sum(0)


def _states(
    x_THW: torch.Tensor,
    dt_TH: torch.Tensor,
    a_H: torch.Tensor,
    b_TGN: torch.Tensor,
    *,
    chunks: Chunks,
    is_reversed: bool,
) -> torch.Tensor:
    """Return the states on entry to each chunk, or their gradients on exit, in the dtype of x_THW."""
    sizes = _sizes(x_THW, b_TGN, chunks=chunks)
    _, num_heads, num_w = x_THW.shape
    num_n, num_documents = b_TGN.shape[2], len(chunks.start_S1) - 1
    state = torch.empty(len(chunks.index_C2), num_heads, num_n, num_w, dtype=x_THW.dtype, device=x_THW.device)
    grid = (num_documents * num_heads, ceil_div(num_n, sizes["BLOCK_N"]), ceil_div(num_w, sizes["BLOCK_W"]))
    launch(
        _states_kernel,
        grid,
        x_THW,
        dt_TH,
        a_H,
        b_TGN,
        chunks.start_S1,
        chunks.first_S1,
        state,
        x_THW.stride(0),
        b_TGN.stride(0),
        IS_REVERSED=is_reversed,
        **sizes,
        num_warps=STATE_WARPS,
    )
    return state


def _sizes(x_THW: torch.Tensor, b_TGN: torch.Tensor, *, chunks: Chunks) -> dict[str, int]:
    """Return the sizes and tiles that all kernels share."""
    (_, num_heads, num_w), (_, num_groups, num_n) = x_THW.shape, b_TGN.shape
    block_n, block_w = (min(max(next_power_of_2(size), MIN_BLOCK), MAX_BLOCK) for size in (num_n, num_w))
    return {
        "NUM_H": num_heads,
        "NUM_G": num_groups,
        "NUM_N": num_n,
        "NUM_W": num_w,
        "BLOCK_L": chunks.size,
        "BLOCK_N": block_n,
        "BLOCK_W": block_w,
    }


def _heads_per_program(num_heads_per_group: int) -> int:
    """Return the largest divisor of the heads of a group that is not above MAX_HEADS_PER_PROGRAM."""
    return max(size for size in range(1, MAX_HEADS_PER_PROGRAM + 1) if num_heads_per_group % size == 0)
