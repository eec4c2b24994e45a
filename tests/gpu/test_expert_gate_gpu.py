"""The gate of an expert on a CUDA device: kernels against the truth at real widths, bit-equal twice, no host
wait, no copies.
"""

import pytest
import torch

from lightning_fastft.kernels.expert_gate import op
from lightning_fastft.kernels.expert_gate.op import gate_backward, gate_forward
from lightning_fastft.kernels.expert_gate.reference import GateForm
from tests.kernels.test_expert_gate import (
    check_against_truth,
    check_rows_of_nan_stay_alone,
    make_inputs,
)
from tests.support.host_waits import waits_are_errors

pytestmark = pytest.mark.gpu
NUM_ROWS = 16_411
# Qwen3-30B-A3B, gpt-oss, Gemma 4 and a width that fits no tile.
CASES = (
    (GateForm(), 768),
    (GateForm(is_interleaved=True, activation="clamped"), 2880),
    (GateForm(activation="gelu_tanh"), 704),
    (GateForm(is_interleaved=True, activation="gelu"), 1411),
)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("form", "num_columns"), CASES)
def test_values_and_every_gradient_equal_the_truth_at_real_widths(form, num_columns, dtype):
    check_against_truth(op, 2053, num_columns, dtype, form, device="cuda")
    check_rows_of_nan_stay_alone(op, dtype, form, device="cuda")


@pytest.mark.parametrize(("form", "num_columns"), CASES)
def test_two_runs_are_bit_equal_and_the_host_never_waits(form, num_columns):
    d_act_NF, gate_up_NP, weight_N = make_inputs(NUM_ROWS, num_columns, torch.bfloat16, form, device="cuda")
    with waits_are_errors():
        runs = [
            (
                gate_forward(gate_up_NP, form=form),
                *gate_backward(d_act_NF, gate_up_NP, form=form, weight_N=weight_N, need_act=True),
            )
            for _ in range(2)
        ]
    assert all(torch.equal(one, other) for one, other in zip(*runs))
    # The rebuilt activation is the one that the forward gave.
    assert torch.equal(runs[0][0], runs[0][2])
