"""Signals that ask a run to end, noted when they come."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

STOP_SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name))


class StopSignals:
    """Note SIGTERM and SIGUSR1, and do nothing else when they come: a second one changes nothing.

    Handlers that somebody else had installed are called as well, but for those that ``is_ignored`` names.
    """

    def __init__(self) -> None:
        self.received = 0
        self._others: dict[int, list[Callable[..., Any]]] = {}

    def install(self, signals: tuple[int, ...] = STOP_SIGNALS, *, is_ignored: Callable[[Any], bool] = lambda handler: False) -> bool:
        """Take the signals over; False where that cannot be done: only the main thread of a process can."""
        if threading.current_thread() is not threading.main_thread():
            return False
        for number in signals:
            present = signal.getsignal(number)
            if present == self._note:
                continue
            # Lightning composes handlers; its own one would act in the middle of a step.
            handlers = getattr(present, "signal_handlers", [present])
            self._others[number] = [handler for handler in handlers if callable(handler) and not is_ignored(handler)]
            signal.signal(number, self._note)
        return True

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = self.received or number
        for handler in self._others.get(number, []):
            handler(number, frame)
