"""``fastft convert``: a LitGPT checkpoint as a Hugging Face folder."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from lightning_fastft.cli.arguments import Arguments, read_path

_MIB = 2**20


def run_convert(words: Sequence[str]) -> int:
    """Convert a LitGPT checkpoint folder, and print a summary.

    Args:
        words: The folder of LitGPT, then the folder to write.

    Raises:
        FastFTError: As ``convert_litgpt``.
    """
    arguments = Arguments("convert")
    arguments.add_argument("source", metavar="FOLDER", type=read_path)
    arguments.add_argument("out", metavar="OUT", type=read_path)
    given = arguments.read(words)
    from lightning_fastft.hf.loading.litgpt import convert_litgpt

    model, num_tensors, num_bytes, has_tokenizer = convert_litgpt(given.source, given.out)
    tokenizer = "the tokenizer is included" if has_tokenizer else "without a tokenizer: the folder has none"
    sys.stdout.write(
        f"Wrote {model} to {given.out}: {num_tensors} tensors, {num_bytes / _MIB:,.1f} MiB.\n"
        f"  {tokenizer}\n  read back by transformers: every weight is there\n"
        f"Then: fastft fit --config CONFIG --model.model {given.out}\n"
    )
    return 0
