"""Products of a fused layer that are kept between calls: every change of what they were read from is seen."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from lightning_fastft.core.patcher import ModelPatcher
from lightning_fastft.fused.install import install_fused_layers
from lightning_fastft.fused.layer_parts import find_parts
from lightning_fastft.fused.low_precision_adapters import install_low_precision_adapters
from tests.support.layer_pairs import build, layers_of, make_pair
from tests.support.packs import relative_error

IDS = torch.arange(3, 12)[None]


def make_model():
    """A fused model in bf16 whose fp32 adapters have low-precision copies."""
    fused, _ = make_pair(build("llama", "lora").bfloat16())
    for name, parameter in fused.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.float()
    install_low_precision_adapters(fused, ModelPatcher(), compute_dtype=torch.bfloat16)
    return fused.train()


def logits_of(model):
    with torch.no_grad():
        return model(input_ids=IDS, use_cache=False).logits


def projection(model):
    return layers_of(model)[0].self_attn.q_proj


def linear(model, name):
    return projection(model)._modules[name]["default"]


def write_master(model):
    with torch.no_grad():
        linear(model, "lora_B").weight.add_(0.5)


def replace_master(model):
    old = linear(model, "lora_B").weight
    linear(model, "lora_B").weight = nn.Parameter(old.detach() + 0.5)


def move_master(model):
    linear(model, "lora_B").weight.data = linear(model, "lora_B").weight.data + 0.5


def rescale(model):
    projection(model).scaling["default"] *= 3.0


def write_base(model):
    projection(model).base_layer.weight.data.mul_(2.0)


def replace_base(model):
    base = projection(model).base_layer
    base.weight = nn.Parameter(base.weight.detach() * 2.0, requires_grad=False)


def add_bias(model):
    projection(model).base_layer.bias = nn.Parameter(torch.ones(projection(model).out_features, dtype=torch.bfloat16))


def double(module, inputs, output):
    return output * 2.0


def drop_all(model):
    projection(model).lora_dropout["default"] = nn.Dropout(1.0)


def replace_forward(model):
    base = projection(model).base_layer
    base.forward = lambda x: nn.functional.linear(x, base.weight * 2.0)


class Doubled(nn.Linear):
    def forward(self, x):
        return 2.0 * super().forward(x)


def change_class(model):
    projection(model).base_layer.__class__ = Doubled


def unwrap(model):
    layers_of(model)[0].self_attn.q_proj = projection(model).base_layer


def disable_one(model):
    projection(model)._disable_adapters = True


def activate_another(model):
    model.add_adapter("other", model.peft_config["default"])
    model.set_adapter("other")
    for name, parameter in model.named_parameters():
        if "lora_B.other" in name:
            parameter.data = torch.full_like(parameter, 0.1, dtype=torch.float32)
        elif "lora_A.other" in name:
            parameter.data = parameter.data.float()


CHANGES = {
    "a write to a master": write_master,
    "another master": replace_master,
    "a master in other memory": move_master,
    "another scale": rescale,
    "adapters disabled": lambda model: model.disable_adapter_layers(),
    "one adapter disabled": disable_one,
    "adapters merged": lambda model: model.merge_adapter(),
    "another active adapter": activate_another,
    "a write to a base weight": write_base,
    "another base weight": replace_base,
    "a bias": add_bias,
    "a hook on the base": lambda model: projection(model).base_layer.register_forward_hook(double),
    "a hook on A": lambda model: linear(model, "lora_A").register_forward_hook(double),
    "a hook on a norm": lambda model: layers_of(model)[0].input_layernorm.register_forward_hook(double),
    "another forward of the base": replace_forward,
    "another class of the base": change_class,
    "dropout": drop_all,
    "no adapter": unwrap,
    "another dtype": lambda model: model.float(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_between_two_calls_is_seen(change):
    model = make_model()
    before = logits_of(model)
    layer = layers_of(model)[0]
    assert find_parts(layer, dtype=torch.bfloat16) is find_parts(layer, dtype=torch.bfloat16)
    CHANGES[change](model)
    # A copy has kept nothing.
    expected = logits_of(copy.deepcopy(model))
    found = logits_of(model)
    assert torch.equal(found, expected)
    assert not torch.equal(found.float(), before.float())


@pytest.mark.parametrize("name", ["input_layernorm", "layernorm"])
@pytest.mark.parametrize("change", ["disabled", "another adapter", "a hook on the copy"])
def test_norms_that_an_adapter_trains_are_read_again_in_layers_without_projections_of_it(name, change):
    lora = LoraConfig(r=4, target_modules=["q_proj"], layers_to_transform=[0], modules_to_save=[name])
    model = get_peft_model(build("llama", "full"), lora)
    model.add_adapter("other", lora)
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if "modules_to_save.default" in path:
                parameter.mul_(3.0)
    fused, plain = make_pair(model.eval())
    assert relative_error(logits_of(fused), before := logits_of(plain)) < 1e-5
    for each in (fused, plain):
        if change == "disabled":
            each.disable_adapter_layers()
        elif change == "another adapter":
            each.set_adapter("other")
        else:
            layers_of(each)[1].input_layernorm.modules_to_save["default"].register_forward_hook(double)
    expected = logits_of(plain)
    assert relative_error(expected, before) > 1e-2
    assert relative_error(logits_of(fused), expected) < 1e-5


def test_attention_whose_copy_is_trained_is_refused():
    lora = LoraConfig(r=4, target_modules=["gate_proj"], modules_to_save=["self_attn"])
    (status,) = install_fused_layers(get_peft_model(build("llama", "full"), lora), ModelPatcher())
    assert status.state == "refused"
    assert "modules_to_save" in status.reason


def test_a_weight_that_is_trained_from_now_on_gets_its_gradient_and_must_not_be_written_before():
    model = make_model()
    batch = {"input_ids": IDS, "labels": IDS, "use_cache": False}
    model(**batch).loss.backward()
    weight = projection(model).base_layer.weight
    assert weight.grad is None
    weight.requires_grad_()
    model(**batch).loss.backward()
    assert weight.grad.abs().sum() > 0
    loss = model(**batch).loss
    with torch.no_grad():
        weight.add_(1.0)
    with pytest.raises(RuntimeError, match="inplace operation"):
        loss.backward()


def test_copies_that_one_product_reads_are_in_one_memory_that_follows_their_masters():
    model = make_model()
    layer = layers_of(model)[0]
    addresses = set()
    for _ in range(2):
        write_master(model)
        logits_of(model)
        parts = find_parts(layer, dtype=torch.bfloat16)
        joint_RI = parts.qkv.concatenated_a()
        names = ("q_proj", "k_proj", "v_proj")
        masters = [layer.self_attn._modules[name].lora_A["default"].weight for name in names]
        assert torch.equal(joint_RI, torch.cat(masters).bfloat16())
        assert joint_RI.data_ptr() == parts.qkv.parts[0].copy_a_RI.data_ptr()
        addresses.add(joint_RI.data_ptr())
        with torch.no_grad():
            masters[1].add_(1.0)
    assert len(addresses) == 1


@pytest.mark.parametrize("change", ["a share", "training"])
def test_a_dropout_that_begins_to_draw_is_seen(change):
    model = make_model().train(change != "training")
    dropout = nn.Dropout(1.0 if change == "training" else 0.0).train(model.training)
    projection(model).lora_dropout["default"] = dropout
    before = logits_of(model)
    layer = layers_of(model)[0]
    assert find_parts(layer, dtype=torch.bfloat16) is find_parts(layer, dtype=torch.bfloat16)
    dropout.p = 1.0
    model.train()
    expected = logits_of(copy.deepcopy(model))
    found = logits_of(model)
    assert torch.equal(found, expected)
    assert not torch.equal(found.float(), before.float())
