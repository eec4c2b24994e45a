"""Tests of the Triton kernels of fp8_linear, interpreted by test_interpreted.py and compiled by tests/gpu."""

import functools

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter

from lightning_fastft.kernels.expert_gate import triton as expert_gate
from lightning_fastft.kernels.expert_gate.reference import GateForm
from lightning_fastft.kernels.fp8_linear import reference, triton
from lightning_fastft.kernels.fp8_linear.reference import FP8
from lightning_fastft.kernels.rms_norm import triton as rms_norm
from lightning_fastft.kernels.rms_norm.reference import NormForm
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
ROUNDINGS = ((torch.float32, False), (torch.bfloat16, True), (torch.float16, True))
NORMS = (NormForm(), NormForm(eps=1e-5, weight_offset=1.0, is_weight_wide=True))
GATES = (
    GateForm(),
    GateForm(is_interleaved=True, activation="clamped", limit=7.0, alpha=1.702),
    GateForm(activation="gelu_tanh"),
)


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
    for shift_T in (None, found[0]):
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
    "rest not cleared": "(rows < {num_written => num_rows})[None, :]",
    "last column lost": "(cols < num_columns{ => - 1})[:, None]",
    "rows next to each other": "{values_TI.stride(0) => num_columns},",
    "shift lost": "value = value.to(tl.float8e4nv, bitcast=True).to(tl.float32){ * shift[:, None] => }",
}


def check_every_gradient(module):
    d, x, factor_O = make_operands(1040, 129, 16, device=DEVICE)
    # The largest of all is behind the first block.
    x.scale_T[-1] = 2.0**8 * (d.scale_T * x.scale_T).max() / d.scale_T[-1]
    check_balance(module.balance, d, x, factor_O)
    shift_T = reference.balance(d.scale_T, x.scale_T, factor_O)[0][:37]
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
    "no least peak": "peak = {tl.maximum(peak, LEAST_PEAK) => peak} largest",
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


# Kernels that quantise what they compute.


def assert_same_rows(found, expected):
    for one, other in zip(found, expected):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


# One column, several rows of a program, and a row alone; rows with a larger stride.
@pytest.mark.parametrize(("dtype", "rounds"), ROUNDINGS)
@pytest.mark.parametrize("form", NORMS)
@pytest.mark.parametrize("size", [(0, 8), (3, 1), (37, 130), (5, 2100)])
def test_a_norm_is_quantised_as_its_rows_are(size, form, rounds, dtype):
    check_norm(rms_norm, size=size, form=form, rounds=rounds, dtype=dtype)


def check_norm(module, *, size=(37, 130), form=NORMS[0], rounds=True, dtype=torch.bfloat16):
    x_TD = (torch.randn(size[0], size[1] + 3) * 10.0 ** torch.randn(size[0], 1)).to(dtype).to(DEVICE)[:, : size[1]]
    weight_D = torch.randn(size[1]).to(dtype).to(DEVICE)
    found = module.rms_norm_quantised(x_TD, weight_D, form=form, round_scales_to_power_of_2=rounds)
    rows_TD = rms_norm.rms_norm_forward(x_TD, weight_D, form=form)
    assert_same_rows(found, run_rows(rows_TD, factor_I=None, rounds=rounds))


# One column, around a tile, more than one; tiles twice as large.
@pytest.mark.parametrize(("dtype", "rounds"), ROUNDINGS)
@pytest.mark.parametrize("form", GATES)
@pytest.mark.parametrize("num_columns", [1, 48, triton.TILE_COLUMNS, expert_gate.WALK_COLUMNS + 5])
def test_a_gate_and_its_gradients_are_quantised_as_their_rows_are(num_columns, form, rounds, dtype):
    check_gate(expert_gate, num_columns=num_columns, form=form, rounds=rounds, dtype=dtype)


def test_a_gate_of_the_widest_rows_and_of_none():
    check_gate(expert_gate, num_columns=triton.MAX_TILES * triton.TILE_COLUMNS + 16, num_rows=2)
    check_gate(expert_gate, num_rows=0)


def check_gate(module, *, num_columns=4100, num_rows=3, form=GATES[0], rounds=True, dtype=torch.bfloat16):
    gate_up_NP = (3 * torch.randn(num_rows, 2 * num_columns + 3)).to(dtype).to(DEVICE)[:, : 2 * num_columns]
    d_act_NF = torch.randn(num_rows, num_columns + 1).to(dtype).to(DEVICE)[:, :num_columns]
    factor_P = (2.0 ** torch.randint(-9, -3, (2 * num_columns,))).bfloat16().to(DEVICE)
    if num_rows > 1:
        # The largest numbers of a row are its last ones.
        gate_up_NP[0, -1], gate_up_NP[0, num_columns - 1], d_act_NF[0, -1] = -60.0, 50.0, 40.0
    options = {"form": form, "round_scales_to_power_of_2": rounds}
    act_NF = expert_gate.gate_forward(gate_up_NP, form=form)
    assert_same_rows(
        module.gate_forward_quantised(gate_up_NP, **options), run_rows(act_NF, factor_I=None, rounds=rounds)
    )
    apart = expert_gate.gate_backward(d_act_NF, gate_up_NP, form=form, need_act=True)
    for need_act in (True, False):
        d_gate_up, act = module.gate_backward_quantised(
            d_act_NF, gate_up_NP, factor_P=factor_P, need_act=need_act, **options
        )
        assert_same_rows(d_gate_up, run_rows(apart[0], factor_I=factor_P, rounds=rounds))
        if need_act:
            assert_same_rows(act, run_rows(apart[1], factor_I=None, rounds=rounds))
        else:
            assert act is None


def check_every_gate(module):
    for form in GATES[:2]:
        check_gate(module, form=form)


NORM_FAULTS = {
    "not rounded before": "y = (normed * weight[None, :]){.to(x_ptr.dtype.element_ty) => } if IS_QUANTISED",
    "signed peak": "row_scale(tl.max({tl.abs(y) => y}, axis=1)",
    "scale of another row": "tl.store(scale_ptr + rows{ => - rows}, scale",
    "inverse lost": "(y{ * inverse[:, None] => }).to(y_ptr",
    "scales not rounded": "ROUND_SCALES={round_scales => False},",
}
GATE_FAULTS = {
    "not rounded before": "act = act.to({gate_up_ptr.dtype.element_ty => tl.float32}) peaks",
    "signed peak": "peaks = tl.maximum(peaks, {tl.abs(act.to(tl.float32)) => act.to(tl.float32)})",
    "tile before": "(tiles[index{ => - 1 if index else 0}].to(tl.float32) * inverse",
    "gradient not rounded": "d_gate = (d_act * gate_slope){.to(dtype) => }.to(tl.float32)",
    "factor of gate for up": "up_factor_ptr = gate_factor_ptr + {num_columns => 0}",
    "factor of the next gate": "up_factor_ptr = gate_factor_ptr + {1 => 2}",
    "peak without up": "tl.maximum(tl.abs(d_gate), {tl.abs(d_up) => 0.0})",
    "peaks of the first tile": "peaks = tl.maximum({peaks, tl.abs(act) => tl.where(start > 0, 0.0, peaks), tl.abs(act)})",
    "scale of the activation": "d_gate = (d_gate * {d_inverse => inverse}[:, None])",
    "first tile twice": "cols = {start => 0} + tl.arange(0, TILE) inside = (cols < num_columns)[None, :] d_gate = (d_gate",
    "pairs the wrong way": "tl.interleave({d_gate, d_up => d_up, d_gate}), mask=inside_pairs) else: d_values",
    "rows next to each other": "{d_act_NF.stride(0) => num_columns}, gate_up_NP.stride(0), num_columns, float",
}
test_a_planted_fault_in_a_norm_is_seen, test_in_a_norm_the_same_check_passes = planted_faults(
    rms_norm, check_norm, NORM_FAULTS
)
test_a_planted_fault_in_a_gate_is_seen, test_in_a_gate_the_same_check_passes = planted_faults(
    expert_gate, check_every_gate, GATE_FAULTS
)
