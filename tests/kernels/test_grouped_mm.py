"""Products of sorted rows with one matrix per expert: the plain twin and the public functions against the truth;
kernels in a child process.
"""

from typing import NamedTuple

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_fastft.core.errors import OptionError, ShapeError
from lightning_fastft.kernels.fp8_linear.reference import FP8
from lightning_fastft.kernels.grouped_mm import choice, op, reference
from lightning_fastft.kernels.grouped_mm.choice import choose_backend, choose_grad_backend, why_not_torch
from lightning_fastft.kernels.grouped_mm.op import (
    grouped_mm,
    grouped_mm_fp8,
    grouped_weight_grad,
)
from lightning_fastft.kernels.grouped_mm.reference import THIN_COLUMNS, Fp8Scales, GatheredRows, RowAddend
from tests.support.host_waits import HostWaits
from tests.support.kernel_harness import NUM_RUNS, planted_faults
from tests.support.truth import assert_within_bound

# Rows per expert around a tile of 16: none, one, a prime, one under and over, all to one expert.
COUNTS = (
    (0,), (1,), (13,), (15,), (16,), (17,), (0, 5), (7, 0), (1, 1), (17, 15),
    (0, 0, 13, 0, 1), (0, 0, 40, 0, 0), (33, 0, 0, 0, 0), (17, 0, 16, 15, 1),
)  # fmt: skip
# Everything at once: empty experts, a tile that two experts share, tails along every axis, rows of nobody.
FULL = {
    "counts": (17, 0, 16, 15, 1, 2),
    "num_inputs": 37,
    "num_outputs": 41,
    "num_sentinels": 5,
    "rank": 5,
    "has_bias": True,
}


class Case(NamedTuple):
    """Inputs of a product inside larger buffers of NaN; rows of nobody hold NaN."""

    x_NI: torch.Tensor
    weight_EIO: torch.Tensor
    end_E: torch.Tensor
    d_NO: torch.Tensor
    addend: RowAddend
    counts: tuple[int, ...]

    @property
    def num_real(self):
        return sum(self.counts)

    def expert_rows(self):
        begin = 0
        for expert, count in enumerate(self.counts):
            yield expert, slice(begin, begin + count)
            begin += count

    def addend_arguments(self):
        return {
            "bias_EO": self.addend.bias_EO,
            "low_NR": self.addend.low_NR,
            "low_ERO": self.addend.low_ERO,
            "low_scale": self.addend.low_scale,
        }


def inside(tensor, *, fill=float("nan"), step=1):
    """The same values in a larger buffer, `step` columns and one row from its borders."""
    margins = [1] * (tensor.ndim - 1) + [step]
    sizes = [size + 2 * margin for size, margin in zip(tensor.shape, margins)]
    buffer = torch.full(sizes, fill, dtype=tensor.dtype, device=tensor.device)
    inner = buffer[tuple(slice(margin, -margin) for margin in margins)]
    return inner.copy_(tensor)


def inside_flat(tensor, *, fill=float("nan")):
    """The same values, contiguous, between values that nobody may read."""
    buffer = torch.full((tensor.numel() + 128,), fill, dtype=tensor.dtype, device=tensor.device)
    return buffer[64:-64].view(tensor.shape).copy_(tensor)


def make_case(
    counts,
    num_inputs,
    num_outputs,
    *,
    dtype,
    num_sentinels=0,
    rank=0,
    has_bias=False,
    is_transposed=False,
    step=1,
    device="cpu",
):
    """Values in fp32 are multiples of 1/4096 on one side of each product, which TF32 would round, and of 1/4 on the
    other.

    Their sums are exact in any order, so that one unit in the last place is no noise.
    """

    def values(*shape, parts=4, num_nan_rows=0):
        tensor = torch.randn(shape, device=device)
        if dtype in (torch.float32, torch.float64):
            tensor = (tensor * parts).round() / parts
        if num_nan_rows:
            tensor[-num_nan_rows:] = float("nan")
        return tensor.to(dtype)

    num_experts, num_rows = len(counts), sum(counts) + num_sentinels
    x_NI = inside(values(num_rows, num_inputs, parts=4096, num_nan_rows=num_sentinels), step=step)
    d_NO = inside(values(num_rows, num_outputs, num_nan_rows=num_sentinels), step=step)
    if is_transposed:
        weight_EIO = inside(values(num_experts, num_outputs, num_inputs), step=step).transpose(1, 2)
    else:
        weight_EIO = inside(values(num_experts, num_inputs, num_outputs), step=step)
    end_E = inside_flat(torch.tensor(counts, dtype=torch.int32, device=device).cumsum(0, dtype=torch.int32), fill=2**30)
    bias_EO = inside(values(num_experts, num_outputs), step=step) if has_bias else None
    low_NR = inside(values(num_rows, rank, parts=4096, num_nan_rows=num_sentinels), step=step) if rank else None
    low_ERO = inside_flat(values(num_experts, rank, num_outputs)) if rank else None
    return Case(x_NI, weight_EIO, end_E, d_NO, RowAddend(bias_EO, low_NR, low_ERO, 1.75), tuple(counts))


def dense(tensor, dtype):
    """A copy with nothing between its rows.

    With AMX, PyTorch 2.13 multiplies bf16 rows together with the memory behind them, by zero: NaN there gives NaN.
    """
    return tensor.to(dtype).contiguous()


def formula(case, dtype, *, y_NO=None):
    """The definition in one dtype: the truth in float64, plain PyTorch in the tested one."""
    bias_EO, low_NR, low_ERO, low_scale = case.addend
    parts = []
    for expert, rows in case.expert_rows():
        if y_NO is None:
            part = dense(case.x_NI[rows], dtype) @ dense(case.weight_EIO[expert], dtype)
        else:
            part = y_NO[rows].to(dtype)
        if low_NR is not None:
            part = part + low_scale * (dense(low_NR[rows], dtype) @ dense(low_ERO[expert], dtype))
        parts.append(part if bias_EO is None else part + bias_EO[expert].to(dtype))
    return torch.cat(parts)


def grad_formula(case, dtype, *, scale=1.0, row_weight_N=None):
    """In a narrow dtype weighted rows are rounded to it, as every copy of them is."""
    parts = []
    for _, rows in case.expert_rows():
        x, d = dense(case.x_NI[rows], dtype), dense(case.d_NO[rows], dtype)
        if row_weight_N is not None:
            weight = row_weight_N[rows, None].to(torch.promote_types(dtype, torch.float32))
            x, d = ((x * weight).to(dtype), d) if x.shape[1] <= d.shape[1] else (x, (d * weight).to(dtype))
        parts.append(scale * (x.T @ d))
    return torch.stack(parts)


class Fp8Operands(NamedTuple):
    """What a product of e4m3 reads beside a case; rows of nobody and memory around hold NaN."""

    x_NI: torch.Tensor | GatheredRows
    weight_EOI: torch.Tensor
    scales: Fp8Scales


def make_fp8_case(counts, num_inputs, num_outputs, *, dtype=torch.bfloat16, num_slots=0, device="cpu", **options):
    """A case whose rows and matrices are the numbers that the operands stand for, in float64, and the operands."""
    case = make_case(counts, num_inputs, num_outputs, dtype=dtype, device=device, **options)
    num_rows, num_experts = case.x_NI.shape[0], len(counts)
    num_tokens = num_rows // num_slots if num_slots else num_rows
    assert not num_slots or num_tokens * num_slots == num_rows

    def values(*shape):
        # So small that sums are exact in any order, and in the few digits that tensor cores keep of sums of e4m3.
        return (torch.randn(shape, device=device) * 1.5).round().clamp(-3, 3)

    def scale(size):
        return 2.0 ** torch.randint(-6, 1, (size,), device=device) * (1 + torch.arange(size, device=device) % 3)

    x_TI, weight_EOI = values(num_tokens, num_inputs), values(num_experts, num_outputs, num_inputs)
    x_scale_T, weight_scale_E = scale(num_tokens), scale(num_experts)
    wide_TI = x_TI.double() * x_scale_T[:, None]
    if not num_slots:
        x_TI[case.num_real :] = float("nan")
    x_NI = inside(x_TI.to(FP8), step=16)
    if num_slots:
        slot_N = torch.randperm(num_rows, generator=torch.Generator().manual_seed(2)).to(device)
        x_NI, wide_TI = GatheredRows(x_NI, slot_N, num_slots), wide_TI[slot_N // num_slots]
    scales = Fp8Scales(*(inside_flat(each.float()) for each in (x_scale_T, weight_scale_E)))
    wide_EIO = (weight_EOI.double() * weight_scale_E[:, None, None]).transpose(1, 2)
    operands = Fp8Operands(x_NI, inside_flat(weight_EOI.to(FP8)), scales)
    return case._replace(x_NI=wide_TI, weight_EIO=wide_EIO), operands


def fp8_product(operands, module=reference, **options):
    """How a module writes the product of the operands."""
    return lambda case, out_NO: module.grouped_mm(
        operands.x_NI,
        operands.weight_EOI.transpose(1, 2),
        case.end_E,
        addend=case.addend,
        out_NO=out_NO,
        scales=operands.scales,
        **options,
    )


def check_product(run, case, *, y_NO=None, step=1, is_tail_kept=True):
    """Run into a buffer of NaN and into one of ones: within the bound, bit-equal, and nothing written but the
    rows of experts.
    """
    dtype, num_real = case.d_NO.dtype, case.num_real
    truth, plain = formula(case, torch.float64, y_NO=y_NO), formula(case, dtype, y_NO=y_NO)
    results = []
    for fill in (float("nan"), 1.0):
        out_NO = inside(torch.full_like(case.d_NO, fill), fill=fill, step=step)
        result_NO = run(case, out_NO)
        assert result_NO.data_ptr() == out_NO.data_ptr()
        results.append(result_NO[:num_real].clone())
        assert_within_bound("product", results[-1], plain=plain, truth=truth, dtype=dtype)
        result_NO[:num_real] = fill
        rest = out_NO._base if is_tail_kept else out_NO[:num_real]
        assert torch.equal(rest.nan_to_num(2.0), torch.full_like(rest, fill).nan_to_num(2.0)), (
            "something was written outside the rows of experts"
        )
    assert torch.equal(*results)


def check_grad(run, case, *, dtype=None, **factors):
    """Within the bound, exactly 0 for experts without rows, and on a device bit-equal twice; the inputs stay."""
    dtype = dtype or case.x_NI.dtype
    truth, plain = grad_formula(case, torch.float64, **factors), grad_formula(case, case.x_NI.dtype, **factors)
    inputs, results = (case.x_NI, case.d_NO), []
    before = [each.nan_to_num(2.0) for each in inputs]
    for _ in range(NUM_RUNS):
        # Fresh memory holds NaN.
        torch.use_deterministic_algorithms(True)
        try:
            grad_EIO = run(case, dtype, **factors)
        finally:
            torch.use_deterministic_algorithms(False)
        assert grad_EIO.dtype is dtype
        assert_within_bound("weight gradient", grad_EIO, plain=plain.to(dtype), truth=truth, dtype=dtype)
        for expert, count in enumerate(case.counts):
            assert count or (grad_EIO[expert] == 0).all(), f"expert {expert} has no rows and a gradient"
        results.append(grad_EIO)
    assert all(torch.equal(other, results[0]) for other in results[1:])
    assert all(torch.equal(each.nan_to_num(2.0), old) for each, old in zip(inputs, before))


def public_product(backend, module=op):
    def run(case, out_NO):
        return module.grouped_mm(
            case.x_NI, case.weight_EIO, case.end_E, **case.addend_arguments(), out=out_NO, backend=backend
        )

    return run


def public_grad(backend):
    return lambda case, dtype, **factors: grouped_weight_grad(
        case.x_NI, case.d_NO, case.end_E, dtype=dtype, backend=backend, **factors
    )


def make_row_weights(case, *, dtype=torch.float32, is_exact=False):
    """One factor per row, two apart from the next in memory and NaN for rows of nobody; exact ones change no
    digits of a row.
    """
    num_rows, device = case.x_NI.shape[0], case.x_NI.device
    weight_N = (
        2.0 ** torch.randint(-2, 3, (num_rows,), device=device)
        if is_exact
        else (torch.rand(num_rows, device=device) * 64).round() / 64
    )
    weight_N[case.num_real :] = float("nan")
    return inside(weight_N.to(dtype)[:, None])[:, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("counts", COUNTS)
def test_product_and_weight_gradient_equal_the_truth(counts, dtype):
    for num_sentinels, is_transposed in ((0, False), (3, True)):
        case = make_case(counts, 13, 17, dtype=dtype, num_sentinels=num_sentinels, is_transposed=is_transposed)
        check_product(public_product("auto"), case)
        check_grad(public_grad("auto"), case)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rank", "has_bias"), [(0, True), (4, False), (8, True), (16, True), (17, False)])
def test_bias_and_low_rank_product_equal_the_truth(rank, has_bias, dtype):
    case = make_case((5, 0, 7), 9, 11, dtype=dtype, num_sentinels=2, rank=rank, has_bias=has_bias)
    check_product(public_product("reference"), case)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rank", "has_bias"), [(0, False), (0, True), (5, False), (8, True)])
@pytest.mark.parametrize("is_transposed", [False, True])
def test_the_composition_around_torch_equals_the_truth(is_transposed, rank, has_bias, dtype):
    case = make_case(
        (5, 0, 7),
        16,
        24,
        dtype=dtype,
        num_sentinels=2,
        rank=rank,
        has_bias=has_bias,
        is_transposed=is_transposed,
        step=8,
    )
    check_product(public_product("torch"), case, step=8, is_tail_kept=rank > 0 or has_bias)
    check_grad(public_grad("torch"), case)
    fresh_NO = grouped_mm(case.x_NI, case.weight_EIO, case.end_E, **case.addend_arguments(), backend="torch")
    out_NO = public_product("torch")(case, torch.empty_like(fresh_NO))
    assert torch.equal(fresh_NO[: case.num_real], out_NO[: case.num_real])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize(("num_inputs", "num_outputs"), [(5, 24), (24, 5), (8, 8)])
def test_scale_and_row_weights_of_a_gradient_equal_the_truth(num_inputs, num_outputs, dtype):
    case = make_case((17, 0, 16, 15, 1, 2), num_inputs, num_outputs, dtype=dtype, num_sentinels=5)
    for factors in (
        {"scale": -0.75},
        {"row_weight_N": make_row_weights(case)},
        {"scale": 3.0, "row_weight_N": make_row_weights(case)},
    ):
        check_grad(public_grad("auto"), case, **factors)
    check_grad(
        public_grad("auto"),
        case,
        row_weight_N=make_row_weights(case, dtype=torch.float64 if dtype is torch.float64 else torch.bfloat16),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scale_and_row_weights_around_torch(dtype):
    case = make_case((17, 0, 16), 16, 24, dtype=dtype, num_sentinels=5, step=8)
    check_grad(public_grad("torch"), case, scale=0.5, row_weight_N=make_row_weights(case))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rank", "has_bias"), [(0, False), (0, True), (5, False), (8, True)])
@pytest.mark.parametrize("num_slots", [0, 1, 3])
def test_products_of_e4m3_equal_the_truth(num_slots, rank, has_bias, dtype):
    options = {"dtype": dtype, "num_sentinels": 3, "rank": rank, "has_bias": has_bias, "num_slots": num_slots}
    case, operands = make_fp8_case((5, 0, 16, 6), 32, 48, **options)
    check_product(fp8_product(operands), case)

    def public(case, out_NO):
        y_NO = grouped_mm_fp8(*operands[:2], case.end_E, scales=operands.scales, dtype=dtype, **case.addend_arguments())
        assert y_NO.dtype is dtype
        out_NO[: case.num_real] = y_NO[: case.num_real]
        return out_NO

    check_product(public, case)


def test_operands_that_e4m3_products_cannot_read_are_refused():
    case, (x_NI, weight_EOI, scales) = make_fp8_case((5, 6), 32, 48, rank=4, has_bias=True)
    good = {"scales": scales, "dtype": torch.bfloat16, **case.addend_arguments()}

    def run(**changes):
        return grouped_mm_fp8(x_NI, weight_EOI, case.end_E, **{**good, **changes})

    for changes in ({"dtype": torch.float16}, {"bias_EO": None, "low_NR": None}):
        with pytest.raises(ShapeError):
            run(**changes)
    for changes in ({"low_scale": float("nan")}, {"backend": "triton"}, {"backend": "torch"}, {"dtype": torch.float64}):
        with pytest.raises(OptionError):
            run(**changes)
    with pytest.raises(OptionError, match="multiples of 16"):
        grouped_mm_fp8(
            x_NI[:, :24].contiguous(),
            weight_EOI[:, :, :24].contiguous(),
            case.end_E,
            scales=scales,
            dtype=torch.bfloat16,
        )


def test_rows_and_their_weights_stay_as_they_are():
    case = make_case((5, 7), 8, 16, dtype=torch.bfloat16, step=8)
    weight_N = make_row_weights(case)
    before = [tensor.clone() for tensor in (case.x_NI, case.d_NO, weight_N)]
    for backend in ("auto", "torch"):
        public_grad(backend)(case, torch.bfloat16, scale=2.0, row_weight_N=weight_N)
    assert all(torch.equal(one, other) for one, other in zip((case.x_NI, case.d_NO, weight_N), before))


def test_a_gradient_may_be_wider_than_its_inputs():
    case = make_case((30, 0, 7), 9, 11, dtype=torch.bfloat16)
    check_grad(public_grad("auto"), case, dtype=torch.float32)
    with pytest.raises(OptionError, match="result has the dtype of its inputs"):
        public_grad("torch")(case, torch.float32)


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_without_rows_without_columns_without_experts(backend):
    for counts, num_sentinels, num_inputs, num_outputs in (
        ((0, 0), 0, 8, 8),
        ((0, 0), 3, 8, 8),
        ((2, 1), 0, 0, 8),
        ((2, 1), 0, 8, 0),
    ):
        case = make_case(
            counts,
            num_inputs,
            num_outputs,
            dtype=torch.float32,
            num_sentinels=num_sentinels,
            rank=4,
            has_bias=True,
            step=8,
        )
        if backend == "torch" and min(case.x_NI.shape[0], num_inputs, num_outputs) == 0:
            with pytest.raises(OptionError, match="above 0"):
                public_product(backend)(case, torch.empty(case.d_NO.shape))
            continue
        check_product(public_product(backend), case, step=8)
        check_grad(public_grad(backend), case)
    no_ends = torch.zeros(0, dtype=torch.int32)
    assert grouped_mm(torch.zeros(3, 8), torch.zeros(0, 8, 4), no_ends).shape == (3, 4)
    assert grouped_weight_grad(torch.zeros(3, 8), torch.zeros(3, 4), no_ends).shape == (0, 8, 4)


def test_results_have_no_graph_and_autocast_changes_nothing():
    case = make_case((3, 2), 4, 6, dtype=torch.float32, rank=4)
    expected = grouped_mm(case.x_NI, case.weight_EIO, case.end_E, **case.addend_arguments())
    with torch.autocast("cpu", torch.bfloat16):
        y_NO = grouped_mm(
            case.x_NI.requires_grad_(), case.weight_EIO.requires_grad_(), case.end_E, **case.addend_arguments()
        )
        grad_EIO = grouped_weight_grad(case.x_NI, case.d_NO, case.end_E)
    assert torch.equal(y_NO, expected)
    assert not y_NO.requires_grad
    assert not grad_EIO.requires_grad
    assert grad_EIO.dtype is torch.float32


FAULTS = {
    "scale lost": "product = product + {addend.low_scale * => } (",
    "bias of the neighbour": "addend.bias_EO[expert{ => - 1}]",
    "low-rank matrix of the neighbour": "addend.low_ERO[expert{ => - 1}]",
    "matrix of the neighbour": "weight_EIO[expert{ => - 1}]",
    "last row of every expert lost": "slice(begin, {end => max(begin, end - 1)}) for",
    "rows of nobody written": "borders = [0, *end_E.tolist(){ => [:-1], num_rows}]",
    "low precision": "import one_kernel, wide_dtype{ => ; wide_dtype = lambda dtype: torch.bfloat16}",
    "gradient: scale lost": "= {scale => 1.0} * (x_NI[rows]",
    "gradient: weights lost": "if {row_weight_N is None => True}:",
    "gradient: weights on both operands": "weight_N1).to(x_NI.dtype), {d_NO => (d_NO * weight_N1).to(d_NO.dtype)}",
}


test_a_planted_fault_is_seen, test_without_a_fault_the_same_check_passes = planted_faults(
    reference, lambda module: check_the_twin(module), FAULTS
)


def check_the_twin(module):
    case = make_case(**FULL, dtype=torch.float32)
    check_product(
        lambda case, out: module.grouped_mm(case.x_NI, case.weight_EIO, case.end_E, addend=case.addend, out_NO=out),
        case,
    )
    y_NO = case.d_NO
    check_product(
        lambda case, out: module.add_to_rows(y_NO, case.end_E, addend=case.addend, out_NO=out), case, y_NO=y_NO
    )

    def grad(case, dtype, **factors):
        return module.grouped_weight_grad(case.x_NI, case.d_NO, case.end_E, dtype=dtype, **factors)

    check_grad(grad, case)
    check_grad(grad, case, scale=0.75, row_weight_N=make_row_weights(case))


OP_FAULTS = {
    "addend forgotten": "if {addend.is_empty => True}:",
    "bias not passed on": '= RowAddend({bias_EO => None}, low_NR, low_ERO, low_scale) if must_check(is_checked): check_float("low_scale", low_scale, low=-float("inf")) _check_product',
    "scale not passed on": 'low_ERO, {low_scale => 1.0}) if must_check(is_checked): check_float("low_scale", low_scale, low=-float("inf")) _check_product',
    "out forgotten": "y_NO {if out_NO is None else out_NO => })",
}


def check_composition(module):
    case = make_case((5, 0, 7), 16, 24, dtype=torch.float32, rank=8, has_bias=True, step=8)
    check_product(public_product("torch", module), case, step=8)


test_a_fault_planted_in_the_composition_is_seen, test_the_composition_passes_the_same_check = planted_faults(
    op, check_composition, OP_FAULTS
)


@pytest.fixture
def pretend_cuda(monkeypatch):
    """Tensors without memory that say they are on a CUDA device, and the capability of that device."""
    capability = [9, 0]
    monkeypatch.setattr(choice, "capability_of", lambda device: tuple(capability))
    with FakeTensorMode():
        yield capability


def empty(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="cuda")


def test_torch_serves_bf16_on_hopper_and_blackwell_and_triton_the_rest(pretend_cuda):
    def picks(dtype):
        x_NI, d_NO = empty(64, 80, dtype=dtype), empty(64, 96, dtype=dtype)
        return choose_backend(x_NI, empty(4, 80, 96, dtype=dtype)), choose_grad_backend(x_NI, d_NO, num_experts=4)

    expected = {
        (8, 0): ("triton", "triton"),
        (8, 9): ("triton", "triton"),
        (9, 0): ("torch", "torch"),
        (10, 0): ("torch", "triton"),
        (12, 0): ("triton", "triton"),
    }
    for capability, names in expected.items():
        pretend_cuda[:] = capability
        assert picks(torch.bfloat16) == names
        assert picks(torch.float16) == picks(torch.float32) == ("triton", "triton")


def test_torch_is_picked_only_where_every_row_is_aligned(pretend_cuda):
    x_NI, weight_EIO = empty(64, 80), empty(4, 96, 80).transpose(1, 2)
    assert choose_backend(x_NI, weight_EIO) == "torch"
    misfits = {
        "inputs": (empty(64, 76), empty(4, 76, 96)),
        "outputs": (x_NI, empty(4, 80, 92)),
        "view of fewer inputs": (empty(64, 80).narrow(1, 0, 76), empty(4, 76, 96)),
        "row stride": (empty(64, 84).narrow(1, 0, 80), weight_EIO),
        "begin": (empty(64, 88).narrow(1, 4, 80), weight_EIO),
        "weight stride": (x_NI, empty(4, 80, 100).narrow(2, 0, 96)),
        "expert stride": (x_NI, empty(4 * 7684).as_strided((4, 80, 96), (7684, 96, 1))),
        "overlap": (empty(80).expand(64, 80), weight_EIO),
        "experts": (x_NI, empty(1024, 80, 96)),
        "no rows": (empty(0, 80), weight_EIO),
    }
    for name, (x, weight) in misfits.items():
        assert choose_backend(x, weight) == "triton", name
    assert choose_grad_backend(x_NI, empty(64, 96), num_experts=4) == "torch"
    assert choose_grad_backend(x_NI, empty(64, 96), num_experts=4, dtype=torch.float32) == "triton"
    assert choose_grad_backend(x_NI, empty(64, 100).narrow(1, 0, 96), num_experts=4) == "triton"


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_gathered_rows_are_read_by_their_slots(backend):
    x_TI, d_TO = torch.randn(6, 8, dtype=torch.bfloat16), torch.randn(6, 8, dtype=torch.bfloat16)
    slot_N, end_E = torch.randperm(12), torch.tensor([3, 3, 10], dtype=torch.int32)
    weight_EIO = torch.randn(3, 8, 8, dtype=torch.bfloat16)
    x, d = (GatheredRows(rows, slot_N, 2) for rows in (x_TI, d_TO))
    copied = [rows[slot_N // 2] for rows in (x_TI, d_TO)]
    found, expected = (grouped_mm(rows, weight_EIO, end_E, backend=backend)[:10] for rows in (x, copied[0]))
    assert torch.equal(found, expected)
    expected = grouped_weight_grad(*copied, end_E, backend=backend)
    for left, right in ((x, d), (x, copied[1]), (copied[0], d)):
        assert torch.equal(grouped_weight_grad(left, right, end_E, backend=backend), expected)


def test_operands_of_other_slots_are_refused():
    x, d = (GatheredRows(torch.zeros(6, 8), torch.randperm(12), 2) for _ in range(2))
    with pytest.raises(ShapeError, match="different slots"):
        grouped_weight_grad(x, d, torch.zeros(3, dtype=torch.int32))


def test_thin_products_take_our_kernel(pretend_cuda):
    thin, wide = THIN_COLUMNS, THIN_COLUMNS + 8
    x_NI = empty(64, 2048)
    assert [choose_backend(x_NI, empty(4, 2048, columns)) for columns in (16, thin, wide)] == [
        "triton",
        "triton",
        "torch",
    ]
    # Few inputs alone make no thin product: the result is what crosses memory.
    assert choose_backend(empty(64, 16), empty(4, 16, 2048)) == "torch"
    for left, right, expected in ((16, 2048, "triton"), (2048, thin, "triton"), (wide, 2048, "torch")):
        assert choose_grad_backend(empty(64, left), empty(64, right), num_experts=4) == expected


@pytest.mark.parametrize(("capability", "expected"), [((9, 0), "triton"), ((10, 0), "torch")])
def test_our_kernel_adds_where_that_was_measured_to_be_faster(pretend_cuda, capability, expected):
    pretend_cuda[:] = capability
    x_NI, weight_EIO = empty(64, 80), empty(4, 80, 96)
    assert (choose_backend(x_NI, weight_EIO, has_addend=True), choose_backend(x_NI, weight_EIO)) == (expected, "torch")


@pytest.mark.parametrize(("capability", "expected"), [((9, 0), "triton"), ((10, 0), "torch")])
def test_our_kernel_gathers_where_that_was_measured_to_be_faster(pretend_cuda, capability, expected):
    pretend_cuda[:] = capability
    x_TI, slot_N = empty(32, 80), torch.zeros(64, dtype=torch.int64, device="cuda")
    weights = {columns: empty(4, 80, columns) for columns in (1536, 2880, 2888)}
    picks = [choose_backend(GatheredRows(x_TI, slot_N, 2), weight_EIO) for weight_EIO in weights.values()]
    assert picks == [expected, expected, "torch"]
    assert choose_backend(empty(64, 80), weights[1536]) == "torch"


def test_a_backend_that_would_wait_or_be_wrong_is_refused(pretend_cuda):
    end_E = torch.empty(4, dtype=torch.int32, device="cuda")
    x_NI, weight_EIO, d_NO = empty(64, 16), empty(4, 16, 24), empty(64, 24)
    with pytest.raises(OptionError, match="host sync"):
        grouped_mm(x_NI, weight_EIO, end_E, backend="reference")
    pretend_cuda[:] = (8, 0)
    with pytest.raises(OptionError, match=r"host sync.*triton"):
        grouped_mm(x_NI, weight_EIO, end_E, backend="torch")
    pretend_cuda[:] = (10, 0)
    with pytest.raises(OptionError, match="experts without rows a gradient"):
        grouped_weight_grad(x_NI, d_NO, end_E, backend="torch")
    with pytest.raises(ShapeError, match="float64 runs on a CPU only"):
        grouped_mm(empty(64, 16, dtype=torch.float64), empty(4, 16, 24, dtype=torch.float64), end_E)


def test_the_checks_and_the_choice_never_wait():
    case = make_case((5, 0, 7), 16, 24, dtype=torch.float32, rank=8, has_bias=True, step=8)
    with HostWaits() as waits:
        op._check_product(case.x_NI, case.weight_EIO, case.end_E, addend=case.addend, out_NO=None)
        assert why_not_torch(case.x_NI, case.weight_EIO) is None
    assert waits.total == 0


def ends(*values):
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"end_E": ends(4, 2)}, "must not decrease"),
        ({"end_E": ends(4, 7)}, "must not decrease"),
        ({"end_E": ends(-1, 6)}, "must not decrease"),
        ({"low_NR": torch.zeros(6, 2)}, "together"),
        ({"low_ERO": torch.zeros(2, 2, 3)}, "together"),
        ({"low_NR": torch.zeros(6, 0), "low_ERO": torch.zeros(2, 0, 3)}, "rank must be above 0"),
        ({"out": torch.zeros(3).expand(6, 3)}, "overlap"),
    ],
)
def test_what_a_kernel_would_read_wrongly_is_refused(change, message):
    arguments = {"x_NI": torch.zeros(6, 4), "weight_EIO": torch.zeros(2, 4, 3), "end_E": ends(2, 6), **change}
    with pytest.raises(ShapeError, match=message):
        grouped_mm(**arguments)


def test_impossible_options_are_refused():
    x_NI, weight_EIO = torch.zeros(6, 4), torch.zeros(2, 4, 3)
    with pytest.raises(OptionError, match="cutlass"):
        grouped_mm(x_NI, weight_EIO, ends(2, 6), backend="cutlass")
    with pytest.raises(OptionError, match="needs tensors on CUDA"):
        grouped_mm(x_NI, weight_EIO, ends(2, 6), backend="triton")
    with pytest.raises(OptionError, match="multiples of 4"):
        grouped_mm(x_NI, weight_EIO, ends(2, 6), backend="torch")
    with pytest.raises(OptionError, match="low_scale"):
        grouped_mm(x_NI, weight_EIO, ends(2, 6), low_scale=float("nan"))
    with pytest.raises(ShapeError, match="float64"):
        grouped_weight_grad(x_NI, torch.zeros(6, 3), ends(2, 6), dtype=torch.float64)
    with pytest.raises(OptionError, match="scale"):
        grouped_weight_grad(x_NI, torch.zeros(6, 3), ends(2, 6), scale=float("inf"))
