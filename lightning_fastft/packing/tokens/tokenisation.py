"""Tokenise chunks: validate the rows of a chunk, encode the valid ones, and fit them into max_tokens.

``workers`` does so in this process or in several.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from lightning_fastft.packing.images import ImageFile
from lightning_fastft.packing.reading.text_files import RawRow
from lightning_fastft.packing.rows.completion_rows import cut_completions
from lightning_fastft.packing.rows.formats import COLUMNS, DECISIVE, FormatOptions
from lightning_fastft.packing.rows.parsing import parse_row, take_columns
from lightning_fastft.packing.rows.rejects import (
    IMAGE_TOO_LONG,
    Reject,
    RowRejectedError,
    check_token_counts,
    make_reject,
)
from lightning_fastft.packing.rows.steps import cut_steps
from lightning_fastft.packing.store.completion_store import Segments
from lightning_fastft.packing.store.report import render_counts
from lightning_fastft.packing.tokens.chunks import PEEK_ROWS, Chunk
from lightning_fastft.packing.tokens.formatter import Formatter
from lightning_fastft.packing.tokens.token_ids import Encoded, TokenIdError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from lightning_fastft.hf.images import ImageEncoder

ABSENT_FIELDS = (
    "rows with nulls inside messages, tools or template options, dropped because table columns fill absent fields with "
    "null"
)


class Setup(NamedTuple):
    """The arguments of a Formatter, which can be sent to a worker process."""

    tokenizer: PreTrainedTokenizerBase | None
    options: FormatOptions
    vocab_size: int | None
    images: ImageEncoder | None = None
    stop_ids: tuple[int, ...] | None = ()

    def make_formatter(self) -> Formatter:
        """Return a new Formatter."""
        return Formatter(
            self.tokenizer,
            options=self.options,
            vocab_size=self.vocab_size,
            images=self.images,
            stop_ids=self.stop_ids,
        )


class ChunkResult(NamedTuple):
    """The result of a chunk: concatenated tokens, rejects in row order, and counts by name.

    num_seen counts rows without blank lines. digest_N has one number per accepted row, before truncation. An impossible
    token id ends the chunk. first_lines has the first line of each note on single rows; counted is the unit of these
    numbers, "line" or "row". unread has the columns with values that the format does not read. images_N has the images
    of each kept example, completions_N its completions; completions_N is empty in formats without completions.
    """

    source: str
    format: str | None
    is_first: bool
    num_seen: int
    id_T: np.ndarray
    is_trained_T: np.ndarray
    length_N: np.ndarray
    digest_N: np.ndarray
    rejects: list[Reject]
    counts: Counter[str]
    notes: Counter[str]
    first_lines: dict[str, int]
    longest: tuple[int, int]
    highest_id: tuple[int, int]
    impossible: tuple[int, TokenIdError] | None
    counted: str
    unread: set[str]
    images_N: list[tuple[ImageFile, ...]]
    completions_N: list[Segments]

    def place(self, number: int) -> str:
        """Return the place of a row: "a.jsonl, line 3", or "a.json, row 3" for arrays, tables and lists."""
        return f"{self.source}, {self.counted} {number}"


def tokenize_chunk(chunk: Chunk, *, formatter: Formatter, options: FormatOptions) -> ChunkResult:
    """Validate the rows of a chunk and encode the valid ones."""
    read = [row for row in chunk.rows if row.raw is not None]
    rows, rejected, unread = _take_rows(read, chunk=chunk, options=options)
    encoded = (
        formatter.encode(list(rows.values()), format=chunk.format, folder=chunk.folder)
        if chunk.format is not None
        else []
    )
    notes = Counter({ABSENT_FIELDS: sum(row.num_absent > 0 for row in read)}) + formatter.notes
    formatter.notes.clear()
    outcomes = dict(zip(rows, encoded))
    return _collect(chunk, read, outcomes, rejected=rejected, notes=notes, unread=unread, options=options)


def _take_rows(
    read: list[RawRow], *, chunk: Chunk, options: FormatOptions
) -> tuple[dict[int, dict[str, Any]], dict[int, RowRejectedError], set[str]]:
    """Return the columns of each valid row, and the error of each other row, by their place in the chunk; and the
    columns with values that the format does not read.

    A line does not identify a row: rows of a JSON array may share one.
    """
    required, optional = COLUMNS[chunk.format] if chunk.format is not None else ((), ())
    decisive = DECISIVE.get(chunk.format or "", ())
    mapping = options.columns or {}
    rows: dict[int, dict[str, Any]] = {}
    rejected: dict[int, RowRejectedError] = {}
    unread = set(chunk.unread)
    names = {mapping.get(name, name) for name in required + optional}
    for place, (_, raw, _) in enumerate(read):
        assert raw is not None
        try:
            row = parse_row(raw)
            rows[place] = take_columns(
                row,
                required=required,
                optional=optional,
                mapping=mapping,
                expected=chunk.expected,
                decisive=decisive,
            )
            unread.update(name for name in row.keys() - names if _has_value(row[name]))
        except RowRejectedError as error:
            rejected[place] = error
    return rows, rejected, unread


def _has_value(value: object) -> bool:
    return value is not None and (bool(value) if isinstance(value, (str, list, dict)) else True)


def _collect(
    chunk: Chunk,
    read: list[RawRow],
    outcomes: dict[int, Encoded | RowRejectedError | TokenIdError],
    *,
    rejected: dict[int, RowRejectedError],
    notes: Counter[str],
    unread: set[str],
    options: FormatOptions,
) -> ChunkResult:
    """Return the result of a chunk: fit each example into max_tokens, and count."""
    counts = Counter(num_blank_lines=len(chunk.rows) - len(read))
    kept: list[Encoded] = []
    digests: list[int] = []
    first_lines: dict[str, int] = {}
    longest = highest = (-1, 0)
    impossible = None
    for place, outcome in outcomes.items():
        line = read[place].line
        if isinstance(outcome, TokenIdError):
            impossible = (line, outcome)
            break
        try:
            if isinstance(outcome, RowRejectedError):
                raise outcome
            check_token_counts(num_tokens=len(outcome.input_ids), num_labelled=int(outcome.is_trained[1:].sum()))
            longest = max(longest, (_num_packed(outcome), line), key=lambda pair: pair[0])
            kept.extend(_fit(outcome, options=options, counts=counts, must_differ=chunk.format == "preference"))
        except RowRejectedError as error:
            rejected[place] = error
            continue
        for note in outcome.notes:
            notes[note] += 1
            first_lines.setdefault(note, line)
        digests.append(_digest(outcome))
        highest = max(highest, (int(outcome.input_ids.max()), line), key=lambda pair: pair[0])
    return ChunkResult(
        source=chunk.source,
        format=chunk.format,
        is_first=chunk.is_first,
        num_seen=len(read),
        id_T=np.concatenate([np.zeros(0, np.int32), *(example.input_ids.astype(np.int32) for example in kept)]),
        is_trained_T=np.concatenate([np.zeros(0, bool), *(example.is_trained for example in kept)]),
        length_N=np.asarray([len(example.input_ids) for example in kept], dtype=np.int64),
        digest_N=np.asarray(digests, dtype=np.uint64),
        rejects=[_describe_reject(rejected[place], row=read[place], chunk=chunk) for place in sorted(rejected)],
        counts=counts, notes=notes, first_lines=first_lines, longest=longest, highest_id=highest,
        impossible=impossible, counted=chunk.counts, unread=unread, images_N=[example.images for example in kept],
        completions_N=[example.completions for example in kept if example.completions is not None],
    )  # fmt: skip


def _describe_reject(error: RowRejectedError, *, row: RawRow, chunk: Chunk) -> Reject:
    assert row.raw is not None
    return make_reject(error, file=chunk.source, line=row.line, raw=row.raw)


def _num_packed(example: Encoded) -> int:
    return len(example.input_ids) if example.completions is None else example.completions.num_packed


def _digest(example: Encoded) -> int:
    content = example.input_ids.tobytes() + example.is_trained.tobytes()
    if example.completions is not None:
        content += repr(example.completions[:2]).encode()
    digest = hashlib.blake2b(content + b"".join(image.digest for image in example.images), digest_size=8)
    return int.from_bytes(digest.digest(), "little")


def _fit(example: Encoded, *, options: FormatOptions, counts: Counter[str], must_differ: bool) -> list[Encoded]:
    """Return the example, or its beginning or its pieces by the too_long option; its completions must differ if asked
    for.
    """
    most = options.max_tokens
    if _num_packed(example) <= most:
        return [example]
    if example.images and options.too_long != "refuse":
        # A cut would leave images without some of their tokens.
        raise RowRejectedError(IMAGE_TOO_LONG, f"{len(example.input_ids)} tokens, max_tokens={most}")
    counts["num_too_long"] += 1
    if options.too_long == "refuse":
        # The run stops once all rows are counted, so tokens are not kept.
        return []
    if example.completions is not None:
        cut = cut_steps if example.completions.is_stepwise else partial(cut_completions, must_differ=must_differ)
        ids, is_trained, completions = cut(example.input_ids, example.is_trained, example.completions, max_tokens=most)
        counts["num_truncated"] += 1
        return [Encoded(ids, is_trained, completions=completions)]
    if options.too_long == "truncate":
        head = Encoded(example.input_ids[:most], example.is_trained[:most])
        check_token_counts(num_tokens=most, num_labelled=int(head.is_trained[1:].sum()), is_truncated=True)
        counts["num_truncated"] += 1
        return [head]
    counts["num_split"] += 1
    cuts = range(0, len(example.input_ids), most)
    pieces = [
        Encoded(example.input_ids[begin : begin + most], example.is_trained[begin : begin + most]) for begin in cuts
    ]
    trained = [piece for piece in pieces if piece.is_trained[1:].any()]
    counts["num_dropped_pieces"] += len(pieces) - len(trained)
    return trained


def describe_uniform_reject(result: ChunkResult) -> str | None:
    """Return an error text if the first 100 rows of a file were all rejected for one reason; else None."""
    if not result.is_first or result.num_seen < PEEK_ROWS or len(result.rejects) < result.num_seen:
        return None
    reasons = Counter(entry.reason for entry in result.rejects)
    if len(reasons) > 1:
        return None
    first = result.rejects[0]
    return (
        f"{result.source}: all of the first {result.num_seen} rows are rejected ({render_counts(reasons)}); "
        f"{result.counted} {first.line}{f': {first.detail}' if first.detail else ''}"
    )
