"""Cross-entropy of rows of logits on a GPU: online softmax, loss and gradient in one kernel.

Axes: R rows that have a label (one program each), V vocabulary (walked in tiles). Each row is read twice and written once; without the gradient it is
read once.
"""

# A jit body has no types that Python could check.
# mypy: disallow-untyped-defs=False
# ruff: noqa: ANN001, ANN202

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lightning_fastft.kernels.cross_entropy.reference import IGNORED_TARGET, RowLosses
from lightning_fastft.kernels.sizes import next_power_of_2

# Tile of 4096 columns and 8 warps: enough bytes in flight per program, few barriers per row.
MAX_BLOCK = 4096
NUM_WARPS = 8


@triton.jit
def _scale_and_cap(raw, scale, softcap, HAS_SOFTCAP: tl.constexpr):
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
def _slope_of_cap(raw, scale, softcap):
    """Return 1 - tanh^2 without the cancellation."""
    decay = tl.exp(-2.0 * tl.abs(raw * scale / softcap))
    return 4.0 * decay / ((1.0 + decay) * (1.0 + decay))


@triton.jit
def _row_loss_kernel(
    logits_ptr,
    target_ptr,
    nll_ptr,
    correct_ptr,
    row_stride,
    num_columns,
    scale,
    softcap,
    gradient_factor,
    IGNORED: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    WRITE_GRADIENT: tl.constexpr,
    COUNT_CORRECT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per row: losses in the first walk over the vocabulary, the gradient in the second."""
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * row_stride
    target = tl.load(target_ptr + row)
    is_trained = target != IGNORED
    is_known = (target >= 0) & (target < num_columns)
    # An impossible target gives an infinite loss instead of a stray read.
    target_raw = tl.load(row_ptr + tl.where(is_known, target, 0)).to(tl.float32)
    target_value = _scale_and_cap(target_raw, scale, softcap, HAS_SOFTCAP)
    target_value = tl.where(is_known, target_value, -float("inf"))

    highest = -float("inf")
    total = 0.0
    best_column = target * 0 - 1
    for start in range(0, num_columns, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        inside = cols < num_columns
        raw = tl.load(row_ptr + cols, mask=inside, other=0.0).to(tl.float32)
        value = _scale_and_cap(raw, scale, softcap, HAS_SOFTCAP)
        value = tl.where(inside, value, -float("inf"))
        tile_highest = tl.max(value, axis=0)
        if COUNT_CORRECT:
            # Lowest column among equals, as torch.argmax has it.
            tile_column = tl.min(tl.where(value == tile_highest, cols, num_columns), axis=0)
            best_column = tl.where(tile_highest > highest, tile_column, best_column)
        new_highest = tl.maximum(highest, tile_highest)
        total = total * tl.exp(highest - new_highest) + tl.sum(tl.exp(value - new_highest), axis=0)
        highest = new_highest
    # Differences of logits first: highest + log(total) alone would round at the size of the logits.
    nll = (highest - target_value) + tl.log(total)
    tl.store(nll_ptr + row, tl.where(is_trained, nll, 0.0))
    if COUNT_CORRECT:
        tl.store(correct_ptr + row, best_column == target)

    if WRITE_GRADIENT:
        for start in range(0, num_columns, BLOCK):
            cols = start + tl.arange(0, BLOCK)
            inside = cols < num_columns
            raw = tl.load(row_ptr + cols, mask=inside, other=0.0).to(tl.float32)
            value = _scale_and_cap(raw, scale, softcap, HAS_SOFTCAP)
            gradient = (tl.exp(value - highest) / total - tl.where(cols == target, 1.0, 0.0)) * (scale * gradient_factor)
            if HAS_SOFTCAP:
                gradient *= _slope_of_cap(raw, scale, softcap)
            gradient = tl.where(is_trained, gradient, 0.0)
            tl.store(row_ptr + cols, gradient.to(logits_ptr.dtype.element_ty), mask=inside)


def row_losses(
    logits_RV: torch.Tensor, target_R: torch.Tensor, *, scale: float, softcap: float | None, gradient_factor: float | None, count_correct: bool
) -> RowLosses:
    """Return each row's loss and, if asked, overwrite the raw logits with their gradient times a factor; same contract as the reference."""
    num_rows, num_columns = logits_RV.shape
    nll_R = torch.empty(num_rows, dtype=torch.float32, device=logits_RV.device)
    correct_R = torch.empty(num_rows, dtype=torch.bool, device=logits_RV.device) if count_correct else None
    if num_rows == 0:
        return RowLosses(nll_R, correct_R)
    _row_loss_kernel[(num_rows,)](
        logits_RV,
        target_R,
        nll_R,
        nll_R if correct_R is None else correct_R,
        logits_RV.stride(0),
        num_columns,
        float(scale),
        1.0 if softcap is None else float(softcap),
        1.0 if gradient_factor is None else float(gradient_factor),
        IGNORED=IGNORED_TARGET,
        HAS_SOFTCAP=softcap is not None,
        WRITE_GRADIENT=gradient_factor is not None,
        COUNT_CORRECT=count_correct,
        BLOCK=min(next_power_of_2(num_columns), MAX_BLOCK),
        num_warps=NUM_WARPS,
    )
    return RowLosses(nll_R, correct_R)
