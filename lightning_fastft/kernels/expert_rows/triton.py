"""Gather of rows in expert order and the weighted sum back, on a GPU.

Each row is read once and written once, and no sum depends on the order in which programs run.
Axes: T tokens of the pack, K experts per token, N routed slots (T * K), E experts, D model width (walked in tiles, one
    program per row and tile).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lightning_fastft.kernels.launch import launch
from lightning_fastft.kernels.sizes import ceil_div, next_power_of_2

# 2048 bf16 columns on 4 warps: two 16-byte reads per thread in flight for each row. Not tuned.
MAX_BLOCK = 2048
NUM_WARPS = 4


@triton.jit
def _gather_rows_kernel(
    x_ptr,
    slot_ptr,
    last_end_ptr,
    y_ptr,
    x_stride,
    slot_stride,
    num_tokens,
    num_columns,
    K: tl.constexpr,
    HAS_END: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Run one program per routed slot and tile of columns."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    num_columns_here = num_columns
    if HAS_END:
        # A row without columns is neither read nor written.
        num_columns_here = tl.where(row < tl.load(last_end_ptr), num_columns, 0)
    slot = tl.load(slot_ptr + row * slot_stride).to(tl.int64)
    token = slot // K
    # An invalid slot gives NaN instead of an out-of-bounds read.
    num_readable = tl.where((slot >= 0) & (token < num_tokens), num_columns_here, 0)
    value = tl.load(x_ptr + token * x_stride + cols, mask=cols < num_readable, other=float("nan"))
    tl.store(y_ptr + row * num_columns + cols, value, mask=cols < num_columns_here)


@triton.jit
def _combine_rows_kernel(
    y_ptr,
    place_ptr,
    last_end_ptr,
    weight_ptr,
    out_ptr,
    y_stride,
    place_token_stride,
    place_choice_stride,
    weight_token_stride,
    weight_choice_stride,
    num_columns,
    K: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Run one program per token and tile of columns: its K rows are added in the order of its choices."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    num_owned = tl.load(last_end_ptr)
    total = tl.zeros((BLOCK,), dtype=WIDE)
    for choice in tl.static_range(K):
        place = tl.load(place_ptr + row * place_token_stride + choice * place_choice_stride).to(tl.int64)
        # A slot without an expert reads no columns and no weight.
        is_owned = (place >= 0) & (place < num_owned)
        num_readable = tl.where(is_owned, num_columns, 0)
        value = tl.load(y_ptr + place * y_stride + cols, mask=cols < num_readable, other=0.0).to(WIDE)
        if HAS_WEIGHT:
            weight = tl.load(
                weight_ptr + row * weight_token_stride + choice * weight_choice_stride, mask=is_owned, other=0.0
            )
            value = weight.to(WIDE) * value
        total += value
    tl.store(out_ptr + row * num_columns + cols, total.to(out_ptr.dtype.element_ty), mask=cols < num_columns)


def gather_rows(
    x_TD: torch.Tensor, slot_N: torch.Tensor, *, num_experts_per_token: int, end_E: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the row of each slot's token; a slot outside the tokens gives a row of NaN."""
    num_slots, (num_tokens, num_columns) = slot_N.shape[0], x_TD.shape
    y_ND = torch.empty(num_slots, num_columns, dtype=x_TD.dtype, device=x_TD.device)
    if y_ND.numel() == 0:
        return y_ND
    block = min(next_power_of_2(num_columns), MAX_BLOCK)
    launch(
        _gather_rows_kernel,
        (num_slots, ceil_div(num_columns, block)),
        x_TD,
        slot_N,
        slot_N if end_E is None else end_E[-1:],
        y_ND,
        x_TD.stride(0),
        slot_N.stride(0),
        num_tokens,
        num_columns,
        K=num_experts_per_token,
        HAS_END=end_E is not None,
        BLOCK=block,
        num_warps=NUM_WARPS,
    )
    return y_ND


def combine_rows(
    y_ND: torch.Tensor,
    place_TK: torch.Tensor,
    end_E: torch.Tensor,
    *,
    weight_TK: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the weighted sum of each token's rows; same contract as the reference, bit for bit."""
    (num_tokens, num_choices), num_columns = place_TK.shape, y_ND.shape[1]
    out_TD = torch.empty(num_tokens, num_columns, dtype=y_ND.dtype, device=y_ND.device)
    if out_TD.numel() == 0:
        return out_TD
    block = min(next_power_of_2(num_columns), MAX_BLOCK)
    launch(
        _combine_rows_kernel,
        (num_tokens, ceil_div(num_columns, block)),
        y_ND,
        place_TK,
        end_E[-1:],
        y_ND if weight_TK is None else weight_TK,
        out_TD,
        y_ND.stride(0),
        *place_TK.stride(),
        *((0, 0) if weight_TK is None else weight_TK.stride()),
        num_columns,
        K=num_choices,
        HAS_WEIGHT=weight_TK is not None,
        WIDE=tl.float64 if y_ND.dtype is torch.float64 else tl.float32,
        BLOCK=block,
        num_warps=NUM_WARPS,
        # Without FMAs the reference stays bit-equal; they would save nothing, because reading the rows takes far
        # longer.
        enable_fp_fusion=False,
    )
    return out_TD
