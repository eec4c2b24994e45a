"""Layers whose attention runs as a module, with fused norms and a fused feed-forward block."""

import copy
from collections import Counter

import pytest
import torch
from peft import LoraConfig, get_peft_model

from lightning_fastft.activations.checkpointing import OffloadCheckpointing
from lightning_fastft.callbacks.fused_kernels import FusedKernels
from lightning_fastft.core.patcher import ModelPatcher
from lightning_fastft.fused.install import fused_layers, install_fused_layers
from lightning_fastft.fused.layer_forms import LAYERS
from lightning_fastft.hf.families import decoder_layers, find_causal_models
from lightning_fastft.patches.packed import install_packed_training
from tests.support.layer_pairs import add_lora, assert_as_near, padded_batch, step
from tests.support.packs import make_batch, relative_error
from tests.support.tiny_models import MISSING, build_tiny, has_experts

pytestmark = pytest.mark.covering

# A layer of each kind of mixer; some second ones have experts.
FAMILIES = {
    "qwen2_vl": {},
    "qwen2_5_vl": {},
    "gemma4": {},
    "gemma4_shared": {},
    "muse_glimmer": {},
    "deepseek_v2": {},
    "deepseek_v3": {},
    "glm4_moe_lite": {},
}
LATER = {} if "lfm3" in MISSING else {"lfm3": {"use_sandwich_norm": True}}
FAMILIES |= LATER
# Packed batches of this family are refused.
PADDED_ONLY = {"llama4_text": {"interleave_moe_layer_step": 2}}


def build(family, trained, *, dtype=torch.float32):
    experts = "eager" if has_experts(family) else None
    model = build_tiny(family, experts=experts, **{**FAMILIES, **PADDED_ONLY}[family]).to(dtype)
    # PEFT cannot adapt Llama 4's router.
    return (add_lora(model, exclude_modules=".*router.*") if trained == "lora" else model).train()


def layers_of(model):
    ((_, causal),) = find_causal_models(model)
    return decoder_layers(causal)


def make_pair(model, *, policy=None):
    plain = copy.deepcopy(model)
    for each in (model, plain):
        checkpointing = None if policy is None else OffloadCheckpointing(policy)
        install_packed_training(each, ModelPatcher(), checkpointing=checkpointing)
    patcher = ModelPatcher()
    (status,) = install_fused_layers(model, patcher)
    assert status.state == "active", status
    assert "as modules" in status.reason
    return model, plain, patcher


def count_blocks(model, monkeypatch):
    """Count at the classes how often dense feed-forward blocks run as modules: a hook would be noticed."""
    blocks = [getattr(layer, "mlp", None) or layer.feed_forward for layer in layers_of(model)]
    blocks = {id(block): type(block) for block in blocks if not hasattr(block, "experts")}
    counts = Counter()

    def count(kind, own):
        def forward(self, x):
            counts["own"] += id(self) in blocks
            return own(self, x)

        monkeypatch.setattr(kind, "forward", forward)

    for kind in set(blocks.values()):
        count(kind, kind.forward)
    return counts


# Gemma 4 norms its per-layer inputs before the first layer.
@pytest.mark.parametrize(("family", "num_outside"), [("gemma4", 1), ("gemma4_shared", 1), ("deepseek_v3", 0)])
def test_norms_inside_attention_run_as_one_kernel(family, num_outside, monkeypatch):
    fused, plain, patcher = make_pair(build(family, "full"))
    kind, counts = type(layers_of(plain)[0].input_layernorm), Counter()
    own = kind.forward

    def forward(self, x):
        counts["own"] += "weight" in self._parameters
        return own(self, x)

    monkeypatch.setattr(kind, "forward", forward)
    step(fused, make_batch())
    assert counts["own"] == num_outside
    patcher.undo()
    step(fused, make_batch())
    assert counts["own"] > 4 * len(layers_of(fused))


def test_every_family_of_the_table_is_compared():
    kinds = {type(layer).__name__ for family in (*FAMILIES, *PADDED_ONLY) for layer in layers_of(build(family, "full"))}
    absent = {"Lfm3DecoderLayer"} if "lfm3" in MISSING else set()
    wanted = {name for name, form in LAYERS.items() if form.has_own_mixer} - absent
    assert kinds == wanted, "add a tiny model with these layers to FAMILIES of this file"


# Every policy for a family of each kind of layer, and some for the others.
THOROUGH = ("qwen2_vl", "qwen2_5_vl", "qwen3_5_text", "qwen3_next", "gemma4_shared")
SOME = {("lora", "recompute"), ("full", "offload")}


@pytest.mark.parametrize(
    ("family", "trained", "policy"),
    [
        (family, trained, policy)
        for family in FAMILIES
        for trained in ("lora", "full")
        for policy in (None, "recompute", "offload", "keep")
        if family in THOROUGH or (trained, policy) in SOME
    ],
)
def test_loss_and_gradients_equal_the_layers_own(family, trained, policy, monkeypatch):
    fused, plain, _ = make_pair(build(family, trained), policy=policy)
    expected = step(plain, make_batch())
    counts = count_blocks(fused, monkeypatch)
    found = step(fused, make_batch())
    assert counts["own"] == 0
    assert found.keys() == expected.keys()
    errors = {name: relative_error(found[name], value) for name, value in expected.items()}
    assert max(errors.values()) <= 1e-5, max(errors.items(), key=lambda item: item[1])


@pytest.mark.parametrize("trained", ["lora", "full"])
@pytest.mark.parametrize("family", PADDED_ONLY)
def test_a_family_that_is_not_packed_is_fused_on_padded_rows(family, trained, monkeypatch):
    model = build(family, trained)
    plain = copy.deepcopy(model)
    (status,) = install_fused_layers(model, ModelPatcher())
    assert status.state == "active"
    expected = step(plain, padded_batch())
    counts = count_blocks(model, monkeypatch)
    found = step(model, padded_batch())
    assert counts["own"] == 0
    assert found.keys() == expected.keys()
    assert max(relative_error(found[name], value) for name, value in expected.items()) <= 1e-5


def test_gemma4_with_experts_beside_its_block_is_left_alone():
    (status,) = install_fused_layers(build_tiny("gemma4_text"), patcher := ModelPatcher())
    assert (status.state, len(patcher)) == ("inactive", 0)
    assert "Gemma4TextDecoderLayer (enable_moe_block) is not supported" in status.reason


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_is_as_near_to_the_truth_as_the_layers_own(family):
    model = build(family, "lora", dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(0.5)
    truth = copy.deepcopy(model).float()
    install_packed_training(truth, ModelPatcher())
    fused, plain, _ = make_pair(model)
    batch = make_batch((90, 1, 64, 57))
    assert_as_near(step(fused, batch), own=step(plain, batch), truth=step(truth, batch))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_cache_and_generation_run_the_layers_own_forward(family):
    fused, plain, patcher = make_pair(build(family, "full"))
    ids = torch.arange(3, 12)[None]
    for each in (fused, plain):
        each.eval()
    with torch.no_grad():
        for options in ({"use_cache": True}, {"use_cache": False}):
            logits, expected = (each(input_ids=ids, **options).logits for each in (fused, plain))
            assert relative_error(logits, expected) <= 1e-5
        tokens = [each.generate(ids, max_new_tokens=4, do_sample=False, eos_token_id=None) for each in (fused, plain)]
    assert torch.equal(*tokens)
    # Graphs and fp8 need layers that are fused as a whole.
    ((_, causal),) = find_causal_models(fused)
    assert fused_layers(causal) == []
    kinds = {type(layer) for layer in layers_of(plain)}
    patcher.undo()
    assert {type(layer) for layer in layers_of(fused)} == kinds


@pytest.mark.parametrize(
    ("options", "name"), [({"base_compute": "fp8_reference"}, "fp8 products"), ({"cuda_graphs": True}, "layer graphs")]
)
def test_what_needs_whole_layers_is_said_to_be_inactive(options, name):
    model = build("qwen2_vl", "lora")
    statuses = {status.name: status for status in FusedKernels(**options).install(model, ModelPatcher())}
    assert statuses["fused layers"].state == "active"
    assert statuses[name].state == "inactive"
    assert "attention" in statuses[name].reason


@pytest.mark.parametrize("family", LATER)
def test_a_trained_copy_of_an_empty_norm_is_no_norm(family):
    """Without sandwich norms LFM3 has identities in their places, of which PEFT makes copies too."""
    lora = LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False, modules_to_save=["norm"])
    model, plain, _ = make_pair(get_peft_model(build_tiny(family, use_sandwich_norm=False), lora).train())
    found, expected = (step(each, make_batch()) for each in (model, plain))
    assert found.keys() == expected.keys()
    assert all(relative_error(found[name], value) < 1e-5 for name, value in expected.items())
