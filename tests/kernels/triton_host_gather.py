"""Tests of the Triton kernels of host_gather, interpreted by test_interpreted.py and compiled by tests/gpu."""

import pytest
import torch

from lightning_fastft.kernels.host_gather import reference, triton
from tests.support.kernel_harness import DEVICE, planted_faults
from tests.support.truth import poisoned

COLUMNS = (1, 2, 13, *range(127, 130), *range(triton.MAX_BLOCK - 1, triton.MAX_BLOCK + 2), 2 * triton.MAX_BLOCK + 37)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def pinned(tensor):
    return tensor if DEVICE == "cpu" else tensor.pin_memory()


def make_table(num_rows, num_columns, dtype, *, is_strided=False):
    table = torch.randn(num_rows, num_columns).to(dtype)
    if not is_strided:
        return pinned(table)
    # Rows apart from each other, with NaN between them.
    buffer = pinned(torch.full((num_rows + 2, num_columns + 3), float("nan"), dtype=dtype))
    inner = buffer[1:-1, 1:-2]
    inner.copy_(table)
    return inner


def check(gather, weight_VD, token_T):
    # Fresh memory holds NaN.
    torch.use_deterministic_algorithms(True)
    try:
        out_TD = gather(weight_VD, token_T.to(DEVICE))
    finally:
        torch.use_deterministic_algorithms(False)
    expected_TD = reference.gather_rows(weight_VD, token_T)
    assert out_TD.shape == expected_TD.shape
    assert out_TD.dtype is weight_VD.dtype
    assert torch.equal(out_TD.cpu(), expected_TD)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_columns", COLUMNS)
@pytest.mark.parametrize("is_strided", [False, True])
def test_rows_are_bit_equal(num_columns, dtype, is_strided):
    check(triton.gather_rows, make_table(7, num_columns, dtype, is_strided=is_strided), torch.tensor([6, 0, 3, 3, 6]))


@pytest.mark.parametrize("num_tokens", [0, 1, 61])
@pytest.mark.parametrize("index_dtype", [torch.int64, torch.int32])
def test_number_of_tokens(num_tokens, index_dtype):
    check(
        triton.gather_rows, make_table(11, 131, torch.bfloat16), torch.randint(0, 11, (num_tokens,), dtype=index_dtype)
    )


def test_no_columns():
    check(triton.gather_rows, make_table(3, 0, torch.float32), torch.tensor([1, 2]))


def test_an_impossible_token_gives_nan_and_reads_nothing():
    weight_VD = make_table(3, 131, torch.bfloat16)
    out_TD = triton.gather_rows(weight_VD, torch.tensor([1, 3, -1, 2**40, 2], device=DEVICE)).cpu()
    assert torch.equal(out_TD[[0, 4]], weight_VD[[1, 2]])
    assert out_TD[1:4].isnan().all()


def test_tokens_inside_a_larger_buffer():
    token_T = poisoned(torch.tensor([2, 0, 1], device=DEVICE))
    assert torch.equal(
        triton.gather_rows(make_table(3, 5, torch.float32), token_T).isfinite().cpu(),
        torch.ones(3, 5, dtype=torch.bool),
    )


def test_rows_beyond_two_to_the_31_elements_are_reached():
    if DEVICE == "cpu":
        # Two rows that lie further apart than 32 bits of elements reach: one page of the file is real, the rest is a
        # hole.
        weight_VD = torch.empty(2**31 + 64, dtype=torch.bfloat16).as_strided((2, 64), (2**31, 1))
    else:
        pytest.skip("4 GiB of pinned memory; the arithmetic is the interpreter's")
    weight_VD.copy_(torch.randn(2, 64))
    check(triton.gather_rows, weight_VD, torch.tensor([1, 0]))


FAULTS = {
    "last column not read": "num_columns{ => - 1}, 0)",
    "last column not written": "mask=cols < num_columns{ => - 1})",
    "wrong stride": "{weight_VD.stride(0) => num_columns},",
    "only the first tile": "{tl.program_id(1) * BLOCK + => } tl.arange(0, BLOCK)",
    "row of the program": "weight_ptr + {token => row} * weight_stride",
}


def check_every_part(gather):
    check(gather, make_table(9, triton.MAX_BLOCK + 5, torch.float32, is_strided=True), torch.tensor([8, 1, 1, 5]))


test_a_planted_fault_is_seen, test_without_a_fault_the_same_check_passes = planted_faults(
    triton, lambda module: check_every_part(module.gather_rows), FAULTS
)
