"""The gate of an expert on a GPU: one pass over memory forward, one backward.

Axes: N routed slots, sorted by expert (walked in blocks of rows); F expert width (walked in tiles of columns); P = 2 F
    columns that hold gate and up; R ranks of a low-rank product.
The forward reads P and writes F columns. The backward reads F + P and writes P columns, and F more if the activation is
returned. Rows are independent. Programs that walk over all columns take 0.56 ms for 8,192 x 17,408 on an H200, so
without a sum over rows the columns are spread over programs (python -m benchmarks.row_kernels --only expert_gate: "sums
of rows" is the form that walks).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lightning_fastft.kernels.expert_gate.reference import (
    CLAMP_PASSES_BOUND,
    TANH_CUBE,
    TANH_SCALE,
    GateForm,
    LowRankRows,
)
from lightning_fastft.kernels.fp8_linear.reference import LARGEST, LEAST_PEAK, Fp8Rows
from lightning_fastft.kernels.fp8_linear.triton import new_rows, row_scale, row_tiles
from lightning_fastft.kernels.launch import launch
from lightning_fastft.kernels.sizes import ceil_div, next_power_of_2

# 8 rows x 256 columns on 4 warps: two 16-byte reads per thread and matrix in bf16, and no idle column at widths of 768
# or 1536. With sums of rows, the fastest of other tiles takes 5 % less at 768 columns (4 x 256) and 6 % less at 2,880
# (2 x 512), on an H200: python -m benchmarks.row_kernels --only "sums of rows" --tiles.
BLOCK_ROWS = 8
MAX_BLOCK_COLUMNS = 256
NUM_WARPS = 4
# With a low-rank product, tiles have the same number of values but at least 16 along each axis, for tl.dot. Tall tiles
# read the factor less often: 2 R / rows bytes of it per value in bf16 from the L2 cache, and 10 to 12 from memory. Not
# yet measured; candidates as above.
ADDEND_BLOCK_ROWS = 16
ADDEND_MAX_BLOCK_COLUMNS = 128
# Ranks of one step; more ranks take more steps.
MAX_BLOCK_RANKS = 32
_MIN_BLOCK = 16
# A program that walks over a row twice: 16 bytes per thread and matrix. So large that the rows of all programs stay in
# the L2 cache: two programs on each of 132 multiprocessors read 19 MB at a time, for 12,288 columns. Not yet measured.
WALK_COLUMNS, WALK_WARPS = 4096, 16

_PASSES_BOUND = tl.constexpr(CLAMP_PASSES_BOUND)
_TANH_SCALE = tl.constexpr(TANH_SCALE)
_TANH_CUBE = tl.constexpr(TANH_CUBE)
_SQRT_HALF = tl.constexpr(0.5**0.5)
_NORMAL_DENSITY = tl.constexpr(0.3989422804014327)


@triton.jit
def _num_written(num_rows, last_end_ptr, HAS_END: tl.constexpr):
    """Return the number of rows that have an expert."""
    if HAS_END:
        num_rows = tl.load(last_end_ptr)
    return num_rows


@triton.jit
def _gate_and_slopes(raw_gate, raw_up, limit, alpha, ACTIVATION: tl.constexpr, IS_WIDE: tl.constexpr):
    """Return the activation and its derivatives by gate and by up; unused results cost nothing."""
    gate = raw_gate
    factor = raw_up
    if ACTIVATION == "clamped":
        # Comparisons with NaN are false, so NaN stays NaN, as in torch.clamp.
        gate = tl.where(raw_gate > limit, limit, raw_gate)
        factor = tl.where(raw_up > limit, limit, tl.where(raw_up < -limit, -limit, raw_up)) + 1.0

    if ACTIVATION == "gelu":
        share = 0.5 * (1.0 + tl.erf(gate * _SQRT_HALF))
        share_slope = _NORMAL_DENSITY * tl.exp(-0.5 * gate * gate)
        glu = gate * share
    else:
        exponent = gate
        exponent_slope = 1.0
        if ACTIVATION == "gelu_tanh":
            exponent = 2.0 * _TANH_SCALE * (gate + _TANH_CUBE * gate * gate * gate)
            exponent_slope = 2.0 * _TANH_SCALE * (1.0 + 3.0 * _TANH_CUBE * gate * gate)
        if ACTIVATION == "clamped":
            exponent = gate * alpha
            exponent_slope = alpha
        # The sigmoid and its complement through exp(-|x|), which cannot overflow.
        decay = tl.exp(-tl.abs(exponent))
        is_negative = exponent < 0.0
        # Triton's fp32 division has an error of up to 2 ulp, which rounding to a narrow dtype hides.
        one = tl.full(decay.shape, 1.0, tl.float32)
        larger = tl.div_rn(one, 1.0 + decay) if IS_WIDE else one / (1.0 + decay)
        smaller = decay * larger
        share = tl.where(is_negative, smaller, larger)
        share_slope = smaller * larger * exponent_slope
        # One rounding less than gate * share. A second division would take time that a narrow dtype does not need.
        raw_glu = tl.where(is_negative, gate * decay, gate)
        glu = tl.div_rn(raw_glu, 1.0 + decay) if IS_WIDE else raw_glu * larger

    gate_slope = factor * (share + gate * share_slope)
    up_slope = glu
    if ACTIVATION == "clamped":
        is_gate_inside = raw_gate <= limit if _PASSES_BOUND else raw_gate < limit
        is_up_inside = tl.abs(raw_up) <= limit if _PASSES_BOUND else tl.abs(raw_up) < limit
        gate_slope = tl.where(is_gate_inside, gate_slope, 0.0)
        up_slope = tl.where(is_up_inside, up_slope, 0.0)
    return glu * factor, gate_slope, up_slope


@triton.jit
def _load_gate_and_up(
    row_ptrs,
    start,
    inside_rows,
    num_columns,
    IS_INTERLEAVED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    """Return a tile of the gate and a tile of the up projection in fp32; interleaved columns are read as one tile and
    split in registers.
    """
    if IS_INTERLEAVED:
        cols = 2 * start + tl.arange(0, 2 * BLOCK_F)
        inside = inside_rows[:, None] & (cols < 2 * num_columns)[None, :]
        pairs = tl.load(row_ptrs[:, None] + cols[None, :], mask=inside, other=0.0)
        gate, up = tl.split(tl.reshape(pairs, (BLOCK_N, BLOCK_F, 2)))
    else:
        cols = start + tl.arange(0, BLOCK_F)
        inside = inside_rows[:, None] & (cols < num_columns)[None, :]
        ptrs = row_ptrs[:, None] + cols[None, :]
        gate = tl.load(ptrs, mask=inside, other=0.0)
        up = tl.load(ptrs + num_columns, mask=inside, other=0.0)
    return gate.to(tl.float32), up.to(tl.float32)


@triton.jit
def _low_rank_tile(
    low_rows,
    factor_ptr,
    factor_stride,
    cols,
    inside_rows,
    num_columns,
    num_ranks,
    BLOCK_N: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Return a tile of the low-rank product in fp32.

    The caller computes it transposed, before it loads anything, so Triton 3.9 changes the product's layout once. If it
    were not transposed, or computed later, the rest of the kernel would run in the layout of tensor cores: five layout
    changes through shared memory, 30 barriers instead of 4 and 128 registers instead of 106.
    """
    product_FN = tl.zeros((BLOCK_F, BLOCK_N), dtype=tl.float32)
    for first in tl.range(0, num_ranks, BLOCK_R, num_stages=1):
        ranks = first + tl.arange(0, BLOCK_R)
        inside_ranks = ranks < num_ranks
        low = tl.load(low_rows[:, None] + ranks[None, :], mask=inside_rows[:, None] & inside_ranks[None, :], other=0.0)
        factor_ptrs = factor_ptr + ranks.to(tl.int64)[:, None] * factor_stride + cols[None, :]
        factor = tl.load(factor_ptrs, mask=inside_ranks[:, None] & (cols < num_columns)[None, :], other=0.0)
        product_FN = tl.dot(tl.trans(factor), tl.trans(low), product_FN, input_precision="ieee")
    return tl.trans(product_FN)


@triton.jit
def _gate_forward_kernel(
    gate_up_ptr,
    last_end_ptr,
    act_ptr,
    gate_up_stride,
    num_rows,
    num_columns,
    limit,
    alpha,
    ACTIVATION: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
    IS_WIDE: tl.constexpr,
    HAS_END: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    """Run one program per block of rows and tile of columns."""
    num_rows = _num_written(num_rows, last_end_ptr, HAS_END)
    rows = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    start = tl.program_id(1) * BLOCK_F
    inside_rows = rows < num_rows
    gate, up = _load_gate_and_up(
        gate_up_ptr + rows * gate_up_stride, start, inside_rows, num_columns, IS_INTERLEAVED, BLOCK_N, BLOCK_F
    )
    act, _gate_slope, _up_slope = _gate_and_slopes(gate, up, limit, alpha, ACTIVATION, IS_WIDE)
    cols = start + tl.arange(0, BLOCK_F)
    inside = inside_rows[:, None] & (cols < num_columns)[None, :]
    act_ptrs = act_ptr + rows[:, None] * num_columns + cols[None, :]
    tl.store(act_ptrs, act.to(act_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _gate_backward_kernel(
    d_act_ptr,
    gate_up_ptr,
    weight_ptr,
    low_ptr,
    factor_ptr,
    last_end_ptr,
    out_ptr,
    act_ptr,
    d_weight_ptr,
    d_act_stride,
    gate_up_stride,
    weight_stride,
    low_stride,
    factor_stride,
    num_rows,
    num_columns,
    num_ranks,
    columns_per_program,
    limit,
    alpha,
    ACTIVATION: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
    IS_WIDE: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_ADDEND: tl.constexpr,
    HAS_END: tl.constexpr,
    WRITE_ACT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Run one program per block of rows and span of columns.

    With weights the span has all columns, so one program sums a row in a fixed order.
    """
    num_rows = _num_written(num_rows, last_end_ptr, HAS_END)
    rows = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside_rows = rows < num_rows
    d_act_rows = d_act_ptr + rows * d_act_stride
    gate_up_rows = gate_up_ptr + rows * gate_up_stride
    out_rows = out_ptr + rows * (2 * num_columns)
    act_rows = act_ptr + rows * num_columns
    low_rows = low_ptr + rows * low_stride
    if HAS_WEIGHT:
        weight = tl.load(weight_ptr + rows * weight_stride, mask=inside_rows, other=0.0).to(tl.float32)[:, None]
        weight_terms = tl.zeros((BLOCK_N, BLOCK_F), dtype=tl.float32)

    begin = tl.program_id(1) * columns_per_program
    for start in range(begin, min(begin + columns_per_program, num_columns), BLOCK_F):
        cols = start + tl.arange(0, BLOCK_F)
        inside = inside_rows[:, None] & (cols < num_columns)[None, :]
        if HAS_ADDEND:
            addend = _low_rank_tile(
                low_rows,
                factor_ptr,
                factor_stride,
                cols,
                inside_rows,
                num_columns,
                num_ranks,
                BLOCK_N,
                BLOCK_F,
                BLOCK_R,
            )
        gate, up = _load_gate_and_up(gate_up_rows, start, inside_rows, num_columns, IS_INTERLEAVED, BLOCK_N, BLOCK_F)
        d_act = tl.load(d_act_rows[:, None] + cols[None, :], mask=inside, other=0.0).to(tl.float32)
        if HAS_ADDEND:
            d_act += addend
        act, gate_slope, up_slope = _gate_and_slopes(gate, up, limit, alpha, ACTIVATION, IS_WIDE)
        if HAS_WEIGHT:
            weight_terms += d_act * act
            d_act *= weight
        d_gate = (d_act * gate_slope).to(out_ptr.dtype.element_ty)
        d_up = (d_act * up_slope).to(out_ptr.dtype.element_ty)
        if IS_INTERLEAVED:
            pair_cols = 2 * start + tl.arange(0, 2 * BLOCK_F)
            inside_pairs = inside_rows[:, None] & (pair_cols < 2 * num_columns)[None, :]
            tl.store(out_rows[:, None] + pair_cols[None, :], tl.interleave(d_gate, d_up), mask=inside_pairs)
        else:
            out_ptrs = out_rows[:, None] + cols[None, :]
            tl.store(out_ptrs, d_gate, mask=inside)
            tl.store(out_ptrs + num_columns, d_up, mask=inside)
        if WRITE_ACT:
            tl.store(act_rows[:, None] + cols[None, :], act.to(act_ptr.dtype.element_ty), mask=inside)

    if HAS_WEIGHT:
        tl.store(d_weight_ptr + rows, tl.sum(weight_terms, axis=1), mask=inside_rows)


@triton.jit
def _gate_forward_quantised_kernel(
    gate_up_ptr,
    values_ptr,
    scale_ptr,
    gate_up_stride,
    num_columns,
    limit,
    alpha,
    ACTIVATION: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
    IS_WIDE: tl.constexpr,
    ROUND_SCALES: tl.constexpr,
    LARGEST: tl.constexpr,
    LEAST_PEAK: tl.constexpr,
    NUM_TILES: tl.constexpr,
    TILE: tl.constexpr,
):
    """Run one program per row, whose rounded activation stays in registers until its largest number is known."""
    row = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    tiles = ()
    peaks = tl.zeros((1, TILE), dtype=tl.float32)
    for index in tl.static_range(NUM_TILES):
        gate, up = _load_gate_and_up(
            gate_up_ptr + row * gate_up_stride, index * TILE, row >= 0, num_columns, IS_INTERLEAVED, 1, TILE
        )
        act, _gate_slope, _up_slope = _gate_and_slopes(gate, up, limit, alpha, ACTIVATION, IS_WIDE)
        act = act.to(gate_up_ptr.dtype.element_ty)
        peaks = tl.maximum(peaks, tl.abs(act.to(tl.float32)))
        # Triton does not support unpacking.
        tiles = tiles + (act,)  # type: ignore[assignment]  # noqa: RUF005
    scale, inverse = row_scale(tl.max(peaks, axis=1), ROUND_SCALES, LARGEST, LEAST_PEAK)
    tl.store(scale_ptr + row, scale)
    for index in tl.static_range(NUM_TILES):
        cols = index * TILE + tl.arange(0, TILE)
        value = (tiles[index].to(tl.float32) * inverse[:, None]).to(values_ptr.dtype.element_ty)
        tl.store(values_ptr + row[:, None] * num_columns + cols[None, :], value, mask=(cols < num_columns)[None, :])


@triton.jit
def _gradient_tile(
    d_act_row,
    gate_up_row,
    factor_ptr,
    start,
    num_columns,
    limit,
    alpha,
    ACTIVATION: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
    IS_WIDE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Return a tile of the rounded gradients of gate and up, times their factors, and of the rounded activation."""
    cols = start + tl.arange(0, TILE)
    inside = (cols < num_columns)[None, :]
    dtype: tl.constexpr = gate_up_row.dtype.scalar.element_ty
    gate, up = _load_gate_and_up(gate_up_row, start, tl.full((1,), 1, tl.int1), num_columns, IS_INTERLEAVED, 1, TILE)
    d_act = tl.load(d_act_row[:, None] + cols[None, :], mask=inside, other=0.0).to(tl.float32)
    act, gate_slope, up_slope = _gate_and_slopes(gate, up, limit, alpha, ACTIVATION, IS_WIDE)
    if IS_INTERLEAVED:
        gate_factor_ptr = factor_ptr + 2 * cols[None, :]
        up_factor_ptr = gate_factor_ptr + 1
    else:
        gate_factor_ptr = factor_ptr + cols[None, :]
        up_factor_ptr = gate_factor_ptr + num_columns
    d_gate = (d_act * gate_slope).to(dtype).to(tl.float32)
    d_up = (d_act * up_slope).to(dtype).to(tl.float32)
    d_gate *= tl.load(gate_factor_ptr, mask=inside, other=0.0).to(tl.float32)
    d_up *= tl.load(up_factor_ptr, mask=inside, other=0.0).to(tl.float32)
    return d_gate, d_up, act.to(dtype).to(tl.float32)


@triton.jit
def _gate_backward_quantised_kernel(
    d_act_ptr,
    gate_up_ptr,
    factor_ptr,
    d_values_ptr,
    d_scale_ptr,
    values_ptr,
    scale_ptr,
    d_act_stride,
    gate_up_stride,
    num_columns,
    limit,
    alpha,
    ACTIVATION: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
    IS_WIDE: tl.constexpr,
    NEED_ACT: tl.constexpr,
    ROUND_SCALES: tl.constexpr,
    LARGEST: tl.constexpr,
    LEAST_PEAK: tl.constexpr,
    TILE: tl.constexpr,
):
    """Run one program per row: find the largest numbers, then read the row again, from the L2 cache, and cast.

    Held in registers, the three results of 12,288 columns would need all 255 of each thread.
    """
    row = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    d_act_row = d_act_ptr + row * d_act_stride
    gate_up_row = gate_up_ptr + row * gate_up_stride
    d_peaks = tl.zeros((1, TILE), dtype=tl.float32)
    peaks = tl.zeros((1, TILE), dtype=tl.float32)
    for start in range(0, num_columns, TILE):
        d_gate, d_up, act = _gradient_tile(
            d_act_row,
            gate_up_row,
            factor_ptr,
            start,
            num_columns,
            limit,
            alpha,
            ACTIVATION,
            IS_INTERLEAVED,
            IS_WIDE,
            TILE,
        )
        d_peaks = tl.maximum(d_peaks, tl.maximum(tl.abs(d_gate), tl.abs(d_up)))
        peaks = tl.maximum(peaks, tl.abs(act))
    d_scale, d_inverse = row_scale(tl.max(d_peaks, axis=1), ROUND_SCALES, LARGEST, LEAST_PEAK)
    scale, inverse = row_scale(tl.max(peaks, axis=1), ROUND_SCALES, LARGEST, LEAST_PEAK)
    tl.store(d_scale_ptr + row, d_scale)
    if NEED_ACT:
        tl.store(scale_ptr + row, scale)
    d_values_row = d_values_ptr + row * (2 * num_columns)
    for start in range(0, num_columns, TILE):
        d_gate, d_up, act = _gradient_tile(
            d_act_row,
            gate_up_row,
            factor_ptr,
            start,
            num_columns,
            limit,
            alpha,
            ACTIVATION,
            IS_INTERLEAVED,
            IS_WIDE,
            TILE,
        )
        cols = start + tl.arange(0, TILE)
        inside = (cols < num_columns)[None, :]
        d_gate = (d_gate * d_inverse[:, None]).to(d_values_ptr.dtype.element_ty)
        d_up = (d_up * d_inverse[:, None]).to(d_values_ptr.dtype.element_ty)
        if IS_INTERLEAVED:
            pair_cols = 2 * start + tl.arange(0, 2 * TILE)
            inside_pairs = (pair_cols < 2 * num_columns)[None, :]
            tl.store(d_values_row[:, None] + pair_cols[None, :], tl.interleave(d_gate, d_up), mask=inside_pairs)
        else:
            d_values = d_values_row[:, None] + cols[None, :]
            tl.store(d_values, d_gate, mask=inside)
            tl.store(d_values + num_columns, d_up, mask=inside)
        if NEED_ACT:
            value = (act * inverse[:, None]).to(values_ptr.dtype.element_ty)
            tl.store(values_ptr + row[:, None] * num_columns + cols[None, :], value, mask=inside)


def gate_forward(gate_up_NP: torch.Tensor, *, form: GateForm, end_E: torch.Tensor | None = None) -> torch.Tensor:
    """Return the activation; same contract as the reference."""
    num_rows, num_columns = gate_up_NP.shape[0], gate_up_NP.shape[1] // 2
    act_NF = torch.empty(num_rows, num_columns, dtype=gate_up_NP.dtype, device=gate_up_NP.device)
    if act_NF.numel() == 0:
        return act_NF
    block_columns = min(next_power_of_2(num_columns), MAX_BLOCK_COLUMNS)
    launch(
        _gate_forward_kernel,
        (ceil_div(num_rows, BLOCK_ROWS), ceil_div(num_columns, block_columns)),
        gate_up_NP,
        gate_up_NP if end_E is None else end_E[-1:],
        act_NF,
        gate_up_NP.stride(0),
        num_rows,
        num_columns,
        float(form.limit),
        float(form.alpha),
        ACTIVATION=form.activation,
        IS_INTERLEAVED=form.is_interleaved,
        IS_WIDE=gate_up_NP.dtype is torch.float32,
        HAS_END=end_E is not None,
        BLOCK_N=BLOCK_ROWS,
        BLOCK_F=block_columns,
        num_warps=NUM_WARPS,
    )
    return act_NF


def gate_backward(
    d_act_NF: torch.Tensor,
    gate_up_NP: torch.Tensor,
    *,
    form: GateForm,
    weight_N: torch.Tensor | None = None,
    addend: LowRankRows | None = None,
    need_act: bool = False,
    end_E: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Return the gradients, and the activation if asked; same contract as the reference."""
    num_rows, num_columns = d_act_NF.shape
    device = gate_up_NP.device
    d_gate_up_NP = torch.empty(gate_up_NP.shape, dtype=gate_up_NP.dtype, device=device)
    act_NF = torch.empty(num_rows, num_columns, dtype=gate_up_NP.dtype, device=device) if need_act else None
    d_weight_N = None if weight_N is None else torch.empty(num_rows, dtype=torch.float32, device=device)
    if num_rows == 0:
        return d_gate_up_NP, act_NF, d_weight_N
    block_rows, block_columns, block_ranks = _backward_blocks(num_columns, addend)
    low_NR, factor_RF = (d_act_NF, d_act_NF) if addend is None else addend
    num_spans = 1 if weight_N is not None else max(ceil_div(num_columns, block_columns), 1)
    launch(
        _gate_backward_kernel,
        (ceil_div(num_rows, block_rows), num_spans),
        d_act_NF,
        gate_up_NP,
        d_act_NF if weight_N is None else weight_N,
        low_NR,
        factor_RF,
        d_act_NF if end_E is None else end_E[-1:],
        d_gate_up_NP,
        d_gate_up_NP if act_NF is None else act_NF,
        d_gate_up_NP if d_weight_N is None else d_weight_N,
        d_act_NF.stride(0),
        gate_up_NP.stride(0),
        0 if weight_N is None else weight_N.stride(0),
        0 if addend is None else low_NR.stride(0),
        0 if addend is None else factor_RF.stride(0),
        num_rows,
        num_columns,
        0 if addend is None else low_NR.shape[1],
        num_columns if num_spans == 1 else block_columns,
        float(form.limit),
        float(form.alpha),
        ACTIVATION=form.activation,
        IS_INTERLEAVED=form.is_interleaved,
        IS_WIDE=gate_up_NP.dtype is torch.float32,
        HAS_WEIGHT=weight_N is not None,
        HAS_ADDEND=addend is not None,
        HAS_END=end_E is not None,
        WRITE_ACT=act_NF is not None,
        BLOCK_N=block_rows,
        BLOCK_F=block_columns,
        BLOCK_R=block_ranks,
        num_warps=NUM_WARPS,
    )
    return d_gate_up_NP, act_NF, d_weight_N


def gate_forward_quantised(gate_up_NP: torch.Tensor, *, form: GateForm, round_scales_to_power_of_2: bool) -> Fp8Rows:
    """Return the activation in e4m3; same contract as the reference."""
    num_rows, num_columns = gate_up_NP.shape[0], gate_up_NP.shape[1] // 2
    out = new_rows(num_rows, num_columns, device=gate_up_NP.device)
    if num_rows:
        launch(
            _gate_forward_quantised_kernel,
            (num_rows,),
            gate_up_NP,
            *out,
            gate_up_NP.stride(0),
            num_columns,
            float(form.limit),
            float(form.alpha),
            ACTIVATION=form.activation,
            IS_INTERLEAVED=form.is_interleaved,
            IS_WIDE=gate_up_NP.dtype is torch.float32,
            ROUND_SCALES=round_scales_to_power_of_2,
            LARGEST=LARGEST,
            LEAST_PEAK=LEAST_PEAK,
            **row_tiles(num_columns),
        )
    return out


def gate_backward_quantised(
    d_act_NF: torch.Tensor,
    gate_up_NP: torch.Tensor,
    *,
    form: GateForm,
    factor_P: torch.Tensor,
    round_scales_to_power_of_2: bool,
    need_act: bool,
) -> tuple[Fp8Rows, Fp8Rows | None]:
    """Return the gradients, and the activation if asked, in e4m3; same contract as the reference."""
    num_rows, num_columns = d_act_NF.shape
    d_gate_up = new_rows(num_rows, 2 * num_columns, device=d_act_NF.device)
    act = new_rows(num_rows, num_columns, device=d_act_NF.device) if need_act else None
    if num_rows:
        launch(
            _gate_backward_quantised_kernel,
            (num_rows,),
            d_act_NF,
            gate_up_NP,
            factor_P,
            *d_gate_up,
            *(d_gate_up if act is None else act),
            d_act_NF.stride(0),
            gate_up_NP.stride(0),
            num_columns,
            float(form.limit),
            float(form.alpha),
            ACTIVATION=form.activation,
            IS_INTERLEAVED=form.is_interleaved,
            IS_WIDE=gate_up_NP.dtype is torch.float32,
            NEED_ACT=need_act,
            ROUND_SCALES=round_scales_to_power_of_2,
            LARGEST=LARGEST,
            LEAST_PEAK=LEAST_PEAK,
            TILE=WALK_COLUMNS,
            num_warps=WALK_WARPS,
        )
    return d_gate_up, act


def _backward_blocks(num_columns: int, addend: LowRankRows | None) -> tuple[int, int, int]:
    """Return the rows and columns of a tile and the ranks of a step; without columns every sum is 0."""
    columns = next_power_of_2(max(num_columns, 1))
    if addend is None:
        return BLOCK_ROWS, min(columns, MAX_BLOCK_COLUMNS), _MIN_BLOCK
    num_ranks = addend.low_NR.shape[1]
    return (
        ADDEND_BLOCK_ROWS,
        min(max(columns, _MIN_BLOCK), ADDEND_MAX_BLOCK_COLUMNS),
        min(max(next_power_of_2(num_ranks), _MIN_BLOCK), MAX_BLOCK_RANKS),
    )
