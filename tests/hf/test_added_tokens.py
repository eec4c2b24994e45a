"""Adapters of a base that got rows for added tokens in memory hold these rows, for stock PEFT and for this package."""

import pytest
import torch
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from benchmarks.model_types import build_model
from lightning_fastft.core.errors import UnsupportedModelError
from lightning_fastft.hf import export
from lightning_fastft.hf.lora import add_adapters
from lightning_fastft.training.fine_tuner import FineTuner
from tests.support.tiny_models import VOCABULARY, build_tiny
from tests.support.two_ranks import run_two_ranks

NEW = [VOCABULARY, VOCABULARY + 1, VOCABULARY + 2]
KINDS = {
    "layers": {},
    "tokens": {"trainable_token_indices": {"embed_tokens": NEW}},
    "copies": {"modules_to_save": ["embed_tokens"]},
    "embedding": {"target_modules": ["q_proj", "embed_tokens"]},
    "head": {"target_modules": ["q_proj", "lm_head"]},
}


def resized(folder, *, seed):
    """The base of a folder with rows for new tokens and for padding to a multiple of 8, whose values follow the seed."""
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    base.resize_token_embeddings(VOCABULARY + 3, pad_to_multiple_of=8, mean_resizing=False)
    torch.manual_seed(seed)
    with torch.no_grad():
        for layer in (base.get_input_embeddings(), base.get_output_embeddings()):
            layer.weight[VOCABULARY:].normal_(std=0.15)
    return base


def adapted(folder, **lora):
    config = LoraConfig(**{"r": 2, "target_modules": ["q_proj"], "init_lora_weights": False, **lora})
    return add_adapters(resized(folder, seed=1), lora=config, adapter_dtype=torch.float32).eval()


def logits(model):
    with torch.no_grad():
        return model.eval()(input_ids=torch.tensor([[3, *NEW, 5]]), use_cache=False).logits


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def folder(request, tmp_path):
    build_tiny("qwen3", tie_word_embeddings=request.param).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", ["save", "export"])
def test_rows_of_added_tokens_are_saved_with_the_adapters(way, kind, folder, tmp_path):
    model = adapted(folder, **KINDS[kind])
    trained = logits(model)
    if way == "save":
        export.save_adapters(model, tmp_path / "out")
    else:
        export.export_adapters(model, tmp_path / "out", tokenizer=None)
    again = PeftModel.from_pretrained(resized(folder, seed=2), str(tmp_path / "out"))
    assert torch.equal(logits(again), trained)
    # Without the rows stock PEFT must not load them silently.
    with pytest.raises((RuntimeError, IndexError)):
        PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), str(tmp_path / "out"))


def test_training_continues_from_adapters_with_rows_of_added_tokens(folder, tmp_path):
    model = adapted(folder)
    export.save_adapters(model, tmp_path / "out")
    tuner = FineTuner(resized(folder, seed=2), adapter=str(tmp_path / "out"))
    tuner.configure_model()
    assert torch.equal(logits(tuner.model), logits(model))


@pytest.mark.parametrize("family", ["qwen3", "mllama"])
def test_adapters_of_the_rows_on_disk_hold_no_embedding(family, tmp_path):
    """The embedding of mllama has rows for images behind its vocabulary."""
    model = build_tiny(family) if family == "qwen3" else build_model(family)
    model.save_pretrained(tmp_path / "base")
    base = type(model).from_pretrained(tmp_path / "base")
    export.save_adapters(
        add_adapters(base, lora=LoraConfig(r=2, target_modules=["q_proj"]), adapter_dtype=torch.float32),
        tmp_path / "out",
    )
    assert all("lora_" in name for name in load_file(tmp_path / "out" / "adapter_model.safetensors"))


def test_resized_head_that_pissa_has_changed_is_refused(tmp_path):
    build_tiny("qwen3", tie_word_embeddings=False).save_pretrained(tmp_path / "base")
    tuner = FineTuner(
        resized(tmp_path / "base", seed=1), lora={"r": 2, "target_modules": ["lm_head"], "init_lora_weights": "pissa"}
    )
    tuner.configure_model()
    with pytest.raises(UnsupportedModelError, match="resized"):
        tuner.save_pretrained(str(tmp_path / "out"))


def test_rows_of_added_tokens_are_saved_on_two_ranks(tmp_path):
    build_tiny("qwen3", tie_word_embeddings=False).save_pretrained(tmp_path / "base")
    run_two_ranks("tests.hf.added_tokens_worker", tmp_path)
    found = torch.load(tmp_path / "found.pt")
    assert len(found) == 4
    for case, (trained, again) in found.items():
        torch.testing.assert_close(again, trained, msg=str(case))
