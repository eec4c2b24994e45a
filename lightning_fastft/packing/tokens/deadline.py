"""Limit the CPU time of a chat template, which is untrusted code and may loop forever."""

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
    """Abort a template. A BaseException, so that neither the template nor a library catches it."""


@contextmanager
def template_deadline() -> Iterator[None]:
    """Abort the block after ``TEMPLATE_SECONDS`` of CPU time, independent of the load of the machine.

    The timer is a signal, so it works only in the main thread and not on Windows. The previous handler and timer are
    restored.

    Raises:
        DataError: The block ran too long.

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
            f"The chat template ran for more than {TEMPLATE_SECONDS:.0f} s on one conversation, so it probably loops "
            "forever. Give another template with --data.chat_template FILE.jinja."
        ) from None
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, *before)
        signal.signal(signal.SIGVTALRM, signal.SIG_DFL if handler is None else handler)


def _stop(number: int, frame: FrameType | None) -> None:
    raise _OutOfTimeError
