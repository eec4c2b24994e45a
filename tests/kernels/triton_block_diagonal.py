"""Tests of the Triton kernels of block_diagonal, interpreted by test_interpreted.py and compiled by tests/gpu."""

import pytest
import torch

from lightning_fastft.kernels.block_diagonal import reference, triton
from tests.support.kernel_harness import DEVICE, planted_faults
from tests.support.truth import assert_nothing_beside, poisoned

BLOCKS = {
    "queries, keys, values": [(97, 16), (33, 16), (33, 16)],
    "gate and up": [(130, 7), (130, 9)],
    "one": [(5, 3)],
    "four, the first and the last of no rank": [(3, 0), (70, 4), (9, 1), (65, 0)],
    "none of any rank": [(40, 0), (3, 0)],
}


def check(write, shapes, *, num_columns, dtype=torch.bfloat16):
    """The same bits as the plain twin, from blocks inside larger ones, into rows that lie apart, and nothing
    between them.
    """
    blocks = [poisoned(torch.randn(shape, device=DEVICE).to(dtype)) for shape in shapes]
    size = (sum(rows for rows, _ in shapes), num_columns)
    room, expected = (poisoned(torch.ones(size, dtype=dtype, device=DEVICE)) for _ in range(2))
    write(room, blocks)
    reference.write_block_diagonal(expected, blocks)
    assert torch.equal(room, expected)
    assert_nothing_beside(room)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_are_bit_equal(name, dtype):
    check(triton.write_block_diagonal, BLOCKS[name], num_columns=48, dtype=dtype)


@pytest.mark.parametrize("num_columns", [1, 2, 63, 64, 65, 2048, 4096])
def test_number_of_columns(num_columns):
    check(
        triton.write_block_diagonal,
        [(3, num_columns // 2), (2, num_columns - num_columns // 2)],
        num_columns=num_columns,
    )


def test_without_rows_or_columns():
    check(triton.write_block_diagonal, [(0, 3)], num_columns=8)
    check(triton.write_block_diagonal, [(3, 0)], num_columns=0)


FAULTS = {
    "rows of a block from its end": "rows >{= => } first_row",
    "a row too many": "rows <{ => =} end_row",
    "columns of a block from its end": "cols >{= => } first_col",
    "a column too many": "cols <{ => =} end_col",
    "rows of the matrix": "{(rows - first_row) => rows}.to(tl.int64)",
    "columns of the matrix": "{(cols - first_col) => cols}[None, :]",
    "stride of the block before": "block_2_ptr, {stride_2 => stride_1}",
    "a block lost": "{value = _add_block(value, block_1_ptr => _add_block(value, block_1_ptr}",
    "zeros lost": "(cols < {num_columns => col_3})[None, :] tl.store",
    "last row not written": "(rows < num_rows{ => - 1})[:, None]",
    "written between the rows": "(cols < num_columns{ => + 1})[None, :] tl.store",
    "stride of the output": "tl.int64)[:, None] * {out_stride => num_columns}",
    "tile of the first program": "{tl.program_id(0) * BLOCK_O + => }",
}


def check_every_part(functions):
    check(functions.write_block_diagonal, [(97, 16), (33, 9), (34, 11), (5, 7)], num_columns=48)


test_a_planted_fault_is_seen, test_without_a_fault_the_same_check_passes = planted_faults(
    triton, check_every_part, FAULTS
)
