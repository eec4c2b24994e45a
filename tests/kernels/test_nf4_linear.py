"""Weights of linear layers come back from NF4 bit for bit as bitsandbytes reads them; the kernel itself in the
interpreter and by the compiler.
"""

import bitsandbytes as bnb
import pytest
import torch
from bitsandbytes.functional import dequantize_4bit

from lightning_fastft.core.errors import OptionError, ShapeError
from lightning_fastft.kernels.nf4_linear import reference
from lightning_fastft.kernels.nf4_linear.op import dequantise_many, read_params4bit
from lightning_fastft.kernels.nf4_linear.reference import NF4Weight
from tests.support.kernel_harness import planted_faults
from tests.support.nf4_stacks import guarded
from tests.support.nf4_weights import dequantise
from tests.support.truth import Watch

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# More than a planted fault writes beside its output.
MARGIN = 2**17
# One block, some, one under a group of scales, a group, one over.
SIZES = ((1, 64), (13, 64), (2, 192), (5, 51 * 64), (4, 64 * 64), (1, 257 * 64))


def make_truth(size, dtype, *, is_nested=True, device="cpu", seed=0, **options):
    """The weight of a Linear4bit and what bitsandbytes reads back from it; scales of every size, blocks of zeros
    among them.
    """
    generator = torch.Generator().manual_seed(seed)
    size_Q1 = torch.rand((size[0] * size[1] // 64, 1), generator=generator) ** 4 * 3
    weight_Q64 = (torch.randn((len(size_Q1), 64), generator=generator) * size_Q1).masked_fill(size_Q1 < 1e-4, 0.0)
    options = {"quant_type": "nf4", "compress_statistics": is_nested, "requires_grad": False, **options}
    weight = bnb.nn.Params4bit(weight_Q64.view(size).to(dtype), **options).to(device)
    return weight, dequantize_4bit(weight.data, weight.quant_state)


def make_cases(sizes, dtype, **options):
    """Quantised weights inside larger buffers, each with its truth."""
    cases = []
    for seed, size in enumerate(sizes):
        weight, truth_OI = make_truth(size, dtype, seed=seed, **options)
        cases.append(
            (NF4Weight(*(None if part is None else guarded(part) for part in read_params4bit(weight))), truth_OI)
        )
    return cases


def check(run, cases, *, num_extra=48):
    """Bit-equal, twice, as rows some elements apart in one buffer of NaN; every cell written, none beside them."""
    weights, truths = zip(*cases)
    shapes = [(truth_OI.shape[0], truth_OI.shape[1] + num_extra) for truth_OI in truths]
    num_cells = [num_rows * row_stride for num_rows, row_stride in shapes]
    seen = []
    for _ in range(2):
        buffer = torch.full(
            (sum(num_cells) + 2 * MARGIN,), float("nan"), dtype=truths[0].dtype, device=truths[0].device
        )
        parts = buffer[MARGIN:-MARGIN].split(num_cells)
        outs = [part.view(shape)[:, : truth_OI.shape[1]] for part, shape, truth_OI in zip(parts, shapes, truths)]
        run(weights, outs)
        seen.append([out.clone() for out in outs])
        for out in outs:
            out.fill_(float("nan"))
        assert buffer.isnan().all()
    for first, second, truth_OI in zip(*seen, truths):
        assert torch.equal(first, second)
        assert torch.equal(first, truth_OI)


def run_op(weights, outs):
    dequantise_many(weights, outs=outs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("is_nested", [True, False])
def test_equals_bitsandbytes(size, dtype, is_nested):
    check(run_op, make_cases([size], dtype, is_nested=is_nested))


@pytest.mark.parametrize("num_extra", [0, 1, 48])
def test_many_equal_each_alone(num_extra):
    check(run_op, make_cases([(7, 128), (3, 128), (3, 128), (2, 192), (1, 64)], torch.bfloat16), num_extra=num_extra)


def test_one_row_whatever_its_stride():
    (weight, truth_OI), *_ = make_cases([(1, 128)], torch.float32)
    out_OI = torch.zeros(128).as_strided((1, 128), (1, 1))
    dequantise_many([weight], outs=[out_OI])
    assert torch.equal(out_OI, truth_OI)


def test_another_dtype_is_rounded_once_from_fp32():
    weight, _ = make_truth((6, 128), torch.bfloat16)
    read = read_params4bit(weight)
    wide_OI = dequantise(read, shape=(6, 128), dtype=torch.float32)
    assert torch.equal(dequantise(read, shape=(6, 128), dtype=torch.float16), wide_OI.half())
    assert not torch.equal(wide_OI, wide_OI.bfloat16().float())


FAULTS = {
    "low half first": "(weight.packed_C {>> 4, weight.packed_C & 15 => & 15, weight.packed_C >> 4})",
    "scales not shifted": "* nested_Q {+ weight.offset => }",
    "first group for all": "{.repeat_interleave(GROUP_BLOCKS)[: len(weight.absmax_Q) => [:1}]",
    "first scale for all": "scale_Q[{:, None => 0}]",
    "last column lost": "out_OI{ => [:, :-1]}.copy_(value_QB.view(out_OI.shape){ => [:, :-1]})",
}


test_a_fault_in_the_plain_twin_is_seen, test_without_a_fault_the_same_check_passes = planted_faults(
    reference, lambda module: check(module.dequantise_many, make_cases([(3, 101 * 64)], torch.float32)), FAULTS
)


def test_no_rows_no_columns_no_weights_and_no_waits():
    dequantise_many([], outs=[])
    (weight, truth_OI), *_ = make_cases([(2, 64)], torch.float32)
    nothing = NF4Weight(weight.packed_C[:0], weight.absmax_Q[:0], weight.nested_absmax_G[:0], *weight[3:])
    for shape in ((0, 128), (5, 0), (0, 0)):
        assert dequantise(nothing, shape=shape, dtype=torch.float16).shape == shape
    out = torch.empty(2, 64, requires_grad=True)
    with Watch() as watch:
        dequantise_many([weight], outs=[out])
    assert watch.waits == []
    assert torch.equal(out, truth_OI)


@pytest.mark.parametrize("is_nested", [True, False])
@pytest.mark.parametrize("storage", [torch.uint8, torch.bfloat16, torch.float32])
def test_reading_a_weight_shares_its_memory(storage, is_nested):
    weight, truth_OI = make_truth((6, 128), torch.bfloat16, is_nested=is_nested, quant_storage=storage)
    with Watch() as watch:
        read = read_params4bit(weight)
    assert watch.waits == []
    state = weight.quant_state
    nested = (
        (state.state2.absmax, state.offset, state.code, state.state2.code)
        if is_nested
        else (None, None, state.code, None)
    )
    for part, source in zip(read, (weight, state.absmax, *nested)):
        assert source is None or (type(part) is torch.Tensor and part.data_ptr() == source.data_ptr())
    assert torch.equal(dequantise(read, shape=(6, 128), dtype=torch.bfloat16), truth_OI)


def replaced(weight, **changes):
    for name, value in changes.items():
        *path, last = name.split("__")
        target = weight.quant_state
        for step in path:
            target = getattr(target, step)
        setattr(target, last, value)
    return weight


def test_anything_else_is_not_read():
    assert read_params4bit(torch.nn.Linear(64, 2).weight) is None
    assert read_params4bit(bnb.nn.Linear4bit(64, 2, quant_type="nf4").weight) is None
    assert read_params4bit(make_truth((2, 128), torch.float32, quant_type="fp4")[0]) is None
    assert read_params4bit(make_truth((2, 128), torch.float32, blocksize=128)[0]) is None
    changes = (
        {"packing_format_for_cpu": True},
        {"state2__blocksize": 128},
        {"state2__absmax": torch.ones(1).bfloat16()},
        {"state2__state2": object()},
        {"offset": torch.tensor(1.0).half()},
        {"absmax": torch.ones(4)},
        {"absmax": torch.ones(8, dtype=torch.uint8)[::2]},
        {"code": torch.ones(16).half()},
    )
    for change in changes:
        assert read_params4bit(replaced(make_truth((2, 128), torch.float32)[0], **change)) is None, change
    half_scales = {"absmax": torch.ones(4).half()}
    assert read_params4bit(replaced(make_truth((2, 128), torch.float32, is_nested=False)[0], **half_scales)) is None
    assert read_params4bit(make_truth((2, 128), torch.float32)[0]) is not None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"nested_absmax_G": None}, "absmax_Q"),
        ({"nested_absmax_G": None, "absmax_Q": torch.zeros(6)}, "offset is given"),
        ({"offset": None}, "offset is None"),
    ],
)
def test_parts_that_do_not_fit_are_refused(change, message):
    weight = read_params4bit(make_truth((3, 128), torch.float32)[0])._replace(**change)
    with pytest.raises(ShapeError, match=message):
        dequantise_many([weight], outs=[torch.zeros(3, 128)])


@pytest.mark.parametrize(
    ("out", "error", "message"),
    [
        (torch.zeros(4, 96), OptionError, "multiples of 64"),
        (torch.zeros(1, 128).expand(3, 128), ShapeError, "contiguous|overlap"),
        (torch.zeros(400).as_strided((3, 128), (127, 1)), ShapeError, "contiguous|overlap"),
    ],
)
def test_an_output_that_does_not_fit_is_refused(out, error, message):
    weight = read_params4bit(make_truth((3, 128), torch.float32)[0])
    with pytest.raises(error, match=message):
        dequantise_many([weight], outs=[out])


def test_options_that_do_not_fit_are_refused():
    weight = read_params4bit(make_truth((3, 128), torch.float32)[0])
    out = torch.zeros(3, 128)
    with pytest.raises(OptionError, match="2 weights and 1 outs"):
        dequantise_many([weight, weight], outs=[out])
    with pytest.raises(ShapeError, match=r"outs\[1\] must have dtype torch.float32"):
        dequantise_many([weight, weight], outs=[out, out.half()])
    with pytest.raises(OptionError, match="read_params4bit"):
        dequantise_many([None], outs=[out])
