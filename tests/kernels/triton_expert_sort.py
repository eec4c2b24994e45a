"""Tests of the Triton kernels of expert_sort, interpreted by test_interpreted.py and compiled by tests/gpu."""

from unittest import mock

import pytest
import torch

from lightning_fastft.kernels.expert_sort import reference, triton
from tests.support.children import thinned
from tests.support.kernel_harness import DEVICE, planted_faults

TOKENS = (0, 1, 7, 64, 257)
CHOICES = (1, 2, 4, 8)
EXPERTS = (1, 2, 5, 8, 128)


class Fenced:
    """PyTorch with an ``empty`` whose memory holds FRESH, between two fences that must stay as they are; stray
    writes stay inside the fences.
    """

    FRESH, FENCE, FENCE_SIZE = 977, -5, 2**17

    def __init__(self):
        self.buffers = []

    def __getattr__(self, name):
        return getattr(torch, name)

    def empty(self, shape, **options):
        size = torch.Size([shape] if isinstance(shape, int) else shape)
        buffer = torch.full((size.numel() + 2 * self.FENCE_SIZE,), self.FENCE, **options)
        inner = buffer[self.FENCE_SIZE : -self.FENCE_SIZE]
        inner.fill_(self.FRESH)
        self.buffers.append(buffer)
        return inner.view(size)

    def is_whole(self):
        size = self.FENCE_SIZE
        return all(
            (buffer[:size] == self.FENCE).all() and (buffer[-size:] == self.FENCE).all() for buffer in self.buffers
        )


def check(module, expert_TK, num_experts):
    expected = reference.sort_slots(expert_TK, num_experts=num_experts)
    fenced = Fenced()
    with mock.patch.object(module, "torch", fenced):
        order = module.sort_slots(expert_TK.to(DEVICE), num_experts=num_experts)
    assert fenced.is_whole()
    for name, one, other in zip(expected._fields, order, expected):
        assert one.dtype is torch.int32, name
        assert one.shape == other.shape, name
        assert one.is_contiguous(), name
        assert torch.equal(one.cpu(), other), f"{name}: {one.cpu().tolist()[:40]} instead of {other.tolist()[:40]}"


def strided(expert_TK, *, dtype, is_transposed):
    """The same ids apart from each other, with another expert's id around each of them."""
    num_tokens, num_choices = expert_TK.shape
    buffer = torch.full((3 * num_tokens + 2, 2 * num_choices + 2), 1, dtype=dtype)
    if is_transposed:
        buffer = buffer.T.contiguous().T
    inner = buffer[1:-1:3, 1:-1:2]
    inner.copy_(expert_TK)
    return inner


# Any two of tokens, choices and experts meet.
@pytest.mark.parametrize(
    ("num_tokens", "num_choices", "num_experts"),
    thinned(TOKENS, CHOICES, EXPERTS, keep=lambda tokens, choices, experts: (tokens + experts) % 4 == choices),
)
def test_order_is_bit_equal(num_tokens, num_choices, num_experts):
    check(triton, torch.randint(0, num_experts, (num_tokens, num_choices)), num_experts)


@pytest.mark.parametrize(
    "num_slots", [triton.BLOCK_SLOTS - 1, triton.BLOCK_SLOTS, triton.BLOCK_SLOTS + 1, 2 * triton.BLOCK_SLOTS]
)
@pytest.mark.parametrize(
    "num_experts", [triton.BLOCK_BINS - 2, triton.BLOCK_BINS - 1, triton.BLOCK_BINS, triton.BLOCK_BINS + 1]
)
def test_sizes_around_a_block(num_slots, num_experts):
    check(triton, torch.randint(0, num_experts + 1, (num_slots, 1)), num_experts)


@pytest.mark.parametrize("num_experts", [1, 5, 300])
def test_slots_without_an_expert_come_last_in_slot_order(num_experts):
    expert_TK = torch.randint(0, num_experts + 3, (131, 3))
    expert_TK[5], expert_TK[70, 1], expert_TK[130, 2] = num_experts, -1, 2**40
    check(triton, expert_TK, num_experts)


@pytest.mark.parametrize("expert", [0, 3, 7, 8])
def test_all_tokens_to_one_expert(expert):
    check(triton, torch.full((150, 2), expert), 8)


def test_experts_without_a_token():
    check(triton, torch.tensor([[2, 9], [9, 2], [4, 2]]).repeat(50, 1), 12)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("num_choices", [1, 3, 4])
def test_strided_ids(num_choices, is_transposed, dtype):
    check(triton, strided(torch.randint(0, 6, (100, num_choices)), dtype=dtype, is_transposed=is_transposed), 5)


def test_ids_that_repeat_one_row():
    check(triton, torch.tensor([[3, 0, 1]]).expand(200, 3), 4)


@pytest.mark.parametrize("block_blocks", [1, 2, 4])
def test_sums_over_more_blocks_than_a_tile_holds(monkeypatch, block_blocks):
    monkeypatch.setattr(triton, "BLOCK_BLOCKS", block_blocks)
    check(triton, torch.randint(0, 6, (triton.BLOCK_SLOTS * 7 // 2 + 5, 2)), 5)


def test_the_ids_stay():
    expert_TK = torch.randint(0, 5, (300, 2), device=DEVICE)
    before = expert_TK.clone()
    triton.sort_slots(expert_TK, num_experts=5)
    assert torch.equal(expert_TK, before)


def test_two_runs_are_bit_equal():
    expert_TK = torch.randint(0, 9, (400, 2), device=DEVICE)
    first, second = (triton.sort_slots(expert_TK, num_experts=8) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first, second))


FAULTS = {
    "order inside a block reversed": "other_lane[None, :] {< => >} lane[:, None]",
    "a slot counts itself": "other_lane[None, :] <{ => =} lane[:, None]",
    "only the first tile of earlier slots": "range(0, {BLOCK_SLOTS => BLOCK_EARLIER}, BLOCK_EARLIER)",
    "earlier blocks lost": "place = begin + {earlier + => } rank",
    "sum includes the block itself": "total + tl.cumsum(count, axis=0) {- count => }",
    "sum not carried to the next tile": "earlier = {total + => } tl.cumsum",
    "total of the last tile only": "total {+ => }= tl.sum(count, axis=0)",
    "mask of the sum lost": "inside = offs {< num_blocks => >= 0}",
    "end without its own expert": "tl.store(end_ptr + experts, end{ => - 1},",
    "last end lost": "tl.store(end_ptr + experts, end, mask=experts < num_experts{ => - 1})",
    "begin of the expert after": "tl.gather(end, {previous => tl.minimum(bin_of_slot, EXPERTS - 1)}, axis=0)",
    "ids above the last expert keep their order": "bin_of_slot = tl.where(is_known, expert, num_experts{ => - 1})",
    "negative ids counted as expert 0": "{(expert >= 0) & => } (expert < num_experts)",
    "slots behind the last one counted": "return tl.where(inside, bin_of_slot, {num_experts + 1 => 0})",
    "last slot lost": "slot.to(tl.int32), mask={inside => slot < num_slots - 1})",
    "mask of the places lost": "tl.store(place_ptr + slot, place{, mask=inside => })",
    "wrong strides": "given = (num_slots, {*expert_TK.stride() => num_choices, 1},",
    "choice dropped": "{(slot % K) => 0} * choice_stride",
    "last tile of bins lost": "ceil_div(num_bins{ => - 2}, BLOCK_BINS)",
    "last bin not counted": "mask=bins <{= => } num_experts)",
    "mask of the bins lost": "mask=bins {<= num_experts => >= 0})",
}


def check_every_part(module):
    num_experts = triton.BLOCK_BINS + 1
    expert_TK = torch.randint(-1, num_experts + 2, (3 * triton.BLOCK_SLOTS // 2 - 9, 2))
    with mock.patch.multiple(module, BLOCK_BLOCKS=2):
        check(module, strided(expert_TK, dtype=torch.int64, is_transposed=False), num_experts)


test_a_planted_fault_is_seen, test_without_a_fault_the_same_check_passes = planted_faults(
    triton, check_every_part, FAULTS
)
