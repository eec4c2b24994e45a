"""Folders that plain PEFT wrote are trained on here: with the embedding and head that PEFT adds to them."""

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from lightning_fastft.core.errors import DataError
from lightning_fastft.training.fine_tuner import FineTuner
from tests.support.tiny_models import build_tiny

IDS = torch.arange(3, 15).unsqueeze(0)


@pytest.fixture(params=[False, True], ids=["untied", "tied"])
def base(request, tmp_path):
    build_tiny("qwen3", tie_word_embeddings=request.param).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def save_with_peft(base, folder, *, target, dtype=torch.float32, change=None):
    """Adapters of plain PEFT, which adds the base's own weight because the embedding or the head is adapted."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=dtype)
    lora = LoraConfig(r=2, target_modules=["q_proj", target], init_lora_weights=False, task_type="CAUSAL_LM")
    adapted = get_peft_model(model, lora)
    if change is not None:
        with torch.no_grad():
            model.get_input_embeddings().weight[3] += change
    adapted.save_pretrained(folder, save_embedding_layers=True)
    assert any("base_layer" in name for name in load_file(folder / "adapter_model.safetensors"))


def logits(model):
    with torch.no_grad():
        return model.eval()(input_ids=IDS, use_cache=False).logits


@pytest.mark.parametrize("target", ["embed_tokens", "lm_head"])
@pytest.mark.parametrize("option", ["adapter", "frozen_adapters"])
@pytest.mark.filterwarnings("ignore:Model .*tie_word_embeddings")
def test_adapters_with_the_base_weights_of_peft_are_trained_on(option, target, base, tmp_path):
    save_with_peft(base, tmp_path / "adapters", target=target)
    folder = str(tmp_path / "adapters")
    given = {"adapter": folder} if option == "adapter" else {option: [folder], "lora": {"r": 2}}
    module = FineTuner(str(base), dtype="float32", **given)
    module.configure_model()
    stock = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder)
    torch.testing.assert_close(logits(module.model), logits(stock))
    assert not any(
        parameter.requires_grad for name, parameter in module.model.named_parameters() if "base_layer" in name
    )


@pytest.mark.filterwarnings("ignore:Model .*tie_word_embeddings")
def test_base_weights_in_another_dtype_are_those_of_the_base(base, tmp_path):
    save_with_peft(base, tmp_path / "adapters", target="embed_tokens", dtype=torch.bfloat16)
    FineTuner(str(base), adapter=str(tmp_path / "adapters"), dtype="float32").configure_model()


@pytest.mark.filterwarnings("ignore:Model .*tie_word_embeddings")
def test_base_weights_of_another_base_are_refused(base, tmp_path):
    save_with_peft(base, tmp_path / "adapters", target="embed_tokens", change=0.5)
    with pytest.raises(DataError, match=r"embed_tokens.*save_embedding_layers=False"):
        FineTuner(str(base), adapter=str(tmp_path / "adapters"), dtype="float32").configure_model()
