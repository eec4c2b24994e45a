"""A thin product added to a wide matrix on a CUDA device: the truth at the size of a layer, bit-equal twice, no
host wait, no copies.
"""

import pytest
import torch

from lightning_fastft.kernels.low_rank_add.op import add_low_rank
from tests.kernels.test_low_rank_add import formula, make_inputs
from tests.support.host_waits import waits_are_errors
from tests.support.truth import one_unit

pytestmark = pytest.mark.gpu
NUM_ROWS, NUM_COLUMNS = 32_768, 4_096
# Truth in float64 is made for so many rows at a time.
PIECE = 4_096


def beside(tensor):
    """The same values in the middle columns of a wider matrix of NaN."""
    wider = torch.full((tensor.shape[0], tensor.shape[1] + 24), float("nan"), dtype=tensor.dtype, device=tensor.device)
    return wider[:, 8:-16].copy_(tensor)


def largest_errors(sum_TN, inputs):
    """Return the largest error of ours, and what is allowed: twice that of fp32 rounded once, or a unit in the
    last place of the largest value.
    """
    error, plain_error, largest = (torch.zeros((), dtype=torch.float64, device="cuda") for _ in range(3))
    for start in range(0, sum_TN.shape[0], PIECE):
        base_TN, low_TR, factor_RN, residual_TN = inputs
        rows = slice(start, start + PIECE)
        piece = (base_TN[rows], low_TR[rows], factor_RN, None if residual_TN is None else residual_TN[rows])
        truth, plain = formula(*piece, wide=torch.float64), formula(*piece, wide=torch.float32).to(sum_TN.dtype)
        # A maximum with NaN is NaN.
        error = torch.maximum(error, (sum_TN[rows].double() - truth).abs().max())
        plain_error = torch.maximum(plain_error, (plain.double() - truth).abs().max())
        largest = torch.maximum(largest, truth.abs().max())
    return error.item(), max(2 * plain_error.item(), one_unit(largest, sum_TN.dtype))


@pytest.mark.parametrize("is_factor_transposed", [False, True])
@pytest.mark.parametrize("has_residual", [False, True])
@pytest.mark.parametrize("num_ranks", [16, 48])
def test_the_sum_of_a_layer_equals_the_truth(num_ranks, has_residual, is_factor_transposed):
    inputs = make_inputs(NUM_ROWS, NUM_COLUMNS, num_ranks, torch.bfloat16, device="cuda", has_residual=has_residual)
    base_TN, low_TR, _, residual_TN = (None if tensor is None else beside(tensor) for tensor in inputs)
    factor_RN = beside(inputs[2].T).T if is_factor_transposed else beside(inputs[2])
    with waits_are_errors():
        first, second = (add_low_rank(base_TN, low_TR, factor_RN, residual_TN=residual_TN) for _ in range(2))
        are_equal = (first == second).all()
    assert are_equal.item()
    error, bound = largest_errors(first, inputs)
    assert error <= bound
    # In place: the same bits, no memory, and nothing beside the columns is written.
    out = base_TN if residual_TN is None else residual_TN
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    add_low_rank(base_TN, low_TR, factor_RN, residual_TN=residual_TN, out=out)
    assert torch.cuda.max_memory_allocated() == before
    are_equal = (out == first).all()
    assert are_equal.item()
    num_nan = out._base.isnan().sum().item()
    assert num_nan == NUM_ROWS * 24


def test_more_than_two_to_the_31_elements():
    num_rows = 2**31 // NUM_COLUMNS + 3
    base_TN = torch.zeros(num_rows, NUM_COLUMNS, dtype=torch.bfloat16, device="cuda")
    low_TR = torch.ones(num_rows, 16, dtype=torch.bfloat16, device="cuda")
    low_TR[-1] = 2.0
    add_low_rank(base_TN, low_TR, torch.ones(NUM_COLUMNS, 16, dtype=torch.bfloat16, device="cuda").T, out=base_TN)
    low, high = base_TN[:-1].aminmax()
    assert (low.item(), high.item()) == (16.0, 16.0)
    low, high = base_TN[-1].aminmax()
    assert (low.item(), high.item()) == (32.0, 32.0)
