"""Tests of the Triton kernels of expert_gate, interpreted by test_interpreted.py and compiled by tests/gpu."""

import pytest
import torch

from lightning_fastft.kernels.expert_gate import triton
from lightning_fastft.kernels.expert_gate.reference import GateForm
from tests.kernels import test_expert_gate
from tests.kernels.test_expert_gate import (
    CLAMPED,
    DTYPES,
    FORMS,
    check_against_truth,
    check_without_weights,
    fresh_memory_is_nan,
    make_addend,
    make_inputs,
)
from tests.support.kernel_harness import DEVICE, NARROW, far, planted_faults, shared_tests

globals().update(shared_tests(test_expert_gate, triton))
TILE = triton.MAX_BLOCK_COLUMNS
ROWS = (1, triton.BLOCK_ROWS - 1, triton.BLOCK_ROWS, triton.BLOCK_ROWS + 1, 65)
ADDEND_TILE = triton.ADDEND_MAX_BLOCK_COLUMNS
ADDEND_ROWS = triton.ADDEND_BLOCK_ROWS
RANKS = (0, 1, 3, 15, 16, 17, triton.MAX_BLOCK_RANKS, triton.MAX_BLOCK_RANKS + 1, 3 * triton.MAX_BLOCK_RANKS + 5)
COLUMNS = (1, 2, 5, 16, 33, 130, TILE - 1, TILE, TILE + 1, 2 * TILE + 37)
# The interpreter multiplies the bits of bf16 where a kernel multiplies matrices.
PRODUCT_DTYPES = (torch.float32, torch.float16) if DEVICE == "cpu" else DTYPES


@pytest.mark.parametrize("num_columns", COLUMNS)
@pytest.mark.parametrize("form", [GateForm(), CLAMPED])
def test_number_of_columns(num_columns, form):
    check_against_truth(triton, 9, num_columns, NARROW, form, device=DEVICE)


@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize("form", [GateForm(), CLAMPED])
def test_number_of_rows(num_rows, form):
    check_against_truth(triton, num_rows, 33, NARROW, form, device=DEVICE)


@pytest.mark.parametrize("dtype", PRODUCT_DTYPES)
@pytest.mark.parametrize("form", FORMS)
def test_a_low_rank_product_is_added_in_every_form(form, dtype):
    check_against_truth(triton, ADDEND_ROWS + 1, ADDEND_TILE + 5, dtype, form, device=DEVICE, num_ranks=5)
    check_without_weights(triton, ADDEND_ROWS + 1, ADDEND_TILE + 5, dtype, form, device=DEVICE, num_ranks=5)


@pytest.mark.parametrize("dtype", [torch.float32, NARROW])
@pytest.mark.parametrize("num_ranks", RANKS)
def test_number_of_ranks(num_ranks, dtype):
    check_against_truth(triton, 9, 33, dtype, GateForm(), device=DEVICE, num_ranks=num_ranks)


@pytest.mark.parametrize(
    "num_columns", [1, 15, 16, 17, ADDEND_TILE - 1, ADDEND_TILE, ADDEND_TILE + 1, 2 * ADDEND_TILE + 37]
)
@pytest.mark.parametrize("num_rows", [1, ADDEND_ROWS - 1, ADDEND_ROWS, 2 * ADDEND_ROWS + 1])
def test_number_of_rows_and_columns_with_a_low_rank_product(num_rows, num_columns):
    check_against_truth(triton, num_rows, num_columns, NARROW, GateForm(), device=DEVICE, num_ranks=16)
    check_without_weights(triton, num_rows, num_columns, NARROW, GateForm(), device=DEVICE, num_ranks=16)


@pytest.mark.parametrize("num_ranks", [None, 16])
@pytest.mark.parametrize("form", [GateForm(), CLAMPED])
def test_two_runs_are_bit_equal(form, num_ranks):
    d_act_NF, gate_up_NP, weight_N = make_inputs(65, 2 * TILE + 37, torch.bfloat16, form, device=DEVICE)
    addend = make_addend(65, 2 * TILE + 37, num_ranks, torch.bfloat16, device=DEVICE)
    first, second = (
        triton.gate_backward(d_act_NF, gate_up_NP, form=form, weight_N=weight_N, addend=addend, need_act=True)
        for _ in range(2)
    )
    assert all(torch.equal(one, other) for one, other in zip(first, second))


def test_rows_beyond_two_to_the_31_elements_are_reached():
    d_act_NF, gate_up_NP, weight_N = make_inputs(3, 32, torch.bfloat16, CLAMPED, device=DEVICE)
    far_NP = far(gate_up_NP)
    assert torch.equal(triton.gate_forward(far_NP, form=CLAMPED), triton.gate_forward(gate_up_NP, form=CLAMPED))
    expected, found = (
        triton.gate_backward(d_act_NF, rows_NP, form=CLAMPED, weight_N=weight_N) for rows_NP in (gate_up_NP, far_NP)
    )
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[2], expected[2])


FAULTS = {
    "limit on the wrong side of the gate": "tl.where(raw_gate {> => <} limit, limit, raw_gate)",
    "up clamped on one side": "{tl.where(raw_up < -limit, -limit, raw_up) => raw_up}) + 1.0",
    "one not added": "-limit, raw_up)) {+ 1.0 => }",
    "steepness lost": "exponent = gate {* alpha => }",
    "slope of the steepness lost": "exponent_slope = {alpha => 1.0}",
    "cube lost": "(gate + _TANH_CUBE * gate * gate {* gate => })",
    "slope of the cube lost": "(1.0 + {3.0 * => } _TANH_CUBE * gate * gate)",
    "sign of the gate lost": "{tl.where(is_negative, gate * decay, gate) => gate}",
    "sign of the exponent lost": "share = {tl.where(is_negative, smaller, larger) => larger}",
    "gradient beyond the bound": "{tl.where(is_gate_inside, gate_slope, 0.0) => gate_slope}",
    "gradient of up beyond the bound": "{tl.where(is_up_inside, up_slope, 0.0) => up_slope}",
    "gradient on the bound as in another torch": "raw_gate <= limit if{ =>  not} _PASSES_BOUND",
    "gradient of up on its bound as in another torch": "tl.abs(raw_up) <= limit if{ =>  not} _PASSES_BOUND",
    "columns swapped": "{gate, up => up, gate} = tl.split(",
    "gradients of the columns swapped": "tl.interleave({d_gate, d_up => d_up, d_gate}), mask=inside_pairs) else: out_ptrs",
    "halves overlap": "up = tl.load(ptrs + num_columns{ => - 1},",
    "weight not applied": "d_act *= {weight => 1.0}",
    "weight of the first row": "weight_ptr + rows * {weight_stride => 0}",
    "sum of the last tile only": "weight_terms {+ => }= d_act * act",
    "sum of the last tile lost": (
        "weight_terms += {d_act * act => tl.where(start + BLOCK_F < num_columns, d_act * act, 0.0)}"
    ),
    "sum after the weight": (
        "{weight_terms += d_act * act d_act *= weight => d_act *= weight\n            weight_terms += d_act * act}"
    ),
    "sum in the narrow dtype": (
        "weight_terms += {d_act * act => (d_act * act).to(out_ptr.dtype.element_ty).to(tl.float32)}"
    ),
    "fp32 lost": "return glu{ => .to(tl.float16).to(tl.float32)} * factor, gate_slope",
    "last tile not written": "min(begin + columns_per_program, num_columns{ => - BLOCK_F}), BLOCK_F):",
    "every span is the first": "begin = tl.program_id(1) * {columns_per_program => 0}",
    "a span of all columns is one tile": "{num_columns if num_spans == 1 else => } block_columns",
    "last column not written": (
        "tl.store(act_ptrs, act.to(act_ptr.dtype.element_ty), mask=inside{ => & (cols < num_columns - 1)[None, :]})"
    ),
    "columns beyond the last are read as gate": "(cols < 2 * num_columns{ => + 2})[None, :]",
    "sum of the last row not written": "mask={inside_rows => rows < num_rows - 1}) @triton.jit def _gate_forward_quantised_kernel",
    "wrong stride": "end_E[-1:], act_NF, {gate_up_NP.stride(0) => 2 * num_columns},",
    "wrong stride of the gradient": "d_act_ptr + rows * {d_act_stride => num_columns}",
    "low-rank product lost": "d_act += {addend => 0.0}",
    "low-rank product rounded": "d_act += addend{ => .to(out_ptr.dtype.element_ty).to(tl.float32)}",
    "sum with the low-rank product rounded": (
        "d_act {+= addend => = (d_act + addend).to(out_ptr.dtype.element_ty).to(tl.float32)}"
    ),
    "low-rank product of the last ranks only": "tl.trans(low), {product_FN => tl.zeros_like(product_FN)},",
    "low-rank product of the first ranks only": "tl.range(0, {num_ranks => min(num_ranks, BLOCK_R)}, BLOCK_R,",
    "last rank lost": "ranks < num_ranks{ => - 1}",
    "ranks beyond the last are read": "ranks < num_ranks{ => + 1}",
    "factor beyond the last column is read": "& (cols < num_columns{ => + 1})[None, :], other=0.0) product_FN",
    "factor of the first tile": "factor_stride + {cols => tl.arange(0, BLOCK_F)}[None, :]",
    "wrong stride of the factor": "[:, None] * {factor_stride => num_columns}",
    "wrong stride of the low-rank rows": "low_ptr + rows * {low_stride => num_ranks}",
    "sum without the low-rank product": "weight_terms += {d_act => (d_act - (addend if HAS_ADDEND else 0.0))} * act",
}


def check_every_part(functions):
    for form in FORMS:
        check_without_weights(functions, 9, TILE + 5, NARROW, form, device=DEVICE)
    for form in FORMS:
        check_against_truth(functions, 9, TILE + 5, NARROW, form, device=DEVICE)
    for form in (GateForm(), CLAMPED):
        check_against_truth(
            functions,
            ADDEND_ROWS + 1,
            ADDEND_TILE + 5,
            NARROW,
            form,
            device=DEVICE,
            num_ranks=triton.MAX_BLOCK_RANKS + 1,
        )


test_a_planted_fault_is_seen, test_without_a_fault_the_same_check_passes = planted_faults(
    triton, check_every_part, FAULTS
)


@pytest.mark.parametrize("num_owned", [0, 1, 8, 9])
@pytest.mark.parametrize("form", FORMS)
def test_rows_behind_the_last_expert_are_not_written(form, num_owned):
    d_act_NF, gate_up_NP, weight_N = make_inputs(9, 33, torch.bfloat16, form, device=DEVICE)
    end_E = torch.tensor([0, num_owned], dtype=torch.int32, device=DEVICE)
    options = {"form": form, "weight_N": weight_N, "need_act": True}
    with fresh_memory_is_nan():
        act_NF = triton.gate_forward(gate_up_NP, form=form, end_E=end_E)
        ours = triton.gate_backward(d_act_NF, gate_up_NP, end_E=end_E, **options)
    expected = triton.gate_backward(d_act_NF, gate_up_NP, **options)
    for own, whole in zip((act_NF, *ours), (expected[1], *expected)):
        assert torch.equal(own[:num_owned], whole[:num_owned])
        assert own[num_owned:].isnan().all()
