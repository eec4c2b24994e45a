"""Tests of the Triton kernels of rms_norm, interpreted by test_interpreted.py and compiled by tests/gpu."""

from unittest import mock

import numpy as np
import pytest
import torch

from lightning_fastft.kernels.rms_norm import triton
from tests.kernels import test_rms_norm
from tests.kernels.test_rms_norm import (
    GEMMA,
    GPT_OSS,
    LLAMA,
    check_against_truth,
    check_every_part,
    check_without_the_weight,
    make_inputs,
)
from tests.support.kernel_harness import DEVICE, far, planted_faults, shared_tests

# Rows of 130 columns share a program by so many.
BLOCK_ROWS = triton._tile(130)[0]
ROWS = (1, BLOCK_ROWS - 1, BLOCK_ROWS, BLOCK_ROWS + 1, 8 * BLOCK_ROWS + 1)
COLUMNS = (1, 2, 5, 31, 32, 33, 64, 128, 130, 255, 256, 257, 1023, 2048, 2049, 4096, 5000)


globals().update(shared_tests(test_rms_norm, triton))


@pytest.fixture(autouse=True)
def the_interpreter_rounds_as_the_device_does(monkeypatch):
    """Triton's interpreter cuts fp32 off where bf16 ends."""
    if DEVICE == "cuda":
        return
    from triton import language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    cast = InterpreterBuilder.cast_impl

    def rounded_cast(self, src, dst_type):
        if src.dtype.scalar != tl.float32 or dst_type.scalar != tl.bfloat16:
            return cast(self, src, dst_type)
        narrow = torch.from_numpy(np.array(src.data, dtype=np.float32)).to(torch.bfloat16)
        return TensorHandle(narrow.view(torch.int16).numpy().view(np.uint16), dst_type.scalar)

    monkeypatch.setattr(InterpreterBuilder, "cast_impl", rounded_cast)


@pytest.fixture
def few_programs(monkeypatch):
    """So few programs that each sums several blocks of rows, some one block less than others."""
    monkeypatch.setattr(triton, "MAX_PROGRAMS", 3)


@pytest.mark.parametrize("num_columns", COLUMNS)
@pytest.mark.parametrize("form", [LLAMA, GEMMA])
def test_number_of_columns(num_columns, form):
    check_against_truth(triton, 9, num_columns, torch.bfloat16, form, device=DEVICE)


@pytest.mark.parametrize(
    ("dtype", "form"), [(torch.bfloat16, LLAMA), pytest.param(torch.float32, GPT_OSS, marks=pytest.mark.fault)]
)
def test_the_widest_row(dtype, form):
    check_against_truth(triton, 3, 16_384, dtype, form, device=DEVICE)


@pytest.mark.usefixtures("few_programs")
@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize("form", [LLAMA, GEMMA])
def test_number_of_rows(num_rows, form):
    check_against_truth(triton, num_rows, 130, torch.bfloat16, form, device=DEVICE)


@pytest.mark.usefixtures("few_programs")
@pytest.mark.parametrize("form", [LLAMA, GEMMA])
def test_without_the_gradient_of_the_weight(form):
    check_without_the_weight(triton, torch.bfloat16, form, device=DEVICE)


def test_rows_beyond_two_to_the_31_elements_are_reached():
    x_TD, weight_D, d_y_TD, addend_TD = make_inputs(3, 64, torch.bfloat16, LLAMA, device=DEVICE)
    expected_TD = triton.rms_norm_forward(x_TD, weight_D, form=LLAMA)
    assert torch.equal(triton.rms_norm_forward(far(x_TD), weight_D, form=LLAMA), expected_TD)
    arguments = {"form": LLAMA, "needs_weight": True}
    expected = triton.rms_norm_backward(d_y_TD, x_TD, weight_D, addend_TD=addend_TD, **arguments)
    far_TD = far(addend_TD)
    ours = triton.rms_norm_backward(far(d_y_TD), far(x_TD), weight_D, addend_TD=far_TD, out=far_TD, **arguments)
    assert all(torch.equal(one, other) for one, other in zip(ours, expected))


FAULTS = {
    "eps lost": "* mean_scale {+ eps => }",
    "root of the sum": "_sum_of_products(row, row) {* mean_scale => }",
    "offset of the weight lost": "other=0.0).to(tl.float32) {+ weight_offset => } normed",
    "offset of the weight lost backward": "{+ weight_offset => } if NEEDS_WEIGHT",
    "normed row not rounded": "if {not IS_WEIGHT_WIDE => False}:",
    "normed row rounded in the wide form": "if {not IS_WEIGHT_WIDE => True}:",
    "fp32 lost": "row * _reciprocal_root(row, mean_scale, eps){ => .to(tl.float16).to(tl.float32)}[:, None] if not",
    "squares in the narrow dtype": (
        "{_sum_of_products(row, row => tl.sum((row * row).to(tl.float16), axis=1).to(tl.float32})"
    ),
    "root of the first row is saved": "tl.store(rstd_out_ptr + rows, {rstd => tl.max(rstd, axis=0)}, mask",
    "root taken for a constant": "{(d_normed - normed * along[:, None]) => d_normed}",
    "second factor of the root lost": "along[:, None]) {* rstd[:, None] => }",
    "share along the row is the sum": "_sum_of_products(d_normed, row) * {(mean_scale * rstd) => rstd}",
    "weight not in the gradient": "d_normed = d_y {* weight[None, :] => }",
    "addend lost": "d_x +={ => 0.0 *} addend",
    "gradient rounded before it is added": "d_x {+= => = d_x.to(out_ptr.dtype.element_ty).to(tl.float32) +} addend",
    "weight's gradient by the raw row": "weight_terms += d_y * {normed => row}",
    "weight's gradient by the rounded row": (
        "weight_terms += d_y * normed{ => .to(out_ptr.dtype.element_ty).to(tl.float32)}"
    ),
    "weight's gradient of the last block only": "weight_terms {+ => }= d_y * normed",
    "weight's gradient of the first block only": (
        "weight_terms += {d_y * normed => tl.where(step == 0, d_y * normed, 0.0)}"
    ),
    "weight's gradient summed in the narrow dtype": (
        "weight_terms {+= d_y * normed => = (weight_terms + d_y * normed).to(tl.float16).to(tl.float32)}"
    ),
    "a program is left out of the weight's gradient": "partial_PD{ => [:-1]}.sum(dim=0)",
    "programs write into one partial sum": "partial_ptr + program * {num_columns => 0}",
    "last column not in the weight's gradient": (
        "tl.sum(weight_terms, axis=0), mask={inside_cols => cols < num_columns - 1})"
    ),
    "last step lost": "{ceil_div(num_blocks, num_programs) => num_blocks // num_programs}",
    "programs take neighbouring blocks": "(program + step {* tl.num_programs(0) => })",
    "last column not written": (
        "d_x.to(out_ptr.dtype.element_ty), mask=inside{ => & (cols < num_columns - 1)[None, :]})"
    ),
    "last row not written": "d_x.to(out_ptr.dtype.element_ty), mask=inside{ => & (rows < num_rows - 1)[:, None]})",
    "columns beyond the last are written": (
        "d_x.to(out_ptr.dtype.element_ty), mask={inside => inside_rows[:, None] & (cols < num_columns + "
        "IN_PLACE)[None, :]})"
    ),
    "columns beyond the last are read": (
        "d_y_stride + cols[None, :], mask={inside => inside_rows[:, None] & (cols < num_columns + 1)[None, :]}"
    ),
    "rows beyond the last are read": (
        "d_y_stride + cols[None, :], mask={inside => (rows < num_rows + 1)[:, None] & inside_cols[None, :]}"
    ),
    "roots behind the last row": "{tl.where(inside_rows, => } _reciprocal_root(row, mean_scale, eps){, 0.0) => }",
    "wrong stride of x": "x_ptr + rows[:, None] * {x_stride => num_columns} + cols[None, :], mask=inside, other=0.0).to(tl.float32) weight",
    "wrong stride of y": "y_ptr + rows[:, None] * {y_stride => num_columns}",
    "wrong stride of d_y": "rows[:, None] * {d_y_stride => num_columns}",
    "wrong stride of x backward": "x_ptr + rows[:, None] * {x_stride => num_columns} + cols[None, :], mask=inside, other=0.0).to(tl.float32) d_y",
    "wrong stride of the addend": "rows[:, None] * {addend_stride => num_columns}",
    "wrong stride of the output": "rows[:, None] * {out_stride => num_columns}",
    "written before it is read": (
        "{if HAS_ADDEND: addend = tl.load( => if IN_PLACE:\n            tl.store(out_ptr + rows[:, None] * "
        "out_stride + cols[None, :], 0.0 * d_y, mask=inside)\n        if HAS_ADDEND:\n            addend = "
        "tl.load(}"
    ),
}


def check_with_few_programs(functions):
    with mock.patch.multiple(functions, MAX_PROGRAMS=3):
        check_every_part(functions, device=DEVICE)
        # Four and a half blocks for three programs.
        check_against_truth(functions, 4 * BLOCK_ROWS + BLOCK_ROWS // 2, 130, torch.bfloat16, LLAMA, device=DEVICE)


test_a_planted_fault_is_seen, test_without_a_fault_the_same_check_passes = planted_faults(
    triton, check_with_few_programs, FAULTS
)
