"""Repeated heads: torch's own on a CPU by the plain twin; the kernel itself in the interpreter and by the compiler."""

import pytest
import torch

from lightning_fastft.core.errors import OptionError, ShapeError
from lightning_fastft.kernels.repeat_heads.op import repeat_heads
from tests.support.truth import Watch


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("shape", "num_heads"), [((5, 2, 4), 6), ((1, 3, 2), 3), ((4, 1, 8), 5), ((0, 2, 4), 4), ((3, 2, 0), 4)]
)
def test_every_head_stands_beside_itself(shape, num_heads, dtype):
    x = torch.randn(shape).to(dtype)
    found = repeat_heads(x, num_heads)
    assert found.shape == (shape[0], num_heads, shape[2])
    assert found.is_contiguous()
    for head in range(num_heads):
        assert torch.equal(found[:, head], x[:, head * shape[1] // num_heads])


def test_no_graph_and_no_wait():
    with Watch() as watch:
        found = repeat_heads(torch.ones(3, 2, 4, requires_grad=True), 4)
    assert watch.waits == []
    assert not found.requires_grad


@pytest.mark.parametrize(
    ("x_TGW", "num_heads", "error", "message"),
    [
        (torch.ones(3, 2, 4), 3, ShapeError, "3 query heads cannot share the 2 heads"),
        (torch.ones(3, 0, 4), 3, ShapeError, "cannot share the 0 heads"),
        (torch.ones(3, 2, 4), 0, OptionError, "num_heads"),
    ],
)
def test_what_the_kernel_would_read_wrongly_is_refused(x_TGW, num_heads, error, message):
    with pytest.raises(error, match=message):
        repeat_heads(x_TGW, num_heads)
