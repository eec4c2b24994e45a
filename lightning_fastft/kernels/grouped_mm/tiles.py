"""The tiles in which one program computes a product: tables that were measured, and the choice for a shape.

Axes: N rows, sorted by expert, I input columns, O output columns.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from lightning_fastft.kernels.fp8_linear.reference import FP8
from lightning_fastft.kernels.grouped_mm.reference import THIN_COLUMNS
from lightning_fastft.kernels.sizes import next_power_of_2

# tl.dot needs at least 16 columns.
MIN_BLOCK = 16
# With fewer rows per expert than this, half of a tile of 128 rows would be empty.
MANY_ROWS = 128


class Tiles(NamedTuple):
    """Tile of one program in rows, input and output columns, and its launch options.

    Args:
        rows: Tile along N.
        inputs: Tile along I, and the most ranks of a low-rank product in one step.
        outputs: Tile along O.
        num_warps: Warps of a program.
        num_stages: Pipeline stages: tiles of loads in flight at once.
    """

    rows: int
    inputs: int
    outputs: int
    num_warps: int
    num_stages: int


# These tiles fit the 99 KiB of shared memory of compute capability 8.6 and 8.9, which a test checks; not yet measured
# on those devices.
PRODUCT_TILES_MANY = Tiles(rows=128, inputs=64, outputs=128, num_warps=8, num_stages=3)
PRODUCT_TILES_FEW = Tiles(rows=64, inputs=64, outputs=128, num_warps=4, num_stages=3)
# For devices whose programs may use 160 KiB (8.0, 9.0, 10.0): on an H200 0.67 to 0.94 of the time of the tiles above.
PRODUCT_TILES_LARGE = Tiles(rows=128, inputs=64, outputs=256, num_warps=8, num_stages=3)
LARGE_SHARED_BYTES = 160 * 1024
# e4m3: the same bytes in each tile as in bf16. On an H100 the products of an expert layer reached 697 to 1,202 TFLOP/s,
# and 647 to 969 with rank 16 (python -m benchmarks.grouped_products; --tiles times others, which is not done yet).
PRODUCT_TILES_FP8_MANY = Tiles(rows=128, inputs=64, outputs=128, num_warps=8, num_stages=3)
PRODUCT_TILES_FP8_FEW = Tiles(rows=64, inputs=128, outputs=128, num_warps=4, num_stages=3)
PRODUCT_TILES_FP8_LARGE = Tiles(rows=128, inputs=128, outputs=256, num_warps=8, num_stages=3)
# Thin results: rows are read once, in tiles as deep as fit, with two loads in flight in each of three programs of a
# multiprocessor (H200).
PRODUCT_TILES_THIN = Tiles(rows=64, inputs=128, outputs=32, num_warps=4, num_stages=3)
PRODUCT_TILES_HALF_THIN = Tiles(rows=64, inputs=64, outputs=64, num_warps=4, num_stages=4)
# Few inputs: there is one step and nothing to prefetch; writing the result takes the time.
PRODUCT_TILES_SHALLOW = Tiles(rows=64, inputs=64, outputs=128, num_warps=4, num_stages=1)
PRODUCT_TILES_FP32 = Tiles(rows=32, inputs=32, outputs=64, num_warps=4, num_stages=2)
ADD_TILES = Tiles(rows=64, inputs=32, outputs=128, num_warps=4, num_stages=1)
GRAD_TILES = Tiles(rows=64, inputs=128, outputs=128, num_warps=8, num_stages=3)
# For a thin matrix whose number of rows is a rank; transposed for a matrix whose number of columns is a rank.
GRAD_TILES_THIN = Tiles(rows=64, inputs=64, outputs=128, num_warps=4, num_stages=3)
GRAD_TILES_FP32 = Tiles(rows=32, inputs=32, outputs=64, num_warps=4, num_stages=2)


def product_tiles(
    dtype: torch.dtype, *, rows_per_expert: int, num_inputs: int, num_outputs: int, shared_bytes: int = 0
) -> Tiles:
    """Return the tiles of a product of matrices of a dtype.

    fp32 runs without tensor cores, where a large tile would not stay in registers. ``shared_bytes`` is the shared
    memory limit of a program, 0 if unknown.
    """
    if dtype is torch.float32:
        return _trim(PRODUCT_TILES_FP32, num_outputs=num_outputs)
    if num_outputs <= THIN_COLUMNS and dtype is not FP8:
        tiles = PRODUCT_TILES_THIN if num_outputs <= PRODUCT_TILES_THIN.outputs else PRODUCT_TILES_HALF_THIN
        return _trim(tiles, num_inputs=num_inputs, num_outputs=num_outputs)
    if num_inputs <= THIN_COLUMNS and dtype is not FP8:
        return _trim(PRODUCT_TILES_SHALLOW, num_inputs=num_inputs)
    is_fp8 = dtype is FP8
    if rows_per_expert < MANY_ROWS:
        return PRODUCT_TILES_FP8_FEW if is_fp8 else PRODUCT_TILES_FEW
    if shared_bytes >= LARGE_SHARED_BYTES and num_outputs >= PRODUCT_TILES_LARGE.outputs:
        return PRODUCT_TILES_FP8_LARGE if is_fp8 else PRODUCT_TILES_LARGE
    return PRODUCT_TILES_FP8_MANY if is_fp8 else PRODUCT_TILES_MANY


def grad_tiles(dtype: torch.dtype, *, num_inputs: int, num_outputs: int) -> Tiles:
    """Return the tiles of a weight gradient."""
    if dtype is torch.float32:
        return GRAD_TILES_FP32
    if num_inputs <= THIN_COLUMNS:
        return _trim(GRAD_TILES_THIN, num_inputs=num_inputs)
    if num_outputs <= THIN_COLUMNS:
        return _trim(
            GRAD_TILES_THIN._replace(inputs=GRAD_TILES_THIN.outputs, outputs=GRAD_TILES_THIN.inputs),
            num_outputs=num_outputs,
        )
    return GRAD_TILES


def _trim(tiles: Tiles, *, num_inputs: int | None = None, num_outputs: int | None = None) -> Tiles:
    """Return tiles no wider than a matrix, but at least as wide as tl.dot needs."""
    inputs, outputs = (
        side if size is None else min(side, max(next_power_of_2(size), MIN_BLOCK))
        for side, size in ((tiles.inputs, num_inputs), (tiles.outputs, num_outputs))
    )
    return tiles._replace(inputs=inputs, outputs=outputs)
