"""FusedAdamW on sharded parameters: the numbers of whole ones, one norm of all ranks, and a state for any ranks."""

import pytest
import torch

from tests.support.truth import assert_within_bound
from tests.support.two_ranks import run_two_ranks
from tests.training.optimization.shards_worker import CASES, MAX_NORM, MESHES, SHAPES, SKIPPED_STEP, values_of

ABSMAXS = ("exp_avg_absmax", "exp_avg_sq_absmax")


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shards")
    run_two_ranks("tests.training.optimization.shards_worker", folder)
    return [torch.load(folder / f"found-{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("case", CASES)
def test_norm_is_that_of_the_whole_gradients_on_every_rank(found, mesh, case):
    dtype = CASES[case].get("dtype", torch.float32)
    for rank in found:
        norms, whole = rank[mesh, case]["norms"], rank[mesh, case]["whole norms"]
        assert torch.equal(norms.nan_to_num(-1), found[0][mesh, case]["norms"].nan_to_num(-1))
        for step in (1, 3, 4):
            grads = values_of(step, dtype)
            truth = torch.linalg.vector_norm(torch.cat([grad.double().flatten() for grad in grads]))
            assert truth > MAX_NORM
            assert_within_bound("norm", norms[step - 1], plain=whole[step - 1], truth=truth, dtype=torch.float32)
        # One rank has a NaN, and all ranks skip.
        assert norms[SKIPPED_STEP - 1].isnan()


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("case", CASES)
def test_steps_are_those_of_whole_parameters(found, mesh, case):
    """On a CPU to the bit: norms of one rank and of two round to the same number here, and all else is elementwise."""
    for rank in found:
        whole, shards = rank[mesh, case]["whole"], rank[mesh, case]["shards"]
        in_8_bits = {number for number, name in shards if name in ABSMAXS}
        assert in_8_bits == ({4, 5} if "8 bits" in case else set())
        for key, tensor in whole.items():
            if key[0] == 6 and "8 bits" in case:
                continue
            assert torch.equal(tensor, shards[key]), key
        assert {float(shards[number, "step"]) for number in range(len(SHAPES))} == {3.0}


@pytest.mark.parametrize("case", CASES)
def test_state_is_counted_as_it_is_held(found, case):
    for rank in found:
        assert rank["shards", case]["bytes"] == rank["shards", case]["held bytes"]
    both = [sum(rank["shards", case]["bytes"]) for rank in found]
    assert sum(both) == sum(found[0]["copies", case]["bytes"])


def test_no_step_reads_the_device_on_the_host(found):
    """But for the counts of steps, which are on the host, two reads per step: of clipping and of the step."""
    for rank in found:
        for case in CASES:
            assert all("tolist" in wait for wait in rank["shards", case]["waits"]), rank["shards", case]["waits"]


def test_a_resumed_run_equals_the_uninterrupted_one(found):
    kept = found[0]["checkpoints"]
    assert kept["saved"].keys() == kept["loaded", "shards"].keys()
    assert any(tensor.dtype is torch.uint8 for tensor in kept["saved"].values())
    assert any(name.endswith(".master") for name in kept["saved"])
    for name, tensor in kept["saved"].items():
        assert torch.equal(tensor, kept["loaded", "shards"][name]), name
    for name, tensor in kept["uninterrupted"].items():
        assert torch.equal(tensor, kept["resumed", "shards"][name]), name


def test_other_shards_load_the_same_state_and_go_on(found):
    kept = found[0]["checkpoints"]
    for name, tensor in kept["saved"].items():
        assert torch.equal(tensor, kept["loaded", "copies"][name]), name
    for name, tensor in kept["uninterrupted"].items():
        assert torch.equal(tensor, kept["resumed", "copies"][name]), name


@pytest.mark.parametrize(
    ("other", "message"),
    [("32 bits", "exp_avg as integers"), ("no masters", "master"), ("torch", "exp_avg_absmax")],
)
def test_a_state_of_another_kind_is_refused(found, other, message):
    for rank in found:
        assert message in rank["checkpoints"]["refused", other]


def test_what_cannot_be_stepped_is_refused(found):
    for rank in found:
        assert "placements" in rank["refused"]["gradient"]
        assert "set_optimizer_state_dict" in rank["refused"]["whole state"]


def test_a_master_follows_a_parameter_that_somebody_else_has_written(found):
    assert all(rank["written"] == [1.0, 3.0, 9.0] for rank in found)
