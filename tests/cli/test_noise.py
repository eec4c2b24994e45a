"""Lines of other libraries that nobody can act on are left out while a command runs, and nothing else is."""

import logging
import warnings

import pytest

from lightning_fastft.cli.noise import without_noise

LEFT_OUT = [
    (
        "lightning.pytorch.utilities.rank_zero",
        "💡 Tip: For seamless cloud uploads and versioning, try installing [litmodels](https://pypi.org)",
    ),
    ("lightning.pytorch.utilities.rank_zero", "TPU available: False, using: 0 TPU cores"),
    (
        "bitsandbytes.backends.cpu.ops",
        "Failed to load CPU gemm_4bit_forward from kernels-community: No module named 'kernels'. Please make sure",
    ),
]
TOLD = [
    ("lightning.pytorch.utilities.rank_zero", "GPU available: False, used: False"),
    ("lightning.pytorch.utilities.rank_zero", "TPU available: True, using: 0 TPU cores"),
    ("bitsandbytes.backends.cpu.ops", "Failed to load CPU gemm_4bit_forward from kernels-community: undefined symbol"),
    ("bitsandbytes.cextension", LEFT_OUT[-1][1]),
]


def told(log, words):
    """Whether a logger hands these words on; put together late, as bitsandbytes does."""
    heard = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())
    logging.getLogger(log).addHandler(handler)
    try:
        logging.getLogger(log).warning("%s", words)
    finally:
        logging.getLogger(log).removeHandler(handler)
    return heard == [words]


@pytest.mark.parametrize(("log", "words"), LEFT_OUT)
def test_line_is_left_out_while_a_command_runs(log, words):
    with without_noise():
        assert not told(log, words)
    assert told(log, words)


@pytest.mark.parametrize(("log", "words"), TOLD)
def test_other_words_are_told(log, words):
    with without_noise():
        assert told(log, words)


@pytest.mark.parametrize(
    ("category", "words", "is_told"),
    [
        (FutureWarning, "`isinstance(treespec, LeafSpec)` is deprecated, use `isinstance(treespec, TreeSpec)", False),
        (FutureWarning, "`is_gradient_checkpointing` is deprecated and will be removed in v6.", False),
        (UserWarning, "You defined a `validation_step` but have no `val_dataloader`. Skipping val loop.", False),
        (
            FutureWarning,
            "torch.distributed.nn.functional.all_gather is deprecated, use torch.distributed._functional",
            False,
        ),
        (
            UserWarning,
            "Starting from v1.9.0, `tensorboardX` has been removed as a dependency of the `lightning.pytorch` package, "
            "due to",
            False,
        ),
        (UserWarning, "torch.distributed is disabled, unavailable or uninitialized, assuming the intent", False),
        (UserWarning, "FSDP2-wrapped module (FSDPFusedQwen3DecoderLayer) returned a view tensor. An in-place", False),
        (UserWarning, "FSDP2-wrapped module (FSDPMyLayer) returned a view tensor. An in-place op", True),
        (UserWarning, "`tensorboardX` is not installed", True),
        (FutureWarning, "`use_cache` is deprecated", True),
        (UserWarning, "`is_gradient_checkpointing` is deprecated", True),
        (UserWarning, "The number of training batches (7) is smaller than the logging interval", True),
    ],
)
def test_warnings_are_known_by_words_and_category(category, words, is_told):
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        with without_noise():
            warnings.warn(words, category, stacklevel=1)
        assert bool(heard) == is_told
        warnings.warn(words, category, stacklevel=1)
        assert len(heard) == 1 + is_told
