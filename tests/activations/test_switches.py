"""A recompute repeats the forward that it belongs to, also if adapters or dropout were switched before the backward."""

import copy
import pickle

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.helpers import rescale_adapter_scale
from torch import nn

from lightning_fastft.activations.checkpointing import OffloadCheckpointing
from lightning_fastft.core.patcher import ModelPatcher
from lightning_fastft.fused.install import install_fused_layers
from lightning_fastft.patches.packed import install_packed_training
from tests.support.training_parts import packed_batches, tiny_llama

TARGETS = ["q_proj", "o_proj", "gate_proj", "down_proj"]


def two_adapters(**lora):
    torch.manual_seed(0)
    config = LoraConfig(r=2, target_modules=TARGETS, init_lora_weights=False, **lora)
    model = get_peft_model(tiny_llama(), config, adapter_name="first")
    model.add_adapter("second", config)
    return model.train()


def use(model, adapter):
    model.base_model.set_adapter(adapter)
    # PEFT freezes the others, which still wait for their backward.
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)


def both(model, batch):
    use(model, "first")
    loss = model(**batch).loss
    use(model, "second")
    return loss + 2 * model(**batch).loss


def rescaled(model, batch):
    use(model, "first")
    with rescale_adapter_scale(model, 0.5):
        return model(**batch).loss


def written_scale(model, batch):
    use(model, "first")
    loss = model(**batch).loss
    for module in model.modules():
        if hasattr(module, "lora_A"):
            module.set_scale("first", 3.0)
    return loss


def disabled(model, batch):
    use(model, "first")
    model.base_model.model.model.norm.weight.requires_grad_()
    for layer in model.base_model.model.model.layers:
        layer.input_layernorm.weight.requires_grad_()
    with model.disable_adapter():
        return model(**batch).loss


def gradients(model):
    return {name: value.grad for name, value in model.named_parameters() if value.grad is not None}


@pytest.mark.parametrize("is_fused", [False, True])
@pytest.mark.parametrize("policy", ["recompute", "offload"])
@pytest.mark.parametrize("run", [both, rescaled, written_scale, disabled], ids=lambda run: run.__name__)
def test_gradients_are_those_of_the_adapters_of_each_forward(run, policy, is_fused):
    batch = packed_batches(1)[0]
    found = []
    for chosen in ("keep", policy):
        model, patcher = two_adapters(), ModelPatcher()
        install_packed_training(model, patcher, checkpointing=OffloadCheckpointing(chosen))
        if is_fused:
            install_fused_layers(model, patcher)
        loss = run(model, batch)
        switches = [(module, module._active_adapter, module.scaling) for module in model.modules() if is_lora(module)]
        loss.backward()
        assert all(m._active_adapter == name and m.scaling is scaling for m, name, scaling in switches)
        found.append(gradients(model))
    kept, recomputed = found
    assert kept
    assert set(kept) == set(recomputed)
    for name, gradient in kept.items():
        assert torch.equal(recomputed[name], gradient), name


def is_lora(module):
    return hasattr(module, "lora_A") and bool(module.lora_A)


def test_tiles_are_recomputed_with_the_adapters_of_their_forward():
    batch = packed_batches(1)[0]
    found = []
    for policy, num_tiles in (("keep", 1), ("recompute", 2)):
        model = two_adapters()
        checkpointing = OffloadCheckpointing(policy, mlp_tiles=num_tiles)
        install_packed_training(model, ModelPatcher(), checkpointing=checkpointing)
        both(model, batch).backward()
        found.append(gradients(model))
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, msg=name)


def test_dropout_is_repeated_after_a_switch_to_evaluation():
    found = []
    for policy in ("keep", "recompute"):
        torch.manual_seed(0)
        model = tiny_llama()
        for layer in model.model.layers:
            layer.mlp.act_fn = nn.Sequential(nn.SiLU(), nn.Dropout(0.5))
        install_packed_training(model, ModelPatcher(), checkpointing=OffloadCheckpointing(policy))
        torch.manual_seed(1)
        loss = model(**packed_batches(1)[0]).loss
        model.eval()
        loss.backward()
        assert not any(module.training for module in model.modules())
        found.append(gradients(model))
    for name, gradient in found[0].items():
        assert torch.equal(found[1][name], gradient), name


def test_a_copy_switches_its_own_adapters():
    model = two_adapters()
    checkpointing = OffloadCheckpointing("recompute")
    install_packed_training(model, ModelPatcher(), checkpointing=checkpointing)
    segment = checkpointing.last_segments()[0]
    pickle.dumps(segment)
    layer, copied = copy.deepcopy((model.base_model.model.model.layers[0], segment))
    then = copied.switches.read()
    layer.self_attn.q_proj._active_adapter = ["second"]
    assert copied.switches.read() != then
    assert segment.switches.read() == then
