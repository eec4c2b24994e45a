"""Tests of the Triton kernels of expert_pack, interpreted by test_interpreted.py and compiled by tests/gpu."""

import pytest
import torch

from lightning_fastft.kernels.expert_pack import triton
from tests.kernels.test_expert_pack import SHAPES, check_every_part, check_exchange
from tests.support.kernel_harness import DEVICE, planted_faults

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def cut_alike(expected, result):
    """The interpreter rounds to bf16 towards zero where a device rounds to the nearest: there one unit in the
    last place is no fault.
    """
    if DEVICE == "cuda" or result.dtype is not torch.bfloat16:
        return expected
    distance = (result.view(torch.int16).int() - expected.view(torch.int16).int()).abs()
    return result if bool((distance <= 1).all()) else expected


@pytest.mark.parametrize("out_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_cast_equals_a_permutation(dtype, out_dtype):
    check_exchange(
        triton.exchange_ends,
        (13, 5, 7),
        dtype=dtype,
        out_dtype=out_dtype,
        device=DEVICE,
        expected_of=cut_alike,
    )


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_equals_a_permutation(shape):
    check_exchange(triton.exchange_ends, shape, dtype=torch.float32, out_dtype=torch.float16, device=DEVICE)


def test_whoever_saved_the_old_values_is_told():
    out = torch.zeros(4, 2, 3, device=DEVICE)
    leaf = torch.ones(4, 2, 3, device=DEVICE, requires_grad=True)
    product = leaf * out
    triton.exchange_ends(torch.ones(3, 2, 4, device=DEVICE), out=out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()
    with torch.inference_mode():
        triton.exchange_ends(torch.ones(3, 2, 4, device=DEVICE), out=torch.empty(4, 2, 3, device=DEVICE))


FAULTS = {
    "lost mask along the first axis": "(first < num_first{ => + 1})[:, None] & (last",
    "lost mask along the last axis": "(last < num_last{ => + 1})[None, :]",
    "last row lost": "(first < num_first{ => - 1})[:, None] & (last",
    "last column lost": "(last < num_last{ => - 1})[None, :]",
    "wrong stride of the source": "source_row[:, None] * {num_last => (num_last - 1)}",
    "wrong stride of the result": "out_row[None, :] * {num_first => (num_first - 1)}",
    "middle axis forgotten": "out_row = last * num_middle {+ middle => }",
    "only the first tile of rows": "(tl.program_id(0) {// num_last_tiles => * 0}).to(tl.int64)",
    "only the first tile of columns": "(tl.program_id(0) {% num_last_tiles => * 0}).to(tl.int64)",
}


test_a_planted_fault_is_seen, test_without_a_fault_the_same_check_passes = planted_faults(
    triton, lambda module: check_every_part(module.exchange_ends, device=DEVICE), FAULTS
)
