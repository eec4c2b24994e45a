"""Tests of the Triton kernels of divergence, interpreted by test_interpreted.py and compiled by tests/gpu."""

import pytest
import torch

from lightning_fastft.kernels.divergence import reference, triton
from lightning_fastft.kernels.divergence.reference import KINDS, DivergenceForm
from tests.support.kernel_harness import DEVICE, planted_faults
from tests.support.truth import assert_nothing_beside, one_unit, poisoned

TILE = triton.MAX_LANES * triton.MAX_DEPTH
COLUMNS = (1, 2, 13, 128, triton.MAX_LANES - 1, triton.MAX_LANES + 1, TILE, TILE + 1, 2 * TILE + 37)
# On a device fp32 and float64 take the plain twin: the hardware's exp is an approximation that only narrow gradients do
# not see.
DTYPES = (torch.float32, torch.bfloat16, torch.float16) if DEVICE == "cpu" else (torch.bfloat16, torch.float16)
# Scale and soft cap of the student, then of the teacher.
FORMS = ((1.0, None, 1.0, None), (0.125, None, 3.0, None), (1.0, 5.0, 0.5, None), (0.5, None, 1.5, 2.0))


def make_rows(num_rows, num_columns, dtype, *, spread=3.0):
    logits_RV, teacher_RV = (torch.randn(num_rows, num_columns, device=DEVICE) * spread for _ in range(2))
    return logits_RV.to(dtype), teacher_RV.to(dtype)


def errors(found, truth):
    return (found.double() - truth).abs().max().item()


def assert_close(found, plains, truth, *, dtype, values_R, name):
    """Within twice the largest error of plain PyTorch in any of some runs, or what rounding logits of this size gives."""
    size = max(values_R.abs().max().item(), 1.0)
    unit = max(one_unit(truth, dtype), size * 2**-22)
    assert torch.isfinite(found).all(), name
    bound = max(2 * max(errors(plain, truth) for plain in plains), unit)
    assert errors(found, truth) <= bound, f"{name}: {errors(found, truth)} above {bound}"


def check_divergence(launch, rows, *, kind, form=FORMS[0], beta=0.3):
    logits_RV, _ = rows
    form = DivergenceForm(kind, beta, *form)

    def run(function, dtype, place, order_V):
        ours_RV, their_RV = (place(each_RV.to(dtype)[:, order_V]) for each_RV in rows)
        before_RV = their_RV.clone()
        divergence_R = function(ours_RV, their_RV, form=form, writes_gradient=True)
        assert torch.equal(their_RV, before_RV)
        return divergence_R, ours_RV[:, order_V.argsort()]

    num_columns = logits_RV.shape[1]
    in_order_V = torch.arange(num_columns, device=DEVICE)
    # The error of one order of sums may be small by luck.
    orders = [in_order_V, *(torch.randperm(num_columns, device=DEVICE) for _ in range(7))]
    true_R, true_RV = run(reference.row_divergences, torch.float64, torch.clone, in_order_V)
    found_R, found_RV = run(launch, logits_RV.dtype, poisoned, in_order_V)
    plain = (run(reference.row_divergences, logits_RV.dtype, torch.clone, order_V) for order_V in orders)
    plain_R, plain_RV = zip(*plain)
    values_R = torch.cat([(x.float() * s).abs().max()[None] for x, s in zip(rows, (form.scale, form.teacher_scale))])
    assert_close(found_R, plain_R, true_R, dtype=torch.float32, values_R=values_R, name="divergence")
    assert_close(found_RV, plain_RV, true_RV, dtype=logits_RV.dtype, values_R=values_R * 0, name="gradient")


def check_rest(launch, rows, *, scale=1.0, softcap=None):
    logits_RV, teacher_RV = rows
    num_known = max(1, logits_RV.shape[1] // 3)
    id_RK = teacher_RV.topk(num_known, dim=1).indices
    value_RK = reference.scale_and_cap(logits_RV.float(), scale=scale, softcap=softcap).gather(1, id_RK)
    highest_R = value_RK.amax(dim=1)
    known_R = (value_RK - highest_R[:, None]).logsumexp(dim=1)
    teacher_rest_R = torch.rand(len(known_R), device=DEVICE)
    logits_RV = logits_RV.scatter(1, id_RK, -torch.inf)

    def run(function, dtype, wide, place):
        ours_RV = place(logits_RV.to(dtype))
        row_values = (tensor.to(wide) for tensor in (highest_R, known_R, teacher_rest_R))
        return function(ours_RV, *row_values, scale=scale, softcap=softcap, writes_gradient=True), ours_RV

    (true_R, true_RV), (plain_R, plain_RV), (found_R, found_RV) = (
        run(reference.rest_rows, torch.float64, torch.float64, torch.clone),
        run(reference.rest_rows, logits_RV.dtype, torch.float32, torch.clone),
        run(launch, logits_RV.dtype, torch.float32, poisoned),
    )
    values_R = torch.cat([true_R, value_RK.max()[None]])
    assert_close(found_R, [plain_R], true_R, dtype=torch.float32, values_R=values_R, name="rest")
    assert_close(found_RV, [plain_RV], true_RV, dtype=logits_RV.dtype, values_R=values_R * 0, name="gradient")
    assert (found_RV.gather(1, id_RK) == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_columns", COLUMNS)
@pytest.mark.parametrize("kind", KINDS)
def test_divergence_and_gradient_equal_the_truth(kind, num_columns, dtype):
    check_divergence(triton.row_divergences, make_rows(3, num_columns, dtype), kind=kind)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_scales_and_softcaps_equal_the_truth(kind, form, dtype):
    check_divergence(triton.row_divergences, make_rows(3, 131, dtype), kind=kind, form=form)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_columns", COLUMNS[1:])
def test_rest_and_gradient_equal_the_truth(num_columns, dtype):
    check_rest(triton.rest_rows, make_rows(3, num_columns, dtype))


@pytest.mark.parametrize(("scale", "softcap"), [(0.125, None), (1.0, 5.0), (0.5, 2.0)])
def test_rest_with_scale_and_softcap_equals_the_truth(scale, softcap):
    check_rest(triton.rest_rows, make_rows(3, 131, DTYPES[0]), scale=scale, softcap=softcap)


@pytest.mark.parametrize("kind", KINDS)
def test_number_of_rows(kind):
    for num_rows in (1, 7):
        check_divergence(triton.row_divergences, make_rows(num_rows, 131, DTYPES[0]), kind=kind)
    rows = make_rows(0, 131, DTYPES[0])
    form = DivergenceForm(kind, 0.5, *FORMS[0])
    assert triton.row_divergences(*rows, form=form, writes_gradient=True).shape == (0,)
    empty = torch.empty(0, device=DEVICE)
    rest_R = triton.rest_rows(rows[0], empty, empty, empty, scale=1.0, softcap=None, writes_gradient=True)
    assert rest_R.shape == (0,)


@pytest.mark.parametrize("kind", KINDS)
def test_without_gradient_the_logits_stay_and_two_runs_are_bit_equal(kind):
    logits_RV, teacher_RV = make_rows(3, TILE + 3, torch.bfloat16)
    form = DivergenceForm(kind, 0.5, 0.7, 6.0, 1.0, None)
    before_RV = logits_RV.clone()
    value_R = triton.row_divergences(logits_RV, teacher_RV, form=form, writes_gradient=False)
    assert torch.equal(logits_RV, before_RV)
    runs = []
    for _ in range(2):
        gradient_RV = logits_RV.clone()
        runs.append((triton.row_divergences(gradient_RV, teacher_RV, form=form, writes_gradient=True), gradient_RV))
    assert torch.equal(runs[0][0], value_R)
    assert all(torch.equal(one, other) for one, other in zip(*runs))


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_outside_the_rows_is_written(kind):
    logits_RV, teacher_RV = (poisoned(rows_RV) for rows_RV in make_rows(3, 131, DTYPES[0]))
    form = DivergenceForm(kind, 0.5, *FORMS[0])
    triton.row_divergences(logits_RV, teacher_RV, form=form, writes_gradient=True)
    row_values = (torch.ones(3, device=DEVICE) for _ in range(3))
    rest_RV = poisoned(teacher_RV)
    triton.rest_rows(rest_RV, *row_values, scale=1.0, softcap=None, writes_gradient=True)
    for inner in (logits_RV, teacher_RV, rest_RV):
        assert torch.isfinite(inner).all()
        assert_nothing_beside(inner)


@pytest.mark.parametrize("kind", KINDS)
def test_excluded_tokens_and_extreme_logits_equal_the_twin(kind):
    check_excluded(triton.row_divergences, kind=kind)


def check_excluded(launch, *, kind):
    """Tokens that both exclude, that only one of them excludes, and shares that are 0 in fp32."""
    logits_RV, teacher_RV = make_rows(5, TILE + 129, DTYPES[0])
    logits_RV[1, ::2] = teacher_RV[1, ::2] = -torch.inf
    logits_RV[2, 7] = -torch.inf
    teacher_RV[3, 7] = -torch.inf
    logits_RV[4, 5], teacher_RV[4, 9] = 3e4, 2e4
    form = DivergenceForm(kind, 0.3, *FORMS[0])
    found_RV, plain_RV = logits_RV.clone(), logits_RV.clone()
    found_R = launch(found_RV, teacher_RV, form=form, writes_gradient=True)
    plain_R = reference.row_divergences(plain_RV, teacher_RV, form=form, writes_gradient=True)
    torch.testing.assert_close(found_R, plain_R, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found_RV.float(), plain_RV.float(), rtol=1e-2, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", [0, 1])
def test_a_row_that_has_no_distribution_is_not_a_number_and_the_next_is_not_touched(place, kind):
    rows = make_rows(2, 131, DTYPES[0])
    rows[place][0, 76] = float("nan")
    form = DivergenceForm(kind, 0.3, *FORMS[0])
    assert triton.row_divergences(*rows, form=form, writes_gradient=True).isnan().tolist() == [True, False]
    assert torch.isfinite(rows[0][1]).all()


FAULTS = {
    "lost mask": 'tl.where(inside, {scale_and_cap(raw, scale, softcap, HAS_SOFTCAP), -float("inf") => scale_and_cap(raw, scale, softcap, HAS_SOFTCAP), 0.0})',
    "wrong stride of the student": "{logits_RV.stride(0) => num_columns}, teacher_RV.stride(0),",
    "wrong stride of the teacher": "{teacher_RV.stride(0) => num_columns},",
    "no correction of the running sum": "lane_total = lane_total {* tl.exp(lane_highest - new_highest) => }",
    "no correction of the lanes' sums": "tl.sum(lane_total {* tl.exp(lane_highest - highest) => }, axis=0)",
    "an excluded token makes the sum not a number": "tl.where({share == 0.0 => share == 2.0}, 0.0, share * factor)",
    "scale of the gradient": "gradient *= {scale => 1.0}",
    "slope of the cap": "gradient *= {slope_of_cap(raw, scale, softcap) => 1.0}",
    "teacher's cap": "HAS_TEACHER_SOFTCAP={form.teacher_softcap is not None => False},",
    "gradient of the forward divergence": "num_columns, {q - p => q}, raw",
    "sign of the reverse divergence": "_share_times(q, {log_q - log_p => log_p - log_q})",
    "mixture": "log_m = tl.log({beta * p + (1.0 - beta) * q => 0.5 * p + 0.5 * q})",
    "mixture in the gradient": "log_to = tl.log({beta => 0.5} * tl.exp(log_to)",
    "share of the student": "divergence = beta * from_teacher + {(1.0 - beta) => beta} * from_student",
    "gradient without the divergence": "(log_q - log_to) {- from_student => }",
    "factor of the mixture's gradient": "factor = 1.0 {- beta => }",
    "known tokens in the rest": 'start + tile_cols, num_columns, scale, softcap, HAS_SOFTCAP) value = {tl.where(raw == -float("inf"), -float("inf"), value) => value}',
    "rest at the size of the logits": "rest = (highest {- tl.load(highest_ptr + row) => }) + log_total",
    "teacher's rest": "difference = student_rest {- tl.load(teacher_rest_ptr + row) => }",
    "student's rest": "student_rest = {1.0 / (1.0 + tl.exp(tl.load(known_ptr + row) - rest)) => tl.exp(rest)}",
}


def check_every_part(module):
    rows = make_rows(3, TILE + 129, torch.float32)
    rows = rows[0].sort(dim=1).values, rows[1].sort(dim=1, descending=True).values
    for kind in KINDS:
        check_divergence(module.row_divergences, rows, kind=kind, form=(0.5, 4.0, 1.5, 3.0))
        check_excluded(module.row_divergences, kind=kind)
    check_rest(module.rest_rows, rows, scale=0.5, softcap=4.0)


test_a_planted_fault_is_seen, test_without_a_fault_the_same_check_passes = planted_faults(
    triton, check_every_part, FAULTS
)
