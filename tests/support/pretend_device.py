"""A device without hardware: what is moved to it stays in host memory, and is counted while it lives."""

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode


class PretendDevice(TorchFunctionMode):
    """Run ``tensor.to(device)`` for a CUDA device that is not there; ``peak_bytes`` is the most that was on it."""

    def __init__(self):
        super().__init__()
        self.device = torch.device("cuda", 0)
        self.peak_bytes, self._held = 0, {}

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        given = [*args[1:], kwargs.get("device")]
        if func is not torch.Tensor.to or self.device not in [x for x in given if isinstance(x, torch.device)]:
            return func(*args, **kwargs)
        kwargs.pop("device", None)
        rest = [x for x in args[1:] if x != self.device]
        copy = func(args[0], torch.device("cpu"), *rest, **{**kwargs, "copy": True})
        storage = copy.untyped_storage()
        self._held = {ref: size for ref, size in self._held.items() if not ref.expired()}
        self._held[StorageWeakRef(storage)] = storage.nbytes()
        self.peak_bytes = max(self.peak_bytes, sum(self._held.values()))
        return copy
