"""Fused layers of hybrids: a gated delta rule, and attention with gated heads, against the layers' own forward."""

import copy
from collections import Counter

import pytest
import torch

from lightning_fastft.activations.checkpointing import OffloadCheckpointing
from lightning_fastft.callbacks.fused_kernels import FusedKernels
from lightning_fastft.core.patcher import ModelPatcher
from lightning_fastft.fused.install import fuse_weight_buffers, fused_layers, install_fused_layers
from lightning_fastft.fused.layer_forms import LAYERS
from lightning_fastft.hf.families import find_causal_models
from lightning_fastft.kernels.handover import Handover
from lightning_fastft.mixers import gated_delta
from lightning_fastft.patches.packed import install_packed_training
from tests.support.layer_pairs import add_lora, assert_as_near, layers_of, padded_batch, step
from tests.support.packs import make_batch, relative_error
from tests.support.tiny_models import MISSING, build_tiny, has_experts

# The first layer has a gated delta rule, the second one attention; in qwen3_next only the second one has experts.
FAMILIES = {"qwen3_5_text": {}, "qwen3_next": {"mlp_only_layers": [0]}, "qwen3_5_moe_text": {}}
# Its attention over all tokens has no positions.
FAMILIES |= {"lara_mini": {}} if "lara_mini" not in MISSING else {}
# The longest document has more than one chunk of the delta rule.
LENGTHS = (7, 1, 70, 2, 9)
POLICIES = ("keep", "recompute", "offload")


def build(family, trained, *, dtype=torch.float32):
    experts = "eager" if has_experts(family) else None
    model = build_tiny(family, experts=experts, **FAMILIES[family]).to(dtype)
    return (add_lora(model) if trained == "lora" else model).train()


def prepare(model, *, policy=None, is_fused=True):
    patcher = ModelPatcher()
    install_packed_training(model, patcher, checkpointing=None if policy is None else OffloadCheckpointing(policy))
    if is_fused:
        (status,) = install_fused_layers(model, patcher)
        assert status.state == "active", status
    return patcher


def make_pair(model):
    plain = copy.deepcopy(model)
    prepare(model)
    prepare(plain, is_fused=False)
    return model, plain


def count_own_forwards(model, monkeypatch):
    """Count at the classes how often mixers, attention and dense blocks run as modules: a hook would be noticed."""
    parts, counts = {}, Counter()
    for layer in layers_of(model):
        parts |= {id(part): (name, part) for name, part in layer.named_children() if name != "mlp"}
        if not hasattr(layer.mlp, "experts"):
            parts[id(layer.mlp)] = ("mlp", layer.mlp)

    def count(kind, own):
        def forward(self, *args, **kwargs):
            # A shared expert has the class of a block.
            counts.update([parts[id(self)][0]] if id(self) in parts else [])
            return own(self, *args, **kwargs)

        monkeypatch.setattr(kind, "forward", forward)

    for kind in {type(part) for _, part in parts.values()}:
        count(kind, kind.forward)
    return counts


def errors_of(found, expected):
    assert found.keys() == expected.keys()
    return {name: relative_error(found[name], value) for name, value in expected.items()}


def test_every_family_of_the_table_is_compared():
    kinds = {type(layer).__name__ for family in FAMILIES for layer in layers_of(build(family, "full"))}
    # An older transformers has not all of them.
    absent = {"LaraMiniDecoderLayer"} if "lara_mini" in MISSING else set()
    wanted = {name for name, form in LAYERS.items() if form.delta_projections} - absent
    assert kinds == wanted, "add a tiny model with these layers to FAMILIES of this file"


@pytest.mark.covering
@pytest.mark.parametrize("trained", ["lora", "full"])
@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_equal_the_layers_own(family, trained, monkeypatch):
    fused, plain = make_pair(build(family, trained))
    kinds = [set(layer._modules) & {"linear_attn", "self_attn"} for layer in layers_of(fused)]
    assert kinds == [{"linear_attn"}, {"self_attn"}]
    expected = step(plain, make_batch(LENGTHS))
    counts, batch = count_own_forwards(fused, monkeypatch), make_batch(LENGTHS)
    found = step(fused, batch)
    assert not counts
    assert batch.context.num_reads == 2
    errors = errors_of(found, expected)
    assert max(errors.values()) <= 1e-5, max(errors.items(), key=lambda item: item[1])


@pytest.mark.parametrize(("family", "trained"), [("qwen3_5_text", "lora"), ("qwen3_next", "full")])
def test_policies_give_the_same_bits(family, trained):
    steps = []
    for policy in POLICIES:
        model = build(family, trained)
        prepare(model, policy=policy)
        steps.append(step(model, make_batch(LENGTHS)))
    assert all(torch.equal(each[name], value) for each in steps[1:] for name, value in steps[0].items())


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_is_as_near_to_the_truth_as_the_layers_own(family):
    model = build(family, "lora", dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(0.5)
    truth = copy.deepcopy(model).float()
    prepare(truth, is_fused=False)
    fused, plain = make_pair(model)
    batch = make_batch((90, 1, 64, 57))
    assert_as_near(step(fused, batch), own=step(plain, batch), truth=step(truth, batch))


@pytest.mark.parametrize("family", ["qwen3_5_text", "qwen3_next"])
def test_weights_next_to_their_adapters_give_the_same_and_are_given_back(family):
    model = build(family, "lora")
    prepare(model)
    expected, patcher = step(model, make_batch()), ModelPatcher()
    (buffers,) = fuse_weight_buffers(model, patcher, device_types=("cpu",))
    assert buffers.status().state == "active"
    errors = errors_of(step(model, make_batch()), expected)
    assert max(errors.values()) <= 1e-5, max(errors.items(), key=lambda item: item[1])
    patcher.undo()
    assert all(parameter.is_contiguous() for parameter in model.parameters())


@pytest.mark.parametrize("family", FAMILIES)
def test_what_has_no_context_is_left_to_the_layers_own_forward(family):
    fused, plain = make_pair(build(family, "full"))
    for batch in (padded_batch(), padded_batch(is_left=True)):
        errors = errors_of(step(fused, batch), step(plain, batch))
        assert max(errors.values()) <= 1e-5, max(errors.items(), key=lambda item: item[1])
    ids = torch.arange(3, 12)[None]
    with torch.no_grad():
        for each in (fused.eval(), plain.eval()):
            each.config.use_cache = True
        for options in ({"use_cache": True}, {"use_cache": False}):
            logits, expected = (each(input_ids=ids, **options).logits for each in (fused, plain))
            assert relative_error(logits, expected) <= 1e-5
        tokens = [each.generate(ids, max_new_tokens=4, do_sample=False) for each in (fused, plain)]
    assert torch.equal(*tokens)


@pytest.mark.parametrize("path", ["linear_attn", "linear_attn.in_proj_b", "linear_attn.norm", "linear_attn.out_proj"])
def test_hooks_on_the_parts_of_a_mixer_run(path):
    model, called = build("qwen3_5_text", "full"), []
    prepare(model)
    layers_of(model)[0].get_submodule(path).register_forward_hook(lambda *_: called.append(path))
    model(**make_batch())
    # Once for each document on a CPU.
    assert len(called) >= 1


@pytest.mark.parametrize("change", ["bias", "activation", "part", "parameter"])
def test_a_mixer_that_differs_is_refused_with_its_reason(change):
    model = build("qwen3_5_text", "full")
    mixer = layers_of(model)[0].linear_attn
    if change == "bias":
        mixer.conv1d.bias = torch.nn.Parameter(torch.zeros(mixer.conv_dim))
    elif change == "activation":
        mixer.activation = "gelu"
    elif change == "part":
        mixer.more = torch.nn.Identity()
    else:
        mixer.D = torch.nn.Parameter(torch.zeros(1))
    (status,) = install_fused_layers(model, ModelPatcher())
    assert status.state == "refused"
    assert "Qwen3_5GatedDeltaNet" in status.reason


@pytest.mark.parametrize(
    ("path", "change"),
    [
        ("", lambda layer, own, hidden_states, **options: own(layer, hidden_states, **options) * 1.01),
        ("linear_attn.norm", lambda norm, own, x, gate: own(norm, x, -gate)),
        ("self_attn", lambda attention, own, **options: (own(attention, **options)[0] * 1.01, None)),
        ("self_attn.q_norm", lambda norm, own, x: own(norm, x) * (1 + norm.weight)),
    ],
)
def test_a_class_whose_forward_changed_is_refused_with_its_reason(path, change, monkeypatch):
    model = build("qwen3_next", "full")
    layer = layers_of(model)[path.startswith("self_attn")]
    kind = type(layer.get_submodule(path))
    own = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, *args, **options: change(self, own, *args, **options))
    state = torch.random.get_rng_state()
    (status,) = install_fused_layers(model, ModelPatcher())
    assert torch.equal(torch.random.get_rng_state(), state)
    assert status.state == "refused"
    assert "Qwen3NextDecoderLayer" in status.reason
    assert type(layer).__name__ == "Qwen3NextDecoderLayer"


def test_undo_leaves_nothing():
    model = build("qwen3_next", "lora")
    before = {name: type(module) for name, module in model.named_modules()}
    patcher = prepare(model, policy="offload")
    step(model, make_batch())
    patcher.undo()
    assert {name: type(module) for name, module in model.named_modules()} == before


def test_layers_count_as_fused_whole():
    model = build("qwen3_5_text", "lora")
    kernels = FusedKernels(base_compute="fp8_reference", cuda_graphs=True)
    statuses = {status.name: status for status in kernels.install(model, ModelPatcher())}
    ((_, causal),) = find_causal_models(model)
    assert len(fused_layers(causal)) == 2
    assert statuses["fused layers"].state == "active"
    # Graphs would say here that layers are not fused whole.
    assert "layer graphs" not in statuses
    assert "fp8 products" not in statuses


def carry_the_state(monkeypatch):
    rule = gated_delta.delta_rule_by_document
    monkeypatch.setattr(gated_delta, "delta_rule_by_document", lambda inputs, lengths: rule(inputs, [sum(lengths)]))


def convolve_over_borders(monkeypatch):
    make = gated_delta.make_delta_inputs
    monkeypatch.setattr(
        gated_delta,
        "make_delta_inputs",
        lambda rows, parameters, position, **options: make(rows, parameters, position + 9, **options),
    )


def lose_the_gates_gradient(monkeypatch):
    monkeypatch.setattr(Handover, "put", lambda self, *tensors: None)


@pytest.mark.parametrize("plant", [carry_the_state, convolve_over_borders, lose_the_gates_gradient])
def test_a_planted_fault_is_seen(plant, monkeypatch):
    fused, plain = make_pair(build("qwen3_5_text", "full"))
    expected = step(plain, make_batch())
    plant(monkeypatch)
    errors = errors_of(step(fused, make_batch()), expected)
    assert max(errors.values()) > 1e-3
