import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_fastft.estimate.meta_model import (
    add_adapters_on_meta,
    build_on_meta,
    measure_weights,
    quantise_on_meta,
)
from lightning_fastft.hf.loading.model import build_model
from lightning_fastft.hf.loading.source import ModelSource
from tests.support.tiny_models import build_tiny


class Draws(TorchDispatchMode):
    """Counts what fills tensors with random values."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ in ("uniform_", "normal_"):
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("is_quantised", [False, True])
def test_no_value_is_drawn_for_a_model_without_values(is_quantised):
    config = build_tiny("llama").config
    with Draws() as draws:
        model = build_on_meta(config)
        if is_quantised:
            quantise_on_meta(model, dtype=torch.bfloat16)
        add_adapters_on_meta(model, 4)
    assert draws.names == []
    parameters = dict(model.named_parameters())
    assert sum("lora_" in name for name in parameters) == 2 * 2 * 7
    assert all(parameter.is_meta for parameter in parameters.values())


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_the_weights_of_a_model_count_as_what_they_take(family, tmp_path):
    source = ModelSource(build_tiny(family, hidden_size=64).config, init="random")
    options = {"device": torch.device("cpu"), "dtype": torch.bfloat16}
    dense = build_model(source, **options)
    assert measure_weights(source, dtype=torch.bfloat16) == sum(item.nbytes for item in dense.parameters())
    model = build_model(source, **options, quantization="nf4")
    held = sum(
        getattr(item, "held_bytes", item.nbytes) + (item.quant_state.absmax.nbytes if hasattr(item, "absmax") else 0)
        for item in model.parameters()
    )
    assert measure_weights(source, dtype=torch.bfloat16, quantization="nf4") == held
    if family == "llama":
        model.save_pretrained(tmp_path)
        assert measure_weights(ModelSource(str(tmp_path)), dtype=torch.bfloat16) == held
