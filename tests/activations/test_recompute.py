"""A function that runs again in the backward: torch's checkpoint is the judge."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_fastft.activations.recompute import recompute_in_backward
from lightning_fastft.core.errors import SwapError


def by_torch(function, *args):
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)


class Layer(nn.Module):
    """Two products with a nonlinearity; counts its runs and those of its end."""

    def __init__(self, width=4):
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)
        self.num_runs = self.num_ends = 0

    def forward(self, x, scale=1.0):
        self.num_runs += 1
        out = self.second(torch.sigmoid(self.first(x))) * scale
        out = out + x
        self.num_ends += 1
        return out


def make(seed=0):
    torch.manual_seed(seed)
    return Layer(), torch.randn(3, 4, requires_grad=True)


def gradients(run, *, num_layers=1, **options):
    layer, x = make()
    out = x
    for _ in range(num_layers):
        out = run(layer, out, **options)
    out.square().sum().backward()
    return [x.grad, *(parameter.grad for parameter in layer.parameters())], layer


@pytest.mark.parametrize("num_layers", [1, 3])
def test_gradients_and_runs_are_those_of_torchs_checkpoint(num_layers):
    expected, theirs = gradients(by_torch, num_layers=num_layers)
    found, ours = gradients(recompute_in_backward, num_layers=num_layers)
    for value, other in zip(found, expected, strict=True):
        torch.testing.assert_close(value, other, rtol=0, atol=0)
    assert ours.num_runs == theirs.num_runs == 2 * num_layers
    # The second run ends once everything is saved again, before the addition.
    assert ours.num_ends == theirs.num_ends == num_layers


def test_arguments_that_are_no_tensors_reach_both_runs():
    layer, x = make()
    recompute_in_backward(layer, x, 0.5).sum().backward()
    plain, other = make()
    plain(other, 0.5).sum().backward()
    torch.testing.assert_close(x.grad, other.grad, rtol=0, atol=0)


def test_nothing_that_the_function_saves_lives_until_the_backward():
    seen = []

    def function(x):
        hidden = torch.sigmoid(x)
        seen.append(weakref.ref(hidden))
        return hidden.square()

    x = torch.randn(3, requires_grad=True)
    out = recompute_in_backward(function, x)
    assert seen[0]() is None
    out.sum().backward()
    assert len(seen) == 2
    assert seen[1]() is None


def test_a_dropped_graph_frees_its_inputs():
    gc.disable()
    try:
        layer, x = make()
        hidden = x * 2
        held = weakref.ref(hidden)
        out = recompute_in_backward(layer, hidden)
        del hidden
        assert held() is not None
        del out
        assert held() is None
    finally:
        gc.enable()


def test_a_tensor_of_a_dropped_part_of_the_graph_is_not_held():
    seen = []

    def function(x):
        factor = torch.full_like(x, 2, requires_grad=False)
        seen.append(weakref.ref(factor))
        second = x * factor
        return torch.sigmoid(x), second

    x = torch.randn(3, requires_grad=True)
    first, second = recompute_in_backward(function, x)
    del second
    (gradient,) = torch.autograd.grad(first.sum(), x, retain_graph=True)
    torch.testing.assert_close(gradient, torch.sigmoid(x) * (1 - torch.sigmoid(x)))
    assert len(seen) == 2
    assert seen[1]() is None


def test_a_retained_graph_runs_again_for_each_backward():
    layer, x = make()
    loss = recompute_in_backward(layer, x).square().sum()
    (once,) = torch.autograd.grad(loss, x, retain_graph=True)
    (twice,) = torch.autograd.grad(loss, x)
    assert torch.equal(once, twice)
    assert layer.num_runs == 3


def test_one_second_run_serves_every_read_of_a_backward():
    layer, x = make()
    recompute_in_backward(lambda hidden: layer(layer(hidden)), x).sum().backward()
    assert layer.num_runs == 4


@pytest.mark.parametrize("inner", [by_torch, recompute_in_backward], ids=["torch inside", "ours inside"])
@pytest.mark.parametrize("outer", [by_torch, recompute_in_backward], ids=["torch outside", "ours outside"])
def test_calls_inside_calls(outer, inner):
    found, _ = gradients(lambda layer, x: outer(lambda y: inner(layer, y) * 2, x))
    expected, _ = gradients(lambda layer, x: layer(x) * 2)
    for value, other in zip(found, expected, strict=True):
        torch.testing.assert_close(value, other, rtol=0, atol=0)


@pytest.mark.parametrize("is_around_backward", [False, True])
def test_autocast_of_the_second_run_is_that_of_the_first(is_around_backward):
    seen = []

    def function(x, weight):
        out = x @ weight
        seen.append(out.dtype)
        return out.exp()

    x, weight = torch.randn(3, 3, requires_grad=True), torch.randn(3, 3, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=not is_around_backward):
        loss = recompute_in_backward(function, x, weight).float().sum()
    with torch.autocast("cpu", torch.bfloat16, enabled=is_around_backward):
        loss.backward()
    assert seen == [torch.float32 if is_around_backward else torch.bfloat16] * 2


def test_an_argument_written_to_in_place_is_an_error():
    layer, x = make()
    hidden = x * 2
    out = recompute_in_backward(layer, hidden)
    hidden.data += 0  # no new version
    with torch.no_grad():
        hidden.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_hooks_of_the_caller_see_the_arguments_only():
    packed = []

    def pack(tensor):
        packed.append(tensor)
        return tensor

    layer, x = make()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = recompute_in_backward(layer, x)
    assert [id(tensor) for tensor in packed] == [id(x)]
    out.sum().backward()


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (lambda x: torch.sigmoid(x[:2]), r"saved a tensor of shape \(2,\) in float32, its forward of shape \(3,\)"),
        (
            lambda x: torch.sigmoid(x.double()),
            r"saved a tensor of shape \(3,\) in float64, its forward of shape \(3,\)",
        ),
        (lambda x: x + 1, "saved fewer tensors"),
    ],
    ids=["shape", "dtype", "fewer"],
)
def test_a_function_that_saves_others_in_its_second_run_is_named(second, message):
    runs = iter([torch.sigmoid, second])
    x = torch.randn(3, requires_grad=True)
    out = recompute_in_backward(lambda tensor: next(runs)(tensor), x)
    with pytest.raises(SwapError, match=message):
        out.sum().backward()


def test_an_error_of_the_second_run_reaches_the_caller():
    calls = []

    def function(x):
        calls.append(x)
        if len(calls) == 2:
            raise ValueError("the second run")
        return x.exp()

    x = torch.randn(3, requires_grad=True)
    out = recompute_in_backward(function, x)
    with pytest.raises(ValueError, match="the second run"):
        out.sum().backward()
