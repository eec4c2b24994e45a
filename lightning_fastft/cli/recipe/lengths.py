"""Measure the examples of a data set in tokens, with the model's tokenizer or by an assumption.

Axes: N examples.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from lightning_fastft.core.errors import DataError
from lightning_fastft.hf.assumed_tokenizer import make_assumed_tokenizer
from lightning_fastft.packing.rows.formats import TUNERS, FormatOptions
from lightning_fastft.packing.store.cache import tokenize_sources
from lightning_fastft.training.data.options import count_processes, find_cache_dir

if TYPE_CHECKING:
    from lightning_fastft.hf.loading.source import ModelSource

ASSUMED_CHARACTERS = 4
# The shipped config for each format of rows with completions, and the options that it needs in addition: before the
# data, and behind it.
_CONFIGS = {
    "preference": ("dpo_qwen3_8b", "", ""),
    "labelled": ("dpo_qwen3_8b", "", " --model.loss kto"),
    "scored": ("reward_qwen3_8b", "", " --model.loss scalar --model.center_weight 0"),
    "stepwise": ("reward_process_qwen3_8b", "", ""),
    "rollouts": ("grpo_qwen3_0.6b", " --data PackedDataModule", ""),
}
_LONGEST = 2**31 - 1


class Lengths(NamedTuple):
    """Lengths of the examples of a data set.

    Args:
        length_N: Tokens of each example.
        num_rejected: Rows that cannot be trained on.
        assumption: How tokens were counted without the tokenizer; "" if it was there.
        is_plain: Whether the rows are plain text, although there is a chat template.
    """

    length_N: np.ndarray
    num_rejected: int
    assumption: str
    is_plain: bool = False


def measure_lengths(data: str, *, source: ModelSource, reading: Mapping[str, Any]) -> Lengths:
    """Return the length of every example, read with these options of PackedDataModule.

    The model's tokenizer is used where it can be read.

    Raises:
        DataError: The data cannot be read, or its rows are not for a FineTuner.

    Cost:
        One pass over the data, in several processes; the tokens are cached.
    """
    tokenizer, assumption = _find_tokenizer(source)
    cache_dir, share = reading.get("cache_dir", find_cache_dir()), reading.get("max_reject_share", 0.01)
    rows = {name: value for name, value in reading.items() if name not in ("cache_dir", "max_reject_share")}
    dataset = tokenize_sources(
        data,
        tokenizer=tokenizer,
        options=FormatOptions(max_tokens=_LONGEST, **rows),
        cache_dir=cache_dir,
        num_proc=count_processes(),
        max_reject_share=share,
        stop_ids=() if assumption else source.stop_ids,
        show_progress=True,
    )
    foreign = [name for name in dataset.report.rows_per_format if name in TUNERS]
    if foreign:
        config, before, behind = _CONFIGS[foreign[0]]
        raise DataError(
            f"{data} has rows of format {foreign[0]}, for {TUNERS[foreign[0]]}, and fastft init writes configs of a "
            f"FineTuner. Start from a shipped config: fastft fit --config {config} --model.model {source.name}"
            f"{before} --data.paths {data}{behind}"
        )
    if not dataset.report.num_labelled:
        raise DataError(f"{data} has no token to train on.")
    report = dataset.report
    return Lengths(np.asarray(dataset.length_N), report.num_rejected, assumption, report.is_plain)


def _find_tokenizer(source: ModelSource) -> tuple[Any, str]:
    """Return the model's tokenizer, or one of equal pieces and the words that say so."""
    try:
        tokenizer = source.load_tokenizer()
    except OSError:
        # Neither a folder nor the cache has it, and the hub cannot be reached.
        tokenizer = None
    if tokenizer is not None:
        return tokenizer, ""
    assumption = f"{ASSUMED_CHARACTERS} characters per token and a ChatML template"
    return make_assumed_tokenizer(ASSUMED_CHARACTERS), assumption
