import contextlib

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from lightning_fastft.core.errors import UnsupportedModelError
from lightning_fastft.hf.families import (
    FAMILIES,
    check_servable,
    decoder_layers,
    find_causal_models,
    find_decoder,
)
from lightning_fastft.kernels.attention.op import BACKENDS
from tests.support.tiny_models import HYBRIDS, MISSING, TINY, VOCABULARY, build_tiny


def build_unallocated(model_type, **overrides):
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **overrides))


def test_every_claimed_family_has_a_tiny_model():
    tiny = {model_type for model_type, _ in (TINY | HYBRIDS).values()}
    assert tiny == set(FAMILIES) - MISSING, (
        "TINY and HYBRIDS of tests/support/tiny_models.py have the families of FAMILIES"
    )


def test_claimed_backends_exist():
    assert {backend for backends in FAMILIES.values() for backend in backends} == set(BACKENDS)


@pytest.mark.parametrize("name", list(TINY))
def test_tested_families_are_servable(name):
    model = build_tiny(name)
    check_servable(model)
    assert decoder_layers(model) == list(model.model.layers)
    assert len(decoder_layers(model)) == 2


@pytest.mark.parametrize(
    ("model_type", "overrides", "reason"),
    [
        ("falcon", {}, "attention interface"),
        ("bloom", {}, "attention interface"),
        ("mpt", {}, "attention interface"),
        ("gpt_neo", {}, "attention interface"),
        ("mamba", {}, "Mamba|linear_attention"),
        ("mamba2", {}, "Mamba|linear_attention"),
        ("zamba", {}, "hybrid|Mamba"),
        ("recurrent_gemma", {}, "Conv1d|linear_attention"),
        ("minimax", {}, "linear_attention|Lightning"),
        ("deepseek_v4", {}, "compressed"),
        ("whisper", {"is_encoder_decoder": False}, "loss of its own"),
        ("doge", {"num_hidden_layers": 1}, "mask of its own"),
        ("llama", {"is_causal": False, "num_hidden_layers": 1}, "not causal"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(model_type, overrides, reason):
    model = build_unallocated(model_type, **overrides)
    with pytest.raises(UnsupportedModelError, match=reason) as caught:
        check_servable(model)
    assert type(model).__name__ in str(caught.value)
    assert f"({model_type})" in str(caught.value)


def test_a_state_space_mixer_under_a_plain_configuration_is_refused():
    class MyMambaMixer(nn.Module):
        pass

    model = build_tiny("llama")
    model.model.layers[1].mixer = MyMambaMixer()
    with pytest.raises(UnsupportedModelError, match="MyMambaMixer carries state"):
        check_servable(model)


def test_a_convolution_over_tokens_is_refused():
    model = build_tiny("llama")
    model.model.layers[1].mixer = nn.Conv1d(4, 4, 3)
    with pytest.raises(UnsupportedModelError, match="Conv1d"):
        check_servable(model)


@pytest.mark.parametrize(
    ("family", "copied", "reason"),
    [
        ("qwen3", "0", r"copy of layers\.0 \(Qwen3DecoderLayer\).*target_modules instead \(down_proj, .*v_proj\)"),
        ("qwen3", "self_attn", r"copy of layers\.0\.self_attn .*\(k_proj, o_proj, q_proj, v_proj\)"),
        ("qwen3_next", "linear_attn", "Qwen3NextGatedDeltaNet"),
        ("falcon_h1", "mamba", "FalconH1Mixer"),
        ("lfm2", "conv", "Lfm2ShortConv"),
        ("qwen3_moe", "mlp", None),
        ("qwen3", "o_proj", None),
    ],
)
def test_trained_copies_of_attention_and_mixers_are_refused_by_name(family, copied, reason):
    lora = LoraConfig(r=2, target_modules=["lm_head"], modules_to_save=[copied])
    [(_, model)] = find_causal_models(get_peft_model(build_tiny(family), lora))
    with contextlib.nullcontext() if reason is None else pytest.raises(UnsupportedModelError, match=reason):
        check_servable(model)


def test_a_model_without_positions_is_refused():
    model = build_tiny("llama")
    model.model.forward = lambda input_ids: None
    with pytest.raises(UnsupportedModelError, match="takes no position_ids"):
        check_servable(model)


@pytest.mark.parametrize(
    "model_type", ["gpt2", "olmo3", "cohere2", "stablelm", "llama4_text", "deepseek_v32", "glm_moe_dsa"]
)
def test_families_on_the_interface_pass(model_type):
    check_servable(build_unallocated(model_type))


def test_the_decoder_of_a_model_that_names_itself_is_its_part_with_the_embedding():
    model = build_unallocated("llama4_text", num_hidden_layers=1)
    assert find_decoder(model) is model.model
    assert find_decoder(build_tiny("llama")).layers is not None


@pytest.mark.parametrize("model_type", ["qwen3_next", "kimi_linear", "falcon_h1", "jamba", "zamba2"])
def test_described_hybrids_of_their_default_sizes_pass(model_type):
    check_servable(build_unallocated(model_type))


def test_causal_models_are_found_inside_modules_and_adapters():
    class Holder(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = get_peft_model(build_tiny("llama"), LoraConfig(r=2, target_modules=["q_proj"]))
            self.more = nn.ModuleList([build_tiny("qwen3"), nn.Linear(2, 2)])

    holder = Holder()
    found = find_causal_models(holder)
    assert [name for name, _ in found] == ["first.base_model.model", "more.0"]
    assert [model for _, model in found] == [holder.get_submodule(name) for name, _ in found]
    check_servable(found[0][1])


def test_a_root_that_is_a_model_has_the_empty_name():
    model = build_tiny("llama")
    assert find_causal_models(model) == [("", model)]


def test_encoders_are_left_out():
    from transformers import BertConfig, BertModel

    config = BertConfig(
        vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    assert find_causal_models(nn.ModuleList([BertModel(config)])) == []
