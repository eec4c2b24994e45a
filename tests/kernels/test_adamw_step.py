"""One AdamW step for many tensors: formula, table, refusals on a CPU by the plain twin."""

import os
from typing import NamedTuple

import pytest
import torch

from lightning_fastft.core.errors import OptionError, ShapeError
from lightning_fastft.kernels.adamw_step import op, reference
from lightning_fastft.kernels.adamw_step.op import adamw_step, grad_norm
from lightning_fastft.kernels.adamw_step.reference import SkipFlag, StepOptions
from lightning_fastft.kernels.adamw_step.table import CHUNK, TensorTable
from tests.support.kernel_harness import planted_faults
from tests.support.truth import Watch, assert_within_bound

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# Dtypes of master, gradient and copy; a table with all of them has five groups.
COMBINATIONS = ((FP32, FP32, None), (FP32, BF16, BF16), (FP32, FP16, FP16), (BF16, BF16, None), (BF16, FP32, FP16))
SIZES = (1, 0, 2 * CHUNK + 37, 7, 1009, CHUNK - 1, CHUNK, CHUNK + 1)
# Wider than any tensor is long: what a planted fault writes out of bounds lands here.
MARGIN = 4 * CHUNK
MARGIN_OF_STATE = 7.0
OPTIONS = StepOptions(learning_rate=0.05, weight_decay=0.1, step=3)
# With enough values, a value that is rounded once differs from the rounded truth only where the truth lies almost
# between two numbers.
SHARE = 0.01
STATE = ("param", "exp_avg", "exp_avg_sq", "copy")


class Row(NamedTuple):
    """One tensor with all that belongs to it; owner.grad is grad, or None where missing."""

    param: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    copy: torch.Tensor | None
    owner: torch.Tensor
    grad: torch.Tensor


def padded(tensor, offset, margin=float("nan")):
    """The same values with a margin on both sides; with an offset of 1 no vector access may reach them."""
    buffer = torch.full((2 * MARGIN + offset + tensor.numel(),), margin, dtype=tensor.dtype, device=tensor.device)
    inner = buffer[MARGIN + offset : MARGIN + offset + tensor.numel()]
    inner.copy_(tensor)
    return inner


def padded_state(tensor, offset):
    """Beside what is updated stand numbers: a stray step with the NaN beside a gradient turns one of them into NaN."""
    return padded(tensor, offset, MARGIN_OF_STATE)


def assert_margin_of_state(name, inner):
    buffer = inner._base
    is_margin = buffer == MARGIN_OF_STATE
    assert is_margin[:MARGIN].all(), f"{name}: written before its memory"
    assert is_margin[-MARGIN:].all(), f"{name}: written behind its memory"


def make_gradient(size, dtype, *, device="cpu"):
    """Values of many magnitudes, some so small that eps decides."""
    return (torch.randn(size, device=device) * 10.0 ** (torch.rand(size, device=device) * 9 - 8)).to(dtype)


def make_rows(combinations=COMBINATIONS, *, sizes=SIZES, missing=(5,), offset=1, device="cpu"):
    """Tensors in the middle of a run, some values of the state still 0."""
    rows = []
    for index, size in enumerate(sizes):
        param_dtype, grad_dtype, copy_dtype = combinations[index % len(combinations)]
        grad = padded(make_gradient(size, grad_dtype, device=device), offset)
        is_kept = torch.rand(size, device=device) < 0.9
        exp_avg = make_gradient(size, FP32, device=device) * is_kept
        exp_avg_sq = (grad.float() * torch.rand(size, device=device) + exp_avg.abs()).square() * is_kept
        param = (
            torch.randn(size, device=device)
            * 10.0 ** (torch.rand(size, device=device) * -3)
            * (torch.rand(size, device=device) < 0.9)
        )
        state = [padded_state(tensor, offset) for tensor in (param.to(param_dtype), exp_avg, exp_avg_sq)]
        copy = None if copy_dtype is None else padded_state(torch.zeros(size, dtype=copy_dtype, device=device), offset)
        owner = torch.empty(size, dtype=grad_dtype, device=device)
        owner.grad = None if index in missing else grad
        rows.append(Row(*state, copy, owner, grad))
    return rows


def copy_rows(rows):
    return [Row(*(None if tensor is None else tensor.clone() for tensor in row)) for row in rows]


def make_table(rows, Table=TensorTable):
    columns = list(zip(*rows))
    return Table(columns[0], exp_avgs=columns[1], exp_avg_sqs=columns[2], copies=columns[3], owners=columns[4])


def is_current(table, rows):
    """Whether the addresses on the device are those of a table that is built now."""
    now = make_table(rows)
    return torch.equal(table.grad_address_R, now.grad_address_R) and torch.equal(table.address_AR, now.address_AR)


def step_by_torch(rows, options, scale, *, wide):
    """What torch.optim.AdamW makes of masters and averages, in another dtype."""
    results = []
    for row in rows:
        param = row.param.to(wide).clone()
        param.grad = row.grad.to(wide) if scale is None else row.grad.to(wide) * scale.to(wide)
        optimizer = torch.optim.AdamW(
            [param],
            lr=float(options.learning_rate),
            betas=(options.beta1, options.beta2),
            eps=options.eps,
            weight_decay=options.weight_decay,
            foreach=False,
        )
        state = {"exp_avg": row.exp_avg.to(wide).clone(), "exp_avg_sq": row.exp_avg_sq.to(wide).clone()}
        optimizer.state[param] = {"step": torch.tensor(options.step - 1.0), **state}
        optimizer.step()
        results.append((param, state["exp_avg"], state["exp_avg_sq"]))
    return results


def rounded(tensor, dtype):
    """What the kernels make of fp32; Triton's interpreter cuts bf16 off instead of rounding it."""
    if IS_INTERPRETED and tensor.dtype is FP32 and dtype is BF16:
        return (tensor.contiguous().view(torch.int32) & -65536).view(FP32).to(BF16)
    return tensor.to(dtype)


def sum_magnitudes(rows, options, scale):
    """What the step makes of the magnitudes of all terms, so that none cancels another: the size at which
    rounding happens.
    """
    absolute = [row._replace(param=-row.param.abs(), exp_avg=row.exp_avg.abs(), grad=row.grad.abs()) for row in rows]
    return step_by_torch(absolute, options, scale, wide=torch.float64)


def in_units(values, truth, magnitude, dtype):
    """The largest error of all elements, each in units of the last place of its magnitude."""
    magnitude = magnitude.abs().clamp(min=torch.finfo(dtype).smallest_normal)
    unit = torch.ldexp(torch.full_like(magnitude, torch.finfo(dtype).eps), torch.frexp(magnitude).exponent - 1)
    return ((values.double() - truth).abs() / unit).max().item()


def assert_in_units(name, ours, *, plain, truth, magnitude):
    """At most twice the error of plain PyTorch, or one unit in the last place, at each element."""
    dtype = ours.dtype
    plain = plain.to(dtype)
    assert torch.isfinite(ours).all(), f"{name}: not finite"
    error, plain_error = (in_units(values, truth, magnitude, dtype) for values in (ours, plain))
    assert error <= max(2 * plain_error, 1.0), f"{name}: {error:.3g} units (plain PyTorch {plain_error:.3g})"
    if dtype is BF16 and not IS_INTERPRETED:
        share, plain_share = ((values != truth.to(dtype)).double().mean().item() for values in (ours, plain))
        assert share <= max(2 * plain_share, SHARE), (
            f"{name}: {share:.1%} of the values are not the rounded truth (plain fp32 {plain_share:.1%})"
        )


def check_values(rows, before, options=OPTIONS, scale=None):
    """Every tensor with a gradient against the truth, and copies against masters; one without gradient against
    itself.
    """
    plain, truth = (step_by_torch(before, options, scale, wide=wide) for wide in (torch.float32, torch.float64))
    magnitudes = sum_magnitudes(before, options, scale)
    stepped = [index for index, row in enumerate(rows) if row.owner.grad is not None]
    for place, kind in enumerate(STATE[:3]):
        for dtype in {rows[index][place].dtype for index in stepped}:
            chosen = [index for index in stepped if rows[index][place].dtype is dtype]
            values = [
                torch.cat([source[index][place] for index in chosen]) for source in (rows, plain, truth, magnitudes)
            ]
            assert_in_units(kind, values[0], plain=values[1], truth=values[2], magnitude=values[3])
    for index, (row, old) in enumerate(zip(rows, before)):
        if row.copy is not None and index in stepped:
            assert torch.equal(row.copy, rounded(row.param, row.copy.dtype)), f"copy[{index}] is not the rounded master"
        for kind in ("grad", *(() if index in stepped else STATE)):
            tensor, old_tensor = getattr(row, kind), getattr(old, kind)
            assert tensor is None or torch.equal(tensor, old_tensor), f"{kind}[{index}] has changed"


def check_memory(rows):
    for index, row in enumerate(rows):
        for kind in STATE:
            if getattr(row, kind) is not None:
                assert_margin_of_state(f"{kind}[{index}]", getattr(row, kind))


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
    before = copy_rows(rows)
    scale = None if scale is None else torch.tensor(scale, device=device)
    functions.adamw_step(make_table(rows, Table), options=options, scale=scale)
    check_values(rows, before, options, scale)
    check_memory(rows)


def check_skip(functions, *, device="cpu", Table=TensorTable):
    """A step that is skipped changes nothing; one that is not has the bits of a step without a flag, numbered
    without those that were skipped.
    """
    zero, one = (torch.tensor(number, device=device) for number in (0.0, 1.0))
    nan = torch.tensor(float("nan"), device=device)
    for rate in (0.05, torch.tensor(0.05, device=device)):
        for num_skipped in (0, 2):
            torch.manual_seed(4)
            rows = make_rows(sizes=(7, CHUNK + 1, 0, 9, 1, 5), missing=(4,), device=device)
            twins, kept = copy_rows(rows), copy_rows(rows)
            for twin, row in zip(twins, rows):
                twin.owner.grad = row.owner.grad
            table, count = make_table(rows, Table), torch.tensor(float(num_skipped), dtype=torch.float64, device=device)
            options = OPTIONS._replace(learning_rate=rate)
            for found_inf, scale in ((one, None), (one, nan), (nan, one)):
                functions.adamw_step(table, options=options, scale=scale, skip=SkipFlag(found_inf, count))
                for row, old in zip(rows, kept):
                    assert all(
                        one is None or torch.equal(one.view(torch.uint8), other.view(torch.uint8))
                        for one, other in zip(row[:4], old[:4])
                    )
            functions.adamw_step(table, options=options, skip=SkipFlag(zero, count))
            functions.adamw_step(make_table(twins, Table), options=options._replace(step=OPTIONS.step - num_skipped))
            for row, twin in zip(rows, twins):
                assert all(one is None or torch.equal(one, other) for one, other in zip(row[:4], twin[:4]))
            check_memory(rows)


def check_run(functions, *, weight_decay=0.1, num_steps=50, device="cpu", Table=TensorTable):
    """A whole run with a new gradient tensor in each step, against torch.optim.AdamW in float64."""
    torch.manual_seed(1)
    sizes = (1, 7, CHUNK + 5)
    start = [torch.randn(size, device=device) for size in sizes]
    runs = {dtype: [tensor.to(dtype) for tensor in start] for dtype in (torch.float32, torch.float64)}
    optimizers = {
        dtype: torch.optim.AdamW(run, lr=0.01, weight_decay=weight_decay, foreach=False) for dtype, run in runs.items()
    }
    ours = [padded_state(tensor, 1) for tensor in start]
    averages = [[padded_state(torch.zeros_like(tensor), 1) for tensor in start] for _ in range(2)]
    copies = [padded_state(tensor.to(FP16), 1) for tensor in start]
    table = Table(ours, exp_avgs=averages[0], exp_avg_sqs=averages[1], copies=copies)
    for step in range(1, num_steps + 1):
        for index, size in enumerate(sizes):
            grad = make_gradient(size, FP32, device=device)
            ours[index].grad = padded(grad, 1)
            for dtype, run in runs.items():
                run[index].grad = grad.to(dtype) * 0.5
        for optimizer in optimizers.values():
            optimizer.step()
        options = StepOptions(learning_rate=0.01, weight_decay=weight_decay, step=step)
        functions.adamw_step(table, options=options, scale=torch.tensor(0.5, device=device))
    plain, truth = (torch.cat(runs[dtype]) for dtype in (torch.float32, torch.float64))
    assert_within_bound("param", torch.cat(ours), plain=plain, truth=truth, dtype=FP32)
    for kind, state in zip(("exp_avg", "exp_avg_sq"), averages):
        plain, truth = (
            torch.cat([optimizers[dtype].state[param][kind] for param in runs[dtype]])
            for dtype in (torch.float32, torch.float64)
        )
        assert_within_bound(kind, torch.cat(state), plain=plain, truth=truth, dtype=FP32)
    for tensors in (ours, *averages, copies):
        for tensor in tensors:
            assert_margin_of_state("run", tensor)
    assert all(torch.equal(copy, param.to(FP16)) for copy, param in zip(copies, ours))


def assert_norm(norm, rows):
    grads = [row.owner.grad for row in rows if row.owner.grad is not None]
    truth = torch.cat([grad.double() for grad in grads]).square().sum().sqrt()
    plain = torch.nn.utils.get_total_norm([grad.float() for grad in grads])
    assert_within_bound("norm", norm, plain=plain, truth=truth, dtype=FP32)


def check_norm(functions, combinations=COMBINATIONS, *, sizes=SIZES, offset=1, device="cpu", Table=TensorTable):
    torch.manual_seed(2)
    rows = make_rows(combinations, sizes=sizes, offset=offset, device=device)
    # Of one magnitude: the loss of any part is seen.
    for row in rows:
        row.grad.copy_(torch.randn(len(row.grad), device=device))
    table = make_table(rows, Table)
    first, second = (functions.grad_norm(table) for _ in range(2))
    assert torch.equal(first, second)
    assert first.shape == ()
    assert first.dtype is FP32
    assert_norm(first, rows)


def check_what_is_not_finite(functions, *, device="cpu"):
    """Each value that is not finite does what it does in torch.optim.AdamW, and stays in its element."""
    torch.manual_seed(3)
    special = torch.tensor([float("nan"), float("inf"), -float("inf"), 1e30, 0.0])
    for scale in (None, 1.0, float("nan"), float("inf")):
        rows = make_rows(((FP32, FP32, BF16),), sizes=(7, CHUNK + 5), missing=(), device=device)
        for row in rows:
            row.grad[-5:] = special
        before = copy_rows(rows)
        scale = None if scale is None else torch.tensor(scale, device=device)
        functions.adamw_step(make_table(rows), options=OPTIONS, scale=scale)
        for row, true in zip(rows, step_by_torch(before, OPTIONS, scale, wide=torch.float32)):
            for ours, other in zip(row, true):
                assert torch.equal(ours.isnan(), other.isnan())
                assert torch.equal(ours.isinf(), other.isinf())
            assert torch.equal(row.copy.isnan(), row.param.isnan())
    for value in (float("nan"), float("inf")):
        rows = make_rows(sizes=(7, CHUNK + 5), missing=(), device=device)
        rows[1].grad[-1] = value
        assert torch.equal(functions.grad_norm(make_table(rows)).isnan(), torch.tensor(value != value, device=device))
        assert not functions.grad_norm(make_table(rows)).isfinite()


def change_tensors(rows, change):
    """Return the rows after what may happen to them between two calls."""
    if change == "moved":
        rows = [
            row._replace(grad=padded(make_gradient(len(row.grad), row.grad.dtype, device=row.grad.device), 1))
            for row in rows
        ]
    if change == "dtype":
        rows = [row._replace(grad=padded(row.grad.float(), 1)) for row in rows]
    for index, row in enumerate(rows):
        row.owner.grad = None
        row.owner.data = row.owner.data.to(row.grad.dtype)
        row.owner.grad = None if change == "lost" and index % 2 else row.grad
        for tensor in row[:4] if change == "data" else ():
            if tensor is not None:
                tensor.data = tensor.clone()
    return rows


def check_table_follows(functions, *, order=("norm", "step"), device="cpu", Table=TensorTable):
    """Gradients may move, be lost and change their dtype, and tensors may move, between two calls."""
    torch.manual_seed(4)
    rows = make_rows(device=device)
    table = make_table(rows, Table)
    calls = {
        "norm": lambda: assert_norm(functions.grad_norm(table), rows),
        "step": lambda: functions.adamw_step(table, options=OPTIONS),
    }
    assert is_current(table, rows)
    # What a table that does not follow would still read and write.
    kept = []
    # The second time with the layout of the first.
    for change in ("moved", "moved", "lost", "back", "dtype", "data"):
        kept.append(rows)
        rows = change_tensors(rows, change)
        assert not is_current(table, rows)
        before = copy_rows(rows)
        for call in order:
            calls[call]()
        table.refresh()
        assert is_current(table, rows)
        check_values(rows, before)
        if change != "data":
            check_memory(rows)


def check_every_part(functions, Table=TensorTable, device="cpu"):
    rate = torch.tensor(0.05, device=device)
    for options, scale in (
        (OPTIONS, 0.37),
        (OPTIONS._replace(learning_rate=rate, step=1), None),
        (OPTIONS._replace(beta1=0.3), None),
    ):
        check_step(functions, options=options, scale=scale, Table=Table, device=device)
    check_run(functions, num_steps=3, Table=Table, device=device)
    check_norm(functions, Table=Table, device=device)
    for order in (("norm", "step"), ("step", "norm")):
        check_table_follows(functions, order=order, Table=Table, device=device)
    check_what_is_not_finite(functions, device=device)
    check_skip(functions, Table=Table, device=device)


@pytest.fixture(autouse=True)
def _no_graph():
    with torch.no_grad():
        yield


@pytest.mark.parametrize("combination", COMBINATIONS)
def test_each_combination_of_dtypes_equals_the_truth(combination):
    check_step(op, (combination,))


@pytest.mark.parametrize(
    "change",
    [
        {"weight_decay": 0.0},
        {"step": 1},
        {"step": 100_000},
        {"beta1": 0.0},
        {"beta1": 0.3, "beta2": 0.0, "eps": 1e-3},
        {"learning_rate": 0.0},
        {"learning_rate": torch.tensor(0.05)},
    ],
)
@pytest.mark.parametrize("scale", [None, 0.37])
def test_other_options(change, scale):
    check_step(op, options=OPTIONS._replace(**change), scale=scale)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_a_run_of_fifty_steps_equals_the_truth(weight_decay):
    check_run(op, weight_decay=weight_decay)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_in_fp32_on_a_cpu_a_run_has_the_bits_of_torch(weight_decay):
    ours = [torch.nn.Parameter(torch.randn(size)) for size in SIZES]
    theirs = [torch.nn.Parameter(param.detach().clone()) for param in ours]
    averages, squares = ([torch.zeros_like(param) for param in ours] for _ in range(2))
    optimizer = torch.optim.AdamW(theirs, lr=0.01, weight_decay=weight_decay, foreach=False, fused=False)
    table = TensorTable(ours, exp_avgs=averages, exp_avg_sqs=squares)
    for step in range(1, 21):
        for one, other in zip(ours, theirs):
            one.grad = make_gradient(one.numel(), FP32)
            other.grad = one.grad.clone()
        optimizer.step()
        adamw_step(table, options=StepOptions(learning_rate=0.01, weight_decay=weight_decay, step=step))
    for one, other, average, square in zip(ours, theirs, averages, squares):
        assert torch.equal(one, other)
        assert torch.equal(average, optimizer.state[other]["exp_avg"])
        assert torch.equal(square, optimizer.state[other]["exp_avg_sq"])


@pytest.mark.parametrize("combination", COMBINATIONS)
def test_the_norm_equals_the_truth(combination):
    check_norm(op, (combination,))


def test_a_skipped_step_changes_nothing_and_is_not_counted():
    check_skip(op)


def test_what_is_not_finite_passes_on_as_in_torch():
    check_what_is_not_finite(op)


@pytest.mark.parametrize("order", [("norm", "step"), ("step", "norm")])
def test_the_table_follows_its_tensors(order):
    check_table_follows(op, order=order)


@pytest.mark.parametrize("sizes", [(), (0,), (0, 0, 0)])
def test_without_elements(sizes):
    table = make_table(make_rows(sizes=sizes)) if sizes else TensorTable([], exp_avgs=[], exp_avg_sqs=[])
    adamw_step(table, options=OPTIONS)
    assert torch.equal(grad_norm(table), torch.zeros(()))
    assert table.num_chunks == 0


def test_without_any_gradient_the_norm_is_zero_and_nothing_changes():
    check_step(op, sizes=(7, 9))
    rows = make_rows(missing=range(len(SIZES)))
    before = copy_rows(rows)
    table = make_table(rows)
    adamw_step(table, options=OPTIONS)
    assert torch.equal(grad_norm(table), torch.zeros(()))
    check_values(rows, before)


def test_chunks_cover_every_element_once():
    for combinations in (COMBINATIONS, COMBINATIONS[:1]):
        rows = make_rows(combinations)
        table = make_table(rows)
        chunks = [pair for group in table.groups for pair in zip(group.row_C.tolist(), group.index_C.tolist())]
        assert sorted(chunks) == [(row, index) for row, size in enumerate(SIZES) for index in range(-(-size // CHUNK))]
        assert len(table.groups) == len(combinations)
        for group in table.groups:
            assert all(
                rows[row].param.dtype is group.param_dtype and rows[row].grad.dtype is group.grad_dtype
                for row in group.rows
            )
            assert all(
                (None if rows[row].copy is None else rows[row].copy.dtype) is group.copy_dtype for row in group.rows
            )


@pytest.mark.parametrize("kind", [*STATE, "grad", "size", None])
def test_one_tensor_in_between_ends_the_vectors_of_its_group(kind):
    combinations = ((FP32, BF16, BF16), (FP32, BF16, None))
    rows = make_rows(combinations, sizes=(48, 4096, 16, 160), missing=(0,), offset=0)
    assert make_table(rows).aligned == (True, True)
    row = make_rows(combinations[:1], sizes=(47 if kind == "size" else 48,), missing=(), offset=0)[0]
    if kind in STATE:
        row = row._replace(**{kind: padded_state(getattr(row, kind), 1)})
    if kind == "grad":
        row.owner.grad = padded(row.grad, 1)
    assert make_table([*rows, row]).aligned == (kind is None, True)
    # The same when the gradient moves after the table was made.
    row.owner.grad = None
    table = make_table([*rows, row])
    row.owner.grad = padded(row.grad, 1 if kind == "grad" else 0)
    table.refresh()
    assert table.aligned == (kind is None, True)


def test_no_wait():
    rows = make_rows()
    table = make_table(rows)
    with Watch() as watch:
        for row in rows:
            row.owner.grad = None if row.owner.grad is None else row.grad.clone()
        adamw_step(table, options=OPTIONS._replace(learning_rate=torch.tensor(0.1)), scale=grad_norm(table))
        adamw_step(table, options=OPTIONS, skip=SkipFlag(torch.zeros(()), torch.zeros((), dtype=torch.float64)))
        make_table(rows)
    assert watch.waits == []


REFERENCE_FAULTS = {
    "bias correction lost": "return 1.0 {- options.beta1**options.step => },",
    "bias correction of squares lost": "{math.sqrt(1.0 - options.beta2**options.step) => 1.0}",
    "root of the bias correction lost": "{math.sqrt( => }1.0 - options.beta2**options.step{) => }",
    "decay coupled": "{param.mul_(1 - rate * => grad = grad +} options.weight_decay{) => * param}",
    "decay without the learning rate": "(1 - {rate * => } options.weight_decay)",
    "decay lost": "{(1 - rate * options.weight_decay) => (1.0)}",
    "decay after the step": (
        "{# An fp32 master is its own fp32 copy. => param.add_(row.exp_avg / denominator, alpha=-float(rate) "
        "** 2 * options.weight_decay)}"
    ),
    "scale lost": "grad {if scale is None else grad * scale => }",
    "scale in the narrow dtype": "else {grad * scale => (grad * scale).to(row.owner.dtype).float()}",
    "eps lost": "{.add_(options.eps) => }",
    "eps inside the root": "exp_avg_sq{ => + options.eps)}.sqrt() / root_correction{).add_(options.eps) => }",
    "average lost": "row.exp_avg.{lerp_(grad, 1 - options.beta1 => copy_(grad})",
    "betas swapped": "value=1 - options.{beta2 => beta1}",
    "copy of the old master": "row.param.copy_(param){ => if row.copy is None else None}",
    "narrow master not written": "{row.param.copy_(param) => pass}",
    "copy lost": "if row.copy is {not None => row.param}: row",
    "learning rate on the device not corrected": "rate {/ correction => } * row.exp_avg",
    "flag not read": "{torch.where(skip.found_inf == 0, tensor, old) => tensor}",
    "flag read backwards": "skip.found_inf {= => !}= 0, tensor",
    "NaN in the flag taken for a step": "skip.found_inf {== 0 => != 1}, tensor, old",
    "first of the written tensors given back": "else row.written(){ => [:1]}",
    "skipped steps counted": "step = options.step {- => + 0 *} num_skipped",
    "norm of the first tensors": "for grad in table.gradients(){ => [:-1]} if",
    "norm without root": ".sum{().sqrt => }().float()",
}


test_a_planted_fault_is_seen, test_without_a_fault_the_same_check_passes = planted_faults(
    reference, check_every_part, REFERENCE_FAULTS
)


class Wrapper(torch.Tensor):
    """A tensor without memory of its own, as a DTensor is."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError(func)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"exp_avgs": [torch.zeros(4)]}, OptionError, "'exp_avgs': 1"),
        ({"copies": [None]}, OptionError, "'copies': 1"),
        ({"params": [torch.ones(4), None]}, ShapeError, "must be a tensor"),
        ({"params": [torch.ones(4), torch.ones(4).double()]}, ShapeError, "dtype"),
        ({"params": [torch.ones(4), torch.ones(4).half()]}, ShapeError, "dtype"),
        ({"params": [torch.ones(4), torch.ones(5)]}, ShapeError, r"\(5,\)"),
        ({"params": [torch.ones(4), torch.ones(8)[::2]]}, ShapeError, "contiguous"),
        ({"params": [torch.ones(4), torch.ones(4, device="meta")]}, ShapeError, "meta"),
        ({"params": [torch.ones(4), Wrapper(torch.ones(4))]}, ShapeError, "separate memory|to_local"),
        ({"exp_avgs": [torch.ones(4), torch.ones(4).bfloat16()]}, ShapeError, r"exp_avgs\[1\]"),
        ({"exp_avg_sqs": [torch.ones(2, 2), torch.ones(4)]}, ShapeError, r"exp_avg_sqs\[0\] must have 1 axes"),
        ({"copies": [None, torch.ones(4)]}, ShapeError, r"copies\[1\]"),
        ({"copies": [None, torch.ones(3).half()]}, ShapeError, r"copies\[1\]"),
        ({"owners": [torch.ones(4), torch.ones(4, 1)]}, ShapeError, r"owners\[1\]"),
        ({"owners": [torch.ones(4), torch.ones(4).long()]}, ShapeError, "dtype"),
        ({"exp_avgs": [torch.ones(4)] * 2}, ShapeError, r"exp_avgs\[0\] and exp_avgs\[1\] share memory"),
    ],
)
def test_impossible_tensors_are_refused(change, error, message):
    arguments = {
        "params": [torch.ones(4), torch.ones(4)],
        **{name: [torch.zeros(4) for _ in range(2)] for name in ("exp_avgs", "exp_avg_sqs")},
    }
    arguments |= change
    with pytest.raises(error, match=message):
        TensorTable(arguments.pop("params"), **arguments)


def test_tensors_that_overlap_in_part_are_refused_and_neighbours_are_not():
    buffer, empty = torch.zeros(24), torch.zeros(0)
    TensorTable([buffer[:8], empty], exp_avgs=[buffer[8:16], empty], exp_avg_sqs=[buffer[16:], empty])
    with pytest.raises(ShapeError, match="share memory"):
        TensorTable([buffer[:8]], exp_avgs=[buffer[7:15]], exp_avg_sqs=[buffer[16:]])


@pytest.mark.parametrize(
    ("grad", "message"),
    [
        (torch.ones(4, 4).T, "contiguous"),
        (torch.ones(4, 4).to_sparse(), "layout"),
        (torch.ones(()).expand(4, 4), "contiguous"),
    ],
)
def test_gradients_that_cannot_be_read_are_refused_at_the_step(grad, message):
    param = torch.nn.Parameter(torch.ones(4, 4))
    table = TensorTable([param], exp_avgs=[torch.zeros(4, 4)], exp_avg_sqs=[torch.zeros(4, 4)])
    param.grad = grad
    for call in (lambda: adamw_step(table, options=OPTIONS), lambda: grad_norm(table), table.refresh):
        with pytest.raises(ShapeError, match=message):
            call()


def test_a_master_that_has_become_another_is_refused():
    param = torch.nn.Parameter(torch.ones(4))
    table = TensorTable([param], exp_avgs=[torch.zeros(4)], exp_avg_sqs=[torch.zeros(4)])
    param.data = torch.ones(5)
    for _ in range(2):
        with pytest.raises(ShapeError, match=r"\(5,\)"):
            table.refresh()


def test_an_owner_that_gets_no_gradient_is_refused():
    with torch.enable_grad():
        owner = torch.nn.Parameter(torch.ones(4)).bfloat16()
    with pytest.raises(ShapeError, match="no gradient"):
        TensorTable([torch.ones(4)], exp_avgs=[torch.zeros(4)], exp_avg_sqs=[torch.zeros(4)], owners=[owner])


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"options": None}, OptionError, "StepOptions"),
        ({"options": OPTIONS._replace(step=0)}, OptionError, "step"),
        ({"options": OPTIONS._replace(step=1.0)}, OptionError, "step"),
        ({"options": OPTIONS._replace(beta1=1.0)}, OptionError, "beta1"),
        ({"options": OPTIONS._replace(beta2=-0.1)}, OptionError, "beta2"),
        ({"options": OPTIONS._replace(eps=float("nan"))}, OptionError, "eps"),
        ({"options": OPTIONS._replace(weight_decay=-1.0)}, OptionError, "weight_decay"),
        ({"options": OPTIONS._replace(learning_rate=-1.0)}, OptionError, "learning_rate"),
        ({"options": OPTIONS._replace(learning_rate=torch.ones(1))}, ShapeError, "learning_rate"),
        ({"options": OPTIONS._replace(learning_rate=torch.ones((), device="meta"))}, ShapeError, "meta"),
        ({"scale": 0.5}, ShapeError, "scale"),
        ({"scale": torch.ones(1)}, ShapeError, "0 axes"),
        ({"scale": torch.ones(()).double()}, ShapeError, "dtype"),
        ({"scale": torch.ones((), device="meta")}, ShapeError, "meta"),
        ({"skip": SkipFlag(torch.ones(1), torch.zeros((), dtype=torch.float64))}, ShapeError, "found_inf"),
        ({"skip": SkipFlag(torch.ones(()), torch.zeros(()))}, ShapeError, "num_skipped"),
        ({"skip": SkipFlag(torch.ones((), device="meta"), torch.zeros((), dtype=torch.float64))}, ShapeError, "meta"),
        ({"table": None}, OptionError, "TensorTable"),
    ],
)
def test_impossible_arguments_are_refused(change, error, message):
    rows = make_rows(sizes=(3,), missing=())
    arguments = {"table": make_table(rows), "options": OPTIONS, **change}
    before = copy_rows(rows)
    with pytest.raises(error, match=message):
        adamw_step(arguments.pop("table"), **arguments)
    assert torch.equal(rows[0].param, before[0].param)
    if "table" in change:
        with pytest.raises(error, match=message):
            grad_norm(change["table"])
