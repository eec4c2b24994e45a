"""The experts of every family on our core give what transformers' eager experts give; one model at a time, and
back again.
"""

import copy
from unittest import mock

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from lightning_fastft.core.errors import UnsupportedModelError
from lightning_fastft.core.patcher import ModelPatcher
from lightning_fastft.moe import interface as experts
from lightning_fastft.moe.install import find_experts, install_bincount_router
from tests.support.tiny_models import MOE, MORE_MOE, VOCABULARY, build_tiny

FAMILIES = (*MOE, *MORE_MOE)
# Families whose loss holds an auxiliary term of the router.
WITH_AUXILIARY_LOSS = ("gpt_oss", "qwen3_moe", "mixtral", "olmoe", "mellum", "qwen2_moe", "phimoe", "ernie4_5_moe")
# fp32 sums in another order: two layers deep a few units of 6e-8.
TOLERANCE = 1e-6
# Here fp32 loses up to 4e-5 of a gradient in transformers' own code, so ours is judged by the distance of both from
# float64.
ILL_CONDITIONED = ("gemma4_text", "phimoe")


def token_ids(shape=(2, 11), seed=1):
    return torch.randint(3, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


def distance(ours, theirs):
    ours, theirs = ours.detach(), theirs.detach()
    return float(torch.linalg.vector_norm(ours - theirs) / torch.linalg.vector_norm(theirs).clamp(min=1e-30))


def run(model, **options):
    """One forward; routers that draw (phimoe in training) draw the same each time."""
    torch.manual_seed(7)
    return model(**{"input_ids": token_ids(), **options})


def results(model, **options):
    """Logits and every gradient of one step; the direction is random so that no output is left out."""
    model.zero_grad()
    logits = run(model, **options).logits
    (logits * torch.randn(logits.shape, generator=torch.Generator().manual_seed(2))).sum().backward()
    return logits.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_same(ours, theirs, truth=None):
    """Ours is theirs up to rounding; where even that is much, ours is no further from the truth than twice theirs."""

    def is_close(own, other, exact):
        return distance(own, other) <= TOLERANCE or (
            exact is not None and distance(own, exact) <= 2 * distance(other, exact)
        )

    assert is_close(ours[0], theirs[0], truth and truth[0])
    assert {name for name, grad in ours[1].items() if grad is None} == {
        name for name, grad in theirs[1].items() if grad is None
    }
    for name, grad in theirs[1].items():
        if grad is not None:
            assert is_close(ours[1][name], grad, truth and truth[1][name]), name


def install(model):
    patcher = ModelPatcher()
    return patcher, install_bincount_router(model, patcher)


class CountedCore:
    """The core as it is, with the arguments of its calls."""

    def __init__(self):
        self.calls = []

    def __enter__(self):
        core = experts.run_experts

        def counted(*args, **options):
            self.calls.append(options)
            return core(*args, **options)

        self._patch = mock.patch.object(experts, "run_experts", counted)
        self._patch.start()
        return self

    def __exit__(self, *error):
        self._patch.stop()


@pytest.mark.parametrize(
    ("name", "is_training"),
    # The same numbers in both modes, and in fp32 only comparable to float64.
    [
        (name, is_training)
        for name in FAMILIES
        for is_training in (True, False)
        if (name, is_training) != ("gemma4_text", True)
    ],
)
def test_logits_and_all_gradients_are_those_of_eager_experts(name, is_training):
    model = build_tiny(name, experts="eager").train(is_training)
    expected = results(model)
    # What is drawn in training is drawn otherwise in float64.
    is_judged = name in ILL_CONDITIONED and not is_training
    truth = results(copy.deepcopy(model).double()) if is_judged else None
    install(model)
    with CountedCore() as core:
        assert_same(results(model), expected, truth)
    assert len(core.calls) == len(find_experts(model)) > 0


@pytest.mark.parametrize("is_normed", [False, True])
def test_the_router_of_qwen3_moe_weighs_experts_as_published(is_normed):
    """Other tests run transformers' router on both sides, so they agree on any formula."""
    gate = build_tiny("qwen3_moe", norm_topk_prob=is_normed).model.layers[0].mlp.gate
    x_TD = torch.randn(7, gate.weight.shape[1], generator=torch.Generator().manual_seed(3))
    _, weight_TK, expert_TK = gate(x_TD)
    top = (x_TD @ gate.weight.T).softmax(dim=-1).topk(weight_TK.shape[1])
    torch.testing.assert_close(weight_TK, top.values / (top.values.sum(dim=-1, keepdim=True) if is_normed else 1))
    assert torch.equal(expert_TK, top.indices)


@pytest.mark.parametrize("name", FAMILIES)
def test_training_and_undoing_leaves_the_model_of_transformers(name):
    model, twin = (build_tiny(name, experts="eager").train().double() for _ in range(2))
    before = {place: type(module) for place, module in model.named_modules()}
    keys = list(model.state_dict())
    implementation = model.get_experts_implementation()
    patcher, _ = install(model)
    assert list(model.state_dict()) == keys
    assert [id(p) for p in model.parameters()] == [id(p) for _, p in model.named_parameters()]
    for each in (model, twin):
        optimizer = torch.optim.SGD(each.parameters(), lr=1e-3)
        for seed in range(2):
            optimizer.zero_grad()
            run(each, input_ids=token_ids(seed=seed), labels=token_ids(seed=seed)).loss.backward()
            optimizer.step()
    swapped = run(model).logits
    patcher.undo()
    assert {place: type(module) for place, module in model.named_modules()} == before
    assert list(model.state_dict()) == keys
    assert model.get_experts_implementation() == implementation
    with CountedCore() as core:
        restored = run(model).logits
    assert not core.calls
    assert distance(swapped, restored) <= TOLERANCE
    assert distance(restored, run(twin).logits) <= TOLERANCE


@pytest.mark.parametrize("name", WITH_AUXILIARY_LOSS)
def test_the_auxiliary_loss_reaches_the_router(name):
    model = build_tiny(name, experts="eager", router_aux_loss_coef=0.5).train()

    def step(**options):
        model.zero_grad()
        output = run(model, labels=token_ids(seed=3), **options)
        output.loss.backward()
        return output, {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    expected, expected_grads = step(output_router_logits=True)
    install(model)
    ours, grads = step(output_router_logits=True)
    _, without = step(output_router_logits=False)
    assert len(ours.router_logits) == len(expected.router_logits) == len(find_experts(model))
    assert all(distance(a, b) <= TOLERANCE for a, b in zip(ours.router_logits, expected.router_logits))
    assert distance(ours.loss, expected.loss) <= TOLERANCE
    assert all(distance(grads[n], expected_grads[n]) <= TOLERANCE for n in expected_grads)
    assert any(distance(grads[n], without[n]) > 1e-3 for n in grads if "gate.weight" in n or "router" in n)


@pytest.mark.parametrize("shares_config", [False, True])
def test_the_model_beside_keeps_its_experts(shares_config):
    swapped = build_tiny("mixtral", experts="eager")
    other = type(swapped)(swapped.config) if shares_config else build_tiny("mixtral", experts="eager")
    assert (swapped.config is other.config) is shares_config
    patcher, _ = install(swapped)
    with CountedCore() as core:
        run(other)
        assert not core.calls
        run(swapped)
        assert len(core.calls) == 2
    patcher.undo()
    assert swapped.config._experts_implementation == "eager"
    assert all(module.config is swapped.config for _, module in find_experts(swapped))


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "llama4_text"])
def test_a_deep_copy_of_a_swapped_model_is_swapped_and_its_own(name):
    model = build_tiny(name, experts="eager").train()
    expected = results(model)
    patcher, _ = install(model)
    twin = copy.deepcopy(model)
    patcher.undo()
    with CountedCore() as core:
        assert_same(results(twin), expected)
    assert len(core.calls) == 2
    assert not {p.data_ptr() for p in twin.parameters()} & {p.data_ptr() for p in model.parameters()}
    with CountedCore() as core:
        run(model)
    assert not core.calls


def test_a_second_installation_changes_nothing_and_both_are_undone():
    model = build_tiny("llama4_text")
    before = {name: type(module) for name, module in model.named_modules()}
    first, _ = install(model)
    swapped = {name: type(module) for name, module in model.named_modules()}
    second, (status,) = install(model)
    assert status.state == "active"
    assert {name: type(module) for name, module in model.named_modules()} == swapped != before
    second.undo()
    first.undo()
    assert {name: type(module) for name, module in model.named_modules()} == before


def test_experts_are_found_with_their_names_inside_any_module():
    class Holder(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.ModuleDict({"a": build_tiny("qwen3_moe"), "b": build_tiny("llama4_text")})

    holder = Holder()
    found = find_experts(holder)
    assert [name for name, _ in found] == [
        *(f"net.a.model.layers.{index}.mlp.experts" for index in range(2)),
        *(f"net.b.model.layers.{index}.feed_forward" for index in range(2)),
    ]
    assert all(holder.get_submodule(name) is module for name, module in found)
    _, statuses = install(holder)
    assert [status.name for status in statuses] == ["expert router (net.a)", "expert router (net.b)"]


def test_the_status_says_what_runs():
    _, (status,) = install(build_tiny("qwen3_moe"))
    assert status.name == "expert router"
    assert status.state == "active"
    assert status.reason == "2 MoE layers (4 experts, 2 per token), qwen3_moe; grouped GEMM: reference"


@pytest.mark.parametrize(
    ("root", "reason"),
    [(lambda: build_tiny("llama"), "no MoE layers in LlamaForCausalLM"), (lambda: nn.Linear(2, 2), "Linear holds no")],
)
def test_what_has_no_experts_is_left_alone_and_says_so(root, reason):
    patcher, (status,) = install(root())
    assert status.state == "inactive"
    assert reason in status.reason
    assert len(patcher) == 0


# What cannot be served exactly.


def build_unallocated(model_type, **overrides):
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, num_hidden_layers=2, **overrides))


@pytest.mark.parametrize(
    ("model_type", "overrides", "reason"),
    [
        ("deepseek_v4", {}, "DeepseekV4Experts._apply_gate is an unknown formula"),
        ("nemotron_h", {"layers_block_type": ["moe", "attention"]}, "activation ReLUSquaredActivation"),
        ("qwen3_moe", {"hidden_act": "mish"}, "activation MishActivation"),
        ("jetmoe", {}, "num_local_experts=8 in its configuration"),
        ("longcat_flash", {}, "num_local_experts=512 in its configuration"),
    ],
)
def test_what_is_not_known_is_refused_by_name_and_unchanged(model_type, overrides, reason):
    model = build_unallocated(model_type, **overrides)
    patcher = ModelPatcher()
    with pytest.raises(UnsupportedModelError, match=reason) as caught:
        install_bincount_router(model, patcher)
    assert f"{type(model).__name__} ({model_type})" in str(caught.value)
    assert "Remove BincountRouter" in str(caught.value)
    assert len(patcher) == 0


def test_numbers_of_experts_that_are_turned_off_are_no_experts():
    patcher, (status,) = install(build_unallocated("doge", is_moe=False))
    assert (status.state, len(patcher)) == ("inactive", 0)
    with pytest.raises(UnsupportedModelError, match="num_experts=16384"):
        install(build_unallocated("doge", is_moe=True))


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("qwen3_moe", {"mlp_only_layers": [0, 1]}),
        ("deepseek_v3", {"first_k_dense_replace": 3}),
        ("llama4_text", {"moe_layers": [], "interleave_moe_layer_step": 0}),
    ],
)
def test_a_mixture_whose_layers_are_all_dense_has_no_experts(name, overrides):
    patcher, (status,) = install(build_tiny(name, **overrides))
    assert (status.state, len(patcher)) == ("inactive", 0)


@pytest.mark.parametrize("kind", ["list", "stack"])
def test_experts_of_another_kind_are_seen_without_a_word_in_the_configuration(kind):
    class OddExperts(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(4, 8, 8))

    model = build_tiny("llama")
    model.model.layers[0].mlp.experts = (
        nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]) if kind == "list" else OddExperts()
    )
    with pytest.raises(UnsupportedModelError, match="modules ModuleList" if kind == "list" else "modules OddExperts"):
        install(model)


def test_experts_of_another_kind_beside_known_ones_are_named():
    model = build_tiny("qwen3_moe")
    model.model.layers[0].mlp.more_experts = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    _, (status,) = install(model)
    assert status.state == "active"
    assert "not swapped: ModuleList" in status.reason
    assert status.remedy


def test_shared_experts_are_no_experts_of_another_kind():
    model = build_tiny("qwen3_moe")
    model.model.layers[0].mlp.shared_experts = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    _, (status,) = install(model)
    assert "not swapped" not in status.reason


def test_one_model_that_cannot_be_served_keeps_all_others_unchanged():
    models = nn.ModuleList([build_tiny("qwen3_moe"), build_unallocated("deepseek_v4")])
    patcher = ModelPatcher()
    with pytest.raises(UnsupportedModelError, match="deepseek_v4"):
        install_bincount_router(models, patcher)
    assert len(patcher) == 0


def test_quantised_stacks_are_refused():
    model = build_tiny("qwen3_moe")
    stack = model.model.layers[1].mlp.experts
    stack.down_proj = nn.Parameter(stack.down_proj.detach().to(torch.float8_e4m3fn), requires_grad=False)
    with pytest.raises(
        UnsupportedModelError, match=r"layers\.1\.mlp\.experts: Qwen3MoeExperts\.down_proj .*float8_e4m3fn"
    ):
        install(model)


def test_a_replaced_forward_of_a_swapped_layer_is_refused():
    model = build_tiny("llama4_text")
    layer = model.model.layers[0].feed_forward
    layer.forward = layer.forward
    with pytest.raises(UnsupportedModelError, match="its forward was replaced"):
        install(model)


# Beside other things that change a model.


@pytest.mark.parametrize(
    ("name", "targets"),
    [
        ("qwen3_moe", ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]),
        ("gpt_oss", ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]),
        ("mixtral", ["mlp.experts.down_proj"]),
        ("llama4_text", ["feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj"]),
    ],
)
def test_adapters_on_experts_keep_their_effect_without_a_second_stack(name, targets):
    model = build_tiny(name, experts="eager")
    adapted = get_peft_model(
        model, LoraConfig(r=3, lora_alpha=6, target_modules=["q_proj"], target_parameters=targets)
    ).train()
    with torch.no_grad():
        for parameter_name, parameter in adapted.named_parameters():
            if "lora_B" in parameter_name:
                parameter.normal_(std=0.1)
    expected = results(adapted)
    with adapted.disable_adapter():
        bare = run(adapted).logits.detach()
    assert distance(expected[0], bare) > 1e-2
    patcher, _ = install(adapted)
    with CountedCore() as core:
        assert_same(results(adapted), expected)
    assert len(core.calls) == 2
    assert all(call["down"].adapter is not None for call in core.calls)
    assert all((call["gate_up"].adapter is not None) == (len(targets) == 2) for call in core.calls)
    with adapted.disable_adapter():
        assert distance(run(adapted).logits, bare) <= TOLERANCE
    patcher.undo()
    assert_same(results(adapted), expected)


def test_two_active_adapters_on_experts_add_up():
    config = LoraConfig(r=2, target_parameters=["mlp.experts.down_proj"], init_lora_weights=False)
    adapted = get_peft_model(build_tiny("qwen3_moe", experts="eager"), config)
    adapted.add_adapter("second", config)
    adapted.base_model.set_adapter(["default", "second"])
    expected = run(adapted).logits.detach()
    install(adapted)
    assert distance(run(adapted).logits, expected) <= TOLERANCE


@pytest.mark.parametrize("name", ["qwen3_moe", "llama4_text"])
def test_gradient_checkpointing_changes_nothing(name):
    model = build_tiny(name, experts="eager").train()
    expected = results(model)
    install(model)
    model.gradient_checkpointing_enable()
    assert_same(results(model, use_cache=False), expected)


@pytest.mark.parametrize("name", ["gpt_oss", "qwen3_moe", "llama4_text"])
def test_generation_is_that_of_eager_experts(name):
    model = build_tiny(name, experts="eager").eval()
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(token_ids((1, 5)), **options)
    install(model)
    with CountedCore() as core:
        assert torch.equal(model.generate(token_ids((1, 5)), **options), expected)
    assert len(core.calls) == 12
