"""Cross-entropy of rows of logits on a GPU: online softmax, loss, entropy and gradient in one kernel.

Axes: R rows that have a label (one program each), V vocabulary (walked in tiles of DEPTH times LANES columns).
Each row is read twice and written once; without the gradient it is read once. Columns that are a multiple of LANES
apart share one lane, which keeps its own maximum, sum of exponentials and best column. So threads reduce once per row,
after the last tile, instead of at every tile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lightning_fastft.kernels.backends import capability_of
from lightning_fastft.kernels.cross_entropy.reference import IGNORED_TARGET
from lightning_fastft.kernels.launch import launch
from lightning_fastft.kernels.sizes import ceil_div, next_power_of_2

# 8 lanes for each thread of 8 warps: a bf16 read has 16 bytes, and 2 such reads are in flight at once. Four take 1.09
# times as long on an H200 (2,048 rows of 151,936 or 201,088 columns: python -m benchmarks.row_kernels --only
# cross_entropy --tiles).
MAX_LANES = 2048
MAX_DEPTH = 2
NUM_WARPS = 8
# Compute capabilities for which ptxas limits a thread to 64 registers with 8 warps. Evaluation of soft-capped logits
# that are read one by one needs more there; with 16 warps a thread has half as many columns. Not measured on a device.
FEW_REGISTERS = {(8, 6), (8, 7), (8, 9)}
MANY_WARPS = 16

# Below every logit except -inf. A lane that has seen only -inf computes -inf minus this value, never -inf minus -inf.
_LOWEST = tl.constexpr(torch.finfo(torch.float32).min)


@triton.jit
def scale_and_cap(raw, scale, softcap, HAS_SOFTCAP: tl.constexpr):
    """Return the logits after scale and soft cap."""
    value = raw * scale
    if HAS_SOFTCAP:
        # tanh through exp(-2|x|), which cannot overflow.
        ratio = value / softcap
        decay = tl.exp(-2.0 * tl.abs(ratio))
        tanh = (1.0 - decay) / (1.0 + decay)
        value = softcap * tl.where(ratio < 0.0, -tanh, tanh)
    return value


@triton.jit
def slope_of_cap(raw, scale, softcap):
    """Return 1 - tanh^2, the slope of the soft cap, without cancellation."""
    decay = tl.exp(-2.0 * tl.abs(raw * scale / softcap))
    return 4.0 * decay / ((1.0 + decay) * (1.0 + decay))


@triton.jit
def _products(below):
    """Return exp(x) * x, 0 at -inf."""
    share = tl.exp(below)
    return tl.where(share == 0.0, 0.0, share * below)


@triton.jit
def _shifted_moment(moment, total, shift):
    """Return the sum of exp(x) * x after a shift of all values, given the sum of exp(x)."""
    return tl.exp(shift) * (moment + shift * total)


@triton.jit
def _row_loss_kernel(
    logits_ptr,
    target_ptr,
    nll_ptr,
    correct_ptr,
    entropy_ptr,
    row_stride,
    num_columns,
    scale,
    softcap,
    gradient_factor,
    IGNORED: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    WRITE_GRADIENT: tl.constexpr,
    COUNT_CORRECT: tl.constexpr,
    WITH_ENTROPY: tl.constexpr,
    DEPTH: tl.constexpr,
    LANES: tl.constexpr,
):
    """Run one program per row: losses in the first walk over the vocabulary, the gradient in the second."""
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * row_stride
    target = tl.load(target_ptr + row)
    is_trained = target != IGNORED
    is_known = (target >= 0) & (target < num_columns)
    # An invalid target gives an infinite loss instead of an out-of-bounds read.
    target_raw = tl.load(row_ptr + tl.where(is_known, target, 0)).to(tl.float32)
    target_value = scale_and_cap(target_raw, scale, softcap, HAS_SOFTCAP)
    target_value = tl.where(is_known, target_value, -float("inf"))

    # Keep logits in the cache if they are read again, and evict them first otherwise.
    FIRST_WALK: tl.constexpr = "evict_last" if WRITE_GRADIENT else "evict_first"
    tile_cols = tl.arange(0, DEPTH)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    lane_highest = tl.full((LANES,), _LOWEST, tl.float32)
    lane_total = tl.zeros((LANES,), tl.float32)
    # Sum of exp(value - highest) * (value - highest): all terms have one sign, so nothing cancels.
    lane_moment = tl.zeros((LANES,), tl.float32)
    lane_column = tl.full((LANES,), -1, tl.int32)
    for start in range(0, num_columns, DEPTH * LANES):
        cols = start + tile_cols
        inside = cols < num_columns
        raw = tl.load(row_ptr + cols, mask=inside, other=0.0, eviction_policy=FIRST_WALK).to(tl.float32)
        value = scale_and_cap(raw, scale, softcap, HAS_SOFTCAP)
        value = tl.where(inside, value, -float("inf"))
        tile_highest = tl.max(value, axis=0)
        if COUNT_CORRECT:
            # The lowest column among equal values, like torch.argmax.
            tile_column = tl.min(tl.where(value == tile_highest[None, :], cols, num_columns), axis=0)
            lane_column = tl.where(tile_highest > lane_highest, tile_column, lane_column)
        new_highest = tl.maximum(lane_highest, tile_highest)
        if WITH_ENTROPY:
            lane_moment = _shifted_moment(lane_moment, lane_total, lane_highest - new_highest) + tl.sum(
                _products(value - new_highest[None, :]), axis=0
            )
        lane_total = lane_total * tl.exp(lane_highest - new_highest) + tl.sum(
            tl.exp(value - new_highest[None, :]), axis=0
        )
        lane_highest = new_highest
    highest = tl.max(lane_highest, axis=0)
    total = tl.sum(lane_total * tl.exp(lane_highest - highest), axis=0)
    # Subtract logits first: highest + log(total) would round at the magnitude of the logits.
    nll = (highest - target_value) + tl.log(total)
    tl.store(nll_ptr + row, tl.where(is_trained, nll, 0.0))
    if COUNT_CORRECT:
        best_column = tl.min(tl.where(lane_highest == highest, lane_column, num_columns), axis=0)
        tl.store(correct_ptr + row, best_column == target)
    if WITH_ENTROPY:
        moment = tl.sum(_shifted_moment(lane_moment, lane_total, lane_highest - highest), axis=0)
        tl.store(entropy_ptr + row, tl.where(is_trained, tl.log(total) - moment / total, 0.0))

    if WRITE_GRADIENT:
        # Backwards: the columns that were read last are still in the L2 cache.
        last = (num_columns - 1) // (DEPTH * LANES) * (DEPTH * LANES)
        for walked in range(0, num_columns, DEPTH * LANES):
            cols = last - walked + tile_cols
            inside = cols < num_columns
            raw = tl.load(row_ptr + cols, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
            value = scale_and_cap(raw, scale, softcap, HAS_SOFTCAP)
            gradient = (tl.exp(value - highest) / total - tl.where(cols == target, 1.0, 0.0)) * (
                scale * gradient_factor
            )
            if HAS_SOFTCAP:
                gradient *= slope_of_cap(raw, scale, softcap)
            gradient = tl.where(is_trained, gradient, 0.0)
            tl.store(row_ptr + cols, gradient.to(logits_ptr.dtype.element_ty), mask=inside, cache_modifier=".cs")


def row_losses(
    logits_RV: torch.Tensor,
    target_R: torch.Tensor,
    *,
    scale: float,
    softcap: float | None,
    gradient_factor: float | None,
    count_correct: bool,
    with_entropy: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Return each row's loss and, if asked, overwrite the raw logits with their gradient times a factor; same
    contract as the reference.
    """
    num_rows, num_columns = logits_RV.shape
    nll_R = torch.empty(num_rows, dtype=torch.float32, device=logits_RV.device)
    correct_R = torch.empty(num_rows, dtype=torch.bool, device=logits_RV.device) if count_correct else None
    entropy_R = torch.empty_like(nll_R) if with_entropy else None
    if num_rows == 0:
        return nll_R, correct_R, entropy_R
    lanes = min(next_power_of_2(num_columns), MAX_LANES)
    is_large = softcap is not None and gradient_factor is None and count_correct and num_columns % 16 != 0
    must_spread = is_large and capability_of(logits_RV.device) in FEW_REGISTERS
    launch(
        _row_loss_kernel,
        (num_rows,),
        logits_RV,
        target_R,
        nll_R,
        nll_R if correct_R is None else correct_R,
        nll_R if entropy_R is None else entropy_R,
        logits_RV.stride(0),
        num_columns,
        float(scale),
        1.0 if softcap is None else float(softcap),
        1.0 if gradient_factor is None else float(gradient_factor),
        IGNORED=IGNORED_TARGET,
        HAS_SOFTCAP=softcap is not None,
        WRITE_GRADIENT=gradient_factor is not None,
        COUNT_CORRECT=count_correct,
        WITH_ENTROPY=with_entropy,
        DEPTH=min(next_power_of_2(ceil_div(num_columns, lanes)), MAX_DEPTH),
        LANES=lanes,
        num_warps=MANY_WARPS if must_spread else NUM_WARPS,
    )
    return nll_R, correct_R, entropy_R
