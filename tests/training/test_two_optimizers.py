"""MuonAdamW over shards and a schedule-free optimizer under DDP: the weights of one device, and runs that go on."""

import pytest
import torch

from tests.support.muon import assert_as_near, exact_iterations
from tests.support.two_ranks import run_two_ranks
from tests.training.two_optimizers_worker import run, step_matrices


@pytest.mark.slow(seconds=20)
@pytest.mark.parametrize("kind", ["muon", "schedule_free"])
def test_two_ranks_have_the_weights_of_one_and_go_on_to_the_bit(tmp_path, kind):
    run_two_ranks("tests.training.two_optimizers_worker", tmp_path, kind)
    first, second = torch.load(tmp_path / "weights.pt")
    alone = run(kind, folder=tmp_path / "alone", devices=1, strategy="fastft")
    with exact_iterations():
        exact = run(kind, folder=tmp_path / "exact", devices=1, strategy="fastft")
    assert first.keys() == second.keys() == alone.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name
        assert_as_near(tensor, alone[name], exact[name])
    if kind == "muon":
        alone = step_matrices(lambda whole: whole)
        with exact_iterations():
            exact = step_matrices(lambda whole: whole)
        first, second = (torch.load(tmp_path / f"matrices{rank}.pt") for rank in range(2))
        assert all(map(torch.equal, first, second))
        for tensors in zip(first, alone, exact, strict=True):
            assert_as_near(*tensors)
