"""Checkpoints with weights in fp8, as Qwen and MiniMax publish them, are read dequantised."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM
from transformers.quantizers import AutoHfQuantizer

from lightning_fastft.core.errors import DataError, MissingDependencyError, UnsupportedModelError
from lightning_fastft.core.patcher import ModelPatcher
from lightning_fastft.hf.loading.model import build_model
from lightning_fastft.hf.loading.source import ModelSource
from lightning_fastft.patches.packed import install_packed_training
from tests.support.packed_files import FAMILIES, TINY, write_fp8
from tests.support.tiny_models import build_tiny

CPU = torch.device("cpu")


def build(folder, **options):
    return build_model(ModelSource(str(folder)), device=CPU, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_weights_in_fp8_are_read_dequantised_in_the_dtype_asked_for(tmp_path, family, dtype):
    write_fp8(tmp_path, family)
    model, dense = build(tmp_path / "fp8", dtype=dtype), build(tmp_path / "dense", dtype=dtype)
    assert not hasattr(model.config, "quantization_config")
    expected = dict(dense.named_parameters())
    for name, parameter in model.named_parameters():
        assert parameter.dtype is dtype
        assert torch.equal(parameter, expected[name]), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", [name for name in ("bailing_hybrid", "mixtral") if name in CONFIG_MAPPING])
def test_other_tensors_have_the_dtypes_of_dense_files(tmp_path, family, dtype):
    # Convolutions in three axes that stay in fp32, and routers that transformers renames.
    build_tiny(family).bfloat16().save_pretrained(tmp_path)
    expected = {name: tensor.dtype for name, tensor in build(tmp_path, dtype=dtype).state_dict().items()}
    content = json.loads((tmp_path / "config.json").read_text())
    content["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [32, 32]}
    (tmp_path / "config.json").write_text(json.dumps(content))
    found = {name: tensor.dtype for name, tensor in build(tmp_path, dtype=dtype).state_dict().items()}
    assert found == expected


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_nf4_is_that_of_the_dequantised_weights(tmp_path, family):
    write_fp8(tmp_path, family)
    options = {"dtype": torch.bfloat16, "quantization": "nf4"}
    model, dense = build(tmp_path / "fp8", **options), build(tmp_path / "dense", **options)
    expected = dense.state_dict()
    assert model.state_dict().keys() == expected.keys()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_model_that_was_read_dequantised_is_saved_dense(tmp_path, family):
    write_fp8(tmp_path, family)
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
    write_fp8(tmp_path, "qwen3", head_dim=12)
    with pytest.raises(UnsupportedModelError, match=r"o_proj.weight of shape \(64, 48\).*Give a checkpoint.*bf16"):
        build(tmp_path / "fp8", dtype=torch.bfloat16)


@pytest.mark.parametrize(("scales", "message"), [(None, "no scales"), (torch.ones(1, 1), "do not fit")])
def test_scales_that_do_not_fit_are_refused(tmp_path, scales, message):
    write_fp8(tmp_path, "qwen3")
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
    write_fp8(tmp_path, "qwen3")
    path = tmp_path / "fp8/config.json"
    content = {**json.loads(path.read_text()), "quantization_config": {"quant_method": "gptq", "bits": 4}}
    path.write_text(json.dumps(content))
    with pytest.raises(MissingDependencyError, match=r"quantised by gptq.*quantization='nf4' for 4 bits"):
        build(tmp_path / "fp8", dtype=torch.bfloat16)


@pytest.mark.parametrize("quantization", [None, "nf4"])
def test_a_scale_that_is_not_finite_is_refused_by_the_name_of_its_weight(tmp_path, quantization):
    write_fp8(tmp_path, "qwen3")
    path = tmp_path / "fp8/model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.1.mlp.up_proj.weight_scale_inv"][0, 0] = torch.nan
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(DataError, match=r"layers\.1\.mlp\.up_proj\.weight"):
        build(tmp_path / "fp8", dtype=torch.bfloat16, quantization=quantization)
