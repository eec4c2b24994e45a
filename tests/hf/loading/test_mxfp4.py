"""Checkpoints with experts in MXFP4, as gpt-oss has them, are read dequantised and can be trained."""

import pytest
import torch

from lightning_fastft.core.patcher import ModelPatcher
from lightning_fastft.hf.loading.model import build_model
from lightning_fastft.hf.loading.source import ModelSource
from lightning_fastft.moe.install import install_bincount_router
from tests.support.packed_files import write_mxfp4

CPU = torch.device("cpu")
STACKS = ("gate_up_proj", "down_proj")


@pytest.fixture
def checkpoint(tmp_path):
    """A folder, and the expert weights in it as plain numbers."""
    return tmp_path, write_mxfp4(tmp_path)


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
