"""``fastft data``: describe the data of a config without a model and without training."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from lightning_fastft.cli.lightning_cli import FastFTCLI
from lightning_fastft.cli.words import take_option
from lightning_fastft.core.checks import check_replaceable
from lightning_fastft.core.errors import OptionError
from lightning_fastft.core.files import find_write_obstacle
from lightning_fastft.monitor.data_page import TITLE, render_data_page
from lightning_fastft.packing.reading.sources import REJECTED
from lightning_fastft.packing.rows.rejects import read_rejects
from lightning_fastft.packing.store.dataset import replace_file
from lightning_fastft.training.data.describe import describe_data
from lightning_fastft.training.data.trainer_facts import find_ranks
from lightning_fastft.training.datamodule import PackedDataModule

DEFAULT_FOLDER = "runs/data"
PAGE = "data.html"


def run_data(words: Sequence[str]) -> int:
    """Print rows per format, rejects, lengths, packs and an example; write a page and rejected rows; return 0.

    Args:
        words: Arguments of ``fastft fit``, and ``--out FOLDER`` for the files (default: ``runs/data``).
    """
    out, words = take_option(words, "--out", default=DEFAULT_FOLDER)
    out = os.path.expanduser(out)
    page = Path(out) / PAGE
    check_replaceable("The page of fastft data (--out)", page, is_ours=lambda head: f"<title>{TITLE}".encode() in head)
    if obstacle := find_write_obstacle(page.parent):
        raise OptionError(f"--out: {page} cannot be written: {obstacle}. Name another folder.")
    cli = FastFTCLI(words, run=False)
    data, trainer = cli.datamodule, cli.trainer
    if not isinstance(data, PackedDataModule):
        raise OptionError(
            f"fastft data shows the packs of a PackedDataModule, and {type(data).__name__} builds its own during "
            "training. fastft doctor with the same options checks the run."
        )
    if data.is_streamed:
        raise OptionError("fastft data reads all examples, and a stream has no end: give it a few files.")
    # The data module reads the tokenizer of the trainer's module; the model itself is not built.
    trainer.strategy.connect(cli.model)
    data.trainer = trainer
    data.rejected_path = data.rejected_path or str(Path(out) / REJECTED)
    data.setup("fit")
    sizes = {"world_size": find_ranks(trainer)[0], "accumulate": trainer.accumulate_grad_batches}
    sys.stdout.write(describe_data(data, is_terminal=sys.stdout.isatty(), **sizes) + "\n")
    files = {split: path for split in ("train", "val") if (path := data.rejected_file(split)) is not None}
    rejects = {split: (str(path), read_rejects(path)) for split, path in files.items()}
    replace_file(page, render_data_page(data, rejects=rejects, **sizes).encode())
    sys.stdout.write(f"\npage with all figures and examples: {page}\n")
    return 0
