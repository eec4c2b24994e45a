"""Explain out-of-memory errors, and detect the changes of a failed optimizer step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.core.optimizer import LightningOptimizer

from lightning_fastft.activations.budgets import peak_memory_bytes
from lightning_fastft.core.errors import FastFTError

if TYPE_CHECKING:
    from torch.optim import Optimizer

# Messages of allocation failures that are not an OutOfMemoryError: torch's host allocator, the CUDA runtime, cuBLAS.
_REFUSALS = (
    "DefaultCPUAllocator: can't allocate memory",
    "not enough memory: you tried to allocate",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
)
# Optimizers that increase the version counter of a tensor with every write.
_WITNESSED = ("torch.optim.", "lightning_fastft.")


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error is a failed allocation that has not been explained yet.

    Example:
        >>> errors = (torch.OutOfMemoryError("..."), RuntimeError("CUDA error: out of memory"), ValueError())
        >>> [is_out_of_memory(error) for error in errors]
        [True, True, False]
    """
    if isinstance(error, FastFTError):
        return False
    is_named = isinstance(error, (torch.OutOfMemoryError, MemoryError))
    return is_named or (isinstance(error, RuntimeError) and any(refusal in str(error) for refusal in _REFUSALS))


def describe_peak(device: torch.device) -> str:
    """Return the peak memory so far: of the device if its allocator counts, else of this process on the host."""
    if device.type != "cuda":
        peak = peak_memory_bytes(device)
        return (
            f"peak of this process so far {peak / 2**30:.2f} GiB"
            if peak
            else "peak of this process not counted on Windows"
        )
    allocated, reserved = peak_memory_bytes(device), torch.cuda.max_memory_reserved(device)
    total = torch.cuda.get_device_properties(device).total_memory
    return (
        f"peak so far {allocated / 2**30:.2f} GiB allocated and {reserved / 2**30:.2f} GiB reserved, of "
        f"{total / 2**30:.2f} GiB"
    )


class StepWitness:
    """Detect the changes of a failed optimizer step by the version counters of its tensors.

    Cost:
        ``note`` reads a host integer per weight and per tensor of its state; no host sync.
    """

    def __init__(self, optimizer: Optimizer | LightningOptimizer) -> None:
        self._optimizer: Any = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        self._values: list[Any] = []
        self._versions: list[int | None] | None = None
        self._num_known = 0

    def note(self) -> None:
        """Record the version counters after the backward, before the step."""
        # This runs in every step. So nothing is looked up by tensor, whose hash is slow, and values that are not
        # tensors are sorted out only after a failed step.
        self._values = [param for group in self._optimizer.param_groups for param in group["params"]]
        for values in self._optimizer.state.values():
            self._values += values.values()
        self._versions = [getattr(value, "_version", None) for value in self._values]
        self._num_known = len(self._optimizer.state)

    def describe(self) -> str:
        """Describe weights and state after the step failed, and remove state that the step had just created."""
        name = type(self._optimizer).__name__
        if self._versions is None:
            return "No weight was stepped."
        noted = [
            (value, version) for value, version in zip(self._values, self._versions) if isinstance(value, torch.Tensor)
        ]
        module = f"{type(self._optimizer).__module__}."
        if not module.startswith(_WITNESSED) or any(hasattr(tensor, "device_mesh") for tensor, _ in noted):
            return (
                f"The changes of {name} cannot be detected, so some weights may be stepped: continue from the last "
                "checkpoint."
            )
        changed = sum(tensor._version != version for tensor, version in noted)
        if changed:
            return (
                f"{name} had already changed {changed} of {len(noted)} tensors of weights and state: continue from the "
                "last checkpoint."
            )
        # The state is in the order of creation.
        for param in list(self._optimizer.state)[self._num_known :]:
            del self._optimizer.state[param]
        return "Weights and optimizer state are as before the step."
