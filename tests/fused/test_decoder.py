"""Fused decoder layers: the numbers of transformers' own layers, and those layers themselves wherever the
Functions would not be exact.
"""

import contextlib
import copy
import gc
import pickle
import re

import pytest
import torch
from torch import nn

from lightning_fastft.core.patcher import ModelPatcher
from lightning_fastft.fused import attention as fused_attention
from lightning_fastft.fused.install import fuse_weight_buffers, install_fused_layers
from lightning_fastft.fused.layer_forms import LAYERS
from lightning_fastft.fused.low_precision_adapters import install_low_precision_adapters
from lightning_fastft.hf.loading.model import build_model
from lightning_fastft.hf.loading.source import ModelSource
from lightning_fastft.patches.packed import install_packed_training
from tests.support.layer_pairs import (
    DENSE,
    FAMILIES,
    TRAINED,
    add_lora,
    assert_as_near,
    build,
    count_own_forwards,
    fuse,
    is_served,
    last_norm,
    layers_of,
    make_pair,
    padded_batch,
    step,
    use_exact_norms,
)
from tests.support.packs import assert_close, make_batch, relative_error
from tests.support.tiny_models import VOCABULARY, build_tiny

pytestmark = pytest.mark.covering

IDS = torch.arange(3, 12)[None]
WIDE = {"hidden_size": 64, "intermediate_size": 128}


def assert_same_step(found, expected, *, bound):
    assert found.keys() == expected.keys()
    assert len(found) > 1
    errors = {name: relative_error(found[name], value) for name, value in expected.items()}
    assert errors.pop("loss") <= bound / 10
    assert all(found[name].dtype is value.dtype for name, value in expected.items())
    assert all(value.abs().sum() > 0 for value in expected.values())
    assert max(errors.values()) <= bound, max(errors.items(), key=lambda item: item[1])


def logits_of(model, **options):
    with torch.no_grad():
        return model(input_ids=IDS, use_cache=False, **options).logits


# The numbers.


def test_every_family_of_the_table_is_compared():
    kinds = {type(layer).__name__ for family in FAMILIES for layer in layers_of(build(family, "full"))}
    # tests/fused/test_own_mixers.py and test_hybrid_layers.py compare the others.
    wanted = {name for name, form in LAYERS.items() if not form.has_own_mixer and not form.delta_projections}
    assert wanted <= kinds, (
        "add a tiny model with these layers to FAMILIES of tests/support/layer_pairs.py (those of MORE_DENSE are there)"
    )
    assert kinds <= wanted


@pytest.mark.parametrize(
    ("form", "trained"),
    [
        *(("packed", trained) for trained in TRAINED),
        ("padded on the right", "lora"),
        ("padded on the right", "full"),
        ("padded on the left", "lora"),
    ],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_equal_the_layers_own(family, form, trained):
    fused, plain = make_pair(build(family, trained))
    batch = make_batch() if form == "packed" else padded_batch(is_left=form == "padded on the left")
    is_fused, found = is_served(fused, lambda: step(fused, batch))
    assert is_fused
    assert_same_step(found, step(plain, batch), bound=1e-5)


@pytest.mark.parametrize(
    "family", ["llama biased", "qwen3", "gpt_oss", "phi3", "gemma3", "granite", "olmo3", "lfm2", "minimax_m2"]
)
def test_weights_that_lie_next_to_their_adapters_give_the_same_and_are_given_back(family):
    fused, plain = make_pair(build(family, "lora", intermediate_size=80) if family in DENSE else build(family, "lora"))
    state, strides = (
        copy.deepcopy(fused.state_dict()),
        {name: parameter.stride() for name, parameter in fused.named_parameters()},
    )
    patcher = ModelPatcher()
    (weight_buffer,) = fuse_weight_buffers(fused, patcher, device_types=("cpu",))
    # Experts and convolutions are no part of it.
    num_products = {"gpt_oss": 4, "minimax_m2": 4, "lfm2": 6}.get(family, 8)
    assert len(layers_of(fused)) == 2
    assert weight_buffer.status().reason.startswith(f"{num_products} products")
    assert not fuse_weight_buffers(fused, patcher, device_types=("cpu",))
    batch = make_batch()
    is_fused, found = is_served(fused, lambda: step(fused, batch))
    assert is_fused
    assert_same_step(found, step(plain, batch), bound=1e-5)
    logits = logits_of(fused)
    now = fused.state_dict()
    assert list(now) == list(state)
    assert all(torch.equal(now[name], value) for name, value in state.items())
    # What is written to a file is whole.
    weight_buffer.make_whole(now)
    assert all(torch.equal(now[name], value) for name, value in state.items())
    assert all(value.untyped_storage().nbytes() == value.nbytes for value in now.values())

    patcher.undo()
    assert weight_buffer.status().state == "inactive"
    assert {name: parameter.stride() for name, parameter in fused.named_parameters()} == strides
    assert all(
        parameter.untyped_storage().nbytes() == parameter.nbytes
        for layer in layers_of(fused)
        for parameter in layer.parameters()
    )
    assert relative_error(logits_of(fused), logits) <= 1e-6


def test_a_call_that_the_layer_serves_itself_may_stand_beside_settled_ones():
    fused, plain = make_pair(build("llama", "lora"))
    fuse_weight_buffers(fused, ModelPatcher(), device_types=("cpu",))
    gradients = []
    for model in (fused, plain):
        # With a cache the layers run their own forward, and save their weights for a backward that comes after the
        # other call has used the room.
        loss = model(input_ids=IDS, use_cache=True).logits.square().mean()
        with torch.no_grad():
            model(input_ids=IDS, use_cache=False)
        loss.backward()
        gradients.append(
            {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
        )
    ours, expected = gradients
    assert ours.keys() == expected.keys()
    assert ours
    assert max(relative_error(ours[name], value) for name, value in expected.items()) < 1e-5


def test_weights_stay_where_they_are_off_the_gpu_and_where_they_are_trained():
    model, _ = make_pair(build("llama", "lora"))
    assert not fuse_weight_buffers(model, ModelPatcher())
    trained, _ = make_pair(build("llama", "full"))
    assert not fuse_weight_buffers(trained, ModelPatcher(), device_types=("cpu",))


@pytest.mark.parametrize("trained", ["lora", "full"])
@pytest.mark.parametrize("family", FAMILIES)
def test_in_float64_they_are_equal_to_float64(family, trained):
    fused, plain = make_pair(build(family, trained, dtype=torch.float64))
    use_exact_norms(fused, is_plain=False)
    use_exact_norms(plain, is_plain=True)
    is_fused, found = is_served(fused, lambda: step(fused, make_batch()))
    assert is_fused
    # Routers choose and weigh in fp32, so a difference of 1e-16 can become one of 1e-7 there.
    assert_same_step(found, step(plain, make_batch()), bound=1e-12 if family in DENSE else 1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_norms_round_where_their_family_does(family):
    """Before or behind the weight: in bf16 a bit of many numbers, seen at the norm in front of the head, which
    has the form of the layers' own.
    """
    fused, plain = make_pair(build(family, "full", dtype=torch.bfloat16))
    x = torch.randn(3, 50, fused.config.get_text_config().hidden_size).bfloat16()
    assert torch.equal(last_norm(fused)(x), last_norm(plain)(x))


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("qwen3", {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}),
        ("gemma3", {"attention_bias": False}),
        ("olmo2", {}),
        ("minimax_m2", {}),
    ],
)
def test_norms_of_heads_round_where_their_family_does(family, overrides, monkeypatch):
    """Seen at documents of one token, whose position 0 is not rotated: attention gets what the norms of the heads
    gave.
    """
    fused, plain = make_pair(build(family, "full", dtype=torch.bfloat16, **overrides))
    heads, expected = [], []
    real = fused_attention.attend_rows
    monkeypatch.setattr(
        fused_attention,
        "attend_rows",
        lambda layer, q, k, *args, **options: heads.append((q, k)) or real(layer, q, k, *args, **options),
    )
    attention = layers_of(plain)[0].self_attn
    for norm in (attention.q_norm, attention.k_norm):
        norm.register_forward_hook(lambda module, args, output: expected.append(output))
    batch = make_batch((1,) * 40)
    fused(**batch)
    plain(**batch)
    for found, value in zip(heads[0], expected[:2], strict=True):
        if value.ndim == 3:
            # Normed over all heads.
            value = value.unflatten(-1, (-1, attention.head_dim))
        # All but Gemma norm heads in the order of tokens.
        assert torch.equal(found, value[0].transpose(0, 1) if family == "gemma3" else value[0])


@pytest.mark.parametrize("family", DENSE)
def test_blocks_of_dense_layers_are_fused_too(family):
    fused, _ = make_pair(build(family, "lora"))
    with count_own_forwards(fused) as counts:
        step(fused, make_batch())
    assert (counts.attention, counts.block) == (0, 0)


@pytest.mark.parametrize("family", ["llama biased", "qwen3", "gpt_oss", "phi3", "gemma2", "gemma3", "granite", "olmo2"])
def test_bfloat16_is_as_near_to_the_truth_as_the_layers_own(family):
    model = build(family, "full", dtype=torch.bfloat16, **WIDE)
    assert_model_as_near(model, truth=copy.deepcopy(model).double())


@pytest.mark.parametrize("family", ["llama biased", "qwen3", "gemma3", "granite", "olmo2", "lfm2"])
def test_adapters_in_bfloat16_are_as_near_to_the_truth_as_the_layers_own(family):
    model = build(family, "lora", dtype=torch.bfloat16, **WIDE)
    assert_model_as_near(model, truth=copy.deepcopy(model).double())


@pytest.mark.parametrize(
    ("family", "adapter_dtype"),
    [("qwen2", torch.bfloat16), ("qwen2", torch.float32), ("phi3", torch.bfloat16), ("gemma3", torch.float32)],
)
def test_nf4_is_as_near_to_the_truth_as_the_layers_own(family, adapter_dtype):
    model = quantised(adapter_dtype=adapter_dtype, family=family)
    assert_model_as_near(model, truth=with_dense_weights(model).double(), has_copies=adapter_dtype is torch.float32)


def quantised(*, adapter_dtype, family="qwen2"):
    config = build(family, "full", **WIDE).config.to_dict()
    model = build_model(
        ModelSource(config, init="random"), device=torch.device("cpu"), dtype=torch.bfloat16, quantization="nf4", seed=0
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "bias" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model = add_lora(model, adapter_dtype=adapter_dtype).train()
    with torch.no_grad():
        for parameter in model.parameters():
            # Masters that are bf16 numbers: the truth is the same for every arm.
            if parameter.requires_grad:
                parameter.copy_(parameter.bfloat16())
    return model


def with_dense_weights(model):
    """A copy whose packed layers hold the weights that they stand for."""
    model = copy.deepcopy(model)
    for module in list(model.modules()):
        for name, child in list(module._modules.items()):
            if type(getattr(child, "weight", None)).__name__ == "Params4bit" and not hasattr(child, "base_layer"):
                from bitsandbytes.functional import dequantize_4bit

                dense = nn.Linear(child.in_features, child.out_features, bias=child.bias is not None)
                dense.weight = nn.Parameter(
                    dequantize_4bit(child.weight.data, child.weight.quant_state), requires_grad=False
                )
                dense.bias = child.bias
                module._modules[name] = dense
    return model


def assert_model_as_near(model, *, truth, has_copies=False):
    """Fuse a model and compare its steps with those of the layers' own forward in the same dtype.

    Over several batches at once: the errors of a single one scatter, up and down, by more than the bound.
    """
    install_packed_training(truth, ModelPatcher())
    use_exact_norms(truth, is_plain=True)
    batches = [make_batch((40, 1, 25, 30), seed=seed) for seed in range(4)]
    expected = steps(truth, batches)
    plain = copy.deepcopy(model)
    for each in (model, plain):
        install_packed_training(each, ModelPatcher())
        if has_copies:
            install_low_precision_adapters(each, ModelPatcher(), compute_dtype=torch.bfloat16)
    fuse(model)
    is_fused, found = is_served(model, lambda: steps(model, batches))
    assert is_fused
    assert_as_near(found, own=steps(plain, batches), truth=expected)


def steps(model, batches):
    """What every batch gives, side by side."""
    found = [step(model, batch) for batch in batches]
    return {name: torch.stack([each[name] for each in found]) for name in found[0]}


@pytest.mark.parametrize("quantization", ["nf4", None])
def test_fp32_adapters_get_fp32_gradients_and_a_step_before_the_backward_is_an_error(quantization):
    model = (
        quantised(adapter_dtype=torch.float32)
        if quantization
        else add_lora(build("llama", "full").bfloat16(), adapter_dtype=torch.float32).train()
    )
    install_packed_training(model, ModelPatcher())
    copies = install_low_precision_adapters(model, ModelPatcher(), compute_dtype=torch.bfloat16)
    fuse(model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert {parameter.dtype for parameter in trained} == {torch.float32}
    optimizer = torch.optim.SGD(trained, lr=0.1)
    is_fused, loss = is_served(model, lambda: model(**make_batch()).loss)
    assert is_fused
    loss.backward(retain_graph=True)
    assert {parameter.grad.dtype for parameter in trained} == {torch.float32}
    optimizer.step()
    copies.refresh(is_after_step=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize(
    ("family", "name"),
    [
        *(("llama", name) for name in ("self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj")),
        *(("llama", name) for name in ("input_layernorm", "post_attention_layernorm")),
        *(
            ("gemma3", name)
            for name in (
                "self_attn.o_proj",
                "self_attn.q_norm",
                "post_attention_layernorm",
                "mlp.up_proj",
                "mlp.down_proj",
            )
        ),
        *(("gemma3", name) for name in ("pre_feedforward_layernorm", "post_feedforward_layernorm")),
        *(("phi3", name) for name in ("self_attn.qkv_proj", "mlp.gate_up_proj")),
    ],
)
def test_a_trained_weight_written_before_the_backward_is_an_error(family, name):
    model, _ = make_pair(build(family, "full"))
    loss = model(**make_batch()).loss
    with torch.no_grad():
        layers_of(model)[0].get_submodule(name).weight.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_validation_before_the_first_step_changes_nothing():
    model, plain = make_pair(quantised(adapter_dtype=torch.bfloat16))
    with torch.inference_mode():
        model(**make_batch())
    assert step(model, make_batch()).keys() == step(plain, make_batch()).keys()


# Who runs.


def lora_pair(**options):
    return make_pair(add_lora(build("llama", "full"), **options).train())


def scale_in_hook(path):
    """A hook that changes the numbers, so that passing it over is seen in them."""

    def prepare(model):
        module = layers_of(model)[0].get_submodule(path)
        return module.register_forward_hook(
            lambda module, args, output: (output[0] * 1.5, *output[1:]) if isinstance(output, tuple) else output * 1.5
        ).remove

    return prepare


def own_forward(path):
    def prepare(model):
        module = layers_of(model)[0].get_submodule(path)
        real = module.forward
        module.forward = lambda x: real(x) * 1.5
        return lambda: vars(module).pop("forward")

    return prepare


def two_adapters(model):
    model.base_model.set_adapter(["default", "second"])
    return lambda: model.set_adapter("default")


def biased(model):
    model.set_adapter("biased")
    return lambda: model.set_adapter("default")


def eager(model):
    before = model.get_base_model().config._attn_implementation
    model.set_attn_implementation("eager")
    return lambda: model.set_attn_implementation(before)


FALLBACKS = {
    "hook on q_proj": (scale_in_hook("self_attn.q_proj"), {}),
    "hook on the base of q_proj": (scale_in_hook("self_attn.q_proj.base_layer"), {}),
    "hook on lora_A": (scale_in_hook("self_attn.o_proj.lora_A.default"), {}),
    "hook on attention": (scale_in_hook("self_attn"), {}),
    "hook on the block": (scale_in_hook("mlp"), {}),
    "hook on a norm": (scale_in_hook("post_attention_layernorm"), {}),
    "forward of its own": (own_forward("mlp.down_proj"), {}),
    "forward of its own inside an adapter": (own_forward("mlp.down_proj.base_layer"), {}),
    "several adapters": (two_adapters, {}),
    "adapter with a bias": (biased, {}),
    "another attention": (eager, {}),
    "attention weights": (None, {"output_attentions": True}),
    "mixed batch": (None, {"adapter_names": ["second"]}),
}


def with_more_adapters(model):
    for name, options in {"second": {}, "biased": {"lora_bias": True}}.items():
        config = copy.deepcopy(model.peft_config["default"])
        config.lora_bias = options.get("lora_bias", False)
        torch.manual_seed(len(name))
        model.add_adapter(name, config, autocast_adapter_dtype=False)
    return model


@pytest.mark.parametrize("case", FALLBACKS)
def test_what_functions_cannot_serve_is_left_to_the_layers_own_forward(case):
    prepare, options = FALLBACKS[case]
    fused, plain = make_pair(with_more_adapters(add_lora(build("llama", "full"))).eval())
    calls = [lambda model: logits_of(model, **options)]
    if "adapter_names" not in options:
        calls.append(lambda model: step(model, padded_batch(), **options)["loss"])
    for call in calls:
        before = call(plain) if prepare is not None else logits_of(plain)
        undo = [prepare(model) for model in (fused, plain) if prepare is not None]
        # A hook stands on one layer, which alone is not fused.
        with count_own_forwards(fused) as counts:
            found = call(fused)
        assert counts.attention == (1 if "hook" in case or "forward" in case else 2)
        expected = call(plain)
        assert_close(found, expected)
        assert relative_error(before, expected) > 1e-4 or case in ("another attention", "attention weights")
        for each in undo:
            each()
        is_fused, again = is_served(fused, lambda: logits_of(fused))
        assert is_fused
        assert_close(again, logits_of(plain))


@pytest.mark.parametrize(
    ("family", "path"),
    [
        *(
            ("gemma3", path)
            for path in (
                "post_attention_layernorm",
                "pre_feedforward_layernorm",
                "post_feedforward_layernorm",
                "self_attn.k_norm",
            )
        ),
        *(
            ("phi3", path)
            for path in ("resid_attn_dropout", "resid_mlp_dropout", "self_attn.qkv_proj", "mlp.gate_up_proj", "mlp")
        ),
        *(("olmo2", path) for path in ("post_feedforward_layernorm", "self_attn.q_norm")),
    ],
)
def test_hooks_on_the_modules_of_other_layers_run_too(family, path):
    fused, plain = make_pair(build(family, "full").eval())
    before = logits_of(plain)
    for model in (fused, plain):
        scale_in_hook(path)(model)
    with count_own_forwards(fused) as counts:
        found = logits_of(fused)
    assert counts.attention == 1
    expected = logits_of(plain)
    assert_close(found, expected)
    assert relative_error(before, expected) > 1e-4


@pytest.mark.parametrize("family", ["phi3", "gemma2", "gemma3"])
def test_other_layers_leave_a_cache_and_other_attention_to_their_own_forward(family):
    fused, plain = make_pair(build(family, "lora").eval())
    is_fused, found = is_served(fused, lambda: fused(input_ids=IDS, use_cache=True))
    assert not is_fused
    assert torch.equal(found.logits, plain(input_ids=IDS, use_cache=True).logits)
    for model in (fused, plain):
        model.set_attn_implementation("eager")
    is_fused, found = is_served(fused, lambda: step(fused, padded_batch()))
    assert not is_fused
    assert_same_step(found, step(plain, padded_batch()), bound=1e-5)


@pytest.mark.parametrize("family", ["gemma2", "gemma3"])
def test_a_layers_own_forward_hands_attention_what_it_always_does(family, monkeypatch):
    """Gemma's layers pass on whatever they are given, so nothing may be added."""
    fused, plain = make_pair(build(family, "full").eval())
    kind, given = type(layers_of(plain)[0].self_attn), []
    real = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, **options: given.append(options) or real(self, **options))
    for model in (fused, plain):
        model.set_attn_implementation("eager")
        logits_of(model)
    assert len(given) == 4
    assert all(options.keys() == given[-1].keys() for options in given)


DROPOUTS = {
    "behind attention and block": lambda: build("phi3", "full", resid_pdrop=0.5),
    "of an adapter": lambda: add_lora(build("llama", "full"), lora_dropout=0.5),
}


@pytest.mark.parametrize("place", DROPOUTS)
def test_dropout_is_drawn_in_training_and_fused_in_evaluation(place):
    fused, plain = make_pair(DROPOUTS[place]().eval())
    for model in (fused, plain):
        model.train()
    is_fused, found = is_served(fused, lambda: step(fused, make_batch()))
    assert not is_fused
    expected = step(plain, make_batch())
    assert_same_step(found, expected, bound=1e-5)
    assert not torch.equal(expected["loss"], step(plain, make_batch(), seed=8)["loss"])
    for model in (fused, plain):
        model.eval()
    is_fused, found = is_served(fused, lambda: step(fused, make_batch()))
    assert is_fused
    assert_same_step(found, step(plain, make_batch()), bound=1e-5)


@pytest.mark.parametrize("name", ["resid_attn_dropout", "resid_mlp_dropout"])
def test_dropout_behind_attention_and_behind_the_block_count_each_by_itself(name):
    fused, _ = make_pair(build("phi3", "full", resid_pdrop=0.5).eval())
    assert is_served(fused, lambda: logits_of(fused))[0]
    for layer in layers_of(fused):
        layer._modules[name].train()
    assert not is_served(fused, lambda: logits_of(fused))[0]


def test_hooks_that_stay_after_attention_weights_were_asked_for_do_not_count():
    fused, plain = lora_pair()
    weights = fused(input_ids=IDS, use_cache=False, output_attentions=True).attentions
    expected = plain(input_ids=IDS, use_cache=False, output_attentions=True).attentions
    assert_close(torch.stack(weights), torch.stack(expected))
    assert is_served(fused, lambda: step(fused, make_batch()))[0]
    hidden = is_served(fused, lambda: fused(**make_batch(), output_hidden_states=True).hidden_states)
    assert hidden[0]
    assert_close(torch.stack(hidden[1]), torch.stack(plain(**make_batch(), output_hidden_states=True).hidden_states))


def test_scores_of_routers_are_recorded_and_their_loss_trains_with_fused_layers():
    fused, plain = make_pair(build("qwen3_moe", "full"))
    for _ in range(2):
        is_fused, found = is_served(fused, lambda: step(fused, make_batch(), output_router_logits=True))
        assert is_fused
        assert_same_step(found, step(plain, make_batch(), output_router_logits=True), bound=1e-5)


def test_generation_with_a_cache_gives_the_same_tokens():
    fused, plain = lora_pair()
    for model in (fused, plain):
        model.eval()
    is_fused, found = is_served(fused, lambda: fused(input_ids=IDS, use_cache=True))
    assert not is_fused
    assert torch.equal(found.logits, plain(input_ids=IDS, use_cache=True).logits)
    options = {"input_ids": IDS, "max_new_tokens": 6, "do_sample": False, "eos_token_id": VOCABULARY}
    assert torch.equal(fused.generate(**options), plain.generate(**options))


def test_autocast_is_left_to_the_layers_own_forward():
    fused, plain = lora_pair()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        is_fused, found = is_served(fused, lambda: fused(**make_batch()).loss)
        expected = plain(**make_batch()).loss
    assert not is_fused
    assert torch.equal(found, expected)


def disabled(model):
    return model.disable_adapter()


@contextlib.contextmanager
def merged(model):
    model.merge_adapter()
    yield
    model.unmerge_adapter()


@contextlib.contextmanager
def merged_and_disabled(model):
    with merged(model), model.disable_adapter():
        yield


@pytest.mark.parametrize("state", [disabled, merged])
def test_disabled_and_merged_adapters_are_fused_with_pefts_numbers(state):
    fused, plain = lora_pair()
    expected_with = logits_of(plain)
    with state(fused), state(plain):
        is_fused, found = is_served(fused, lambda: logits_of(fused))
        expected = logits_of(plain)
    assert is_fused
    assert_close(found, expected)
    assert (relative_error(expected, expected_with) > 1e-2) == (state is disabled)
    assert_close(logits_of(fused), expected_with)


def test_the_base_of_merged_adapters_is_left_to_peft():
    fused, plain = lora_pair()
    with merged_and_disabled(fused), merged_and_disabled(plain):
        # PEFT takes the weights apart in its first call; from then on the base stands alone.
        is_fused, found = is_served(fused, lambda: logits_of(fused))
        assert_close(found, logits_of(plain))
    assert not is_fused


# What stays.


@pytest.mark.parametrize("family", ["qwen3", "gpt_oss", "phi3", "gemma3"])
def test_undo_leaves_nothing(family):
    model = build(family, "lora")
    install_packed_training(model, ModelPatcher())
    before = {name: (type(module), set(vars(module))) for name, module in model.named_modules()}
    modules, state = dict(model.named_modules()), model.state_dict()
    logits = logits_of(model)
    patcher = fuse(model)
    assert list(model.state_dict()) == list(state)
    assert all(value.data_ptr() == state[name].data_ptr() for name, value in model.state_dict().items())
    assert_close(logits_of(model), logits)
    step(model, make_batch())
    patcher.undo()
    assert {name: (type(module), set(vars(module))) for name, module in model.named_modules()} == before
    assert all(module is modules[name] for name, module in model.named_modules())
    assert torch.equal(logits_of(model), logits)


# bitsandbytes' weights forget what they are when they are pickled.
@pytest.mark.parametrize(
    ("duplicate", "is_quantised"),
    [(copy.deepcopy, True), (copy.deepcopy, False), (lambda model: pickle.loads(pickle.dumps(model)), False)],
)
def test_a_copied_or_pickled_model_is_fused_and_stands_alone(duplicate, is_quantised):
    model = quantised(adapter_dtype=torch.bfloat16) if is_quantised else build("qwen2", "lora")
    install_packed_training(model, ModelPatcher())
    fuse(model)
    expected = step(model, make_batch())
    twin = duplicate(model)
    assert [type(layer) for layer in layers_of(twin)] == [type(layer) for layer in layers_of(model)]
    is_fused, found = is_served(twin, lambda: step(twin, make_batch()))
    assert is_fused
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    with torch.no_grad():
        layers_of(twin)[0].input_layernorm.weight.zero_()
    assert all(torch.equal(value, expected[name]) for name, value in step(model, make_batch()).items())


def test_two_runs_are_bit_equal_and_nothing_grows():
    model, _ = make_pair(build("qwen3", "lora"))
    batch = make_batch()

    def num_tensors():
        gc.collect()
        return sum(isinstance(found, torch.Tensor) for found in gc.get_objects())

    first = step(model, batch)
    assert all(torch.equal(value, first[name]) for name, value in step(model, batch).items())
    counts = []
    for number in range(20):
        # A forward whose graph is dropped, and one whose backward runs.
        model(**batch) if number % 2 else step(model, batch)
        if number in (3, 19):
            counts.append(num_tensors())
    assert counts[0] == counts[1]


def test_a_second_backward_through_a_retained_graph_gives_the_same():
    model, _ = make_pair(build("qwen3", "lora"))
    expected = step(model, make_batch())
    loss = model(**make_batch()).loss
    loss.backward(retain_graph=True)
    model.zero_grad(set_to_none=True)
    loss.backward()
    assert all(
        torch.equal(parameter.grad, expected[name])
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    )


# What the table says.


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("llama", "2 layers of llama"),
        ("phi3", "2 layers of phi3"),
        ("gemma3", "2 layers of gemma3_text"),
        ("qwen2_moe", "2 layers of qwen2_moe, feed-forward blocks of 1"),
        ("gpt_oss", "2 layers of gpt_oss, feed-forward blocks as modules"),
        ("lfm2", "2 layers of lfm2, the mixers of 1 as modules"),
    ],
)
def test_status_says_what_is_fused(family, reason):
    assert install_fused_layers(build(family, "full"), ModelPatcher()) == [("fused layers", "active", reason, "")]


@pytest.mark.parametrize("lengths", [(32, 5), (33, 5)], ids=["at the limit", "above it"])
def test_ministral3_with_scaled_queries_runs_its_own_layers(lengths):
    fused, plain = make_pair(build("ministral3", "lora"))
    batch = make_batch(lengths)
    is_fused, found = is_served(fused, lambda: step(fused, batch))
    assert is_fused == (max(lengths) <= 32)
    assert_same_step(found, step(plain, batch), bound=1e-5)
    # A whole row counts where no context says how long documents are.
    with count_own_forwards(fused) as counts:
        fused(input_ids=torch.full((1, max(lengths)), 5), use_cache=False)
    assert (counts.attention == 0) == (max(lengths) <= 32)


def test_unknown_families_are_left_alone():
    model, patcher = build_tiny("olmoe"), ModelPatcher()
    (status,) = install_fused_layers(model, patcher)
    assert (status.state, len(patcher)) == ("inactive", 0)
    assert status.reason.startswith("OlmoeDecoderLayer is not supported")
    assert " Llama, " in status.reason
    (status,) = install_fused_layers(nn.Linear(2, 2), patcher)
    assert status == ("fused layers", "inactive", "Linear holds no transformers model", "")


OBSTACLES = {
    "hook": (
        lambda: hooked(build("llama", "full")),
        "1 of 2 layers: LlamaAttention has hooks or a replaced forward, which would be skipped",
    ),
    "DoRA with dropout": (
        lambda: add_lora(build("llama", "full"), use_dora=True, lora_dropout=0.1),
        "2 of 2 layers: DoRA with dropout",
    ),
    "dropout": (
        lambda: add_lora(build("llama", "full"), lora_dropout=0.1).train(),
        "2 of 2 layers: the adapter has dropout",
    ),
    "masters": (
        lambda: add_lora(build("llama", "full").bfloat16(), adapter_dtype=torch.float32),
        "float32 and rows are in torch.bfloat16, without",
    ),
    "dropout of the layer": (
        lambda: build("phi3", "full", resid_pdrop=0.1),
        "2 of 2 layers: resid_attn_dropout has dropout in training",
    ),
    "activation": (
        lambda: build("llama", "full", hidden_act="mish"),
        "the activation .*mish.* is unknown|the activation Mish",
    ),
}


def hooked(model):
    layers_of(model)[1].self_attn.register_forward_hook(lambda *_: None)
    return model


@pytest.mark.parametrize("case", OBSTACLES)
def test_an_obstacle_is_refused_with_its_reason_and_nothing_is_changed(case):
    make, reason = OBSTACLES[case]
    model, patcher = make(), ModelPatcher()
    (status,) = install_fused_layers(model, patcher)
    assert status.state == "refused"
    assert re.search(reason, status.reason), status.reason
    assert ("set dropout to 0" in status.remedy) is ("dropout" in case)
    assert "remove FusedKernels" in status.remedy
    assert len(patcher) == 0


def test_adapters_that_will_have_copies_are_no_obstacle():
    model = add_lora(build("llama", "full").bfloat16(), adapter_dtype=torch.float32).train()
    install_packed_training(model, ModelPatcher())
    (status,) = install_fused_layers(model, ModelPatcher(), awaits_copies=True)
    assert status.state == "active"
    assert not is_served(model, lambda: logits_of(model))[0]
    install_low_precision_adapters(model, ModelPatcher(), compute_dtype=torch.bfloat16)
    assert is_served(model, lambda: step(model, make_batch()))[0]


def test_two_models_are_told_apart():
    root = nn.ModuleDict({"student": build("llama", "full"), "teacher": build_tiny("olmoe")})
    names = [(status.name, status.state) for status in install_fused_layers(root, ModelPatcher())]
    assert names == [("fused layers (student)", "active"), ("fused layers (teacher)", "inactive")]
