"""Quantisation of rows and NF4 weights to e4m3 on a GPU, and transposes of e4m3, one launch each; torch computes their
products.

Axes: T rows of I columns, one program per row, whose tiles stay in registers between the search for the largest number
    and the cast; O output columns and I input columns of a weight, (O, I) in memory, walked in tiles of rows and chunks
    of blocks of 64 columns; Q = O I / 64 blocks that share a scale, G groups of 256 blocks that share a scale of
    scales.
"""

# Parameters of a jit body have no Python types.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from lightning_fastft.kernels.fp8_linear.reference import FP8, LARGEST, LEAST_PEAK, Fp8Rows
from lightning_fastft.kernels.launch import launch
from lightning_fastft.kernels.nf4_experts.reference import BLOCK_WEIGHTS, GROUP_BLOCKS
from lightning_fastft.kernels.nf4_linear.reference import NF4Weight
from lightning_fastft.kernels.nf4_linear.triton import block_scale
from lightning_fastft.kernels.sizes import ceil_div

# Measured by: python -m benchmarks.row_kernels --only fp8 --tiles. A tile has 8 columns per thread, so each thread
# reads 16 bytes at once. For 34,816 columns a thread would hold 136 and take 349 us; rows of more tiles than MAX_TILES
# get tiles and warps twice as large, and take 241 us.
TILE_COLUMNS = 2048
NUM_WARPS = 8
MAX_TILES = 8
# Enough for q, k and v, as in the kernel that dequantises NF4.
MAX_WEIGHTS = 4
# Rows of a program, which writes 64 contiguous bytes, or 128 for transposed weights: 178 million weights take 114 and
# 129 us.
BLOCK_ROWS = 64
TRANSPOSED_BLOCK_ROWS = 128
CHUNK_BLOCKS = 4
NUM_WEIGHT_WARPS = 4
# This kernel runs once per weight.
SCALE_ROWS, SCALE_BLOCKS = 64, 32
# A tile of a transpose: 128 contiguous bytes on both sides.
TILE_T, TILE_I, NUM_TRANSPOSE_WARPS = 128, 128, 8
# A product sums over rows in multiples of 16.
ALIGNED_ROWS = 16
# Entries of a program that balances scales.
BALANCE_BLOCK = 1024


@triton.jit
def _round_up_to_power_of_2(scale):
    """Return the smallest power of 2 that is at least a positive number: the exponent grows by 1 if the fraction is
    not 0.
    """
    bits = (scale.to(tl.int32, bitcast=True) + 0x7FFFFF) & -0x800000
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def row_scale(peak, ROUND_SCALES: tl.constexpr, LARGEST: tl.constexpr, LEAST_PEAK: tl.constexpr):
    """Return the scale of a row by its largest number, and the factor that its numbers are cast with."""
    peak = tl.maximum(peak, LEAST_PEAK)
    largest = tl.full(peak.shape, LARGEST, tl.float32)
    scale = tl.div_rn(peak, largest)
    inverse = tl.div_rn(largest, peak)
    if ROUND_SCALES:
        scale = _round_up_to_power_of_2(scale)
        inverse = tl.div_rn(tl.full(peak.shape, 1.0, tl.float32), scale)
    return scale, inverse


@triton.jit
def _quantise_rows_kernel(
    x_ptr,
    factor_ptr,
    values_ptr,
    scale_ptr,
    x_stride,
    num_columns,
    HAS_FACTOR: tl.constexpr,
    ROUND_SCALES: tl.constexpr,
    LARGEST: tl.constexpr,
    LEAST_PEAK: tl.constexpr,
    NUM_TILES: tl.constexpr,
    TILE: tl.constexpr,
):
    """Run one program per row: find its largest number, then cast."""
    row = tl.program_id(0).to(tl.int64)
    tile_cols = tl.arange(0, TILE)
    tiles = ()
    for index in tl.static_range(NUM_TILES):
        cols = index * TILE + tile_cols
        # This is the last read of the row.
        tile = tl.load(x_ptr + row * x_stride + cols, mask=cols < num_columns, other=0.0, eviction_policy="evict_first")
        # Triton does not support unpacking.
        tiles = tiles + (tile,)  # type: ignore[assignment]  # noqa: RUF005
    peaks = tl.zeros((TILE,), dtype=tl.float32)
    for index in tl.static_range(NUM_TILES):
        value = _scaled(tiles[index], factor_ptr, index * TILE + tile_cols, num_columns, HAS_FACTOR)
        peaks = tl.maximum(peaks, tl.abs(value))
    scale, inverse = row_scale(tl.max(peaks, axis=0), ROUND_SCALES, LARGEST, LEAST_PEAK)
    tl.store(scale_ptr + row, scale)
    for index in tl.static_range(NUM_TILES):
        cols = index * TILE + tile_cols
        value = _scaled(tiles[index], factor_ptr, cols, num_columns, HAS_FACTOR)
        # NaN stays NaN. With infinity in the row the inverse is 0, and infinity times 0 becomes NaN.
        tl.store(
            values_ptr + row * num_columns + cols,
            (value * inverse).to(values_ptr.dtype.element_ty),
            mask=cols < num_columns,
        )


@triton.jit
def _scaled(tile, factor_ptr, cols, num_columns, HAS_FACTOR: tl.constexpr):
    """Return a tile in fp32, times its factors."""
    value = tile.to(tl.float32)
    if HAS_FACTOR:
        value *= tl.load(factor_ptr + cols, mask=cols < num_columns, other=0.0).to(tl.float32)
    return value


@triton.jit
def _row_scales_kernel(
    weight,
    scale_ptr,
    num_rows,
    NUM_BLOCKS: tl.constexpr,
    GROUP: tl.constexpr,
    LARGEST: tl.constexpr,
    LEAST_PEAK: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Run one program per tile of rows of a weight: find the largest block scale of each row."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = rows < num_rows
    peak = tl.zeros((ROWS,), dtype=tl.float32)
    for start in range(0, NUM_BLOCKS, CHUNK):
        places = start + tl.arange(0, CHUNK)
        held = inside[:, None] & (places < NUM_BLOCKS)[None, :]
        scale = block_scale(weight, rows[:, None] * NUM_BLOCKS + places[None, :], held, GROUP)
        peak = tl.maximum(peak, tl.max(tl.where(held, tl.abs(scale), 0.0), axis=1))
    peak = tl.maximum(peak, LEAST_PEAK)
    tl.store(
        scale_ptr + rows,
        _round_up_to_power_of_2(tl.div_rn(peak, tl.full(peak.shape, LARGEST, tl.float32))),
        mask=inside,
    )


@triton.jit
def _write_tile(
    weight,
    values_ptr,
    scale_ptr,
    num_rows,
    values_stride,
    tile,
    chunk,
    NUM_BLOCKS: tl.constexpr,
    IS_TRANSPOSED: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_O: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Write one chunk of blocks of one tile of rows; a block is 32 bytes, 64 weights of one row."""
    packed_ptr, quant_map_ptr = weight[0], weight[4]
    rows = tile.to(tl.int64) * BLOCK_O + tl.arange(0, BLOCK_O)
    inside = rows < num_rows
    # The product is exact: scales of rows are powers of 2.
    scale = tl.load(scale_ptr + rows, mask=inside, other=1.0)
    inverse = tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
    for place in range(chunk * CHUNK, min(chunk * CHUNK + CHUNK, NUM_BLOCKS)):
        block = rows * NUM_BLOCKS + place
        scale = block_scale(weight, block, inside, GROUP) * inverse
        pair = tl.load(
            packed_ptr + (block * 32)[:, None] + tl.arange(0, 32)[None, :], mask=inside[:, None], other=0
        ).to(tl.int32)
        # The high half of a byte holds the earlier weight.
        first = tl.load(quant_map_ptr + (pair >> 4)) * scale[:, None]
        second = tl.load(quant_map_ptr + (pair & 15)) * scale[:, None]
        value = tl.interleave(first, second).to(values_ptr.dtype.element_ty)
        cols = place * 64 + tl.arange(0, 64).to(tl.int64)
        cell = (
            cols[None, :] * values_stride + rows[:, None]
            if IS_TRANSPOSED
            else rows[:, None] * values_stride + cols[None, :]
        )
        tl.store(values_ptr + cell, value, mask=inside[:, None])


@triton.jit
def _quantise_nf4_kernel(
    weights,
    values,
    scales,
    num_rows,
    values_strides,
    NUM_BLOCKS: tl.constexpr,
    COUNT: tl.constexpr,
    IS_TRANSPOSED: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_O: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Run one program per weight, tile of rows and chunk of columns, weight after weight."""
    tile = tl.program_id(0)
    for index in tl.static_range(COUNT):
        num_tiles = tl.cdiv(num_rows[index], BLOCK_O)
        if (tile >= 0) & (tile < num_tiles):
            _write_tile(
                weights[index],
                values[index],
                scales[index],
                num_rows[index],
                values_strides[index],
                tile,
                tl.program_id(1),
                NUM_BLOCKS,
                IS_TRANSPOSED,
                GROUP,
                BLOCK_O,
                CHUNK,
            )
        tile -= num_tiles


@triton.jit
def _transpose_kernel(
    values_ptr,
    shift_ptr,
    out_ptr,
    num_rows,
    num_columns,
    num_written,
    values_stride,
    out_stride,
    HAS_SHIFT: tl.constexpr,
    TILE_T: tl.constexpr,
    TILE_I: tl.constexpr,
):
    """Run one program per tile: read bytes of e4m3, multiply by powers of 2, write the tile transposed.

    The rows behind the last one, up to num_written, are written as zeros.
    """
    rows = tl.program_id(0).to(tl.int64) * TILE_T + tl.arange(0, TILE_T)
    cols = tl.program_id(1).to(tl.int64) * TILE_I + tl.arange(0, TILE_I)
    inside = (rows < num_rows)[:, None] & (cols < num_columns)[None, :]
    value = tl.load(values_ptr + rows[:, None] * values_stride + cols[None, :], mask=inside, other=0)
    if HAS_SHIFT:
        shift = tl.load(shift_ptr + rows, mask=rows < num_rows, other=1.0)
        value = value.to(tl.float8e4nv, bitcast=True).to(tl.float32) * shift[:, None]
        value = value.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    inside = (cols < num_columns)[:, None] & (rows < num_written)[None, :]
    tl.store(out_ptr + cols[:, None] * out_stride + rows[None, :], tl.trans(value), mask=inside)


@triton.jit
def _exponent(power):
    """Return the exponent of fp32 powers of 2."""
    return ((power.to(tl.int32, bitcast=True) >> 23) & 255) - 127


@triton.jit
def _power(exponent):
    """Return 2 to an exponent in fp32, which is kept within that of a normal number."""
    exponent = tl.minimum(tl.maximum(exponent, -126), 127)
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _balance_kernel(
    scale_d_ptr,
    scale_x_ptr,
    factor_ptr,
    shift_d_ptr,
    shift_x_ptr,
    scale_ptr,
    num_rows,
    num_outputs,
    BLOCK: tl.constexpr,
):
    """Run one program per block of rows and of outputs; each finds the largest exponent of all rows."""
    places = tl.arange(0, BLOCK)
    tops = tl.full((BLOCK,), -254, tl.int32)
    for start in range(0, num_rows, BLOCK):
        held = start + places < num_rows
        of_d = _exponent(tl.load(scale_d_ptr + start + places, mask=held, other=0.0))
        of_x = _exponent(tl.load(scale_x_ptr + start + places, mask=held, other=0.0))
        tops = tl.maximum(tops, of_d + of_x)
    top = tl.max(tops, axis=0)
    places += tl.program_id(0) * BLOCK
    held = places < num_rows
    of_d = _exponent(tl.load(scale_d_ptr + places, mask=held, other=0.0))
    of_x = _exponent(tl.load(scale_x_ptr + places, mask=held, other=0.0))
    exponent = of_d + of_x - top
    half = exponent >> 1
    tl.store(shift_d_ptr + places, _power(half), mask=held)
    tl.store(shift_x_ptr + places, _power(exponent - half), mask=held)
    held = places < num_outputs
    of_factor = _exponent(tl.load(factor_ptr + places, mask=held, other=1.0))
    tl.store(scale_ptr + places, _power(top - of_factor), mask=held)


def quantise_rows(
    x_TI: torch.Tensor,
    *,
    factor_I: torch.Tensor | None,
    round_scales_to_power_of_2: bool,
    out: Fp8Rows | None = None,
) -> Fp8Rows:
    """Return rows in e4m3; same contract as the reference."""
    num_rows, num_columns = x_TI.shape
    out = new_rows(num_rows, num_columns, device=x_TI.device) if out is None else out
    values_TI, scale_T = out
    if num_rows:
        launch(
            _quantise_rows_kernel,
            (num_rows,),
            x_TI,
            x_TI if factor_I is None else factor_I,
            values_TI,
            scale_T,
            x_TI.stride(0),
            num_columns,
            HAS_FACTOR=factor_I is not None,
            ROUND_SCALES=round_scales_to_power_of_2,
            LARGEST=LARGEST,
            LEAST_PEAK=LEAST_PEAK,
            **row_tiles(num_columns),
        )
    return out


def new_rows(num_rows: int, num_columns: int, *, device: torch.device) -> Fp8Rows:
    """Return memory for rows."""
    return Fp8Rows(
        torch.empty(num_rows, num_columns, dtype=FP8, device=device),
        torch.empty(num_rows, dtype=torch.float32, device=device),
    )


def row_tiles(num_columns: int) -> dict[str, int]:
    """Return how a program holds a row in registers."""
    growth = 1 if num_columns <= MAX_TILES * TILE_COLUMNS else 2
    return {
        "NUM_TILES": ceil_div(num_columns, growth * TILE_COLUMNS),
        "TILE": growth * TILE_COLUMNS,
        "num_warps": growth * NUM_WARPS,
    }


def transpose(values_TI: torch.Tensor, *, shift_T: torch.Tensor | None, out_IT: torch.Tensor) -> None:
    """Write the transpose of rows in e4m3; same contract as the reference."""
    (num_rows, num_columns), num_written = values_TI.shape, out_IT.shape[1]
    launch(
        _transpose_kernel,
        (ceil_div(num_written, TILE_T), ceil_div(num_columns, TILE_I)),
        values_TI.view(torch.uint8),
        values_TI if shift_T is None else shift_T,
        out_IT.view(torch.uint8),
        num_rows,
        num_columns,
        num_written,
        values_TI.stride(0),
        out_IT.stride(0),
        HAS_SHIFT=shift_T is not None,
        TILE_T=TILE_T,
        TILE_I=TILE_I,
        num_warps=NUM_TRANSPOSE_WARPS,
    )


def balance(
    scale_d_T: torch.Tensor, scale_x_T: torch.Tensor, factor_O: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return powers of 2 for a sum over rows; same contract as the reference."""
    found = torch.empty_like(scale_d_T), torch.empty_like(scale_x_T), torch.empty_like(factor_O)
    num_rows, num_outputs = len(scale_d_T), len(factor_O)
    launch(
        _balance_kernel,
        (ceil_div(max(num_rows, num_outputs), BALANCE_BLOCK),),
        scale_d_T,
        scale_x_T,
        factor_O,
        *found,
        num_rows,
        num_outputs,
        BLOCK=BALANCE_BLOCK,
        num_warps=4,
    )
    return found


def weight_gradient(d: Fp8Rows, x: Fp8Rows, factor_O: torch.Tensor, *, dtype: torch.dtype) -> torch.Tensor:
    """Return the product by torch's row-wise scaled GEMM, in bf16, of transposes in new memory."""
    *shifts, scale_O = balance(d.scale_T, x.scale_T, factor_O)
    turned = []
    for rows, shift_T in zip((d, x), shifts):
        num_rows, num_columns = rows.values_TI.shape
        num_written = ceil_div(num_rows, ALIGNED_ROWS) * ALIGNED_ROWS
        turned.append(torch.empty(num_columns, num_written, dtype=FP8, device=shift_T.device))
        transpose(rows.values_TI, shift_T=shift_T, out_IT=turned[-1])
    return multiply(Fp8Rows(turned[0], scale_O), turned[1], None, dtype=dtype)


def nf4_row_scales(weights: Sequence[NF4Weight], scales: Sequence[torch.Tensor]) -> None:
    """Write the scales of the rows of each weight; same contract as the reference."""
    for weight, scale_O in zip(weights, scales):
        num_blocks = len(weight.absmax_Q)
        if num_blocks and len(scale_O):
            launch(
                _row_scales_kernel,
                (ceil_div(len(scale_O), SCALE_ROWS),),
                _parts(weight),
                scale_O,
                len(scale_O),
                NUM_BLOCKS=num_blocks // len(scale_O),
                GROUP=GROUP_BLOCKS,
                LARGEST=LARGEST,
                LEAST_PEAK=LEAST_PEAK,
                ROWS=SCALE_ROWS,
                CHUNK=SCALE_BLOCKS,
                # An FMA would round once where the reference rounds twice.
                enable_fp_fusion=False,
            )


def quantise_nf4(
    weights: Sequence[NF4Weight], values: Sequence[torch.Tensor], scales: Sequence[torch.Tensor], *, is_transposed: bool
) -> None:
    """Write each weight; same contract as the reference."""
    filled = [each for each in zip(weights, values, scales) if each[1].numel()]
    for start in range(0, len(filled), MAX_WEIGHTS):
        _launch(filled[start : start + MAX_WEIGHTS], is_transposed=is_transposed)


def _launch(filled: Sequence[tuple[NF4Weight, torch.Tensor, torch.Tensor]], *, is_transposed: bool) -> None:
    """Write up to MAX_WEIGHTS weights with the same number of columns, none of them empty."""
    num_rows = tuple(len(scale_O) for _, _, scale_O in filled)
    block_rows = TRANSPOSED_BLOCK_ROWS if is_transposed else BLOCK_ROWS
    num_blocks = filled[0][1].shape[0 if is_transposed else 1] // BLOCK_WEIGHTS
    launch(
        _quantise_nf4_kernel,
        (sum(ceil_div(count, block_rows) for count in num_rows), ceil_div(num_blocks, CHUNK_BLOCKS)),
        tuple(_parts(weight) for weight, _, _ in filled),
        tuple(value for _, value, _ in filled),
        tuple(scale_O for _, _, scale_O in filled),
        num_rows,
        tuple(value.stride(0) for _, value, _ in filled),
        NUM_BLOCKS=num_blocks,
        COUNT=len(filled),
        IS_TRANSPOSED=is_transposed,
        GROUP=GROUP_BLOCKS,
        BLOCK_O=block_rows,
        CHUNK=CHUNK_BLOCKS,
        num_warps=NUM_WEIGHT_WARPS,
        # An FMA would round once where the reference rounds twice.
        enable_fp_fusion=False,
    )


def _parts(weight: NF4Weight) -> tuple[torch.Tensor, ...]:
    """Return the parts of a weight; without nested scales, absmax_Q replaces the missing parts, which are not read."""
    return tuple(weight.absmax_Q if part is None else part for part in weight)


def multiply(
    rows: Fp8Rows, weight_OI: torch.Tensor, scale_O: torch.Tensor | None, *, dtype: torch.dtype
) -> torch.Tensor:
    """Return the product by torch's row-wise scaled GEMM, in bf16."""
    if scale_O is None:
        scale_O = rows.scale_T.new_ones(weight_OI.shape[0])
    # Fast accumulation: tensor-core sums are not promoted to fp32 in between. torchao does the same for row-wise
    # scales, forward and backward.
    return torch._scaled_mm(
        rows.values_TI,
        weight_OI.T,
        scale_a=rows.scale_T[:, None],
        scale_b=scale_O[None, :],
        out_dtype=dtype,
        use_fast_accum=True,
    )
