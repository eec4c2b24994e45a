"""Attention over a packed row with torch's flash kernels, called with document offsets.

The gradients of attention sinks are exact.
Axes: T tokens of the pack, S1 document borders, H query heads, G key/value heads, W width of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lightning_fastft.kernels.launch import contiguous_rows
from lightning_fastft.packing.context import BatchContext
from lightning_fastft.packing.prefixes import VarlenArguments

# Torch's flash kernels need a head width that is a multiple of this.
HEAD_WIDTH_STEP = 8
MAX_HEAD_WIDTH = 256

Tensors = tuple[torch.Tensor, ...]
Remember = Callable[[Callable[[], Tensors]], Tensors]
Collect = Callable[[torch.Tensor, torch.Tensor], None]
Repeat = Callable[[torch.Tensor, int], torch.Tensor]


def varlen_attention(
    q_THW: torch.Tensor,
    k_TGW: torch.Tensor,
    v_TGW: torch.Tensor,
    *,
    context: BatchContext,
    scale: float,
    window: int | None,
    sink_H: torch.Tensor | None,
    remember: Remember | None = None,
    repeat: Repeat | None = None,
    collect: Collect | None = None,
) -> torch.Tensor:
    """Return attention within each document, shape (T, H, width of a value), fp16 or bf16 on CUDA.

    With ``collect``, which receives the gradients of keys and values per query head, both (T, H, W), the backward does
    not sum them, and autograd gets none. ``repeat`` returns keys or values repeated to a number of query heads.

    Heads whose width is not a multiple of 8, and values narrower than keys (multi-head latent attention), are padded
    with zeros, which changes no score. If documents continue prefixes, ``gather_keys`` builds the keys and values.

    Cost:
        Memory linear in T; a copy of padded tensors; no host sync. With ``collect``, the backward holds keys and values
        of every query head, 4 T H W bytes, instead of the operator's own sum over query heads (37 us per sum of 16
        heads at 8,192 tokens on an H200, a quarter of the memory bandwidth: ``python -m benchmarks.step_profile
        --workload qwen3-0.6b-lora --modes keep+fused``).

    Source:
        arXiv:2307.08691 through ``aten::_flash_attention_forward`` and ``_backward``.
    """
    varlen = context.varlen()
    value_width = v_TGW.shape[-1]
    width = -(-max(q_THW.shape[-1], value_width) // HEAD_WIDTH_STEP) * HEAD_WIDTH_STEP
    window_left = -1 if window is None or window >= varlen.max_key_length else window - 1
    ready = (_kernel_ready(x, width=width) for x in (q_THW, k_TGW, v_TGW))
    # The gradient of padded heads still has to be cut to the width, so it cannot be shared.
    collect = collect if width == q_THW.shape[-1] == value_width else None
    out_THW = _FlashAttention.apply(*ready, sink_H, varlen, scale, window_left, remember, repeat, collect)
    return out_THW[..., :value_width]


class _FlashAttention(torch.autograd.Function):
    """Fold the sinks into the log-sum-exp of flash attention, so that the stock backward gives exact gradients.

    With lse' = log(exp(lse) + exp(sink)) and o' = o * exp(lse - lse'), the backward of plain attention called with (o',
    lse') computes the true dq, dk, dv: it reads both only through p = exp(score - lse') and delta = rowsum(do * o').
    The sink's own gradient is -sum(exp(sink - lse') * delta). Saves q, k, v, o', lse' (fp32), the sinks and the
    kernel's two random-state tensors.

    With ``collect`` the gradients of keys and values are returned per query head.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q_THW: torch.Tensor,
        k_TGW: torch.Tensor,
        v_TGW: torch.Tensor,
        sink_H: torch.Tensor | None,
        varlen: VarlenArguments,
        scale: float,
        window_left: int,
        remember: Remember | None,
        repeat: Repeat | None,
        collect: Collect | None,
    ) -> torch.Tensor:
        def compute() -> Tensors:
            outputs: Tensors = torch.ops.aten._flash_attention_forward(
                q_THW, k_TGW, v_TGW, varlen.start_S1, varlen.key_start_S1,
                varlen.max_length, varlen.max_key_length, 0.0, True, False,
                scale=scale, window_size_left=window_left, window_size_right=0,
            )[:4]  # fmt: skip
            return outputs

        out_THW, lse_HT, rng_state, unused = compute() if remember is None else remember(compute)
        if sink_H is not None:
            total_HT = torch.logaddexp(lse_HT, sink_H.float()[:, None])
            # In fp32, rounded once, in one pass. The result needs separate memory: the kernel's output may be kept.
            out_THW = torch.mul(out_THW, torch.exp(lse_HT - total_HT).t()[..., None], out=torch.empty_like(out_THW))
            lse_HT = total_HT
        offsets = varlen.start_S1, varlen.key_start_S1
        ctx.save_for_backward(q_THW, k_TGW, v_TGW, out_THW, lse_HT, sink_H, *offsets, rng_state, unused)
        ctx.max_lengths = varlen.max_length, varlen.max_key_length
        ctx.scale, ctx.window_left = scale, window_left
        is_shared = q_THW.shape[1] > k_TGW.shape[1] and ctx.needs_input_grad[1] and ctx.needs_input_grad[2]
        ctx.repeat, ctx.collect = repeat, collect if is_shared else None
        return out_THW

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q_THW, k_TGW, v_TGW, out_THW, lse_HT, sink_H, start_S1, key_start_S1, rng_state, unused = ctx.saved_tensors
        d_out_THW = grads[0].contiguous()
        if ctx.collect is not None:
            k_TGW, v_TGW = (ctx.repeat(_contiguous_heads(x_TGW), q_THW.shape[1]) for x_TGW in (k_TGW, v_TGW))
        d_q_THW, d_k_TGW, d_v_TGW = torch.ops.aten._flash_attention_backward(
            d_out_THW,
            q_THW,
            k_TGW,
            v_TGW,
            out_THW,
            lse_HT,
            start_S1,
            key_start_S1,
            *ctx.max_lengths,
            0.0,
            True,
            rng_state,
            unused,
            scale=ctx.scale,
            window_size_left=ctx.window_left,
            window_size_right=0,
        )
        d_sink_H = None
        if sink_H is not None and ctx.needs_input_grad[3]:
            # The fp32 zero makes the products fp32 without casting the factors first: 12 instead of 28 bytes per value.
            zero_111 = d_out_THW.new_zeros(1, 1, 1, dtype=torch.float32)
            delta_HT = torch.addcmul(zero_111, d_out_THW, out_THW).sum(dim=-1).t()
            d_sink_H = -(torch.exp(sink_H.float()[:, None] - lse_HT) * delta_HT).sum(dim=1).to(sink_H.dtype)
        if ctx.collect is not None:
            ctx.collect(d_k_TGW, d_v_TGW)
            d_k_TGW = d_v_TGW = None
        return d_q_THW, d_k_TGW, d_v_TGW, d_sink_H, None, None, None, None, None, None


def _contiguous_heads(x_TGW: torch.Tensor) -> torch.Tensor:
    """Return heads that are contiguous within each token; the tensor itself if they are already."""
    return x_TGW if x_TGW.stride()[1:] == (x_TGW.shape[2], 1) else x_TGW.contiguous()


def _kernel_ready(x_THW: torch.Tensor, *, width: int) -> torch.Tensor:
    """Return heads of this width whose last axis is contiguous; the tensor itself if it is ready already."""
    if x_THW.shape[-1] != width:
        return torch.nn.functional.pad(x_THW, (0, width - x_THW.shape[-1]))
    return contiguous_rows(x_THW)
