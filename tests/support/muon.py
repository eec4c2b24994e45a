"""Muon without the rounding of its iterations, as the measure of a step in bf16."""

import contextlib
from unittest import mock


def iterate(matrix_BMN, num_steps):
    """The iterations of MuonAdamW, in fp64."""
    is_tall = matrix_BMN.shape[1] > matrix_BMN.shape[2]
    x = (matrix_BMN.mT if is_tall else matrix_BMN).double()
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(num_steps):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return (x.mT if is_tall else x).float()


@contextlib.contextmanager
def exact_iterations():
    """While it is entered, MuonAdamW and torch.optim.Muon iterate in fp64."""
    with (
        mock.patch("lightning_fastft.training.optimization.muon._iterate", iterate),
        mock.patch(
            "torch.optim._muon._zeropower_via_newtonschulz", lambda grad, _, steps, *__: iterate(grad[None], steps)[0]
        ),
    ):
        yield


def assert_as_near(tensor, other, exact):
    """A tensor is about as near to the exact one as the other is: GEMMs of other sizes round in another order."""
    bound = 2 * float((other - exact).norm()) + 1e-6 * float(exact.norm())
    assert float((tensor - exact).norm()) <= bound
