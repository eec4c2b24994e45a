"""Tests of the Triton kernel, run in a process of their own: TRITON_INTERPRET must be set before Triton is first
imported.

``test_nf4_experts.py`` runs them in the interpreter, ``tests/gpu/test_expert_nf4_gpu.py`` on the device.
"""

import os

import pytest
import torch

from lightning_fastft.kernels.nf4_experts import reference, triton
from lightning_fastft.kernels.nf4_experts.reference import GROUP_BLOCKS
from tests.support.nf4_stacks import check, make_truth
from tests.support.truth import load_with_fault

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
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
    "low half first": ("tl.interleave(first, second)", "tl.interleave(second, first)"),
    "one half twice": ("(pair & 15)", "(pair >> 4)"),
    "scales not shifted": ("* nested + offset", "* nested"),
    "first group for all": ("block // GROUP", "block * 0"),
    "group of another expert": ("expert * num_groups", "0"),
    "first expert's offset": ("offset_ptr + expert", "offset_ptr"),
    "lost fp32": (
        "tl.load(nested_quant_map_ptr + place) * nested",
        "tl.load(nested_quant_map_ptr + place).to(tl.float16) * nested",
    ),
    "last block not written": (
        "element_ty), mask=inside[:, None]",
        "element_ty), mask=(block < num_blocks - 1)[:, None]",
    ),
    "lost mask": ("element_ty), mask=inside[:, None]", "element_ty)"),
    "wrong stride": ("row[:, None] * BLOCK_BYTES", "row[:, None] * (BLOCK_BYTES - 1)"),
    "only the first tile": ("(tl.program_id(0) * TILES + tile)", "(tl.program_id(0) * TILES)"),
}


def check_every_part(dequantise):
    check(dequantise, *make(2, GROUP_BLOCKS + 37, torch.float32))


@pytest.mark.skipif(DEVICE == "cuda", reason="planted faults read out of bounds; they belong into the interpreter")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_seen(fault, tmp_path):
    faulty = load_with_fault(triton, *FAULTS[fault], tmp_path)
    with pytest.raises(AssertionError):
        check_every_part(faulty.dequantise_stack)


def test_without_a_fault_the_same_check_passes():
    check_every_part(triton.dequantise_stack)
