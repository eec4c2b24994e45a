"""Backward functions that are not differentiable: a second derivative is an error, and the first has no overhead."""

import pytest
import torch

from lightning_fastft.core.once_differentiable import once_differentiable


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    @once_differentiable
    def backward(ctx, d_y):
        assert not torch.is_grad_enabled()
        (x,) = ctx.saved_tensors
        return 2.0 * x * d_y


def test_the_first_derivative_is_given():
    x = torch.tensor([3.0], requires_grad=True)
    Square.apply(x).backward()
    assert torch.equal(x.grad, torch.tensor([6.0]))


def test_a_second_derivative_raises():
    x = torch.tensor([3.0], requires_grad=True)
    d_y = torch.ones(1, requires_grad=True)
    (d_x,) = torch.autograd.grad(Square.apply(x), x, d_y, create_graph=True)
    assert torch.equal(d_x, torch.tensor([6.0]))
    with pytest.raises(RuntimeError, match="twice"):
        d_x.backward()
