"""The order of routed slots: the plain twin equal to Python's own sort; the kernels themselves in the interpreter
and by the compiler.
"""

import pytest
import torch

from lightning_fastft.core.errors import OptionError, ShapeError
from lightning_fastft.kernels.expert_sort import reference
from lightning_fastft.kernels.expert_sort.op import ExpertOrder, sort_by_expert
from tests.support.kernel_harness import planted_faults
from tests.support.truth import Watch


def sort_in_python(expert_TK, num_experts):
    key_N = [expert if 0 <= expert < num_experts else num_experts for expert in expert_TK.flatten().tolist()]
    slot_N = sorted(range(len(key_N)), key=key_N.__getitem__)
    place_N = [0] * len(key_N)
    for place, slot in enumerate(slot_N):
        place_N[slot] = place
    return slot_N, place_N, [sum(key <= expert for key in key_N) for expert in range(num_experts)]


def check(sort, expert_TK, num_experts):
    slot_N, place_N, end_E = sort_in_python(expert_TK, num_experts)
    order = sort(expert_TK, num_experts=num_experts)
    assert all(tensor.dtype is torch.int32 and tensor.is_contiguous() for tensor in order)
    assert order.place_TK.shape == expert_TK.shape
    assert order.slot_N.tolist() == slot_N
    assert order.place_TK.flatten().tolist() == place_N
    assert order.end_E.tolist() == end_E


@pytest.mark.parametrize("num_experts", [1, 2, 5, 8, 128])
@pytest.mark.parametrize("num_choices", [1, 2, 4, 8])
@pytest.mark.parametrize("num_tokens", [0, 1, 7, 64, 257])
def test_order_inverse_and_ends_equal_a_sort_in_python(num_tokens, num_choices, num_experts):
    expert_TK = torch.randint(0, num_experts, (num_tokens, num_choices))
    check(sort_by_expert, expert_TK, num_experts)
    check(sort_by_expert, expert_TK.int(), num_experts)


def test_slots_without_an_expert_come_last_in_slot_order():
    expert_TK = torch.tensor([[9, 1], [5, -1], [0, 2**40], [4, 5]])
    check(sort_by_expert, expert_TK, 5)
    order = sort_by_expert(expert_TK, num_experts=5)
    assert order.slot_N[order.end_E[-1] :].tolist() == [0, 2, 3, 5, 7]


@pytest.mark.parametrize("expert", [0, 3, 7, 8])
def test_all_tokens_to_one_expert(expert):
    check(sort_by_expert, torch.full((65, 2), expert), 8)


def test_strided_ids():
    expert_TK = torch.randint(0, 6, (41, 12))
    check(sort_by_expert, expert_TK[3::2, 1::3], 5)
    check(sort_by_expert, expert_TK.T[::3], 5)
    check(sort_by_expert, torch.tensor([[3, 0, 1]]).expand(20, 3), 4)


def test_two_runs_are_bit_equal_and_the_ids_stay():
    expert_TK = torch.randint(0, 6, (200, 4))
    before = expert_TK.clone()
    first, second = (sort_by_expert(expert_TK, num_experts=5) for _ in range(2))
    assert isinstance(first, ExpertOrder)
    assert all(torch.equal(one, other) for one, other in zip(first, second))
    assert torch.equal(expert_TK, before)


def test_never_waits():
    with Watch() as watch:
        sort_by_expert(torch.randint(0, 6, (50, 4)), num_experts=5)
    assert watch.waits == []


FAULTS = {
    "stability lost": "torch.argsort(key_N{, stable=True => .flip(0), stable=True).mul(-1).add(key_N.shape[0] - 1})",
    "end before its expert": "right={True => False}",
    "end off by one": "arange({num_experts => 1, num_experts + 1}, dtype",
    "sentinels keep their own order": "{torch.where(is_known_N, expert_N, num_experts) => expert_N}",
    "sentinels given to the last expert": (
        "{torch.where(is_known_N, expert_N, num_experts => expert_N.clamp(0, num_experts - 1})"
    ),
    "inverse forgotten": "place_N[{slot_N] = => :] = slot_N * 1 + 0 *} torch.arange",
}


test_a_planted_fault_is_seen, test_without_a_fault_the_same_check_passes = planted_faults(
    reference, lambda module: check_every_part(module.sort_slots), FAULTS
)


def check_every_part(sort):
    check(sort, torch.randint(-2, 9, (50, 2)), 5)


@pytest.mark.parametrize(
    ("expert_TK", "change", "error", "message"),
    [
        (torch.zeros(3, 0, dtype=torch.int64), {}, ShapeError, "K >= 1"),
        (torch.zeros(1, 1, dtype=torch.int64).expand(2**28, 8), {}, ShapeError, "int32"),
        (torch.zeros(3, 2, dtype=torch.int64), {"num_experts": 0}, OptionError, "between 1 and 4096"),
        (torch.zeros(3, 2, dtype=torch.int64), {"num_experts": 4097}, OptionError, "between 1 and 4096"),
    ],
)
def test_impossible_arguments_are_refused(expert_TK, change, error, message):
    with pytest.raises(error, match=message):
        sort_by_expert(expert_TK, **{"num_experts": 5, **change})
