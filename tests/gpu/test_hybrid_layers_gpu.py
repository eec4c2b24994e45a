"""Fused layers of hybrids on a CUDA device: their kernels at real widths, as exact as transformers' own layers on the
kernels of fla-core in bf16, and without a host wait.
"""

import copy

import pytest
import torch

from lightning_fastft.activations.checkpointing import OffloadCheckpointing
from lightning_fastft.core.patcher import ModelPatcher
from lightning_fastft.graphs.install import install_layer_graphs
from lightning_fastft.kernels.delta_inputs import op as delta_inputs
from lightning_fastft.kernels.delta_inputs.reference import DeltaForm
from lightning_fastft.kernels.head_columns import HeadColumns
from lightning_fastft.kernels.head_gate import op as head_gate
from lightning_fastft.kernels.head_gate.reference import HeadGateForm
from lightning_fastft.mixers.install import ON_KERNELS
from lightning_fastft.moe.install import install_bincount_router
from lightning_fastft.patches.packed import install_packed_training
from tests.kernels.test_delta_inputs import check as check_delta_inputs
from tests.kernels.test_head_gate import check as check_head_gate
from tests.support.host_waits import waits_are_errors
from tests.support.layer_pairs import add_lora, assert_as_near, fuse, layers_of, step
from tests.support.packs import make_batch, relative_error
from tests.support.tiny_models import build_tiny

pytestmark = pytest.mark.gpu

LENGTHS = (190, 1, 64, 2, 255)
# 512 tokens in 5 to 32 documents and 8 to 33 chunks; the last three are of other kinds than the first.
PACKS = (LENGTHS, (200, 56, 256), (128,) * 4, (250, 250, 12), (65,) * 7 + (57,), (16,) * 32, (512,), LENGTHS)
WIDTH = 256
SIZES = {
    "hidden_size": WIDTH,
    "intermediate_size": 512,
    "head_dim": 64,
    "max_position_embeddings": 1024,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}
# Every expert serves every token, so that no rounding changes a choice.
FAMILIES = {
    "qwen3_5_text": SIZES,
    "qwen3_next": {**SIZES, "num_experts_per_tok": 4},
    "qwen3_5_moe_text": {**SIZES, "num_experts_per_tok": 4},
}
# Qwen3.5-9B and Qwen3-Next-80B-A3B.
DELTA_FORMS = (DeltaForm(16, 32, 128, 128), DeltaForm(16, 32, 128, 128, is_grouped=True))
GATE_FORMS = (
    HeadGateForm(HeadColumns(256, 256, 16, group_size=1, group_step=512)),
    HeadGateForm(DELTA_FORMS[0].gates, "silu", has_norm=True),
    HeadGateForm(DELTA_FORMS[1].gates, "silu", has_norm=True),
)


@pytest.fixture(autouse=True)
def needs_fla():
    pytest.importorskip("fla", reason="needs fla-core")


def make_model(family, *, has_lora):
    """A bf16 model on the CPU whose activations stay near 1."""
    experts = None if family == "qwen3_5_text" else "eager"
    model = build_tiny(family, experts=experts, **FAMILIES[family]).to(torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_((32 / WIDTH) ** 0.5)
    return (add_lora(model, r=16) if has_lora else model).train()


def on_device(model, *, is_fused, policy=None):
    model = copy.deepcopy(model).to("cuda")
    install_packed_training(
        model, ModelPatcher(), checkpointing=None if policy is None else OffloadCheckpointing(policy)
    )
    install_bincount_router(model, ModelPatcher())
    if is_fused:
        fuse(model)
    return model


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("form", DELTA_FORMS)
def test_inputs_of_the_delta_rule_equal_the_truth_at_real_widths(form, dtype):
    check_delta_inputs(delta_inputs, form, (130, 1, 2, 70), dtype, device="cuda")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("form", GATE_FORMS)
def test_gated_heads_equal_the_truth_at_real_widths(form, dtype):
    check_head_gate(head_gate, 1031, form, dtype, device="cuda")


@pytest.mark.slow(20)
@pytest.mark.parametrize("has_lora", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_is_as_near_to_the_truth_as_the_layers_own(family, has_lora):
    model = make_model(family, has_lora=has_lora)
    truth = copy.deepcopy(model).float()
    install_packed_training(truth, ModelPatcher())
    expected = step(truth, make_batch(LENGTHS))
    fused, plain = on_device(model, is_fused=True), on_device(model, is_fused=False)
    batch = make_batch(LENGTHS).to("cuda")
    found = step(fused, batch)
    assert batch.context.reads[ON_KERNELS] == 1
    own = step(plain, make_batch(LENGTHS).to("cuda"))
    found, own = ({name: value.cpu() for name, value in each.items()} for each in (found, own))
    assert_as_near(found, own=own, truth=expected)


@pytest.mark.parametrize("policy", ["recompute", "offload"])
def test_policies_give_the_same_gradients(policy):
    model = make_model("qwen3_5_text", has_lora=True)
    kept, other = (on_device(model, is_fused=True, policy=each) for each in ("keep", policy))
    expected = step(kept, make_batch(LENGTHS).to("cuda"))
    found = step(other, make_batch(LENGTHS).to("cuda"))
    errors = {name: relative_error(found[name], value) for name, value in expected.items()}
    assert max(errors.values()) <= 1e-2, max(errors.items(), key=lambda item: item[1])


@pytest.mark.parametrize("has_lora", [False, True])
def test_a_step_never_waits_for_the_device(has_lora):
    model = on_device(make_model("qwen3_5_text", has_lora=has_lora), is_fused=True)
    # Kernels are compiled and tuned in the first step.
    step(model, make_batch(LENGTHS).to("cuda"))
    batch = make_batch(LENGTHS).to("cuda")
    torch.cuda.synchronize()
    with waits_are_errors():
        model(**batch).loss.backward()


@pytest.mark.slow(20)
@pytest.mark.parametrize("policy", ["keep", "recompute"])
@pytest.mark.parametrize("family", FAMILIES)
def test_steps_from_graphs_equal_those_without(family, policy):
    model = make_model(family, has_lora=True)
    recorded, plain = (on_device(model, is_fused=True, policy=policy) for _ in range(2))
    (graphs,) = install_layer_graphs(recorded, ModelPatcher())
    for number, lengths in enumerate(PACKS):
        batch, other = (make_batch(lengths, seed=number).to("cuda") for _ in range(2))
        found, expected = step(recorded, batch), step(plain, other)
        # The recomputed forward inside a graph is not counted.
        assert batch.context.reads.keys() == other.context.reads.keys()
        differing = [name for name, value in expected.items() if not torch.equal(found[name], value)]
        assert not differing, (number, differing)
    assert graphs.num_replays == len(layers_of(recorded)) * (len(PACKS) - 2), graphs.reasons


def test_a_step_from_graphs_never_waits_for_the_device():
    model = on_device(make_model("qwen3_5_moe_text", has_lora=True), is_fused=True)
    (graphs,) = install_layer_graphs(model, ModelPatcher())
    for _ in range(4):
        step(model, make_batch(LENGTHS).to("cuda"))
    batch = make_batch(LENGTHS).to("cuda")
    before = graphs.num_replays
    torch.cuda.synchronize()
    with waits_are_errors():
        model(**batch).loss.backward()
    assert graphs.num_replays == before + len(layers_of(model))
