"""Tests of the Triton kernels of low_rank_add, interpreted by test_interpreted.py and compiled by tests/gpu."""

import pytest
import torch

from lightning_fastft.kernels.low_rank_add import triton
from tests.kernels.test_low_rank_add import (
    DTYPES,
    PLACES,
    check,
    check_rows_of_nan_stay_alone,
    fresh_memory_is_nan,
    make_inputs,
)
from tests.support.children import thinned
from tests.support.kernel_harness import DEVICE, NARROW, far, planted_faults

# The interpreter multiplies the bits of bf16 where a kernel multiplies matrices.
PRODUCT_DTYPES = (torch.float32, torch.float16) if DEVICE == "cpu" else DTYPES
ROWS, COLUMNS, RANKS = triton.BLOCK_ROWS, triton.BLOCK_COLUMNS, triton.MAX_BLOCK_RANKS


@pytest.mark.parametrize("dtype", PRODUCT_DTYPES)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("is_factor_transposed", [False, True])
def test_every_place_equals_the_truth(is_factor_transposed, place, dtype):
    for has_residual in (False, True):
        check(
            triton.add_low_rank,
            (ROWS + 1, COLUMNS + 5, 5),
            dtype,
            device=DEVICE,
            is_factor_transposed=is_factor_transposed,
            has_residual=has_residual,
            place=place,
        )


@pytest.mark.parametrize(
    ("num_ranks", "dtype", "is_transposed"),
    thinned(
        (0, 1, 15, 16, 17, RANKS, RANKS + 1, 40, 100),
        PRODUCT_DTYPES,
        (False, True),
        keep=lambda *places: sum(places) % 2 == 0,
    ),
)
def test_number_of_ranks_in_both_orders_of_the_product(num_ranks, dtype, is_transposed, monkeypatch):
    monkeypatch.setattr(triton, "TRANSPOSED", is_transposed)
    for is_factor_transposed in (False, True):
        check(
            triton.add_low_rank,
            (7, 33, num_ranks),
            dtype,
            device=DEVICE,
            is_factor_transposed=is_factor_transposed,
            has_residual=True,
        )


@pytest.mark.parametrize(
    ("num_rows", "num_columns"),
    thinned(
        (1, ROWS - 1, ROWS, 2 * ROWS + 1),
        (1, 2, COLUMNS - 1, COLUMNS, 2 * COLUMNS + 37),
        keep=lambda row, column: (row + column) % 3 == 0,
    ),
)
def test_number_of_rows_and_columns(num_rows, num_columns):
    check(triton.add_low_rank, (num_rows, num_columns, 16), NARROW, device=DEVICE)


def test_rows_of_nan_stay_alone():
    check_rows_of_nan_stay_alone(triton.add_low_rank, NARROW, device=DEVICE)


@pytest.mark.parametrize(("num_rows", "num_columns"), [(0, 0), (0, 6), (3, 0)])
def test_without_rows_or_columns(num_rows, num_columns):
    base_TN, low_TR, factor_RN, _ = make_inputs(num_rows, num_columns, 2, NARROW, device=DEVICE)
    assert triton.add_low_rank(base_TN, low_TR, factor_RN).shape == (num_rows, num_columns)
    assert triton.add_low_rank(base_TN, low_TR, factor_RN, out=base_TN) is base_TN


def test_two_calls_are_bit_equal():
    base_TN, low_TR, factor_RN, residual_TN = make_inputs(
        ROWS + 1, COLUMNS + 5, 40, NARROW, device=DEVICE, has_residual=True
    )
    with fresh_memory_is_nan():
        first, second = (triton.add_low_rank(base_TN, low_TR, factor_RN, residual_TN=residual_TN) for _ in range(2))
    assert torch.equal(first, second)
    # In place as well.
    assert torch.equal(triton.add_low_rank(base_TN, low_TR, factor_RN, residual_TN=residual_TN, out=base_TN), first)


@pytest.mark.parametrize("is_factor_transposed", [False, True])
def test_rows_beyond_two_to_the_31_elements_are_reached(is_factor_transposed):
    base_TN, low_TR, factor_RN, residual_TN = make_inputs(3, 3, 3, NARROW, device=DEVICE, has_residual=True)
    expected = triton.add_low_rank(base_TN, low_TR, factor_RN, residual_TN=residual_TN)
    far_TN, far_factor_RN = far(base_TN), far(factor_RN.T).T if is_factor_transposed else far(factor_RN)
    ours = triton.add_low_rank(far_TN, far(low_TR), far_factor_RN, residual_TN=far(residual_TN), out=far_TN)
    assert torch.equal(ours, expected)


FAULTS = {
    "residual lost": "if {HAS_RESIDUAL => False}:",
    "base in place of the residual": "tl.load({residual_ptr => base_ptr} + rows",
    "base lost": "{ => 0.0 *}tl.load(base_ptr + rows",
    "product rounded": (
        "if TRANSPOSED else product{ => \n    total = total.to(out_ptr.dtype.element_ty).to(tl.float32)}"
    ),
    "sum rounded before the residual": (
        "{if HAS_RESIDUAL: => total = total.to(out_ptr.dtype.element_ty).to(tl.float32)\n    if HAS_RESIDUAL:}"
    ),
    "product of the last ranks only": "tl.trans(low), {product => tl.zeros_like(product)},",
    "product of the first ranks only": "tl.range(0, {num_ranks => min(num_ranks, BLOCK_R)}, BLOCK_R,",
    "every step the first": "ranks = {first + => } tl.arange(0, BLOCK_R)",
    "last rank lost": "inside_ranks = ranks < num_ranks{ => - 1}",
    "mask of the ranks lost": "inside_ranks = ranks < num_ranks{ => + 1}",
    "rank mask of the low-rank rows lost": "inside_rows[:, None] & {inside_ranks => (ranks < num_ranks + 1)}[None, :]",
    "rank mask of the factor lost": "{inside_ranks => (ranks < num_ranks + 1)}[:, None] & inside_cols",
    "mask of the columns lost": "inside_cols = cols < num_columns{ => + 1}",
    "last column lost": "inside_cols = cols < num_columns{ => - 1}",
    "mask of the rows lost": "inside_rows = rows < num_rows{ => + 1}",
    "last row lost": "inside_rows = rows < num_rows{ => - 1}",
    "written beside the columns": (
        "total.to(out_ptr.dtype.element_ty), mask={inside => inside_rows[:, None] & (cols < num_columns + 1)[None, :]})"
    ),
    "last tile of columns not written": "* {ceil_div(num_columns, => (num_columns //} BLOCK_COLUMNS),)",
    "tiles of columns counted short": "{tl.cdiv(num_columns, => (num_columns //} BLOCK_N)",
    "every tile in the first columns": "{(tile % num_column_tiles) * BLOCK_N + => }",
    "every tile in the first rows": "(tile // num_column_tiles).to(tl.int64) * {BLOCK_T => 0}",
    "wrong stride of the base": "rows[:, None] * {base_stride => num_columns}",
    "wrong stride of the residual": "rows[:, None] * {residual_stride => num_columns}",
    "wrong stride of the low-rank rows": "rows * {low_stride => num_ranks}",
    "wrong stride of the output": "rows[:, None] * {out_stride => num_columns}",
    "factor taken for rows": "cols.to(tl.int64) {* factor_column_stride => }",
    "factor taken for columns": "tl.int64)[:, None] {* factor_rank_stride => }",
    "factor without distance": "tl.int64)[:, None] * {factor_rank_stride => num_columns}",
    "memory that was given not used": "{if out is None else out => }",
    "written before the residual is read": (
        "{if HAS_RESIDUAL: => tl.store(out_ptr + rows[:, None] * out_stride + cols[None, :], "
        "total.to(out_ptr.dtype.element_ty), mask=inside)\n    if HAS_RESIDUAL:}"
    ),
}


def check_every_part(functions):
    """Two tiles along each axis and two steps of ranks; first where a faulty kernel that writes beside its tensor
    meets nothing else.
    """
    shape = (ROWS + 1, COLUMNS + 5, RANKS + 1)
    for place in ("apart", "base", "residual", "new"):
        check(
            functions.add_low_rank,
            shape,
            NARROW,
            device=DEVICE,
            is_factor_transposed=place in ("apart", "base"),
            place=place,
        )


test_a_planted_fault_is_seen, test_without_a_fault_the_same_check_passes = planted_faults(
    triton, check_every_part, FAULTS
)
