"""The states of all random number generators of a process, as plain types and tensors."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import numpy as np
import torch


class RandomState(NamedTuple):
    """What Python, numpy, torch and the CUDA device of this process would draw next.

    Args:
        python: As ``random.getstate()``.
        numpy: As ``numpy.random.get_state()``.
        cpu: As ``torch.get_rng_state()``. Shape (5056,); uint8, on the host.
        cuda: The same of the CUDA device, uint8, on the host; None without one.

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
        """Return the present states.

        Cost:
            About 100 microseconds, most of them numpy's (timeit, one core); a CUDA generator keeps seed and offset on
            the host, so nothing waits for the device.
        """
        cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        return cls(random.getstate(), np.random.get_state(legacy=True), torch.get_rng_state(), cuda)  # type: ignore[arg-type]

    def restore(self, device: torch.device) -> None:
        """Make this what is drawn next."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(self.cpu)
        if self.cuda is not None and device.type == "cuda":
            torch.cuda.set_rng_state(self.cuda, device)

    def to_plain(self) -> dict[str, Any]:
        """Return what ``torch.load(weights_only=True)`` reads."""
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
        """Return the states that ``to_plain`` was called on."""
        version, words, gauss = plain["python"]
        name, keys, position, has_gauss, cached = plain["numpy"]
        cuda = None if plain["cuda"] is None else plain["cuda"].cpu()
        # Waits if the checkpoint was read onto a device: training has not begun.
        return cls(
            (version, tuple(words.tolist()), gauss),
            (name, keys.cpu().numpy().astype(np.uint32), position, has_gauss, cached),
            plain["cpu"].cpu(),
            cuda,
        )
