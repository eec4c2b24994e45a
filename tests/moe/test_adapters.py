"""LoRA on stacks of experts: PEFT's own numbers, names and files, without PEFT's copies of the stacks."""

import copy
from unittest import mock

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora.layer import ParamWrapper as PeftParamWrapper
from torch.nn.utils import parametrize

from lightning_fastft.core.patcher import ModelPatcher
from lightning_fastft.fused.low_precision_adapters import install_low_precision_adapters
from lightning_fastft.moe import interface as experts_module
from lightning_fastft.moe.adapters import ParamWrapper, install_expert_adapters
from lightning_fastft.moe.install import install_bincount_router
from lightning_fastft.moe.routing import run_experts
from lightning_fastft.patches.packed import install_packed_training
from tests.moe.test_install import assert_same, distance, results, run
from tests.support.packs import assert_close, make_batch, make_documents, run_one_by_one, run_packed, take_gradients
from tests.support.tiny_models import build_tiny

pytestmark = pytest.mark.covering

# A family per layout: stacks as (E, O, I) and as (E, I, O) with biases.
FAMILIES = ("qwen3_moe", "gpt_oss", "deepseek_v3")
STACKS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def with_adapters(model, *, targets=STACKS, rank=4, **options):
    torch.manual_seed(3)
    config = LoraConfig(r=rank, lora_alpha=6, target_modules=["q_proj", "v_proj"], target_parameters=targets, **options)
    adapted = get_peft_model(model, config)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    return adapted.train()


def install(model):
    patcher = ModelPatcher()
    (status,) = install_bincount_router(model, patcher)
    return patcher, status


@pytest.mark.parametrize("targets", [STACKS, STACKS[:1], STACKS[1:]], ids=["both", "gate_up", "down"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_gradients_are_those_of_peft(family, targets):
    model = with_adapters(build_tiny(family, experts="eager"), targets=targets)
    expected = results(model)
    # One gradient of gpt_oss is in fp32 only comparable to float64.
    truth = results(copy.deepcopy(model).double()) if family == "gpt_oss" else None
    _, status = install(model)
    assert_same(results(model), expected, truth)
    assert any(
        grad is not None and grad.abs().sum() > 0
        for name, grad in expected[1].items()
        if "experts" in name and "lora_A" in name
    )
    assert "adapters on" in status.reason


@pytest.mark.parametrize("family", FAMILIES)
def test_no_stack_is_written_anew(family):
    model = with_adapters(build_tiny(family))
    install(model)
    with mock.patch.object(parametrize, "register_parametrization", side_effect=AssertionError("a stack is written")):
        results(model)


@pytest.mark.parametrize("family", FAMILIES)
def test_undoing_leaves_pefts_wrappers(family):
    model = with_adapters(build_tiny(family, experts="eager"))
    before, keys = results(model), list(model.state_dict())
    patcher, _ = install(model)
    assert {type(module) for module in model.modules() if isinstance(module, PeftParamWrapper)} == {ParamWrapper}
    assert list(model.state_dict()) == keys
    patcher.undo()
    assert {type(module) for module in model.modules() if isinstance(module, PeftParamWrapper)} == {PeftParamWrapper}
    after = results(model)
    assert all(torch.equal(after[1][name], grad) for name, grad in before[1].items() if grad is not None)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_saved_adapter_loads_in_stock_peft(family, tmp_path):
    base = build_tiny(family)
    model = with_adapters(copy.deepcopy(base))
    install(model)
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(copy.deepcopy(base), tmp_path).train()
    assert not any(isinstance(module, ParamWrapper) for module in loaded.modules())
    assert distance(run(model).logits, run(loaded).logits) <= 1e-6


@pytest.mark.parametrize("family", FAMILIES)
def test_disabled_merged_and_several_adapters(family):
    model = with_adapters(build_tiny(family, experts="eager"))
    plain = run(model).logits
    with model.disable_adapter():
        bare = run(model).logits
    assert distance(plain, bare) > 1e-3
    install(model)
    with model.disable_adapter():
        assert distance(run(model).logits, bare) <= 1e-6
    # PEFT's own forward adds several adapters; ours reads what it wrote.
    model.add_adapter("second", LoraConfig(r=2, target_modules=["q_proj", "v_proj"], target_parameters=STACKS))
    for name, parameter in model.named_parameters():
        if "lora_B.second" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    model.base_model.set_adapter(["default", "second"])
    both = run(model).logits
    assert distance(both, plain) > 1e-3
    model.base_model.set_adapter("default")
    assert distance(run(model).logits, plain) <= 1e-6
    model.merge_adapter()
    assert distance(run(model).logits, plain) <= 1e-5
    model.unmerge_adapter()
    assert distance(run(model).logits, plain) <= 1e-5
    merged = model.merge_and_unload()
    assert not any(isinstance(module, PeftParamWrapper) for module in merged.modules())
    assert distance(run(merged).logits, plain) <= 1e-5


def test_several_adapters_are_those_of_peft():
    model = with_adapters(build_tiny("qwen3_moe", experts="eager"))
    model.add_adapter("second", LoraConfig(r=2, target_modules=["q_proj", "v_proj"], target_parameters=STACKS))
    for name, parameter in model.named_parameters():
        if "lora_B.second" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    model.base_model.set_adapter(["default", "second"])
    expected = results(model)
    install(model)
    assert_same(results(model), expected)


def test_a_deep_copy_has_adapters_of_its_own():
    model = with_adapters(build_tiny("qwen3_moe"))
    install(model)
    twin = copy.deepcopy(model)
    before = run(twin).logits
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.zero_()
    assert torch.equal(run(twin).logits, before)
    assert distance(run(model).logits, before) > 1e-3


def test_wide_masters_get_wide_gradients_from_a_narrow_base():
    # One layer: behind it a rounding may send a token to another expert, in either.
    wide = with_adapters(build_tiny("qwen3_moe", experts="eager", num_hidden_layers=1))
    narrow = {}
    for name in ("eager", "routed"):
        model = with_adapters(build_tiny("qwen3_moe", experts="eager", num_hidden_layers=1).bfloat16())
        for parameter, other in zip(model.parameters(), wide.parameters()):
            if other.requires_grad:
                parameter.data = other.data.clone()
        if name == "routed":
            install(model)
        narrow[name] = results(model)[1]
    expected = results(wide)[1]
    adapters = [name for name in expected if "experts" in name and "lora_" in name]
    assert adapters
    for name in adapters:
        assert narrow["routed"][name].dtype is torch.float32
        assert distance(narrow["routed"][name], expected[name]) <= 2 * distance(
            narrow["eager"][name], expected[name]
        ), name


def test_adapters_elsewhere_are_left_to_peft():
    """A router is a stack of one matrix, and PEFT's "all-linear" adapts it too."""
    model = get_peft_model(
        build_tiny("qwen3_moe", experts="eager"), LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    ).train()
    expected = results(model)
    _, status = install(model)
    assert "adapters on 4 stacks" in status.reason
    assert type(model.get_submodule("base_model.model.model.layers.0.mlp.gate")) is PeftParamWrapper
    assert_same(results(model), expected)


def test_the_table_does_not_say_that_peft_serves_what_the_router_serves():
    model = with_adapters(build_tiny("qwen3_moe").bfloat16())
    before = install_low_precision_adapters(copy.deepcopy(model), ModelPatcher(), compute_dtype=torch.bfloat16).status
    assert "PEFT's own forward for 4 ParamWrapper" in before.reason
    install(model)
    after = install_low_precision_adapters(model, ModelPatcher(), compute_dtype=torch.bfloat16).status
    assert after.state == "active"
    assert "PEFT's own" not in after.reason


def with_exchanged_adapters(model):
    """Adapters made as if the stacks were stored the other way round, so that PEFT's second factor stands where
    its first one was.
    """
    stacks = [
        module for module in model.modules() if hasattr(module, "gate_up_proj") and hasattr(module, "is_transposed")
    ]
    before = [module.is_transposed for module in stacks]
    for module, is_transposed in zip(stacks, before):
        module.is_transposed = not is_transposed
    adapted = with_adapters(model)
    for module, is_transposed in zip(stacks, before):
        module.is_transposed = is_transposed
    assert stacks
    return adapted


@pytest.mark.parametrize("family", FAMILIES)
def test_factors_in_the_other_order_are_those_of_peft(family):
    model = with_exchanged_adapters(build_tiny(family, experts="eager"))
    expected = results(model)
    install(model)
    assert_same(results(model), expected)


def build_narrow(family="qwen3_moe", *, has_copies=True, is_router_first=True, adapt=with_adapters):
    """A bf16 model with fp32 masters, router and copies (without: those of attention alone), in either order of
    installation.
    """
    model = adapt(build_tiny(family).bfloat16())
    assert {parameter.dtype for name, parameter in model.named_parameters() if "lora" in name} == {torch.float32}
    copies, patchers = None, []
    for step in ("router", "copies") if is_router_first else ("copies", "router"):
        patchers.append(ModelPatcher())
        if step == "router":
            install_bincount_router(model, patchers[-1])
        else:
            copies = install_low_precision_adapters(model, patchers[-1], compute_dtype=torch.bfloat16)
    if not has_copies:
        for module in model.modules():
            vars(module).pop("fastft_expert_copies", None)
    return model, copies, patchers


def stack_linears(model):
    """lora_A and lora_B of every wrapped stack."""
    wrappers = [module for module in model.modules() if isinstance(module, PeftParamWrapper)]
    return [linear for wrapper in wrappers for linear in (wrapper.lora_A["default"], wrapper.lora_B["default"])]


def num_copies(model):
    return sum("fastft_copy" in vars(linear) for linear in stack_linears(model))


@pytest.fixture
def narrow_adapters(monkeypatch):
    """Notes of every product whether its adapter came with low-precision factors."""
    noted = []

    def noting(*arguments, gate_up, down, **options):
        noted.extend(linear.adapter is not None and linear.adapter.copy_a_ERI is not None for linear in (gate_up, down))
        return run_experts(*arguments, gate_up=gate_up, down=down, **options)

    monkeypatch.setattr(experts_module, "run_experts", noting)
    return noted


@pytest.mark.parametrize("is_router_first", [True, False])
@pytest.mark.parametrize("adapt", [with_adapters, with_exchanged_adapters])
@pytest.mark.parametrize("family", FAMILIES)
def test_copies_give_the_bits_of_casts_in_every_pass(family, adapt, is_router_first, narrow_adapters):
    arms = []
    for has_copies in (False, True):
        torch.manual_seed(0)
        model, _, _ = build_narrow(family, has_copies=has_copies, is_router_first=is_router_first, adapt=adapt)
        narrow_adapters.clear()
        arms.append(results(model))
        assert set(narrow_adapters) == {has_copies}
    assert num_copies(model) == len(stack_linears(model))
    (expected_logits, expected_grads), (logits, grads) = arms
    assert torch.equal(logits, expected_logits)
    for name, grad in expected_grads.items():
        if "experts" in name and grad is not None:
            assert torch.equal(grads[name], grad), name
            assert grads[name].dtype is torch.float32
            assert grads[name].is_contiguous()


def test_copies_are_in_no_state_dict_and_gone_after_undoing():
    model, _, patchers = build_narrow()
    keys = list(model.state_dict())
    before = {name: set(vars(module)) for name, module in model.named_modules()}
    run(model)
    assert num_copies(model) == len(stack_linears(model))
    assert list(model.state_dict()) == keys
    assert not any("copy" in name for name, _ in model.named_buffers())
    patchers[1].undo()
    assert num_copies(model) == 0
    after = {name: set(vars(module)) for name, module in model.named_modules()}
    assert not any("fastft_copy" in names or "fastft_expert_copies" in names for names in after.values())
    assert all(after[name] <= names for name, names in before.items() if name in after)
    run(model)


@pytest.mark.parametrize("which", [0, 1], ids=["A", "B"])
@pytest.mark.parametrize(
    "change", ["in place", "load_state_dict", "new parameter", "data replaced", "unseen and refreshed"]
)
def test_every_change_of_a_master_reaches_the_next_forward(change, which):
    model, copies, _ = build_narrow()
    before = run(model).logits
    linear = stack_linears(model)[which]
    key = next(name for name, parameter in model.named_parameters() if parameter is linear.weight)
    new = linear.weight.detach() * 3.0
    if change == "in place":
        with torch.no_grad():
            linear.weight.mul_(3.0)
    elif change == "load_state_dict":
        model.load_state_dict({**model.state_dict(), key: new})
    elif change == "new parameter":
        linear.weight = torch.nn.Parameter(new)
    elif change == "data replaced":
        linear.weight.data = new
    else:
        # Through .data nothing is seen from outside: that is what refresh is for.
        linear.weight.data.mul_(3.0)
        assert torch.equal(run(model).logits, before)
        copies.refresh()
    after = run(model).logits
    assert not torch.equal(after, before)
    fresh, _, _ = build_narrow()
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(run(fresh).logits, after)


def test_optimizer_steps_with_copies_are_those_without():
    arms = []
    for has_copies in (False, True):
        torch.manual_seed(0)
        model, copies, _ = build_narrow(has_copies=has_copies)
        optimizer = torch.optim.AdamW([linear.weight for linear in stack_linears(model)], lr=0.05)
        for _ in range(3):
            optimizer.zero_grad()
            results(model)
            optimizer.step()
            copies.refresh()
        arms.append([linear.weight.detach().clone() for linear in stack_linears(model)])
    assert all(torch.equal(one, other) for one, other in zip(*arms))


def test_a_refresh_between_forward_and_backward_is_an_error():
    model, copies, _ = build_narrow()
    loss = run(model).logits.float().square().mean()
    copies.refresh()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_first_forward_in_inference_mode_can_be_trained_on():
    model, copies, _ = build_narrow()
    with torch.inference_mode():
        run(model)
        copies.refresh()
        run(model)
    results(model)
    assert all(linear.weight.grad is not None for linear in stack_linears(model))


def test_a_deep_copy_has_copies_of_its_own():
    model, _, _ = build_narrow()
    expected = run(model).logits
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for linear in stack_linears(twin):
            linear.weight.mul_(2.0)
    assert not torch.equal(run(twin).logits, expected)
    assert torch.equal(run(model).logits, expected)


@pytest.mark.parametrize("compute_dtype", [torch.float32, torch.float16])
def test_stacks_in_another_dtype_are_served_without(compute_dtype, narrow_adapters):
    model = with_adapters(
        build_tiny("qwen3_moe").to(torch.float32 if compute_dtype is torch.float32 else torch.bfloat16)
    )
    patcher, _ = install(model)
    install_low_precision_adapters(model, patcher, compute_dtype=compute_dtype)
    run(model)
    assert set(narrow_adapters) == {False}
    assert num_copies(model) == 0


def test_the_table_counts_stacks_alone_too():
    model = get_peft_model(
        build_tiny("qwen3_moe").bfloat16(), LoraConfig(r=4, target_modules=[], target_parameters=STACKS)
    ).train()
    install(model)
    copies = install_low_precision_adapters(model, ModelPatcher(), compute_dtype=torch.bfloat16)
    assert copies.status.state == "active"
    assert copies.status.reason.startswith("4 stacks of experts: float32 masters, bfloat16 compute")
    run(model)
    assert len(copies) == 8


def test_nothing_to_swap():
    assert install_expert_adapters(build_tiny("qwen3_moe"), ModelPatcher(), experts=[]) == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_documents_are_those_one_by_one(family):
    """Attention with sinks and windows, routed experts and their adapters together: no document sees another."""
    model, alone = (with_adapters(build_tiny(family, experts="eager")) for _ in range(2))
    patcher, _ = install(model)
    install_packed_training(model, patcher)
    batch = make_batch()
    loss, logits = run_packed(model, batch)
    true_loss, true_logits = run_one_by_one(alone, make_documents(), num_items=batch.context.num_items)
    assert_close(loss, true_loss)
    assert_close(logits, true_logits)
    assert_close(take_gradients(model), take_gradients(alone))
