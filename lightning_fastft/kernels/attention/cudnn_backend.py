"""Attention over a packed row with cuDNN through nvidia-cudnn-frontend.

It is the fastest backend for long documents on Hopper and later.
Axes: T tokens of the pack, B documents rounded up to a bucket (B1 = B + 1 offsets), H query heads, G key/value heads, W
    width of a head.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from lightning_fastft.core.errors import MissingDependencyError
from lightning_fastft.core.extras import pip_line
from lightning_fastft.kernels.attention.flash import Remember, Tensors
from lightning_fastft.kernels.sizes import next_power_of_2
from lightning_fastft.packing.context import BatchContext

# Workspace of the backward in bytes per query value. cuDNN 9 asked for 7.52 GiB with 131,072 tokens and 40 query and 8
# key heads of width 128 on an H200 (an allocation that failed).
_WORKSPACE_PER_VALUE = 12
# Most that a call of the backward may take; with more heads it runs over groups of them, one after the other. At the
# lengths where this happens a group still fills the GPU.
_GROUP_WORKSPACE_BYTES = 2 * 2**30


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
    remember: Remember | None = None,
) -> torch.Tensor:
    """Return attention within each document, shape (T, H, W), fp16 or bf16 on CUDA.

    cuDNN builds a plan per shape (0.05 to 1 s). The number of documents and the longest document are part of the shape,
    so both are rounded up to a power of two, with empty documents at the end; a run then builds few plans. The token
    count is part of the shape too, up to 64 tokens.

    Raises:
        MissingDependencyError: nvidia-cudnn-frontend is not installed.

    Cost:
        Memory linear in T. The backward takes B x H x longest document in fp32 and a workspace of 12 bytes per query
        value; above 2 GiB it runs over groups of heads, one after the other. Tensors whose memory order is not token by
        token are copied. No host sync once a shape is known.

    Source:
        https://github.com/NVIDIA/cudnn-frontend, ``cudnn.sdpa_torch`` and ``torch.ops.cudnn.sdpa_bwd``; its window
        includes the query itself, like ours.
    """
    start_B1, max_length = context.once("cudnn_varlen", context.device, lambda: _bucketed_offsets(context))
    is_windowed = window is not None and window < context.max_length
    documents = _Documents(start_B1, context.document_T, context.position_T)
    options = {
        "is_causal": True,
        "window_left": window if is_windowed else -1,
        "max_seqlen_q": max_length,
        "max_seqlen_kv": max_length,
    }
    # With heads outermost in memory (phi3, glm4_moe) the gradients of cuDNN are wrong. With other heads between the
    # heads of one token and the next, gradients of q and k are NaN at 32,768 tokens (both seen with 1.32).
    heads = (x.contiguous() for x in (q_THW, k_TGW, v_TGW))
    out_THW: torch.Tensor = _CudnnAttention.apply(*heads, documents, scale, options, remember)
    return out_THW


class _Documents(NamedTuple):
    """Tensors of a pack.

    Args:
        start_B1: First row of each document, then T; shape (B + 1,), int32.
        document_T: Number of the document of each token; shape (T,), int32.
        position_T: Position of each token in its document; shape (T,), int64.
    """

    start_B1: torch.Tensor
    document_T: torch.Tensor
    position_T: torch.Tensor


class _CudnnAttention(torch.autograd.Function):
    """Attention of cuDNN. Saves q, k, v, the output and the log-sum-exp (fp32)."""

    @staticmethod
    def forward(
        ctx: Any,
        q_THW: torch.Tensor,
        k_TGW: torch.Tensor,
        v_TGW: torch.Tensor,
        documents: _Documents,
        scale: float,
        options: dict[str, Any],
        remember: Remember | None,
    ) -> torch.Tensor:
        def compute() -> Tensors:
            offsets = {"cu_seqlens_q": documents.start_B1, "cu_seqlens_kv": documents.start_B1}
            out_THW, lse_TH1 = _load_cudnn().forward(
                q_THW, k_TGW, v_TGW, scale=scale, return_lse=True, **offsets, **options
            )
            return out_THW, lse_TH1[..., 0]

        out_THW, lse_TH = compute() if remember is None else remember(compute)
        ctx.save_for_backward(q_THW, k_TGW, v_TGW, out_THW, lse_TH, *documents)
        ctx.scale, ctx.options = scale, options
        return out_THW

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q_THW, k_TGW, v_TGW, out_THW, lse_TH, *tensors = ctx.saved_tensors
        documents, d_out_THW = _Documents(*tensors), grads[0]
        lse_BHL = _pad_lse(lse_TH, documents, max_length=ctx.options["max_seqlen_q"])
        backward = functools.partial(
            _load_cudnn().backward,
            attn_scale=ctx.scale,
            cu_seqlens_q=documents.start_B1,
            cu_seqlens_kv=documents.start_B1,
            is_deterministic=torch.are_deterministic_algorithms_enabled(),
            **ctx.options,
        )
        num_groups = count_head_groups(q_THW.numel(), num_kv_heads=k_TGW.shape[1])
        by_query = (d_out_THW, q_THW, out_THW, lse_BHL)
        if num_groups == 1:
            d_out_THW, q_THW, out_THW, lse_BHL = (x.contiguous() for x in by_query)
            return *backward(d_out_THW, q_THW, k_TGW, v_TGW, out_THW, lse_BHL), None, None, None, None
        found = [torch.empty_like(x) for x in (q_THW, k_TGW, v_TGW)]
        query_groups = zip(*(x.chunk(num_groups, dim=1) for x in by_query))
        key_groups = zip(*(x.chunk(num_groups, dim=1) for x in (k_TGW, v_TGW)))
        places = zip(*(x.chunk(num_groups, dim=1) for x in found))
        for of_queries, of_keys, parts in zip(query_groups, key_groups, places):
            d_out, q, out, lse = (x.contiguous() for x in of_queries)
            k, v = (x.contiguous() for x in of_keys)
            for part, gradient in zip(parts, backward(d_out, q, k, v, out, lse)):
                part.copy_(gradient)
        return *found, None, None, None, None


def count_head_groups(num_query_values: int, *, num_kv_heads: int) -> int:
    """Return the fewest equal groups of heads whose workspaces are within the bound, at most one for each key head.

    Example:
        >>> count_head_groups(131_072 * 40 * 128, num_kv_heads=8), count_head_groups(8192 * 40 * 128, num_kv_heads=8)
        (4, 1)
    """
    least = _WORKSPACE_PER_VALUE * num_query_values / _GROUP_WORKSPACE_BYTES
    return next(n for n in range(1, num_kv_heads + 1) if num_kv_heads % n == 0 and n >= min(least, num_kv_heads))


def backward_bytes(num_query_values: int, *, num_kv_heads: int) -> int:
    """Return the temporary memory of the backward: its workspace, and copies of a group of heads in bf16."""
    num_groups = count_head_groups(num_query_values, num_kv_heads=num_kv_heads)
    # Copies of queries, output and its gradient, and the gradient of the queries.
    copy_bytes = 0 if num_groups == 1 else 4 * 2
    return (_WORKSPACE_PER_VALUE + copy_bytes) * num_query_values // num_groups


def _pad_lse(lse_TH: torch.Tensor, documents: _Documents, *, max_length: int) -> torch.Tensor:
    """Return the log-sum-exp in a row of ``max_length`` tokens for each document, as cuDNN's backward reads it."""
    num_documents = documents.start_B1.numel() - 1
    lse_BHL = lse_TH.new_zeros(num_documents, lse_TH.shape[1], max_length)
    lse_BHL[documents.document_T, :, documents.position_T] = lse_TH
    return lse_BHL


def _bucketed_offsets(context: BatchContext) -> tuple[torch.Tensor, int]:
    """Return offsets padded with empty documents to a power of two, and the longest document rounded up to one."""
    num_missing = next_power_of_2(context.num_documents) - context.num_documents
    last_1 = context.start_S1[-1:]
    return torch.cat([context.start_S1, last_1.expand(num_missing)]), next_power_of_2(context.max_length)


class _Cudnn(NamedTuple):
    """Functions of cuDNN: ``cudnn.sdpa_torch`` and the operator of its backward."""

    forward: Callable[..., Any]
    backward: Callable[..., Any]


def _load_cudnn() -> _Cudnn:
    # Imported on first use: the package is optional and loads cuDNN.
    try:
        import cudnn
    except ImportError as error:
        raise MissingDependencyError(
            f"Attention backend 'cudnn' needs nvidia-cudnn-frontend: {pip_line('hopper')}."
        ) from error
    # Reading sdpa_torch registers the operators.
    forward: Callable[..., Any] = cudnn.sdpa_torch
    return _Cudnn(forward, torch.ops.cudnn.sdpa_bwd)
