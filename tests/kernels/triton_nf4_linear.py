"""Tests of the Triton kernels of nf4_linear, interpreted by test_interpreted.py and compiled by tests/gpu."""

import pytest
import torch

from lightning_fastft.kernels.nf4_linear import reference, triton
from lightning_fastft.kernels.nf4_linear.op import read_params4bit
from tests.kernels.test_nf4_linear import check, make_cases, make_truth
from tests.support.kernel_harness import DEVICE, planted_faults

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# In blocks of 64: one, a prime, around a tile, around a group of scales, more than two groups.
TILE_BLOCKS = triton.TILE_WORDS // 8
BLOCKS = (1, 2, 13, TILE_BLOCKS - 1, TILE_BLOCKS, TILE_BLOCKS + 1, 2 * TILE_BLOCKS + 1, 255, 256, 257, 541)


def make(sizes, dtype, **options):
    cases = make_cases(sizes, dtype, device=DEVICE, **options)
    if DEVICE == "cpu" and dtype is torch.bfloat16:
        # The interpreter rounds to bf16 by cutting.
        for place, (weight, truth_OI) in enumerate(cases):
            wide_OI = torch.empty(truth_OI.shape)
            reference.dequantise_many([weight], [wide_OI])
            cases[place] = weight, (wide_OI.view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16)
    return cases


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_blocks", BLOCKS)
def test_one_row_and_one_block_a_row_equal_bitsandbytes(num_blocks, dtype):
    check(triton.dequantise_many, make([(1, 64 * num_blocks)], dtype))
    check(triton.dequantise_many, make([(num_blocks, 64)], dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_nested", [True, False])
@pytest.mark.parametrize("num_extra", [0, 1, 8, 48])
def test_rows_any_distance_apart(num_extra, is_nested, dtype):
    check(triton.dequantise_many, make([(31, 3 * 64)], dtype, is_nested=is_nested), num_extra=num_extra)


@pytest.mark.parametrize("count", range(1, 2 * triton.MAX_WEIGHTS + 2))
def test_number_of_weights(count):
    sizes = [(70, 64), (3, 192), (1, 64), (5, 128), (66, 64)]
    check(triton.dequantise_many, make([sizes[place % 5] for place in range(count)], torch.float16))


def test_weights_with_and_without_nested_scales_in_one_launch():
    nested, plain = make([(70, 64)], torch.float32), make([(9, 192)], torch.float32, is_nested=False)
    check(triton.dequantise_many, nested + plain + nested)


def test_empty_weights_among_others():
    (weight, truth_OI), *_ = make([(3, 128)], torch.float32)
    none = torch.empty(0, 128, device=DEVICE)
    out_OI = torch.full((3, 128), float("nan"), device=DEVICE)
    triton.dequantise_many([weight, weight, weight], [none, out_OI, none])
    assert torch.equal(out_OI, truth_OI)
    triton.dequantise_many([weight], [none])
    triton.dequantise_many([], [])


def test_one_row_whatever_its_stride():
    (weight, truth_OI), *_ = make([(1, 128)], torch.float32)
    for stride in (1, 3, 2**40):
        out_OI = torch.full((128,), float("nan"), device=DEVICE).as_strided((1, 128), (stride, 1))
        triton.dequantise_many([weight], [out_OI])
        assert torch.equal(out_OI, truth_OI)


def test_rows_beyond_two_to_the_31_elements_are_reached():
    # Each distance fits 32 bits, their sum does not; on the CPU a few pages of the buffer are real, the rest is a hole.
    out_OI = torch.empty(2**31 + 64, dtype=torch.float16, device=DEVICE).as_strided((3, 64), (2**30, 1))
    (weight, truth_OI), *_ = make([(3, 64)], torch.float16)
    triton.dequantise_many([weight], [out_OI])
    assert torch.equal(out_OI, truth_OI)


def test_bytes_at_an_odd_address():
    weight, truth_OI = make_truth((3, 128), torch.float32, device=DEVICE)
    read = read_params4bit(weight)
    shifted = torch.cat((read.packed_C.new_full((1,), 255), read.packed_C))[1:]
    check(triton.dequantise_many, [(read._replace(packed_C=shifted), truth_OI)])


FAULTS = {
    "low half first": "tl.interleave({first, second => second, first})",
    "one half twice": "(pair {& 15 => >> 4})",
    "scales not shifted": "* nested {+ tl.load(offset_ptr) => }",
    "first group for all": "block {// GROUP => * 0}",
    "one scale for two blocks": "word // {BLOCK_WORDS => (2 * BLOCK_WORDS)}",
    "scales never taken from their table": "== tl.{uint8 => int64}",
    "lost fp32": "tl.load(quant_map_ptr + (pair >> 4)){ => .to(tl.float16)}",
    "lost fp32 of a scale": "scale.to(tl.int32)){ => .to(tl.float16)} * nested",
    "last word not written": "element_ty), mask={inside => (word < num_words - 1)}[:, None]",
    "lost mask": "element_ty){, mask=inside[:, None] => }",
    "wrong stride of the bytes": "word.to(tl.int64) * {4 => 3}",
    "rows next to each other": "* {row_stride => (ROW_WORDS * 8)}",
    "first word of each row": "{+ word % ROW_WORDS * 8 => }",
    "stride of the first weight": "row_strides[{index => 0}]",
    "columns of the first weight": "ROW_WORDS[{index => 0}]",
    "a weight starts one tile late": "tile -= num_tiles{ => + 1}",
    "a weight starts before its first tile": "{(tile >= 0) & (tile < num_tiles) => tile < num_tiles}",
    "last tile of a weight lost": "(tile < num_tiles{ => - 1})",
    "fifth weight lost": "range(0, {len(filled) => MAX_WEIGHTS}, MAX_WEIGHTS)",
}


def check_every_part(run):
    check(run, make([(70, 64), (5, 192), (101, 192), (1, 64), (2, 128)], torch.float32))


test_a_planted_fault_is_seen, test_without_a_fault_the_same_check_passes = planted_faults(
    triton, lambda module: check_every_part(module.dequantise_many), FAULTS
)
