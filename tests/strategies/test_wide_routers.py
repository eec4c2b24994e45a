"""FastFTFSDPStrategy trains every weight of a mixture in bf16 whose routers are in fp32."""

import pytest
import torch
from safetensors.torch import load_file

from lightning_fastft.strategies.single_device import FastFTStrategy
from tests.strategies.strategy_worker import ACCUMULATE
from tests.strategies.wide_router_worker import POLICIES, ROUTER, train
from tests.support.truth import relative_error
from tests.support.two_ranks import run_two_ranks


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Of one process and of two."""
    return [tmp_path_factory.mktemp(name) for name in ("one", "two")]


@pytest.fixture(scope="module")
def two_ranks(folders):
    folder = folders[1]
    run_two_ranks("tests.strategies.wide_router_worker", folder)
    return torch.load(folder / "found.pt", weights_only=True)


@pytest.fixture(scope="module")
def one_process(folders):
    return train("keep", FastFTStrategy, folder=folders[0])


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_two_ranks_route_as_one_process(two_ranks, one_process, policy):
    found = two_ranks[policy]
    assert "2 routers in a wider dtype" in found["status"]
    # One process has the micro-batches of both ranks, in turns, and divides by twice as many.
    assert torch.equal(found["losses"][:ACCUMULATE], 2 * one_process["losses"][: 2 * ACCUMULATE : 2])
    assert relative_error(found["gradient"], one_process["gradient"]) <= 1e-6
    assert found["state"][ROUTER].dtype is torch.float32


@pytest.mark.slow
def test_a_whole_model_is_written_in_the_dtypes_of_the_model(two_ranks, one_process, folders):
    one, two = (
        {name: tensor.dtype for name, tensor in load_file(folder / "export" / "model.safetensors").items()}
        for folder in folders
    )
    assert one[ROUTER] is torch.float32
    assert {torch.bfloat16, torch.float32} == set(one.values())
    assert one == two
