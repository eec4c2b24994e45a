"""Save and restore the states of all random number generators of a process."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch


class RandomState(NamedTuple):
    """The random states of Python, numpy, torch and the CUDA device of this process.

    Args:
        python: As ``random.getstate()``.
        numpy: As ``numpy.random.get_state()``.
        cpu: As ``torch.get_rng_state()``. Shape (5056,); uint8, on the host.
        cuda: State of the CUDA device, uint8, on the host; None without a CUDA device.

    Example:
        >>> before = RandomState.capture(torch.device("cpu"))
        >>> drawn = torch.rand(3)
        >>> before.restore(torch.device("cpu"))
        >>> torch.equal(torch.rand(3), drawn)
        True
    """

    python: tuple[Any, ...]
    numpy: tuple[Any, ...]
    cpu: torch.Tensor
    cuda: torch.Tensor | None

    @classmethod
    def capture(cls, device: torch.device) -> RandomState:
        """Return the current states.

        Cost:
            About 100 microseconds, mostly for numpy (timeit, one core). No host sync, because a CUDA generator keeps
            seed and offset on the host.
        """
        cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        numpy_state: Any = np.random.get_state(legacy=True)
        return cls(random.getstate(), numpy_state, torch.get_rng_state(), cuda)

    def restore(self, device: torch.device) -> None:
        """Set all generators to these states."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(self.cpu)
        if self.cuda is not None and device.type == "cuda":
            torch.cuda.set_rng_state(self.cuda, device)

    def to_plain(self) -> dict[str, Any]:
        """Return the states as tensors and plain types, for ``torch.load(weights_only=True)``."""
        version, words, gauss = self.python
        name, keys, position, has_gauss, cached = self.numpy
        return {
            "python": [version, torch.tensor(words, dtype=torch.int64), gauss],
            "numpy": [str(name), torch.from_numpy(keys.astype(np.int64)), int(position), int(has_gauss), float(cached)],
            "cpu": self.cpu.clone(),
            "cuda": None if self.cuda is None else self.cuda.clone(),
        }

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> RandomState:
        """Return the states of a ``to_plain`` result."""
        version, words, gauss = plain["python"]
        name, keys, position, has_gauss, cached = plain["numpy"]
        cuda = None if plain["cuda"] is None else plain["cuda"].cpu()
        # A host sync if the checkpoint was loaded onto a device; training has not begun.
        return cls(
            (version, tuple(words.tolist()), gauss),
            (name, keys.cpu().numpy().astype(np.uint32), position, has_gauss, cached),
            plain["cpu"].cpu(),
            cuda,
        )


@contextmanager
def drawing_apart(seed: int, *, device: torch.device) -> Iterator[None]:
    """Seed all generators inside the block, and restore their states afterwards.

    Work between two batches draws the same numbers in a resumed run: its random states are restored at the first batch.

    Args:
        seed: From 0 to 2^63 - 1.
        device: Device of the generator to seed besides those of the host.
    """
    before = RandomState.capture(device)
    try:
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.default_generator.manual_seed(seed)
        if device.type == "cuda":
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield
    finally:
        before.restore(device)
