"""MuonAdamW over shards and a schedule-free optimizer under DDP: the weights of one device, and runs that go on."""

from unittest import mock

import pytest
import torch

from tests.support.two_ranks import run_two_ranks
from tests.training.two_optimizers_worker import run, step_matrices


def iterate(matrix_BMN, num_steps):
    """The iterations of MuonAdamW, in fp64 and not in bf16."""
    is_tall = matrix_BMN.shape[1] > matrix_BMN.shape[2]
    x = (matrix_BMN.mT if is_tall else matrix_BMN).double()
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(num_steps):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return (x.mT if is_tall else x).float()


@pytest.mark.slow(seconds=20)
@pytest.mark.parametrize("kind", ["muon", "schedule_free"])
def test_two_ranks_have_the_weights_of_one_and_go_on_to_the_bit(tmp_path, kind):
    run_two_ranks("tests.training.two_optimizers_worker", tmp_path, kind)
    first, second = torch.load(tmp_path / "weights.pt")
    alone = run(kind, folder=tmp_path / "alone", devices=1, strategy="fastft")
    with mock.patch("lightning_fastft.training.optimization.muon._iterate", iterate):
        exact = run(kind, folder=tmp_path / "exact", devices=1, strategy="fastft")
    assert first.keys() == second.keys() == alone.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name
        # Shards round in another order.
        bound = 2 * float((alone[name] - exact[name]).norm()) + 1e-6 * float(exact[name].norm())
        assert float((tensor - exact[name]).norm()) <= bound, name
    if kind == "muon":
        alone = step_matrices(lambda whole: whole)
        for rank in range(2):
            assert all(map(torch.equal, torch.load(tmp_path / f"matrices{rank}.pt"), alone))
