"""Blocks on a diagonal: equal to torch's, on a CPU by the plain twin; the kernel itself in the interpreter and by
the compiler.
"""

import pytest
import torch

from lightning_fastft.core.errors import ShapeError
from lightning_fastft.kernels.block_diagonal.op import write_block_diagonal
from tests.support.truth import Watch


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("shapes", [[(3, 2)], [(3, 2), (5, 0), (1, 4)], [(2, 1)] * 4, [(4, 0)], []])
def test_equals_torch(dtype, shapes):
    blocks = [torch.randn(shape).to(dtype) for shape in shapes]
    expected = torch.block_diag(*blocks) if blocks else torch.empty(0, 0, dtype=dtype)
    room = torch.full((expected.shape[0], expected.shape[1] + 5), float("nan"), dtype=dtype)
    write_block_diagonal(room[:, 1:-2], blocks)
    assert torch.equal(room[:, 1 : expected.shape[1] + 1], expected)
    assert not room[:, expected.shape[1] + 1 : -2].any()
    assert room[:, [0, -2, -1]].isnan().all()


def test_never_waits():
    with Watch() as watch:
        write_block_diagonal(torch.empty(3, 4), [torch.ones(3, 2)])
    assert watch.waits == []


@pytest.mark.parametrize(
    ("out_OC", "blocks", "message"),
    [
        (torch.empty(3, 2), [torch.ones(2, 2)], "2 rows"),
        (torch.empty(3, 2), [torch.ones(3, 3)], "3 columns"),
        (torch.empty(5, 5), [torch.ones(1, 1)] * 5, "5 blocks"),
        (torch.empty(1, 4097), [torch.ones(1, 1)], "4097 columns"),
        (torch.ones(1, 2).expand(3, 2), [torch.ones(3, 2)], "out_OC"),
    ],
)
def test_what_the_kernel_would_read_or_write_wrongly_is_refused(out_OC, blocks, message):
    with pytest.raises(ShapeError, match=message):
        write_block_diagonal(out_OC, blocks)
