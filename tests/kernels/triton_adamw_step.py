"""Tests of the Triton kernels of adamw_step, interpreted by test_interpreted.py and compiled by tests/gpu."""

from collections import Counter
from unittest import mock

import pytest
import torch

from lightning_fastft.kernels.adamw_step import table, triton
from lightning_fastft.kernels.adamw_step.table import CHUNK, TensorTable
from lightning_fastft.kernels.launch import launch
from tests.kernels.test_adamw_rounding import check_rounding
from tests.kernels.test_adamw_step import (
    COMBINATIONS,
    OPTIONS,
    SIZES,
    check_every_part,
    check_norm,
    check_run,
    check_skip,
    check_step,
    check_table_follows,
    check_values,
    check_what_is_not_finite,
    copy_rows,
    make_rows,
    make_table,
)
from tests.support.kernel_harness import DEVICE, planted_faults


@pytest.fixture(autouse=True)
def _no_graph():
    with torch.no_grad():
        yield


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("combination", COMBINATIONS)
def test_each_combination_of_dtypes_equals_the_truth(combination, offset):
    check_step(triton, (combination,), offset=offset, device=DEVICE)
    check_norm(triton, (combination,), offset=offset, device=DEVICE)


@pytest.mark.parametrize("combination", COMBINATIONS)
def test_tensors_that_vectors_fit_equal_the_truth(combination):
    sizes = (16, 48, CHUNK, CHUNK + 16, 3 * CHUNK)
    check_step(triton, (combination,), sizes=sizes, offset=0, device=DEVICE)
    check_norm(triton, (combination,), sizes=sizes, offset=0, device=DEVICE)


@pytest.mark.parametrize(
    "change",
    [
        {"weight_decay": 0.0},
        {"step": 1},
        {"step": 100_000},
        {"beta1": 0.0},
        {"beta1": 0.3, "beta2": 0.0, "eps": 1e-3},
        {"learning_rate": 0.0},
        {"learning_rate": 1},
    ],
)
@pytest.mark.parametrize("scale", [None, 0.37])
def test_other_options(change, scale):
    check_step(triton, options=OPTIONS._replace(**change), scale=scale, device=DEVICE)


def test_a_learning_rate_on_the_device():
    for step in (1, 3, 1000):
        check_step(
            triton, options=OPTIONS._replace(learning_rate=torch.tensor(0.05, device=DEVICE), step=step), device=DEVICE
        )


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_a_run_of_many_steps_equals_the_truth(weight_decay):
    check_run(triton, weight_decay=weight_decay, num_steps=12 if DEVICE == "cpu" else 50, device=DEVICE)


def test_the_norm_of_more_chunks_than_partial_sums(monkeypatch):
    monkeypatch.setattr(triton, "NUM_PARTIALS", 4)
    torch.manual_seed(5)
    param = torch.zeros(7 * CHUNK + 5, device=DEVICE)
    param.grad = torch.randn_like(param)
    table = TensorTable([param], exp_avgs=[torch.zeros_like(param)], exp_avg_sqs=[torch.zeros_like(param)])
    assert table.num_chunks > triton.NUM_PARTIALS
    truth = param.grad.double().square().sum().sqrt().float()
    norm = triton.grad_norm(table)
    assert torch.nextafter(truth, truth * 0) <= norm <= torch.nextafter(truth, truth * 2)


def test_what_is_not_finite_passes_on_as_in_torch():
    check_what_is_not_finite(triton, device=DEVICE)


def test_a_skipped_step_changes_nothing_and_is_not_counted():
    check_skip(triton, device=DEVICE)


def test_stochastic_rounding_equals_the_twin():
    check_rounding(triton, is_8bit=False, device=DEVICE)


@pytest.mark.parametrize("order", [("norm", "step"), ("step", "norm")])
def test_the_table_follows_its_tensors(order):
    check_table_follows(triton, order=order, device=DEVICE)


@pytest.mark.parametrize("sizes", [(), (0,), (0, 0, 0)])
def test_without_elements(sizes):
    table = make_table(make_rows(sizes=sizes, device=DEVICE)) if sizes else TensorTable([], exp_avgs=[], exp_avg_sqs=[])
    triton.adamw_step(table, options=OPTIONS)
    assert torch.equal(triton.grad_norm(table), torch.zeros((), device=table.device))


def test_without_any_gradient_the_norm_is_zero_and_nothing_changes():
    rows = make_rows(missing=range(len(SIZES)), device=DEVICE)
    before = copy_rows(rows)
    table = make_table(rows)
    triton.adamw_step(table, options=OPTIONS)
    assert torch.equal(triton.grad_norm(table), torch.zeros((), device=DEVICE))
    check_values(rows, before)


def test_two_runs_are_bit_equal():
    # Made twice instead of copied: sums follow the alignment of what is summed, which a copy would not keep.
    runs, scales = [], []
    for _ in range(2):
        torch.manual_seed(6)
        runs.append(make_rows(device=DEVICE))
        table = make_table(runs[-1])
        scales.append(triton.grad_norm(table))
        triton.adamw_step(table, options=OPTIONS, scale=scales[-1])
    assert torch.equal(*scales)
    assert all(
        one is None or torch.equal(one, other) for row, twin in zip(*runs) for one, other in zip(row[:4], twin[:4])
    )


def test_autograd_learns_of_every_write():
    rows = make_rows(device=DEVICE)
    before = [[None if tensor is None else tensor._version for tensor in row] for row in rows]
    triton.adamw_step(make_table(rows), options=OPTIONS)
    for index, (row, old) in enumerate(zip(rows, before)):
        has_grad = row.owner.grad is not None
        for place, tensor in enumerate(row):
            expected = None if tensor is None else old[place] + (1 if has_grad and place < 4 else 0)
            assert (None if tensor is None else tensor._version) == expected, f"row {index}, place {place}"


@pytest.mark.parametrize("combinations", [COMBINATIONS[:1], COMBINATIONS])
def test_one_launch_per_combination_of_dtypes(combinations, monkeypatch):
    num_launches = Counter()

    def counted(kernel, *arguments, **options):
        num_launches[kernel.fn.__name__] += 1
        launch(kernel, *arguments, **options)

    monkeypatch.setattr(triton, "launch", counted)
    table = make_table(make_rows(combinations, device=DEVICE))
    triton.adamw_step(table, options=OPTIONS)
    assert num_launches == {"_adamw_kernel": len(combinations)}
    num_launches.clear()
    triton.grad_norm(table)
    assert num_launches == {"_sum_squares_kernel": len(combinations), "_norm_kernel": 1}


FAULTS = {
    "bias correction lost": "float(learning_rate {/ correction => })",
    "bias correction of squares lost": "1.0 - options.beta2, {root_correction => 1.0},",
    "decay coupled": (
        "grad {*= tl.load(scale_ptr) => = grad * tl.load(scale_ptr) + decay * param\n        decay = 0.0 * decay}"
    ),
    "decay without the learning rate": "float({learning_rate * => } options.weight_decay)",
    "decay lost": "param -= {decay * param + => } rate * tl.div_rn(avg, denominator)",
    "decay after the step": (
        "param -= {decay * param + => } rate * tl.div_rn(avg, denominator){ => \n    param -= decay * param}"
    ),
    "decay of a learning rate of one": "{decay *= learning_rate => }",
    "step of a learning rate of one": "{rate *= learning_rate => }",
    "scale lost": "grad *= {tl.load(scale_ptr) => 1.0}",
    "scale in the narrow dtype": (
        "grad {*= tl.load(scale_ptr => = (grad * tl.load(scale_ptr)).to(GRAD_DTYPE).to(tl.float32})"
    ),
    "eps lost": "root_correction) {+ eps => }",
    "eps inside the root": "tl.div_rn(tl.sqrt_rn(square{), root_correction) + eps => + eps), root_correction)}",
    "root lost": "{tl.sqrt_rn(square) => square}",
    "share of the average for squares": "beta2 * square + {square_share => grad_share}",
    "beta of the average for squares": "float(options.{beta2 => beta1}),",
    "shares of the average swapped": "{grad_share => beta1} * (grad - avg)",
    "far end of the average": "grad {- beta1 * (grad - avg) => }",
    "fp32 lost": "rate * tl.div_rn(avg, denominator){ => .to(tl.float16).to(tl.float32)}",
    "last chunk lost": "launch(_adamw_kernel, (num_chunks{ => - 1},),",
    "last chunk of the norm lost": "len(group.row_C){ => - 1}, GRAD",
    "one chunk per program": "range(program, {num_chunks => program + 1}, NUM_PROGRAMS)",
    "last partial sum lost": "mask=offs < num_partials{ => - 1},",
    "last partial sums only": "total {+ => }= tl.sum(tl.load(",
    "norm without root": "{tl.sqrt(total) => total}",
    "first chunk of each tensor": "tl.load(index_ptr + chunk).to(tl.int64) * {BLOCK => 0}",
    "mask lost": "return row, offs, offs < num_readable{ => + BLOCK * (num_readable > 0)}",
    "one element behind": "return row, offs, offs < num_readable{ => + (num_readable > 0)}",
    "one element before": "return row, offs{ => - 1}, offs < num_readable",
    "last element lost": "return row, offs, offs < num_readable{ => - 1}",
    "copy of the old master": (
        "rounded = param.to(PARAM_DTYPE) tl.store(param_ptrs, rounded, mask=inside){ => \n    rounded = (param "
        "+ rate * tl.div_rn(avg, denominator)).to(PARAM_DTYPE)}"
    ),
    "copy lost": "{tl.store(copy_ptrs, rounded.to(tl.float32).to(COPY_DTYPE), mask=inside) => }",
    "copy not of the rounded master": "{rounded.to(tl.float32) => param}.to(COPY_DTYPE)",
    "average not written": "{tl.store(avg_ptrs, avg, mask=inside) => }",
    "squares not written": "{tl.store(square_ptrs, square, mask=inside) => }",
    "master not written": (
        "rounded = param.to(PARAM_DTYPE) tl.store(param_ptrs, rounded, mask=inside{ => & (offs < 0)})"
    ),
    "averages swapped": "_EXP_AVG = tl.constexpr({1 => 2})",
    "master of the first tensor": "{place_ptr => address_ptr} + _PARAM * num_rows",
    "average of the first tensor": "{place_ptr => address_ptr} + _EXP_AVG * num_rows",
    "squares of the first tensor": "{place_ptr => address_ptr} + _EXP_AVG_SQ * num_rows",
    "gradient of the first tensor": (
        "_load_pointer(grad_address_ptr {+ row => }, GRAD_DTYPE, IS_ALIGNED) + offs, mask=inside, "
        "other=0.0).to(tl.float32) param"
    ),
    "gradient of the first tensor in the norm": (
        "_load_pointer(grad_address_ptr {+ row => }, GRAD_DTYPE, IS_ALIGNED) + offs, mask=inside, "
        "other=0.0).to(tl.float32) total"
    ),
    "flag not read": "tl.load(found_inf_ptr) {== 0 => < 2}.0",
    "NaN in the flag taken for a step": "tl.load(found_inf_ptr) {== 0 => != 1}.0",
    "numbers of the host under a flag": "{rate = tl.load(number_ptr) => }",
    "root of the host under a flag": "{root_correction = tl.load(number_ptr + 1) => }",
    "table not refreshed": "{table.refresh() => } correction",
    "table of the norm not refreshed": "{table.refresh(only_gradients=True) => } num_programs",
}
TABLE_FAULTS = {
    "last chunk lost": "{-(- => }self.rows[row].param.numel() // CHUNK{) => }",
    "first chunk of each tensor": "first_R.repeat_interleave(num_chunks_R){ => * 0}",
    "master of the first tensor": "[{row => self.rows[0]}.param.data_ptr() for row in self.rows]",
    "sizes of the first tensor": "[{row => self.rows[0]}.param.numel() for row in self.rows], [0",
    "without gradient stepped": (
        "_send(torch.tensor({addresses => [one or row.exp_avg.data_ptr() for one, row in zip(addresses, "
        "self.rows)]}, dtype=torch.int64), self.device)"
    ),
    "new gradients not sent": "if is_new {or addresses != self._grad_addresses => }:",
    "moved tensors not sent": "is_new = is_new or {layout != self._layout => False}",
    "dtypes of the first tensor": "keys = [_dtypes({row, grad => self.rows[0], None}) for",
    "dtype of lost gradients": "row.param.dtype, {row.owner.dtype if grad is None else grad.dtype => torch.float16},",
}


def check_triton(functions, Table=TensorTable):
    # Few partial sums: a program walks more than one chunk, and the last kernel more than one block.
    with mock.patch.multiple(functions, NUM_PARTIALS=4):
        check_every_part(functions, Table, device=DEVICE)


# The kernel for averages in 8 bits has faults of its own, in triton_adamw_8bit.py.
test_a_planted_fault_is_seen, test_without_a_fault_the_same_check_passes = planted_faults(
    triton, check_triton, FAULTS, except_in="_adamw_8bit_kernel"
)
test_a_planted_fault_of_the_table_is_seen, _ = planted_faults(
    table, lambda module: check_triton(triton, module.TensorTable), TABLE_FAULTS
)
