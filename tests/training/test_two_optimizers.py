"""MuonAdamW over shards and a schedule-free optimizer under DDP: the weights of one device, and runs that go on."""

from unittest import mock

import pytest
import torch

from tests.support.two_ranks import run_two_ranks
from tests.training.two_optimizers_worker import run


def orthogonalise(gradient, coefficients, steps, eps, *_):
    """The iterations of torch's Muon, in fp64 and not in bf16."""
    a, b, c = coefficients
    is_tall = gradient.shape[0] > gradient.shape[1]
    x = (gradient.T if is_tall else gradient).double()
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.T if is_tall else x).to(gradient.dtype)


@pytest.mark.slow(seconds=20)
@pytest.mark.parametrize("kind", ["muon", "schedule_free"])
def test_two_ranks_have_the_weights_of_one_and_go_on_to_the_bit(tmp_path, kind):
    run_two_ranks("tests.training.two_optimizers_worker", tmp_path, kind)
    first, second = torch.load(tmp_path / "weights.pt")
    alone = run(kind, folder=tmp_path / "alone", devices=1, strategy="fastft")
    with mock.patch("torch.optim._muon._zeropower_via_newtonschulz", orthogonalise):
        exact = run(kind, folder=tmp_path / "exact", devices=1, strategy="fastft")
    assert first.keys() == second.keys() == alone.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name
        # Shards round in another order.
        bound = 2 * float((alone[name] - exact[name]).norm()) + 1e-6 * float(exact[name].norm())
        assert float((tensor - exact[name]).norm()) <= bound, name
