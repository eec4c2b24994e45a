"""FastFTFSDPStrategy trains every weight of a mixture in bf16 whose routers are in fp32."""

import pytest
import torch
from safetensors.torch import load_file

from lightning_fastft.strategies.single_device import FastFTStrategy
from tests.strategies.strategy_worker import ACCUMULATE
from tests.strategies.wide_router_worker import CASES, ROUTER, train
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
    return train(FastFTStrategy, folder=folders[0])


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_two_ranks_route_as_one_process(two_ranks, one_process, case):
    found = two_ranks[case]
    assert "2 routers in a wider dtype" in found["status"]
    # One process has the micro-batches of both ranks, in turns, and divides by twice as many.
    expected = 2 * one_process["losses"][: 2 * ACCUMULATE : 2]
    error = relative_error(found["gradient"], one_process["gradient"])
    if case == "experts owned":
        # The outputs of the experts of a token are added in bf16, in another order.
        torch.testing.assert_close(found["losses"][:ACCUMULATE], expected, rtol=4e-3, atol=0)
        assert error <= 1e-2
    else:
        assert torch.equal(found["losses"][:ACCUMULATE], expected)
        assert error <= 1e-6
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
