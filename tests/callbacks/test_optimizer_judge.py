"""What OptimizerJudge reads off tensors: bits that changed, and the largest value of a gradient."""

import pytest
import torch

from lightning_fastft.callbacks.optimizer_judge import _checksums, _is_above_zero, _largest_values

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
@pytest.mark.parametrize("shape", [(), (1,), (3,), (4, 6), (7, 3)])
def test_checksum_sees_the_last_bit(dtype, shape):
    tensor = torch.randn(shape).to(dtype)
    changed = tensor.clone()
    integer = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    changed.view(integer).view(-1)[-1] += 1
    before, after = _checksums([tensor, tensor], CPU), _checksums([tensor.clone(), changed], CPU)
    assert (before != after).tolist() == [False, True]


def test_checksum_of_slices_and_transposed_tensors():
    base = torch.randn(5, 9).to(torch.bfloat16)
    for view in (base.T, base[:, 1:4], base.view(-1)[1:8]):
        before = _checksums([view], CPU)
        assert torch.equal(_checksums([view], CPU), before)
        view += 1
        assert not torch.equal(_checksums([view], CPU), before)


def test_largest_values_of_every_kind_of_gradient():
    sparse = torch.sparse_coo_tensor(torch.tensor([[1]]), torch.tensor([-4.0]), (3,))
    gradients = [
        torch.tensor([1.0, -3.0]),
        None,
        torch.zeros(2),
        torch.tensor([1.0, float("nan")]),
        torch.tensor([1e-38]),
        sparse,
    ]
    found = _largest_values(gradients, CPU).tolist()
    assert found[:3] == [3.0, 0.0, 0.0]
    assert found[3] != found[3]
    assert found[4] > 0
    assert found[5] == 4.0
    assert _largest_values([None, None], CPU).tolist() == [0.0, 0.0]
    assert _largest_values([torch.tensor([1e-300], dtype=torch.float64)], CPU).item() > 0


def test_rates():
    assert [_is_above_zero(rate) for rate in (0.0, 1e-30, torch.tensor(0.0), torch.tensor(0.1))] == [
        False,
        True,
        False,
        True,
    ]
