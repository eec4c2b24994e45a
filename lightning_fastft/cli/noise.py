"""What other libraries print on every run and no user can act on, kept away from the command line; each line by
its words, none by its library.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

# Each stays as narrow as its message, so that a library's next word is heard. Seen with torch 2.13, lightning 2.6.6,
# transformers 5.23, peft 0.21.2, bitsandbytes 0.50.2; a line of another version that no longer matches comes through.
_WARNINGS = (
    # Lightning flattens batches by a class that torch has renamed.
    (FutureWarning, r"`isinstance\(treespec, LeafSpec\)` is deprecated"),
    # Lightning gathers over ranks by a function that torch has moved.
    (FutureWarning, r"torch\.distributed\.nn\.functional\.all_gather is deprecated"),
    # PEFT asks a model by a name that transformers has renamed.
    (FutureWarning, r"`is_gradient_checkpointing` is deprecated"),
    # Lightning tells why a run without tensorboard logs to CSV files: nothing is missing, and docs/guide.md says which
    # logger a run has.
    (UserWarning, r"Starting from v1\.9\.0, `tensorboardX` has been removed as a dependency"),
)
_LOGGED = (
    # Advertisements of other products: nothing is missing.
    ("lightning.pytorch.utilities.rank_zero", "💡 Tip: For seamless cloud"),
    # No strategy of ours runs on a TPU; the line that says whether the GPU is seen is told.
    ("lightning.pytorch.utilities.rank_zero", "TPU available: False, using: 0 TPU cores"),
    # A kernel from the hub for NF4 products on a CPU: not needed, and code that is fetched when a run starts is what
    # this command line refuses.
    (
        "bitsandbytes.backends.cpu.ops",
        "Failed to load CPU gemm_4bit_forward from kernels-community: No module named 'kernels'",
    ),
)


@contextmanager
def without_noise() -> Iterator[None]:
    """Leave these lines out while a command runs; everything else is told as ever."""
    with ExitStack() as undo:
        undo.enter_context(warnings.catch_warnings())
        for category, words in _WARNINGS:
            warnings.filterwarnings("ignore", message=words, category=category)
        for name, beginning in _LOGGED:
            log, has_other_words = logging.getLogger(name), _BeginsOtherwise(beginning)
            log.addFilter(has_other_words)
            undo.callback(log.removeFilter, has_other_words)
        yield


class _BeginsOtherwise(logging.Filter):
    """Passes what does not begin with these words."""

    def __init__(self, beginning: str) -> None:
        super().__init__()
        self._beginning = beginning

    def filter(self, record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith(self._beginning)
