"""One record of what a run knows, passed to the folders that plan for it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

_T = TypeVar("_T")

logger = logging.getLogger(__name__)


def _first_rank(value: _T) -> _T:
    """Return a value as it is: there is one rank."""
    return value


def no_bytes() -> int:
    """Return 0: nothing is missing."""
    return 0


class RunEnvironment(NamedTuple):
    """One read-only record of a run. A strategy builds it; without Lightning the defaults describe a single process.

    Args:
        report: Takes what the user should read.
        agree: Returns the value that all ranks follow, from this rank's.
        plans_together: Whether these ranks must always follow one plan, because a recomputed layer exchanges data.
        num_local_ranks: Ranks that share the memory of this host.
        longest_pack: Tokens of the longest pack to come; 0 where it is unknown.
        missing_bytes: Returns the bytes of device memory that will be allocated later and then stay, such as the
            optimizer state before the first step.
        averaging: Name of a callback that reads and writes every weight of the model; "" for none.

    Example:
        >>> RunEnvironment(num_local_ranks=2).agree("plan")
        'plan'
    """

    report: Callable[[str], Any] = logger.info
    agree: Callable[[Any], Any] = _first_rank
    plans_together: bool = False
    num_local_ranks: int = 1
    longest_pack: int = 0
    missing_bytes: Callable[[], int] = no_bytes
    averaging: str = ""
