"""The scan of Mamba-2 over packed documents, with gradients.

Axes: T tokens of the pack, H heads, W width of a head, G groups of heads with the same B and C, N width of a state.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from lightning_fastft.core.checks import check_layout
from lightning_fastft.core.errors import ShapeError
from lightning_fastft.kernels.backends import FLOATING, TRITON_DTYPES, must_check, uses_triton
from lightning_fastft.kernels.state_scan import reference
from lightning_fastft.packing.chunks import Chunks

_CHUNK_SIZES = (16, 32, 64)


def state_scan(
    x_THW: torch.Tensor,
    dt_TH: torch.Tensor,
    a_H: torch.Tensor,
    b_TGN: torch.Tensor,
    c_TGN: torch.Tensor,
    skip_H: torch.Tensor,
    *,
    chunks: Chunks,
    is_checked: bool = True,
) -> torch.Tensor:
    """Return the outputs of Mamba-2's recurrence, in which each document starts from an empty state.

    ``state_t = exp(dt_t a) state_(t-1) + dt_t b_t x_t^T`` and ``y_t = c_t state_t + skip x_t`` for each head; the heads
    of a group share b and c. Sums are fp32; states between chunks are rounded to the dtype of x for products, as in the
    kernels of mamba_ssm.

    Args:
        x_THW: Inputs. Shape (T, H, W); bf16, fp16, fp32 or float64; heads of one token contiguous, any
            token stride.
        dt_TH: Time steps, at least 0. Shape (T, H), fp32 (float64 with float64).
        a_H: Decay rates, below 0. Shape (H,), dtype of dt_TH.
        b_TGN: Shape (T, G, N), H a multiple of G; dtype of x_THW; groups of one token contiguous, any token stride.
        c_TGN: Like b_TGN.
        skip_H: Factor of the inputs in the outputs. Shape (H,), dtype of dt_TH.
        chunks: Documents and chunks of the pack, on the device of x_THW; chunks of 16, 32 or 64 tokens.
        is_checked: As in ``must_check``.

    Returns:
        Shape (T, H, W), dtype of x_THW, differentiable in all six tensors.

    Cost:
        Saves only its inputs for the backward; B and C are not expanded to heads. Temporary memory: states of T / chunk
        x H x N x W values in the dtype of x (twice the size of x for chunks of 64 and N = 128); in the backward two
        such states, and fp32 gradients of B and C for every eight heads. Two launches forward, four backward; no host
        sync. The reference computes H x L x L weights for a document of L tokens and reads offsets on the host.

    Source:
        arXiv 2405.21060, section 6; the kernels are own.

    Example:
        >>> start, first = torch.tensor([0, 2, 3], dtype=torch.int32), torch.tensor([0, 1, 2], dtype=torch.int32)
        >>> chunks = Chunks(start, first, torch.tensor([[0, 0], [1, 0]], dtype=torch.int32), 64)
        >>> ones, vector = torch.ones(3, 1, 1), torch.ones(1)
        >>> state_scan(ones, ones[:, 0], -vector, ones, ones, vector, chunks=chunks).flatten()
        tensor([2.0000, 2.3679, 2.0000])
    """
    if must_check(is_checked):
        _check(x_THW, dt_TH, a_H, b_TGN, c_TGN, skip_H, chunks=chunks)
    if x_THW.dtype not in TRITON_DTYPES or not (uses_triton(x_THW.device) or x_THW.is_meta):
        return reference.scan(x_THW, dt_TH, a_H, b_TGN, c_TGN, skip_H, chunks=chunks)
    y_THW: torch.Tensor = _StateScan.apply(x_THW, dt_TH, a_H, b_TGN, c_TGN, skip_H, chunks)
    return y_THW


class _StateScan(torch.autograd.Function):
    """Run the scan on a GPU. It saves its inputs; the backward recomputes the states."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> torch.Tensor:
        *tensors, chunks = inputs
        ctx.save_for_backward(*tensors)
        ctx.chunks = chunks
        return _module_for(tensors[0]).scan_forward(*tensors, chunks=chunks)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_y_THW: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradients = _module_for(d_y_THW).scan_backward(d_y_THW.contiguous(), *ctx.saved_tensors, chunks=ctx.chunks)
        return (*gradients, None)


def _module_for(x: torch.Tensor) -> ModuleType:
    """Return the Triton kernels, or for the meta device the reference, which has their shapes."""
    if not uses_triton(x.device):
        return reference
    from lightning_fastft.kernels.state_scan import triton

    return triton


def _check(
    x_THW: torch.Tensor,
    dt_TH: torch.Tensor,
    a_H: torch.Tensor,
    b_TGN: torch.Tensor,
    c_TGN: torch.Tensor,
    skip_H: torch.Tensor,
    *,
    chunks: Chunks,
) -> None:
    """Raise on arguments that the kernels would read wrongly."""
    num_tokens, num_heads, _ = check_layout("x_THW", x_THW, (None, None, None), dtypes=FLOATING, num_strided=1).shape
    check_layout("b_TGN", b_TGN, (num_tokens, None, None), like=x_THW, num_strided=1)
    check_layout("c_TGN", c_TGN, b_TGN.shape, like=x_THW, num_strided=1)
    check_layout("dt_TH", dt_TH, (num_tokens, num_heads), dtypes=(torch.float32, torch.float64), like=x_THW)
    check_layout("a_H", a_H, (num_heads,), dtypes=(dt_TH.dtype,), like=x_THW)
    check_layout("skip_H", skip_H, (num_heads,), dtypes=(dt_TH.dtype,), like=x_THW)
    start_S1, first_S1, index_C2, size = chunks
    check_layout("chunks.start_S1", start_S1, (None,), dtypes=(torch.int32,), like=x_THW)
    check_layout("chunks.first_S1", first_S1, start_S1.shape, dtypes=(torch.int32,), like=x_THW)
    check_layout("chunks.index_C2", index_C2, (None, 2), dtypes=(torch.int32,), like=x_THW)
    num_groups = b_TGN.shape[1]
    if num_tokens == 0 or num_groups == 0 or num_heads % num_groups:
        raise ShapeError(
            f"The scan got {num_tokens} tokens and {num_heads} heads in {num_groups} groups; it needs at least one "
            "token, and the same number of heads in each group."
        )
    if size not in _CHUNK_SIZES:
        raise ShapeError(f"Chunks have {size} tokens; the kernels support {_CHUNK_SIZES}.")
