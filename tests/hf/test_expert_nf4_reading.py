"""Checkpoints come with experts in NF4, one dense stack at a time, and look like any model that bitsandbytes
quantised.
"""

from unittest import mock

import bitsandbytes as bnb
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from transformers.utils.quantization_config import QuantizationMethod

from lightning_fastft.core.errors import UnsupportedModelError
from lightning_fastft.hf import expert_nf4_reading
from lightning_fastft.hf.expert_nf4 import BUFFER_ATTRIBUTE, quantise_experts
from lightning_fastft.hf.expert_nf4_reading import quantise_experts_too
from lightning_fastft.hf.expert_nf4_tensor import ExpertsNF4
from tests.hf.test_expert_nf4 import assert_equal_stacks, quantised, stacks_of
from tests.support.tiny_models import build_tiny


def nf4():
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )


def read(folder, config, dtype=torch.float32):
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, device_map={"": "cpu"}, quantization_config=config, output_loading_info=True
    )


@pytest.mark.covering
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "mixtral", "deepseek_v3"])
def test_what_is_read_equals_what_is_quantised_later(family, dtype, tmp_path):
    build_tiny(family, hidden_size=64).save_pretrained(tmp_path)
    ours, report = read(tmp_path, quantise_experts_too(nf4()), dtype)
    theirs, _ = read(tmp_path, nf4(), dtype)
    assert not any(report.values())
    assert len(stacks_of(ours)) >= 2
    assert not stacks_of(theirs)
    quantise_experts(theirs)
    assert_equal_stacks(ours, theirs)
    linear = {
        name: parameter for name, parameter in theirs.named_parameters() if isinstance(parameter, bnb.nn.Params4bit)
    }
    assert linear
    for name, parameter in ours.named_parameters():
        expected = theirs.get_parameter(name)
        assert type(parameter) is type(expected), name
        assert isinstance(parameter, ExpertsNF4) or torch.equal(parameter.data, expected.data), name
    ids = torch.arange(3, 12)[None]
    assert torch.equal(ours.train()(input_ids=ids).logits, theirs.train()(input_ids=ids).logits)


def test_each_stack_is_quantised_before_the_next_is_there(tmp_path):
    build_tiny("qwen3_moe", hidden_size=64).save_pretrained(tmp_path)
    dense = []

    def counted(weight):
        dense.append(weight)
        return quantise(weight)

    quantise = expert_nf4_reading.quantise_stack
    with mock.patch.object(expert_nf4_reading, "quantise_stack", counted):
        model, _ = read(tmp_path, quantise_experts_too(nf4()))
    assert sorted(tuple(weight.shape) for weight in dense) == sorted(
        tuple(stack.shape) for stack in stacks_of(model).values()
    )
    assert (
        len({id(vars(module)[BUFFER_ATTRIBUTE]) for module in model.modules() if BUFFER_ATTRIBUTE in vars(module)}) == 1
    )


def test_the_model_says_bitsandbytes(tmp_path):
    build_tiny("qwen3_moe", hidden_size=64).save_pretrained(tmp_path)
    config = nf4()
    model, _ = read(tmp_path, quantise_experts_too(config))
    assert config.quant_method == QuantizationMethod.BITS_AND_BYTES
    assert (
        model.quantization_method == model.config.quantization_config.quant_method == QuantizationMethod.BITS_AND_BYTES
    )
    assert model.is_loaded_in_4bit
    assert model.hf_quantizer.is_trainable
    with pytest.raises(ValueError, match="dtype"):
        model.to(torch.float16)


def test_dense_models_are_read_as_before(tmp_path):
    build_tiny("qwen3", hidden_size=64).save_pretrained(tmp_path)
    ours, report = read(tmp_path, quantise_experts_too(nf4()))
    assert not any(report.values())
    assert not stacks_of(ours)
    assert any(isinstance(parameter, bnb.nn.Params4bit) for parameter in ours.parameters())


def test_sizes_that_are_no_multiple_of_a_block_are_refused(tmp_path):
    build_tiny("qwen3_moe", moe_intermediate_size=25).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match=r"Qwen3MoeExperts\.down_proj has 32 x 25 = 800 weights"):
        read(tmp_path, quantise_experts_too(nf4()))


def test_quantised_stacks_are_parameters(tmp_path):
    build_tiny("qwen3_moe", hidden_size=64).save_pretrained(tmp_path)
    model, _ = read(tmp_path, quantise_experts_too(nf4()))
    assert all(isinstance(stack, nn.Parameter) and not stack.requires_grad for stack in stacks_of(model).values())
    assert quantised().state_dict().keys() >= {"model.layers.0.mlp.experts.down_proj.absmax"}
    assert "model.layers.0.mlp.experts.down_proj.absmax" in model.state_dict()
