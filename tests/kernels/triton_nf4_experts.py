"""Tests of the Triton kernels of nf4_experts, interpreted by test_interpreted.py and compiled by tests/gpu."""

import pytest
import torch

from lightning_fastft.kernels.nf4_experts import reference, triton
from lightning_fastft.kernels.nf4_experts.reference import GROUP_BLOCKS
from tests.support.kernel_harness import DEVICE, planted_faults
from tests.support.nf4_stacks import check, make_truth

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
PROGRAM = triton.TILE_BLOCKS * triton.TILES_PER_PROGRAM
BLOCKS = (
    1,
    2,
    13,
    triton.TILE_BLOCKS - 1,
    triton.TILE_BLOCKS,
    triton.TILE_BLOCKS + 1,
    PROGRAM - 1,
    PROGRAM,
    PROGRAM + 1,
    GROUP_BLOCKS + 1,
    541,
)


def make(num_experts, num_blocks, dtype):
    stack, truth_EX = make_truth(num_experts, num_blocks, dtype, device=DEVICE)
    if DEVICE == "cpu" and dtype is torch.bfloat16:
        # The interpreter rounds to bf16 by cutting.
        wide_EX = reference.dequantise_stack(stack, truth_EX.float())
        truth_EX = (wide_EX.view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16)
    return stack, truth_EX


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_blocks", BLOCKS)
def test_equals_bitsandbytes(num_blocks, dtype):
    check(triton.dequantise_stack, *make(3, num_blocks, dtype))


@pytest.mark.parametrize("num_experts", [1, 2, 7])
def test_number_of_experts(num_experts):
    check(triton.dequantise_stack, *make(num_experts, 5, torch.bfloat16))


def test_no_experts():
    stack, truth_EX = make(1, 5, torch.float32)
    none = type(stack)(*(part[:0] for part in stack[:4]), *stack[4:])
    assert triton.dequantise_stack(none, truth_EX[:0]).shape == (0, 320)


FAULTS = {
    "low half first": "tl.interleave({first, second => second, first})",
    "one half twice": "(pair {& 15 => >> 4})",
    "scales not shifted": "* nested {+ offset => }",
    "first group for all": "block {// GROUP => * 0}",
    "group of another expert": "{expert * num_groups => 0}",
    "first expert's offset": "offset_ptr {+ expert => }",
    "lost fp32": "tl.load(nested_quant_map_ptr + place){ => .to(tl.float16)} * nested",
    "last block not written": "element_ty), mask={inside => (block < num_blocks - 1)}[:, None]",
    "lost mask": "element_ty){, mask=inside[:, None] => }",
    "wrong stride": "row[:, None] * {BLOCK_BYTES => (BLOCK_BYTES - 1)}",
    "only the first tile": "(tl.program_id(0) * TILES {+ tile => })",
}


def check_every_part(dequantise):
    check(dequantise, *make(2, GROUP_BLOCKS + 37, torch.float32))


test_a_planted_fault_is_seen, test_without_a_fault_the_same_check_passes = planted_faults(
    triton, lambda module: check_every_part(module.dequantise_stack), FAULTS
)
