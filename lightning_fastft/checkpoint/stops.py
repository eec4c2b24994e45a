"""Signals that ask a run to end, noted when they come, and how a run ends that was saved for one."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import socket
import sys
import threading
import time
import weakref
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

    Handlers that somebody else had installed are called as well, but for those that ``is_ignored`` names. Ctrl-C
    (SIGINT) can be noted too: the first one; a second one is a KeyboardInterrupt as ever.
    """

    def __init__(self) -> None:
        self.received = 0
        self._others: dict[int, list[Callable[..., Any]]] = {}
        # Of the first Ctrl-C, on the clock of the host.
        self._interrupted_s: float | None = None
        self._answer = ""
        self._process = os.getpid()
        self._wakeup: socket.socket | None = None
        self._watching: threading.Thread | None = None
        self._num_progress = 0
        self._is_saving = False

    def __getstate__(self) -> dict[str, Any]:
        """A copied or pickled object listens to nothing: handlers and the watch belong to the original's process."""
        return vars(self) | {"_wakeup": None, "_watching": None, "_others": {}}

    def install(
        self, signals: tuple[int, ...] = STOP_SIGNALS, *, is_ignored: Callable[[Any], bool] = lambda handler: False
    ) -> bool:
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

        That is in a notebook or another interactive session, where an interrupt ends the cell and not the process;
        where somebody else has taken it over, or it is ignored; and in any thread but the main one.

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

    def watch(self, limit_s: float) -> None:
        """End the process where it makes no progress for limit_s after a signal came: a hung rank reaches no step at
        which it could stop.

        Python runs handlers in the main thread, which may wait in a collective that nobody answers. A thread is told of
        signals by the interpreter's own handler instead. It leaves the stacks on standard error, and the exit code that
        a stopped run has. No watch where another library uses ``signal.set_wakeup_fd``, or outside of the main thread.
        """
        self.unwatch()
        if threading.current_thread() is not threading.main_thread():
            return
        read, write = socket.socketpair()
        write.setblocking(False)
        before = signal.set_wakeup_fd(write.fileno(), warn_on_full_buffer=False)
        if before != -1:
            signal.set_wakeup_fd(before)
            read.close()
            write.close()
            return
        self._wakeup = write
        # A forked worker of a loader would tell this process of its own signals.
        unwatch = weakref.WeakMethod(self.unwatch)
        os.register_at_fork(after_in_child=lambda: _call(unwatch()))
        self._watching = threading.Thread(
            target=self._end_if_hung, args=(read, limit_s), name="fastft-stop", daemon=True
        )
        self._watching.start()

    def unwatch(self) -> None:
        """End the watch; a second call does nothing."""
        wakeup, self._wakeup = self._wakeup, None
        if wakeup is not None:
            signal.set_wakeup_fd(-1)
            wakeup.close()
            # It reads the end of the stream, and ends; a forked child has no such thread.
            if self._watching is not None:
                self._watching.join()

    def note_progress(self) -> None:
        """Note that the run goes on: a signal that came is seen at the next step."""
        self._num_progress += 1
        self._is_saving = False

    def note_save(self) -> None:
        """Note that a save begins, which takes as long as it takes, until the next progress."""
        self._is_saving = True

    def _end_if_hung(self, wakeup: socket.socket, limit_s: float) -> None:
        number, num_progress = 0, -1
        with wakeup:
            while True:
                # Nothing is waited for before a signal came.
                wakeup.settimeout(limit_s if number else None)
                try:
                    told = wakeup.recv(64)
                except TimeoutError:
                    if self._is_saving or self._num_progress != num_progress:
                        num_progress = self._num_progress
                        continue
                    self._end(number, limit_s)
                if not told:
                    return
                if not number:
                    number = next((found for found in told if found in STOP_SIGNALS), 0)
                    num_progress = self._num_progress

    def _end(self, number: int, limit_s: float) -> None:
        name = signal.Signals(number).name
        with contextlib.suppress(OSError):
            os.write(
                _STANDARD_ERROR,
                f"{name}: no progress for {limit_s:g} s, so there is no step to stop at; nothing is saved.\n".encode(),
            )
            faulthandler.dump_traceback(_STANDARD_ERROR, all_threads=True)
        os._exit(128 + number)

    def _note_interrupt(self, number: int, frame: FrameType | None) -> None:
        # Workers of a DataLoader that were forked have this handler and get the signal of the terminal too: they go on
        # until the run ends.
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


def _call(action: Callable[[], None] | None) -> None:
    if action is not None:
        action()
