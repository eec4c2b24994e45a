"""Log what a run is doing before its steps: ``NAME ...`` when a phase begins, ``NAME: 1.2 s`` when it ends.

Nothing is shown unless a handler listens: the command line's ``cli/phases.py``, or your own on this logger.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

LOGGER = logging.getLogger("lightning_fastft.phases")


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Log a phase when it begins, and with its seconds when it ends.

    Example:
        >>> with phase("loading the model"):
        ...     pass
    """
    begin = begin_phase(name)
    try:
        yield
    finally:
        log_phase(name, time.perf_counter() - begin)


def begin_phase(name: str) -> float:
    """Log that a phase begins; return the time of ``time.perf_counter``."""
    LOGGER.info("%s ...", name, extra={"is_begin": True})
    return time.perf_counter()


def log_phase(name: str, seconds: float) -> None:
    """Log the seconds of a phase that has ended."""
    LOGGER.info("%s: %.1f s", name, seconds, extra={"seconds": seconds})
