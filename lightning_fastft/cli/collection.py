"""Pause the garbage collector while modules are imported and objects are made."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused_collection() -> Iterator[None]:
    """Collect no garbage within the block.

    Imports make hundreds of thousands of objects that stay, and each collection goes through all of them: 13 % of the
    time to import Lightning, transformers and PEFT.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
