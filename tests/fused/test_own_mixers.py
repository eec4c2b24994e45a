"""Layers whose attention runs as a module, with fused norms and a fused feed-forward block."""

import copy
from collections import Counter

import pytest
import torch

from lightning_fastft.activations.checkpointing import OffloadCheckpointing
from lightning_fastft.callbacks.fused_kernels import FusedKernels
from lightning_fastft.core.patcher import ModelPatcher
from lightning_fastft.fused.decoder import fused_layers, install_fused_layers
from lightning_fastft.fused.layer_forms import LAYERS
from lightning_fastft.hf.families import decoder_layers, find_causal_models
from lightning_fastft.patches.packed import install_packed_training
from tests.support.layer_pairs import add_lora, assert_as_near, step
from tests.support.packs import make_batch, relative_error
from tests.support.tiny_models import build_tiny

pytestmark = pytest.mark.covering

FAMILIES = ("qwen2_vl", "qwen2_5_vl")


def build(family, trained, *, dtype=torch.float32):
    model = build_tiny(family).to(dtype)
    return (add_lora(model) if trained == "lora" else model).train()


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
    assert "as a module" in status.reason
    return model, plain, patcher


def count_blocks(model, monkeypatch):
    """Count at the classes how often dense feed-forward blocks run as modules: a hook would be noticed."""
    blocks = {id(layer.mlp): type(layer.mlp) for layer in layers_of(model)}
    counts = Counter()

    def count(kind, own):
        def forward(self, x):
            counts["own"] += id(self) in blocks
            return own(self, x)

        monkeypatch.setattr(kind, "forward", forward)

    for kind in set(blocks.values()):
        count(kind, kind.forward)
    return counts


def test_every_family_of_the_table_is_compared():
    kinds = {type(layer).__name__ for family in FAMILIES for layer in layers_of(build(family, "full"))}
    assert kinds == {name for name, form in LAYERS.items() if form.has_own_mixer}


@pytest.mark.parametrize("policy", [None, "recompute", "offload", "keep"])
@pytest.mark.parametrize("trained", ["lora", "full"])
@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_equal_the_layers_own(family, trained, policy, monkeypatch):
    fused, plain, _ = make_pair(build(family, trained), policy=policy)
    expected = step(plain, make_batch())
    counts = count_blocks(fused, monkeypatch)
    found = step(fused, make_batch())
    assert counts["own"] == 0
    assert found.keys() == expected.keys()
    errors = {name: relative_error(found[name], value) for name, value in expected.items()}
    assert max(errors.values()) <= 1e-5, max(errors.items(), key=lambda item: item[1])


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
    # Graphs and fp8 need layers that are fused as a whole.
    ((_, causal),) = find_causal_models(fused)
    assert fused_layers(causal) == []
    kinds = {type(layer) for layer in layers_of(plain)}
    patcher.undo()
    assert {type(layer) for layer in layers_of(fused)} == kinds


@pytest.mark.parametrize(
    ("options", "name"), [({"base_compute": "fp8_reference"}, "fp8 base"), ({"cuda_graphs": True}, "layer graphs")]
)
def test_what_needs_whole_layers_is_said_to_be_inactive(options, name):
    model = build("qwen2_vl", "lora")
    statuses = {status.name: status for status in FusedKernels(**options).install(model, ModelPatcher())}
    assert statuses["fused layers"].state == "active"
    assert statuses[name].state == "inactive"
    assert "attention" in statuses[name].reason
