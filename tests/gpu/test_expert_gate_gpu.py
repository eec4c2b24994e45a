"""The gate of an expert on a CUDA device: kernels against the truth at real widths, bit-equal twice, no host
wait, no copies.
"""

from pathlib import Path

import pytest
import torch

from lightning_fastft.core.errors import OptionError
from lightning_fastft.kernels.expert_gate import reference
from lightning_fastft.kernels.expert_gate.op import gate_backward, gate_forward
from lightning_fastft.kernels.expert_gate.reference import GateForm
from tests.kernels.test_expert_gate import (
    PublicEntries,
    check_against_truth,
    check_rows_of_nan_stay_alone,
    make_inputs,
)
from tests.support.children import run_on_device
from tests.support.host_waits import waits_are_errors

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).parents[2]
NUM_ROWS = 16_411
# Qwen3-30B-A3B, gpt-oss, Gemma 4 and a width that fits no tile.
CASES = (
    (GateForm(), 768),
    (GateForm(is_interleaved=True, activation="clamped"), 2880),
    (GateForm(activation="gelu_tanh"), 704),
    (GateForm(is_interleaved=True, activation="gelu"), 1411),
)


def test_the_triton_kernels_pass_their_tests_on_the_device():
    run_on_device("triton_expert_gate.py")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("form", "num_columns"), CASES)
def test_values_and_every_gradient_equal_the_truth_at_real_widths(form, num_columns, dtype):
    check_against_truth(PublicEntries, 2053, num_columns, dtype, form, device="cuda")
    check_rows_of_nan_stay_alone(PublicEntries, dtype, form, device="cuda")


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


def test_a_forced_reference_is_obeyed_and_float64_takes_it():
    d_act_NF, gate_up_NP, weight_N = make_inputs(65, 33, torch.float32, GateForm(), device="cuda")
    arguments = {"form": GateForm(), "weight_N": weight_N}
    forced = gate_backward(d_act_NF, gate_up_NP, backend="reference", **arguments)
    expected = reference.gate_backward(d_act_NF, gate_up_NP, **arguments)
    assert torch.equal(forced.d_gate_up_NP, expected.d_gate_up_NP)
    wide = gate_backward(d_act_NF.double(), gate_up_NP.double(), **arguments)
    assert wide.d_weight_N.dtype is torch.float64
    with pytest.raises(OptionError, match="float64"):
        gate_backward(d_act_NF.double(), gate_up_NP.double(), backend="triton", **arguments)
