"""Blocks on a diagonal on a CUDA device: the plain twin's bits at the sizes of real adapters, in one launch,
without a host wait.
"""

import pytest
import torch

from lightning_fastft.kernels.block_diagonal import reference
from lightning_fastft.kernels.block_diagonal.op import write_block_diagonal
from tests.support.host_waits import waits_are_errors

pytestmark = pytest.mark.gpu


def test_adapters_of_14_billion_parameters():
    dense = torch.full((34_816, 5120 + 32), float("nan"), dtype=torch.bfloat16, device="cuda")
    blocks = [torch.randn(17_408, 16, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    expected = torch.empty(34_816, 32, dtype=torch.bfloat16, device="cuda")
    reference.write_block_diagonal(expected, blocks)
    write_block_diagonal(dense[:, 5120:], blocks)
    with waits_are_errors():
        write_block_diagonal(dense[:, 5120:], blocks)
    assert torch.equal(dense[:, 5120:], expected)
    assert dense[:, :5120].isnan().all()
