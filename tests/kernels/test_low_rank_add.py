"""A thin product added to a wide matrix: truth and refusals on a CPU by the plain twin; the kernel itself in the
interpreter and by the compiler.
"""

import pytest
import torch

from lightning_fastft.core.errors import ShapeError
from lightning_fastft.kernels.low_rank_add import reference
from lightning_fastft.kernels.low_rank_add.op import add_low_rank
from tests.support.kernel_harness import planted_faults
from tests.support.truth import (
    BESIDE,
    Watch,
    assert_nothing_beside,
    assert_rounded_once,
    fresh_memory_is_nan,
    poisoned,
    room_for,
)

NAMES = ("base", "low", "factor", "residual")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
PLACES = ("new", "apart", "base", "residual")
# Errors of a handful of values are luck: plain PyTorch and the largest value are measured on at least so many rows, of
# which ours are the first.
NUM_MEASURED_ROWS = 129


def make_inputs(num_rows, num_columns, num_ranks, dtype, *, device="cpu", has_residual=False):
    """Base, low-rank rows, factor and residual; the product is about as large as the base."""
    base_TN, low_TR = torch.randn(num_rows, num_columns, device=device), torch.randn(num_rows, num_ranks, device=device)
    factor_RN = torch.randn(num_ranks, num_columns, device=device) / max(num_ranks, 1) ** 0.5
    residual_TN = torch.randn(num_rows, num_columns, device=device).to(dtype) if has_residual else None
    return base_TN.to(dtype), low_TR.to(dtype), factor_RN.to(dtype), residual_TN


def formula(base_TN, low_TR, factor_RN, residual_TN, *, wide):
    """The sum in another dtype."""
    sum_TN = base_TN.to(wide) + low_TR.to(wide) @ factor_RN.to(wide)
    return sum_TN if residual_TN is None else sum_TN + residual_TN.to(wide)


def check(add, shape, dtype, *, device="cpu", is_factor_transposed=False, has_residual=False, place="new"):
    """Equal to the truth, from inputs inside of NaN into new memory, rows that lie apart, the base or the
    residual; nothing else is written.
    """
    num_rows, num_columns, num_ranks = shape
    has_residual = has_residual or place == "residual"
    inputs = make_inputs(
        max(num_rows, NUM_MEASURED_ROWS), num_columns, num_ranks, dtype, device=device, has_residual=has_residual
    )
    truth, plain = formula(*inputs, wide=torch.float64), formula(*inputs, wide=torch.float32).to(dtype)
    given = [
        None if tensor is None else tensor[:num_rows] if name != "factor" else tensor
        for name, tensor in zip(NAMES, inputs)
    ]
    base_TN, low_TR, factor_RN, residual_TN = (None if tensor is None else poisoned(tensor) for tensor in given)
    if is_factor_transposed:
        factor_RN = poisoned(factor_RN.T).T
    ours = [base_TN, low_TR, factor_RN, residual_TN]
    out = {"new": None, "apart": room_for(given[0]), "base": base_TN, "residual": residual_TN}[place]
    with fresh_memory_is_nan():
        sum_TN = add(base_TN, low_TR, factor_RN, residual_TN=residual_TN, out=out)

    assert sum_TN.shape == (num_rows, num_columns)
    assert sum_TN is out if out is not None else sum_TN.is_contiguous()
    for tensor in ours:
        if tensor is not None:
            assert_nothing_beside(tensor)
    if place == "apart":
        assert_nothing_beside(out, fill=BESIDE)
    for name, tensor, before in zip(NAMES, ours, given):
        assert tensor is None or tensor is out or torch.equal(tensor, before), f"{name} was written"
    assert_rounded_once(f"sum, {place}", sum_TN, plain=plain, truth=truth, dtype=dtype)


def check_rows_of_nan_stay_alone(add, dtype, *, device="cpu"):
    base_TN, low_TR, factor_RN, residual_TN = make_inputs(9, 33, 5, dtype, device=device, has_residual=True)
    expected = add(base_TN, low_TR, factor_RN, residual_TN=residual_TN)
    for row, tensor in ((2, base_TN), (4, low_TR), (8, residual_TN)):
        tensor[row] = float("nan")
    ours = add(base_TN, low_TR, factor_RN, residual_TN=residual_TN)
    others = [0, 1, 3, 5, 6, 7]
    assert torch.equal(ours[others], expected[others])
    # Nothing turns a NaN into a number: a run that has lost its values must show it.
    assert ours[[2, 4, 8]].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_ranks", [0, 1, 16, 40, 100])
def test_the_sum_equals_the_truth(num_ranks, dtype):
    for num_rows in (1, 7, 65):
        for num_columns in (1, 5, 130):
            for has_residual in (False, True):
                shape = (num_rows, num_columns, num_ranks)
                check(add_low_rank, shape, dtype, is_factor_transposed=num_rows == 7, has_residual=has_residual)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("place", PLACES)
def test_where_the_sum_may_be_written(place, dtype):
    for has_residual in (False, True):
        check(add_low_rank, (7, 33, 5), dtype, has_residual=has_residual, place=place)


def test_in_float64_nothing_is_rounded_further():
    base_TN, low_TR, factor_RN, residual_TN = (
        tensor.double() for tensor in make_inputs(7, 33, 5, torch.float32, has_residual=True)
    )
    sum_TN = add_low_rank(base_TN, low_TR, factor_RN, residual_TN=residual_TN)
    truth = base_TN + residual_TN + (low_TR[:, :, None] * factor_RN).sum(dim=1)
    torch.testing.assert_close(sum_TN, truth, rtol=1e-14, atol=1e-14)


def test_autocast_rounds_nothing():
    inputs = make_inputs(7, 33, 5, torch.float32)[:3]
    expected = add_low_rank(*inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(add_low_rank(*inputs), expected)


def test_rows_of_nan_stay_alone():
    check_rows_of_nan_stay_alone(add_low_rank, torch.bfloat16)


@pytest.mark.parametrize(("num_rows", "num_columns"), [(0, 0), (0, 6), (3, 0)])
def test_without_rows_or_columns(num_rows, num_columns):
    for out in (None, torch.empty(num_rows, num_columns)):
        sum_TN = add_low_rank(
            torch.ones(num_rows, num_columns), torch.ones(num_rows, 2), torch.ones(2, num_columns), out=out
        )
        assert sum_TN.shape == (num_rows, num_columns)


def test_no_graph_and_no_wait():
    base_TN, low_TR, factor_RN, residual_TN = (
        tensor.requires_grad_() for tensor in make_inputs(7, 5, 3, torch.float32, has_residual=True)
    )
    with Watch() as watch:
        sum_TN = add_low_rank(base_TN, low_TR, factor_RN, residual_TN=residual_TN)
    assert watch.waits == []
    assert not sum_TN.requires_grad


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"out": torch.ones(4).expand(3, 4)}, ShapeError, "rows of out overlap"),
    ],
)
def test_impossible_arguments_are_refused(change, error, message):
    arguments = {"base_TN": torch.ones(3, 4), "low_TR": torch.ones(3, 2), "factor_RN": torch.ones(2, 4), **change}
    with pytest.raises(error, match=message):
        add_low_rank(**arguments)


def test_memory_that_is_partly_an_input_is_refused():
    buffer = torch.ones(100)
    inputs = {
        "base_TN": buffer[:12].view(3, 4),
        "low_TR": buffer[20:26].view(3, 2),
        "factor_RN": buffer[40:48].view(4, 2).T,
        "residual_TN": buffer[60:72].view(3, 4),
    }
    for begin in (1, 9, 25, 39, 47, 61, 71):
        with pytest.raises(ShapeError, match="out shares memory"):
            add_low_rank(**inputs, out=buffer[begin : begin + 12].view(3, 4))
    # The base in rows of another distance.
    with pytest.raises(ShapeError, match="out shares memory"):
        add_low_rank(**inputs, out=buffer[:15].view(3, 5)[:, :4])
    # The base or the residual where it holds a factor.
    for name, begin in (("base_TN", 18), ("residual_TN", 45)):
        tensor = buffer[begin : begin + 12].view(3, 4)
        with pytest.raises(ShapeError, match="out shares memory"):
            add_low_rank(**{**inputs, name: tensor}, out=tensor)
    for begin in (0, 60, 48, 72):
        add_low_rank(**inputs, out=buffer[begin : begin + 12].view(3, 4))


REFERENCE_FAULTS = {
    "product rounded": "{low_TR.to(wide) @ factor_RN => (low_TR @ factor_RN)}.to(wide)",
    "sum rounded before the residual": "sum_TN {+= residual_TN.to(wide) => = sum_TN.to(base_TN.dtype) + residual_TN}",
    "residual lost": "{sum_TN += residual_TN.to(wide) => pass}",
    "fp32 lost": "wide = {wide_dtype(base_TN.dtype) => base_TN.dtype}",
    "memory that was given not used": "{if out is None else out.copy_(sum_TN) => }",
}


def check_every_part(functions):
    for place in PLACES:
        check(functions.add_low_rank, (9, 130, 40), torch.bfloat16, place=place, has_residual=place == "apart")


test_a_planted_fault_is_seen, test_without_a_fault_the_same_check_passes = planted_faults(
    reference, check_every_part, REFERENCE_FAULTS
)
