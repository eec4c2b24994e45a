"""Tests of the Triton kernel of AdamW in 8 bits, run in a process of their own: TRITON_INTERPRET must be set before
Triton is first imported.

``test_adamw_8bit.py`` runs them in the interpreter, ``tests/gpu/test_adamw_step_gpu.py`` on the device.
"""

import pytest
import torch

from lightning_fastft.kernels.adamw_step import triton
from lightning_fastft.kernels.adamw_step.codes import BLOCK
from lightning_fastft.kernels.adamw_step.table import CHUNK
from tests.kernels.test_adamw_8bit import (
    CHANGES,
    COMBINATIONS,
    OPTIONS,
    check_every_part,
    check_step,
    make_rows,
    make_table,
)
from tests.kernels.test_adamw_rounding import check_rounding
from tests.support.children import thinned
from tests.support.kernel_harness import DEVICE, planted_faults


@pytest.fixture(autouse=True)
def _no_graph():
    with torch.no_grad():
        yield


@pytest.mark.parametrize(
    ("combination", "offset"),
    thinned(COMBINATIONS, (0, 1), keep=lambda combination, offset: (combination + offset) % 2),
)
def test_each_combination_of_dtypes_equals_the_truth(combination, offset):
    check_step(triton, (combination,), offset=offset, device=DEVICE)


@pytest.mark.parametrize("combination", COMBINATIONS)
def test_tensors_that_vectors_fit_equal_the_truth(combination):
    check_step(triton, (combination,), sizes=(16, CHUNK + 16, 5 * BLOCK), offset=0, device=DEVICE)


@pytest.mark.parametrize(
    ("change", "scale"), thinned(CHANGES, (None, 0.37), keep=lambda change, scale: (change + scale) % 2)
)
def test_other_options(change, scale):
    check_step(triton, options=OPTIONS._replace(**change), scale=scale, sizes=(300, 7, CHUNK + 37), device=DEVICE)


def test_stochastic_rounding_equals_the_twin():
    check_rounding(triton, is_8bit=True, device=DEVICE)


def test_two_runs_are_bit_equal():
    runs = []
    for _ in range(2):
        torch.manual_seed(6)
        runs.append(make_rows(device=DEVICE))
        triton.adamw_step(make_table(runs[-1]), options=OPTIONS, scale=torch.tensor(0.3, device=DEVICE))
    assert all(
        one is None or torch.equal(one, other) for row, twin in zip(*runs) for one, other in zip(row[:6], twin[:6])
    )


def test_autograd_learns_of_every_write():
    rows = make_rows(device=DEVICE)
    before = [[None if tensor is None else tensor._version for tensor in row] for row in rows]
    triton.adamw_step(make_table(rows), options=OPTIONS)
    for row, old in zip(rows, before):
        has_grad = row.owner.grad is not None
        found = [None if tensor is None else tensor._version for tensor in row]
        assert found == [
            None if version is None else version + (has_grad and place < 6) for place, version in enumerate(old)
        ]


ROUNDING_FAULTS = {
    "element lost": "first = tl.load(place_ptr + _FIRST * num_rows) {+ start => }",
    "first element lost": "first = {tl.load(place_ptr + _FIRST * num_rows) => tl.zeros((), tl.int64)} + start",
    "number lost": "number = zero {+ tl.load(place_ptr + _NUMBER * num_rows).to(tl.uint32) => }",
    "step lost": "{zero + step.to(tl.uint32) => zero}, number, zero)",
    "skipped steps counted": (
        "{step -= tl.load(number_ptr + 2).to(tl.int32) => } if IS_ALIGNED: num_readable = tl.multiple_of"
    ),
    "words out of order": "tl.join(tl.join(one, {three => two}), tl.join({two => three}, four))",
    "high half first": "tl.join({words & 0xFFFF, words >> 16 => words >> 16, words & 0xFFFF})",
    "never outward": "values.to(tl.uint32, bitcast=True) {+ noise => }",
    "seed cut": "options.rounding_seed {or 0 => % 2**32}",
}


FAULTS = {
    "bias correction of squares lost": "{(1.0 / root_correction) => 1.0}",
    "root lost": "{tl.sqrt(square) => square} * (1.0",
    "eps lost": "(1.0 / root_correction) {+ eps => }",
    "decay lost": "param -= {decay * param + => } rate * (avg",
    "average lost": "avg = {beta1 * avg + grad_share * => } grad",
    "betas of the average for squares": "square = {beta2 => beta1} * square + square_share * grad * grad param",
    "scale lost": (
        "square *= tl.load(square_absmax_ptrs, mask=is_block, other=0.0)[:, None] if HAS_SCALE: grad *= "
        "{tl.load(scale_ptr) => 1.0}"
    ),
    "largest value instead of magnitude": "tl.max({tl.abs(avg) => avg}, axis=1)",
    "old magnitude of the average": "{tl.store(avg_absmax_ptrs, avg_absmax, mask=is_block) => }",
    "old magnitude of the squares": "{tl.store(square_absmax_ptrs, square_absmax, mask=is_block) => }",
    "magnitude not taken": "{avg *= tl.load(avg_absmax_ptrs, mask=is_block, other=0.0)[:, None] => }",
    "magnitude of the average for squares": "square *= tl.load({square_absmax_ptrs => avg_absmax_ptrs}",
    "magnitudes of the first tensor": "tl.load({place_ptr => address_ptr} + _EXP_AVG_ABSMAX * num_rows)",
    "magnitudes of the first chunk": "tl.pointer_type(tl.float32)) + {start // _WIDTH + => } blocks ) grad_ptrs",
    "signed map for squares": "tl.load(table_ptr + {_TABLE_WIDTH + => } tl.load(square_ptrs",
    "sign lost": "tl.where(values < 0.0, _ZERO {- tl.minimum(place, _ZERO) => + place}, _ZERO + place)",
    "a negative 1": "_ZERO - {tl.minimum(place, _ZERO) => place}",
    "highest zone lost": "tl.where(is_high, {T8 => 2.0}, T6)",
    "zone too low": "tl.where(is_high, {T4 => T5}, T2)",
    "first zone lost": "+ (size >= {T1 => 0.0}).to(tl.int32)",
    "cell of the next zone": "return {tl.minimum(place, end - 1) => place}",
    "rounded instead of cut": "* (4.0 / 9.0){ => + 0.5}).to(tl.int32)",
    "slopes of the signed map": "table_ptr {+ _TABLE_WIDTH => } + _NUM_CODES, 2)",
    "places from 0": "{(tl.maximum(place, 1) - 1 => tl.minimum(place, 255})",
    "last blocks lost": "grid = (num_chunks, CHUNK // (NUM_BLOCKS * codes.BLOCK){ => - 1})",
    "blocks of the first program": "* CHUNK {+ tl.program_id(1) * (NUM_BLOCKS * _WIDTH) => }",
    "mask lost": "inside = offs < num_left{ => + _WIDTH * (num_left > 0)}",
    "last element lost": "inside = offs < num_left{ => - 1}",
    "last block's magnitude lost": "is_block = {blocks * _WIDTH < => (blocks + 1) * _WIDTH <=} num_left",
    "master not written": "{tl.store(param_ptrs, rounded, mask=inside) => } tl.store(avg_ptrs, _encode",
    "flag not read": "num_readable = {tl.where(tl.load(found_inf_ptr) == 0.0, num_readable, 0) => num_readable * 1}",
    "NaN in the flag taken for a step": (
        "num_readable = tl.where(tl.load(found_inf_ptr) {== 0 => != 1}.0, num_readable, 0)"
    ),
}


test_a_planted_fault_is_seen, test_without_a_fault_the_same_check_passes = planted_faults(
    triton, lambda module: check_every_part(module, device=DEVICE), FAULTS
)
test_a_planted_fault_of_rounding_is_seen, _ = planted_faults(
    triton, lambda module: check_rounding(module, is_8bit=True, device=DEVICE), ROUNDING_FAULTS
)
