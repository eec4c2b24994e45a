"""RMSNorm on a CUDA device: kernels against the truth at real widths, bit-equal twice, no host
wait, no copies.
"""

import pytest
import torch

from lightning_fastft.kernels.rms_norm import op
from lightning_fastft.kernels.rms_norm.op import MAX_COLUMNS, rms_norm_backward, rms_norm_forward
from tests.kernels.test_rms_norm import (
    GEMMA,
    GPT_OSS,
    LLAMA,
    check_against_truth,
    check_in_place,
    check_rows_of_nan_stay_alone,
    check_without_the_weight,
    make_inputs,
)
from tests.support.host_waits import waits_are_errors

pytestmark = pytest.mark.gpu
# A head of Qwen3, Qwen3-30B-A3B, gpt-oss, Llama-3 8B, Gemma 3 27B, the widest row; rows that fit no block.
CASES = (
    (LLAMA, 100_003, 128),
    (LLAMA, 8_209, 2048),
    (GPT_OSS, 8_209, 2880),
    (LLAMA, 8_209, 4096),
    (GEMMA, 4_099, 5376),
    (LLAMA, 1_031, MAX_COLUMNS),
)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("form", "num_rows", "num_columns"), CASES)
def test_values_and_every_gradient_equal_the_truth_at_real_widths(form, num_rows, num_columns, dtype):
    check_against_truth(op, num_rows, num_columns, dtype, form, device="cuda")
    check_against_truth(op, 65, num_columns, dtype, form, device="cuda", weight_dtype=torch.float32)
    check_in_place(op, num_rows, num_columns, dtype, form, device="cuda")
    check_rows_of_nan_stay_alone(op, dtype, form, device="cuda")
    check_without_the_weight(op, dtype, form, device="cuda")


@pytest.mark.parametrize(("form", "num_rows", "num_columns"), CASES)
def test_two_runs_are_bit_equal_and_the_host_never_waits(form, num_rows, num_columns):
    x_TD, weight_D, d_y_TD, addend_TD = make_inputs(num_rows, num_columns, torch.bfloat16, form, device="cuda")
    runs = []
    with waits_are_errors():
        for _ in range(2):
            y_TD = rms_norm_forward(x_TD, weight_D, form=form)
            arguments = {"form": form, "addend_TD": addend_TD, "needs_weight": True}
            runs.append((y_TD, *rms_norm_backward(d_y_TD, x_TD, weight_D, **arguments)))
    assert all(torch.equal(one, other) for one, other in zip(*runs))


@pytest.mark.parametrize(("form", "num_rows", "num_columns"), CASES)
def test_overwriting_a_gradient_takes_no_memory(form, num_rows, num_columns):
    x_TD, weight_D, d_y_TD, addend_TD = make_inputs(num_rows, num_columns, torch.bfloat16, form, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    rms_norm_backward(d_y_TD, x_TD, weight_D, form=form, addend_TD=addend_TD, needs_weight=False, out=addend_TD)
    assert torch.cuda.max_memory_allocated() == before
