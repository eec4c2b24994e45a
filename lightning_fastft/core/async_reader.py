"""Read values of the device late: they are copied to pinned memory, and no step waits for the copy."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch


class AsyncScalarReader:
    """Read small device tensors on the host without a host sync.

    A pushed tensor is copied on the current stream; ``poll`` hands out, in order, those whose copy has finished. On the
    CPU they have finished at once. Holds no device object before the first push and can be pickled when empty.

    Example:
        >>> reader = AsyncScalarReader()
        >>> reader.push("loss", torch.tensor(2.0))
        >>> [(tag, float(value)) for tag, value in reader.poll()]
        [('loss', 2.0)]
    """

    def __init__(self) -> None:
        # Tag, value on the host, and the end of its copy; None if it has arrived.
        self._pending: deque[tuple[Any, torch.Tensor, torch.cuda.Event | None]] = deque()
        self._free: list[torch.Tensor] = []

    def __len__(self) -> int:
        return len(self._pending)

    def push(self, tag: Any, value: torch.Tensor) -> None:
        """Begin to copy a tensor; tag comes back with its value.

        Cost:
            One small copy on the current stream; pinned memory of its size, reused.
        """
        value = value.detach()
        if value.device.type != "cuda":
            self._pending.append((tag, value.clone(), None))
            return
        host = self._take_buffer(value)
        host.copy_(value, non_blocking=True)
        done = torch.cuda.Event()
        done.record(torch.cuda.current_stream(value.device))
        self._pending.append((tag, host, done))

    def poll(self) -> list[tuple[Any, torch.Tensor]]:
        """Return the values that arrived since the last call, oldest first, as CPU tensors that the caller owns.

        Cost:
            No host sync.
        """
        arrived = []
        while self._pending:
            tag, host, done = self._pending[0]
            if done is not None and not done.query():
                break
            self._pending.popleft()
            arrived.append((tag, self._hand_out(host, done)))
        return arrived

    def wait(self) -> list[tuple[Any, torch.Tensor]]:
        """Return everything that was pushed, waiting for the device: for the end of a run.

        Cost:
            One host synchronisation.
        """
        pending, self._pending = self._pending, deque()
        if pending and pending[-1][2] is not None:
            pending[-1][2].synchronize()
        return [(tag, self._hand_out(host, done)) for tag, host, done in pending]

    def clear(self) -> None:
        """Drop unread values and the pinned memory."""
        self._pending.clear()
        self._free.clear()

    def _take_buffer(self, value: torch.Tensor) -> torch.Tensor:
        for index, buffer in enumerate(self._free):
            if buffer.shape == value.shape and buffer.dtype == value.dtype:
                return self._free.pop(index)
        return torch.empty(value.shape, dtype=value.dtype, pin_memory=True)

    def _hand_out(self, host: torch.Tensor, done: torch.cuda.Event | None) -> torch.Tensor:
        """Return a value that the caller owns."""
        if done is None:
            return host
        value = host.clone()
        self._free.append(host)
        return value
