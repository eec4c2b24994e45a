"""Compare the stand-in for flash-attn with SDPA on each document alone, outputs and gradients."""

from typing import NamedTuple

import torch

from benchmarks.ruler.flash_attn_stand_in import flash_attn_varlen_func


class Case(NamedTuple):
    """Documents, heads of queries and of keys, head size, and arguments of the call."""

    lengths: tuple[int, ...]
    heads: tuple[int, int]
    width: int
    options: dict


CASES = (
    Case((5, 1, 11), (4, 4), 16, {"causal": True}),
    Case((7, 64, 3), (4, 2), 32, {"causal": True, "softmax_scale": 0.3}),
    Case((33, 17), (6, 2), 64, {"causal": True, "window_size": (4, 0)}),
    Case((9, 20), (2, 1), 64, {"causal": False}),
    Case((16, 30), (2, 2), 128, {"causal": False, "window_size": (3, 2)}),
)


def compare_with_sdpa(case: Case, *, device: str, dtype: torch.dtype, bound: float) -> None:
    """Raise AssertionError if outputs or gradients differ by more than the bound, relative to the largest value."""
    generator = torch.Generator().manual_seed(3)
    shapes = [(sum(case.lengths), heads, case.width) for heads in (case.heads[0], case.heads[1], case.heads[1])]
    inputs = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]
    weight = torch.randn(shapes[0], generator=generator, dtype=torch.float64)
    offsets = torch.tensor([0, *case.lengths]).cumsum(0).to(device, torch.int32)
    longest = max(case.lengths)
    own = [x.to(device).requires_grad_() for x in inputs]
    found = flash_attn_varlen_func(*own, offsets, offsets, longest, longest, **case.options)
    found.backward(weight.to(device, dtype))
    truth = [x.double().requires_grad_() for x in inputs]
    expected = torch.cat([_attend(*parts, case.options) for parts in zip(*(x.split(case.lengths) for x in truth))])
    expected.backward(weight.to(dtype).double())
    for ours, theirs in ((found, expected), *((x.grad, y.grad) for x, y in zip(own, truth))):
        error = (ours.detach().double().cpu() - theirs.detach()).abs().max() / theirs.detach().abs().max()
        assert error <= bound, f"{case}: off by {error:.2e}"


def _attend(q, k, v, options):
    """Return attention of one document from its formula, (T, H, W)."""
    num_groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(num_groups, dim=1) for x in (k, v))
    score = torch.einsum("thw,shw->hts", q, k) * options.get("softmax_scale", q.shape[-1] ** -0.5)
    left, right = options.get("window_size", (-1, -1))
    distance = torch.arange(len(q))[:, None] - torch.arange(len(k))
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if options["causal"]:
        hidden |= distance < 0
    if left >= 0:
        hidden |= distance > left
    if right >= 0:
        hidden |= -distance > right
    return torch.einsum("hts,shw->thw", score.masked_fill(hidden, -torch.inf).softmax(-1), v)
