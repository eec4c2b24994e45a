"""Tests of the Triton kernels of grouped_mm, interpreted by test_interpreted.py and compiled by tests/gpu."""

import numpy as np
import pytest
import torch

from lightning_fastft.kernels.fp8_linear.op import find_obstacle
from lightning_fastft.kernels.fp8_linear.reference import FP8
from lightning_fastft.kernels.grouped_mm import tiles, triton
from lightning_fastft.kernels.grouped_mm.reference import GatheredRows, RowAddend
from tests.kernels.test_grouped_mm import (
    COUNTS,
    FULL,
    check_grad,
    check_product,
    formula,
    fp8_product,
    inside,
    make_case,
    make_fp8_case,
    make_row_weights,
)
from tests.support.children import thinned
from tests.support.kernel_harness import DEVICE, planted_faults

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Small enough that a handful of rows has tails along every axis.
SMALL = tiles.Tiles(rows=16, inputs=16, outputs=16, num_warps=4, num_stages=2)

if DEVICE == "cpu":
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    _create_dot = InterpreterBuilder.create_dot

    def _dot_of_device(self, a, b, d, *arguments):
        """The interpreter keeps bf16 in 16-bit integers and would multiply those: hand it their values.

        It sums fp32 in numpy's order: sum as a device does, in one chain from d on that is rounded after each term.
        """
        if str(a.dtype.scalar) == "fp32":
            total = d.data
            for column, row in zip(a.data.T.astype(np.float64), b.data.astype(np.float64)):
                total = (column[:, None] * row + total).astype(np.float32)
            return TensorHandle(total, d.dtype.scalar)
        for handle in (a, b):
            if str(handle.dtype.scalar) == "bf16":
                handle.data = (handle.data.astype(np.uint32) << 16).view(np.float32)
        return _create_dot(self, a, b, d, *arguments)

    InterpreterBuilder.create_dot = _dot_of_device


def product(module=triton, tiles=SMALL):
    return lambda case, out_NO: module.grouped_mm(
        case.x_NI, case.weight_EIO, case.end_E, addend=case.addend, out_NO=out_NO, tiles=tiles
    )


def added(y_NO, module=triton, tiles=SMALL):
    return lambda case, out_NO: module.add_to_rows(y_NO, case.end_E, addend=case.addend, out_NO=out_NO, tiles=tiles)


def grad(module=triton, tiles=SMALL):
    return lambda case, dtype, **factors: module.grouped_weight_grad(
        case.x_NI, case.d_NO, case.end_E, dtype=dtype, tiles=tiles, **factors
    )


def case_of(*arguments, **options):
    return make_case(*arguments, **options, device=DEVICE)


@pytest.mark.parametrize(("counts", "dtype"), thinned(COUNTS, DTYPES, keep=lambda counts, dtype: counts % 3 == dtype))
def test_product_and_weight_gradient_equal_the_truth(counts, dtype):
    for num_sentinels, is_transposed in ((0, False), (3, True)):
        case = case_of(counts, 13, 17, dtype=dtype, num_sentinels=num_sentinels, is_transposed=is_transposed)
        check_product(product(), case)
        check_grad(grad(), case)


@pytest.mark.parametrize(
    ("num_outputs", "num_inputs", "dtype"),
    thinned(
        (1, 17, 32),
        (1, 15, 16, 33),
        (torch.float32, torch.bfloat16),
        keep=lambda outputs, inputs, dtype: (outputs + inputs) % 2 == dtype,
    ),
)
def test_widths_around_a_tile(num_outputs, num_inputs, dtype):
    for is_transposed in (False, True):
        case = case_of((5, 0, 18), num_inputs, num_outputs, dtype=dtype, num_sentinels=2, is_transposed=is_transposed)
        check_product(product(), case)
        check_grad(grad(), case)


@pytest.mark.parametrize(
    ("rank_and_bias", "dtype"),
    thinned(
        ((0, True), (1, False), (4, True), (8, False), (16, True), (17, False), (40, True)),
        DTYPES,
        keep=lambda rank, dtype: rank % 3 == dtype,
    ),
)
def test_bias_and_low_rank_product_equal_the_truth(rank_and_bias, dtype):
    rank, has_bias = rank_and_bias
    case = case_of((5, 0, 18), 19, 21, dtype=dtype, num_sentinels=2, rank=rank, has_bias=has_bias)
    check_product(product(), case)
    y_NO = case.d_NO
    check_product(added(y_NO), case, y_NO=y_NO)


@pytest.mark.parametrize(("num_slots", "index_dtype"), [(1, torch.int32), (3, torch.int64)])
def test_gathered_rows_have_the_bits_of_their_copy(num_slots, index_dtype):
    case = case_of((5, 0, 19, 6), 21, 19, dtype=torch.bfloat16, num_sentinels=3, rank=4, has_bias=True)
    num_rows = case.x_NI.shape[0] // num_slots * num_slots
    assert num_rows == case.x_NI.shape[0]
    slot_N = torch.randperm(num_rows, generator=torch.Generator().manual_seed(2)).to(index_dtype).to(DEVICE)
    sides = []
    for columns in (21, 19):
        x_TI = torch.randn(num_rows // num_slots, columns + 3, device=DEVICE).bfloat16()[:, :columns]
        gathered = GatheredRows(x_TI, slot_N, num_slots)
        copied = x_TI[slot_N // num_slots]
        assert torch.equal(gathered.read(), copied)
        sides.append((gathered, copied))
    products = [product()(case._replace(x_NI=rows), torch.empty_like(case.d_NO))[: case.num_real] for rows in sides[0]]
    assert torch.equal(*products)
    expected = grad()(case._replace(x_NI=sides[0][1], d_NO=sides[1][1]), torch.float32)
    for left, right in ((0, 1), (1, 0), (0, 0)):
        assert torch.equal(grad()(case._replace(x_NI=sides[0][left], d_NO=sides[1][right]), torch.float32), expected)


def check_fp8(module=triton, tiles=SMALL, **options):
    if DEVICE == "cuda" and find_obstacle(torch.device("cuda", torch.cuda.current_device())):
        pytest.skip("the device has no e4m3")
    low_scale = options.pop("low_scale", 1.75)
    case, operands = make_fp8_case(
        **{"counts": (17, 0, 16, 15, 1, 2), "num_inputs": 48, "num_outputs": 32, **options}, device=DEVICE
    )
    case = case._replace(addend=case.addend._replace(low_scale=low_scale))
    check_product(fp8_product(operands, module, tiles=tiles), case)


FP8_SMALL = SMALL._replace(inputs=32)


@pytest.mark.parametrize(
    ("rank_and_bias", "dtype"),
    thinned(
        ((0, False), (0, True), (4, False), (16, True), (17, False), (40, True)),
        DTYPES,
        keep=lambda rank, dtype: rank % 3 == dtype,
    ),
)
def test_products_of_e4m3_equal_the_truth(rank_and_bias, dtype):
    rank, has_bias = rank_and_bias
    for num_slots in (0, 3):
        check_fp8(tiles=FP8_SMALL, dtype=dtype, rank=rank, has_bias=has_bias, num_slots=num_slots, num_sentinels=3)


@pytest.mark.parametrize("counts", [(0,), (16,), (7, 0), (0, 0, 40, 0, 0)])
def test_products_of_e4m3_with_few_experts(counts):
    check_fp8(tiles=FP8_SMALL, counts=counts, num_inputs=16, num_outputs=16, num_sentinels=1)


@pytest.mark.parametrize("counts", [(127, 0, 1), (130, 257)])
def test_the_tiles_that_products_of_e4m3_use(counts):
    check_fp8(tiles=None, counts=counts, num_inputs=144, num_outputs=272, rank=16, has_bias=True, num_sentinels=3)


def test_without_a_factor_the_low_rank_product_of_e4m3_is_skipped():
    check_fp8(tiles=FP8_SMALL, counts=(5, 11), rank=4, has_bias=True, low_scale=0.0)


def test_a_sum_in_place():
    case = case_of(**FULL, dtype=torch.float32)
    apart = added(case.d_NO)(case, torch.empty_like(case.d_NO))
    in_place = added(case.d_NO)(case, case.d_NO)
    assert torch.equal(apart[: case.num_real], in_place[: case.num_real])
    assert in_place[case.num_real :].isnan().all()


# Tiles for few rows and for many are apart in 16 bits only, and the same for both dtypes of 16 bits.
@pytest.mark.parametrize(
    ("counts", "dtype"),
    thinned(((127, 0, 1), (130, 257)), DTYPES, keep=lambda counts, dtype: dtype == 1 or (counts == 1) == (dtype == 0)),
)
def test_the_tiles_that_are_used(counts, dtype):
    case = case_of(counts, 65, 129, dtype=dtype, num_sentinels=3, rank=16, has_bias=True, is_transposed=True)
    check_product(product(tiles=None), case)
    check_product(added(case.d_NO, tiles=tiles.ADD_TILES), case, y_NO=case.d_NO)
    check_grad(grad(tiles=None), case)


def test_a_table_of_tiles_by_dtype_and_rows():
    wide = {"num_inputs": 2048, "num_outputs": 1536}
    assert tiles.product_tiles(torch.bfloat16, rows_per_expert=127, **wide) == tiles.PRODUCT_TILES_FEW
    assert tiles.product_tiles(torch.float16, rows_per_expert=128, **wide) == tiles.PRODUCT_TILES_MANY
    assert (
        tiles.product_tiles(torch.float32, rows_per_expert=4096, **wide, shared_bytes=tiles.LARGE_SHARED_BYTES)
        == tiles.PRODUCT_TILES_FP32
    )
    large = {"shared_bytes": tiles.LARGE_SHARED_BYTES, **wide}
    assert tiles.product_tiles(torch.bfloat16, rows_per_expert=128, **large) == tiles.PRODUCT_TILES_LARGE
    assert tiles.product_tiles(torch.bfloat16, rows_per_expert=127, **large) == tiles.PRODUCT_TILES_FEW
    assert (
        tiles.product_tiles(torch.bfloat16, rows_per_expert=128, **{**large, "num_outputs": 255})
        == tiles.PRODUCT_TILES_MANY
    )
    assert tiles.product_tiles(FP8, rows_per_expert=128, **large) == tiles.PRODUCT_TILES_FP8_LARGE
    assert tiles.product_tiles(FP8, rows_per_expert=128, **wide) == tiles.PRODUCT_TILES_FP8_MANY
    assert tiles.product_tiles(FP8, rows_per_expert=127, **large) == tiles.PRODUCT_TILES_FP8_FEW
    assert tiles.grad_tiles(torch.bfloat16, **wide) == tiles.GRAD_TILES
    assert tiles.grad_tiles(torch.float32, num_inputs=16, num_outputs=2048) == tiles.GRAD_TILES_FP32


def test_tiles_of_thin_matrices_are_as_wide_as_the_matrix():
    for columns, side in ((1, 16), (8, 16), (16, 16), (17, 32), (64, 64)):
        thin = tiles.product_tiles(torch.bfloat16, rows_per_expert=512, num_inputs=2048, num_outputs=columns)
        assert thin.outputs == side
        assert thin.inputs >= 64
        shallow = tiles.product_tiles(torch.bfloat16, rows_per_expert=512, num_inputs=columns, num_outputs=2048)
        assert (shallow.inputs, shallow.outputs) == (side, 128)
        assert (
            tiles.product_tiles(torch.float32, rows_per_expert=512, num_inputs=2048, num_outputs=columns).outputs
            == side
        )
        low, high = (
            tiles.grad_tiles(torch.bfloat16, num_inputs=one, num_outputs=other)
            for one, other in ((columns, 2048), (2048, columns))
        )
        assert (low.inputs, low.outputs) == (high.outputs, high.inputs) == (side, 128)


@pytest.mark.parametrize(
    ("rank", "dtype"), thinned((1, 16, 33, 64), DTYPES, keep=lambda rank, dtype: rank % 2 == min(dtype, 1))
)
def test_thin_products_with_the_tiles_that_are_used(rank, dtype):
    for num_inputs, num_outputs in ((131, rank), (rank, 131)):
        case = case_of(
            (63, 0, 66), num_inputs, num_outputs, dtype=dtype, num_sentinels=3, is_transposed=num_outputs == rank
        )
        check_product(product(tiles=None), case)
        check_grad(grad(tiles=None), case, dtype=torch.float32)
        check_grad(grad(tiles=None), case, scale=0.5, row_weight_N=row_weights(case))


def row_weights(case):
    """The interpreter cuts to bf16 where a device rounds: there weights that need no rounding."""
    return make_row_weights(case, is_exact=DEVICE == "cpu" and case.x_NI.dtype is torch.bfloat16)


# In fp32 the check that planted faults must fail has both ways, and passes without one.
@pytest.mark.parametrize(
    ("widths", "dtype"),
    thinned(((16, 16), (5, 33), (33, 5)), DTYPES, keep=lambda widths, dtype: min(widths, 1) == min(dtype, 1)),
)
def test_scale_and_row_weights_of_a_gradient(widths, dtype):
    case = case_of((17, 0, 16, 15, 1, 2), *widths, dtype=dtype, num_sentinels=5)
    for factors in (
        {"scale": -0.75},
        {"row_weight_N": row_weights(case)},
        {"scale": 3.0, "row_weight_N": row_weights(case)},
    ):
        check_grad(grad(), case, **factors)
    check_grad(
        grad(), case, dtype=torch.float32, row_weight_N=make_row_weights(case, dtype=torch.bfloat16, is_exact=True)
    )


def test_more_groups_of_tiles_than_one_and_more_experts_than_rows():
    counts = [0] * 20
    for expert in (0, 3, 4, 19):
        counts[expert] = 2
    case = case_of(counts, 5, 20, dtype=torch.float32, num_sentinels=1)
    check_product(product(), case)
    check_grad(grad(), case)
    check_product(product(), case_of((16 * 9 + 3, 2), 5, 20, dtype=torch.float32))


def test_a_wide_gradient_of_narrow_rows():
    check_grad(grad(), case_of((30, 0, 7), 9, 11, dtype=torch.bfloat16), dtype=torch.float32)


def test_nothing_to_do():
    for counts, num_inputs, num_outputs in (((0, 0), 8, 8), ((2, 1), 0, 8), ((2, 1), 8, 0)):
        case = case_of(counts, num_inputs, num_outputs, dtype=torch.float32, rank=4, has_bias=True)
        check_product(product(), case)
        check_product(added(case.d_NO), case, y_NO=case.d_NO)
        check_grad(grad(), case)
    out_NO = torch.ones(3, 4, device=DEVICE)
    no_ends = torch.zeros(0, dtype=torch.int32, device=DEVICE)
    nothing = {"addend": RowAddend(), "out_NO": out_NO}
    assert (
        triton.grouped_mm(torch.ones(3, 2, device=DEVICE), torch.ones(0, 2, 4, device=DEVICE), no_ends, **nothing) == 1
    ).all()


def check_long_sums(module):
    """Sums of 2,048 and 8,192 random terms: the error is at most twice that of numpy's pairwise sum; one chain's
    is 7 and 15 times as large.
    """
    for num_terms in (2048, 8192):
        x_NI, weight_EIO = torch.randn(20, num_terms, device=DEVICE), torch.randn(1, num_terms, 24, device=DEVICE)
        truth, x, weight = x_NI.double() @ weight_EIO[0].double(), x_NI.cpu().numpy(), weight_EIO[0].T.cpu().numpy()
        pairwise = torch.from_numpy(np.stack([(x * column).sum(axis=1) for column in weight], axis=1)).to(DEVICE)
        ends = [torch.tensor([end], dtype=torch.int32, device=DEVICE) for end in (20, num_terms)]
        sums = {
            "product": module.grouped_mm(
                x_NI, weight_EIO, ends[0], addend=RowAddend(), out_NO=torch.empty(20, 24, device=DEVICE)
            ),
            "weight gradient": module.grouped_weight_grad(
                x_NI.T.contiguous(), weight_EIO[0], ends[1], dtype=torch.float32
            )[0],
        }
        bound = 2 * (pairwise - truth).norm() / truth.norm()
        for name, ours in sums.items():
            error = (ours - truth).norm() / truth.norm()
            assert error <= bound, f"{name} of {num_terms} terms: error {error:.3g} above {bound:.3g}"


def test_long_sums_are_as_good_as_pairwise_ones():
    check_long_sums(triton)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_what_is_not_finite_stays_so():
    for value in (float("inf"), -3e38):
        x_NI, weight_EIO = torch.full((4, 40), value, device=DEVICE), torch.ones(1, 40, 8, device=DEVICE)
        end_E, out_NO = torch.tensor([4], dtype=torch.int32, device=DEVICE), torch.empty(4, 8, device=DEVICE)
        assert (
            not triton.grouped_mm(x_NI, weight_EIO, end_E, addend=RowAddend(), out_NO=out_NO, tiles=SMALL)
            .isfinite()
            .any()
        )


def check_impossible_borders(module):
    """A border behind the rows: none behind the last is read or written. One row too many, which lies in the
    buffers around.
    """
    case = case_of((3, 9), 5, 6, dtype=torch.float32)
    case.end_E[1] += 1
    out_NO = inside(torch.zeros_like(case.d_NO), fill=7.0)
    product(module)(case, out_NO)
    assert (out_NO._base == 7.0).sum() == out_NO._base.numel() - out_NO.numel()
    assert grad(module)(case, torch.float32).isfinite().all()


def test_impossible_borders_are_cut_off():
    check_impossible_borders(triton)


def test_addresses_beyond_two_to_the_31_elements_are_reached():
    if DEVICE == "cuda":
        pytest.skip("gigabytes of memory; the arithmetic is the interpreter's")
    # Pages of the file that are not touched are a hole: rows, experts and input columns lie further apart than 32 bits
    # of elements reach.
    far = 2**31 + 64
    hole = torch.empty(2 * far, dtype=torch.bfloat16)
    end_E = torch.tensor([1, 2], dtype=torch.int32)
    x_NI, weight_EIO = torch.randn(2, 2).bfloat16(), torch.randn(2, 2, 3).bfloat16()
    nothing = RowAddend()

    def run(x, weight):
        return triton.grouped_mm(
            x, weight, end_E, addend=nothing, out_NO=torch.empty(2, 3, dtype=torch.bfloat16), tiles=SMALL
        )

    expected_NO = run(x_NI, weight_EIO)
    for strides in ((far, 3, 1), (16, far, 1)):
        assert torch.equal(run(x_NI, hole.as_strided((2, 2, 3), strides).copy_(weight_EIO)), expected_NO)
    far_x_NI = hole.as_strided((2, 2), (far, 1)).copy_(x_NI)
    assert torch.equal(run(far_x_NI, weight_EIO), expected_NO)
    d_NO = torch.randn(2, 3).bfloat16()
    grads = [triton.grouped_weight_grad(x, d_NO, end_E, dtype=torch.float32, tiles=SMALL) for x in (x_NI, far_x_NI)]
    assert torch.equal(*grads)


FAULTS = {
    "lost mask on the input tail of x": "x_inside &= inputs[None, :] {< num_inputs - start => >= 0}",
    "lost mask on the input tail of the weight": "weight_inside &= inputs[:, None] {< num_inputs - start => >= 0}",
    "tail taken for a whole tile": "IS_WHOLE={num_inputs % tiles.inputs == 0 => True}",
    "last tile of inputs lost": "for start in range(0, num_inputs{ => - BLOCK_I}, BLOCK_I):",
    "wrong expert at a border": "border // BLOCK_N + experts + 1 <{= => } row_tile",
    "tiles of an expert shifted": "(row_tile - {start // BLOCK_N - => } expert)",
    "rows of the next expert written": "inside_rows = rows < {stop => num_rows} inside_cols",
    "last row lost": "inside_rows = rows < stop{ => - 1} inside_cols",
    "last column lost": "inside_cols = cols < num_outputs{ => - 1} return",
    "columns behind the last": "inside_cols = cols < num_outputs{ => + 1} return",
    "tiles of the last group lost": "group_size = {tl.minimum(num_row_tiles - group * GROUP, GROUP) => GROUP}",
    "too few programs": "(num_rows // tiles.rows {+ num_experts => }) *",
    "scale lost": "total *= {low_scale => 1.0}",
    "bias of the neighbour": "bias_ptr + {expert => (expert - 1)} * bias_stride",
    "low-rank matrix of the first expert": "factor_row = {expert * RANK + => } ranks",
    "lost mask on the rank": "inside_ranks = ranks < RANK{ => + 1}",
    "second step of ranks lost": "ranks = {start + => } tl.arange(0, BLOCK_R)",
    "input stride for a step of one": "weight_ptrs += {weight_step => BLOCK_I}",
    "wrong stride of rows": "x_ptrs = x_ptr + sources[:, None] * {x_stride => num_inputs}",
    "low precision": "_add_step(total{ => .to(tl.float16).to(tl.float32)}, lost, x, weight,",
    "operands with the bits of TF32": "_add_step(total, lost, x{ => .to(tl.float16).to(tl.float32)}, weight,",
    "gradient: operands with the bits of TF32": "_add_step(total, lost, x{ => .to(tl.float16).to(tl.float32)}, d,",
    "narrow: low precision": "total = tl.dot(a, b, total{ => .to(tl.bfloat16).to(tl.float32)},",
    "narrow: only the last step": "total = tl.dot(a, b,{ => 0.0 *} total,",
    "fp32: one chain": "return {dtype is torch.float32 => False}",
    "fp32: one chain by adding to the sum": "part = tl.dot(a, b, {lost => total},",
    "fp32: a step added twice": "lost = part {- (new_total - total) => }",
    "fp32: only the last step": "new_total = {total + => } part",
    "fp32: what was lost forgotten": "lost = {part - (new_total - total) => 0.0 * part}",
    "fp32: what was lost taken away": "lost = {part - => } (new_total - total){ => - part}",
    "fp32: what was lost added twice": "part ={ => lost +} tl.dot(a, b, lost,",
    "product: what was lost not passed on": "total, {lost => _} = _add_step(total, lost, x, weight,",
    "gradient: what was lost not passed on": "total, {lost => _} = _add_step(total, lost, x, d,",
    "low-rank product with the bits of TF32": "tl.dot(low{ => .to(tl.float16).to(tl.float32)}, factor,",
    "fp8: scale of rows lost": "scale = {tl.load(x_scale_ptr + sources, mask=inside_rows, other=0.0) => inside_rows.to(tl.float32)} *",
    "fp8: scale of the neighbour": "tl.load(weight_scale_ptr + expert{ => - 1})",
    "fp8: scale of the sorted place": "tl.load(x_scale_ptr + {sources => rows},",
    "fp8: low-rank product scaled too": "scale {/= low_scale => *= 1.0}",
    "fp8: scales lost": "total *= {scale[:, None] => 1.0}",
    "fp8: addend before the scales too": "if {not HAS_SCALES => True}: # The addend",
    "fp8: scales read without scales": "HAS_SCALES={scales is not None => False}",
    "sum without y": "total +={ => 0.0 *} tl.load(y_ptr",
    "gradient: last tile of rows lost": "for start in range(begin, stop{ => - BLOCK_N}, BLOCK_N):",
    "gradient: x of the next expert": "mask={inside_rows[None, :] & => } inside_inputs[:, None], other=0.0)",
    "gradient: d of nobody": "mask={inside_rows[:, None] & => } inside_cols[None, :], other=0.0) if HAS_WEIGHT",
    "gradient: rows from the first on": "for start in range({begin => 0}, stop, BLOCK_N):",
    "gradient: low precision": "_add_step(total{ => .to(tl.float16).to(tl.float32)}, lost, x, d,",
    "gradient: last column lost": "inside_cols = cols < num_outputs{ => - 1} begin",
    "gradient: matrix of the first expert": "grad_row = {expert.to(tl.int64) * num_inputs + => } inputs",
    "gradient: scale lost": "total *= {scale => 1.0} grad_row",
    "gradient: scale before the sum ends": "IS_COMPENSATED) {total *= scale =>     total *= scale} grad_row",
    "gradient: weights lost": "HAS_WEIGHT={row_weight_N is not None => False}",
    "gradient: weight of the neighbour": "{rows => (rows + 1)} * row_weight_stride",
    "gradient: stride of the weights lost": "{0 if row_weight_N is None else row_weight_N.stride(0) => 1}",
    "gradient: weights of nobody": "row_weight_stride{, mask=inside_rows, other=0.0 => }",
    "gradient: weight squared": "x = (x.to(tl.float32) * row_weight[None, :]{ => * row_weight[None, :]})",
    "gradient: weighted rows with few bits": (
        "x = (x.to(tl.float32) * row_weight[None, :]){ => .to(tl.float16).to(tl.float32)}"
    ),
    "gradient: weights never on d": "d = (d.to(tl.float32) {* row_weight[:, None] => })",
    "product: borders trusted": "stop = {tl.minimum( => }tl.load(end_ptr + expert){, num_rows) => } first",
    "gradient: borders trusted": "begin = tl.load(end_ptr + expert - 1, mask=expert > 0, other=0) stop = {tl.minimum(tl.load(end_ptr + expert), num_rows) => tl.load(end_ptr + expert)}",
}


def check_every_part(module):
    case = case_of(**{**FULL, "rank": 20}, dtype=torch.float32)
    check_product(product(module), case)
    check_product(added(case.d_NO, module), case, y_NO=case.d_NO)
    check_grad(grad(module), case)
    check_impossible_borders(module)
    check_long_sums(module)
    for num_slots in (0, 3):
        check_fp8(module, FP8_SMALL, rank=20, has_bias=True, num_slots=num_slots, num_sentinels=3)
    # Steps enough along both sums that an accumulator of bf16 is seen beside the result's own rounding.
    narrow = case_of((9, 0, 150), 150, 20, dtype=torch.bfloat16, num_sentinels=5, rank=5, has_bias=True)
    check_product(product(module), narrow)
    check_grad(grad(module), narrow, dtype=torch.float32)
    for num_inputs, num_outputs in ((20, 37), (37, 20)):
        weighted = case_of((17, 0, 16, 15), num_inputs, num_outputs, dtype=torch.float32, num_sentinels=5)
        check_grad(grad(module), weighted, scale=1.75, row_weight_N=make_row_weights(weighted))


test_a_planted_fault_is_seen, test_without_a_fault_the_same_check_passes = planted_faults(
    triton, check_every_part, FAULTS
)


def test_the_truth_itself_knows_every_part():
    case = case_of(**FULL, dtype=torch.float32)
    without = [
        case._replace(addend=addend)
        for addend in (RowAddend(), case.addend._replace(bias_EO=None), case.addend._replace(low_scale=1.0))
    ]
    assert all((formula(case, torch.float64) - formula(other, torch.float64)).abs().max() > 0.1 for other in without)
