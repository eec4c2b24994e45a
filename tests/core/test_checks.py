"""Checks: each says what was given and what is allowed."""

import pytest
import torch

from lightning_fastft.core.checks import (
    check_choice,
    check_float,
    check_int,
    check_layout,
    check_rows_apart,
    check_share,
    check_tensor,
    do_ranges_overlap,
    is_same_memory,
)
from lightning_fastft.core.errors import OptionError, ShapeError


@pytest.mark.parametrize("value", [0, -1, 9, 1.5, True, "3", None, float("nan")])
def test_check_int_refuses_what_is_out_of_range_or_no_int(value):
    with pytest.raises(OptionError, match="num_packs"):
        check_int("num_packs", value, low=1, high=8)


@pytest.mark.parametrize("value", [-0.1, 1.1, float("nan"), float("inf"), True, "0.5"])
def test_check_share_refuses_what_is_no_share(value):
    with pytest.raises(OptionError, match="share"):
        check_share("share", value)


def test_checks_return_what_they_accept():
    assert check_int("n", 3, low=1) == 3
    assert check_share("share", 1) == 1
    assert check_float("rate", 2.5, low=0) == 2.5
    assert check_choice("policy", "keep", ("keep", "recompute")) == "keep"
    tensor = torch.zeros(2, 3)
    assert check_tensor("x_TD", tensor, ndim=2, dtypes=(torch.float32,)) is tensor


def test_check_float_refuses_endless_values():
    with pytest.raises(OptionError, match="finite"):
        check_float("rate", float("inf"), low=0)


def test_check_choice_names_the_choices():
    with pytest.raises(OptionError, match="'keep', 'recompute'"):
        check_choice("policy", "hold", ("keep", "recompute"))


@pytest.mark.parametrize(
    ("given", "message"), [([1], "must be a tensor"), (torch.zeros(3), "2 axes"), (torch.zeros(1, 1), "int32")]
)
def test_check_tensor_names_the_difference(given, message):
    with pytest.raises(ShapeError, match=message):
        check_tensor("x_TD", given, ndim=2, dtypes=(torch.int32,))


def test_check_layout_accepts_strided_rows():
    rows = torch.zeros(3, 4)
    assert check_layout("x", rows[:, 1:3], (3, None), like=rows, num_strided=1).shape == (3, 2)
    check_layout("x", torch.zeros(4, 3).T[:, :1], (None, 1), num_strided=1)
    check_layout("x", torch.zeros(0, 4).T, (4, 0), num_strided=2)
    check_layout("x", torch.zeros(()), (), dtypes=(torch.float32,))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (torch.zeros(4), "2 axes"),
        (torch.zeros(4, 3).double(), "float32"),
        (torch.zeros(4, 2), r"\(4, 2\) on cpu; it must be \(any, 3\) on cpu"),
        (torch.zeros(4, 3, device="meta"), "meta"),
        (torch.zeros(3, 4).T, "has strides .*first 1 must be contiguous"),
    ],
)
def test_check_layout_names_the_difference(given, message):
    with pytest.raises(ShapeError, match=message):
        check_layout("x", given, (None, 3), like=torch.zeros(()), num_strided=1)


def test_rows_that_overlap_are_refused():
    check_rows_apart("out", torch.zeros(9).as_strided((2, 4), (5, 1)))
    with pytest.raises(ShapeError, match="rows of out overlap"):
        check_rows_apart("out", torch.zeros(9).as_strided((2, 4), (3, 1)))


def test_memory_that_meets_is_seen():
    buffer = torch.zeros(10)
    assert do_ranges_overlap(buffer[:6], buffer[5:])
    assert not do_ranges_overlap(buffer[:5], buffer[5:])
    assert not do_ranges_overlap(buffer[:0], buffer)
    # From first to last element, whatever lies between.
    assert do_ranges_overlap(buffer[::2], buffer[1::2])
    assert is_same_memory(buffer[2:4], buffer[2:4])
    assert not is_same_memory(buffer[2:4], buffer[2:6:2])
