"""The scan of Mamba-2 on a CUDA device: the tests of its kernels, and the sizes of a real model."""

import pytest
import torch

from lightning_fastft.kernels.state_scan import reference
from lightning_fastft.kernels.state_scan.op import state_scan
from tests.kernels.test_state_scan import NAMES, make_chunks, make_inputs
from tests.support.host_waits import waits_are_errors
from tests.support.truth import relative_error

pytestmark = pytest.mark.gpu


def test_heads_and_states_of_granite_4():
    """Within twice the error of bf16 matrix products in PyTorch, and without a host sync."""
    lengths = (1500, 1, 700, 63)
    inputs = make_inputs(lengths, heads=16, width=64, groups=1, states=128, dtype=torch.bfloat16, device="cuda")
    inputs = [each.requires_grad_() for each in inputs]
    chunks, weight = make_chunks(lengths, 64, device="cuda"), torch.randn(inputs[0].shape, device="cuda")

    def run(inputs, scan=state_scan):
        y_THW = scan(*inputs, chunks=chunks)
        return [y_THW.detach(), *torch.autograd.grad(y_THW, inputs, weight.to(y_THW.dtype))]

    run(inputs)
    torch.cuda.synchronize()
    with waits_are_errors():
        ours = run(inputs)
    plain = run(inputs, reference.scan)
    truth = run([each.detach().double().requires_grad_() for each in inputs], reference.scan)
    for name, *found in zip(("y_THW", *NAMES), ours, plain, truth):
        error, plain_error = (relative_error(value, found[2]) for value in found[:2])
        assert error <= max(2 * plain_error, 1e-5), (name, error, plain_error)
