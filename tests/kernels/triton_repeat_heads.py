"""Tests of the Triton kernel, run in a process of their own: TRITON_INTERPRET must be set before Triton is first
imported.

``test_repeat_heads.py`` runs them in the interpreter, ``tests/gpu/test_attention_gpu.py`` on the device.
"""

import os

import pytest
import torch

from lightning_fastft.kernels.repeat_heads import reference, triton
from tests.support.truth import load_with_fault, poisoned

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"


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
    "last tile lost": ("range(0, NUM_COLUMNS, BLOCK)", "range(0, NUM_COLUMNS - BLOCK, BLOCK)"),
    "first tile again": ("start + tl.arange(0, BLOCK)", "tl.arange(0, BLOCK)"),
    "last column lost": ("inside = cols < NUM_COLUMNS", "inside = cols < NUM_COLUMNS - 1"),
    "stride lost": ("token * in_stride", "token * NUM_COLUMNS"),
    "last time lost": ("tl.static_range(NUM_TIMES)", "tl.static_range(NUM_TIMES - 1)"),
    "heads side by side": ("cols // HEAD_WIDTH * (NUM_TIMES * HEAD_WIDTH) + cols % HEAD_WIDTH", "cols"),
    "tokens too near": ("token * (NUM_TIMES * NUM_COLUMNS)", "token * NUM_COLUMNS"),
}


def check_every_part(functions):
    check(functions.repeat_heads, (3, 9, 125), 18)


@pytest.mark.skipif(DEVICE == "cuda", reason="planted faults read out of bounds; they belong into the interpreter")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_seen(fault, tmp_path):
    faulty = load_with_fault(triton, *FAULTS[fault], tmp_path)
    with pytest.raises(AssertionError):
        check_every_part(faulty)


def test_without_a_fault_the_same_check_passes():
    check_every_part(triton)
