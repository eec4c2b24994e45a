"""Read values of the device after they are there: copies into pinned memory that nobody waits for."""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

import torch


class _Pending(NamedTuple):
    tag: Any
    host: torch.Tensor
    done: torch.cuda.Event | None


class AsyncScalarReader:
    """Read small device tensors on the host without a host sync.

    A pushed tensor is copied on the current stream; ``poll`` hands out, in order, those whose copy has finished. On the
    CPU they have finished at once. Holds no device object before the first push and can be pickled when empty.

    Example:
        >>> copies = AsyncScalarReader()
        >>> copies.push("loss", torch.tensor(2.0))
        >>> [(tag, float(value)) for tag, value in copies.poll()]
        [('loss', 2.0)]
    """

    def __init__(self) -> None:
        self._pending: deque[_Pending] = deque()
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
            self._pending.append(_Pending(tag, value.clone(), None))
            return
        host = self._take_buffer(value)
        host.copy_(value, non_blocking=True)
        done = torch.cuda.Event()
        done.record(torch.cuda.current_stream(value.device))
        self._pending.append(_Pending(tag, host, done))

    def poll(self) -> list[tuple[Any, torch.Tensor]]:
        """Return the values that arrived since the last call, oldest first, as CPU tensors that the caller owns.

        Cost:
            No host sync.
        """
        arrived = []
        while self._pending and (self._pending[0].done is None or self._pending[0].done.query()):
            arrived.append(self._hand_out(self._pending.popleft()))
        return arrived

    def wait(self) -> list[tuple[Any, torch.Tensor]]:
        """Return everything that was pushed, waiting for the device: for the end of a run.

        Cost:
            One host synchronisation.
        """
        if self._pending and self._pending[-1].done is not None:
            self._pending[-1].done.synchronize()
        return [self._hand_out(self._pending.popleft()) for _ in range(len(self._pending))]

    def clear(self) -> None:
        """Drop unread values and the pinned memory."""
        self._pending.clear()
        self._free.clear()

    def _take_buffer(self, value: torch.Tensor) -> torch.Tensor:
        for index, buffer in enumerate(self._free):
            if buffer.shape == value.shape and buffer.dtype == value.dtype:
                return self._free.pop(index)
        return torch.empty(value.shape, dtype=value.dtype, pin_memory=True)

    def _hand_out(self, pending: _Pending) -> tuple[Any, torch.Tensor]:
        if pending.done is None:
            return pending.tag, pending.host
        value = pending.host.clone()
        self._free.append(pending.host)
        return pending.tag, value
