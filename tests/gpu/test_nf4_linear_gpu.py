"""Linear weights in NF4 on a CUDA device at real sizes: bitsandbytes' bits, no host wait, and no memory but the
output.
"""

import bitsandbytes as bnb
import pytest
import torch
from bitsandbytes.functional import dequantize_4bit

from lightning_fastft.kernels.nf4_linear import reference
from lightning_fastft.kernels.nf4_linear.op import dequantise_many, read_params4bit
from tests.kernels.test_nf4_linear import check, make_cases, run_op
from tests.support.host_waits import waits_are_errors
from tests.support.nf4_weights import dequantise

pytestmark = pytest.mark.gpu
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# What one launch writes in a layer: q, k and v, gate and up, o and down of Qwen3-14B and of gpt-oss.
LAYERS = [
    ((5120, 5120), (1024, 5120), (1024, 5120)),
    ((17408, 5120), (17408, 5120)),
    ((5120, 17408),),
    ((4096, 2880), (512, 2880), (512, 2880)),
    ((2880, 4096),),
]


def quantise(size, *, dtype=torch.bfloat16, is_nested=True, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    dense = torch.randn(size, generator=generator, device="cuda").mul_(0.02).to(dtype)
    return bnb.nn.Params4bit(dense, requires_grad=False, quant_type="nf4", compress_statistics=is_nested).to("cuda")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_nested", [True, False])
def test_odd_sizes_equal_bitsandbytes(dtype, is_nested):
    check(run_op, make_cases([(1031, 192), (7, 64), (129, 576)], dtype, is_nested=is_nested, device="cuda"))


@pytest.mark.parametrize("sizes", LAYERS)
@pytest.mark.parametrize("num_extra", [0, 48])
def test_real_layers_equal_bitsandbytes_and_never_wait(sizes, num_extra):
    weights = [quantise(size, seed=seed) for seed, size in enumerate(sizes)]
    num_rows = [size[0] for size in sizes]
    buffer = torch.full(
        (sum(num_rows) + 16, sizes[0][1] + num_extra), float("nan"), dtype=torch.bfloat16, device="cuda"
    )
    outs = [rows[:, : sizes[0][1]] for rows in buffer[:-16].split(num_rows)]
    with waits_are_errors():
        dequantise_many([read_params4bit(weight) for weight in weights], outs=outs)
    for weight, out_OI in zip(weights, outs):
        assert torch.equal(out_OI, dequantize_4bit(weight.data, weight.quant_state))
        out_OI.fill_(float("nan"))
    assert buffer.isnan().all()


@pytest.mark.parametrize("is_nested", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_plain_twin_reads_the_same_bits(dtype, is_nested):
    weight = read_params4bit(quantise((515, 2880), dtype=dtype, is_nested=is_nested))
    ours = dequantise(weight, shape=(515, 2880), dtype=dtype)
    twin = torch.empty_like(ours)
    reference.dequantise_many([weight], [twin])
    assert torch.equal(ours, twin)


def test_more_than_two_to_the_31_weights():
    few = read_params4bit(quantise((2048, 4096)))
    num_copies = 257
    weight = few._replace(
        **{name: getattr(few, name).repeat(num_copies) for name in ("packed_C", "absmax_Q", "nested_absmax_G")}
    )
    out_OI = dequantise(weight, shape=(num_copies * 2048, 4096), dtype=torch.bfloat16)
    assert out_OI.numel() > 2**31
    truth_OI = dequantise(few, shape=(2048, 4096), dtype=torch.bfloat16)
    assert all(torch.equal(part, truth_OI) for part in out_OI.split(2048))


def test_making_a_weight_dense_takes_no_memory_but_the_buffer():
    weight, out_OI = quantise((4096, 4096)), torch.empty(4096, 4144, dtype=torch.bfloat16, device="cuda")[:, :4096]
    dequantise(read_params4bit(weight), shape=(4096, 4096), dtype=torch.bfloat16, out=out_OI)
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    with waits_are_errors():
        dequantise(read_params4bit(weight), shape=(4096, 4096), dtype=torch.bfloat16, out=out_OI)
    assert torch.cuda.max_memory_allocated() == held
