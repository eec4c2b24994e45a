"""Tests of the Triton kernels of repeat_heads, interpreted by test_interpreted.py and compiled by tests/gpu."""

import pytest
import torch

from lightning_fastft.kernels.repeat_heads import reference, triton
from tests.support.kernel_harness import DEVICE, planted_faults
from tests.support.truth import poisoned


def check(repeat, shape, num_heads, *, dtype=torch.bfloat16):
    """The same bits as the plain twin, from rows that lie apart."""
    x = torch.randn(shape, device=DEVICE).to(dtype)
    rows = poisoned(x.flatten(1)).unflatten(1, shape[1:])
    found = repeat(rows, num_heads)
    assert found.is_contiguous()
    assert torch.equal(found, reference.repeat_heads(x, num_heads))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("shape", "num_heads"), [((3, 8, 128), 40), ((5, 2, 24), 6), ((1, 1, 1), 7), ((2, 3, 80), 3), ((4, 9, 128), 18)]
)
def test_bits_are_equal(shape, num_heads, dtype):
    check(triton.repeat_heads, shape, num_heads, dtype=dtype)


def test_without_tokens_or_columns():
    assert triton.repeat_heads(torch.empty(0, 2, 4, device=DEVICE), 4).shape == (0, 4, 4)
    assert triton.repeat_heads(torch.empty(3, 2, 0, device=DEVICE), 4).shape == (3, 4, 0)


FAULTS = {
    "last tile lost": "range(0, NUM_COLUMNS{ => - BLOCK}, BLOCK)",
    "first tile again": "{start + => } tl.arange(0, BLOCK)",
    "last column lost": "inside = cols < NUM_COLUMNS{ => - 1}",
    "stride lost": "token * {in_stride => NUM_COLUMNS}",
    "last time lost": "tl.static_range(NUM_TIMES{ => - 1})",
    "heads side by side": "cols {// HEAD_WIDTH * (NUM_TIMES * HEAD_WIDTH) + cols % HEAD_WIDTH => }",
    "tokens too near": "token * {(NUM_TIMES * NUM_COLUMNS) => NUM_COLUMNS}",
}


def check_every_part(functions):
    check(functions.repeat_heads, (3, 9, 125), 18)


test_a_planted_fault_is_seen, test_without_a_fault_the_same_check_passes = planted_faults(
    triton, check_every_part, FAULTS
)
