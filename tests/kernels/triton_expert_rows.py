"""Tests of the Triton kernels of expert_rows, interpreted by test_interpreted.py and compiled by tests/gpu."""

import pytest
import torch

from lightning_fastft.kernels.expert_rows import reference, triton
from lightning_fastft.kernels.expert_sort.reference import sort_slots
from tests.support.children import thinned
from tests.support.kernel_harness import DEVICE, planted_faults
from tests.support.truth import fresh_memory_is_nan, poisoned

TOKENS = (0, 1, 7, 64, 257)
CHOICES = (1, 2, 4, 8)
COLUMNS = (1, 2, 13, *range(127, 130), *range(triton.MAX_BLOCK - 1, triton.MAX_BLOCK + 2), 2 * triton.MAX_BLOCK + 37)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
NARROW = (torch.float32, torch.bfloat16, torch.float16)
# Every token is a program of its own: many tokens meet one choice, many choices a few tokens.
TOKENS_AND_CHOICES = thinned(TOKENS, CHOICES, keep=lambda tokens, choices: tokens + choices < len(TOKENS))


def run_fresh(function, *arguments, **options):
    """Run with fresh memory that holds NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        return function(*arguments, **options)
    finally:
        torch.use_deterministic_algorithms(False)


def make_order(num_tokens, num_choices, num_experts, *, has_sentinels=False):
    expert_TK = torch.randint(0, num_experts, (num_tokens, num_choices))
    if has_sentinels:
        expert_TK[torch.rand(expert_TK.shape) < 0.3] = num_experts
        expert_TK[:1] = num_experts
    return sort_slots(expert_TK.to(DEVICE), num_experts=num_experts)


def rows(num_rows, num_columns, dtype):
    """Rows apart from each other, with NaN between and around them."""
    return poisoned(torch.randn(num_rows, num_columns, device=DEVICE).to(dtype))


def assert_bit_equal(ours, expected, *, dtype):
    assert ours.shape == expected.shape
    assert ours.dtype is dtype
    assert ours.is_contiguous()
    assert torch.isfinite(ours).all()
    assert torch.equal(ours, expected), f"up to {(ours.double() - expected.double()).abs().max().item():.3g} apart"


def cut_to_bf16(value):
    """Round fp32 towards zero, as the interpreter does (``_convert_float`` in its source); a device rounds to the
    nearest.
    """
    return (value.view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16)


def check_gather(gather, x_TD, slot_N, *, num_experts_per_token):
    y_ND = run_fresh(gather, x_TD, slot_N, num_experts_per_token=num_experts_per_token)
    expected_ND = reference.gather_rows(x_TD, slot_N, num_experts_per_token=num_experts_per_token)
    assert_bit_equal(y_ND, expected_ND, dtype=x_TD.dtype)


def check_combine(combine, y_ND, order, *, weight_TK=None):
    given = (y_ND, order.place_TK, order.end_E)
    out_TD = run_fresh(combine, *given, weight_TK=weight_TK)
    expected_TD = reference.combine_rows(*given, weight_TK=weight_TK)
    if DEVICE == "cpu" and y_ND.dtype is torch.bfloat16 and not torch.equal(out_TD, expected_TD):
        expected_TD = cut_to_bf16(reference.combine_rows(y_ND.float(), *given[1:], weight_TK=weight_TK))
    assert_bit_equal(out_TD, expected_TD, dtype=y_ND.dtype)


def poison_sentinels(y_ND, weight_TK, order):
    """NaN in every row and infinity in every weight of a slot without an expert."""
    end = order.end_E[-1]
    y_ND[end:] = float("nan")
    return y_ND, weight_TK.masked_fill_(order.place_TK >= end, float("inf"))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_columns", COLUMNS)
def test_gathered_rows_are_bit_equal(num_columns, dtype):
    check_gather(triton.gather_rows, rows(5, num_columns, dtype), make_order(5, 2, 3).slot_N, num_experts_per_token=2)


@pytest.mark.parametrize(("num_tokens", "num_choices"), TOKENS_AND_CHOICES)
def test_gather_of_any_number_of_slots(num_tokens, num_choices):
    order = make_order(num_tokens, num_choices, 5, has_sentinels=True)
    check_gather(
        triton.gather_rows, rows(num_tokens, 5, torch.bfloat16), order.slot_N, num_experts_per_token=num_choices
    )


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_gather_with_strided_slots(dtype):
    slot_N = torch.full((29,), -(2**30), dtype=dtype, device=DEVICE)
    slot_N[1::4] = make_order(7, 1, 3).slot_N.to(dtype)
    check_gather(triton.gather_rows, rows(7, 5, torch.float32), slot_N[1::4], num_experts_per_token=1)


def test_an_impossible_slot_gives_nan_and_reads_nothing():
    x_TD = rows(3, 131, torch.bfloat16)
    slot_N = torch.tensor([2, 6, -1, 2**40, 5], device=DEVICE)
    y_ND = triton.gather_rows(x_TD, slot_N, num_experts_per_token=2)
    assert torch.equal(y_ND[[0, 4]], x_TD[[1, 2]])
    assert y_ND[1:4].isnan().all()


def test_rows_beyond_two_to_the_31_elements_are_reached():
    if DEVICE == "cuda":
        pytest.skip("4 GiB for two rows; the arithmetic is the interpreter's")
    # Rows that lie further apart than 32 bits of elements reach: one page of each is real, the rest is a hole.
    x_TD = torch.empty(2**31 + 64, dtype=torch.bfloat16).as_strided((2, 64), (2**31, 1))
    x_TD.copy_(torch.randn(2, 64))
    check_gather(triton.gather_rows, x_TD, torch.tensor([1, 0], dtype=torch.int32), num_experts_per_token=1)
    check_combine(triton.combine_rows, x_TD, sort_slots(torch.tensor([[1], [0]]), num_experts=2))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_columns", COLUMNS)
def test_combined_rows_are_bit_equal(num_columns, dtype):
    order = make_order(5, 2, 3)
    y_ND, weight_TK = rows(10, num_columns, dtype), torch.rand(5, 2, device=DEVICE)
    check_combine(triton.combine_rows, y_ND, order, weight_TK=weight_TK)


@pytest.mark.parametrize(("num_tokens", "num_choices"), TOKENS_AND_CHOICES)
def test_combine_of_any_number_of_tokens(num_tokens, num_choices):
    order = make_order(num_tokens, num_choices, 8)
    weight_TK = torch.rand(num_tokens, num_choices, device=DEVICE)
    check_combine(triton.combine_rows, rows(num_tokens * num_choices, 5, torch.bfloat16), order, weight_TK=weight_TK)


@pytest.mark.parametrize("weight_dtype", [None, *DTYPES])
@pytest.mark.parametrize("dtype", NARROW)
def test_every_dtype_of_the_weight(weight_dtype, dtype):
    order = make_order(7, 4, 5)
    weight_TK = None if weight_dtype is None else poisoned(torch.rand(7, 4, device=DEVICE).to(weight_dtype))
    check_combine(triton.combine_rows, rows(28, 13, dtype), order, weight_TK=weight_TK)


@pytest.mark.parametrize(
    ("num_choices", "dtype"), thinned(CHOICES, DTYPES, keep=lambda choices, dtype: choices == dtype)
)
def test_rows_and_weights_of_slots_without_an_expert_are_not_read(num_choices, dtype):
    order = make_order(31, num_choices, 5, has_sentinels=True)
    y_ND, weight_TK = poison_sentinels(
        rows(31 * num_choices, 13, dtype), torch.rand(31, num_choices, device=DEVICE), order
    )
    check_combine(triton.combine_rows, y_ND, order, weight_TK=weight_TK)
    check_combine(triton.combine_rows, y_ND, order)
    out_TD = triton.combine_rows(y_ND, order.place_TK, order.end_E, weight_TK=weight_TK)
    assert (out_TD[0] == 0).all()


def test_no_slot_with_an_expert():
    order = sort_slots(torch.full((9, 2), 4, device=DEVICE), num_experts=4)
    y_ND = torch.full((18, 5), float("nan"), device=DEVICE)
    out_TD = run_fresh(triton.combine_rows, y_ND, order.place_TK, order.end_E)
    assert torch.equal(out_TD, torch.zeros(9, 5, device=DEVICE))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_strided_places_ends_and_weights(dtype):
    order = make_order(17, 3, 5, has_sentinels=True)
    place_TK, end_E = (torch.full(shape, -(2**30), dtype=dtype, device=DEVICE) for shape in ((8, 35), (11,)))
    place_TK.T[1::2, 1:7:2], end_E[1::2] = order.place_TK.to(dtype), order.end_E.to(dtype)
    weight_TK = torch.rand(3, 17, device=DEVICE).T
    order = order._replace(place_TK=place_TK.T[1::2, 1:7:2], end_E=end_E[1::2])
    check_combine(triton.combine_rows, rows(51, 13, torch.float32), order, weight_TK=weight_TK)


def test_terms_are_added_in_the_order_of_the_choices():
    # In fp32, 2^25 + 1 - 2^25 is 0 from the left and 1 in any other order.
    y_ND = torch.tensor([[2.0**25], [1.0], [-(2.0**25)]], device=DEVICE)
    for choice_K, expected in (([0, 1, 2], 0.0), ([0, 2, 1], 1.0)):
        place_TK = torch.tensor([choice_K], dtype=torch.int32, device=DEVICE)
        out_TD = triton.combine_rows(y_ND, place_TK, torch.tensor([3], device=DEVICE))
        assert out_TD.item() == expected


@pytest.mark.parametrize("shape", [(0, 5), (4, 0)])
def test_nothing_to_do(shape):
    num_tokens, num_columns = shape
    order = make_order(num_tokens, 2, 3)
    check_gather(triton.gather_rows, torch.empty(shape, device=DEVICE), order.slot_N, num_experts_per_token=2)
    check_combine(triton.combine_rows, torch.empty(2 * num_tokens, num_columns, device=DEVICE), order)


def test_the_inputs_stay_and_two_runs_are_bit_equal():
    order = make_order(33, 4, 5, has_sentinels=True)
    inputs = rows(132, 131, torch.bfloat16), torch.rand(33, 4, device=DEVICE), rows(33, 131, torch.bfloat16)
    before = [tensor.clone() for tensor in inputs]
    y_ND, weight_TK, x_TD = inputs
    first, second = (triton.combine_rows(y_ND, order.place_TK, order.end_E, weight_TK=weight_TK) for _ in range(2))
    assert torch.equal(first, second)
    assert torch.equal(*(triton.gather_rows(x_TD, order.slot_N, num_experts_per_token=4) for _ in range(2)))
    assert all(torch.equal(one, other) for one, other in zip(inputs, before))


GATHER_FAULTS = {
    "last column not read": "num_columns_here{ => - 1}, 0) value = tl.load(x_ptr",
    "last column not written": "value, mask=cols < num_columns_here{ => - 1})",
    "wrong stride": "{x_TD.stride(0) => num_columns},",
    "stride of the slots lost": "row {* slot_stride => }",
    "only the first tile": "{slot = tl.load => cols = tl.arange(0, BLOCK)\n    slot = tl.load}",
    "slot taken for its token": "token = slot {// K => }",
    "row of the program": "x_ptr + {token => row} * x_stride",
}
COMBINE_FAULTS = {
    "last choice lost": "tl.static_range(K{ => - 1})",
    "choices added backwards": "for {choice => last} in tl.static_range(K):{ => \n        choice = K - 1 - last}",
    "sentinel counted": "is_owned = {(place >= 0) & (place < num_owned) => place >= 0}",
    "end one too high": "place < num_owned{ => + 1})",
    "end one too low": "place < num_owned{ => - 1})",
    "end of the first expert": "place_TK, end_E[{-1: => :1}]",
    "weight of a sentinel read": "mask={is_owned => place >= 0}, other=0.0",
    "fp32 sum lost": "total {+= value => = (total + value).to(out_ptr.dtype.element_ty).to(WIDE)}",
    "fp32 product lost": "value ={ => (} weight.to(WIDE) * value{ => ).to(out_ptr.dtype.element_ty).to(WIDE)}",
    "weight narrowed": "value = weight{ => .to(out_ptr.dtype.element_ty)}.to(WIDE) * value",
    "weight dropped": "value = {weight.to(WIDE) * => } value",
    "weight of the next choice": "{choice => (choice + 1) % K} * weight_choice_stride",
    "weight of another token": "weight_ptr + row * {weight_token_stride => K}",
    "place of another token": "place_ptr + row * {place_token_stride => (K + 1) % (K * 2)}",
    "wrong stride": "{y_ND.stride(0) => num_columns},",
    "last column not read": "tl.where(is_owned, num_columns{ => - 1}, 0)",
    "last column not written": "element_ty), mask=cols < num_columns{ => - 1})",
    "only the first tile": "{num_owned = tl.load => cols = tl.arange(0, BLOCK)\n    num_owned = tl.load}",
}


@pytest.mark.parametrize("num_owned", [0, 1, 17, 18])
def test_rows_behind_the_last_expert_are_not_gathered(num_owned):
    x_TD, slot_N = rows(9, triton.MAX_BLOCK + 5, torch.float32), make_order(9, 2, 3).slot_N
    end_E = torch.tensor([0, num_owned], dtype=torch.int32, device=DEVICE)
    with fresh_memory_is_nan():
        ours = triton.gather_rows(x_TD, slot_N, num_experts_per_token=2, end_E=end_E)
    expected = triton.gather_rows(x_TD, slot_N, num_experts_per_token=2)
    assert torch.equal(ours[:num_owned], expected[:num_owned])
    assert ours[num_owned:].isnan().all()


def check_every_part_of_gather(gather):
    slot_N = make_order(9, 2, 3).slot_N.repeat_interleave(3)[::3]
    check_gather(gather, rows(9, triton.MAX_BLOCK + 5, torch.float32), slot_N, num_experts_per_token=2)


def check_every_part_of_combine(combine):
    order = make_order(9, 4, 3, has_sentinels=True)
    # A narrow result shows what was rounded too early, a wide one in which order terms were added.
    for dtype in (torch.bfloat16, torch.float32):
        y_ND, weight_TK = poison_sentinels(
            rows(36, triton.MAX_BLOCK + 5, dtype), poisoned(torch.rand(9, 4, device=DEVICE)), order
        )
        check_combine(combine, y_ND, order, weight_TK=weight_TK)


test_a_fault_planted_in_gather_is_seen, test_in_gather_the_same_check_passes = planted_faults(
    triton, lambda module: check_every_part_of_gather(module.gather_rows), GATHER_FAULTS
)
test_a_fault_planted_in_combine_is_seen, test_in_combine_the_same_check_passes = planted_faults(
    triton, lambda module: check_every_part_of_combine(module.combine_rows), COMBINE_FAULTS
)
