"""torch.compile beside FusedKernels and offload: a part beside the model changes nothing, a whole model is refused."""

import pytest
import torch
from torch import nn

from lightning_fastft import FusedKernels, OffloadCheckpointing
from lightning_fastft.core.errors import OptionError
from lightning_fastft.core.patcher import ModelPatcher
from lightning_fastft.patches.packed import install_packed_training
from tests.support.tiny_models import build_tiny


def root_of(model):
    root = nn.Module()
    root.model, root.head = model, nn.Linear(2, 2)
    return root


def states(root):
    return [status.state for status in FusedKernels().install(root, ModelPatcher())]


@pytest.mark.parametrize("form", ["wrapped", "in place"])
def test_a_compiled_part_beside_the_model_changes_nothing(form):
    root = root_of(build_tiny("qwen3"))
    if form == "wrapped":
        root.head = torch.compile(root.head)
    else:
        root.head.compile()
    assert states(root) == ["active"]


@pytest.mark.parametrize("form", ["model", "model in place", "module", "LightningModule"])
def test_a_model_that_is_compiled_as_a_whole_is_refused_by_name(form):
    root = root_of(build_tiny("qwen3"))
    if form == "model":
        root.model = torch.compile(root.model)
    elif form == "model in place":
        root.model.compile()
    elif form == "module":
        root = torch.compile(root)
    else:
        root._compiler_ctx = {"compiler": "dynamo"}
    kinds = [type(module) for module in root.modules()]
    (status,) = FusedKernels().install(root, ModelPatcher())
    assert status.state == "refused"
    assert "torch.compile" in status.reason
    assert [type(module) for module in root.modules()] == kinds


def test_offload_inside_a_compiled_model_is_refused_before_anything_changes():
    root = root_of(build_tiny("qwen3"))
    root.model = torch.compile(root.model)
    before = [type(module) for module in root.modules()]
    with pytest.raises(OptionError, match=r"torch\.compile compiles model as a whole"):
        install_packed_training(root, ModelPatcher(), checkpointing=OffloadCheckpointing("offload"))
    assert [type(module) for module in root.modules()] == before


def test_recompute_takes_a_compiled_model():
    root = root_of(build_tiny("qwen3"))
    root.model = torch.compile(root.model)
    found = install_packed_training(root, ModelPatcher(), checkpointing=OffloadCheckpointing("recompute"))
    assert {status.name: status.state for status in found.statuses}["activations"] == "active"
