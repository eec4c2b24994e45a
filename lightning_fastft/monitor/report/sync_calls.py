"""The calls that cause host syncs, and a fix for each."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_iter

_READ = (
    "keep the number on the device (add tensors up, torch.where instead of an if); to show it, copy it with .to('cpu', "
    "non_blocking=True), record an event behind the copy, and read it a step later, when the event has passed"
)
_SELECT = (
    "the size of the result depends on data: keep the shape (torch.where, multiply by the mask) or make the row "
    "numbers on the host with the batch"
)
_ASSIGN = "write x = torch.where(mask, value, x), or x.masked_fill_(mask, number): no row numbers are needed for that"
_UNIQUE = (
    "the size of the result depends on data: work it out on the host when the batch is made, or sort and compare "
    "neighbours, which keeps the size"
)
_COMPARE = (
    "the answer is a bool on the host: compare with (x == y).all(), keep it on the device, and read it a step later"
)
_TO_HOST = (
    "copy with .to('cpu', non_blocking=True), record an event behind the copy, and read it a step later, when the "
    "event has passed"
)
_TO_DEVICE = (
    "pin the host tensor (pin_memory=True in the DataLoader) and copy with non_blocking=True; constants: make them on "
    "the device once"
)
SYNCHRONIZE = (
    "wait for nothing in the step: let a stream wait for an event (stream.wait_event), and time with events that are "
    "read later"
)
OTHER = (
    "this call copies to or from the host, or asks the device for a size: move it out of the step, or make its "
    "input on the device"
)
# Fixes by the name of the operation.
REMEDIES = {
    **dict.fromkeys(("_local_scalar_dense", "item", "is_nonzero", "tolist", "numpy"), _READ),
    **dict.fromkeys(("nonzero", "nonzero_numpy", "argwhere", "masked_select"), _SELECT),
    **dict.fromkeys(("unique_dim", "unique_consecutive", "unique_dim_consecutive", "_unique", "_unique2"), _UNIQUE),
    **dict.fromkeys(("equal", "allclose"), _COMPARE),
    "bincount": "bincount asks for the largest value: torch.zeros(n, device=x.device).scatter_add_ with a known n, or "
    "searchsorted on sorted values",
    "repeat_interleave": "give output_size=, the sum of the repeats, which the host knows when it makes the batch",
    "cpu": _TO_HOST,
}
_INDEXING = {"index", "_unsafe_index"}
_ASSIGNING = {"index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put"}
_COPYING = {"_to_copy", "copy_", "_copy_from", "_copy_from_and_resize"}
# Methods of a tensor that the dispatcher does not see.
UNDISPATCHED = ("tolist", "numpy", "cpu")
# Operations in words.
NAMES = {
    "_local_scalar_dense": "reading a number (.item(), float(), int(), bool(), if)",
    "is_nonzero": "bool() of a tensor",
    **{name: f".{name}()" for name in ("item", *UNDISPATCHED)},
}


def judge_call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, is_cuda: bool) -> tuple[str, str] | None:
    """Return (operation, remedy) if a dispatched call causes a host sync, else None.

    On a CPU calls count that would sync if their tensors were on a GPU, except copies.
    """
    name = func.overloadpacket.__name__
    if name in _COPYING:
        return judge_copy(name, args, kwargs) if is_cuda else None
    is_index = name in _INDEXING or name in _ASSIGNING
    if not (name in REMEDIES or is_index) or not _is_on_device(args, kwargs, is_cuda=is_cuda):
        return None
    if is_index:
        return _judge_index(name, args, is_cuda=is_cuda)
    if name == "repeat_interleave":
        has_sizes = kwargs.get("output_size") is not None or "Tensor" not in func._overloadname
        return None if has_sizes else (f"{name} without output_size", REMEDIES[name])
    return name, REMEDIES[name]


def _judge_index(name: str, args: tuple[Any, ...], *, is_cuda: bool) -> tuple[str, str] | None:
    if not any(isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8) for index in args[1]):
        return None
    # ATen fills a number on the host in under the mask, without row numbers (canDispatchToMaskedFill).
    if is_cuda and name in _ASSIGNING and args[2].numel() == 1 and args[2].device.type == "cpu":
        return None
    return f"{name} with a bool tensor", _ASSIGN if name in _ASSIGNING else _SELECT


def _is_on_device(args: tuple[Any, ...], kwargs: dict[str, Any], *, is_cuda: bool) -> bool:
    tensors = [value for value in tree_iter((args, kwargs)) if isinstance(value, torch.Tensor)]
    if is_cuda:
        return any(tensor.is_cuda for tensor in tensors)
    return not tensors or any(not tensor.is_meta for tensor in tensors)


def judge_copy(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, str] | None:
    """Return (operation, remedy) of a copy between host and device; None if non_blocking with a pinned host tensor."""
    source = args[0] if name in ("_to_copy", "_copy_from", "_copy_from_and_resize") else args[1]
    if not isinstance(source, torch.Tensor):
        return None
    if name == "_to_copy":
        target = torch.device(kwargs.get("device") or source.device)
        is_free = bool(kwargs.get("non_blocking"))
        # The result of .to("cpu", non_blocking=True) is pinned.
        is_pinned = is_free
    else:
        other = args[1] if name.startswith("_copy_from") else args[0]
        target, is_pinned = other.device, other.device.type == "cpu" and other.is_pinned()
        is_free = bool(kwargs.get("non_blocking", args[2] if len(args) > 2 else False))
    ends = source.device.type, target.type
    if ends == ("cuda", "cpu") and not (is_free and is_pinned):
        return "copy to the host" + (" (pageable memory)" if is_free else ""), _TO_HOST
    if ends == ("cpu", "cuda") and not is_free and source.numel() > 0:
        return "copy to the device", _TO_DEVICE
    return None
