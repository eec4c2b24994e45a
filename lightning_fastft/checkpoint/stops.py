"""Handle signals that ask a run to stop, and end a run that was saved for one."""

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
# Under torchrun one Ctrl-C arrives twice: from the terminal, and forwarded by torchrun.
_SAME_INTERRUPT_S = 0.5
_STANDARD_ERROR = 2


class RunStopped(SystemExit):
    """Raised to end a run that received a signal and was saved at an optimizer step.

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
    """Record SIGTERM and SIGUSR1; a second signal has no effect.

    Handlers that were installed before are called too, except those for which ``is_ignored`` returns True. The first
    Ctrl-C (SIGINT) can be recorded as well; a second one raises KeyboardInterrupt.
    """

    def __init__(self) -> None:
        self.received = 0
        self._others: dict[int, list[Callable[..., Any]]] = {}
        # The previous handler of each signal.
        self._before: dict[int, Any] = {}
        # Time of the first Ctrl-C, on the monotonic clock.
        self._interrupted_s: float | None = None
        self._answer = ""
        self._process = os.getpid()
        self._signals: tuple[int, ...] = ()
        self._wakeup: socket.socket | None = None
        self._watching: threading.Thread | None = None
        self._num_progress = 0
        self._is_saving = False

    def __getstate__(self) -> dict[str, Any]:
        """Drop handlers and the watchdog thread, which belong to the process of the original object."""
        return vars(self) | {"_wakeup": None, "_watching": None, "_others": {}, "_before": {}}

    def install(
        self, signals: tuple[int, ...] = STOP_SIGNALS, *, is_ignored: Callable[[Any], bool] = lambda handler: False
    ) -> bool:
        """Install the handlers; return False outside of the main thread, where that is impossible."""
        if threading.current_thread() is not threading.main_thread():
            return False
        self._signals = signals
        for number in signals:
            present = signal.getsignal(number)
            if present == self._note:
                continue
            # Lightning composes handlers, and its own handler would act in the middle of a step.
            handlers = getattr(present, "signal_handlers", [present])
            self._others[number] = [handler for handler in handlers if callable(handler) and not is_ignored(handler)]
            self._before[number] = present
            signal.signal(number, self._note)
        return True

    def install_interrupt(self, answer: str) -> bool:
        """Install a handler for Ctrl-C; return False if its behaviour must not change.

        That is the case in interactive sessions such as notebooks, if another handler is installed or the signal is
        ignored, and outside of the main thread. The answer is written to standard error at the first Ctrl-C.
        """
        is_interactive = hasattr(sys, "ps1") or bool(sys.flags.interactive)
        if is_interactive or threading.current_thread() is not threading.main_thread():
            return False
        if signal.getsignal(signal.SIGINT) == self._note_interrupt:
            return True
        if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            return False
        self._answer, self._process = answer, os.getpid()
        self._before[signal.SIGINT] = signal.default_int_handler
        signal.signal(signal.SIGINT, self._note_interrupt)
        return True

    def uninstall(self) -> None:
        """Stop the watchdog thread, and restore the handlers that no one has replaced since; may be called twice."""
        self.unwatch()
        if threading.current_thread() is threading.main_thread():
            for number, handler in self._before.items():
                if signal.getsignal(number) in (self._note, self._note_interrupt):
                    signal.signal(number, handler)
        self._before = {}

    def watch(self, limit_s: float) -> None:
        """Start a thread that ends the process if it makes no progress for limit_s after a signal.

        A hung rank never reaches the step at which it would stop. Python runs signal handlers in the main thread, which
        may block in a collective, so the thread reads signals from ``signal.set_wakeup_fd``. It prints the stacks to
        standard error and uses the exit code of a stopped run. It does nothing if another library uses the wakeup fd,
        or outside of the main thread.
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
        # Otherwise signals of a forked loader worker would reach this process.
        unwatch = weakref.WeakMethod(self.unwatch)
        os.register_at_fork(after_in_child=lambda: _call(unwatch()))
        self._watching = threading.Thread(
            target=self._end_if_hung, args=(read, limit_s), name="fastft-stop", daemon=True
        )
        self._watching.start()

    def unwatch(self) -> None:
        """Stop the watchdog thread; a second call has no effect."""
        wakeup, self._wakeup = self._wakeup, None
        if wakeup is not None:
            signal.set_wakeup_fd(-1)
            wakeup.close()
            # The thread reads the end of the stream and ends. A forked child has no such thread.
            if self._watching is not None:
                self._watching.join()

    def note_progress(self) -> None:
        """Record progress of the run."""
        self._num_progress += 1
        self._is_saving = False

    def note_save(self) -> None:
        """Record the start of a save, which has no time limit, until the next progress."""
        self._is_saving = True

    def _end_if_hung(self, wakeup: socket.socket, limit_s: float) -> None:
        number, num_progress = 0, -1
        with wakeup:
            while True:
                # The time limit starts with a signal.
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
                    number = next((found for found in told if found in self._signals), 0)
                    num_progress = self._num_progress

    def _end(self, number: int, limit_s: float) -> None:
        name = signal.Signals(number).name
        with contextlib.suppress(OSError):
            os.write(
                _STANDARD_ERROR,
                f"{name}: no progress for {limit_s:g} s, so the process ends now without a save.\n".encode(),
            )
            faulthandler.dump_traceback(_STANDARD_ERROR, all_threads=True)
        os._exit(128 + number)

    def _note_interrupt(self, number: int, frame: FrameType | None) -> None:
        # Forked DataLoader workers inherit this handler and get the terminal's signal too; they continue until the run
        # ends.
        if os.getpid() != self._process:
            return
        if self._interrupted_s is not None:
            if time.monotonic() - self._interrupted_s > _SAME_INTERRUPT_S:
                signal.default_int_handler(number, frame)
            return
        self._interrupted_s = time.monotonic()
        self.received = self.received or number
        # Logging and sys.stderr are not reentrant, and this handler may interrupt them.
        with contextlib.suppress(OSError):
            os.write(_STANDARD_ERROR, self._answer.encode())

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = self.received or number
        for handler in self._others.get(number, []):
            handler(number, frame)


def _call(action: Callable[[], None] | None) -> None:
    if action is not None:
        action()
