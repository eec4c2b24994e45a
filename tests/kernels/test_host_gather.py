"""Rows of a table in host memory: equal to an embedding's, on a CPU by the plain twin; the kernel itself in the
interpreter and by the compiler.
"""

import pytest
import torch

from lightning_fastft.core.errors import ShapeError
from lightning_fastft.kernels.host_gather.op import host_gather
from tests.support.truth import Watch


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("index_dtype", [torch.int64, torch.int32])
def test_equals_an_embedding(dtype, index_dtype):
    weight_VD = torch.randn(11, 13).to(dtype)
    token_T = torch.randint(0, 11, (29,), dtype=index_dtype)
    assert torch.equal(host_gather(weight_VD, token_T), torch.nn.functional.embedding(token_T, weight_VD))


def test_rows_of_a_strided_table_and_no_rows():
    weight_VD = torch.randn(11, 20)[:, 3:16]
    assert torch.equal(host_gather(weight_VD, torch.tensor([10, 0])), weight_VD[[10, 0]])
    assert host_gather(weight_VD, torch.tensor([], dtype=torch.int64)).shape == (0, 13)


def test_a_token_outside_the_table_is_an_error_on_a_cpu():
    with pytest.raises(IndexError):
        host_gather(torch.randn(3, 2), torch.tensor([3]))


def test_never_waits():
    with Watch() as watch:
        host_gather(torch.randn(3, 2), torch.tensor([2, 1]))
    assert watch.waits == []


@pytest.mark.parametrize(
    ("weight_VD", "token_T", "message"),
    [
        (torch.randn(3), torch.tensor([1]), "2 axes"),
        (torch.randn(3, 2).double(), torch.tensor([1]), "dtype"),
        (torch.randn(3, 2), torch.tensor([[1]]), "1 axes"),
        (torch.randn(3, 2), torch.tensor([1.0]), "dtype"),
        (torch.randn(2, 3).T, torch.tensor([1]), "strides"),
        (torch.randn(3, 2), torch.tensor([1, 0, 2])[::2], "strides"),
        (torch.randn(3, 2, requires_grad=True), torch.tensor([1]), "frozen"),
        (torch.empty(3, 2, device="meta"), torch.tensor([1]), "meta"),
    ],
)
def test_what_the_kernel_would_read_wrongly_is_refused(weight_VD, token_T, message):
    with pytest.raises(ShapeError, match=message):
        host_gather(weight_VD, token_T)
