"""Show what a command is doing before the first step, once per phase, on standard error of the first rank."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from lightning_fastft.core.phases import LOGGER

# Shorter phases are not shown.
SHORTEST_SECONDS = 0.2
# Rank variables of launchers, as Lightning reads them.
_RANKS = ("RANK", "LOCAL_RANK", "NODE_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK")
_ERASE_LINE = "\r\x1b[K"


@contextmanager
def shown_phases() -> Iterator[None]:
    """Show phases while the block runs."""
    handler, level, propagates = _Phases(logging.INFO), LOGGER.level, LOGGER.propagate
    LOGGER.addHandler(handler)
    LOGGER.setLevel(logging.INFO)
    LOGGER.propagate = False
    try:
        yield
    finally:
        LOGGER.removeHandler(handler)
        LOGGER.setLevel(level)
        LOGGER.propagate = propagates


class _Phases(logging.Handler):
    """Write a line per finished phase; on a terminal, also the name of the current phase."""

    def emit(self, record: logging.LogRecord) -> None:
        if not _is_first_rank():
            return
        stream, text, seconds = sys.stderr, record.getMessage(), getattr(record, "seconds", None)
        line = "" if seconds is not None and seconds < SHORTEST_SECONDS else f"{text}\n"
        if not stream.isatty():
            stream.write("" if getattr(record, "is_begin", False) else line)
        elif getattr(record, "is_begin", False):
            # The next output writes over it.
            stream.write(f"{_ERASE_LINE}{text}\r")
        else:
            stream.write(_ERASE_LINE + line)
        stream.flush()


def _is_first_rank() -> bool:
    if "lightning.fabric" in sys.modules:
        from lightning.fabric.utilities.rank_zero import rank_zero_only

        return getattr(rank_zero_only, "rank", 0) == 0
    return all(os.environ.get(name, "0") == "0" for name in _RANKS)
