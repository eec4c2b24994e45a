"""The scan of Mamba-2 on the meta device: the shapes of results and of temporary memory, kernel by kernel.

Inputs are those of ``state_scan``, in its order.
"""

from __future__ import annotations

import torch

from lightning_fastft.kernels.backends import one_kernel
from lightning_fastft.packing.chunks import Chunks

Tensors = tuple[torch.Tensor, ...]


def scan_forward(*inputs: torch.Tensor, chunks: Chunks) -> torch.Tensor:
    """Return the outputs; the states on entry to each chunk are temporary memory."""
    return _scan_kernel((_run_states(inputs, chunks), inputs), (_empty_like(inputs[0]),))[0]


def scan_backward(d_y_THW: torch.Tensor, *inputs: torch.Tensor, chunks: Chunks) -> Tensors:
    """Return the gradients of the six inputs; states and their gradients are temporary memory."""
    x_THW, dt_TH, a_H, b_TGN, c_TGN, skip_H = inputs
    read = _run_states(inputs, chunks), _run_states(inputs, chunks), d_y_THW, inputs
    d_x_THW, d_dt_TH, d_a_H, d_skip_H = _scan_kernel(read, tuple(map(_empty_like, (x_THW, dt_TH, a_H, skip_H))))
    d_b_TGN, d_c_TGN = _scan_kernel(read, (_empty_like(b_TGN), _empty_like(c_TGN)))
    return d_x_THW, d_dt_TH, d_a_H, d_b_TGN, d_c_TGN, d_skip_H


def _run_states(inputs: Tensors, chunks: Chunks) -> torch.Tensor:
    """Return the states of all chunks, shape (C, H, N, W) for C chunks."""
    x_THW, dt_TH, _, b_TGN, *_ = inputs
    states = x_THW.new_empty(len(chunks.index_C2), x_THW.shape[1], b_TGN.shape[2], x_THW.shape[2])
    return _scan_kernel((x_THW, dt_TH, b_TGN), (states,))[0]


def _empty_like(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@one_kernel
def _scan_kernel(read: tuple[Tensors | torch.Tensor, ...], outs: Tensors) -> Tensors:
    return outs
