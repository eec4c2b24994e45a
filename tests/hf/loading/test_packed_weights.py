"""Checkpoints with weights in fp8, as DeepSeek, Qwen and MiniMax publish them, are read dequantised."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.quantizers import AutoHfQuantizer

from lightning_fastft.core.errors import DataError, MissingDependencyError, UnsupportedModelError
from lightning_fastft.core.patcher import ModelPatcher
from lightning_fastft.hf.loading.model import build_model
from lightning_fastft.hf.loading.source import ModelSource
from lightning_fastft.patches.packed import install_packed_training

CPU = torch.device("cpu")
BLOCK = 32
TINY = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
FAMILIES = {"qwen3": {}, "qwen3_moe": EXPERTS}


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


def write(folder, family, **changes):
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


def build(folder, **options):
    return build_model(ModelSource(str(folder)), device=CPU, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_weights_in_fp8_are_read_dequantised_in_the_dtype_asked_for(tmp_path, family, dtype):
    write(tmp_path, family)
    model, dense = build(tmp_path / "fp8", dtype=dtype), build(tmp_path / "dense", dtype=dtype)
    assert not hasattr(model.config, "quantization_config")
    expected = dict(dense.named_parameters())
    for name, parameter in model.named_parameters():
        assert parameter.dtype is dtype
        assert torch.equal(parameter, expected[name]), name


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_nf4_is_that_of_the_dequantised_weights(tmp_path, family):
    write(tmp_path, family)
    options = {"dtype": torch.bfloat16, "quantization": "nf4"}
    model, dense = build(tmp_path / "fp8", **options), build(tmp_path / "dense", **options)
    expected = dense.state_dict()
    assert model.state_dict().keys() == expected.keys()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_model_that_was_read_dequantised_is_saved_dense(tmp_path, family):
    write(tmp_path, family)
    model = build(tmp_path / "fp8", dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "saved")
    assert "quantization_config" not in json.loads((tmp_path / "saved/config.json").read_text())
    names = load_file(tmp_path / "saved/model.safetensors").keys()
    assert names == load_file(tmp_path / "dense/model.safetensors").keys()
    saved = build(tmp_path / "saved", dtype=torch.bfloat16).state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, saved[name]), name


def test_a_smaller_last_block_is_refused(tmp_path):
    # transformers would read two blocks of 24 rows.
    write(tmp_path, "qwen3", head_dim=12)
    with pytest.raises(UnsupportedModelError, match=r"o_proj.weight of shape \(64, 48\).*Give a checkpoint.*bf16"):
        build(tmp_path / "fp8", dtype=torch.bfloat16)


@pytest.mark.parametrize(("scales", "message"), [(None, "no scales"), (torch.ones(1, 1), "do not fit")])
def test_scales_that_do_not_fit_are_refused(tmp_path, scales, message):
    write(tmp_path, "qwen3")
    path = tmp_path / "fp8/model.safetensors"
    tensors = load_file(path)
    name = "model.layers.1.mlp.up_proj.weight_scale_inv"
    tensors.pop(name)
    save_file(tensors if scales is None else {**tensors, name: scales}, path, metadata={"format": "pt"})
    with pytest.raises(DataError, match=f"up_proj.*{message}"):
        build(tmp_path / "fp8", dtype=torch.bfloat16)


def test_training_over_a_format_without_a_backward_is_refused():
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **TINY))
    model.hf_quantizer = AutoHfQuantizer.from_config({"quant_method": "mxfp4"})
    with pytest.raises(UnsupportedModelError, match=r"quantised by mxfp4.*FineTuner, which dequantises"):
        install_packed_training(nn.ModuleDict({"model": model}), ModelPatcher())
    # A teacher is not trained.
    model.requires_grad_(requires_grad=False)
    install_packed_training(nn.ModuleDict({"model": model}), ModelPatcher())


def test_a_format_that_needs_a_package_names_it_and_the_other_way(tmp_path):
    write(tmp_path, "qwen3")
    path = tmp_path / "fp8/config.json"
    content = {**json.loads(path.read_text()), "quantization_config": {"quant_method": "gptq", "bits": 4}}
    path.write_text(json.dumps(content))
    with pytest.raises(MissingDependencyError, match=r"quantised by gptq.*quantization='nf4' for 4 bits"):
        build(tmp_path / "fp8", dtype=torch.bfloat16)
