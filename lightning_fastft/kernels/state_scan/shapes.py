"""The shapes of the scan of Mamba-2 on the meta device, kernel by kernel, without values.

Axes: T tokens of the pack, H heads, W width of a head, G groups of heads with the same B and C, N width of a state.
"""

from __future__ import annotations

import torch

from lightning_fastft.kernels.backends import one_kernel
from lightning_fastft.packing.chunks import Chunks


def scan_forward(
    x_THW: torch.Tensor,
    dt_TH: torch.Tensor,
    a_H: torch.Tensor,
    b_TGN: torch.Tensor,
    c_TGN: torch.Tensor,
    skip_H: torch.Tensor,
    *,
    chunks: Chunks,
) -> torch.Tensor:
    """Return the outputs; the states on entry to each chunk are temporary memory."""
    return _outputs(_states(x_THW, dt_TH, b_TGN, chunks.index_C2), x_THW, dt_TH, b_TGN, c_TGN)


def scan_backward(
    d_y_THW: torch.Tensor,
    x_THW: torch.Tensor,
    dt_TH: torch.Tensor,
    a_H: torch.Tensor,
    b_TGN: torch.Tensor,
    c_TGN: torch.Tensor,
    skip_H: torch.Tensor,
    *,
    chunks: Chunks,
) -> tuple[torch.Tensor, ...]:
    """Return the gradients of the six inputs; states and their gradients are temporary memory."""
    state = _states(x_THW, dt_TH, b_TGN, chunks.index_C2)
    d_state = _states(d_y_THW, dt_TH, c_TGN, chunks.index_C2)
    d_x_THW, d_dt_TH, d_a_H, d_skip_H = _head_gradients(state, d_state, d_y_THW, x_THW, dt_TH, b_TGN, c_TGN, a_H)
    d_b_TGN, d_c_TGN = _group_gradients(state, d_state, d_y_THW, x_THW, dt_TH, b_TGN, c_TGN)
    return d_x_THW, d_dt_TH, d_a_H, d_b_TGN, d_c_TGN, d_skip_H


@one_kernel
def _states(x_THW: torch.Tensor, dt_TH: torch.Tensor, b_TGN: torch.Tensor, index_C2: torch.Tensor) -> torch.Tensor:
    return x_THW.new_empty(len(index_C2), x_THW.shape[1], b_TGN.shape[2], x_THW.shape[2])


@one_kernel
def _outputs(
    state_CHNW: torch.Tensor, x_THW: torch.Tensor, dt_TH: torch.Tensor, b_TGN: torch.Tensor, c_TGN: torch.Tensor
) -> torch.Tensor:
    return torch.empty_like(x_THW, memory_format=torch.contiguous_format)


@one_kernel
def _head_gradients(
    state_CHNW: torch.Tensor,
    d_state_CHNW: torch.Tensor,
    d_y_THW: torch.Tensor,
    x_THW: torch.Tensor,
    dt_TH: torch.Tensor,
    b_TGN: torch.Tensor,
    c_TGN: torch.Tensor,
    a_H: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    d_x_THW = torch.empty_like(x_THW, memory_format=torch.contiguous_format)
    return d_x_THW, torch.empty_like(dt_TH), torch.empty_like(a_H), torch.empty_like(a_H)


@one_kernel
def _group_gradients(
    state_CHNW: torch.Tensor,
    d_state_CHNW: torch.Tensor,
    d_y_THW: torch.Tensor,
    x_THW: torch.Tensor,
    dt_TH: torch.Tensor,
    b_TGN: torch.Tensor,
    c_TGN: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    form = torch.contiguous_format
    return torch.empty_like(b_TGN, memory_format=form), torch.empty_like(c_TGN, memory_format=form)
