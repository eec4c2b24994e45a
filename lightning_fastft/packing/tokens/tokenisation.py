"""Rows become tokens in chunks: in this process or in several, with results in the order of the rows.

Worker processes hold a tokenizer of their own and are handed one chunk at a time over a pipe, so nothing is shared and
nothing can block. They are fresh interpreters: a fork of a process with threads (of torch, of the tokenizers) can hang,
and would hold the pipes of the other workers open. A worker ends when its pipe does, in whatever way this process ends.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from lightning_fastft.core.errors import DataError
from lightning_fastft.packing.images import ImageExpander, ImageFile
from lightning_fastft.packing.reading.sources import Source
from lightning_fastft.packing.reading.text_files import RawRow
from lightning_fastft.packing.rows.completion_rows import cut_completions
from lightning_fastft.packing.rows.formats import (
    COLUMNS,
    TUNERS,
    FormatOptions,
    describe_formats,
    detect_format,
    find_wrong_mapping,
)
from lightning_fastft.packing.rows.parsing import parse_row, take_columns
from lightning_fastft.packing.rows.rejects import (
    IMAGE_TOO_LONG,
    Raw,
    Reject,
    RowRejectedError,
    check_token_counts,
    make_reject,
)
from lightning_fastft.packing.store.completion_store import Segments
from lightning_fastft.packing.store.report import render_counts
from lightning_fastft.packing.tokens.formatter import Encoded, Formatter, TokenIdError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# The first rows of a file determine its format and columns. The run stops if all are rejected for one reason.
PEEK_ROWS = 100
_CHUNK_ROWS = 256
_CHUNK_BYTES = 2**22
ABSENT_FIELDS = "rows with nulls inside messages or tools, dropped because table columns fill absent fields with null"
# With at least _ROWS_ENOUGH rows, a column in fewer than _COLUMN_ROWS of them is unexpected.
_COLUMN_ROWS = 2
_ROWS_ENOUGH = 10


class Setup(NamedTuple):
    """The arguments of a worker's Formatter."""

    tokenizer: PreTrainedTokenizerBase | None
    options: FormatOptions
    vocab_size: int | None
    images: ImageExpander | None = None


class Chunk(NamedTuple):
    """Consecutive rows of one source."""

    source: str
    format: str | None
    expected: frozenset[str] | None
    rows: list[RawRow]
    is_first: bool
    counts: str = "line"
    folder: str = ""


class ChunkResult(NamedTuple):
    """The result of a chunk: concatenated tokens, rejects in row order, and counts by name.

    num_seen counts rows without blank lines. digest_N has one number per accepted row, before truncation. An impossible
    token id ends the chunk. first_lines has the first line of each note on single rows; counted is the unit of these
    numbers, "line" or "row". images_N has the images of each kept example, completions_N its completions; completions_N
    is empty in formats without completions.
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
    images_N: list[tuple[ImageFile, ...]]
    completions_N: list[Segments]

    def place(self, number: int) -> str:
        """Return the place of a row: "a.jsonl, line 3", or "a.json, row 3" for arrays, tables and lists."""
        return f"{self.source}, {self.counted} {number}"


def make_chunks(sources: Iterable[Source], *, formatter: Formatter, options: FormatOptions) -> Iterator[Chunk]:
    """Yield the rows of all sources in chunks; the first chunk of a source determines its format and columns.

    Args:
        sources: Sources to read.
        formatter: Checks that the tokenizer supports a format.
        options: A forced format and a column mapping.

    Raises:
        DataError: A source has no rows, or its format is unknown or not supported by the tokenizer; or one source has
            completions, and another has none.
        OptionError: The options do not fit the format.
    """
    first_of_kind: dict[bool, tuple[str, str]] = {}
    for source in sources:
        wanted = None
        if source.columns is not None:
            names = {name for required, optional in COLUMNS.values() for name in required + optional}
            wanted = frozenset((options.columns or {}).get(name, name) for name in names) | names
        rows = source.read(wanted)
        first = _take_first_rows(rows)
        format, expected = _learn_format(source, first, options=options)
        if format is not None:
            formatter.check_can_serve(format, file=source.name)
            first_of_kind.setdefault(format in TUNERS, (source.name, format))
            if len(first_of_kind) > 1:
                one, other = (f"{name} ({format})" for name, format in first_of_kind.values())
                raise DataError(
                    f"{one} and {other} cannot be one data set: only one of them has completions that are compared or "
                    "scored. Train them one after the other, or give format."
                )
        yield Chunk(source.name, format, expected, first, True, source.counts, source.folder)
        for more in _split_rows(rows):
            yield Chunk(source.name, format, expected, more, False, source.counts, source.folder)


def _take_first_rows(rows: Iterator[RawRow]) -> list[RawRow]:
    first, num_rows = [], 0
    for row in rows:
        first.append(row)
        num_rows += row.raw is not None
        if num_rows == PEEK_ROWS:
            break
    return first


def _split_rows(rows: Iterator[RawRow]) -> Iterator[list[RawRow]]:
    chunk: list[RawRow] = []
    num_bytes = 0
    for row in rows:
        chunk.append(row)
        num_bytes += len(row.raw) if isinstance(row.raw, bytes) else 0
        if len(chunk) == _CHUNK_ROWS or num_bytes > _CHUNK_BYTES:
            yield chunk
            chunk, num_bytes = [], 0
    if chunk:
        yield chunk


def _learn_format(
    source: Source, first: list[RawRow], *, options: FormatOptions
) -> tuple[str | None, frozenset[str] | None]:
    """Return the most frequent format of the first rows, and the expected columns of the source (None for any)."""
    raws = [row.raw for row in first if row.raw is not None]
    if not raws:
        raise DataError(f"{source.name} is empty: no row in {len(first)} {source.counts}s.")
    if source.columns is not None:
        _check_mapping(source.name, source.columns, options=options)
        return _known_format(source.name, detect_format(source.columns, options=options), source.columns), None
    parsed = [columns for raw in raws if (columns := _columns_of(raw)) is not None]
    if not parsed and len(raws) < PEEK_ROWS:
        # The source has only these rows, and all of them are rejected.
        return None, None
    votes = Counter(format for columns in parsed if (format := detect_format(columns, options=options)) is not None)
    counts = Counter(column for columns in parsed for column in columns)
    format = votes.most_common(1)[0][0] if votes else None
    if parsed:
        _check_mapping(source.name, list(counts), options=options)
        format = _known_format(source.name, format, [column for column, _ in counts.most_common(20)])
    if options.extra_columns == "ignore":
        return format, None
    least = _COLUMN_ROWS if len(parsed) >= _ROWS_ENOUGH else 1
    return format, frozenset(column for column, count in counts.items() if count >= least)


def _known_format(name: str, format: str | None, columns: Iterable[str]) -> str:
    if format is not None:
        return format
    raise DataError(
        f"{name} has the columns {', '.join(sorted(columns))}, which make no known format ({describe_formats()}). "
        'Map them, for example with columns={"prompt": "question", "completion": "answer"}, or on the command line '
        "with --data.columns.prompt question --data.columns.completion answer."
    )


def _check_mapping(name: str, columns: Sequence[str], *, options: FormatOptions) -> None:
    wrong = find_wrong_mapping(columns, options=options)
    if wrong:
        raise DataError(f"{name}: {wrong}")


def _columns_of(raw: Raw) -> frozenset[str] | None:
    try:
        return frozenset(parse_row(raw))
    except RowRejectedError:
        return None


def tokenize_chunk(chunk: Chunk, *, formatter: Formatter, options: FormatOptions) -> ChunkResult:
    """Validate the rows of a chunk and encode the valid ones.

    Args:
        chunk: Rows of one source and their format.
        formatter: Encodes rows; its notes are moved to the result.
        options: Options for rows that are too long.
    """
    # Rows are identified by their place in the chunk: rows of a JSON array may share a line.
    read = [row for row in chunk.rows if row.raw is not None]
    taken: list[int] = []
    rows: list[dict[str, Any]] = []
    rejected: dict[int, Reject] = {}
    required, optional = COLUMNS[chunk.format] if chunk.format is not None else ((), ())
    counts: Counter[str] = Counter(num_blank_lines=len(chunk.rows) - len(read))
    notes: Counter[str] = Counter()

    def reject(place: int, error: RowRejectedError) -> None:
        rejected[place] = make_reject(error, file=chunk.source, line=read[place].line, raw=read[place].raw or b"")

    for place, (_, raw, num_absent) in enumerate(read):
        notes[ABSENT_FIELDS] += num_absent > 0
        try:
            row = parse_row(raw or b"")
            rows.append(
                take_columns(
                    row, required=required, optional=optional, mapping=options.columns or {}, expected=chunk.expected
                )
            )
            taken.append(place)
        except RowRejectedError as error:
            reject(place, error)
    outcomes = formatter.encode(rows, format=chunk.format, folder=chunk.folder) if chunk.format is not None else []

    kept: list[Encoded] = []
    digests: list[int] = []
    first_lines: dict[str, int] = {}
    longest = highest = (-1, 0)
    impossible = None
    for place, outcome in zip(taken, outcomes):
        line = read[place].line
        try:
            if isinstance(outcome, RowRejectedError):
                raise outcome
            if isinstance(outcome, TokenIdError):
                impossible = (line, outcome)
                break
            check_token_counts(num_tokens=len(outcome.input_ids), num_labelled=int(outcome.is_trained[1:].sum()))
            longest = max(longest, (_num_packed(outcome), line), key=lambda pair: pair[0])
            kept.extend(_fit(outcome, options=options, counts=counts))
        except RowRejectedError as error:
            reject(place, error)
            continue
        for note in outcome.notes:
            notes[note] += 1
            first_lines.setdefault(note, line)
        digests.append(_digest(outcome))
        highest = max(highest, (int(outcome.input_ids.max()), line), key=lambda pair: pair[0])
    notes += formatter.notes
    formatter.notes.clear()
    return ChunkResult(
        source=chunk.source,
        format=chunk.format,
        is_first=chunk.is_first,
        num_seen=len(read),
        id_T=np.concatenate([np.zeros(0, np.int32), *(example.input_ids.astype(np.int32) for example in kept)]),
        is_trained_T=np.concatenate([np.zeros(0, bool), *(example.is_trained for example in kept)]),
        length_N=np.asarray([len(example.input_ids) for example in kept], dtype=np.int64),
        digest_N=np.asarray(digests, dtype=np.uint64),
        rejects=[rejected[place] for place in sorted(rejected)],
        counts=counts,
        notes=notes,
        first_lines=first_lines,
        longest=longest,
        highest_id=highest,
        impossible=impossible,
        counted=chunk.counts,
        images_N=[example.images for example in kept],
        completions_N=[example.completions for example in kept if example.completions is not None],
    )


def _num_packed(example: Encoded) -> int:
    return len(example.input_ids) if example.completions is None else example.completions.num_packed


def _digest(example: Encoded) -> int:
    content = example.input_ids.tobytes() + example.is_trained.tobytes()
    if example.completions is not None:
        content += repr(example.completions[:2]).encode()
    digest = hashlib.blake2b(content + b"".join(image.digest for image in example.images), digest_size=8)
    return int.from_bytes(digest.digest(), "little")


def _fit(example: Encoded, *, options: FormatOptions, counts: Counter[str]) -> list[Encoded]:
    """Return the example, or its beginning or its pieces by the too_long option."""
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
        ids, is_trained, completions = cut_completions(
            example.input_ids, example.is_trained, example.completions, max_tokens=most
        )
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
        f"{result.counted} {first.line}: {first.detail}"
    )
