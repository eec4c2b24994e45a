"""Tests of the Triton kernels of column_scale, interpreted by test_interpreted.py and compiled by tests/gpu."""

import pytest
import torch

from lightning_fastft.kernels.column_scale import triton
from tests.kernels.test_column_scale import (
    DTYPES,
    PLACES,
    check,
    check_backward,
    check_factors,
    fresh_memory_is_nan,
    make_inputs,
)
from tests.support.children import thinned
from tests.support.kernel_harness import DEVICE, NARROW, far, planted_faults

ROWS, COLUMNS = triton.BLOCK_ROWS, triton.BLOCK_COLUMNS
# The interpreter multiplies the bits of bf16 where a kernel multiplies matrices.
PRODUCT_DTYPES = (torch.float32, torch.float16) if DEVICE == "cpu" else DTYPES
OUTPUTS, INPUTS, RANKS = triton.FEW_OUTPUTS, triton.NORM_INPUTS, triton.MAX_BLOCK_RANKS


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("place", PLACES)
def test_every_place_equals_the_truth(place, dtype):
    shape = (ROWS + 1, COLUMNS + 5)
    for has_offset in (False, True):
        check(triton.scale_columns, shape, dtype, device=DEVICE, has_offset=has_offset, alpha=0.5, place=place)
    check(triton.scale_columns, shape, dtype, device=DEVICE, has_addend=True, place=place)
    if place != "addend":
        for needs_totals in (False, True):
            check_backward(
                triton.scale_columns_backward, shape, dtype, device=DEVICE, needs_totals=needs_totals, place=place
            )


@pytest.mark.parametrize(
    ("num_rows", "num_columns"),
    thinned(
        (1, ROWS - 1, ROWS, 2 * ROWS + 1, triton.PROGRAM_ROWS + 1),
        (1, 2, COLUMNS - 1, COLUMNS, 2 * COLUMNS + 37),
        keep=lambda row, column: (row + column) % 3 == 0,
    ),
)
def test_number_of_rows_and_columns(num_rows, num_columns):
    check(triton.scale_columns, (num_rows, num_columns), NARROW, device=DEVICE, has_offset=True)
    check_backward(triton.scale_columns_backward, (num_rows, num_columns), NARROW, device=DEVICE)
    check_backward(triton.scale_columns_backward, (num_rows, num_columns), NARROW, device=DEVICE, has_saved=False)


@pytest.mark.parametrize(
    ("num_outputs", "num_inputs", "num_ranks", "dtype"),
    thinned(
        (1, OUTPUTS, 2 * OUTPUTS + 1),
        (1, INPUTS - 1, 2 * INPUTS + 5),
        (1, 16, 17, RANKS + 1),
        PRODUCT_DTYPES,
        keep=lambda *places: sum(places) % 3 == 0,
    ),
)
def test_factors_of_rows(num_outputs, num_inputs, num_ranks, dtype):
    check_factors(triton.row_factors, (num_outputs, num_inputs), num_ranks, dtype, device=DEVICE)


def test_factors_of_many_outputs(monkeypatch):
    monkeypatch.setattr(triton, "MANY_OUTPUTS", 1)
    check_factors(triton.row_factors, (triton.NORM_OUTPUTS + 1, INPUTS + 5), 5, NARROW, device=DEVICE)


@pytest.mark.parametrize("shape", [(0, 0), (0, 6), (3, 0)])
def test_without_rows_or_columns(shape):
    x_TN, factor_N, _, _ = make_inputs(*shape, NARROW, device=DEVICE)
    assert triton.scale_columns(x_TN, factor_N).shape == shape
    _, products_N, _ = triton.scale_columns_backward(x_TN, x_TN, factor_N, needs_totals=True)
    assert torch.equal(products_N, torch.zeros(shape[1], device=DEVICE))


def test_two_calls_are_bit_equal():
    d_y_TN, factor_N, _, saved_TN = make_inputs(triton.PROGRAM_ROWS + 3, COLUMNS + 5, NARROW, device=DEVICE)
    with fresh_memory_is_nan():
        first, second = (triton.scale_columns_backward(d_y_TN, saved_TN, factor_N, needs_totals=True) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first, second))


def test_rows_beyond_two_to_the_31_elements_are_reached():
    x_TN, factor_N, _, addend_TN = make_inputs(3, 3, NARROW, device=DEVICE)
    expected = triton.scale_columns(x_TN, factor_N, addend_TN=addend_TN)
    far_TN = far(x_TN)
    assert torch.equal(triton.scale_columns(far_TN, factor_N, addend_TN=far(addend_TN), out=far_TN), expected)
    expected = triton.scale_columns_backward(x_TN, addend_TN, factor_N)
    far_TN = far(x_TN)
    d_x_TN, products_N, _ = triton.scale_columns_backward(far_TN, far(addend_TN), factor_N, out=far_TN)
    assert torch.equal(d_x_TN, expected[0])
    assert torch.equal(products_N, expected[1])


FAULTS = {
    "adapter not in the norm": "weight.to(tl.float32){ + scale * product => }",
    "scale of the adapter lost": "{scale * => } product",
    "squares of the last columns only": "squares {+= total => = total} * total",
    "product of the last ranks only": "tl.dot(b, a, {product => tl.zeros_like(product)},",
    "every step of ranks the first": "{step * BLOCK_R + => } tl.arange(0, BLOCK_R)",
    "rank mask of B lost": "inside_outputs[:, None] & {inside_ranks => (ranks < num_ranks + 1)}[None, :]",
    "rank mask of A lost": "{inside_ranks => (ranks < num_ranks + 1)}[:, None] & inside_cols",
    "last input lost": "inside_cols = cols < num_inputs{ => - 1}",
    "wrong stride of the weight": "outputs[:, None] * {weight_stride => num_inputs}",
    "second factor over the first": "tl.store(out_ptr + {num_outputs => 0} + outputs",
    "last output not written": "inside_outputs = outputs < num_outputs{ => - 1}",
    "version not raised": "{torch.autograd.graph.increment_version(out) => pass}",
    "offset lost": "if {HAS_OFFSET => False}:",
    "addend lost": "if {HAS_ADDEND => False}:",
    "x in place of the addend": "tl.load({addend_ptr => x_ptr} + rows",
    "alpha lost": "y {*= alpha => *= 1.0}",
    "last row lost": "y = tl.load(x_ptr + rows[:, None] * x_stride + cols[None, :], mask={inside => inside & (rows < num_rows - 1)[:, None]}",
    "written beside the columns": "y.to(out_ptr.dtype.element_ty), mask={inside => (rows < num_rows)[:, None] & (cols < num_columns + 1)[None, :]})",
    "wrong stride of x": "rows[:, None] * {x_stride => num_columns} +",
    "wrong stride of the addend": "rows[:, None] * {addend_stride => num_columns} +",
    "wrong stride of the output": "rows[:, None] * {out_stride => num_columns} +",
    "factor lost in the gradient": "(d_y{ * factor[None, :] => })",
    "products of the last rows only": "{products += d_y => products = d_y} * saved",
    "totals of the last rows only": "{totals += d_y => totals = d_y}",
    "part of the products overwritten": "tl.store(products_ptr + {part => 0} * num_columns",
    "part of the totals overwritten": "tl.store(totals_ptr + {part => 0} * num_columns",
    "rows of every program the first": "rows = {part => 0} * PROGRAM_T",
    "wrong stride of the gradient": "rows[:, None] * {d_y_stride => num_columns} +",
    "wrong stride of the saved columns": "rows[:, None] * {saved_stride => num_columns} +",
    "wrong stride of the result": "rows[:, None] * {d_x_stride => num_columns} +",
}  # fmt: skip


def check_every_part(functions):
    """Two tiles along each axis, and two programs along the rows of the backward."""
    for place in ("apart", "x", "addend", "new"):
        check(
            functions.scale_columns, (ROWS + 1, COLUMNS + 5), NARROW, device=DEVICE,
            has_offset=True, has_addend=True, alpha=0.3, place=place,
        )  # fmt: skip
    check_factors(functions.row_factors, (OUTPUTS + 1, INPUTS + 5), RANKS + 1, NARROW, device=DEVICE)
    for place in ("apart", "x", "new"):
        shape = (triton.PROGRAM_ROWS + ROWS + 1, COLUMNS + 5)
        check_backward(functions.scale_columns_backward, shape, NARROW, device=DEVICE, place=place)


test_a_planted_fault_is_seen, test_without_a_fault_the_same_check_passes = planted_faults(
    triton, check_every_part, FAULTS
)
