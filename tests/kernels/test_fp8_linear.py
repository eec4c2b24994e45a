"""Rows, weights and products in e4m3: the plain twin against float64, what is refused, and the kernels in the
interpreter and by the compiler.
"""

import functools
import math

import pytest
import torch

from lightning_fastft.core.errors import OptionError, ShapeError
from lightning_fastft.kernels.fp8_linear import op, reference
from lightning_fastft.kernels.fp8_linear.op import (
    find_obstacle,
    multiply,
    nf4_row_scales,
    quantise_nf4,
    quantise_rows,
    transpose,
    weight_gradient,
)
from lightning_fastft.kernels.fp8_linear.reference import FP8, Fp8Rows
from lightning_fastft.kernels.nf4_linear.op import read_params4bit
from lightning_fastft.kernels.nf4_linear.reference import NF4Weight
from tests.kernels.test_nf4_linear import make_truth
from tests.support.kernel_harness import planted_faults
from tests.support.nf4_stacks import guarded
from tests.support.nf4_weights import dequantise
from tests.support.truth import Watch, poisoned

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CPU = torch.device("cpu")
# Half a step of e4m3: normal numbers have three bits behind the point, and below 2^-6 of 448 / 2^15 steps are equal.
HALF_STEP, LEAST_STEP = 2.0**-4, 2.0**-10


def make_rows(num_rows, num_columns, dtype, *, device="cpu", seed=0):
    """Rows of very different sizes, with outliers, a row of zeros and one of numbers too small to be scaled."""
    generator = torch.Generator().manual_seed(seed)
    x_TI = torch.randn(num_rows, num_columns, generator=generator) * torch.exp(
        2 * torch.randn(num_rows, 1, generator=generator)
    )
    x_TI[:, num_columns // 2] *= 30
    if num_rows > 2:
        x_TI[1], x_TI[2] = 0.0, 1e-38
    factor_I = torch.exp(torch.randn(num_columns, generator=generator))
    return poisoned(x_TI.to(dtype)).to(device) if device == "cpu" else poisoned(x_TI.to(dtype).to(device)), factor_I.to(
        device
    )


def check_rows(run, x_TI, factor_I, *, rounds=False):
    """Twice, bit-equal: scales are the largest number over 448, or the next power of 2, and each number is the
    nearest in e4m3.
    """
    first, second = run(x_TI, factor_I=factor_I), run(x_TI, factor_I=factor_I)
    assert all(torch.equal(one.view(torch.uint8), two.view(torch.uint8)) for one, two in zip(first, second))
    values_TI, scale_T = (each.cpu() for each in first)
    assert values_TI.dtype is FP8
    assert values_TI.is_contiguous()
    true_TI = x_TI.cpu().double() * (1.0 if factor_I is None else factor_I.cpu().double())
    peak_T = true_TI.abs().amax(1).clamp(min=reference.LEAST_PEAK)
    expected_T = (peak_T / 448).log2().ceil().exp2() if rounds else peak_T / 448
    assert torch.allclose(scale_T.double(), expected_T, rtol=0.0 if rounds else 1e-6, atol=0.0)
    # The true number on the grid of its row, and half a step there.
    on_grid = true_TI / scale_T.double()[:, None]
    half_step = on_grid.abs().clamp(min=1e-30).log2().floor().exp2() * HALF_STEP
    error = (values_TI.double() - on_grid).abs()
    assert (error <= half_step.clamp(min=LEAST_STEP) * (1 + 1e-5)).all(), error.max()
    largest_T = values_TI.float().abs().amax(1)
    assert (
        ((largest_T >= 224) & (largest_T <= 448) if rounds else largest_T == 448) | (peak_T <= reference.LEAST_PEAK)
    ).all()


def check_rows_both_ways(run, x_TI, factor_I):
    for rounds in (False, True):
        check_rows(functools.partial(run, round_scales_to_power_of_2=rounds), x_TI, factor_I, rounds=rounds)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_factor", [False, True])
@pytest.mark.parametrize("rounds", [False, True])
@pytest.mark.parametrize("size", [(0, 16), (1, 1), (3, 7), (5, 64), (17, 129)])
def test_rows_are_rounded_to_the_nearest_number_of_their_grid(size, rounds, has_factor, dtype):
    x_TI, factor_I = make_rows(*size, dtype)
    run = functools.partial(quantise_rows, round_scales_to_power_of_2=rounds)
    check_rows(run, x_TI, factor_I if has_factor else None, rounds=rounds)


@pytest.mark.parametrize("peak", [448.0, 448.0 * 2**-20, 449.0, 447.0, 224.0, 1.0, 3e-30, 3e38])
def test_a_power_of_2_stays_and_others_become_the_next(peak):
    scale = quantise_rows(torch.tensor([[peak, 0.0]]), round_scales_to_power_of_2=True).scale_T.double().item()
    assert math.log2(scale) % 1 == 0
    assert scale / 2 < max(peak, reference.LEAST_PEAK) / 448 <= scale


def test_factors_in_bf16_are_those_in_fp32_where_they_are_powers_of_2():
    x_TI, factor_I = make_rows(5, 64, torch.bfloat16)
    powers_I = factor_I.log2().ceil().exp2()
    found, expected = (quantise_rows(x_TI, factor_I=powers_I.to(dtype)) for dtype in (torch.bfloat16, torch.float32))
    assert torch.equal(found.values_TI.view(torch.uint8), expected.values_TI.view(torch.uint8))
    assert torch.equal(found.scale_T, expected.scale_T)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_row_that_is_not_finite_stays_alone_and_is_seen(bad):
    x_TI, _ = make_rows(4, 64, torch.bfloat16)
    weight = quantise_rows(torch.randn(32, 64))
    expected = multiply(quantise_rows(x_TI), weight.values_TI, weight.scale_T, dtype=torch.bfloat16)
    x_TI[3, 5] = bad
    found = multiply(quantise_rows(x_TI), weight.values_TI, weight.scale_T, dtype=torch.bfloat16)
    assert torch.equal(found[:3], expected[:3])
    assert found[3].isnan().all()


def test_gradients_in_e4m3_are_nearer_than_in_e5m2():
    """What the choice of the format of gradients rests on; the figures of op.py."""
    generator = torch.Generator().manual_seed(0)
    weight_OI = torch.randn(512, 256, generator=generator) * torch.exp(0.5 * torch.randn(512, 1, generator=generator))
    d_TO = torch.randn(300, 512, generator=generator)
    weight = quantise_rows(weight_OI, round_scales_to_power_of_2=True)
    turned_IO = weight.values_TI.T.contiguous()
    truth = d_TO.double() @ weight_OI.double()
    scaled_TO = d_TO * weight.scale_T
    peak_T1 = scaled_TO.abs().amax(1, keepdim=True)
    wide = (scaled_TO / peak_T1 * 57344).to(torch.float8_e5m2).double() * peak_T1 / 57344 @ turned_IO.double().T
    found = multiply(quantise_rows(d_TO, factor_I=weight.scale_T.bfloat16()), turned_IO, None, dtype=torch.float32)
    unrounded = scaled_TO.double() @ turned_IO.double().T
    errors = [((each.double() - truth).norm() / truth.norm()).item() for each in (found, wide, unrounded)]
    assert errors == pytest.approx([0.037, 0.057, 0.026], abs=0.001)


def test_a_product_is_that_of_the_numbers_that_operands_stand_for():
    x_TI, _ = make_rows(9, 64, torch.float32)
    weight = quantise_rows(torch.randn(32, 64))
    rows = quantise_rows(x_TI)
    truth = (rows.values_TI.double() * rows.scale_T.double()[:, None]) @ (
        weight.values_TI.double() * weight.scale_T.double()[:, None]
    ).T
    found = multiply(rows, weight.values_TI, weight.scale_T, dtype=torch.float32)
    assert torch.allclose(found.double(), truth, rtol=1e-5, atol=1e-6 * truth.abs().max().item())
    assert multiply(rows, weight.values_TI, None, dtype=torch.bfloat16).dtype is torch.bfloat16


def test_rows_are_written_into_given_memory():
    x_TI, _ = make_rows(5, 32, torch.bfloat16)
    expected = quantise_rows(x_TI)
    out = Fp8Rows(torch.empty(8, 32, dtype=FP8)[2:7], torch.empty(8)[2:7])
    found = quantise_rows(x_TI, out=out)
    assert found.values_TI.data_ptr() == out.values_TI.data_ptr()
    assert torch.equal(found.values_TI.float(), expected.values_TI.float())
    assert torch.equal(found.scale_T, expected.scale_T)


# The gradient of a weight.


def make_operands(num_rows, num_outputs, num_inputs, *, spread=3.0, device="cpu"):
    """Rows of activations and of gradients of very different sizes, quantised as layers do, and the factors."""
    generator = torch.Generator().manual_seed(num_rows)

    def draw(num_columns, size):
        sizes = torch.exp(spread * torch.randn(num_rows, 1, generator=generator))
        return size * sizes * torch.randn(num_rows, num_columns, generator=generator)

    x_TI, d_TO = draw(num_inputs, 1.0), draw(num_outputs, 1e-6)
    factor_O = torch.randint(-14, -6, (num_outputs,), generator=generator).float().exp2()
    x, d = (
        quantise_rows(rows.to(device), factor_I=factor, round_scales_to_power_of_2=True)
        for rows, factor in ((x_TI, None), (d_TO, factor_O.to(device)))
    )
    return d, x, factor_O.to(device)


def check_balance(run, d, x, factor_O):
    """Powers of 2, none above 1, that leave both scales to the sum of a row, half of them to each operand."""
    shift_d_T, shift_x_T, scale_O = (each.double().cpu() for each in run(d.scale_T, x.scale_T, factor_O))
    product_T = d.scale_T.double().cpu() * x.scale_T.double().cpu()
    assert torch.equal(scale_O, product_T.amax() / factor_O.double().cpu())
    assert torch.equal(shift_d_T * shift_x_T, product_T / product_T.amax())
    assert ((shift_x_T / shift_d_T == 1) | (shift_x_T / shift_d_T == 2)).all()
    assert torch.equal(shift_d_T.log2(), shift_d_T.log2().round())


def check_transpose(run, values_TI, shift_T, *, num_written, num_beside=0):
    """Bit-equal, twice, into memory of NaN with NaN around it and beside each row; zeros behind the last row."""
    num_rows, num_columns = values_TI.shape
    for _ in range(2):
        # 127 is NaN.
        num_bytes = num_columns * (num_written + num_beside)
        memory = torch.full((num_bytes + 256,), 127, dtype=torch.uint8, device=values_TI.device)
        beside, out_IT = memory[128:-128].view(num_columns, -1).split([num_beside, num_written], dim=1)
        out_IT = out_IT.view(FP8)
        run(values_TI, shift_T=shift_T, out_IT=out_IT)
        expected = values_TI.float() * (1.0 if shift_T is None else shift_T[:, None])
        assert torch.equal(out_IT[:, :num_rows].float(), expected.to(FP8).float().T)
        assert not out_IT[:, num_rows:].float().any()
        assert all(bool((around == 127).all()) for around in (memory[:128], memory[-128:], beside))


def check_weight_gradient(run, d, x, factor_O, *, bound=1e-3):
    """As near the numbers that the rows stand for as numbers below the range of e4m3 allow: those of rows that
    contribute little.
    """
    found = run(d, x, factor_O, dtype=torch.float32).double()
    d_TO, x_TI = (rows.values_TI.double() * rows.scale_T.double()[:, None] for rows in (d, x))
    truth = (d_TO / factor_O.double()).T @ x_TI
    error = ((found - truth).norm() / truth.norm().clamp(min=1e-30)).item()
    assert error <= bound, error


@pytest.mark.parametrize("size", [(1, 1, 1), (5, 16, 32), (129, 48, 17), (300, 7, 64)])
def test_the_gradient_of_a_weight_is_that_of_the_numbers_that_rows_stand_for(size):
    d, x, factor_O = make_operands(*size)
    check_balance(reference.balance, d, x, factor_O)
    check_weight_gradient(weight_gradient, d, x, factor_O)
    assert weight_gradient(d, x, factor_O, dtype=torch.bfloat16).dtype is torch.bfloat16


def test_rows_of_about_the_same_size_lose_next_to_nothing():
    d, x, factor_O = make_operands(40, 16, 32, spread=0.0)
    check_weight_gradient(weight_gradient, d, x, factor_O, bound=1e-4)


def test_one_large_row_leaves_the_others_their_digits():
    """A row whose activations are 2^12 times larger, as the first token has in trained models."""
    d, x, factor_O = make_operands(64, 32, 32, spread=0.0)
    larger = x._replace(scale_T=x.scale_T.clone())
    larger.scale_T[0] *= 2.0**12
    without = d._replace(values_TI=d.values_TI.clone())
    without.values_TI[0] = 0.0
    d_TO, x_TI = without.values_TI.double() * d.scale_T.double()[:, None], x.values_TI.double() * x.scale_T[:, None]
    truth = (d_TO / factor_O.double()).T @ x_TI
    found = weight_gradient(without, larger, factor_O, dtype=torch.float32).double()
    assert ((found - truth).norm() / truth.norm()).item() < 0.01


def test_a_row_that_is_not_finite_is_seen_in_the_gradient_of_the_weight():
    d, x, factor_O = make_operands(8, 16, 32)
    x_TI, d_TO = torch.randn(8, 32), torch.randn(8, 16)
    for bad in (float("nan"), float("inf")):
        for rows_TI in (x_TI, d_TO):
            spoiled = rows_TI.clone()
            spoiled[3, 5] = bad
            rows = quantise_rows(spoiled, round_scales_to_power_of_2=True)
            pair = (d, rows) if rows_TI is x_TI else (rows, x)
            found = weight_gradient(*pair, factor_O, dtype=torch.float32)
            assert not (found[:, 5] if rows_TI is x_TI else found[5]).isfinite().all()


def test_no_rows_give_a_gradient_of_zeros():
    d, x, factor_O = make_operands(4, 16, 32)
    empty = [Fp8Rows(rows.values_TI[:0], rows.scale_T[:0]) for rows in (d, x)]
    assert torch.equal(weight_gradient(*empty, factor_O, dtype=torch.float32), torch.zeros(16, 32))


@pytest.mark.parametrize("num_written", [37, 48])
@pytest.mark.parametrize("has_shift", [False, True])
def test_a_transpose_moves_every_number(has_shift, num_written):
    d, _, _ = make_operands(37, 19, 8)
    shift_T = torch.randint(-8, 1, (37,)).float().exp2() if has_shift else None
    check_transpose(reference.transpose, d.values_TI, shift_T, num_written=num_written)
    check_transpose(reference.transpose, d.values_TI, shift_T, num_written=num_written, num_beside=16)
    out_IT = torch.empty(19, 37, dtype=FP8)
    assert torch.equal(transpose(d.values_TI, out_IT=out_IT).float(), d.values_TI.float().T)


def check_every_gradient(module):
    d, x, factor_O = make_operands(37, 48, 32)
    check_balance(module.balance, d, x, factor_O)
    check_transpose(module.transpose, x.values_TI, (x.scale_T * 2.0**-20).clamp(max=1.0), num_written=48, num_beside=16)
    check_weight_gradient(module.weight_gradient, d, x, factor_O)


GRADIENT_FAULTS = {
    "shifts exchanged": "return {_power(half_T), _power(exponent_T - half_T) => _power(exponent_T - half_T), _power(half_T)}",
    "whole exponent in one operand": "half_T = exponent_T{ >> 1 => }",
    "sum never scaled": "_power({top - _exponent => -_exponent}(factor_O)",
    "factor twice": "_power(top {- => +} _exponent(factor_O)",
    "scale of rows lost": "exponent_T = _exponent(scale_d_T){ + _exponent(scale_x_T) => }",
    "scales of other rows": "Fp8Rows(turned[0], scale_O{ => .flip(0)})",
    "gradient counted twice": "turned[1], None, dtype=dtype){ => * 2}",
    "no shift": "transpose(rows.values_TI, shift_T={shift_T => None}, out_IT",
    "rest not cleared": "[:, num_rows:] = {0 => 1}",
    "shift lost": "(values_TI.float() {* shift_T[:, None] => }).to(FP8) out_IT",
}


test_a_fault_in_the_plain_twin_of_gradients_is_seen, test_in_gradients_the_same_check_passes = planted_faults(
    reference, check_every_gradient, GRADIENT_FAULTS, errors=(AssertionError, SyntaxError)
)


# NF4.

# One row and block; a tile and one row over; rows that are no whole group of scales; more blocks than a chunk.
SIZES = ((1, 64), (129, 128), (13, 3 * 64), (7, 33 * 64))


def make_cases(sizes, *, is_nested, device="cpu"):
    """NF4 weights inside larger buffers, with their dense numbers."""
    cases = []
    for seed, size in enumerate(sizes):
        weight, _ = make_truth(size, torch.float32, is_nested=is_nested, device=device, seed=seed)
        read = read_params4bit(weight)
        cases.append(
            (
                NF4Weight(*(None if part is None else guarded(part) for part in read)),
                dequantise(read, shape=size, dtype=torch.float32),
            )
        )
    return cases


def write_nf4(weights, *, values, scales, is_transposed=False, module=op):
    """Scales, then values."""
    module.nf4_row_scales(weights, scales=scales)
    module.quantise_nf4(weights, values=values, scales=scales, is_transposed=is_transposed)


def check_nf4(run, cases, *, is_transposed, num_extra=16, margin=256):
    """Bit-equal to the formula, twice, as pieces of one buffer of NaN; nothing is written beside them."""
    weights, truths = zip(*cases)
    device = truths[0].device
    seen = []
    for _ in range(2):
        sizes = [truth.shape[0] for truth in truths]
        num_inputs = truths[0].shape[1]
        shape = (
            (num_inputs + num_extra, sum(sizes) + num_extra)
            if is_transposed
            else (sum(sizes) + num_extra, num_inputs + num_extra)
        )
        # 127 is NaN.
        memory = torch.full((shape[0] * shape[1] + 2 * margin,), 127, dtype=torch.uint8, device=device)
        buffer = memory[margin : len(memory) - margin].view(FP8).view(shape)
        inner = buffer[:num_inputs] if is_transposed else buffer[:, :num_inputs]
        *values, _ = inner.split([*sizes, num_extra], dim=1 if is_transposed else 0)
        # Behind the scales of a weight there are some that must stay.
        scales = [torch.full((size + 64,), float("nan"), device=device) for size in sizes]
        run(weights, values=values, scales=[scale[:-64] for scale in scales], is_transposed=is_transposed)
        assert all(scale[-64:].isnan().all() for scale in scales)
        scales = [scale[:-64] for scale in scales]
        found = [value.float().cpu() for value in values]
        for value in values:
            value.view(torch.uint8).fill_(127)
        # Outside of an assertion: pytest would look at every byte of a comparison that fails.
        is_whole = bool((memory == 127).all())
        assert is_whole
        seen.append([*found, *(scale.cpu() for scale in scales)])
    for first, second in zip(*seen):
        assert torch.equal(first, second)
    for value, scale_O, weight, truth_OI in zip(seen[0][: len(truths)], seen[0][len(truths) :], weights, truths):
        # The largest number that a row could hold: every place of the NF4 table is its last one, which is 1.
        full = weight._replace(packed_C=torch.full_like(weight.packed_C, 255))
        peak_O = (
            dequantise(full, shape=tuple(truth_OI.shape), dtype=torch.float32)
            .abs()
            .amax(1)
            .cpu()
            .clamp(min=reference.LEAST_PEAK)
        )
        assert torch.equal(scale_O, (peak_O.double() / 448).log2().ceil().exp2().float())
        truth_OI = truth_OI.cpu()
        on_grid = truth_OI.double() / scale_O.double()[:, None]
        error = ((value.T if is_transposed else value).double() - on_grid).abs()
        half_step = on_grid.abs().clamp(min=1e-30).log2().floor().exp2() * HALF_STEP
        assert (error <= half_step.clamp(min=LEAST_STEP) * (1 + 1e-5)).all()


@pytest.mark.parametrize("is_nested", [True, False])
@pytest.mark.parametrize("is_transposed", [True, False])
@pytest.mark.parametrize("size", SIZES)
def test_nf4_goes_straight_to_e4m3(size, is_transposed, is_nested):
    check_nf4(write_nf4, make_cases([size], is_nested=is_nested), is_transposed=is_transposed)


@pytest.mark.parametrize("is_transposed", [True, False])
def test_several_weights_stand_side_by_side(is_transposed):
    check_nf4(
        write_nf4,
        make_cases([(70, 192), (3, 192), (1, 192), (5, 192), (66, 192)], is_nested=True),
        is_transposed=is_transposed,
    )


def test_both_layouts_hold_the_same_numbers():
    ((weight, _),) = make_cases([(48, 128)], is_nested=True)
    found = []
    for shape in ((48, 128), (128, 48)):
        values, scale_O = torch.empty(shape, dtype=FP8), torch.empty(48)
        write_nf4([weight], values=[values], scales=[scale_O], is_transposed=shape[0] == 128)
        found.append((values.float(), scale_O))
    assert torch.equal(found[0][0], found[1][0].T)
    assert torch.equal(found[0][1], found[1][1])


def test_nothing_waits_and_nothing_is_needed_for_nothing():
    x_TI, factor_I = make_rows(4, 32, torch.bfloat16)
    ((weight, _),) = make_cases([(16, 64)], is_nested=True)
    values, scale_O = torch.empty(16, 64, dtype=FP8), torch.empty(16)
    with Watch() as watch:
        rows = quantise_rows(x_TI, factor_I=factor_I)
        write_nf4([weight], values=[values], scales=[scale_O])
        multiply(rows, quantise_rows(torch.randn(16, 32)).values_TI, scale_O, dtype=torch.bfloat16)
    assert watch.waits == []
    write_nf4([], values=[], scales=[])
    assert multiply(quantise_rows(x_TI[:0]), torch.empty(16, 32, dtype=FP8), scale_O, dtype=torch.float32).shape == (
        0,
        16,
    )


REFERENCE_FAULTS = {
    "peak of the first row for all": "wide_TI.abs().amax(1){ => [:1].expand(len(wide_TI))}.clamp",
    "largest number of e5m2": "LARGEST = {448 => 57344}.0",
    "factor lost": "x_TI.float() {* factor_I.float() => }",
    "half of the range": "(wide_TI * inverse_T[:, None]{ => / 2})",
    "rounded down": "{( => }scale.view(torch.int32) {+ 0x7FFFFF) => }",
    "power of 2 doubled": "{0x7FFFFF => 0x800000}",
    "inverse of another scale": "{inverse_T = 1 / scale_T => pass}",
}


def check_every_row(module):
    # The first row has a power of 2 for a scale.
    x_TI, factor_I = make_rows(17, 64, torch.float32)
    factor_I = factor_I.log2().ceil().exp2()
    x_TI[0] = 2.0 / factor_I
    x_TI[0, 3] *= 224.0
    check_rows_both_ways(module.quantise_rows, x_TI, factor_I)


test_a_fault_in_the_plain_twin_is_seen, test_in_rows_the_same_check_passes = planted_faults(
    reference, check_every_row, REFERENCE_FAULTS
)


NF4_FAULTS = {
    "not transposed": "narrow_OI.{T if is_transposed else narrow_OI => view(value.shape)}",
    "first scale for all": "_block_scales(weight).abs(){.view => [:1].expand(len(weight.absmax_Q)).reshape}(",
    "largest scale of all rows": "-1).amax({1 => ).expand(len(scale_O)}).clamp",
}


def check_every_weight(module):
    run = functools.partial(write_nf4, module=module)
    check_nf4(run, make_cases([(70, 192)], is_nested=True), is_transposed=True)


test_a_fault_in_the_plain_twin_of_nf4_is_seen, test_in_nf4_the_same_check_passes = planted_faults(
    reference, check_every_weight, NF4_FAULTS
)


# What is refused.


def test_devices_without_fp8_are_named(monkeypatch):
    assert "on cpu" in find_obstacle(CPU)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a card")
    for capability, is_able in (
        ((8, 0), False),
        ((8, 6), False),
        ((8, 9), True),
        ((9, 0), True),
        ((10, 0), True),
        ((12, 0), True),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, capability=capability: capability)
        assert (find_obstacle.__wrapped__(torch.device("cuda", 0)) == "") is is_able
    assert op.LEAST_CAPABILITY == (8, 9)


@pytest.mark.parametrize(
    ("x_TI", "options", "error", "message"),
    [
        (torch.zeros(4, 0), {}, ShapeError, "no columns"),
    ],
)
def test_rows_that_do_not_fit_are_refused(x_TI, options, error, message):
    with pytest.raises(error, match=message):
        quantise_rows(x_TI, **options)


@pytest.mark.parametrize(
    ("values", "scale_O", "error", "message"),
    [
        (torch.zeros(3, 96).to(FP8), torch.zeros(3), OptionError, "multiple of 64"),
        (torch.zeros(1, 128).to(FP8).expand(3, 128), torch.zeros(3), ShapeError, "overlap"),
    ],
)
def test_outputs_that_do_not_fit_are_refused(values, scale_O, error, message):
    ((weight, _),) = make_cases([(3, 128)], is_nested=True)
    with pytest.raises(error, match=message):
        quantise_nf4([weight], values=[values], scales=[scale_O])
    with pytest.raises(OptionError, match="1 weights, 0 values"):
        quantise_nf4([weight], values=[], scales=[])


@pytest.mark.parametrize(
    ("scale_O", "message"),
    [
        (torch.zeros(4), "per row of a weight of 6 blocks"),
        (torch.zeros(0), "per row of a weight of 6 blocks"),
    ],
)
def test_scales_of_rows_that_do_not_fit_are_refused(scale_O, message):
    ((weight, _),) = make_cases([(3, 128)], is_nested=True)
    with pytest.raises(ShapeError, match=message):
        nf4_row_scales([weight], scales=[scale_O])
    with pytest.raises(OptionError, match="1 weights and 0 scales"):
        nf4_row_scales([weight], scales=[])
    with pytest.raises(ShapeError, match="offset"):
        nf4_row_scales([weight._replace(offset=None)], scales=[torch.zeros(3)])


def test_products_that_do_not_fit_are_refused():
    rows, weight = quantise_rows(torch.zeros(3, 32)), torch.zeros(16, 32).to(FP8)
    with pytest.raises(OptionError, match="dtype"):
        multiply(rows, weight, None, dtype=torch.float64)
