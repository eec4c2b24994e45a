"""Suppress messages of other libraries that appear in every run and that users cannot act on."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

# Each pattern matches one message. Seen with torch 2.13, lightning 2.6.6, transformers 5.24, peft 0.21.2 and
# bitsandbytes 0.50.2; a message that changes in another version is shown.
_WARNINGS = (
    # Lightning uses a class that torch has renamed.
    (FutureWarning, r"`isinstance\(treespec, LeafSpec\)` is deprecated"),
    # Lightning uses a function that torch has moved.
    (FutureWarning, r"torch\.distributed\.nn\.functional\.all_gather is deprecated"),
    # PEFT uses an attribute that transformers has renamed.
    (FutureWarning, r"`is_gradient_checkpointing` is deprecated"),
    # There is no validation data.
    (UserWarning, r"Total length of `list` across ranks is zero"),
    (UserWarning, r"You defined a `validation_step` but have no `val_dataloader`\. Skipping val loop"),
    # One process reads the shards of several ranks, as it should.
    (UserWarning, r"torch\.distributed is disabled, unavailable or uninitialized"),
    # Fused layers return views, and no operation of a model changes hidden states in place.
    (UserWarning, r"FSDP2-wrapped module \(FSDPFused\w+\) returned a view tensor"),
    # Without tensorboard Lightning logs to CSV files; docs/guide.md describes the default logger.
    (UserWarning, r"Starting from v1\.9\.0, `tensorboardX` has been removed as a dependency"),
)
_LOGGED = (
    # Advertisements of other products: nothing is missing.
    ("lightning.pytorch.utilities.rank_zero", "💡 Tip: For seamless cloud"),
    # No strategy of this package runs on a TPU. The line about the GPU is shown.
    ("lightning.pytorch.utilities.rank_zero", "TPU available: False, using: 0 TPU cores"),
    # A hub kernel for NF4 on a CPU: not needed, and this command line never downloads code.
    (
        "bitsandbytes.backends.cpu.ops",
        "Failed to load CPU gemm_4bit_forward from kernels-community: No module named 'kernels'",
    ),
)


@contextmanager
def without_noise() -> Iterator[None]:
    """Suppress these messages while a command runs."""
    with ExitStack() as undo:
        undo.enter_context(warnings.catch_warnings())
        for category, words in _WARNINGS:
            warnings.filterwarnings("ignore", message=words, category=category)
        for name, beginning in _LOGGED:
            log, has_other_words = logging.getLogger(name), partial(_begins_otherwise, beginning)
            log.addFilter(has_other_words)
            undo.callback(log.removeFilter, has_other_words)
        yield


def _begins_otherwise(beginning: str, record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(beginning)
