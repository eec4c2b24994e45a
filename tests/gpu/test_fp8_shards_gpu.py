"""Frozen weights that FSDP2 gathers in e4m3 over NCCL: as on one GPU, with half of the bytes of the layers."""

import pytest
import torch

from tests.callbacks.fp8_shards_worker import make, run
from tests.strategies.strategy_worker import difference
from tests.support.two_ranks import launch_two_ranks

pytestmark = pytest.mark.multi_gpu

# Sums of bf16 products in another order, and attention's backward.
BOUND = 0.01


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fp8")
    launch_two_ranks("tests.callbacks.fp8_shards_worker", "gpu", folder)
    return torch.load(folder / "gpu.pt", weights_only=True)


@pytest.fixture(scope="module")
def one_gpu():
    return run(make("qwen3", dtype="bfloat16"), base="fp8", name="one", accelerator="gpu")


@pytest.mark.parametrize("weights", ["sharded", "resident"])
def test_two_gpus_equal_one(found, one_gpu, weights):
    assert torch.equal(found[weights]["losses"][:2], one_gpu["losses"][::2][:2])
    assert difference(found[weights]["gradients"], one_gpu["gradients"]) <= BOUND
    ((_, state, reason, _),) = found[weights]["status"]
    assert (state, reason.partition(",")[0]) == ("active", "8 products of 2 layers in e4m3")


def test_shards_take_half_of_the_memory_and_the_weights_come_back(found):
    saved = found["memory", "model_dtype"] - found["memory", "fp8"]
    # Of 118 million weights on two ranks, each takes a byte less; the buffer of the largest product takes 8.4 million.
    assert saved > 40e6
    expected = found["frozen", "model_dtype"]
    assert all(torch.equal(found["frozen", "fp8"][name], value) for name, value in expected.items())
