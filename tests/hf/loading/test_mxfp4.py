"""Checkpoints with experts in MXFP4, as gpt-oss has them, are read dequantised and can be trained."""

import json

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from lightning_fastft.core.patcher import ModelPatcher
from lightning_fastft.hf.loading.model import build_model
from lightning_fastft.hf.loading.source import ModelSource
from lightning_fastft.moe.install import install_bincount_router

CPU = torch.device("cpu")
# Values of four bits (OCP Microscaling formats, E2M1).
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
VALUES = torch.tensor([*MAGNITUDES, *(-value for value in MAGNITUDES)])
STACKS = ("gate_up_proj", "down_proj")


@pytest.fixture
def checkpoint(tmp_path):
    """A folder, and the expert weights in it as plain numbers."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "gpt_oss",
        vocab_size=64,
        hidden_size=64,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=8,
        max_position_embeddings=128,
    )
    tensors, expected = {}, {}
    for name, tensor in AutoModelForCausalLM.from_config(config).bfloat16().state_dict().items():
        if not name.endswith(STACKS):
            tensors[name] = tensor.contiguous()
            continue
        num_experts, num_inputs, num_outputs = tensor.shape
        blocks = torch.randint(0, 256, (num_experts, num_outputs, num_inputs // 32, 16), dtype=torch.uint8)
        scales = torch.randint(118, 124, blocks.shape[:-1], dtype=torch.uint8)
        tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = blocks, scales
        numbers = VALUES[torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(-2).long()] * 2.0 ** (
            scales[..., None].float() - 127
        )
        expected[name] = numbers.flatten(-2).transpose(1, 2)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    content = {**config.to_dict(), "architectures": ["GptOssForCausalLM"], "dtype": "bfloat16"}
    content["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": kept}
    (tmp_path / "config.json").write_text(json.dumps(content))
    return tmp_path, expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_are_read_dequantised_in_the_dtype_asked_for(checkpoint, dtype):
    folder, expected = checkpoint
    model = build_model(ModelSource(str(folder)), device=CPU, dtype=dtype)
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    for name, numbers in expected.items():
        assert torch.equal(model.get_parameter(name).float(), numbers), name


def test_every_expert_can_be_trained(checkpoint):
    model = build_model(ModelSource(str(checkpoint[0])), device=CPU, dtype=torch.float32)
    install_bincount_router(model, ModelPatcher())
    token_BT = torch.arange(40).view(1, -1)
    model(input_ids=token_BT, labels=token_BT).loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and torch.isfinite(parameter.grad).all(), name  # noqa: PT018 - one statement per name
        assert parameter.grad.abs().sum() > 0 or not name.endswith(STACKS), name


def test_nf4_is_that_of_the_dequantised_weights(checkpoint, tmp_path):
    folder = str(checkpoint[0])
    build_model(ModelSource(folder), device=CPU, dtype=torch.bfloat16).save_pretrained(tmp_path / "dense")
    model, dense = (
        build_model(ModelSource(name), device=CPU, dtype=torch.bfloat16, quantization="nf4").state_dict()
        for name in (folder, str(tmp_path / "dense"))
    )
    assert model.keys() == dense.keys()
    for name, tensor in model.items():
        assert torch.equal(tensor, dense[name]), name
