"""Dequantise stacks of NF4 expert weights in one pass.

Axes: E experts, C bytes of one expert (two weights each), X = 2 C weights of one expert in memory order, Q = X / 64
    blocks that share a scale, G groups of 256 blocks that share a scale of scales, M entries of a table.
"""

from __future__ import annotations

import torch

from lightning_fastft.core.checks import check_layout
from lightning_fastft.core.errors import ShapeError
from lightning_fastft.kernels.backends import TRITON_DTYPES
from lightning_fastft.kernels.nf4_experts import reference
from lightning_fastft.kernels.nf4_experts.reference import BLOCK_WEIGHTS, GROUP_BLOCKS, NF4Stack
from lightning_fastft.kernels.sizes import ceil_div


def dequantise_stack(stack: NF4Stack, out_EX: torch.Tensor) -> torch.Tensor:
    """Dequantise every expert of a stack, bit-equal to ``bitsandbytes.functional.dequantize_4bit`` on each expert.

    Args:
        stack: The quantised weights; every tensor contiguous and on the device of out_EX.
        out_EX: Output tensor. Shape (E, X); bf16, fp16 or fp32; contiguous; fully overwritten.

    Returns:
        out_EX.

    Raises:
        ShapeError: Shapes, dtypes, devices or layouts do not match.

    Cost:
        Reads 0.52 bytes and writes one value per weight, in one launch on CUDA; no temporary memory and no host sync.

    Source:
        NF4 and double quantisation: QLoRA, arXiv 2305.14314.

    Example:
        >>> table, scales = torch.linspace(-1.0, 1.0, 16), torch.linspace(-1.0, 1.0, 256)
        >>> packed, absmax = torch.full((1, 32), 0xF0, dtype=torch.uint8), torch.full((1, 1), 255, dtype=torch.uint8)
        >>> stack = NF4Stack(packed, absmax, torch.tensor([[2.0]]), torch.tensor([1.0]), table, scales)
        >>> dequantise_stack(stack, torch.empty(1, 64))[0, :3]
        tensor([ 3., -3.,  3.])
    """
    _check(stack, out_EX)
    if not out_EX.is_cuda:
        return reference.dequantise_stack(stack, out_EX)

    from lightning_fastft.kernels.nf4_experts import triton

    return triton.dequantise_stack(stack, out_EX)


def _check(stack: NF4Stack, out_EX: torch.Tensor) -> None:
    """Raise on tensors that do not describe the same E x X weights."""
    num_experts, num_weights = check_layout("out_EX", out_EX, (None, None), dtypes=TRITON_DTYPES).shape
    if num_weights % BLOCK_WEIGHTS:
        raise ShapeError(f"out_EX has {num_weights} weights per expert; NF4 needs multiples of {BLOCK_WEIGHTS}.")
    num_blocks = num_weights // BLOCK_WEIGHTS
    expected = (
        (torch.uint8, (num_experts, num_weights // 2)),
        (torch.uint8, (num_experts, num_blocks)),
        (torch.float32, (num_experts, ceil_div(num_blocks, GROUP_BLOCKS))),
        (torch.float32, (num_experts,)),
        (torch.float32, (16,)),
        (torch.float32, (256,)),
    )
    for name, tensor, (dtype, shape) in zip(stack._fields, stack, expected):
        check_layout(name, tensor, shape, dtypes=(dtype,), like=out_EX)
