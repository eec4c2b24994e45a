"""Fused decoder layers on a CUDA device: as exact as transformers' own in bf16, without a host wait, and blind to
what memory held before.
"""

import copy

import pytest
import torch

from lightning_fastft.core.patcher import ModelPatcher
from lightning_fastft.moe.install import install_bincount_router
from lightning_fastft.patches.packed import install_packed_training
from tests.support.host_waits import waits_are_errors
from tests.support.layer_pairs import add_lora, assert_as_near, build, fuse, is_served, step, use_exact_norms
from tests.support.packs import make_batch, relative_error
from tests.support.sizes import sizes
from tests.support.tiny_models import build_tiny

pytestmark = pytest.mark.gpu
LENGTHS = (190, 1, 64, 257)
WIDTH = 256
SIZES = sizes(width=WIDTH, inner=512, head_width=64, layers=3, positions=1024)
# Every expert serves every token, so that no rounding changes a choice.
MODELS = {
    "qwen3": SIZES,
    "qwen3_vl": {
        **SIZES,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [16, 8, 8]},
    },
    "smollm3": {**SIZES, "no_rope_layers": [1, 0, 1]},
    "ministral3": {
        **SIZES,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 512,
            "llama_4_scaling_beta": 0.1,
        },
    },
    "gpt_oss": {
        **SIZES,
        "num_experts_per_tok": 4,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "granite": {**SIZES, "attention_bias": True, "mlp_bias": True},
    "olmo3": {**SIZES, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "exaone4": {**SIZES, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "lfm2": {**SIZES, "layer_types": ["conv", "full_attention", "conv"]},
    "minimax_m2": {**SIZES, "num_experts_per_tok": 4},
}


@pytest.fixture(autouse=True)
def _needs_mixer_kernels(request):
    if request.node.callspec.params.get("family") == "lfm2":
        pytest.importorskip("fla", reason="the convolutions need fla-core")


def make_model(family, *, has_lora):
    """A bf16 model on the CPU whose activations stay near 1."""
    model = build(family, "full", dtype=torch.bfloat16, **MODELS[family])
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_((32 / WIDTH) ** 0.5)
    return add_lora(model, r=16).train() if has_lora else model


def on_device(model, *, is_fused):
    model = copy.deepcopy(model).to("cuda")
    install_packed_training(model, ModelPatcher())
    install_bincount_router(model, ModelPatcher())
    if is_fused:
        fuse(model)
    return model


@pytest.mark.slow(8)
@pytest.mark.parametrize("has_lora", [False, True])
@pytest.mark.parametrize("family", MODELS)
def test_bfloat16_is_as_near_to_the_truth_as_the_layers_own(family, has_lora):
    model = make_model(family, has_lora=has_lora)
    truth = copy.deepcopy(model).double()
    install_packed_training(truth, ModelPatcher())
    use_exact_norms(truth, is_plain=True)
    expected = step(truth, make_batch(LENGTHS))
    fused, plain = on_device(model, is_fused=True), on_device(model, is_fused=False)
    batch = make_batch(LENGTHS).to("cuda")
    is_fused, found = is_served(fused, lambda: step(fused, batch))
    assert is_fused
    found, own = ({name: value.cpu() for name, value in each.items()} for each in (found, step(plain, batch)))
    assert_as_near(found, own=own, truth=expected)


@pytest.mark.parametrize("has_lora", [False, True])
@pytest.mark.parametrize("family", MODELS)
def test_forward_and_backward_wait_for_nothing(family, has_lora):
    model = on_device(make_model(family, has_lora=has_lora), is_fused=True)
    batch = make_batch(LENGTHS).to("cuda")
    # Kernels are compiled in the first step, and copies made.
    step(model, batch)
    with waits_are_errors():
        model(**batch).loss.backward()


@pytest.mark.parametrize("family", MODELS)
def test_memory_full_of_nan_changes_nothing(family):
    model = on_device(make_model(family, has_lora=True), is_fused=True)
    batch = make_batch(LENGTHS).to("cuda")
    expected = step(model, batch)
    for size in (64, 512, WIDTH, sum(LENGTHS) * WIDTH, sum(LENGTHS) * 1024, 2**22):
        poison = [torch.full((size,), float("nan"), dtype=torch.bfloat16, device="cuda") for _ in range(32)]
        del poison
    found = step(model, batch)
    assert all(torch.isfinite(value).all() for value in found.values())
    # The backward of attention adds in any order; everything else has one.
    assert max(relative_error(found[name], value) for name, value in expected.items()) <= 0.05


@pytest.mark.parametrize("has_lora", [False, True])
@pytest.mark.parametrize("family", ["gemma4", "gemma4_shared"])
def test_gemma4_with_its_head_widths_is_as_near_to_the_truth_as_the_layers_own(family, has_lora):
    """Heads of 256 columns in layers with a window, of 512 in the others."""
    model = build_tiny(family, hidden_size=WIDTH, head_dim=256, global_head_dim=512, max_position_embeddings=1024)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_((32 / WIDTH) ** 0.5)
    model = (add_lora(model, r=16) if has_lora else model).bfloat16().train()
    truth = copy.deepcopy(model).float()
    install_packed_training(truth, ModelPatcher())
    expected = step(truth, make_batch(LENGTHS))
    fused, plain = on_device(model, is_fused=True), on_device(model, is_fused=False)
    batch = make_batch(LENGTHS).to("cuda")
    found, own = ({name: value.cpu() for name, value in step(each, batch).items()} for each in (fused, plain))
    widths = {"gemma4": {"varlen", "sdpa"}, "gemma4_shared": {"sdpa"}}
    assert set(batch.context.reads) == widths[family]
    assert_as_near(found, own=own, truth=expected)
