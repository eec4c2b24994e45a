"""Signals that ask a run to end, noted when they come, and how a run ends that was saved for one."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

STOP_SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name))
# One Ctrl-C under torchrun comes twice: from the terminal, and from torchrun, which hands on what it got.
_SAME_INTERRUPT_S = 0.5
_STANDARD_ERROR = 2


class RunStopped(SystemExit):
    """A run that was told to end by a signal was saved at an optimizer step, and ends.

    Args:
        number: The signal; the exit code is 128 more.
        step: Optimizer step of the checkpoint.
        path: The checkpoint; a text where it is a URL.

    Example:
        >>> RunStopped(signal.SIGTERM, step=3, path=Path("stopped-step=3.ckpt")).code
        143
    """

    def __init__(self, number: int, *, step: int, path: Path | str) -> None:
        super().__init__(128 + number)
        self.signal_name = signal.Signals(number).name
        self.step = step
        self.path = path


class StopSignals:
    """Note SIGTERM and SIGUSR1, and do nothing else when they come: a second one changes nothing.

    Handlers that somebody else had installed are called as well, but for those that ``is_ignored`` names. Ctrl-C (SIGINT) can be noted too: the first
    one; a second one is a KeyboardInterrupt as ever.
    """

    def __init__(self) -> None:
        self.received = 0
        self._others: dict[int, list[Callable[..., Any]]] = {}
        # Of the first Ctrl-C, on the clock of the host.
        self._interrupted_s: float | None = None
        self._answer = ""
        self._process = os.getpid()

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

    def install_interrupt(self, answer: str) -> bool:
        """Take Ctrl-C over as well; False where it is to stay what it is.

        That is in a notebook or another interactive session, where an interrupt ends the cell and not the process; where somebody else has taken it
        over, or it is ignored; and in any thread but the main one.

        Args:
            answer: What the first Ctrl-C is answered with, at once, on standard error; empty for nothing.
        """
        is_interactive = hasattr(sys, "ps1") or bool(sys.flags.interactive)
        if is_interactive or threading.current_thread() is not threading.main_thread():
            return False
        if signal.getsignal(signal.SIGINT) == self._note_interrupt:
            return True
        if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            return False
        self._answer, self._process = answer, os.getpid()
        signal.signal(signal.SIGINT, self._note_interrupt)
        return True

    def _note_interrupt(self, number: int, frame: FrameType | None) -> None:
        # Workers of a DataLoader that were forked have this handler and get the signal of the terminal too: they go on until the run ends.
        if os.getpid() != self._process:
            return
        if self._interrupted_s is not None:
            if time.monotonic() - self._interrupted_s > _SAME_INTERRUPT_S:
                signal.default_int_handler(number, frame)
            return
        self._interrupted_s = time.monotonic()
        self.received = self.received or number
        # Not through logging or sys.stderr, in the middle of whose work this may be.
        with contextlib.suppress(OSError):
            os.write(_STANDARD_ERROR, self._answer.encode())

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = self.received or number
        for handler in self._others.get(number, []):
            handler(number, frame)
