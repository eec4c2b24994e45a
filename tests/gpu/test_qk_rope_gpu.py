"""Norm and rotation of q and k on a CUDA device: kernels against the truth at real widths, bit-equal twice, no
host wait, no copies.
"""

import pytest
import torch

from lightning_fastft.kernels.qk_rope import op
from lightning_fastft.kernels.qk_rope.reference import RopeForm
from tests.kernels.test_qk_rope import (
    check_against_truth,
    check_rows_of_nan_stay_alone,
    check_shares,
    check_without_eps,
    make_inputs,
    run_ours,
)
from tests.support.host_waits import waits_are_errors

pytestmark = pytest.mark.gpu
NUM_TOKENS = 16_411
# Llama 3 8B, Qwen3 30B-A3B, Qwen3 0.6B, Gemma 3 4B, GLM-4 9B, GLM-4.5, ERNIE 4.5 0.3B, Phi-2's width of 80, and numbers
# that fit no tile.
CASES = (
    RopeForm(32, 8, 128),
    RopeForm(32, 4, 128, has_norm=True),
    RopeForm(16, 8, 128, has_norm=True),
    RopeForm(8, 4, 256, has_norm=True, weight_offset=1.0, is_weight_wide=True),
    RopeForm(32, 2, 128, rotary_width=64, is_interleaved=True),
    RopeForm(96, 8, 128, rotary_width=64, has_norm=True, eps=1e-5),
    RopeForm(16, 2, 128, is_interleaved=True),
    RopeForm(32, 32, 80, rotary_width=32),
    RopeForm(7, 3, 96, rotary_width=70, has_norm=True, is_interleaved=True),
    RopeForm(5, 1, 192, has_norm=True),
)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("form", CASES)
def test_values_and_every_gradient_equal_the_truth_at_real_widths(form, dtype):
    for num_tokens in (1, 1031):
        check_against_truth(op, num_tokens, form, dtype, device="cuda")
    check_rows_of_nan_stay_alone(op, form, dtype, device="cuda")
    if form.num_heads % form.num_kv_heads == 0:
        check_shares(op, 1031, form, dtype, device="cuda")


@pytest.mark.parametrize("angle_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32])
def test_dtypes_of_angles_and_weights(angle_dtype, weight_dtype):
    for form in CASES[:4]:
        check_against_truth(
            op, 131, form, torch.bfloat16, device="cuda", angle_dtype=angle_dtype, weight_dtype=weight_dtype
        )


def test_without_eps_nothing_is_divided_by_zero():
    check_without_eps(op, device="cuda")


@pytest.mark.parametrize("form", CASES)
def test_two_runs_are_bit_equal_and_the_host_never_waits(form):
    inputs = make_inputs(NUM_TOKENS, form, torch.bfloat16, device="cuda")
    with waits_are_errors():
        first, second = (run_ours(op, inputs, form) for _ in range(2))
    assert all(one is other is None or torch.equal(one, other) for one, other in zip(first, second))
