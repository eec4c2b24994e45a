"""Stacks in NF4 by bitsandbytes, one expert after the other: the truth of every test, and inputs inside larger
buffers.
"""

import bitsandbytes.functional as bnb
import torch

from lightning_fastft.kernels.nf4_experts.reference import BLOCK_WEIGHTS, GROUP_BLOCKS, NF4Stack

# More than a program of the kernel writes: a lost mask stays inside the buffer.
GUARD = 16384


def make_truth(num_experts, num_blocks, dtype, *, device="cpu", seed=0):
    """The quantised stack and what bitsandbytes reads back from it, expert by expert; scales of every size,
    blocks of zeros among them.
    """
    generator = torch.Generator().manual_seed(seed)
    shape = (num_experts, num_blocks, BLOCK_WEIGHTS)
    size_EQ1 = torch.rand((num_experts, num_blocks, 1), generator=generator) ** 4 * 3
    weight_EX = (
        (torch.randn(shape, generator=generator) * size_EQ1)
        .masked_fill(size_EQ1 < 1e-4, 0.0)
        .flatten(1)
        .to(device, dtype)
    )
    parts, truth = [], []
    for weight_X in weight_EX:
        packed, state = bnb.quantize_4bit(weight_X, blocksize=64, compress_statistics=True, quant_type="nf4")
        parts.append(
            (
                packed.flatten(),
                state.absmax,
                state.state2.absmax,
                state.offset.reshape(()),
                state.code,
                state.state2.code,
            )
        )
        truth.append(bnb.dequantize_4bit(packed, state).flatten())
    columns = list(zip(*parts))
    stack = NF4Stack(*(torch.stack(column) for column in columns[:4]), columns[4][0].clone(), columns[5][0].clone())
    return stack, torch.stack(truth)


def expert_state(weight, expert):
    """Packed weights and QuantState of one expert of an ExpertsNF4, for ``dequantize_4bit``."""
    stack = weight.stack
    nested = bnb.QuantState(
        absmax=stack.nested_absmax_EG[expert],
        code=stack.nested_quant_map_M,
        blocksize=GROUP_BLOCKS,
        dtype=torch.float32,
    )
    state = bnb.QuantState(
        absmax=stack.absmax_EQ[expert],
        shape=weight.shape[1:],
        dtype=weight.dtype,
        blocksize=BLOCK_WEIGHTS,
        code=stack.quant_map_M,
        quant_type="nf4",
        offset=stack.offset_E[expert],
        state2=nested,
    )
    return stack.packed_EC[expert].view(-1, 1), state


def guarded(tensor):
    """The same values, contiguous, inside a larger buffer: NaN or 255 on both sides."""
    fill = float("nan") if tensor.is_floating_point() else 255
    buffer = torch.full((tensor.numel() + 2 * GUARD,), fill, dtype=tensor.dtype, device=tensor.device)
    inner = buffer[GUARD:-GUARD].view(tensor.shape)
    inner.copy_(tensor)
    return inner


def check(dequantise, stack, truth_EX):
    """Bit-equal, twice; every cell written, none beside them."""
    outs = []
    for _ in range(2):
        buffer = torch.full((truth_EX.numel() + 2 * GUARD,), float("nan"), dtype=truth_EX.dtype, device=truth_EX.device)
        dequantise(NF4Stack(*map(guarded, stack)), buffer[GUARD:-GUARD].view(truth_EX.shape))
        assert buffer[:GUARD].isnan().all()
        assert buffer[-GUARD:].isnan().all()
        outs.append(buffer[GUARD:-GUARD].view(truth_EX.shape))
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], truth_EX)
