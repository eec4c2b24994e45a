"""The bound of every kernel test, NaN-poisoned inputs, and a watch on host syncs and large tensors."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

WAITS = ("_local_scalar_dense", "nonzero", "bincount", "masked_select", "unique", "equal", "item")


# With enough values, one that is rounded once differs from the rounded truth only where the truth lies almost between
# two numbers.
NUM_FOR_SHARE, SHARE = 200, 0.01
# Triton's interpreter cuts bf16 off instead of rounding it.
ROUNDED_DTYPES = (torch.float16,) if os.environ.get("TRITON_INTERPRET") == "1" else (torch.float16, torch.bfloat16)
# Around memory that is given to write to.
BESIDE = 1024.0


def relative_error(value, truth):
    return float((value.double() - truth.double()).norm() / truth.double().norm().clamp_min(1e-30))


class Watch(TorchDispatchMode):
    """Count what would wait for a device, and the largest tensor that any operator returns."""

    def __init__(self):
        super().__init__()
        self.waits, self.largest, self.shapes = [], 0, set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name()
        is_mask_index = "aten::index" in name and any(
            isinstance(leaf, torch.Tensor) and leaf.dtype is torch.bool for leaf in tree_leaves(args[1:2])
        )
        if any(wait in name for wait in WAITS) or is_mask_index:
            self.waits.append(name)
        out = func(*args, **(kwargs or {}))
        shapes = [leaf.shape for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        self.shapes.update(shapes)
        self.largest = max([self.largest, *(shape.numel() for shape in shapes)])
        return out


def one_unit(truth, dtype):
    """One unit in the last place of dtype at the largest true value."""
    largest = truth.abs().max().item() if truth.numel() else 0.0
    info = torch.finfo(dtype)
    return max(info.eps * 2.0 ** torch.tensor(max(largest, info.tiny)).log2().floor().item(), info.smallest_normal)


def assert_within_bound(name, ours, *, plain, truth, dtype):
    """Our error is at most twice that of plain PyTorch in the same dtype, or one unit in the last place at the
    largest true value.
    """
    assert ours.shape == truth.shape, f"{name}: shape {tuple(ours.shape)} instead of {tuple(truth.shape)}"
    assert torch.isfinite(ours).all(), f"{name}: not finite"
    if truth.numel() == 0:
        return
    error = (ours.double() - truth).abs().max().item()
    plain_error = (plain.double() - truth).abs().max().item()
    bound = max(2 * plain_error, one_unit(truth, dtype))
    assert error <= bound, f"{name}: error {error:.3g} above {bound:.3g} (plain PyTorch {plain_error:.3g})"


def assert_rounded_once(name, ours, *, plain, truth, dtype, rounded_truth=None):
    """Within the bound of fp32 arithmetic that is rounded once, and in a narrow dtype almost everywhere the rounded
    truth itself; ``rounded_truth`` replaces it, for arithmetic that also rounds in between.

    Errors of a handful of values are luck: plain PyTorch and the truth may have more rows, of which ours are the first.
    """
    assert ours.dtype is dtype
    plain, num_rows = plain.to(dtype), len(ours)
    # Rows that ours does not have are taken from plain PyTorch, whose own error is always within the bound.
    assert_within_bound(name, torch.cat([ours, plain[num_rows:]]), plain=plain, truth=truth, dtype=dtype)
    if dtype not in ROUNDED_DTYPES or ours.numel() < NUM_FOR_SHARE:
        return
    expected = (truth if rounded_truth is None else rounded_truth)[:num_rows].to(dtype)
    share, plain_share = ((one[:num_rows] != expected).double().mean().item() for one in (ours, plain))
    allowed = SHARE if rounded_truth is not None else max(2 * plain_share, SHARE)
    assert share <= allowed, (
        f"{name}: {share:.1%} of the values are not the rounded truth, at most {allowed:.1%} may be"
    )


def room_for(tensor):
    """NaN to write to, in the middle of a number that no result equals: what is read beside an input is NaN, which
    among NaN would not be seen.
    """
    buffer = torch.full([size + 2 for size in tensor.shape], BESIDE, dtype=tensor.dtype, device=tensor.device)
    return buffer[1:-1, 1:-1].fill_(float("nan"))


def assert_nothing_beside(tensor, *, fill=float("nan")):
    """Every value around the tensor, inside ``poisoned`` or ``room_for`` memory, is the one that was there before."""
    is_fill = tensor._base.isnan() if fill != fill else tensor._base == fill
    assert is_fill.sum() == is_fill.numel() - tensor.numel(), "written beside a tensor"


def poisoned(tensor):
    """The same values inside a larger buffer of NaN, one row and one column apart from its borders: strided, and
    a stray read is seen.
    """
    if tensor.is_floating_point():
        buffer = torch.full([size + 2 for size in tensor.shape], float("nan"), dtype=tensor.dtype, device=tensor.device)
    else:
        buffer = torch.full([size + 2 for size in tensor.shape], -(2**40), dtype=tensor.dtype, device=tensor.device)
    inner = buffer[tuple(slice(1, -1) for _ in tensor.shape)]
    inner.copy_(tensor)
    return inner


@contextmanager
def fresh_memory_is_nan() -> Iterator[None]:
    """Whatever PyTorch allocates holds NaN until it is written."""
    # Unlike use_deterministic_algorithms this does not import torch's compiler, which takes two seconds.
    torch.set_deterministic_debug_mode("error")
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode("default")
