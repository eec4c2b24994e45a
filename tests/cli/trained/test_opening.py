"""Models that ``fastft export --merge`` builds from a checkpoint: the base is the one of the run in every dtype."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from lightning_fastft.cli.command import main
from lightning_fastft.strategies.registry import register_strategies
from lightning_fastft.training.fine_tuner import FineTuner
from tests.support.tiny_models import build_tiny
from tests.support.training_parts import packed_loader, quiet_trainer
from tests.support.vision import build_processor, build_vision_model

register_strategies()

# NF4 takes rows that are a multiple of 64.
SIZES = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
LORA = {"r": 4, "target_modules": ["q_proj"]}


def train(tmp_path, model, **options):
    module = FineTuner(model, lora=LORA, learning_rate=2e-2, **options)
    trainer = quiet_trainer(tmp_path, strategy="fastft", max_steps=2)
    trainer.fit(module, packed_loader(2))
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    return module


def merge(tmp_path, *words):
    assert main(["export", str(tmp_path / "a.ckpt"), str(tmp_path / "out"), "--merge", *words]) == 0
    return AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")


@pytest.mark.slow
@pytest.mark.parametrize("run_dtype", ["bfloat16", "auto"])
@pytest.mark.parametrize("dtype", ["float32", "auto"])
def test_nf4_weights_of_another_dtype_are_those_of_the_run(run_dtype, dtype, tmp_path):
    import bitsandbytes as bnb

    # The files hold fp32, of which bf16 and fp32 give other codes.
    build_tiny("qwen3", **SIZES).save_pretrained(tmp_path / "base")
    module = train(tmp_path, str(tmp_path / "base"), quantization="nf4", dtype=run_dtype)
    merged = merge(tmp_path, "--dtype", dtype)
    assert merged.dtype is (torch.float32 if dtype == "float32" else torch.bfloat16)
    layer = module.model.base_model.model.model.layers[0]
    plain = layer.self_attn.k_proj.weight
    expected = bnb.functional.dequantize_4bit(plain.data, plain.quant_state)
    assert torch.equal(merged.model.layers[0].self_attn.k_proj.weight, expected.to(merged.dtype))
    adapted = layer.self_attn.q_proj
    b, a = adapted.lora_B["default"].weight, adapted.lora_A["default"].weight
    base = bnb.functional.dequantize_4bit(adapted.base_layer.weight.data, adapted.base_layer.weight.quant_state)
    torch.testing.assert_close(
        merged.model.layers[0].self_attn.q_proj.weight.float(),
        base.float() + adapted.scaling["default"] * (b @ a).float(),
        rtol=2 * torch.finfo(merged.dtype).eps,
        atol=torch.finfo(merged.dtype).eps * float(base.abs().max()),
    )


@pytest.mark.slow
def test_random_weights_of_another_dtype_are_those_of_the_run(tmp_path):
    config = build_tiny("qwen3", **SIZES).config.to_dict()
    module = train(tmp_path, config, init="random", dtype="float32")
    merged = merge(tmp_path, "--dtype", "bfloat16")
    drawn = module.model.get_base_model().model
    assert merged.dtype is torch.bfloat16
    assert torch.equal(merged.model.embed_tokens.weight, drawn.embed_tokens.weight.bfloat16())
    assert torch.equal(merged.model.layers[0].mlp.up_proj.weight, drawn.layers[0].mlp.up_proj.weight.bfloat16())


@pytest.mark.slow
def test_a_model_with_an_image_tower_is_merged_in_the_dtype_of_its_files(tmp_path):
    processor = build_processor("llava")
    build_vision_model("llava", processor.tokenizer).save_pretrained(tmp_path / "base")
    module = FineTuner(str(tmp_path / "base"), lora=LORA, dtype="float32")
    module.configure_model()
    module.save_pretrained(str(tmp_path / "adapters"))
    assert main(["export", str(tmp_path / "adapters"), str(tmp_path / "out"), "--merge"]) == 0
    merged = AutoModelForImageTextToText.from_pretrained(tmp_path / "out", dtype="auto")
    assert {parameter.dtype for parameter in merged.parameters()} == {torch.float32}
