"""The keyword ``is_checked``: the same bits without checks, and an error with them."""

import sys

import pytest
import torch

from lightning_fastft.core.errors import ShapeError
from lightning_fastft.kernels import backends
from lightning_fastft.kernels.block_diagonal.op import write_block_diagonal
from lightning_fastft.kernels.column_scale.op import row_factors, scale_columns, scale_columns_backward
from lightning_fastft.kernels.delta_inputs.op import delta_inputs_forward
from lightning_fastft.kernels.delta_inputs.reference import DeltaForm, DeltaParameters
from lightning_fastft.kernels.expert_gate.op import gate_backward, gate_forward
from lightning_fastft.kernels.expert_gate.reference import GateForm
from lightning_fastft.kernels.expert_pack.op import exchange_ends
from lightning_fastft.kernels.expert_rows.op import combine_rows, gather_rows
from lightning_fastft.kernels.expert_sort.op import sort_by_expert
from lightning_fastft.kernels.fp8_linear.op import multiply, quantise_rows
from lightning_fastft.kernels.grouped_mm.op import grouped_mm, grouped_weight_grad
from lightning_fastft.kernels.head_columns import HeadColumns
from lightning_fastft.kernels.head_gate.op import head_gate_backward, head_gate_forward
from lightning_fastft.kernels.head_gate.reference import HeadGateForm
from lightning_fastft.kernels.lora_linear.op import lora_addmm
from lightning_fastft.kernels.low_rank_add.op import add_low_rank
from lightning_fastft.kernels.qk_rope.op import qk_rope_backward, qk_rope_heads
from lightning_fastft.kernels.qk_rope.reference import Heads, Rope, RopeForm
from lightning_fastft.kernels.repeat_heads.op import repeat_heads
from lightning_fastft.kernels.rms_norm.op import rms_norm_backward, rms_norm_forward
from lightning_fastft.kernels.rms_norm.reference import NormForm
from lightning_fastft.kernels.state_scan.op import state_scan
from lightning_fastft.packing.chunks import Chunks

NORM = NormForm(eps=1e-6)
HEAD_GATE = HeadGateForm(HeadColumns(begin=0, width=4, num_heads=2, group_size=2, group_step=8))
END_E = torch.tensor([2, 3], dtype=torch.int32)
PLACE_TK = torch.tensor([[2], [0], [1]])
CHUNKS = Chunks(*(torch.tensor(values, dtype=torch.int32) for values in ([0, 3], [0, 1], [[0, 0]])), 16)


def rows(*shape):
    return torch.linspace(-2.0, 3.0, torch.Size(shape).numel()).view(shape)


ROPE = Rope(rows(3, 4), rows(3, 4), None, None, RopeForm(num_heads=2, num_kv_heads=1, head_width=4))


# The first argument is the one that `test_checks_by_default` gives another number of axes.
CALLS = {
    rms_norm_forward: ((rows(3, 4), rows(4)), {"form": NORM}),
    rms_norm_backward: ((rows(3, 4), rows(3, 4) + 1, rows(4)), {"form": NORM, "needs_weight": True}),
    qk_rope_heads: ((rows(3, 16), ROPE), {}),
    head_gate_forward: ((rows(3, 2, 4), rows(3, 8)), {"form": HEAD_GATE}),
    head_gate_backward: (
        (rows(3, 8), rows(3, 2, 4), rows(3, 8)),
        {"form": HEAD_GATE, "needs_weight": False, "out": torch.empty(3, 8)},
    ),
    delta_inputs_forward: (
        (rows(3, 6), DeltaParameters(rows(3, 2), rows(1), rows(1)), torch.arange(3)),
        {"form": DeltaForm(num_key_heads=1, num_heads=1, key_width=1, value_width=1)},
    ),
    gate_forward: ((rows(3, 4),), {"form": GateForm()}),
    gate_backward: ((rows(3, 2), rows(3, 4)), {"form": GateForm(), "weight_N": rows(3), "need_act": True}),
    add_low_rank: ((rows(3, 4), rows(3, 2), rows(2, 4)), {"residual_TN": rows(3, 4)}),
    repeat_heads: ((rows(3, 2, 4), 4), {}),
    scale_columns: ((rows(3, 4), rows(4)), {"offset_N": rows(4), "addend_TN": rows(3, 4)}),
    scale_columns_backward: ((rows(3, 4), rows(3, 4) + 1, rows(4)), {"needs_totals": True}),
    row_factors: (
        (rows(3, 4), rows(2, 4), rows(3, 2), rows(3)),
        {"scale": 2.0, "out": torch.empty(2, 3)},
    ),
    lora_addmm: ((rows(3, 4), rows(3, 2), rows(1, 2), rows(4, 1)), {"scale": 2.0}),
    quantise_rows: ((rows(3, 4),), {"factor_I": rows(4)}),
    grouped_mm: ((rows(3, 4), rows(2, 4, 5), END_E), {"bias_EO": rows(2, 5)}),
    grouped_weight_grad: ((rows(3, 4), rows(3, 5), END_E), {"scale": 2.0, "row_weight_N": rows(3)}),
    gather_rows: ((rows(3, 4), torch.tensor([2, 0, 1])), {"num_experts_per_token": 1}),
    combine_rows: ((rows(3, 4), PLACE_TK, END_E), {"weight_TK": rows(3, 1)}),
    sort_by_expert: ((PLACE_TK,), {"num_experts": 3}),
    exchange_ends: ((rows(3, 4, 2),), {}),
    state_scan: (
        (rows(3, 2, 4), rows(3, 2).abs(), -rows(2).abs(), rows(3, 1, 5), rows(3, 1, 5), rows(2)),
        {"chunks": CHUNKS},
    ),
}


def tensors_of(result):
    return [result] if isinstance(result, torch.Tensor) else [part for part in result if part is not None]


@pytest.fixture(autouse=True)
def as_in_training(monkeypatch):
    """Without the checks of every call that the tests ask for."""
    monkeypatch.setattr(backends, "_CHECKS_EVERY_CALL", False)


@pytest.mark.parametrize("operation", CALLS, ids=lambda operation: operation.__name__)
def test_the_bits_are_those_of_a_checked_call(operation):
    arguments, options = CALLS[operation]
    checked = tensors_of(operation(*arguments, **options))
    unchecked = tensors_of(operation(*arguments, **options, is_checked=False))
    assert len(checked) == len(unchecked) > 0
    for first, second in zip(checked, unchecked):
        assert first.dtype is second.dtype
        assert first.stride() == second.stride()
        assert torch.equal(first.contiguous().view(torch.uint8), second.contiguous().view(torch.uint8))


@pytest.mark.parametrize("operation", CALLS, ids=lambda operation: operation.__name__)
def test_an_unchecked_call_calls_no_check(operation, monkeypatch):
    arguments, options = CALLS[operation]
    module = sys.modules[operation.__module__]
    for name in [name for name in vars(module) if name.startswith(("check_", "_check"))]:
        monkeypatch.setattr(module, name, lambda *_, **__: pytest.fail("an argument was checked"))
    operation(*arguments, **options, is_checked=False)


def test_tests_check_every_call(monkeypatch):
    monkeypatch.setattr(backends, "_CHECKS_EVERY_CALL", True)
    with pytest.raises(ShapeError):
        gate_forward(rows(3, 4, 1), form=GateForm(), is_checked=False)


@pytest.mark.parametrize("operation", CALLS, ids=lambda operation: operation.__name__)
def test_checks_by_default(operation):
    (first, *others), options = CALLS[operation]
    with pytest.raises(ShapeError):
        operation(first[..., None][:, :0], *others, **options)


def test_the_gradient_of_rotated_heads_has_the_bits_of_a_checked_call():
    d_heads = Heads(rows(3, 2, 4), rows(3, 1, 4), rows(3, 1, 4))
    first, second = (
        qk_rope_backward(d_heads, None, ROPE, needs_weight=False, is_checked=is_checked)[0]
        for is_checked in (True, False)
    )
    assert torch.equal(first, second)


def test_a_product_of_fp8_rows_has_the_bits_of_a_checked_one():
    left, right = quantise_rows(rows(3, 4)), quantise_rows(rows(2, 4))
    arguments, options = (left, right.values_TI, right.scale_T), {"dtype": torch.float32}
    assert torch.equal(multiply(*arguments, **options), multiply(*arguments, **options, is_checked=False))


def test_blocks_have_the_bits_of_a_checked_call():
    outs = [torch.empty(3, 4) for _ in range(2)]
    for out, is_checked in zip(outs, (True, False)):
        write_block_diagonal(out, [rows(1, 1), rows(2, 3)], is_checked=is_checked)
    assert torch.equal(*outs)
