"""Weights of a checkpoint are judged before quantisation hides what is in them."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import safetensors
import torch
from torch import nn

from lightning_fastft.core.errors import DataError
from lightning_fastft.hf.loading.finite_weights import check_finite
from lightning_fastft.hf.loading.model import build_model
from lightning_fastft.hf.loading.source import ModelSource
from tests.support.sizes import sizes
from tests.support.tiny_models import build_tiny

CONFIG = sizes(model_type="llama", vocab=64, width=64, inner=64, layers=2, heads=2, key_heads=2)


def read_nf4(folder):
    return build_model(ModelSource(str(folder)), device=torch.device("cpu"), dtype=torch.bfloat16, quantization="nf4")


@pytest.mark.covering
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("shard_size", ["1GB", "40KB"])
def test_files_with_values_that_are_not_finite_are_refused_by_name(tmp_path, value, shard_size):
    model = build_model(ModelSource(CONFIG, init="random"), device=torch.device("cpu"), dtype=torch.bfloat16)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 5] = value
    model.save_pretrained(tmp_path, max_shard_size=shard_size)
    with pytest.raises(DataError, match=r"infinity in model\.layers\.1\.mlp\.up_proj\.weight\."):
        read_nf4(tmp_path)


def test_experts_that_are_not_finite_are_refused_by_name(tmp_path):
    model = build_tiny("qwen3_moe", hidden_size=64)
    with torch.no_grad():
        model.model.layers[1].mlp.experts.down_proj[1, 3, 5] = float("nan")
    model.save_pretrained(tmp_path)
    with pytest.raises(DataError, match=r"infinity in model\.layers\.1\.mlp\.experts\.down_proj\."):
        read_nf4(tmp_path)


def test_no_weight_is_read_before_transformers_reads_it(tmp_path, monkeypatch):
    opened = safetensors.safe_open

    @contextmanager
    def open_headers(path, **options):
        with opened(path, **options) as file:
            # Has no get_tensor.
            yield SimpleNamespace(keys=file.keys, get_slice=file.get_slice)

    build_tiny("qwen3", hidden_size=64).save_pretrained(tmp_path)
    monkeypatch.setattr(safetensors, "safe_open", open_headers)
    assert read_nf4(tmp_path).is_loaded_in_4bit


def test_check_finite_lists_a_few_names_and_counts_the_rest():
    model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(6)])
    check_finite(model, name="good")
    nn.init.constant_(model[3].bias, float("nan"))
    with pytest.raises(DataError, match=r"in 3\.bias\."):
        check_finite(model, name="bad")
    for parameter in model.parameters():
        nn.init.constant_(parameter, float("inf"))
    with pytest.raises(DataError, match="and 4 more"):
        check_finite(model, name="bad")
