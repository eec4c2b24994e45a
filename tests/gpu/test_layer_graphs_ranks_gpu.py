"""CUDA graphs under DDP: what two ranks send of recorded layers is what they send of layers that run as ever."""

import pytest
import torch

from tests.gpu.layer_graphs_worker import CASES, NUM_LAYERS, NUM_STEPS
from tests.support.two_ranks import launch_two_ranks

pytestmark = pytest.mark.multi_gpu


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("graphs")
    launch_two_ranks("tests.gpu.layer_graphs_worker", folder)
    return [torch.load(folder / f"found{rank}.pt", weights_only=True) for rank in range(2)]


def distance(found, other):
    return sum(float((found[name] - value).square().sum()) for name, value in other.items()) ** 0.5


@pytest.mark.parametrize("case", CASES, ids=str)
def test_ranks_agree_and_learn_what_they_learn_without_graphs(ranks, case):
    recorded, other = ([each[(*case, is_recorded)] for each in ranks] for is_recorded in (True, False))
    num_micro = NUM_STEPS * case[1]
    # Two micro-batches run as ever.
    assert [each["replays"] for each in recorded] == [NUM_LAYERS * (num_micro - 2)] * 2
    first, second = (each["after"] for each in recorded)
    assert all(torch.equal(value, second[name]) for name, value in first.items())
    moved = distance(other[0]["before"], other[0]["after"])
    assert moved > 0
    assert distance(first, other[0]["after"]) <= 0.1 * moved
