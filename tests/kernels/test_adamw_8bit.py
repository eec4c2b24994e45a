"""AdamW in 8 bits: format, steps against float64 and refusals by the plain twin."""

from typing import NamedTuple
from unittest import mock

import pytest
import torch

from lightning_fastft.core.errors import ShapeError
from lightning_fastft.kernels.adamw_step import codes, op, reference
from lightning_fastft.kernels.adamw_step.codes import BLOCK
from lightning_fastft.kernels.adamw_step.op import adamw_step
from lightning_fastft.kernels.adamw_step.reference import SkipFlag, StepOptions
from lightning_fastft.kernels.adamw_step.table import CHUNK, TensorTable
from tests.kernels.test_adamw_step import (
    BF16,
    FP16,
    FP32,
    IS_INTERPRETED,
    assert_margin_of_state,
    in_units,
    padded,
    padded_state,
    rounded,
)
from tests.support.kernel_harness import planted_faults
from tests.support.truth import Watch

COMBINATIONS = ((FP32, FP32, None), (FP32, BF16, BF16), (BF16, BF16, None), (FP32, FP16, FP16))
SIZES = (1, 0, CHUNK + 37, 7, 1009, BLOCK + 1)
OPTIONS = StepOptions(learning_rate=0.05, weight_decay=0.1, step=3)
CHANGES = (
    {"weight_decay": 0.0},
    {"step": 1},
    {"step": 100_000},
    {"beta1": 0.0},
    {"beta1": 0.3, "beta2": 0.5, "eps": 1e-3},
    {"learning_rate": 0.0},
)
STATE = ("param", "exp_avg", "exp_avg_sq", "copy", "exp_avg_absmax", "exp_avg_sq_absmax")
# Quotients and roots of a device have an error of a few units in the last place, which cancel nowhere.
NUM_UNITS = 8
# How much farther than the nearest code a chosen one may lie, relative to the value: fp32 on the way to it.
TIE = 1e-6


class Row(NamedTuple):
    """One tensor with all that belongs to it; owner.grad is grad, or None where missing."""

    param: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    copy: torch.Tensor | None
    exp_avg_absmax: torch.Tensor
    exp_avg_sq_absmax: torch.Tensor
    owner: torch.Tensor
    grad: torch.Tensor

    def averages(self):
        """In float64."""
        pairs = ((self.exp_avg, self.exp_avg_absmax, True), (self.exp_avg_sq, self.exp_avg_sq_absmax, False))
        return [codes.decode(code, absmax, is_signed=is_signed).double() for code, absmax, is_signed in pairs]


def padded_codes(code, offset):
    buffer = torch.full((2 * CHUNK + offset + code.numel(),), 7, dtype=torch.uint8, device=code.device)
    inner = buffer[CHUNK + offset : CHUNK + offset + code.numel()]
    inner.copy_(code)
    return inner


def assert_margins(rows):
    for index, row in enumerate(rows):
        for kind in STATE:
            tensor = getattr(row, kind)
            if tensor is not None and tensor.dtype is torch.uint8:
                outside = torch.cat([tensor._base[:CHUNK], tensor._base[-CHUNK:]])
                assert (outside == 7).all(), f"{kind}[{index}]: written outside of its memory"
            elif tensor is not None:
                assert_margin_of_state(f"{kind}[{index}]", tensor)


def wide_numbers(size, device):
    """Values of ten decades, so that every code is met."""
    return torch.randn(size, device=device) * 10.0 ** (torch.rand(size, device=device) * 9 - 9)


def make_rows(combinations=COMBINATIONS, *, sizes=SIZES, missing=(3,), offset=1, device="cpu"):
    """Tensors in the middle of a run; some blocks of the state and of the gradients are 0."""
    rows = []
    for index, size in enumerate(sizes):
        param_dtype, grad_dtype, copy_dtype = combinations[index % len(combinations)]
        is_kept = (torch.arange(size, device=device) // BLOCK) % 5 != 3
        grad = padded((wide_numbers(size, device) * is_kept).to(grad_dtype), offset)
        average = wide_numbers(size, device) * is_kept
        # Never far below the average's own square, as in a run.
        square = (average.square() + grad.float().square() * torch.rand(size, device=device)) * (
            1 + torch.rand(size, device=device)
        )
        code, absmax_B = codes.encode(average, is_signed=True)
        code_sq, absmax_sq_B = codes.encode(square, is_signed=False)
        param = torch.randn(size, device=device) * (torch.rand(size, device=device) < 0.9)
        copy = None if copy_dtype is None else padded_state(torch.zeros(size, dtype=copy_dtype, device=device), offset)
        owner = torch.empty(size, dtype=grad_dtype, device=device)
        owner.grad = None if index in missing else grad
        stored = [padded_codes(each, offset) for each in (code, code_sq)]
        absmaxs = [padded_state(each, offset) for each in (absmax_B, absmax_sq_B)]
        rows.append(Row(padded_state(param.to(param_dtype), offset), *stored, copy, *absmaxs, owner, grad))
    return rows


def copy_rows(rows):
    return [Row(*(None if tensor is None else tensor.clone() for tensor in row)) for row in rows]


def plural(name):
    return "copies" if name == "copy" else f"{name}s"


def make_table(rows, Table=TensorTable):
    columns = dict(zip(Row._fields, zip(*rows)))
    del columns["grad"]
    return Table(columns.pop("param"), **{plural(name): column for name, column in columns.items()})


def check_row(row, old, options, scale):
    """One tensor against the step in float64 from what its codes stood for."""
    grad = old.grad.double() * (1.0 if scale is None else scale.double())
    average, square = old.averages()
    # Without cancelling: the size at which rounding happens.
    terms = options.beta1 * average.abs() + (1 - options.beta1) * grad.abs()
    average = options.beta1 * average + (1 - options.beta1) * grad
    square = options.beta2 * square + (1 - options.beta2) * grad.square()
    rate = float(options.learning_rate)
    step_size = (
        rate / (1 - options.beta1**options.step) / ((square / (1 - options.beta2**options.step)).sqrt() + options.eps)
    )
    param = old.param.double()
    truth, magnitude = param * (1 - rate * options.weight_decay) - step_size * average, param.abs() + step_size * terms
    units = in_units(row.param, truth, magnitude, row.param.dtype)
    assert units <= (NUM_UNITS if row.param.dtype is FP32 else 1 + IS_INTERPRETED), f"param: {units:.3g} units"
    for name, true, is_signed in (("exp_avg", average, True), ("exp_avg_sq", square, False)):
        code, absmax_B = getattr(row, name), getattr(row, f"{name}_absmax")
        blocks_BV = torch.nn.functional.pad(true, (0, -len(true) % BLOCK)).view(-1, BLOCK)
        true_absmax_B = blocks_BV.abs().amax(1)
        assert ((absmax_B - true_absmax_B).abs() <= 1e-6 * true_absmax_B).all(), f"{name}: largest magnitudes"
        is_filled = (true_absmax_B > 0).repeat_interleave(BLOCK)[: len(true)]
        assert (code[~is_filled] == codes.zero_code(is_signed=is_signed)).all(), f"{name}: a block of zeros"
        share_BV = blocks_BV / torch.where(true_absmax_B > 0, true_absmax_B, 1.0)[:, None]
        grid = codes.dynamic_map(is_signed=is_signed).to(true.device)
        place = torch.bucketize(share_BV, grid).clamp(1, len(grid) - 1)
        nearest_BV = torch.minimum((grid[place] - share_BV).abs(), (grid[place - 1] - share_BV).abs())
        share, nearest = share_BV.flatten()[: len(true)], nearest_BV.flatten()[: len(true)]
        is_farther = (grid[code.long()] - share).abs() > nearest + TIE * share.abs()
        assert not (is_farther & is_filled).any(), (
            f"{name}: {int((is_farther & is_filled).sum())} codes are not the nearest"
        )


def check_rows(rows, before, options=OPTIONS, scale=None):
    for index, (row, old) in enumerate(zip(rows, before)):
        if row.owner.grad is None:
            assert all(new is None or torch.equal(new, kept) for new, kept in zip(row[:6], old[:6])), (
                f"row {index} has changed"
            )
        elif len(row.param):
            check_row(row, old, options, scale)
            if row.copy is not None:
                assert torch.equal(row.copy, rounded(row.param, row.copy.dtype)), (
                    f"copy[{index}] is not the rounded master"
                )
        assert torch.equal(row.grad, old.grad)
    assert_margins(rows)


def check_step(
    functions,
    combinations=COMBINATIONS,
    *,
    options=OPTIONS,
    scale=0.37,
    offset=1,
    device="cpu",
    Table=TensorTable,
    sizes=SIZES,
):
    torch.manual_seed(0)
    rows = make_rows(combinations, offset=offset, device=device, sizes=sizes)
    scale = None if scale is None else torch.tensor(scale, device=device)
    table = make_table(rows, Table)
    for step in range(2):
        before = copy_rows(rows)
        functions.adamw_step(table, options=options._replace(step=options.step + step), scale=scale)
        check_rows(rows, before, options._replace(step=options.step + step), scale)


def check_skip(functions, *, device="cpu", Table=TensorTable):
    zero, one, nan = (torch.tensor(number, device=device) for number in (0.0, 1.0, float("nan")))
    count = torch.tensor(2.0, dtype=torch.float64, device=device)
    for rate in (0.05, torch.tensor(0.05, device=device)):
        torch.manual_seed(4)
        rows = make_rows(sizes=(7, CHUNK + 1, 0, 300), missing=(3,), device=device)
        before, options = copy_rows(rows), OPTIONS._replace(learning_rate=rate)
        table = make_table(rows, Table)
        for found_inf in (one, nan):
            functions.adamw_step(table, options=options, scale=nan, skip=SkipFlag(found_inf, count))
            assert all(
                old is None or torch.equal(new, old)
                for row, kept in zip(rows, before)
                for new, old in zip(row[:6], kept[:6])
            )
        functions.adamw_step(table, options=options, skip=SkipFlag(zero, count))
        check_rows(rows, before, options._replace(step=options.step - 2))


def check_mixed(functions, *, device="cpu", Table=TensorTable):
    """Averages in fp32 and in 8 bits stand in one table; each has the bits that it has in a table of its own."""
    torch.manual_seed(5)
    rows = make_rows(sizes=(300, CHUNK + 9), missing=(), device=device)
    twins = copy_rows(rows)
    for twin, row in zip(twins, rows):
        twin.owner.grad = row.owner.grad
    lists = {name: [getattr(row, name) for row in rows] for name in Row._fields[1:-1]}
    wide = [row.param.clone() for row in rows]
    averages = [[torch.zeros_like(each, dtype=FP32) for each in wide] for _ in range(2)]
    alone = [[each.clone() for each in column] for column in (wide, *averages)]
    owners = [row.owner for row in rows]
    together = {plural(name): [*column, *([None] * 2)] for name, column in lists.items()}
    together |= {
        "exp_avgs": [*lists["exp_avg"], *averages[0]],
        "exp_avg_sqs": [*lists["exp_avg_sq"], *averages[1]],
        "owners": [*owners, *owners],
    }
    functions.adamw_step(Table([*(row.param for row in rows), *wide], **together), options=OPTIONS)
    functions.adamw_step(make_table(twins, Table), options=OPTIONS)
    functions.adamw_step(Table(alone[0], exp_avgs=alone[1], exp_avg_sqs=alone[2], owners=owners), options=OPTIONS)
    assert all(
        one is None or torch.equal(one, other)
        for row, twin in zip(rows, twins)
        for one, other in zip(row[:6], twin[:6])
    )
    assert all(
        torch.equal(one, other)
        for column, others in zip((wide, *averages), alone)
        for one, other in zip(column, others)
    )


def check_every_part(functions, Table=TensorTable, device="cpu"):
    rate = torch.tensor(0.05, device=device)
    for options, scale in ((OPTIONS, 0.37), (OPTIONS._replace(learning_rate=rate, step=1), None)):
        check_step(functions, options=options, scale=scale, Table=Table, device=device)
    check_skip(functions, Table=Table, device=device)
    check_mixed(functions, Table=Table, device=device)


@pytest.fixture(autouse=True)
def _no_graph():
    with torch.no_grad():
        yield


# The format.


@pytest.mark.parametrize("is_signed", [True, False])
def test_the_map_is_that_of_bitsandbytes(is_signed):
    functional = pytest.importorskip("bitsandbytes.functional")
    theirs, ours = functional.create_dynamic_map(is_signed).double(), codes.dynamic_map(is_signed=is_signed)
    assert theirs.shape == ours.shape
    assert ((theirs - ours).abs() <= 2e-7 * ours.abs()).all()
    assert ours[codes.zero_code(is_signed=is_signed)] == 0


@pytest.mark.parametrize("is_signed", [True, False])
def test_every_code_comes_back(is_signed):
    absmax_B = torch.tensor([3.0, 0.25])
    code = torch.arange(256).repeat(2).to(torch.uint8)
    found, found_absmax_B = codes.encode(codes.decode(code, absmax_B, is_signed=is_signed), is_signed=is_signed)
    assert torch.equal(found, code)
    assert torch.equal(found_absmax_B, absmax_B)


def test_blocks_are_256_values_in_the_order_of_memory_and_one_of_zeros_stays():
    values = torch.zeros(3, 200)
    values[0, 0], values[1, 100] = 5.0, -2.0
    code, absmax_B = codes.encode(values, is_signed=True)
    assert code.shape == values.shape
    assert absmax_B.tolist() == [5.0, 2.0, 0.0]
    assert torch.equal(codes.decode(code, absmax_B, is_signed=True).nonzero(), values.nonzero())


def test_zones_end_half_way_between_neighbours():
    for is_signed in (True, False):
        grid = codes.dynamic_map(is_signed=is_signed)
        middles = ((grid[1:] + grid[:-1]) / 2).tolist()
        found = codes.thresholds(is_signed=is_signed)
        assert len(found) == codes.NUM_DECADES + 1
        assert found == sorted(found)
        assert all(min(abs(middle / each - 1) for middle in middles if middle > 0) < 1e-12 for each in found)


# Steps.


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("combination", COMBINATIONS)
def test_each_combination_of_dtypes_equals_the_truth(combination, offset):
    check_step(op, (combination,), offset=offset)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("scale", [None, 0.37])
def test_other_options(change, scale):
    check_step(op, options=OPTIONS._replace(**change), scale=scale)


def test_a_skipped_step_changes_nothing_and_is_not_counted():
    check_skip(op)


def test_averages_of_both_kinds_stand_in_one_table():
    check_mixed(op)


def test_a_value_that_is_not_finite_spoils_its_weight_and_no_other_block():
    torch.manual_seed(6)
    rows = make_rows(((FP32, FP32, None),), sizes=(3 * BLOCK,), missing=())
    twins = copy_rows(rows)
    twins[0].owner.grad = rows[0].grad.clone()
    rows[0].grad[BLOCK + 5] = float("nan")
    for each in (rows, twins):
        adamw_step(make_table(each), options=OPTIONS)
    assert rows[0].param.isnan().nonzero().tolist() == [[BLOCK + 5]]
    others = torch.arange(3 * BLOCK) // BLOCK != 1
    assert torch.equal(rows[0].exp_avg[others], twins[0].exp_avg[others])
    assert torch.equal(rows[0].exp_avg_absmax[::2], twins[0].exp_avg_absmax[::2])


def test_no_wait():
    rows = make_rows()
    with Watch() as watch:
        table = make_table(rows)
        adamw_step(table, options=OPTIONS._replace(learning_rate=torch.tensor(0.1)), scale=torch.ones(()))
    assert watch.waits == []


REFERENCE_FAULTS = {
    "average of the signed map twice": "for pair, is_signed in zip(stored, (True, {False => True}))]",
    "stored in the signed map twice": "zip(stored, averages, (True, {False => True}))",
    "largest magnitudes not written": "for tensor, new in zip(pair{ => [:1]}, codes",
    "averages not written": "tensor{.copy_(new) => }",
    "copy lost": "wide = row._replace({ => copy=None,}",
    "written in a skipped step": "else row.written(){ => [:-1]}",
}
CODE_FAULTS = {
    "largest magnitude of two blocks": "blocks_BV.abs().amax({1 => ).expand(len(blocks_BV)})",
    "largest value instead of magnitude": "blocks_BV{.abs() => }.amax(1)",
    "zero block divided": "{torch.where(absmax_B > 0, 1 / absmax_B, 0.0) => 1 / absmax_B}",
    "next code": "{codes_BV => (codes_BV + 1).clamp(max=255)}.flatten()[:num_values]",
    "code below": "{(grid[1:] + grid[:-1]) / 2 => grid[1:]}",
    "a block too short": "absmax_B.repeat_interleave(BLOCK{ => - 1})",
    "decades of nine": "return {10 => 9}.0 **",
}


test_a_planted_fault_is_seen, test_without_a_fault_the_same_check_passes = planted_faults(
    reference, lambda module: check_every_part(module, module.TensorTable), REFERENCE_FAULTS
)


def check_codes(module):
    with mock.patch.object(reference, "codes", module):
        check_every_part(reference)


test_a_planted_fault_of_the_format_is_seen, test_the_format_passes_the_same_check = planted_faults(
    codes, check_codes, CODE_FAULTS, errors=(AssertionError, RuntimeError)
)


# Refusals.


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"exp_avg_absmaxs": [None]}, r"exp_avg_absmaxs\[0\] is None"),
        ({"exp_avg_sq_absmaxs": None}, r"exp_avg_sq_absmaxs\[0\] is None"),
        ({"exp_avg_absmaxs": [torch.zeros(1)]}, r"exp_avg_absmaxs\[0\] is \(1,\).*\(2,\)"),
        ({"exp_avg_absmaxs": [torch.zeros(2).double()]}, r"exp_avg_absmaxs\[0\]"),
        ({"exp_avg_sq_absmaxs": [torch.zeros(2, device="meta")]}, "meta"),
        ({"exp_avg_sq_absmaxs": [torch.zeros(4)[::2]]}, "contiguous"),
        ({"exp_avgs": [torch.zeros(300)]}, r"exp_avgs\[0\]"),
        ({"exp_avg_absmaxs": None, "exp_avg_sq_absmaxs": None}, r"exp_avgs\[0\]"),
    ],
)
def test_impossible_tensors_are_refused(change, message):
    code = {name: [torch.zeros(300, dtype=torch.uint8)] for name in ("exp_avgs", "exp_avg_sqs")}
    absmaxs = {name: [torch.zeros(2)] for name in ("exp_avg_absmaxs", "exp_avg_sq_absmaxs")}
    TensorTable([torch.ones(300)], **code, **absmaxs)
    with pytest.raises(ShapeError, match=message):
        TensorTable([torch.ones(300)], **{**code, **absmaxs, **change})
