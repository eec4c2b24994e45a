"""LoRA from plain values: on every linear layer unless told otherwise, in the dtype asked for, equal after equal
seeds.
"""

import json

import pytest
import torch
from peft import LoraConfig
from torch import nn

from lightning_fastft.core.errors import OptionError
from lightning_fastft.hf.lora import add_adapters, describe_lora, parse_lora, to_plain
from tests.hf.loading.test_model import CONFIG, random_model


@pytest.mark.covering
@pytest.mark.parametrize("base_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("adapter_dtype", [torch.float32, torch.bfloat16])
def test_adapters_are_on_every_linear_layer_in_the_dtype_asked_for(base_dtype, adapter_dtype):
    model = random_model(dtype=base_dtype)
    linear = {name for name, module in model.named_modules() if isinstance(module, nn.Linear) and name != "lm_head"}
    adapted = add_adapters(model, lora=LoraConfig(r=4), adapter_dtype=adapter_dtype)
    trained = {name: parameter for name, parameter in adapted.named_parameters() if parameter.requires_grad}
    assert {name.removeprefix("base_model.model.").split(".lora_")[0] for name in trained} == linear
    assert {parameter.dtype for parameter in trained.values()} == {adapter_dtype}
    assert {parameter.dtype for parameter in adapted.parameters() if not parameter.requires_grad} == {base_dtype}


def test_adapters_follow_their_seed_and_keep_targets_and_configuration():
    lora = LoraConfig(r=4, target_modules=["q_proj"])
    weights = []
    for seed in (1, 1, 2):
        torch.manual_seed(len(weights))
        adapted = add_adapters(random_model(), lora=lora, adapter_dtype=torch.float32, seed=seed)
        weights.append({name: value for name, value in adapted.named_parameters() if value.requires_grad})
    assert all("q_proj" in name for name in weights[0])
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert not all(torch.equal(weights[0][name], weights[2][name]) for name in weights[0])
    assert lora.task_type is None
    assert adapted.peft_config["default"].task_type == "CAUSAL_LM"


def test_adapters_are_the_same_under_any_default_device():
    """Lightning's strategies build a model under default devices of their own, some on the GPU and some on the host."""
    weights = []
    for device in ("cpu", "meta"):
        model = random_model()
        with torch.device(device):
            adapted = add_adapters(
                model, lora=LoraConfig(r=4, init_lora_weights=False), adapter_dtype=torch.float32, seed=1
            )
        weights.append({name: value for name, value in adapted.named_parameters() if value.requires_grad})
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_lora_that_fits_nothing_or_is_misspelt_is_refused():
    with pytest.raises(OptionError, match="no_such_layer"):
        add_adapters(random_model(), lora=LoraConfig(target_modules=["no_such_layer"]), adapter_dtype=torch.float32)
    with pytest.raises(OptionError, match="mostly r, lora_alpha") as refusal:
        parse_lora({"rank": 4})
    assert str(refusal.value).splitlines()[:2] == ["lora has the unknown fields ['rank'].", "Did you mean r?"]
    assert max(map(len, str(refusal.value).splitlines())) <= 150
    with pytest.raises(OptionError, match="rejected by PEFT"):
        parse_lora({"r": 4, "layers_pattern": "layers"})
    for lora in ({"lora_alpha": 0}, LoraConfig(lora_alpha=0)):
        with pytest.raises(OptionError, match="lora_alpha must be above 0"):
            parse_lora(lora)


def test_described_lora_is_plain_and_gives_the_same_configuration():
    lora = LoraConfig(r=3, target_modules=["v_proj", "q_proj"], rank_pattern={"q_proj": 2}, use_rslora=True)
    plain = describe_lora(lora)
    assert json.loads(json.dumps(plain)) == plain
    assert parse_lora(plain).to_dict() == lora.to_dict()
    assert to_plain({1: (torch.float32, {3, 2}, None)}) == {"1": ["torch.float32", [2, 3], None]}


@pytest.mark.parametrize(
    ("excluded", "told"), [(["q_prj"], "nearest: .*q_proj"), ("q_proj", r"Write a list, \[q_proj\]")]
)
def test_exclusions_that_exclude_nothing_are_refused(excluded, told):
    for lora in (
        LoraConfig(exclude_modules=excluded),
        LoraConfig(target_modules="all-linear", exclude_modules=excluded),
    ):
        with pytest.raises(OptionError, match=f"exclude_modules.*{told}"):
            add_adapters(random_model(), lora=lora, adapter_dtype=torch.float32)
    found = add_adapters(
        random_model(), lora=LoraConfig(target_modules="all-linear", exclude_modules=["q_proj"]),
        adapter_dtype=torch.float32,
    )  # fmt: skip
    assert not any("q_proj.lora_A" in name for name, _ in found.named_parameters())
    assert any("k_proj.lora_A" in name for name, _ in found.named_parameters())


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")
def test_tokens_of_a_tied_head_that_is_copied_are_refused():
    def adapt(**config):
        lora = LoraConfig(
            target_modules=["q_proj"], modules_to_save=["lm_head"], trainable_token_indices={"embed_tokens": [3, 5]}
        )
        return add_adapters(random_model({**CONFIG, **config}), lora=lora, adapter_dtype=torch.float32)

    with pytest.raises(OptionError, match=r"copy of lm_head .* replace trainable_token_indices"):
        adapt(tie_word_embeddings=True)
    adapt(tie_word_embeddings=False)(input_ids=torch.arange(3, 9)[None])
