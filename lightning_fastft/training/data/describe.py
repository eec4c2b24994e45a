"""Describe the data of a data module as text: rows, rejects, lengths, packs and a marked example."""

from __future__ import annotations

from collections.abc import Collection
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from lightning_fastft.core.checks import check_int
from lightning_fastft.core.errors import DataError, count, printable
from lightning_fastft.packing.document import IGNORED_LABEL, Document
from lightning_fastft.packing.packs import Packs, split_to_multiple
from lightning_fastft.packing.store.report import IngestReport

if TYPE_CHECKING:
    from lightning_fastft.packing.loader import DocumentSubset
    from lightning_fastft.training.data.splits import SplitDataModule

MARKS = ("⟦", "⟧")
UNDERLINE = ("\x1b[4m", "\x1b[24m")
NUM_BINS = 12
BAR_WIDTH = 40
MAX_SHOWN_TOKENS = 512
# Names of the scores of formats with completions.
SCORE_NAMES = {"labelled": "label", "scored": "score", "rollouts": "reward"}


def describe_data(
    datamodule: SplitDataModule, *, world_size: int = 1, accumulate: int = 1, is_terminal: bool = False
) -> str:
    """Return rows per format, rejects, lengths, packs and fill of each split, and one example, as text.

    It describes the splits that are set up. On a terminal trained tokens are underlined with escape codes; else they
    are between ⟦ and ⟧.

    Raises:
        DataError: The data module is not set up.
    """
    check_int("world_size", world_size, low=1)
    check_int("accumulate", accumulate, low=1)
    sections = []
    for split in ("train", "val", "test"):
        subset, packs = datamodule.subset(split), datamodule.packs(split)
        if subset is not None and packs is not None:
            epoch = describe_split_epoch(datamodule, split, world_size=world_size, accumulate=accumulate)
            sections.append(_describe_split(split, subset, packs, report=datamodule.report(split), epoch=epoch))
            named = describe_named(datamodule, split, world_size=world_size)
            sections[-1] = "\n".join([sections[-1], *(f"  {line}" for line in named)])
        if split == "train" and datamodule.mixture:
            lines = [f"  {printable(str(source))}" for source in datamodule.mixture]
            sections.append("\n".join(["mixture of an epoch:", *lines]))
    if not sections:
        raise DataError('The data module has no data yet. Call setup("fit") first.')
    shown = datamodule.subset("train") or datamodule.subset("val") or datamodule.subset("test")
    assert shown is not None
    marks = UNDERLINE if is_terminal else MARKS
    if shown[0].segment_lengths:
        formats = shown.documents.report.rows_per_format
        example = render_completions(shown[0], datamodule.tokenizer, formats=formats, marks=marks)
    else:
        example = render_example(shown[0], datamodule.tokenizer, marks=marks)
    num_trained = int(shown.num_labelled_N[0])
    how = "underlined" if is_terminal else f"between {MARKS[0]} and {MARKS[1]}"
    sections.append(f"first example: {int(shown.length_N[0])} tokens, {num_trained} trained ({how})\n{example}")
    return "\n\n".join(sections)


def describe_epoch(*, num_packs: int, num_extra_packs: int, world_size: int, accumulate: int) -> str:
    """Return a line on the number of packs and optimizer steps of an epoch.

    Example:
        >>> describe_epoch(num_packs=12, num_extra_packs=2, world_size=1, accumulate=4).partition(" (1 rank")[0]
        'an epoch trains 12 packs (10 packed, 2 more by splitting) in 3 optimizer steps of 4 packs'
    """
    num_packed = num_packs - num_extra_packs
    split = f" ({num_packed:,} packed, {num_extra_packs:,} more by splitting)" if num_extra_packs else ""
    num_per_step = world_size * accumulate
    steps = f"{count(num_packs // num_per_step, 'optimizer step')} of {count(num_per_step, 'pack')}"
    return (
        f"an epoch trains {count(num_packs, 'pack')}{split} in {steps} ({count(world_size, 'rank')} x "
        f"accumulate_grad_batches={accumulate})"
    )


def render_example(document: Document, tokenizer: Any, *, marks: tuple[str, str] = MARKS) -> str:
    """Return the text of an example with its trained tokens between marks; ids if there is no tokenizer.

    Example:
        >>> render_example(Document(np.array([5, 6, 7]), np.array([-100, 6, 7])), None)
        '5 ⟦6 7⟧'
    """
    return _render_tokens(document.input_ids, _find_trained(document), tokenizer, marks=marks, most=MAX_SHOWN_TOKENS)


def render_completions(
    document: Document, tokenizer: Any, *, formats: Collection[str], marks: tuple[str, str] = MARKS
) -> str:
    """Return the prompt and the completions of an example as text, each under its name, trained tokens between marks.

    Example:
        >>> ids, labels = np.array([5, 6, 7]), np.array([-100, 6, 7])
        >>> document = Document(ids, labels, segment_lengths=(1, 1, 1), scores=(0.0, 0.0))
        >>> print(render_completions(document, None, formats=["preference"]))
        prompt (1 token):
        5
        chosen (1 token):
        ⟦6⟧
        rejected (1 token):
        ⟦7⟧
    """
    segments = name_segments(document, formats=formats)
    most = max(1, MAX_SHOWN_TOKENS // len(segments))
    return "\n".join(
        f"{name}:\n{_render_tokens(id_T, is_trained_T, tokenizer, marks=marks, most=most)}"
        for name, id_T, is_trained_T in segments
    )


def name_segments(document: Document, *, formats: Collection[str]) -> list[tuple[str, np.ndarray, np.ndarray]]:
    """Return the parts of an example: names, ids, and which tokens are trained; one part without a name if it has no
    completions.
    """
    is_trained_T = _find_trained(document)
    if not document.segment_lengths:
        return [("", document.input_ids, is_trained_T)]
    named = set(formats) - {"none"}
    if named == {"preference"}:
        margin = f", margin {document.scores[0]:g}" if document.scores[0] else ""
        names = ["prompt", f"chosen{margin}", "rejected"]
    elif document.is_stepwise:
        names = [
            "prompt",
            *(f"step {number}, label {label:g}" for number, label in enumerate(document.scores, start=1)),
        ]
    else:
        score_name = SCORE_NAMES.get(named.pop(), "score") if len(named) == 1 else "score"
        scores = enumerate(document.scores, start=1)
        names = ["prompt", *(f"completion {number}, {score_name} {score:g}" for number, score in scores)]
    end_M = np.cumsum(document.segment_lengths).tolist()
    return [
        (f"{name} ({count(end - begin, 'token')})", document.input_ids[begin:end], is_trained_T[begin:end])
        for name, begin, end in zip(names, [0, *end_M], end_M)
    ]


def _find_trained(document: Document) -> np.ndarray:
    """Return which tokens are trained: those with a label, without the first one, which is never predicted."""
    is_trained_T: np.ndarray = document.labels != IGNORED_LABEL
    is_trained_T[:1] = False
    return is_trained_T


def split_runs(id_T: np.ndarray, is_trained_T: np.ndarray, tokenizer: Any) -> list[tuple[bool, str]]:
    """Return the text of tokens in runs that are trained or not, without control characters."""
    ids, is_trained, runs = id_T.tolist(), is_trained_T.tolist(), []
    for trained, run in groupby(range(len(ids)), key=is_trained.__getitem__):
        part = [ids[number] for number in run]
        # Text of the data must not control the terminal.
        text = (
            " ".join(map(str, part))
            if tokenizer is None
            else printable(tokenizer.decode(part, skip_special_tokens=False), keeps_lines=True)
        )
        runs.append((trained, text))
    return runs


def _render_tokens(
    id_T: np.ndarray, is_trained_T: np.ndarray, tokenizer: Any, *, marks: tuple[str, str], most: int
) -> str:
    """Return the text of the first tokens with trained ones between marks, and how many are left."""
    runs = split_runs(id_T[:most], is_trained_T[:most], tokenizer)
    text = ("" if tokenizer is not None else " ").join(
        f"{marks[0]}{part}{marks[1]}" if is_trained else part for is_trained, part in runs
    )
    return text + (f" ... {len(id_T) - most} more tokens" if len(id_T) > most else "")


def render_length_histogram(length_N: np.ndarray) -> str:
    """Return a histogram of document lengths, one line per range of tokens.

    Example:
        >>> print(render_length_histogram(np.array([1, 2, 2])))
        1  ####################                     1
        2  ######################################## 2
    """
    ranges = count_lengths(length_N)
    labels = [f"{low}" if low == high else f"{low} - {high}" for low, high, _ in ranges]
    width, most = max(map(len, labels)), max(number for _, _, number in ranges)
    lines = []
    for label, (_, _, number) in zip(labels, ranges):
        # A range with at least one document shows at least one mark.
        bar = "#" * max(round(BAR_WIDTH * number / max(1, most)), int(number > 0))
        lines.append(f"{label:>{width}}  {bar:<{BAR_WIDTH}} {number}")
    return "\n".join(lines)


def count_lengths(length_N: np.ndarray) -> list[tuple[int, int, int]]:
    """Return ranges of lengths (first, last) from the shortest to the longest, with the number of documents of each.

    Example:
        >>> count_lengths(np.array([1, 2, 2]))
        [(1, 1, 1), (2, 2, 2)]
    """
    low, high = int(length_N.min()), int(length_N.max())
    step = -(-(high - low + 1) // NUM_BINS)
    edges = np.arange(low, high + step + 1, step)
    counts, _ = np.histogram(length_N, bins=edges)
    return [(begin, end - 1, number) for (begin, end), number in zip(pairwise(edges.tolist()), counts.tolist())]


def _describe_split(
    split: str, subset: DocumentSubset, packs: Packs, *, report: IngestReport | None, epoch: str
) -> str:
    length_N = subset.length_N
    num_tokens = int(length_N.sum())
    num_needed = -(-num_tokens // packs.max_tokens)
    middle, high = np.percentile(length_N, [50, 99])
    lines = [f"{split}:"]
    if report is not None:
        lines.append(report.render())
    share = 100 * int(subset.num_labelled_N.sum()) / num_tokens
    lines += [
        f"{count(len(subset), 'example')}, {num_tokens:,} tokens, {share:.1f} % trained; per example: shortest "
        f"{int(length_N.min()):,}, median {middle:,.0f}, "
        f"mean {length_N.mean():,.0f}, 99th percentile {high:,.0f}, longest {int(length_N.max()):,}",
        render_length_histogram(length_N),
        f"{count(len(packs), 'pack')} of {packs.max_tokens:,} tokens ({num_needed:,} would hold the tokens), fill "
        f"{100 * packs.fill(length_N):.2f} %",
    ]
    if subset.documents.completions is not None:
        lines.insert(-1, _describe_sharing(subset))
    lines.append(epoch)
    return "\n".join(filter(None, lines))


def describe_named(datamodule: SplitDataModule, split: str, *, world_size: int) -> list[str]:
    """Return a line on each named set of a split: its examples, its tokens, and its packs on all ranks."""
    return [
        f"{name}: {count(len(subset), 'example')}, {int(subset.length_N.sum()):,} tokens, "
        f"{int(subset.num_labelled_N.sum()):,} trained; "
        f"{count(len(split_to_multiple(packs, subset.length_N, multiple=world_size)), 'pack')}"
        for name, (subset, packs) in datamodule.named_sets(split).items()
    ]


def describe_split_epoch(datamodule: SplitDataModule, split: str, *, world_size: int, accumulate: int) -> str:
    """Return a line on the packs and optimizer steps of an epoch of a split; "" if there is nothing to say."""
    subset, packs = datamodule.subset(split), datamodule.packs(split)
    if subset is None or packs is None or datamodule.named_sets(split):
        return ""
    # Only training has accumulation windows; evaluation needs the same number of packs per rank.
    multiple = world_size * (accumulate if split == "train" else 1)
    num_all = len(split_to_multiple(packs, subset.length_N, multiple=multiple))
    num_extra = num_all - len(packs)
    if split == "train":
        return describe_epoch(
            num_packs=num_all, num_extra_packs=num_extra, world_size=world_size, accumulate=accumulate
        )
    if not num_extra:
        return ""
    return (
        f"{count(num_all, 'pack')} ({num_extra:,} more by splitting), so that {count(world_size, 'rank')} get equal "
        "numbers"
    )


def _describe_sharing(subset: DocumentSubset) -> str:
    """Return a line on the tokens of packs that hold each prompt once, and of packs that repeat it."""
    store, chosen_N = subset.documents.completions, slice(None) if subset.index_N is None else subset.index_N
    assert store is not None
    num_completions_N, num_prompt_N = store.num_completions_N[chosen_N], store.num_prompt_tokens_N[chosen_N]
    num_completions = int(num_completions_N.sum())
    if store.is_stepwise_N[chosen_N].all():
        return f"{count(num_completions, 'step')}, each scored at its last token"
    num_behind = int(store.num_completion_tokens_N[chosen_N].sum())
    # A completion begins with a copy of the prompt's last token, whose own place is free.
    shared = int((num_prompt_N - 1 + num_completions_N).sum()) + num_behind
    repeated = int((num_prompt_N * num_completions_N).sum()) + num_behind
    return (
        f"{count(num_completions, 'completion')}: {shared:,} tokens with shared prompts, {repeated:,} "
        f"without, {100 * (1 - shared / repeated):.1f} % saved"
    )
