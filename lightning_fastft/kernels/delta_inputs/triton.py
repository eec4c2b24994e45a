"""Inputs of the gated delta rule on a GPU: the kernels read columns of the fused projection in place and write the
layout of the delta rule.

Axes: T tokens (walked in blocks), S sections of heads (queries and keys; or values), H heads of a section, W columns of
    a head, N channels, P blocks of tokens that write a partial sum.
A program takes a block of tokens and a head. It reads a tap only if the token's position shows that the tap is inside
the token's document. The backward recomputes the convolution and writes the gradient of its output in fp32; a second
kernel sums it over the tokens that read a token. One kernel that recomputes the convolution for each tap took 0.88 ms
per layer of Qwen3.5-9B on an H200; both kernels take 0.34 ms (python -m benchmarks.step_profile --workload
qwen3.5-9b-lora). Only the gradients of weights sum over rows: each program sums its tokens in a fixed order, and
PyTorch sums the programs.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from lightning_fastft.kernels.delta_inputs.reference import NORM_EPS, DeltaForm, DeltaInputs, DeltaParameters
from lightning_fastft.kernels.head_columns import HeadColumns
from lightning_fastft.kernels.launch import launch
from lightning_fastft.kernels.sizes import ceil_div, next_power_of_2

# Tokens of a program; with heads of 128 columns a thread holds 32 values of a tile.
BLOCK_T = 32
NUM_WARPS = 4
BLOCK_T_GATES = 32


@triton.jit
def _convolve(
    x_ptr,
    x_stride,
    weight_ptr,
    tokens,
    position,
    inside_tokens,
    cols,
    inside_cols,
    NUM_TAPS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """Return the convolution of a block of tokens in fp32; taps before the document count as 0."""
    total = tl.zeros((BLOCK_T, BLOCK_W), dtype=tl.float32)
    for shift in tl.static_range(NUM_TAPS):
        inside = (inside_tokens & (position >= shift))[:, None] & inside_cols[None, :]
        x = tl.load(x_ptr + (tokens - shift)[:, None] * x_stride + cols[None, :], mask=inside, other=0.0)
        weight = tl.load(weight_ptr + cols * NUM_TAPS + (NUM_TAPS - 1 - shift), mask=inside_cols, other=0.0)
        total += x.to(tl.float32) * weight.to(tl.float32)[None, :]
    return total


@triton.jit
def _reciprocal_norm(y, eps):
    """Return the normalising factor of each head, one column; rounded to nearest."""
    root = tl.sqrt_rn(tl.sum(y * y, axis=1) + eps)
    return tl.div_rn(tl.full(root.shape, 1.0, tl.float32), root)[:, None]


@triton.jit
def _sigmoid(x):
    """Return the sigmoid; its division is rounded to nearest."""
    return tl.div_rn(tl.full(x.shape, 1.0, tl.float32), 1.0 + tl.exp(-x))


@triton.jit
def _column(head, NUM_HEADS: tl.constexpr, SECTION_STEP: tl.constexpr, GROUP_SIZE: tl.constexpr,
            GROUP_STEP: tl.constexpr, HEAD_WIDTH: tl.constexpr):  # fmt: skip
    """Return the first column of a head, counted from the first head of its kind."""
    section, inner = head // NUM_HEADS, head % NUM_HEADS
    return section * SECTION_STEP + inner // GROUP_SIZE * GROUP_STEP + inner % GROUP_SIZE * HEAD_WIDTH


@triton.jit
def _heads_forward_kernel(
    x_ptr,
    weight_ptr,
    position_ptr,
    first_y_ptr,
    second_y_ptr,
    x_stride,
    num_tokens,
    eps,
    NUM_HEADS: tl.constexpr,
    SECTION_STEP: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    GROUP_STEP: tl.constexpr,
    HEAD_WIDTH: tl.constexpr,
    NUM_TAPS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """Run one program per head of all sections and block of tokens; adjacent programs read the same rows."""
    head = tl.program_id(0)
    tokens = tl.program_id(1).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    cols = tl.arange(0, BLOCK_W)
    inside_tokens, inside_cols = tokens < num_tokens, cols < HEAD_WIDTH
    position = tl.load(position_ptr + tokens, mask=inside_tokens, other=0)
    y = _convolve(
        x_ptr + _column(head, NUM_HEADS, SECTION_STEP, GROUP_SIZE, GROUP_STEP, HEAD_WIDTH),
        x_stride,
        weight_ptr + head * (HEAD_WIDTH * NUM_TAPS),
        tokens,
        position,
        inside_tokens,
        cols,
        inside_cols,
        NUM_TAPS,
        BLOCK_T,
        BLOCK_W,
    )
    y *= _sigmoid(y)
    if HAS_NORM:
        y *= _reciprocal_norm(y, eps)
    y_ptr = first_y_ptr if head < NUM_HEADS else second_y_ptr
    y_ptrs = y_ptr + head % NUM_HEADS * HEAD_WIDTH + tokens[:, None] * (NUM_HEADS * HEAD_WIDTH) + cols[None, :]
    tl.store(y_ptrs, y.to(y_ptr.dtype.element_ty), mask=inside_tokens[:, None] & inside_cols[None, :])


@triton.jit
def _heads_backward_kernel(
    first_d_ptr,
    second_d_ptr,
    x_ptr,
    weight_ptr,
    position_ptr,
    d_pre_ptr,
    partial_ptr,
    x_stride,
    num_tokens,
    num_channels,
    eps,
    NUM_HEADS: tl.constexpr,
    SECTION_STEP: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    GROUP_STEP: tl.constexpr,
    HEAD_WIDTH: tl.constexpr,
    NUM_TAPS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    NEEDS_WEIGHT: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """Write the gradient of the convolution's output; same grid as the forward."""
    head = tl.program_id(0)
    tokens = tl.program_id(1).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    cols = tl.arange(0, BLOCK_W)
    inside_tokens, inside_cols = tokens < num_tokens, cols < HEAD_WIDTH
    inside = inside_tokens[:, None] & inside_cols[None, :]
    x_ptr += _column(head, NUM_HEADS, SECTION_STEP, GROUP_SIZE, GROUP_STEP, HEAD_WIDTH)
    d_ptr = first_d_ptr if head < NUM_HEADS else second_d_ptr
    d_ptrs = d_ptr + head % NUM_HEADS * HEAD_WIDTH + tokens[:, None] * (NUM_HEADS * HEAD_WIDTH) + cols[None, :]
    position = tl.load(position_ptr + tokens, mask=inside_tokens, other=0)
    pre = _convolve(
        x_ptr,
        x_stride,
        weight_ptr + head * (HEAD_WIDTH * NUM_TAPS),
        tokens,
        position,
        inside_tokens,
        cols,
        inside_cols,
        NUM_TAPS,
        BLOCK_T,
        BLOCK_W,
    )
    d = tl.load(d_ptrs, mask=inside, other=0.0).to(tl.float32)
    share = _sigmoid(pre)
    if HAS_NORM:
        y = pre * share
        scale = _reciprocal_norm(y, eps)
        y *= scale
        d = scale * (d - y * tl.sum(d * y, axis=1)[:, None])
    d *= share * (1.0 + pre * (1.0 - share))
    d_pre_ptrs = d_pre_ptr + tokens[:, None] * num_channels + (head * HEAD_WIDTH + cols)[None, :]
    tl.store(d_pre_ptrs, d, mask=inside)
    if NEEDS_WEIGHT:
        channels = tl.program_id(1).to(tl.int64) * num_channels + head * HEAD_WIDTH + cols
        for shift in tl.static_range(NUM_TAPS):
            seen = (inside_tokens & (position >= shift))[:, None] & inside_cols[None, :]
            x = tl.load(x_ptr + (tokens - shift)[:, None] * x_stride + cols[None, :], mask=seen, other=0.0)
            terms = tl.sum(d * x.to(tl.float32), axis=0)
            tl.store(partial_ptr + channels * NUM_TAPS + (NUM_TAPS - 1 - shift), terms, mask=inside_cols)


@triton.jit
def _taps_backward_kernel(
    d_pre_ptr,
    weight_ptr,
    position_ptr,
    d_x_ptr,
    d_x_stride,
    num_tokens,
    num_channels,
    NUM_HEADS: tl.constexpr,
    SECTION_STEP: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    GROUP_STEP: tl.constexpr,
    HEAD_WIDTH: tl.constexpr,
    NUM_TAPS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """Sum the gradients of each token over the tokens that read it; same grid as the forward."""
    head = tl.program_id(0)
    tokens = tl.program_id(1).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    cols = tl.arange(0, BLOCK_W)
    inside_cols = cols < HEAD_WIDTH
    weight_ptr += head * (HEAD_WIDTH * NUM_TAPS)
    d_x = tl.zeros((BLOCK_T, BLOCK_W), dtype=tl.float32)
    # The token ``later`` places after this one reads it through tap ``later``.
    for later in tl.static_range(NUM_TAPS):
        readers = tokens + later
        inside_readers = readers < num_tokens
        position = tl.load(position_ptr + readers, mask=inside_readers, other=0)
        # A token of another document has position < later.
        reads = (inside_readers & (position >= later))[:, None] & inside_cols[None, :]
        d_ptrs = d_pre_ptr + readers[:, None] * num_channels + (head * HEAD_WIDTH + cols)[None, :]
        weight = tl.load(weight_ptr + cols * NUM_TAPS + (NUM_TAPS - 1 - later), mask=inside_cols, other=0.0)
        d_x += tl.load(d_ptrs, mask=reads, other=0.0) * weight.to(tl.float32)[None, :]
    column = _column(head, NUM_HEADS, SECTION_STEP, GROUP_SIZE, GROUP_STEP, HEAD_WIDTH)
    d_x_ptrs = d_x_ptr + column + tokens[:, None] * d_x_stride + cols[None, :]
    tl.store(d_x_ptrs, d_x.to(d_x_ptr.dtype.element_ty), mask=(tokens < num_tokens)[:, None] & inside_cols[None, :])


@triton.jit
def _load_gates(
    a_ptr, b_ptr, a_log_ptr, dt_bias_ptr, stride, tokens, heads, inside, inside_heads,
    GROUP_SIZE: tl.constexpr, GROUP_STEP: tl.constexpr,
):  # fmt: skip
    """Return a with its bias, b, and the decay rate of each head."""
    places = tokens[:, None] * stride + (heads // GROUP_SIZE * GROUP_STEP + heads % GROUP_SIZE)[None, :]
    a = tl.load(a_ptr + places, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(b_ptr + places, mask=inside, other=0.0).to(tl.float32)
    a += tl.load(dt_bias_ptr + heads, mask=inside_heads, other=0.0).to(tl.float32)[None, :]
    rate = tl.exp(tl.load(a_log_ptr + heads, mask=inside_heads, other=0.0).to(tl.float32))[None, :]
    return a, b, rate


@triton.jit
def _softplus(x):
    """Return log(1 + exp(x)), corrected for the rounding error of 1 + exp(-|x|)."""
    power = tl.exp(-tl.abs(x))
    above_one = 1.0 + power
    return tl.maximum(x, 0.0) + (tl.log(above_one) + (power - (above_one - 1.0)) / above_one)


@triton.jit
def _gates_forward_kernel(
    a_ptr,
    b_ptr,
    a_log_ptr,
    dt_bias_ptr,
    g_ptr,
    beta_ptr,
    stride,
    num_tokens,
    NUM_HEADS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    GROUP_STEP: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Run one program per block of tokens."""
    tokens = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    heads = tl.arange(0, BLOCK_H)
    inside = (tokens < num_tokens)[:, None] & (heads < NUM_HEADS)[None, :]
    a, b, rate = _load_gates(
        a_ptr, b_ptr, a_log_ptr, dt_bias_ptr, stride, tokens, heads, inside, heads < NUM_HEADS, GROUP_SIZE, GROUP_STEP
    )
    places = tokens[:, None] * NUM_HEADS + heads[None, :]
    tl.store(g_ptr + places, -rate * _softplus(a), mask=inside)
    tl.store(beta_ptr + places, _sigmoid(b), mask=inside)


@triton.jit
def _gates_backward_kernel(
    d_g_ptr,
    d_beta_ptr,
    a_ptr,
    b_ptr,
    a_log_ptr,
    dt_bias_ptr,
    d_a_ptr,
    d_b_ptr,
    partial_ptr,
    stride,
    d_stride,
    num_tokens,
    NUM_HEADS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    GROUP_STEP: tl.constexpr,
    NEEDS_WEIGHT: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Run one program per block of tokens."""
    tokens = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    heads = tl.arange(0, BLOCK_H)
    inside = (tokens < num_tokens)[:, None] & (heads < NUM_HEADS)[None, :]
    a, b, rate = _load_gates(
        a_ptr, b_ptr, a_log_ptr, dt_bias_ptr, stride, tokens, heads, inside, heads < NUM_HEADS, GROUP_SIZE, GROUP_STEP
    )
    places = tokens[:, None] * NUM_HEADS + heads[None, :]
    d_g = tl.load(d_g_ptr + places, mask=inside, other=0.0).to(tl.float32)
    d_beta = tl.load(d_beta_ptr + places, mask=inside, other=0.0).to(tl.float32)
    d_a = -d_g * rate * _sigmoid(a)
    beta = _sigmoid(b)
    out_places = tokens[:, None] * d_stride + (heads // GROUP_SIZE * GROUP_STEP + heads % GROUP_SIZE)[None, :]
    tl.store(d_a_ptr + out_places, d_a.to(d_a_ptr.dtype.element_ty), mask=inside)
    tl.store(d_b_ptr + out_places, (d_beta * beta * (1.0 - beta)).to(d_b_ptr.dtype.element_ty), mask=inside)
    if NEEDS_WEIGHT:
        partial_ptrs = partial_ptr + tl.program_id(0).to(tl.int64) * (2 * NUM_HEADS) + heads
        # Beyond the last token both gradients are 0.
        tl.store(partial_ptrs, tl.sum(-d_g * rate * _softplus(a), axis=0), mask=heads < NUM_HEADS)
        tl.store(partial_ptrs + NUM_HEADS, tl.sum(d_a, axis=0), mask=heads < NUM_HEADS)


def delta_inputs_forward(
    rows_TC: torch.Tensor, parameters: DeltaParameters, position_T: torch.Tensor, *, form: DeltaForm
) -> DeltaInputs:
    """Return the inputs of the delta rule; same contract as the reference."""
    num_tokens = rows_TC.shape[0]
    q_TGW, k_TGW = (rows_TC.new_empty(num_tokens, form.num_key_heads, form.key_width) for _ in range(2))
    v_THW = rows_TC.new_empty(num_tokens, form.num_heads, form.value_width)
    g_TH, beta_TH = (rows_TC.new_empty(num_tokens, form.num_heads, dtype=torch.float32) for _ in range(2))
    if num_tokens:
        num_blocks = ceil_div(num_tokens, BLOCK_T)
        for heads, columns, channel in _sections(form, q_TGW, k_TGW, v_THW):
            launch(
                _heads_forward_kernel,
                (_num_heads(columns, channel), num_blocks),
                rows_TC[:, columns.begin :],
                parameters.conv_weight_NK[channel:],
                position_T,
                *heads,
                rows_TC.stride(0),
                num_tokens,
                NORM_EPS,
                **_head_constants(columns, parameters, form, has_norm=channel == 0),
                num_warps=NUM_WARPS,
            )
        launch(
            _gates_forward_kernel,
            (ceil_div(num_tokens, BLOCK_T_GATES),),
            rows_TC[:, form.decays.begin :],
            rows_TC[:, form.strengths.begin :],
            parameters.a_log_H,
            parameters.dt_bias_H,
            g_TH,
            beta_TH,
            rows_TC.stride(0),
            num_tokens,
            **_gate_constants(form),
            num_warps=NUM_WARPS,
        )
    return DeltaInputs(q_TGW, k_TGW, v_THW, g_TH, beta_TH)


def delta_inputs_backward(
    gradients: DeltaInputs,
    rows_TC: torch.Tensor,
    parameters: DeltaParameters,
    position_T: torch.Tensor,
    *,
    form: DeltaForm,
    needs_weights: bool,
    out: torch.Tensor,
) -> DeltaParameters | None:
    """Write the gradient of the projection and return the gradients of the weights; same contract as the reference."""
    num_tokens, num_taps = rows_TC.shape[0], parameters.conv_weight_NK.shape[1]
    num_blocks, num_gate_blocks = ceil_div(num_tokens, BLOCK_T), ceil_div(num_tokens, BLOCK_T_GATES)
    conv_PNK = gates_PSH = None
    if needs_weights:
        conv_PNK = rows_TC.new_empty(num_blocks, form.num_channels, num_taps, dtype=torch.float32)
        gates_PSH = rows_TC.new_empty(num_gate_blocks, 2, form.num_heads, dtype=torch.float32)
    if num_tokens:
        d_pre_TN = rows_TC.new_empty(num_tokens, form.num_channels, dtype=torch.float32)
        for d_heads, columns, channel in _sections(form, *gradients[:3]):
            constants = _head_constants(columns, parameters, form, has_norm=channel == 0)
            grid = (_num_heads(columns, channel), num_blocks)
            launch(
                _heads_backward_kernel,
                grid,
                *d_heads,
                rows_TC[:, columns.begin :],
                parameters.conv_weight_NK[channel:],
                position_T,
                d_pre_TN[:, channel:],
                out if conv_PNK is None else conv_PNK[:, channel:],
                rows_TC.stride(0),
                num_tokens,
                form.num_channels,
                NORM_EPS,
                **constants,
                NEEDS_WEIGHT=needs_weights,
                num_warps=NUM_WARPS,
            )
            launch(
                _taps_backward_kernel,
                grid,
                d_pre_TN[:, channel:],
                parameters.conv_weight_NK[channel:],
                position_T,
                out[:, columns.begin :],
                out.stride(0),
                num_tokens,
                form.num_channels,
                **constants,
                num_warps=NUM_WARPS,
            )
        launch(
            _gates_backward_kernel,
            (num_gate_blocks,),
            gradients.g_TH,
            gradients.beta_TH,
            rows_TC[:, form.decays.begin :],
            rows_TC[:, form.strengths.begin :],
            parameters.a_log_H,
            parameters.dt_bias_H,
            out[:, form.decays.begin :],
            out[:, form.strengths.begin :],
            out if gates_PSH is None else gates_PSH,
            rows_TC.stride(0),
            out.stride(0),
            num_tokens,
            **_gate_constants(form),
            NEEDS_WEIGHT=needs_weights,
            num_warps=NUM_WARPS,
        )
    if conv_PNK is None or gates_PSH is None:
        return None
    d_a_log_H, d_dt_bias_H = gates_PSH.sum(dim=0)
    return DeltaParameters(conv_PNK.sum(dim=0), d_a_log_H, d_dt_bias_H)


def _sections(
    form: DeltaForm, q_TGW: torch.Tensor, k_TGW: torch.Tensor, v_THW: torch.Tensor
) -> list[tuple[tuple[torch.Tensor, torch.Tensor], HeadColumns, int]]:
    """Return the tensors, columns and first channel of queries and keys, and of values."""
    num_qk = 2 * form.num_key_heads * form.key_width
    return [((q_TGW, k_TGW), form.queries, 0), ((v_THW, v_THW), form.values, num_qk)]


def _num_heads(columns: HeadColumns, channel: int) -> int:
    """Return the number of heads of a launch: queries and keys, or values."""
    return (2 if channel == 0 else 1) * columns.num_heads


def _head_constants(
    columns: HeadColumns, parameters: DeltaParameters, form: DeltaForm, *, has_norm: bool
) -> dict[str, Any]:
    """Return the compile-time constants of both kernels of heads."""
    return {
        "NUM_HEADS": columns.num_heads,
        "SECTION_STEP": form.keys.begin - form.queries.begin,
        "GROUP_SIZE": columns.group_size,
        "GROUP_STEP": columns.group_step,
        "HEAD_WIDTH": columns.width,
        "NUM_TAPS": parameters.conv_weight_NK.shape[1],
        "HAS_NORM": has_norm,
        "BLOCK_T": BLOCK_T,
        "BLOCK_W": next_power_of_2(columns.width),
    }


def _gate_constants(form: DeltaForm) -> dict[str, Any]:
    """Return the compile-time constants of both kernels of gates."""
    columns = form.decays
    return {
        "NUM_HEADS": columns.num_heads,
        "GROUP_SIZE": columns.group_size,
        "GROUP_STEP": columns.group_step,
        "BLOCK_T": BLOCK_T_GATES,
        "BLOCK_H": next_power_of_2(columns.num_heads),
    }
