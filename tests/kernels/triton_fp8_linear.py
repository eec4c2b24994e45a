"""Tests of the Triton kernels of fp8_linear, interpreted by test_interpreted.py and compiled by tests/gpu."""

import functools

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter

from lightning_fastft.kernels.fp8_linear import reference, triton
from lightning_fastft.kernels.fp8_linear.reference import FP8
from tests.kernels.test_fp8_linear import (
    check_balance,
    check_nf4,
    check_rows,
    check_rows_both_ways,
    check_transpose,
    make_cases,
    make_operands,
    make_rows,
    write_nf4,
)
from tests.support.kernel_harness import DEVICE, planted_faults

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(autouse=True)
def casts_that_carry(monkeypatch):
    """The interpreter loses the carry where a number is rounded up to the next power of two, and NaN; GPUs and
    torch do not.
    """
    convert = interpreter._convert_float

    def cast(input, input_dtype, output_dtype, rounding_mode):
        if output_dtype != tl.float8e4nv:
            return convert(input, input_dtype, output_dtype, rounding_mode)
        return torch.from_numpy(np.ascontiguousarray(input)).to(FP8).view(torch.uint8).numpy()

    monkeypatch.setattr(interpreter, "_convert_float", cast)


run_nf4 = functools.partial(write_nf4, module=triton)


def run_rows(x_TI, *, factor_I, module=triton, rounds=False):
    return module.quantise_rows(x_TI, factor_I=factor_I, round_scales_to_power_of_2=rounds)


def assert_twin(x_TI, factor_I, *, rounds):
    ours, plain = (run_rows(x_TI, factor_I=factor_I, rounds=rounds, module=module) for module in (triton, reference))
    for one, other in zip(ours, plain):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


# One column, a prime, around a tile, more than one tile.
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("factor_dtype", "rounds"), [(None, False), (None, True), (torch.float32, False), (torch.bfloat16, True)]
)
@pytest.mark.parametrize(
    "num_columns",
    [1, 128, triton.TILE_COLUMNS, 2 * triton.TILE_COLUMNS + 5, triton.MAX_TILES * triton.TILE_COLUMNS + 16],
)
def test_rows(num_columns, factor_dtype, rounds, dtype):
    x_TI, factor_I = make_rows(5, num_columns, dtype, device=DEVICE)
    factor_I = None if factor_dtype is None else factor_I.to(factor_dtype)
    check_rows(functools.partial(run_rows, rounds=rounds), x_TI, factor_I, rounds=rounds)
    assert_twin(x_TI, factor_I, rounds=rounds)


def test_no_rows_and_many_rows():
    assert run_rows(torch.empty(0, 16, device=DEVICE), factor_I=None).values_TI.shape == (0, 16)
    check_rows(run_rows, *make_rows(37, 3, torch.float32, device=DEVICE))


@pytest.mark.parametrize("rounds", [False, True])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_row_that_is_not_finite_stays_alone_and_is_seen(bad, rounds):
    x_TI, _ = make_rows(4, 64, torch.float32, device=DEVICE)
    expected = run_rows(x_TI, factor_I=None, rounds=rounds)
    x_TI[3, 5] = bad
    found = run_rows(x_TI, factor_I=None, rounds=rounds)
    assert torch.equal(found.values_TI[:3].view(torch.uint8), expected.values_TI[:3].view(torch.uint8))
    assert torch.equal(found.scale_T[:3], expected.scale_T[:3])
    assert (found.values_TI[3].float() * found.scale_T[3]).isnan().any()


# Rows around a tile of rows; one block a row, around a chunk of blocks, and more than one.
@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("is_nested", [True, False])
@pytest.mark.parametrize("size", [(1, 1), (63, 2), (64, 1), (129, 3), (2, 33)])
def test_nf4(size, is_nested, is_transposed):
    check_nf4(
        run_nf4, make_cases([(size[0], 64 * size[1])], is_nested=is_nested, device=DEVICE), is_transposed=is_transposed
    )


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("count", [3, triton.MAX_WEIGHTS + 2])
def test_number_of_weights(count, is_transposed):
    sizes = [(130, 128), (3, 128), (1, 128), (64, 128), (66, 128)]
    check_nf4(
        run_nf4,
        make_cases([sizes[place % 5] for place in range(count)], is_nested=True, device=DEVICE),
        is_transposed=is_transposed,
    )


@pytest.mark.parametrize("is_transposed", [False, True])
def test_the_plain_twin_writes_the_same_bits(is_transposed):
    ((weight, _),) = make_cases([(70, 35 * 64)], is_nested=True, device=DEVICE)
    found = []
    for module in (triton, reference):
        values = torch.empty((35 * 64, 70) if is_transposed else (70, 35 * 64), dtype=FP8, device=DEVICE)
        scale_O = torch.empty(70, device=DEVICE)
        write_nf4([weight], values=[values], scales=[scale_O], is_transposed=is_transposed, module=module)
        found.append((values.view(torch.uint8), scale_O))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


# The gradient of a weight.


# Around a tile of both axes and a block of scales; the rows of an operand are a multiple of 16.
@pytest.mark.parametrize("size", [(1, 1), (37, 19), (128, 128), (129, 257), (1025, 3), (3, 1030)])
def test_shifts_and_transposes(size):
    num_rows, num_columns = size
    d, x, factor_O = make_operands(num_rows, num_columns, 16, device=DEVICE)
    check_balance(triton.balance, d, x, factor_O)
    found, plain = (module.balance(d.scale_T, x.scale_T, factor_O) for module in (triton, reference))
    assert all(torch.equal(one, other) for one, other in zip(found, plain))
    num_written = -(-num_rows // 16) * 16
    for shift_T in (None, found.shift_d_T):
        check_transpose(triton.transpose, d.values_TI, shift_T, num_written=num_written)


def test_a_transpose_of_columns_of_wider_rows():
    d, _, _ = make_operands(20, 64, 16, device=DEVICE)
    check_transpose(triton.transpose, d.values_TI[:, 16:48], None, num_written=32)


GRADIENT_FAULTS = {
    "largest exponent of the first block": "range(0, {num_rows => BLOCK}, BLOCK)",
    "half of it left": "_power(exponent - {half => half - half})",
    "outside counts": "of_x = _exponent(tl.load(scale_x_ptr + start + places, mask=held, other={0.0 => 3e38}))",
    "factor twice": "_power(top {- => +} of_factor)",
    "scales of the first block": "places += tl.program_id(0) * BLOCK{ => * 0}",
    "shift of another row": "tl.load(shift_ptr + rows{ => - rows}, mask",
    "not transposed": "{tl.trans(value) => value}",
    "wrong stride": "cols[:, None] * {out_stride => num_rows} + rows",
    "rest not cleared": "(rows < {out_stride => num_rows})[None, :]",
    "last column lost": "(cols < num_columns{ => - 1})[:, None]",
    "rows next to each other": "{values_TI.stride(0) => num_columns},",
    "shift lost": "value = value.to(tl.float8e4nv, bitcast=True).to(tl.float32){ * shift[:, None] => }",
}


def check_every_gradient(module):
    d, x, factor_O = make_operands(1040, 129, 16, device=DEVICE)
    # The largest of all is behind the first block.
    x.scale_T[-1] = 2.0**8 * (d.scale_T * x.scale_T).max() / d.scale_T[-1]
    check_balance(module.balance, d, x, factor_O)
    shift_T = reference.balance(d.scale_T, x.scale_T, factor_O).shift_d_T[:37]
    check_transpose(module.transpose, d.values_TI[:37, 1:], shift_T, num_written=48)


test_a_planted_fault_in_gradients_is_seen, test_in_gradients_the_same_check_passes = planted_faults(
    triton, check_every_gradient, GRADIENT_FAULTS
)

ROW_FAULTS = {
    "peak of the last tile": "peaks = tl.{maximum(peaks, tl.abs(value) => abs(value})",
    "signed peak": "peaks = tl.maximum(peaks, {tl.abs(value) => value})",
    "wrong stride": "values_ptr + row * {num_columns => (num_columns - 1)} + cols",
    "scale upside down": "scale = {tl.div_rn(peak, largest) => peak * LARGEST} inverse",
    "tile before": "tiles[index{ => - 1 if index else 0}], factor_ptr, cols",
    "factors of the first tile": "tiles[index], factor_ptr, {cols => tile_cols},",
    "rounded down": "{0x7FFFFF => 0x0}",
    "inverse of another scale": "{inverse = tl.div_rn(tl.full(peak.shape, 1.0, tl.float32), scale) => pass}",
    "last column lost": "element_ty), mask=cols < num_columns{ => - 1})",
    "rows next to each other": "{x_TI.stride(0) => num_columns},",
    "no least peak": "tl.{maximum(tl.max(peaks, axis=0), LEAST_PEAK => max(peaks, axis=0})",
}


def check_every_row(module):
    check_rows_both_ways(module.quantise_rows, *make_rows(5, triton.TILE_COLUMNS + 5, torch.float32, device=DEVICE))


test_a_planted_fault_in_rows_is_seen, test_in_rows_the_same_check_passes = planted_faults(
    triton, check_every_row, ROW_FAULTS
)

NF4_FAULTS = {
    "low half first": "tl.interleave({first, second => second, first})",
    "one half twice": "(pair {& 15 => >> 4})",
    "peak of the last chunk": "peak = tl.maximum({peak => 0.0}, tl.max(tl.where(held",
    "scale of another row": "rows * {NUM_BLOCKS => 0} + place",
    "last chunk lost": "tl.program_id(1){ => * 0},",
    "first chunk twice": "places = {start + => } tl.arange(0, CHUNK)",
    "signed scales": "{tl.abs(scale) => -scale}, 0.0), axis=1",
    "scales not inverted": "inverse = {tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale) => scale}",
    "never transposed": "values_stride + rows[:, None] if{ =>  not} IS_TRANSPOSED",
    "lost mask": "cell, value{, mask=inside[:, None] => }",
    "lost mask of scales": "LARGEST, tl.float32))){, mask=inside => })",
    "stride of the first weight": "scales[{index => 0}], num_rows[index]",
    "a weight starts one tile late": "tile -= num_tiles{ => + 1}",
    "last tile of a weight lost": "(tile < num_tiles{ => - 1})",
    "fifth weight lost": "range(0, {len(filled) => MAX_WEIGHTS}, MAX_WEIGHTS)",
    "outside counts": "tl.where(held, tl.abs(scale), {0 => 100}.0)",
}


# What the worst of them writes beside its output.
MARGIN = 2**24


def check_every_weight(module):
    sizes = [(130, 35 * 64), (5, 35 * 64), (64, 35 * 64), (1, 35 * 64), (2, 35 * 64)]
    for is_transposed in (False, True):
        run, cases = functools.partial(write_nf4, module=module), make_cases(sizes, is_nested=True, device=DEVICE)
        check_nf4(run, cases, is_transposed=is_transposed, num_extra=64, margin=MARGIN)


test_a_planted_fault_in_nf4_is_seen, test_in_nf4_the_same_check_passes = planted_faults(
    triton, check_every_weight, NF4_FAULTS
)
