"""Tests of the Triton kernels of cross_entropy, interpreted by test_interpreted.py and compiled by tests/gpu."""

import pytest
import torch

from lightning_fastft.kernels.cross_entropy import reference, triton
from tests.support.kernel_harness import DEVICE, planted_faults
from tests.support.truth import assert_nothing_beside, one_unit, poisoned

TILE = triton.MAX_LANES * triton.MAX_DEPTH
# One under, at and over the smallest tile border that is used, the first lane's second column, and the largest tile.
COLUMNS = (
    1,
    2,
    13,
    127,
    128,
    129,
    triton.MAX_LANES - 1,
    triton.MAX_LANES,
    triton.MAX_LANES + 1,
    TILE - 1,
    TILE,
    TILE + 1,
    2 * TILE + 37,
)
# On a device fp32 and float64 take the plain twin: the hardware's exp is an approximation that only narrow gradients do
# not see.
DTYPES = (torch.float32, torch.bfloat16, torch.float16) if DEVICE == "cpu" else (torch.bfloat16, torch.float16)


def make_rows(num_rows, num_columns, dtype, *, spread=4.0):
    logits_RV = (torch.randn(num_rows, num_columns, device=DEVICE) * spread).to(dtype)
    target_R = torch.randint(0, num_columns, (num_rows,), device=DEVICE)
    if num_rows > 2:
        target_R[1] = reference.IGNORED_TARGET
        target_R[2] = num_columns - 1
    return logits_RV, target_R


def plain_gradient_error(logits_RV, target_R, *, scale, softcap):
    gradients = []
    for dtype in (torch.float64, logits_RV.dtype):
        inputs_RV = logits_RV.detach().to(dtype).requires_grad_()
        capped = reference.scale_and_cap(inputs_RV, scale=scale, softcap=softcap)
        capped = capped if dtype is torch.float64 else capped.float()
        nll = torch.nn.functional.cross_entropy(
            capped, target_R, reduction="sum", ignore_index=reference.IGNORED_TARGET
        )
        (nll * 1.75).backward()
        gradients.append(inputs_RV.grad.double())
    return (gradients[1] - gradients[0]).abs().max().item()


def check_against_truth(launch, logits_RV, target_R, *, scale, softcap):
    dtype = logits_RV.dtype
    truth_RV = logits_RV.double().requires_grad_()
    capped = reference.scale_and_cap(truth_RV, scale=scale, softcap=softcap)
    truth_nll_R = torch.nn.functional.cross_entropy(
        capped, target_R, reduction="none", ignore_index=reference.IGNORED_TARGET
    )
    (truth_nll_R.sum() * 1.75).backward()

    plain_RV = logits_RV.clone().requires_grad_()
    capped_plain = reference.scale_and_cap(plain_RV, scale=scale, softcap=softcap).float()
    plain_nll_R = torch.nn.functional.cross_entropy(
        capped_plain, target_R, reduction="none", ignore_index=reference.IGNORED_TARGET
    )
    (plain_nll_R.sum() * 1.75).backward()

    ours_RV, ours_target_R = poisoned(logits_RV), poisoned(target_R)
    losses = launch(
        ours_RV, ours_target_R, scale=scale, softcap=softcap, gradient_factor=1.75, count_correct=True,
        with_entropy=True
    )  # fmt: skip
    true_entropy_R, plain_entropy_R = (
        reference.row_losses(
            logits_RV.to(wide), target_R, scale=scale, softcap=softcap, gradient_factor=None, count_correct=False,
            with_entropy=True
        )[2]
        for wide in (torch.float64, torch.float32)
    )  # fmt: skip
    error = (losses[2].double() - true_entropy_R).abs().max().item()
    plain_error = (plain_entropy_R.double() - true_entropy_R).abs().max().item()
    # The entropy is a mean of differences of logits.
    assert error <= max(2 * plain_error, capped.detach().abs().max().item() * 2**-22), f"entropy: {error}"
    # The loss is a difference of two values as large as the logits.
    unit_from = torch.cat([truth_nll_R.detach(), capped.detach().abs().max()[None]])
    error = (losses[0].double() - truth_nll_R).abs().max().item()
    plain_error = (plain_nll_R.double() - truth_nll_R).abs().max().item()
    assert error <= max(2 * plain_error, unit_from.max().item() * 2**-22), f"loss: {error} against {plain_error}"
    # p - 1 of a single row is exact by luck in either: plain PyTorch is judged on more rows of the same kind.
    usual_error = plain_gradient_error(*make_rows(64, logits_RV.shape[1], dtype), scale=scale, softcap=softcap)
    gradient_error = (ours_RV.double() - truth_RV.grad).abs().max().item()
    own_error = (plain_RV.grad.double() - truth_RV.grad).abs().max().item()
    assert torch.isfinite(ours_RV).all()
    assert gradient_error <= max(2 * own_error, 2 * usual_error, one_unit(truth_RV.grad, dtype)), (
        f"gradient: {gradient_error} against {own_error}"
    )
    wide = reference.scale_and_cap(logits_RV.float(), scale=scale, softcap=softcap)
    target_value_R = wide.gather(1, target_R.clamp(min=0)[:, None])[:, 0]
    is_clear_R = (wide.topk(min(2, wide.shape[1]), dim=1).values.diff(dim=1).abs() > 1e-4).all(dim=1)
    expected_R = (target_value_R == wide.max(dim=1).values) & (target_R >= 0)
    assert torch.equal(losses[1][is_clear_R], expected_R[is_clear_R])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_columns", COLUMNS)
def test_loss_and_gradient_equal_the_truth(num_columns, dtype):
    check_against_truth(triton.row_losses, *make_rows(5, num_columns, dtype), scale=1.0, softcap=None)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("scale", "softcap"), [(0.125, None), (3.0, None), (1.0, 5.0), (0.5, 2.0), (1.0, 30.0)])
def test_scale_and_softcap_equal_the_truth(scale, softcap, dtype):
    check_against_truth(triton.row_losses, *make_rows(5, 131, dtype), scale=scale, softcap=softcap)


@pytest.mark.parametrize("is_rising", [True, False])
def test_the_highest_logit_in_the_last_and_in_the_first_tile(is_rising):
    logits_RV, target_R = make_rows(3, TILE + 129, DTYPES[0])
    check_against_truth(
        triton.row_losses, logits_RV.sort(dim=1, descending=not is_rising).values, target_R, scale=1.0, softcap=None
    )


@pytest.mark.parametrize("num_rows", [1, 7])
def test_number_of_rows(num_rows):
    check_against_truth(triton.row_losses, *make_rows(num_rows, 131, DTYPES[0]), scale=1.0, softcap=None)


def test_no_rows():
    logits_RV, target_R = make_rows(0, 131, torch.float32)
    nll_R, correct_R, entropy_R = triton.row_losses(
        logits_RV, target_R, scale=1.0, softcap=None, gradient_factor=1.0, count_correct=True, with_entropy=True
    )
    assert nll_R.shape == correct_R.shape == entropy_R.shape == (0,)


def test_nothing_outside_the_rows_is_written():
    logits_RV, target_R = make_rows(3, 131, torch.float32)
    inner = poisoned(logits_RV)
    triton.row_losses(inner, target_R, scale=1.0, softcap=None, gradient_factor=1.0, count_correct=False)
    assert torch.isfinite(inner).all()
    assert_nothing_beside(inner)


def test_without_gradient_the_logits_stay():
    logits_RV, target_R = make_rows(3, 131, torch.bfloat16)
    before = logits_RV.clone()
    _, correct_R, entropy_R = triton.row_losses(
        logits_RV, target_R, scale=1.0, softcap=4.0, gradient_factor=None, count_correct=False
    )
    assert correct_R is entropy_R is None
    assert torch.equal(logits_RV, before)


def test_two_runs_are_bit_equal():
    logits_RV, target_R = make_rows(4, TILE + 3, torch.bfloat16)
    runs = []
    for _ in range(2):
        own_RV = logits_RV.clone()
        options = {"scale": 0.7, "softcap": 6.0, "gradient_factor": 1.0, "count_correct": True}
        runs.append((own_RV, *triton.row_losses(own_RV, target_R, **options)[:2]))
    assert all(torch.equal(one, other) for one, other in zip(*runs))


def test_extreme_logits_stay_finite():
    logits_RV = torch.tensor([[-3e4, 3e4, 0.0], [3e4, -3e4, 3e4]], device=DEVICE)
    nll_R, _, _ = triton.row_losses(
        logits_RV,
        torch.tensor([1, 0], device=DEVICE),
        scale=1.0,
        softcap=None,
        gradient_factor=1.0,
        count_correct=False,
    )
    torch.testing.assert_close(nll_R.cpu(), torch.tensor([0.0, 0.6931472]))
    torch.testing.assert_close(logits_RV.cpu(), torch.tensor([[0.0, 0.0, 0.0], [-0.5, 0.0, 0.5]]))


def test_equal_logits_count_the_lowest_token():
    check_ties(triton.row_losses)


def check_ties(launch):
    """The first of two equal logits counts: neighbours, in one lane of one tile and of two, in two lanes, the
    lower column in the higher lane.
    """
    lanes, num_columns = triton.MAX_LANES, TILE + 5
    pairs = [
        (0, 1),
        (3, 3 + lanes),
        (3, 3 + TILE),
        (4, lanes + 3),
        (lanes - 1, lanes),
        (2, TILE + 4),
        (0, num_columns - 1),
    ]
    logits_RV = torch.zeros(2 * len(pairs) + 1, num_columns, device=DEVICE)
    for row, pair in enumerate(pairs):
        logits_RV[row, list(pair)] = logits_RV[row + len(pairs), list(pair)] = 1.0
    target_R = torch.tensor([*(low for low, _ in pairs), *(high for _, high in pairs), 0], device=DEVICE)
    losses = launch(logits_RV, target_R, scale=1.0, softcap=None, gradient_factor=None, count_correct=True)
    # All columns of the last row are equal.
    assert losses[1].tolist() == [*[True] * len(pairs), *[False] * len(pairs), True]


@pytest.mark.parametrize("dtype", DTYPES)
def test_logits_of_minus_infinity_add_nothing(dtype):
    check_infinite(triton.row_losses, dtype)


def check_infinite(launch, dtype):
    """Tokens that a model rules out: none, some, a whole tile, every lane but one, all but one, the target."""
    logits_RV, target_R = make_rows(6, TILE + 129, dtype)
    target_R[:] = TILE + 7
    logits_RV[1, ::2] = logits_RV[2, :TILE] = logits_RV[3, TILE + 8 :] = float("-inf")
    logits_RV[3, torch.arange(TILE + 129, device=DEVICE) % triton.MAX_LANES != 7] = float("-inf")
    logits_RV[4, torch.arange(TILE + 129, device=DEVICE) != TILE + 7] = float("-inf")
    logits_RV[5, TILE + 7] = float("-inf")
    logits_RV[1, TILE + 7] = 1.0
    ours_RV, plain_RV = logits_RV.clone(), logits_RV.clone()
    options = {
        "scale": 0.5, "softcap": None, "gradient_factor": 1.75, "count_correct": True, "with_entropy": True
    }  # fmt: skip
    losses, plain = (
        function(rows_RV, target_R, **options)
        for function, rows_RV in ((launch, ours_RV), (reference.row_losses, plain_RV))
    )
    assert losses[0][5] == plain[0][5] == float("inf")
    # Sums of 8,192 exponentials in two orders.
    torch.testing.assert_close(losses[0][:5], plain[0][:5], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(losses[2], plain[2], rtol=1e-5, atol=1e-6)
    assert (losses[1] == plain[1]).all()
    assert ((ours_RV.double() - plain_RV.double()).abs() <= one_unit(plain_RV.double(), dtype)).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_row_that_has_no_loss_is_not_a_number_and_the_next_is_not_touched(bad):
    logits_RV, target_R = make_rows(3, 131, DTYPES[0])
    target_R[:] = 5
    logits_RV[0, 76] = 100.0
    logits_RV[0, 77] = bad
    logits_RV[1] = float("-inf")
    nll_R, correct_R, entropy_R = triton.row_losses(
        logits_RV, target_R, scale=1.0, softcap=None, gradient_factor=1.0, count_correct=True, with_entropy=True
    )
    assert nll_R.isnan().tolist() == entropy_R.isnan().tolist() == [True, True, False]
    assert not correct_R[:2].any()
    assert logits_RV[1].isnan().all()
    assert torch.isfinite(logits_RV[2]).all()


def test_an_impossible_target_gives_an_infinite_loss():
    logits_RV, _ = make_rows(2, 13, torch.float32)
    nll_R, _, _ = triton.row_losses(
        logits_RV,
        torch.tensor([13, -1], device=DEVICE),
        scale=1.0,
        softcap=None,
        gradient_factor=None,
        count_correct=False,
    )
    assert nll_R.tolist() == [float("inf")] * 2


FAULTS = {
    "lost mask in the first walk": 'value = {tl.where(inside, value, -float("inf")) => value}',
    "last columns lost": "-1, tl.int32) for start in range(0, num_columns{ => - DEPTH * LANES}, DEPTH * LANES):",
    "gradient of the first columns lost": "last = {(num_columns - 1) => num_columns} // (DEPTH * LANES)",
    "gradient of the last tile in all": "cols = last {- walked => } + tile_cols",
    "wrong stride": "{logits_RV.stride(0) => num_columns},",
    "missing backward factor": "* {(scale * gradient_factor) => gradient_factor}",
    "missing factor": "* {(scale * gradient_factor) => scale}",
    "missing slope of the cap": "gradient *= {slope_of_cap(raw, scale, softcap) => 1.0}",
    "no correction of the running sum": "lane_total {* tl.exp(lane_highest - new_highest) => } +",
    "no correction of the lanes' sums": "lane_total {* tl.exp(lane_highest - highest) => }",
    "a maximum of the tile, not of the lane": "tl.sum(tl.exp(value - {new_highest => tile_highest}[None, :]), axis=0)",
    "one column of a lane lost": "tile_cols = tl.arange(0, DEPTH)[:, None] * {LANES => (LANES - 1)}",
    "a lane without a logit is not a number": 'tl.full((LANES,), {_LOWEST => -float("inf")}, tl.float32)',
    "the last of equal lanes": (
        "tl.{min => max}(tl.where(lane_highest == highest, lane_column, {num_columns => -1}), axis=0)"
    ),
    "the column of a lane that is not highest": (
        "tl.min({tl.where(lane_highest == highest, lane_column, num_columns) => lane_column}, axis=0)"
    ),
    "the last of equal tiles": "tl.where(tile_highest >{ => =} lane_highest,",
    "the last of equal columns of a lane": (
        "tl.{min => max}(tl.where(value == tile_highest[None, :], cols, {num_columns => -1}), axis=0)"
    ),
    "target not subtracted": "- tl.where(cols == target, {1 => 0}.0, 0.0)",
    "ignored rows trained": "gradient = {tl.where(is_trained, gradient, 0.0) => gradient}",
    "ignored rows counted": "{tl.where(is_trained, nll, 0.0) => nll}",
    "no correction of the running moment": (
        "lane_moment = {_shifted_moment(lane_moment, lane_total, lane_highest - new_highest) => lane_moment} +"
    ),
    "no shift of the lanes' moments": "tl.sum({_shifted_moment(lane_moment, lane_total, lane_highest - highest) => lane_moment},",
    "shift without its total": "(moment + shift{ * total => })",
    "an excluded token makes the entropy not a number": "return tl.where({share == 0.0 => share == 2.0}, 0.0, share * below)",
    "moment of the lanes not divided": "tl.log(total) - moment{ / total => }",
    "entropy of ignored rows": "{tl.where(is_trained, tl.log(total) - moment / total, 0.0) => tl.log(total) - moment / total}",
    "gradient rounded twice": "tl.exp({value - highest => (value - highest).to(tl.float16).to(tl.float32)}) / total",
    "sign of tanh lost": "softcap * {tl.where(ratio < 0.0, -tanh, tanh) => tanh}",
}


def check_every_part(module):
    logits_RV, target_R = make_rows(5, TILE + 129, torch.float32)
    logits_RV = logits_RV.sort(dim=1).values
    check_against_truth(module.row_losses, logits_RV, target_R, scale=0.5, softcap=4.0)
    check_against_truth(module.row_losses, logits_RV, target_R, scale=1.5, softcap=None)
    check_against_truth(module.row_losses, logits_RV[:, :TILE], target_R % TILE, scale=1.0, softcap=None)
    check_ties(module.row_losses)
    check_infinite(module.row_losses, logits_RV.dtype)


test_a_planted_fault_is_seen, test_without_a_fault_the_same_check_passes = planted_faults(
    triton, check_every_part, FAULTS
)
