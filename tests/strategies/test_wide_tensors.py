"""FastFTFSDPStrategy trains every weight of models in bf16 that keep some weights in fp32."""

import pytest
import torch
from safetensors.torch import load_file

from lightning_fastft.strategies.single_device import FastFTStrategy
from tests.strategies.strategy_worker import ACCUMULATE, BOUND
from tests.strategies.wide_tensor_worker import CASES, RESUMED, find
from tests.support.truth import relative_error
from tests.support.two_ranks import run_two_ranks

# A master weight that differs in its last bit may be gathered as the next number in bf16.
NEXT_NUMBER = 2**-8


def run_ranks(num_ranks, folder):
    run_two_ranks("tests.strategies.wide_tensor_worker", folder, num_ranks=num_ranks)
    return torch.load(folder / "found.pt", weights_only=True)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Of one process, and of one and two ranks of FSDP2."""
    return {name: tmp_path_factory.mktemp(name) for name in ("alone", "one", "two")}


@pytest.fixture(scope="module")
def alone(folders):
    return {case: find(case, FastFTStrategy, folder=folders["alone"]) for case in CASES}


@pytest.fixture(scope="module")
def one_rank(folders):
    return run_ranks(1, folders["one"])


@pytest.fixture(scope="module")
def two_ranks(folders):
    return run_ranks(2, folders["two"])


def wide_names(found):
    return {name for name, tensor in found["state"].items() if tensor.dtype is torch.float32}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_two_ranks_compute_as_one_process(two_ranks, alone, case):
    found, truth = two_ranks[case], alone[case]
    truths = {name: gradient for name, gradient in truth["gradients"][0].items() if gradient.dtype is torch.float32}
    assert truths
    assert f"{len(wide_names(truth))} weights in a wider dtype" in found["status"]
    # One process has the micro-batches of both ranks, in turns, and divides by twice as many.
    expected = 2 * truth["losses"][: 2 * ACCUMULATE : 2]
    # With owned experts, the outputs of the experts of a token are added in bf16, in another order.
    is_exact = "owned" not in case
    torch.testing.assert_close(found["losses"][:ACCUMULATE], expected, rtol=0 if is_exact else 4e-3, atol=0)
    for name, expected in truths.items():
        assert relative_error(found["gradients"][0][name], expected) <= (BOUND if is_exact else 1e-2), name


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES if "owned" not in case])
def test_two_ranks_train_the_weights_of_one(two_ranks, one_rank, case):
    found, truth = two_ranks[case], one_rank[case]
    for step, bound in enumerate([BOUND, NEXT_NUMBER]):
        for name, expected in truth["gradients"][step].items():
            assert relative_error(found["gradients"][step][name], expected) <= bound, (step, name)
    for name, expected in truth["state"].items():
        assert relative_error(found["state"][name], expected) <= NEXT_NUMBER, name


@pytest.mark.slow
@pytest.mark.parametrize("form", RESUMED)
def test_a_resumed_run_equals_the_uninterrupted_one(two_ranks, form):
    whole, resumed = two_ranks["resumed", form]
    assert whole.keys() == resumed.keys()
    assert all(torch.equal(value, resumed[name]) for name, value in whole.items())


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_whole_model_is_written_in_the_dtypes_of_the_model(two_ranks, alone, folders, case):
    one, two = (
        {
            name: tensor.dtype
            for name, tensor in load_file(folders[kind] / "export" / case / "model.safetensors").items()
        }
        for kind in ("alone", "two")
    )
    assert set(one.values()) == {torch.bfloat16, torch.float32}
    assert one == two
