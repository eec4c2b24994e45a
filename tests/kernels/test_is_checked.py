"""Checks of arguments: the same bits without them, and an error with them for each tensor that a kernel would misread."""

import copy
import inspect
import re
import sys
from contextlib import nullcontext

import pytest
import torch
from torch.utils._pytree import keystr, tree_flatten, tree_flatten_with_path, tree_unflatten

from lightning_fastft.core.errors import OptionError, ShapeError
from lightning_fastft.kernels import backends
from lightning_fastft.kernels.block_diagonal.op import write_block_diagonal
from lightning_fastft.kernels.chunk_gradients.op import chunk_gradients
from lightning_fastft.kernels.chunk_gradients.reference import ChunkInputs
from lightning_fastft.kernels.column_scale.op import row_factors, scale_columns, scale_columns_backward
from lightning_fastft.kernels.delta_inputs.op import delta_inputs_backward, delta_inputs_forward
from lightning_fastft.kernels.delta_inputs.reference import DeltaForm, DeltaInputs, DeltaParameters
from lightning_fastft.kernels.expert_gate.op import (
    gate_backward,
    gate_backward_quantised,
    gate_forward,
    gate_forward_quantised,
)
from lightning_fastft.kernels.expert_gate.reference import GateForm, LowRankRows
from lightning_fastft.kernels.expert_pack.op import exchange_ends
from lightning_fastft.kernels.expert_rows.op import combine_rows, gather_rows
from lightning_fastft.kernels.expert_sort.op import sort_by_expert
from lightning_fastft.kernels.fp8_linear.op import (
    multiply,
    nf4_row_scales,
    quantise_nf4,
    quantise_rows,
    transpose,
    weight_gradient,
)
from lightning_fastft.kernels.fp8_linear.reference import FP8, Fp8Rows
from lightning_fastft.kernels.grouped_mm.op import grouped_mm, grouped_mm_fp8, grouped_weight_grad
from lightning_fastft.kernels.grouped_mm.reference import Fp8Scales, GatheredRows
from lightning_fastft.kernels.head_columns import HeadColumns
from lightning_fastft.kernels.head_gate.op import head_gate_backward, head_gate_forward
from lightning_fastft.kernels.head_gate.reference import HeadGateForm
from lightning_fastft.kernels.lora_linear.op import lora_addmm
from lightning_fastft.kernels.low_rank_add.op import add_low_rank
from lightning_fastft.kernels.nf4_experts.op import dequantise_stack
from lightning_fastft.kernels.nf4_experts.reference import NF4Stack
from lightning_fastft.kernels.nf4_linear.op import dequantise_many
from lightning_fastft.kernels.nf4_linear.reference import NF4Weight
from lightning_fastft.kernels.qk_rope.op import qk_rope_backward, qk_rope_heads
from lightning_fastft.kernels.qk_rope.reference import Heads, Rope, RopeForm
from lightning_fastft.kernels.repeat_heads.op import repeat_heads
from lightning_fastft.kernels.rms_norm.op import rms_norm_backward, rms_norm_forward, rms_norm_quantised
from lightning_fastft.kernels.rms_norm.reference import NormForm
from lightning_fastft.kernels.state_scan.op import state_scan
from lightning_fastft.packing.chunks import Chunks

NORM = NormForm(eps=1e-6)
HEAD_GATE = HeadGateForm(HeadColumns(begin=4, width=4, num_heads=2, group_size=2, group_step=8), has_norm=True)
END_E = torch.tensor([2, 3], dtype=torch.int32)
PLACE_TK = torch.tensor([[2], [0], [1]])
CHUNKS = Chunks(*(torch.tensor(values, dtype=torch.int32) for values in ([0, 3], [0, 1], [[0, 0]])), 16)


def rows(*shape):
    return torch.linspace(-2.0, 3.0, torch.Size(shape).numel()).view(shape)


NORMED_ROPE = Rope(
    rows(3, 4), rows(3, 4), rows(4), rows(4), RopeForm(num_heads=2, num_kv_heads=1, head_width=4, has_norm=True)
)


PARAMETERS = DeltaParameters(rows(3, 2), rows(1), rows(1))
DELTA = {"form": DeltaForm(num_key_heads=1, num_heads=1, key_width=1, value_width=1)}
QUANTISED = Fp8Rows(rows(3, 16).to(FP8), rows(3).abs())
BYTES = torch.arange(128, dtype=torch.uint8)
NF4 = NF4Weight(BYTES[:64], BYTES[:2], rows(1), torch.tensor(0.5), rows(16), rows(256))
STACK = NF4Stack(BYTES.view(2, 64), BYTES[:4].view(2, 2), rows(2, 1), rows(2), rows(16), rows(256))
STATE = rows(1, 1, 4, 2)
CHUNK_INPUTS = ChunkInputs(
    *(rows(3, 1, 4), rows(3, 1, 4), rows(3, 1, 2), rows(3, 1, 2), STATE, STATE, -rows(3, 1).abs()),
    *(CHUNKS.start_S1, CHUNKS.index_C2, 1.0, rows(3, 1, 2)),
)
LOW = {"bias_EO": rows(2, 5), "low_NR": rows(3, 2), "low_ERO": rows(2, 2, 5)}
FP8_LOW = {"bias_EO": rows(2, 16), "low_NR": rows(3, 2), "low_ERO": rows(2, 2, 16)}

CALLS = {
    rms_norm_forward: ((rows(3, 4), rows(4)), {"form": NORM, "out": torch.empty(3, 4)}),
    rms_norm_backward: (
        (rows(3, 4), rows(3, 4) + 1, rows(4)),
        {
            "form": NORM,
            "needs_weight": True,
            "addend_TD": rows(3, 4),
            "out": torch.empty(3, 4),
            "rstd_out": torch.empty(3),
        },
    ),
    rms_norm_quantised: ((rows(3, 4), rows(4)), {"form": NORM}),
    qk_rope_heads: ((rows(3, 16), NORMED_ROPE), {}),
    qk_rope_backward: (
        (Heads(rows(3, 2, 4), rows(3, 1, 4), rows(3, 1, 4)), rows(3, 16), NORMED_ROPE),
        {"needs_weight": True},
    ),
    head_gate_forward: ((rows(3, 2, 4), rows(3, 16), rows(4)), {"form": HEAD_GATE}),
    head_gate_backward: (
        (rows(3, 8), rows(3, 2, 4), rows(3, 16), rows(4)),
        {"form": HEAD_GATE, "needs_weight": True, "out": torch.zeros(3, 16)},
    ),
    delta_inputs_forward: ((rows(3, 6), PARAMETERS, torch.arange(3)), DELTA),
    delta_inputs_backward: (
        (DeltaInputs(*[rows(3, 1, 1)] * 3, rows(3, 1), rows(3, 1)), rows(3, 6), PARAMETERS, torch.arange(3)),
        {**DELTA, "needs_weights": True, "out": torch.zeros(3, 6)},
    ),
    gate_forward: ((rows(3, 4),), {"form": GateForm(), "end_E": END_E}),
    gate_backward: (
        (rows(3, 2), rows(3, 4)),
        {
            "form": GateForm(),
            "weight_N": rows(3),
            "addend": LowRankRows(rows(3, 2), rows(2, 2)),
            "need_act": True,
            "end_E": END_E,
        },
    ),
    gate_forward_quantised: ((rows(3, 4),), {"form": GateForm()}),
    gate_backward_quantised: (
        (rows(3, 2), rows(3, 4)),
        {"form": GateForm(), "factor_P": rows(4), "need_act": True},
    ),
    add_low_rank: (
        (rows(3, 4), rows(3, 2), rows(2, 4)),
        {"residual_TN": rows(3, 4), "out": torch.empty(3, 4)},
    ),
    repeat_heads: ((rows(3, 2, 4), 4), {}),
    scale_columns: (
        (rows(3, 4), rows(4)),
        {"offset_N": rows(4), "addend_TN": rows(3, 4), "out": torch.empty(3, 4)},
    ),
    scale_columns_backward: (
        (rows(3, 4), rows(3, 4) + 1, rows(4)),
        {"needs_totals": True, "out": torch.empty(3, 4)},
    ),
    row_factors: (
        (rows(3, 4), rows(2, 4), rows(3, 2), rows(3)),
        {"scale": 2.0, "out": torch.empty(2, 3)},
    ),
    lora_addmm: (
        (rows(3, 4), rows(3, 2), rows(1, 2), rows(4, 1)),
        {"scale": 2.0, "copy_a_RD": rows(1, 2), "copy_b_NR": rows(4, 1)},
    ),
    quantise_rows: ((rows(3, 4),), {"factor_I": rows(4), "out": Fp8Rows(rows(3, 4).to(FP8), torch.empty(3))}),
    transpose: ((QUANTISED.values_TI,), {"out_IT": torch.zeros(16, 3).to(FP8)}),
    nf4_row_scales: (([NF4],), {"scales": [torch.empty(2)]}),
    quantise_nf4: (([NF4],), {"values": [torch.zeros(2, 64).to(FP8)], "scales": [torch.ones(2)]}),
    multiply: ((QUANTISED, rows(5, 16).to(FP8), rows(5)), {"dtype": torch.float32}),
    weight_gradient: ((QUANTISED, QUANTISED, rows(16)), {"dtype": torch.float32}),
    grouped_mm: ((rows(3, 4), rows(2, 4, 5), END_E), LOW | {"out": torch.empty(3, 5)}),
    grouped_mm_fp8: (
        (QUANTISED.values_TI, rows(2, 16, 16).to(FP8), END_E),
        {"scales": Fp8Scales(rows(3), rows(2)), "dtype": torch.float32, **FP8_LOW},
    ),
    grouped_weight_grad: (
        (GatheredRows(rows(3, 4), torch.tensor([2, 0, 1]), 1), rows(3, 5), END_E),
        {"scale": 2.0, "row_weight_N": rows(3)},
    ),
    gather_rows: ((rows(3, 4), torch.tensor([2, 0, 1])), {"num_experts_per_token": 1, "end_E": END_E}),
    combine_rows: ((rows(3, 4), PLACE_TK, END_E), {"weight_TK": rows(3, 1)}),
    sort_by_expert: ((PLACE_TK,), {"num_experts": 3}),
    exchange_ends: ((rows(3, 4, 2),), {"out": torch.empty(2, 4, 3)}),
    state_scan: (
        (rows(3, 2, 4), rows(3, 2).abs(), -rows(2).abs(), rows(3, 1, 5), rows(3, 1, 5), rows(2)),
        {"chunks": CHUNKS},
    ),
    chunk_gradients: ((CHUNK_INPUTS,), {}),
    write_block_diagonal: ((torch.empty(3, 4), [rows(1, 1), rows(2, 3)]), {}),
    dequantise_many: (([NF4],), {"outs": [torch.empty(2, 64)]}),
    dequantise_stack: ((STACK, torch.empty(2, 128)), {}),
}


def tensors_of(*parts):
    return [part for part in tree_flatten(parts)[0] if isinstance(part, torch.Tensor)]


@pytest.fixture(autouse=True)
def as_in_training(monkeypatch):
    """Without the checks of every call that the tests ask for."""
    monkeypatch.setattr(backends, "_CHECKS_EVERY_CALL", False)


UNCHECKED = [operation for operation in CALLS if "is_checked" in inspect.signature(operation).parameters]


@pytest.mark.parametrize("operation", UNCHECKED, ids=lambda operation: operation.__name__)
def test_the_bits_are_those_of_a_checked_call(operation):
    runs = []
    for is_checked in (True, False):
        arguments, options = copy.deepcopy(CALLS[operation])
        result = operation(*arguments, **options, is_checked=is_checked)
        runs.append(tensors_of(result, arguments, options))
    assert len(runs[0]) == len(runs[1]) > 0
    for first, second in zip(*runs):
        assert first.dtype is second.dtype
        assert first.stride() == second.stride()
        assert torch.equal(
            first.contiguous().view(-1).view(torch.uint8), second.contiguous().view(-1).view(torch.uint8)
        )


@pytest.mark.parametrize("operation", UNCHECKED, ids=lambda operation: operation.__name__)
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


# What a tensor may be although another one is not: the freedom that the docstrings give.
FREE = {
    head_gate_forward: {"rows_TC size 1", "weight_W precision"},
    head_gate_backward: {"weight_W precision"},
    delta_inputs_forward: {f"{name} precision" for name in DeltaParameters._fields} | {"conv_weight_NK size 1"},
    delta_inputs_backward: {f"{name} precision" for name in (*DeltaInputs._fields, *DeltaParameters._fields)}
    | {"conv_weight_NK size 1"},
    gate_forward: {"end_E size 0"},
    gate_backward: {"weight_N precision", "weight_N strides", "end_E size 0"},
    add_low_rank: {"factor_RN strides"},
    row_factors: {"magnitude_N precision"},
    weight_gradient: {"values_TI size 1"},
    grouped_weight_grad: {"d_NO size 1", "row_weight_N precision", "row_weight_N strides"},
    gather_rows: {"slot_N strides", "slot_N size 0", "end_E size 0"},
    combine_rows: {
        "place_TK strides",
        "end_E strides",
        "end_E size 0",
        "weight_TK precision",
        "weight_TK strides",
    },
    sort_by_expert: {"expert_TK strides"},
    exchange_ends: {"out precision"},
    state_scan: {"index_C2 size 0"},
    chunk_gradients: {f"{name} precision" for name in ("state_NJKV", "d_state_NJKV", "decay_TJ")} | {"start_S1 size 0"},
}
WORDS = {
    "axes": "axes|blocks",
    "dtype": "dtype|torch.float",
    "strides": "contiguous",
    "device": "meta",
    "precision": "float64",
}


def spoiled(tensor, *, is_first):
    """Yield a tensor that differs from the given one in one respect, and that respect; the first one sets the rest."""
    yield "axes", tensor[None]
    yield "dtype", tensor.to(torch.int16)
    if tensor.numel() > 1:
        yield "strides", torch.stack([tensor, tensor], -1)[..., 0]
    if not is_first:
        yield "device", tensor.to("meta")
        yield "precision", tensor.to(torch.float64)
        for axis in range(tensor.ndim):
            yield f"size {axis}", torch.cat([tensor, tensor.narrow(axis, 0, 1)], axis)


@pytest.mark.parametrize("operation", CALLS.keys() - {lora_addmm}, ids=lambda operation: operation.__name__)
def test_every_tensor_that_a_kernel_would_misread_is_refused(operation):
    arguments, options = CALLS[operation]
    given = inspect.signature(operation).bind(*arguments, **options).arguments
    parts, structure = tree_flatten_with_path(given)
    leaves, tensors = [leaf for _, leaf in parts], tensors_of(given)
    for place, (path, leaf) in enumerate(parts):
        name = re.findall(r"[a-zA-Z]\w*", keystr(path))[-1]
        for respect, other in spoiled(leaf, is_first=leaf is tensors[0]) if isinstance(leaf, torch.Tensor) else ():
            changed = tree_unflatten([*leaves[:place], other, *leaves[place + 1 :]], structure)
            is_free = f"{name} {respect}" in FREE.get(operation, ())
            refusal = pytest.raises((ShapeError, OptionError), match=WORDS.get(respect))
            with nullcontext() if is_free else refusal:
                operation(**changed)
