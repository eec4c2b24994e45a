"""``fastft data``: describe the data of a config without a model and without training."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from lightning_fastft.cli.lightning_cli import FastFTCLI
from lightning_fastft.cli.words import take_option
from lightning_fastft.core.errors import MissingDependencyError, OptionError
from lightning_fastft.packing.describe import describe_data, save_length_histogram
from lightning_fastft.packing.reading.sources import REJECTED
from lightning_fastft.training.data.trainer_facts import find_ranks
from lightning_fastft.training.datamodule import PackedDataModule

DEFAULT_FOLDER = "runs/data"


def run_data(words: Sequence[str]) -> int:
    """Print rows per format, rejects, lengths, packs and an example; write a histogram and rejected rows; return 0.

    Args:
        words: Arguments of ``fastft fit``, and ``--out FOLDER`` for the files (default: ``runs/data``).
    """
    out, words = take_option(words, "--out", default=DEFAULT_FOLDER)
    cli = FastFTCLI(words, run=False)
    data, trainer = cli.datamodule, cli.trainer
    if not isinstance(data, PackedDataModule):
        raise OptionError(f"fastft data needs a PackedDataModule, but the config has {type(data).__name__}.")
    # The data module reads the tokenizer of the trainer's module; the model itself is not built.
    trainer.strategy.connect(cli.model)
    data.trainer = trainer
    data.rejected_path = data.rejected_path or str(Path(out) / REJECTED)
    data.setup("fit")
    report = describe_data(
        data,
        world_size=find_ranks(trainer)[0],
        accumulate=trainer.accumulate_grad_batches,
        is_terminal=sys.stdout.isatty(),
    )
    sys.stdout.write(report + "\n")
    train = data.subset("train")
    assert train is not None
    try:
        sys.stdout.write(
            f"\nlengths as a picture: {save_length_histogram(train.length_N, Path(out) / 'lengths.png')}\n"
        )
    except MissingDependencyError as error:
        sys.stdout.write(f"\nno picture: {error}\n")
    return 0
