"""A fit of a model that an earlier one sharded runs its layers fused, and trains as one device does from its weights."""

import pytest
import torch

from tests.callbacks.fp8_shards_worker import EMULATED, make, run
from tests.callbacks.test_fp8_shards import NUM_PRODUCTS, check_equal
from tests.support.two_ranks import run_two_ranks


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("refit")
    run_two_ranks("tests.callbacks.fp8_shards_worker", "refit", folder)
    return torch.load(folder / "refit.pt", weights_only=True)


def test_later_fits_of_a_sharded_model_are_fused_and_equal_one_process(two_ranks):
    module = make("qwen3")
    for found, base in zip(two_ranks, ("model_dtype", "model_dtype", EMULATED)):
        if found["before"]:
            module.model.load_state_dict(found["before"])
        expected = run(module, base=base, name="one")
        assert found["fused"] == expected["fused"] == [("fused layers", "active", "2 layers of qwen3", "")]
        check_equal(found, expected)


def test_a_later_fit_gathers_in_e4m3(two_ranks):
    ((_, state, reason, _),) = two_ranks[-1]["status"]
    assert state == "active"
    assert reason.startswith(f"{NUM_PRODUCTS}, gathered in e4m3")
    assert sum(two_ranks[-1]["gathered_bytes"]) < sum(two_ranks[1]["gathered_bytes"])
