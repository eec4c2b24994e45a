"""A bound on the processor time of code that comes with data: chat templates loop as long as they like."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from lightning_fastft.core.errors import DataError

# One conversation takes milliseconds.
TEMPLATE_SECONDS = 2.0


class _OutOfTimeError(BaseException):
    """Ends a template; nothing that a template or a library catches."""


@contextmanager
def template_deadline() -> Iterator[None]:
    """End the block after ``TEMPLATE_SECONDS`` of processor time, so that a busy machine changes nothing.

    The timer is a signal, which Python hands to the main thread alone; other threads, and Windows, have no bound. A
    handler and a timer of the user's are put back.

    Raises:
        DataError: The time is over.

    Cost:
        Four system calls.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return
    handler = signal.signal(signal.SIGVTALRM, _stop)
    before = signal.setitimer(signal.ITIMER_VIRTUAL, TEMPLATE_SECONDS)
    try:
        yield
    except _OutOfTimeError:
        raise DataError(
            f"The chat template ran for more than {TEMPLATE_SECONDS:.0f} s on one conversation: it loops or calls "
            "itself without end. Give another "
            "one with --data.chat_template FILE.jinja, or look for nested loops in this one."
        ) from None
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, *before)
        signal.signal(signal.SIGVTALRM, signal.SIG_DFL if handler is None else handler)


def _stop(number: int, frame: FrameType | None) -> None:
    raise _OutOfTimeError
