"""Attention over a packed row with cuDNN through nvidia-cudnn-frontend.

It is the fastest backend for long documents on Hopper and later.
Axes: T tokens of the pack, B documents rounded up to a bucket (B1 = B + 1 offsets), H query heads, G key/value heads, W
    width of a head.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import torch

from lightning_fastft.core.errors import MissingDependencyError
from lightning_fastft.core.extras import pip_line
from lightning_fastft.kernels.sizes import next_power_of_2
from lightning_fastft.packing.context import BatchContext


@functools.cache
def is_cudnn_installed() -> bool:
    """Return whether nvidia-cudnn-frontend is installed, without importing it."""
    return importlib.util.find_spec("cudnn") is not None


def cudnn_attention(
    q_THW: torch.Tensor,
    k_TGW: torch.Tensor,
    v_TGW: torch.Tensor,
    *,
    context: BatchContext,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """Return attention within each document, shape (T, H, W), fp16 or bf16 on CUDA.

    cuDNN builds a plan per shape (0.05 to 1 s). The number of documents and the longest document are part of the shape,
    so both are rounded up to a power of two, with empty documents at the end; a run then builds few plans. The token
    count is part of the shape too, up to 64 tokens.

    Raises:
        MissingDependencyError: nvidia-cudnn-frontend is not installed.

    Cost:
        Memory linear in T, and B x H x longest document in fp32 in the backward. Tensors whose memory order is not
        token by token are copied. No host sync once a shape is known.

    Source:
        https://github.com/NVIDIA/cudnn-frontend, ``cudnn.sdpa_torch``; its window includes the query itself, like ours.
    """
    start_B1, max_length = context.once("cudnn_varlen", context.device, lambda: _bucketed_offsets(context))
    is_windowed = window is not None and window < context.max_length
    # cuDNN needs the log-sum-exp for a backward. With heads outermost in memory (phi3, glm4_moe) its gradients are
    # wrong. With other heads between the heads of one token and the next, gradients of q and k are NaN at 32,768 tokens
    # (both seen with 1.32).
    out_THW, _ = _load_attention()(
        *(x.contiguous() for x in (q_THW, k_TGW, v_TGW)),
        scale=scale,
        is_causal=True,
        window_left=window if is_windowed else -1,
        cu_seqlens_q=start_B1,
        cu_seqlens_kv=start_B1,
        max_seqlen_q=max_length,
        max_seqlen_kv=max_length,
        return_lse=True,
    )
    return out_THW


def _bucketed_offsets(context: BatchContext) -> tuple[torch.Tensor, int]:
    """Return offsets padded with empty documents to a power of two, and the longest document rounded up to one."""
    num_missing = next_power_of_2(context.num_documents) - context.num_documents
    last_1 = context.start_S1[-1:]
    return torch.cat([context.start_S1, last_1.expand(num_missing)]), next_power_of_2(context.max_length)


def _load_attention() -> Callable[..., Any]:
    # Imported on first use: the package is optional and loads cuDNN.
    try:
        import cudnn
    except ImportError as error:
        raise MissingDependencyError(
            f"Attention backend 'cudnn' needs nvidia-cudnn-frontend: {pip_line('hopper')}."
        ) from error
    attention: Callable[..., Any] = cudnn.sdpa_torch
    return attention
