"""Expert order and rows on a CUDA device at the sizes of real models: bit-equal to the plain twins and to
themselves, and the host never waits.
"""

import pytest
import torch

from lightning_fastft.kernels.expert_rows import reference
from lightning_fastft.kernels.expert_rows.op import combine_rows, gather_rows
from lightning_fastft.kernels.expert_sort.op import sort_by_expert
from lightning_fastft.kernels.expert_sort.reference import sort_slots
from tests.support.host_waits import waits_are_errors

pytestmark = pytest.mark.gpu
# Tokens, experts per token, experts, model width: Qwen3-30B-A3B, gpt-oss, Mixtral, odd sizes, one expert, as many
# experts as are allowed.
SIZES = [
    (8192, 8, 128, 2048),
    (16384, 4, 32, 2880),
    (4096, 2, 8, 4096),
    (8191, 6, 61, 1111),
    (257, 1, 1, 130),
    (5000, 3, 4096, 64),
]


def make_ids(num_tokens, num_choices, num_experts, *, kind):
    generator = torch.Generator("cuda").manual_seed(0)
    shape = (num_tokens, num_choices)
    if kind == "skewed":
        # Most tokens go to a few experts, many experts to none.
        share = torch.rand(shape, generator=generator, device="cuda")
        return (share**6 * num_experts).long()
    num_ids = num_experts + (max(num_experts // 4, 1) if kind == "sentinels" else 0)
    return torch.randint(0, num_ids, shape, generator=generator, device="cuda")


@pytest.mark.parametrize("kind", ["even", "skewed", "sentinels"])
@pytest.mark.parametrize("size", SIZES)
def test_order_is_bit_equal_twice_and_nobody_waits(size, kind):
    num_tokens, num_choices, num_experts, _ = size
    expert_TK = make_ids(num_tokens, num_choices, num_experts, kind=kind)
    check_order(expert_TK, num_experts)
    check_order(expert_TK.int().T.contiguous().T, num_experts)


def test_order_of_millions_of_slots():
    check_order(make_ids(2**19 + 1, 8, 512, kind="skewed"), 512)


def check_order(expert_TK, num_experts):
    with waits_are_errors():
        expected = sort_slots(expert_TK, num_experts=num_experts)
        first, second = (sort_by_expert(expert_TK, num_experts=num_experts) for _ in range(2))
    for name, one, other, true in zip(expected._fields, first, second, expected):
        assert one.dtype is torch.int32
        assert torch.equal(one, true), name
        assert torch.equal(one, other), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["even", "skewed", "sentinels"])
@pytest.mark.parametrize("size", SIZES)
def test_rows_are_bit_equal_twice_and_nobody_waits(size, kind, dtype):
    num_tokens, num_choices, num_experts, width = size
    order = sort_by_expert(make_ids(num_tokens, num_choices, num_experts, kind=kind), num_experts=num_experts)
    # Rows apart from each other, with NaN between them.
    buffer = torch.full((num_tokens, width + 24), float("nan"), dtype=dtype, device="cuda")
    x_TD = buffer[:, 8 : width + 8].copy_(torch.randn(num_tokens, width, device="cuda"))
    weight_TK = torch.rand(num_tokens, num_choices, device="cuda")
    with waits_are_errors():
        expected_ND = reference.gather_rows(x_TD, order.slot_N, num_experts_per_token=num_choices)
        gathered = [gather_rows(x_TD, order.slot_N, num_experts_per_token=num_choices) for _ in range(2)]
    assert all(torch.equal(y_ND, expected_ND) for y_ND in gathered)

    y_ND = torch.randn(num_tokens * num_choices, width, device="cuda").to(dtype)
    y_ND[int(order.end_E[-1]) :] = float("nan")
    given = (y_ND, order.place_TK, order.end_E)
    for options in ({}, {"weight_TK": weight_TK}, {"weight_TK": weight_TK.to(dtype)}):
        with waits_are_errors():
            expected_TD = reference.combine_rows(*given, **options)
            combined = [combine_rows(*given, **options) for _ in range(2)]
        assert torch.isfinite(expected_TD).all()
        assert all(torch.equal(out_TD, expected_TD) for out_TD in combined)
