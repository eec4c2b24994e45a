"""Count, on a CPU, the operations that would make the host wait for a GPU.

What the dispatcher sees (``.item()``, ``bool(tensor)``, nonzero, bincount, indexing with bool tensors, ...) and the Tensor methods that it does not
see (``tolist``, ``numpy``, ``cpu``). Copies inside C++ kernels stay unseen; the GPU lane covers them with torch.cuda.set_sync_debug_mode("error").
"""

import contextlib
import traceback
from collections import Counter
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_WAITING = {
    "_local_scalar_dense", "item", "is_nonzero", "nonzero", "nonzero_numpy", "argwhere", "bincount", "masked_select", "equal", "allclose",
    "unique_dim", "unique_consecutive", "unique_dim_consecutive", "_unique", "_unique2",
}  # fmt: skip
_INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"}
# Frames between the caller and the counter.
_MACHINERY = (__file__, "torch/_dynamo", "torch/utils/_python_dispatch", "torch/_compile")
_UNDISPATCHED = ("tolist", "numpy", "cpu")


class HostWaits(TorchDispatchMode):
    """What waited, by operation, and where each wait came from.

    ``F.one_hot`` with a number of classes checks its input on a CPU only (two ``.item()``): those are no waits on CUDA and are left out.
    """

    def __init__(self):
        super().__init__()
        self.count = Counter()
        self.origin = []

    @property
    def total(self):
        return sum(self.count.values())

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in _WAITING:
            self.note(name)
        elif name == "repeat_interleave" and (kwargs or {}).get("output_size") is None and "Tensor" in func._overloadname:
            self.note("repeat_interleave without output_size")
        elif name in _INDEXING and any(torch.is_tensor(index) and index.dtype in (torch.bool, torch.uint8) for index in args[1]):
            self.note(f"{name} with a bool tensor")
        return func(*args, **(kwargs or {}))

    def note(self, name):
        frames = [frame for frame in traceback.extract_stack() if not any(part in frame.filename for part in _MACHINERY)]
        if "one_hot(" in (frames[-1].line or ""):
            return
        self.count[name] += 1
        self.origin.append(f"{name}: {frames[-1].filename}:{frames[-1].lineno} {frames[-1].line}")


@contextlib.contextmanager
def count_host_waits():
    """Yield a HostWaits that counts until the block ends; covers the backward and recomputation on a CPU, which run in the calling thread."""
    waits = HostWaits()

    def watch(name):
        original = getattr(torch.Tensor, name)

        def method(self, *args, **kwargs):
            waits.note(name)
            return original(self, *args, **kwargs)

        return mock.patch.object(torch.Tensor, name, method)

    with contextlib.ExitStack() as stack:
        for name in _UNDISPATCHED:
            stack.enter_context(watch(name))
        stack.enter_context(waits)
        yield waits


@contextlib.contextmanager
def waits_are_errors():
    """On a CUDA device: whatever makes the host wait raises."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
