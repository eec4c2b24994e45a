"""The expert from the last axis of a stack to the first and back: the public function against a permutation;
kernels in a child process.
"""

import pytest
import torch

from lightning_fastft.core.errors import ShapeError
from lightning_fastft.kernels.expert_pack import reference
from lightning_fastft.kernels.expert_pack.op import exchange_ends
from tests.support.host_waits import HostWaits
from tests.support.kernel_harness import planted_faults

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# Around a tile of 64: none, one, a prime, one under and one over, more than two.
SHAPES = ((0, 3, 5), (4, 0, 5), (4, 3, 0), (1, 1, 1), (13, 5, 7), (63, 2, 65), (64, 1, 64), (130, 3, 129))
# More than one row too many along any axis of the sizes here.
MARGIN = 2048


def flat_in_nan(shape, dtype, *, device="cpu"):
    """Contiguous values between values that nobody may read; returns them and the whole buffer."""
    size = torch.Size(shape).numel()
    buffer = torch.full((size + 2 * MARGIN,), float("nan"), dtype=dtype, device=device)
    return buffer[MARGIN : MARGIN + size].view(shape), buffer


def make_source(shape, dtype, *, device="cpu"):
    source, _ = flat_in_nan(shape, dtype, device=device)
    return source.copy_(torch.randn(shape, device=device))


def check_exchange(exchange, shape, *, dtype, out_dtype, device="cpu", expected_of=None):
    """Bit-equal to a permutation, cast once; nothing written beside the result, and the source stays."""
    source = make_source(shape, dtype, device=device)
    before = source.clone()
    expected = before.permute(2, 1, 0).to(out_dtype)
    out, buffer = flat_in_nan(shape[::-1], out_dtype, device=device)
    result = exchange(source, out=out)
    assert result is out
    assert torch.equal(result, expected if expected_of is None else expected_of(expected, result))
    assert torch.equal(source, before)
    out.fill_(float("nan"))
    assert buffer.isnan().all(), "something was written outside the result"


@pytest.mark.parametrize("out_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_cast_equals_a_permutation(dtype, out_dtype):
    check_exchange(exchange_ends, (13, 5, 7), dtype=dtype, out_dtype=out_dtype)


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_equals_a_permutation(shape):
    check_exchange(exchange_ends, shape, dtype=torch.float32, out_dtype=torch.bfloat16)


def test_it_undoes_itself_and_makes_fresh_memory():
    b_ORE = torch.randn(17, 4, 6)
    b_ERO = exchange_ends(b_ORE)
    assert b_ERO.shape == (6, 4, 17)
    assert b_ERO.is_contiguous()
    assert torch.equal(b_ERO[2, 3], b_ORE[:, 3, 2])
    assert torch.equal(exchange_ends(b_ERO), b_ORE)
    assert exchange_ends(b_ORE, dtype=torch.bfloat16).dtype is torch.bfloat16


def test_no_graph_no_wait_and_a_changed_version():
    b_ORE = torch.randn(17, 4, 6, requires_grad=True)
    out = torch.empty(6, 4, 17, dtype=torch.bfloat16)
    version = out._version
    with HostWaits() as waits:
        exchange_ends(b_ORE, out=out)
    assert waits.total == 0
    assert not out.requires_grad
    assert out._version > version


def test_a_normal_tensor_is_written_in_inference_mode():
    source, out = torch.randn(3, 2, 4), torch.empty(4, 2, 3)
    with torch.inference_mode():
        exchange_ends(source, out=out)
        fresh = exchange_ends(source)
    assert torch.equal(out, fresh)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"dtype": torch.int8}, ShapeError, "int8"),
        ({"dtype": torch.bfloat16, "out": torch.zeros(5, 4, 3)}, ShapeError, "out"),
    ],
)
def test_what_the_kernel_would_do_wrongly_is_refused(change, error, message):
    given = {"source": torch.zeros(3, 4, 5), **change}
    with pytest.raises(error, match=message):
        exchange_ends(given.pop("source"), **given)


def test_memory_of_the_source_is_no_place_for_the_result():
    cube = torch.zeros(4, 4, 4)
    with pytest.raises(ShapeError, match="shares memory"):
        exchange_ends(cube, out=cube)


FAULTS = {
    "axes not exchanged": "source.permute({2, 1, 0 => 0, 1, 2).reshape(source.shape[::-1]})",
    "middle axis moved": "source.permute({2, 1, 0 => 1, 2, 0).reshape(source.shape[::-1]})",
}


def check_every_part(exchange, *, device="cpu", **options):
    check_exchange(exchange, (67, 3, 70), dtype=torch.float32, out_dtype=torch.float16, device=device, **options)
    check_exchange(exchange, (5, 20, 7), dtype=torch.float32, out_dtype=torch.float32, device=device, **options)


test_a_planted_fault_is_seen, test_without_a_fault_the_same_check_passes = planted_faults(
    reference, lambda module: check_every_part(module.exchange_ends), FAULTS
)


def test_the_public_function_passes_the_same_check():
    check_every_part(exchange_ends)
