"""Keep Python's garbage collector out of imports and of training steps."""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_fastft.core.patcher import ModelPatcher

# Objects after which Python collects within a step all the same. A step keeps thousands, and Python's 700 make it
# collect up to ten times a step, each time through everything that the backward still needs.
_STEP_OBJECTS = 50_000
# Optimizer steps between collections of old objects, which take some tenths of a second.
_FULL_INTERVAL = 1000


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


def collect_between_steps(patcher: ModelPatcher) -> bool:
    """Let ``collect_after_step`` collect in place of Python, until the patcher undoes it.

    Returns:
        False if nothing changed, because collection is disabled or rarer already.
    """
    thresholds = gc.get_threshold()
    if not gc.isenabled() or not 0 < thresholds[0] < _STEP_OBJECTS:
        return False
    gc.set_threshold(_STEP_OBJECTS, *thresholds[1:])
    patcher.add_undo(functools.partial(gc.set_threshold, *thresholds))
    return True


def collect_after_step(step: int) -> None:
    """Collect the garbage of an optimizer step, and old garbage every 1,000 steps.

    Args:
        step: Number of the optimizer step.

    Cost:
        About 1 ms on the host, because little of a step is left at its end. Within the steps of 28 recomputed layers
        Python's own collections take 12 ms a step (``python -m benchmarks.host_step``).
    """
    gc.collect(2 if step % _FULL_INTERVAL == 0 else 1)
