"""Tests of the Triton kernels of qk_rope, interpreted by test_interpreted.py and compiled by tests/gpu."""

from unittest import mock

import pytest
import torch

from lightning_fastft.kernels.qk_rope import triton
from lightning_fastft.kernels.qk_rope.reference import Rope
from tests.kernels import test_qk_rope
from tests.kernels.test_qk_rope import (
    FORMS,
    LLAMA,
    PARTIAL,
    QWEN3,
    SHARED_FORMS,
    check_against_truth,
    check_gates,
    check_rows_of_nan_stay_alone,
    check_shares,
    check_without_eps,
    make_inputs,
    run_ours,
    split_heads,
)
from tests.support.kernel_harness import DEVICE, NARROW, planted_faults, shared_tests

globals().update(shared_tests(test_qk_rope, triton))


def small_tiles(module, *, num_programs=3, num_values=1):
    """Every loop of the kernels makes more than one step, although the tensors are tiny; with one value a tile is
    one head.
    """
    tiles = {"MAX_TILE": num_values, "MAX_TILE_BACKWARD": num_values}
    return mock.patch.multiple(module, MAX_PARTIALS=num_programs, BLOCK_PARTIALS=2, BLOCK_COPY=16, **tiles)


# Tiles of 64 values and every form: the check that planted faults must fail, which passes without one.
@pytest.mark.parametrize("num_values", [1, pytest.param(64, marks=pytest.mark.fault)])
@pytest.mark.parametrize("form", FORMS)
def test_more_heads_than_a_tile_and_more_tokens_than_programs(form, num_values):
    with small_tiles(triton, num_values=num_values):
        check_against_truth(triton, 4, form, NARROW, device=DEVICE)


@pytest.mark.parametrize("form", FORMS)
def test_gates_stay_as_they_are(form):
    with small_tiles(triton):
        check_gates(triton, 2, form, NARROW, device=DEVICE)


@pytest.mark.parametrize("form", SHARED_FORMS)
def test_shares_with_small_tiles(form):
    with small_tiles(triton):
        check_shares(triton, 2, form, NARROW, device=DEVICE)


@pytest.mark.parametrize("form", FORMS)
def test_rows_of_nan_stay_alone(form):
    with small_tiles(triton, num_values=64):
        check_rows_of_nan_stay_alone(triton, form, NARROW, device=DEVICE)


@pytest.mark.parametrize("form", FORMS)
def test_two_runs_are_bit_equal(form):
    inputs = make_inputs(4, form, NARROW, device=DEVICE)
    first, second = (run_ours(triton, inputs, form) for _ in range(2))
    assert all(one is other is None or torch.equal(one, other) for one, other in zip(first, second))


def test_rows_beyond_two_to_the_31_elements_are_reached():
    # Three rows, of which the last one begins where 32 bits of elements end; on a CPU one page of each is real, the
    # rest is a hole.
    inputs = make_inputs(3, QWEN3, torch.bfloat16, device=DEVICE)
    buffer = torch.empty(2**31 + QWEN3.num_columns, dtype=torch.bfloat16, device=DEVICE)
    expected = run_ours(triton, inputs, QWEN3)
    for place in range(4):
        far = buffer.as_strided(inputs[place].shape, (2**30, 1))
        far.copy_(inputs[place])
        far_inputs = (*inputs[:place], far, *inputs[place + 1 :])
        ours = run_ours(triton, far_inputs, QWEN3)
        assert all(torch.equal(one, other) for one, other in zip(ours, expected))
    form = QWEN3._replace(has_gate=True)
    rows_TC = torch.randn(3, form.num_columns, device=DEVICE).to(torch.bfloat16)
    buffer = torch.empty(2**31 + form.num_columns, dtype=torch.bfloat16, device=DEVICE)
    far, near = buffer.as_strided(rows_TC.shape, (2**30, 1)), torch.zeros_like(rows_TC)
    far.zero_()
    for out in (far, near):
        triton.qk_rope_backward(
            split_heads(inputs[0], QWEN3), rows_TC, Rope(*inputs[2:], form), needs_weight=False, out=out
        )
    assert torch.equal(far, near)


FAULTS = {
    "turned the wrong way": "tl.fma(first, cos_first, {-(second * sin_first) => second * sin_first})",
    "second column turned by the first one's angle": (
        "tl.fma(second, {cos_second, first * sin_second => cos_first, first * sin_first})"
    ),
    "gradient turned like the values": "cos_second, {-( => }rotated_first * sin_first{) => }",
    "gradient turned by the other column's angle": (
        "tl.fma(rotated_first, cos_first, rotated_second * {sin_second => sin_first})"
    ),
    "second half of the angles read by neighbours": "if {not FORM.is_interleaved => True}:",
    "first half of the angles read by halves": "row_ptr + {FORM.rotary_width // 2 + => } cols",
    "neighbours swapped": "{first, second => second, first} = tl.split(",
    "results of neighbours swapped": "tl.interleave({first, second => second, first})",
    "halves overlap": "second = tl.load(ptrs + FORM.rotary_width // 2{ => - 1},",
    "half of the results one column early": "tl.store(ptrs + FORM.rotary_width // 2{ => - 1}, second",
    "columns beyond the last pair are read": (
        "(cols < FORM.rotary_width // 2{ => + 1})[None, :] ptrs = row_ptrs[:, None] + cols[None, :] first"
    ),
    "last pair not written": "(cols < FORM.rotary_width{ => - 2})[None, :] tl.store",
    "last half column not written": "tl.store(ptrs, first, mask=inside{ => & (cols < FORM.rotary_width // 2 - 1)[None, :]})",
    "columns that are not rotated are not written": (
        "{tl.store(row_ptrs[:, None] + cols[None, :], rest.to(row_ptrs.dtype.element_ty), mask=inside) => pass}"
    ),
    "last column that is not rotated is lost": "(cols < FORM.head_width{ => - 1})[None, :] rest =",
    "next head's columns are read as not rotated": "(cols < FORM.head_width{ => + 1})[None, :] rest =",
    "mean without the columns that are not rotated": "total += {tl.sum(rest_terms, axis=1) => 0.0}",
    "mean over the padded head": "return total * (1.0 / {FORM.head_width => (pair_terms.shape[1] * 2)})",
    "eps lost": "{+ FORM.eps => })",
    "heads beyond the last one divide by zero": (
        "{tl.where(inside_heads, => } tl.div_rn(tl.full(root.shape, 1.0, tl.float32), root){, 0.0) => }"
    ),
    "not rounded before the weight": "values = values{.to(dtype).to(tl.float32) => }",
    "always rounded before the weight": "if {not IS_WEIGHT_WIDE => True}:",
    "offset of the weight lost": "return first {+ FORM.weight_offset => }, second",
    "offset of the weight that is not rotated lost": "second + FORM.weight_offset, rest {+ FORM.weight_offset => }",
    "weight of k is q's": "k_in_ptr, k_out_ptr, {k_weight_ptr => q_weight_ptr}, angles",
    "keys of one token": "k_out_ptr += {token => 0} * k_out_stride",
    "values of one token": "v_out_ptr {+ token * v_out_stride => }",
    "weight of k is q's in the gradient": "k_in_ptr, k_out_ptr, {k_weight_ptr => q_weight_ptr}, (k_first",
    "weight not applied to the gradient": "d_first *= {weight_first => 1.0}",
    "weight not applied to the gradient that is not rotated": "d_rest *= {weight_rest => 1.0}",
    "gradient without the norm's mean": "d_second = scale * {(d_second - second * mean) => d_second}",
    "gradient without the norm's scale": "d_first = {scale * ( => }d_first - first * mean{) => }",
    "gradient's mean lost where nothing is rotated": "d_rest = scale * {(d_rest - rest * mean) => d_rest}",
    "weight's gradient of the last tile only": "first_terms {+ => }= d_first * first",
    "weight's gradient after the weight": "second_terms += d_second * second{ => * weight_second}",
    "weight's gradient that is not rotated lost": "rest_terms += {d_rest * rest => 0.0}",
    "sum in the narrow dtype": (
        "second_terms += {d_second * second => (d_second * second).to(in_ptr.dtype.element_ty).to(tl.float32)}"
    ),
    "last tile of heads lost": (
        "out_heads = out_ptr + heads * FORM.head_width{ => \n        inside_heads = inside_heads & (start + BLOCK_H "
        "<= NUM_HEADS)} first, second, rest"
    ),
    "first of a program's tokens only": "token += {tl.num_programs(0) => num_tokens}",
    "k's sum written over q's": "_store_partial(q_partial_ptr {+ FORM.head_width => }, k_first",
    "last partial sum lost": "inside = (rows < num_partials{ => - 1})[:, None]",
    "last partial sums only": "terms {+ => }= tl.load(",
    "last column of the sum lost": "tl.sum(terms, axis=0), mask=cols < num_columns{ => - 1})",
    "values not copied": "{_copy_columns(k_in_ptr => (k_in_ptr}",
    "values of the gradient not copied": "else: {_copy_columns(d_v_ptr => (d_v_ptr}",
    "last tile of values not copied": (
        "for start in range(0, NUM_COLUMNS{ => - BLOCK}, BLOCK): cols = start + tl.arange(0, BLOCK) tl.store"
    ),
    "last tile of values not added": (
        "for start in range(0, NUM_COLUMNS{ => - BLOCK}, BLOCK): cols = start + tl.arange(0, BLOCK) inside"
    ),
    "last value not copied": (
        "tl.store(out_ptr + cols, tl.load(in_ptr + cols, mask=cols < NUM_COLUMNS{ => - 1}), mask=cols < "
        "NUM_COLUMNS{ => - 1})"
    ),
    "wrong stride": "{qkv_TC.stride(0) => form.num_columns},",
    "wrong stride of cos": "*heads, qkv_TC.stride(0), {cos_TW.stride(0) => form.num_rotated},",
    "wrong stride of the gradient": "{d_q.stride(0) => form.num_columns},",
    "wrong stride of the raw rows": "{raw_TC.stride(0) => form.num_columns},",
    "wrong stride of the output": "{out_TC.stride(0) => form.num_columns}, num_tokens,",
    "first share of the first columns only": "{rotated_first += share_first => }",
    "first share of the second columns only": "{rotated_second += share_second => }",
    "first share of the rest only": "d_rest {+= => = d_rest + 0.0 *} share_rest",
    "shares of other heads": "d_heads = d_ptr + heads * {(NUM_SHARES * FORM.head_width) => FORM.head_width}",
    "shares of other values": "cols {// HEAD_WIDTH * (NUM_SHARES * HEAD_WIDTH) + cols % HEAD_WIDTH => }",
    "first share of the values only": (
        "total += {tl.load(ptrs + share * HEAD_WIDTH => 0.0 * tl.load(ptrs}, mask=inside)"
    ),
    "wrong stride of the keys' gradient": "{d_k.stride(0) => d_q.stride(0) + 1},",
    "wrong stride of the values' gradient": "{d_v.stride(0) => d_q.stride(0) + 1},",
    "fp32 lost": "return first.to(tl.float32), second.to(tl.float32){ => .to(tl.float16)}",
    "gates read as queries": "in_heads = in_ptr + heads * {IN_STEP => FORM.head_width}",
    "gradient of queries over the gates": "out_heads = out_ptr + heads * {RAW_STEP => FORM.head_width}",
}


def check_every_part(functions):
    for form in (LLAMA, SHARED_FORMS[4]):
        check_shares(functions, 2, form, NARROW, device=DEVICE)
    check_against_truth(functions, 2, QWEN3, torch.float32, device=DEVICE)
    check_without_eps(functions, device=DEVICE)
    for form in FORMS:
        with small_tiles(functions, num_values=64):
            check_against_truth(functions, 4, form, NARROW, device=DEVICE)
    for form in (LLAMA, PARTIAL):
        check_gates(functions, 2, form, NARROW, device=DEVICE)


test_a_planted_fault_is_seen, test_without_a_fault_the_same_check_passes = planted_faults(
    triton, check_every_part, FAULTS
)
