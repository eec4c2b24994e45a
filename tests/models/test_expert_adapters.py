"""LoRA on stacks of experts: PEFT's own numbers, names and files, without PEFT's copies of the stacks."""

import copy
from unittest import mock

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora.layer import ParamWrapper as PeftParamWrapper
from torch.nn.utils import parametrize

from lightning_fastft.models.adapters import install_adapter_shadows
from lightning_fastft.models.expert_adapters import ParamWrapper, install_expert_adapters
from lightning_fastft.models.moe import install_bincount_router
from lightning_fastft.models.packed import install_packed_training
from lightning_fastft.models.swap import SwapLedger
from tests.models.packs import assert_close, make_batch, make_documents, run_one_by_one, run_packed, take_gradients
from tests.models.test_moe import assert_same, distance, results, run
from tests.models.tiny_models import build_tiny

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
    ledger = SwapLedger()
    (status,) = install_bincount_router(model, ledger)
    return ledger, status


@pytest.mark.parametrize("targets", [STACKS, STACKS[:1], STACKS[1:]], ids=["both", "gate_up", "down"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_gradients_are_those_of_peft(family, targets):
    model = with_adapters(build_tiny(family, experts="eager"), targets=targets)
    expected = results(model)
    _, status = install(model)
    assert_same(results(model), expected)
    assert any(grad is not None and grad.abs().sum() > 0 for name, grad in expected[1].items() if "experts" in name and "lora_A" in name)
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
    ledger, _ = install(model)
    assert {type(module) for module in model.modules() if isinstance(module, PeftParamWrapper)} == {ParamWrapper}
    assert list(model.state_dict()) == keys
    ledger.undo()
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
        assert distance(narrow["routed"][name], expected[name]) <= 2 * distance(narrow["eager"][name], expected[name]), name


def test_adapters_elsewhere_are_left_to_peft():
    """A router is a stack of one matrix, and PEFT's "all-linear" adapts it too."""
    model = get_peft_model(build_tiny("qwen3_moe", experts="eager"), LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)).train()
    expected = results(model)
    _, status = install(model)
    assert "adapters on 4 stacks" in status.reason
    assert type(model.get_submodule("base_model.model.model.layers.0.mlp.gate")) is PeftParamWrapper
    assert_same(results(model), expected)


def test_the_table_does_not_say_that_peft_serves_what_the_router_serves():
    model = with_adapters(build_tiny("qwen3_moe").bfloat16())
    before = install_adapter_shadows(copy.deepcopy(model), SwapLedger(), compute_dtype=torch.bfloat16).status
    assert "PEFT's own forward for 4 ParamWrapper" in before.reason
    install(model)
    after = install_adapter_shadows(model, SwapLedger(), compute_dtype=torch.bfloat16).status
    assert after.state == "active"
    assert "PEFT's own" not in after.reason


def test_nothing_to_swap():
    assert install_expert_adapters(build_tiny("qwen3_moe"), SwapLedger(), experts=[]) == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_documents_are_those_one_by_one(family):
    """Attention with sinks and windows, routed experts and their adapters together: no document sees another."""
    model, alone = (with_adapters(build_tiny(family, experts="eager")) for _ in range(2))
    ledger, _ = install(model)
    install_packed_training(model, ledger)
    batch = make_batch()
    loss, logits = run_packed(model, batch)
    true_loss, true_logits = run_one_by_one(alone, make_documents(), num_items=batch.context.num_items)
    assert_close(loss, true_loss)
    assert_close(logits, true_logits)
    assert_close(take_gradients(model), take_gradients(alone))
