"""Later fits of a model that FSDP2 sharded in a first one: layers run fused and units stay gathered as in the first."""

import pytest
import torch

from tests.callbacks.fp8_shards_worker import EMULATED, REFITS, make, run
from tests.callbacks.test_fp8_shards import NUM_PRODUCTS, check_equal
from tests.support.two_ranks import run_two_ranks


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("refit")
    run_two_ranks("tests.callbacks.fp8_shards_worker", "refit", folder)
    return torch.load(folder / "refit.pt", weights_only=True)


@pytest.mark.parametrize("first", REFITS)
def test_later_fits_train_as_one_process_does_from_their_weights(two_ranks, first):
    module = make("qwen3")
    module.configure_model()
    for found, base in zip(two_ranks[first][1:], REFITS[first][1:]):
        module.model.load_state_dict(found["before"])
        expected = run(module, base=base if first == "fused" else None, name="one")
        check_equal(found, expected)


def test_layers_that_were_sharded_fused_are_fused_again(two_ranks):
    served = [("fused layers", "active", "2 layers of qwen3", "")]
    assert [found["fused"] for found in two_ranks["fused"]] == [served, served, [], served]


def test_layers_that_were_sharded_unfused_stay_so_and_the_status_says_it(two_ranks):
    ((_, state, reason, _),) = two_ranks["unfused"][-1]["fused"]
    assert state == "inactive"
    assert reason.startswith("A model that was sharded by a run without FusedKernels")


@pytest.mark.parametrize("first", REFITS)
def test_every_fit_gathers_in_its_first_micro_batch_only(two_ranks, first):
    for found in two_ranks[first]:
        num_bytes, *later = found["gathered_bytes"]
        assert num_bytes > 0
        assert later
        assert not any(later)


def test_a_later_fit_gathers_in_e4m3(two_ranks):
    found = two_ranks["fused"][REFITS["fused"].index(EMULATED)]
    ((_, state, reason, _),) = found["status"]
    assert state == "active"
    assert reason.startswith(f"{NUM_PRODUCTS}, gathered in e4m3")
    assert sum(found["gathered_bytes"]) < sum(two_ranks["fused"][0]["gathered_bytes"])
