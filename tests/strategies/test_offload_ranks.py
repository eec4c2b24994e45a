"""Activation policies on two ranks: the weights of one process, one plan for all ranks, and nobody who waits for
somebody that does not come.
"""

import pytest

from tests.strategies.offload_worker import CASES, run_on_two_ranks, train
from tests.strategies.strategy_worker import BOUND, difference

ALL = [(strategy, *case) for strategy, cases in CASES.items() for case in cases]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    return run_on_two_ranks(tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module")
def one_process():
    """The trained weights of one process that keeps every activation, each kind trained once."""
    found = {}

    def look_up(kind, *, is_grown=False):
        if (kind, is_grown) not in found:
            found[kind, is_grown] = train(kind, "keep", "one", is_grown=is_grown)["state"]
        return found[kind, is_grown]

    return look_up


def holders(two_ranks, strategy):
    """The ranks that hold the whole model at the end: all of them, or the first, which gathers the pieces."""
    return two_ranks if strategy == "ddp" else two_ranks[:1]


@pytest.mark.parametrize("case", ALL, ids=str)
def test_two_ranks_have_the_weights_of_one_process_that_keeps_all(two_ranks, one_process, case):
    for found in holders(two_ranks, case[0]):
        assert difference(found[case]["state"], one_process(case[1])) <= BOUND


@pytest.mark.parametrize("case", ALL, ids=str)
def test_ranks_follow_one_plan(two_ranks, case):
    first, second = (found[case] for found in two_ranks)
    assert first["plans"][-1] == second["plans"][-1]
    num_asked = 1 if case[2].startswith("auto") and "without" not in case[2] else 0
    assert (first["asked"], second["asked"]) == (num_asked, num_asked)


@pytest.mark.parametrize("case", [case for case in ALL if case[2] == "offload"], ids=str)
def test_inputs_are_on_the_host_of_every_rank(two_ranks, case):
    assert all(found[case]["on host"] > 0 for found in two_ranks)


@pytest.mark.parametrize("case", [case for case in ALL if case[2] == "auto"], ids=str)
def test_a_large_budget_keeps_all_layers_from_the_fourth_forward_on(two_ranks, case):
    for found in two_ranks:
        kept = [all(is_kept for is_kept, _, _ in plans) for plans in found[case]["plans"]]
        assert kept == [False] * 3 + [True] * (len(kept) - 3)


@pytest.mark.parametrize("case", [case for case in ALL if case[2] == "auto, held in part"], ids=str)
def test_a_small_budget_keeps_less(two_ranks, case):
    assert not all(is_kept for is_kept, _, _ in two_ranks[0][case]["plans"][-1])


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_packs_that_grow_on_one_rank_only_make_nobody_wait(two_ranks, one_process, strategy):
    """The rank measures and plans again by itself, in the middle of windows in which the other goes on."""
    first, second = (found[strategy, "grown"] for found in two_ranks)
    assert (first["asked"], second["asked"]) == (1, 1)
    assert first["plans"] != second["plans"]
    for found in holders(two_ranks, strategy):
        assert difference(found[strategy, "grown"]["state"], one_process("full", is_grown=True)) <= BOUND
