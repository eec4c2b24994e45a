import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_fastft.estimate.meta_model import add_adapters_on_meta, build_on_meta, quantise_on_meta
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
