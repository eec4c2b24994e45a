"""Rows in expert order and back: the plain twin against the truth in float64; the kernels themselves in the
interpreter and by the compiler.
"""

import pytest
import torch

from lightning_fastft.core.errors import OptionError, ShapeError
from lightning_fastft.kernels.expert_rows import reference
from lightning_fastft.kernels.expert_rows.op import combine_rows, gather_rows
from lightning_fastft.kernels.expert_sort.op import sort_by_expert
from tests.support.kernel_harness import planted_faults
from tests.support.truth import Watch, assert_within_bound, poisoned

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


def make_order(num_tokens, num_choices, num_experts, *, has_sentinels=True):
    return sort_by_expert(
        torch.randint(0, num_experts + has_sentinels, (num_tokens, num_choices)), num_experts=num_experts
    )


def combine_naively(y_ND, order, weight_TK, *, dtype):
    """The sum in one dtype throughout, by einsum over rows in slot order."""
    is_owned_TK = order.place_TK < order.end_E[-1]
    y_TKD = y_ND[order.place_TK.long()].to(dtype).masked_fill(~is_owned_TK[:, :, None], 0)
    if weight_TK is not None:
        y_TKD = y_TKD * weight_TK.to(dtype).masked_fill(~is_owned_TK, 0)[:, :, None]
    return y_TKD.sum(dim=1)


def check_combine(
    combine,
    dtype,
    *,
    num_tokens,
    num_choices,
    num_experts=5,
    num_columns=13,
    weight_dtype=torch.float32,
):
    order = make_order(num_tokens, num_choices, num_experts)
    y_ND = poisoned(torch.randn(num_tokens * num_choices, num_columns).to(dtype))
    y_ND[order.end_E[-1] :] = float("nan")
    weight_TK = None
    if weight_dtype is not None:
        weight_TK = poisoned(torch.rand(num_tokens, num_choices).to(weight_dtype))
        weight_TK.masked_fill_(order.place_TK >= order.end_E[-1], float("nan"))
    out_TD = combine(y_ND, order.place_TK, order.end_E, weight_TK=weight_TK)
    assert out_TD.dtype is dtype
    assert out_TD.is_contiguous()
    truth_TD, plain_TD = (combine_naively(y_ND, order, weight_TK, dtype=one) for one in (torch.float64, dtype))
    assert_within_bound("out", out_TD, plain=plain_TD, truth=truth_TD, dtype=dtype)
    # One rounding from the wide sum: half a unit in the last place of each value, up to what the wide sum has lost
    # itself.
    lost = torch.finfo(torch.float32 if dtype is not torch.float64 else dtype).eps * (num_choices + 2) * 8
    assert ((out_TD.double() - truth_TD).abs() <= truth_TD.abs() * torch.finfo(dtype).eps / 2 + lost).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_choices", [1, 2, 4, 8])
@pytest.mark.parametrize("num_tokens", [0, 1, 7, 64, 257])
def test_gather_equals_an_index(num_tokens, num_choices, dtype):
    slot_N = make_order(num_tokens, num_choices, 5).slot_N
    x_TD = poisoned(torch.randn(num_tokens, 13).to(dtype))
    y_ND = gather_rows(x_TD, slot_N, num_experts_per_token=num_choices)
    assert y_ND.is_contiguous()
    assert torch.equal(y_ND, x_TD.repeat_interleave(num_choices, dim=0)[slot_N.long()])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_choices", [1, 2, 4, 8])
@pytest.mark.parametrize("num_tokens", [0, 1, 7, 64, 257])
def test_combine_equals_the_truth(num_tokens, num_choices, dtype):
    check_combine(combine_rows, dtype, num_tokens=num_tokens, num_choices=num_choices)


@pytest.mark.parametrize("num_experts", [1, 2, 8, 128])
def test_combine_with_any_number_of_experts(num_experts):
    check_combine(combine_rows, torch.bfloat16, num_tokens=65, num_choices=4, num_experts=num_experts)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weight_dtype", [None, *DTYPES])
def test_combine_with_every_weight(dtype, weight_dtype):
    check_combine(combine_rows, dtype, num_tokens=7, num_choices=3, weight_dtype=weight_dtype)


def test_terms_are_added_in_the_order_of_the_choices():
    # In fp32, 2^25 + 1 - 2^25 is 0 from the left and 1 in any other order.
    check_order_of_terms(combine_rows, torch.tensor([[2.0**25], [1.0], [-(2.0**25)]]))


def check_order_of_terms(combine, y_ND):
    for choice_K, expected in (([0, 1, 2], 0.0), ([0, 2, 1], 1.0)):
        assert combine(y_ND, torch.tensor([choice_K]), torch.tensor([1, 3])).item() == expected


def test_a_token_without_an_expert_gets_zeros():
    order = sort_by_expert(torch.tensor([[4, 4], [0, 4]]), num_experts=4)
    y_ND = torch.tensor([[1.0]] + [[float("nan")]] * 3)
    assert combine_rows(y_ND, order.place_TK, order.end_E).tolist() == [[0.0], [1.0]]


def test_gather_and_combine_are_each_others_gradient():
    order = make_order(9, 3, 4, has_sentinels=False)
    x_TD, weight_TK = torch.randn(9, 5, dtype=torch.float64, requires_grad=True), torch.rand(9, 3, dtype=torch.float64)
    y_ND = x_TD[order.slot_N.long() // 3]
    d_ND = torch.randn(27, 5, dtype=torch.float64)
    (gradient_TD,) = torch.autograd.grad(y_ND, x_TD, d_ND)
    torch.testing.assert_close(combine_rows(d_ND, order.place_TK, order.end_E), gradient_TD)
    leaf_ND = torch.randn(27, 5, dtype=torch.float64, requires_grad=True)
    out_TD = (leaf_ND[order.place_TK.long()] * weight_TK[:, :, None]).sum(dim=1)
    d_TD = torch.randn(9, 5, dtype=torch.float64)
    (gradient_ND,) = torch.autograd.grad(out_TD, leaf_ND, d_TD)
    weight_N = weight_TK.flatten()[order.slot_N.long()]
    torch.testing.assert_close(
        gather_rows(d_TD, order.slot_N, num_experts_per_token=3) * weight_N[:, None], gradient_ND
    )


def test_two_runs_are_bit_equal_the_inputs_stay_and_no_graph_is_built():
    order = make_order(33, 4, 5)
    inputs = (
        torch.randn(132, 13, requires_grad=True),
        torch.rand(33, 4, requires_grad=True),
        torch.randn(33, 13, requires_grad=True),
    )
    before = [tensor.detach().clone() for tensor in inputs]
    y_ND, weight_TK, x_TD = inputs
    first, second = (combine_rows(y_ND, order.place_TK, order.end_E, weight_TK=weight_TK) for _ in range(2))
    gathered = gather_rows(x_TD, order.slot_N, num_experts_per_token=4)
    assert torch.equal(first, second)
    assert not first.requires_grad
    assert not gathered.requires_grad
    assert all(torch.equal(one, other) for one, other in zip(inputs, before))


def test_never_waits():
    order = make_order(33, 4, 5)
    with Watch() as watch:
        gather_rows(torch.randn(33, 13), order.slot_N, num_experts_per_token=4)
        combine_rows(torch.randn(132, 13), order.place_TK, order.end_E, weight_TK=torch.rand(33, 4))
    assert watch.waits == []


FAULTS = {
    "last choice lost": "range(num_choices{ => - 1})",
    "choices added backwards": "{range(num_choices => reversed(range(num_choices)})",
    "sentinel counted": "(place_T {< end_E[-1] => >= 0})[:, None]",
    "end one too high": "place_T <{ => =} end_E[-1]",
    "end one too low": "place_T < end_E[-1]{ => - 1}",
    "end of the first expert": "place_T < end_E[{-1 => 0}]",
    "mask multiplied instead of chosen": (
        "{torch.where( => }(place_T < end_E[-1])[:, None]{, => *} value_TD{, 0.0) => }"
    ),
    "fp32 sum lost": "num_tokens, y_ND.shape[1], dtype={wide => y_ND.dtype}",
    "fp32 product lost": "{ => (}weight_TK[:, choice, None].to(wide) * value_TD{ => ).to(y_ND.dtype)}",
    "weight narrowed": "weight_TK[:, choice, None].to({ => y_ND.dtype).to(}wide)",
}


def check_every_part(combine):
    check_combine(combine, torch.bfloat16, num_tokens=257, num_choices=4)
    check_order_of_terms(combine, torch.tensor([[2.0**25], [1.0], [-(2.0**25)]]))


test_a_planted_fault_is_seen, test_without_a_fault_the_same_check_passes = planted_faults(
    reference, lambda module: check_every_part(module.combine_rows), FAULTS
)


ROWS, SLOTS = torch.zeros(3, 4), torch.zeros(6, dtype=torch.int32)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"num_experts_per_token": 0}, OptionError, "at least 1"),
    ],
)
def test_gather_refuses_what_the_kernel_would_read_wrongly(change, error, message):
    given = {"x_TD": ROWS, "slot_N": SLOTS, "num_experts_per_token": 2, **change}
    with pytest.raises(error, match=message):
        gather_rows(given.pop("x_TD"), given.pop("slot_N"), **given)


PLACES, ENDS, OUTPUTS = torch.arange(6).view(3, 2), torch.tensor([2, 6]), torch.zeros(6, 4)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"y_ND": torch.zeros(7, 4)}, ShapeError, "7 rows"),
        ({"place_TK": torch.zeros(3, 0, dtype=torch.int32), "y_ND": torch.zeros(0, 4)}, ShapeError, "K of at least 1"),
        ({"end_E": ENDS[:0]}, ShapeError, "empty"),
    ],
)
def test_combine_refuses_what_the_kernel_would_read_wrongly(change, error, message):
    given = {"y_ND": OUTPUTS, "place_TK": PLACES, "end_E": ENDS, **change}
    with pytest.raises(error, match=message):
        combine_rows(given.pop("y_ND"), given.pop("place_TK"), given.pop("end_E"), **given)


def test_a_slot_outside_the_tokens_is_an_error_on_a_cpu():
    with pytest.raises(IndexError):
        gather_rows(ROWS, SLOTS + 6, num_experts_per_token=2)
