"""Gated heads on a GPU: one pass over memory forward, one backward.

Axes: T tokens (walked by programs), H heads (walked in tiles), W columns of a head.
The forward reads heads and gates and writes the product. The backward writes the gradient of the gates to their columns
in the gradient of the fused projection. Only the gradient of the norm's weight sums over rows: each program sums its
tokens in a fixed order, and PyTorch sums the programs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lightning_fastft.kernels.head_gate.reference import HeadGateForm
from lightning_fastft.kernels.launch import launch
from lightning_fastft.kernels.sizes import next_power_of_2

# As in qk_rope, which walks heads the same way. Not yet measured.
MAX_TILE = 2048
NUM_WARPS = 4
MAX_PARTIALS = 1024


@triton.jit
def _activate(gate, IS_SILU: tl.constexpr):
    """Return the activation of a gate and its slope."""
    activated = 1.0 / (1.0 + tl.exp(-gate))
    slope = activated * (1.0 - activated)
    if IS_SILU:
        slope = activated + gate * slope
        activated *= gate
    return activated, slope


@triton.jit
def _load_tile(
    x_ptr,
    gate_ptr,
    heads,
    cols,
    inside,
    GROUP_SIZE: tl.constexpr,
    GROUP_STEP: tl.constexpr,
    HEAD_WIDTH: tl.constexpr,
):
    """Return a tile of heads of a token and their gates in fp32, and the offsets of the gates."""
    x = tl.load(x_ptr + heads[:, None] * HEAD_WIDTH + cols[None, :], mask=inside, other=0.0).to(tl.float32)
    places = (heads // GROUP_SIZE * GROUP_STEP + heads % GROUP_SIZE * HEAD_WIDTH)[:, None] + cols[None, :]
    return x, tl.load(gate_ptr + places, mask=inside, other=0.0).to(tl.float32), places


@triton.jit
def _reciprocal_rms(x, eps, HEAD_WIDTH: tl.constexpr):
    """Return the normalising factor of each head, one column; rounded to nearest."""
    root = tl.sqrt_rn(tl.sum(x * x, axis=1) / HEAD_WIDTH + eps)
    return tl.div_rn(tl.full(root.shape, 1.0, tl.float32), root)[:, None]


@triton.jit
def _forward_kernel(
    x_ptr,
    gate_ptr,
    weight_ptr,
    y_ptr,
    x_stride,
    gate_stride,
    eps,
    NUM_HEADS: tl.constexpr,
    HEAD_WIDTH: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    GROUP_STEP: tl.constexpr,
    IS_SILU: tl.constexpr,
    HAS_NORM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """Run one program per token."""
    token = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK_W)
    inside_cols = cols < HEAD_WIDTH
    if HAS_NORM:
        weight = tl.load(weight_ptr + cols, mask=inside_cols, other=0.0).to(tl.float32)[None, :]
    for start in range(0, NUM_HEADS, BLOCK_H):
        heads = start + tl.arange(0, BLOCK_H)
        inside = (heads < NUM_HEADS)[:, None] & inside_cols[None, :]
        x, gate, _ = _load_tile(
            x_ptr + token * x_stride,
            gate_ptr + token * gate_stride,
            heads,
            cols,
            inside,
            GROUP_SIZE,
            GROUP_STEP,
            HEAD_WIDTH,
        )
        if HAS_NORM:
            x = x * _reciprocal_rms(x, eps, HEAD_WIDTH) * weight
        activated, _ = _activate(gate, IS_SILU)
        y_ptrs = y_ptr + token * (NUM_HEADS * HEAD_WIDTH) + heads[:, None] * HEAD_WIDTH + cols[None, :]
        tl.store(y_ptrs, (x * activated).to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _backward_kernel(
    d_y_ptr,
    x_ptr,
    gate_ptr,
    weight_ptr,
    d_x_ptr,
    d_gate_ptr,
    partial_ptr,
    d_y_stride,
    x_stride,
    gate_stride,
    d_gate_stride,
    num_tokens,
    eps,
    NUM_HEADS: tl.constexpr,
    HEAD_WIDTH: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    GROUP_STEP: tl.constexpr,
    IS_SILU: tl.constexpr,
    HAS_NORM: tl.constexpr,
    NEEDS_WEIGHT: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """Run programs that take every num_programs-th token; one program per token if the weight needs no gradient."""
    cols = tl.arange(0, BLOCK_W)
    inside_cols = cols < HEAD_WIDTH
    weight_terms = tl.zeros((BLOCK_H, BLOCK_W), dtype=tl.float32)
    if HAS_NORM:
        weight = tl.load(weight_ptr + cols, mask=inside_cols, other=0.0).to(tl.float32)[None, :]
    token = tl.program_id(0).to(tl.int64)
    while token < num_tokens:
        for start in range(0, NUM_HEADS, BLOCK_H):
            heads = start + tl.arange(0, BLOCK_H)
            inside = (heads < NUM_HEADS)[:, None] & inside_cols[None, :]
            x, gate, places = _load_tile(
                x_ptr + token * x_stride,
                gate_ptr + token * gate_stride,
                heads,
                cols,
                inside,
                GROUP_SIZE,
                GROUP_STEP,
                HEAD_WIDTH,
            )
            offsets = heads[:, None] * HEAD_WIDTH + cols[None, :]
            d_y = tl.load(d_y_ptr + token * d_y_stride + offsets, mask=inside, other=0.0).to(tl.float32)
            activated, slope = _activate(gate, IS_SILU)
            d_x = d_y * activated
            scaled = x
            if HAS_NORM:
                rstd = _reciprocal_rms(x, eps, HEAD_WIDTH)
                normed = x * rstd
                scaled = normed * weight
                if NEEDS_WEIGHT:
                    weight_terms += d_x * normed
                d_x *= weight
                mean = tl.sum(d_x * normed, axis=1)[:, None] / HEAD_WIDTH
                d_x = rstd * (d_x - normed * mean)
            d_gate = (d_y * scaled * slope).to(d_gate_ptr.dtype.element_ty)
            tl.store(d_gate_ptr + token * d_gate_stride + places, d_gate, mask=inside)
            d_x_ptrs = d_x_ptr + token * (NUM_HEADS * HEAD_WIDTH) + offsets
            tl.store(d_x_ptrs, d_x.to(d_x_ptr.dtype.element_ty), mask=inside)
        token += tl.num_programs(0)

    if NEEDS_WEIGHT:
        partial_ptrs = partial_ptr + tl.program_id(0).to(tl.int64) * HEAD_WIDTH + cols
        tl.store(partial_ptrs, tl.sum(weight_terms, axis=0), mask=inside_cols)


def head_gate_forward(
    x_THW: torch.Tensor, rows_TC: torch.Tensor, weight_W: torch.Tensor | None, *, form: HeadGateForm
) -> torch.Tensor:
    """Return the gated heads, concatenated; same contract as the reference."""
    num_tokens = x_THW.shape[0]
    y_TI = torch.empty((num_tokens, x_THW.shape[1] * x_THW.shape[2]), dtype=x_THW.dtype, device=x_THW.device)
    if num_tokens:
        launch(
            _forward_kernel,
            (num_tokens,),
            x_THW,
            rows_TC[:, form.columns.begin :],
            x_THW if weight_W is None else weight_W,
            y_TI,
            x_THW.stride(0),
            rows_TC.stride(0),
            float(form.eps),
            **_constants(form),
            num_warps=NUM_WARPS,
        )
    return y_TI


def head_gate_backward(
    d_y_TI: torch.Tensor,
    x_THW: torch.Tensor,
    rows_TC: torch.Tensor,
    weight_W: torch.Tensor | None,
    *,
    form: HeadGateForm,
    needs_weight: bool,
    out: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the gradients, and write the gradient of the gates to ``out``; same contract as the reference."""
    num_tokens, begin = x_THW.shape[0], form.columns.begin
    d_x_THW = torch.empty(x_THW.shape, dtype=x_THW.dtype, device=x_THW.device)
    num_programs = min(num_tokens, MAX_PARTIALS) if needs_weight else num_tokens
    partial_PW = x_THW.new_empty((num_programs, form.columns.width), dtype=torch.float32) if needs_weight else None
    if num_programs:
        launch(
            _backward_kernel,
            (num_programs,),
            d_y_TI,
            x_THW,
            rows_TC[:, begin:],
            x_THW if weight_W is None else weight_W,
            d_x_THW,
            out[:, begin:],
            out if partial_PW is None else partial_PW,
            d_y_TI.stride(0),
            x_THW.stride(0),
            rows_TC.stride(0),
            out.stride(0),
            num_tokens,
            float(form.eps),
            **_constants(form),
            NEEDS_WEIGHT=needs_weight,
            num_warps=NUM_WARPS,
        )
    return d_x_THW, None if partial_PW is None else partial_PW.sum(dim=0)


def _constants(form: HeadGateForm) -> dict[str, int | bool]:
    """Return the compile-time constants of the form, shared by both kernels."""
    columns, block_width = form.columns, next_power_of_2(form.columns.width)
    return {
        "NUM_HEADS": columns.num_heads,
        "HEAD_WIDTH": columns.width,
        "GROUP_SIZE": columns.group_size,
        "GROUP_STEP": columns.group_step,
        "IS_SILU": form.activation == "silu",
        "HAS_NORM": form.has_norm,
        "BLOCK_H": min(next_power_of_2(columns.num_heads), max(MAX_TILE // block_width, 1)),
        "BLOCK_W": block_width,
    }
