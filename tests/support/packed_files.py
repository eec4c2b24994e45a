"""Checkpoints in formats of few bits, written as their publishers write them."""

import json

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

BLOCK = 32
TINY = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
FAMILIES = {"qwen3": {}, "qwen3_moe": EXPERTS}
# Values of four bits (OCP Microscaling formats, E2M1).
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
VALUES = torch.tensor([*MAGNITUDES, *(-value for value in MAGNITUDES)])
STACKS = ("gate_up_proj", "down_proj")


def quantise(weight):
    """Return a weight (N, K) in fp8, the scales of its blocks, and the numbers that both mean in fp32."""
    num_rows, num_columns = (-(-size // BLOCK) for size in weight.shape)
    padded = torch.zeros(num_rows * BLOCK, num_columns * BLOCK)
    padded[: weight.shape[0], : weight.shape[1]] = weight.float()
    blocks = padded.view(num_rows, BLOCK, num_columns, BLOCK)
    scales = blocks.abs().amax(dim=(1, 3), keepdim=True) / 448
    quantised = (blocks / scales).to(torch.float8_e4m3fn)
    numbers = (quantised.float() * scales).view_as(padded)[: weight.shape[0], : weight.shape[1]]
    fp8 = quantised.view(torch.uint8).view_as(padded)[: weight.shape[0], : weight.shape[1]].contiguous()
    return fp8.view(torch.float8_e4m3fn), scales.view(num_rows, num_columns), numbers


def write_fp8(folder, family, **changes):
    """Write a checkpoint in fp8, and one in fp32 with the same numbers."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **{**TINY, **FAMILIES[family], **changes}))
    model.save_pretrained(folder / "dense")
    tensors, numbers = {}, {}
    for name, tensor in load_file(folder / "dense/model.safetensors").items():
        if name.endswith("proj.weight"):
            tensors[name], tensors[f"{name}_scale_inv"], numbers[name] = quantise(tensor)
        else:
            tensors[name] = tensor.bfloat16()
            numbers[name] = tensors[name].float()
    save_file(
        {name: value.contiguous() for name, value in numbers.items()},
        folder / "dense/model.safetensors",
        metadata={"format": "pt"},
    )
    (folder / "fp8").mkdir()
    save_file(tensors, folder / "fp8/model.safetensors", metadata={"format": "pt"})
    content = {**json.loads((folder / "dense/config.json").read_text()), "dtype": "bfloat16"}
    content["quantization_config"] = {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK],
    }  # fmt: skip
    (folder / "fp8/config.json").write_text(json.dumps(content))


def write_mxfp4(folder):
    """Write a checkpoint of gpt-oss with experts in MXFP4, and return their numbers by name."""
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
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    content = {**config.to_dict(), "architectures": ["GptOssForCausalLM"], "dtype": "bfloat16"}
    content["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": kept}
    (folder / "config.json").write_text(json.dumps(content))
    return expected
