"""Documents of a data set as a LightningModule needs them: formats, the held-out part, shared prompts, weights.

Axes: N documents of a data set.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_only, rank_zero_warn

from lightning_fastft.core.errors import DataError
from lightning_fastft.packing.loader import DocumentSubset
from lightning_fastft.packing.needs import DataNeeds
from lightning_fastft.packing.packs import Packs, join_packs, pack_best_fit_decreasing
from lightning_fastft.packing.reading.sources import is_mapping
from lightning_fastft.packing.rows.formats import ALTERNATIVES, COLUMNS, TUNERS
from lightning_fastft.packing.step_plan import mix_bits
from lightning_fastft.packing.store.dataset import TokenizedDataset

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule

HELD_OUT_STREAM = 0x48454C44


def find_needs(module: LightningModule | None) -> DataNeeds | None:
    """Return what a LightningModule asks of the data; None for a module that does not say."""
    return getattr(module, "data_needs", None)


def name_source(source: object) -> str:
    """Return how messages name a source."""
    if is_mapping(source):
        return " and ".join(map(repr, source))
    return repr(source) if isinstance(source, (str, Path)) else type(source).__name__


def check_formats(
    split: str, dataset: TokenizedDataset, *, module: LightningModule | None, source: str, format: str
) -> None:
    """Check that the LightningModule trains on the rows of a data set.

    Raises:
        DataError: A tuner for completions got plain rows, or another module got rows with completions.
    """
    if module is None:
        return
    needs, found, name = find_needs(module), sorted(dataset.report.rows_per_format), type(module).__name__
    takes_completions = needs is not None and bool(needs.formats)
    if needs is not None and needs.formats and not needs.formats.issuperset(found):
        raise DataError(
            f"{name} trains on rows of format {' or '.join(sorted(needs.formats))}, and the {split} data {source} "
            f"has {', '.join(found)}. {_say_remedy(needs.formats, found)}"
        )
    foreign = [kind for kind in found if kind in TUNERS]
    if foreign and not takes_completions and format == "auto":
        # Rows of the other formats have no column completion.
        plain = "format='prompt_completion', or " if {"labelled", "scored"}.issuperset(foreign) else ""
        # fastft eval tests a FineTuner, whatever class has trained the model.
        compared = " A run of that class is compared on them by fastft validate." if split == "test" else ""
        raise DataError(
            f"The {split} data {source} has rows of format {foreign[0]}, whose completions {name} would all read "
            f"alike. Use {TUNERS[foreign[0]]}; or give {plain}format={foreign[0]!r} for a module of your own that "
            f"reads batch.context.completions.{compared}"
        )


def _say_remedy(wanted: Collection[str], found: Sequence[str]) -> str:
    """Return what to change if a tuner gets rows of another format."""
    columns = " or ".join(", ".join((*COLUMNS[name][0], *ALTERNATIVES.get(name, ())[:1])) for name in sorted(wanted))
    other = next((TUNERS[name] for name in found if name in TUNERS), "FineTuner")
    return f"Give rows with the columns {columns}, or use {other} for these rows."


def choose_held_out(num_documents: int, *, share: float, seed: int) -> np.ndarray:
    """Mark held-out documents, at least one.

    They are chosen by position and seed, so that rows that are added later change no earlier choice.
    """
    mixed_N = mix_bits(np.arange(num_documents, dtype=np.uint64), seed=seed, stream=HELD_OUT_STREAM)
    is_held_out_N = mixed_N < np.uint64(min(share * 2.0**64, 2.0**64 - 2048))
    is_held_out_N[np.argmin(mixed_N)] = True
    return is_held_out_N


@rank_zero_only
def tell_shared(subsets: Mapping[str, DocumentSubset]) -> None:
    """Log how many validation examples are trained too; those of another file, or duplicates of held-out ones."""
    if "train" in subsets and "val" in subsets:
        num_shared, num_all = count_shared(subsets["val"], trained=subsets["train"]), len(subsets["val"])
        if num_shared:
            rank_zero_info(
                f"{num_shared} of {num_all} validation examples are training examples too, so val_loss is partly "
                "that of trained text. Remove them from the training or the validation data."
            )


def count_shared(subset: DocumentSubset, *, trained: DocumentSubset) -> int:
    """Return how many documents have the tokens of a trained one; 0 for data with images, which are not compared."""
    if subset.documents.images is not None:
        return 0
    one, other = subset.documents, trained.documents
    number_N, number_M = (
        np.arange(len(part.documents)) if part.index_N is None else part.index_N for part in (subset, trained)
    )
    # Most documents differ in a few tokens at fixed places; only the rest are read whole.
    sample_N, sample_M = one.hash_samples(number_N), other.hash_samples(number_M)
    number_N, number_M = number_N[np.isin(sample_N, sample_M)], number_M[np.isin(sample_M, sample_N)]
    return int(np.isin(one.hash_tokens(number_N), other.hash_tokens(number_M)).sum())


def check_lengths(split: str, subset: DocumentSubset, *, max_tokens: int) -> None:
    """Check that each document fits into a pack. Rows are cut by their own tokens, with the prompt once.

    Raises:
        DataError: One does not.
    """
    longest = int(subset.length_N.max(initial=0))
    if longest > max_tokens:
        takes = "its prompt once" if subset.shares_prompts else "its prompt for each completion"
        if subset.adds_mismatched:
            takes += ", and the completion of another example"
        raise DataError(
            f"An example of the {split} data takes {longest} tokens in a pack ({takes}), and max_tokens is "
            f"{max_tokens}. Raise max_tokens to {longest}, or shorten the longest rows: too_long='truncate' cuts a row "
            "by its own tokens, with its prompt once."
        )


def warn_of_scores(dataset: TokenizedDataset, *, module: LightningModule | None) -> None:
    """Warn of scores of the training data without an effect: equal labels, groups of one, margins that are not read."""
    needs, store = find_needs(module), dataset.completions
    if needs is None or store is None or not len(dataset):
        return
    score_C, num_alone = store.arrays["scores"], int((store.num_completions_N == 1).sum())
    name = type(module).__name__
    if needs.formats == {"labelled"} and (score_C == score_C[0]).all():
        rank_zero_warn(
            f"All {len(score_C)} rows of the training data have the label {'true' if score_C[0] else 'false'}, and the "
            f"loss of {name} contrasts true with false. Add rows of the other label."
        )
    elif needs.score_use == "compared" and num_alone:
        rank_zero_warn(
            f"{num_alone} of {len(dataset)} rows of the training data have one completion. {name} compares its reward "
            "with no other, so its advantage is 0: give several completions of a prompt, or advantage='given'."
        )
    elif needs.score_use == "ignored" and score_C.any():
        rank_zero_warn(
            f"Rows of the training data have a margin, which {name} does not read. RewardTuner does; remove the column "
            "if no margin is wanted."
        )


def pack_named(
    split: str,
    names: Sequence[str],
    dataset: TokenizedDataset,
    *,
    make_subset: Callable[[TokenizedDataset, np.ndarray], DocumentSubset],
    max_tokens: int,
) -> tuple[dict[str, tuple[DocumentSubset, Packs]], Packs]:
    """Return documents and packs of each named set of a split, and the packs of all sets.

    Raises:
        DataError: A set has no documents.
    """
    set_N = np.repeat(np.arange(len(names)), dataset.report.documents_per_entry)
    number_N = {name: np.flatnonzero(set_N == index) for index, name in enumerate(names)}
    empty = [name for name in names if not len(number_N[name])]
    if empty:
        raise DataError(
            f"The {split} data {empty[0]!r} holds no usable example. Remove the name, or correct the rows that are "
            "rejected."
        )
    subsets = {name: make_subset(dataset, number_N[name]) for name in names}
    found = {
        name: (subset, pack_best_fit_decreasing(subset.length_N, max_tokens=max_tokens))
        for name, subset in subsets.items()
    }
    return found, join_packs([(packs, number_N[name]) for name, (_, packs) in found.items()])


def can_share_prompts(option: bool | str, module: LightningModule | None, *, name: object = None) -> bool:
    """Return whether completions share their prompt in a pack; log why not where the model forbids it.

    The option "auto" stands for what the model computes exactly.
    """
    if isinstance(option, bool):
        return option
    from lightning_fastft.hf.families import find_sharing_obstacle
    from lightning_fastft.hf.images import find_config

    if module is None:
        return True
    obstacle = find_sharing_obstacle(find_config(module, name=name))
    if obstacle:
        rank_zero_info(f"Prompts are repeated for each completion: {obstacle}.")
    return not obstacle


def count_items(subset: DocumentSubset, *, needs: DataNeeds | None) -> np.ndarray:
    """Return how many items of a loss's mean each document has, int64: labelled tokens, completions, or one example."""
    unit = "token" if needs is None else needs.loss_unit
    store = subset.documents.completions
    if unit == "token" or store is None:
        return subset.num_labelled_N
    count_N = np.ones(len(store.num_completions_N), dtype=np.int64) if unit == "example" else store.num_completions_N
    return count_N if subset.index_N is None else count_N[subset.index_N]
