"""Chunks: consecutive rows of one source, with the format and the columns that its first rows show."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from lightning_fastft.core.errors import DataError
from lightning_fastft.packing.reading.sources import Source
from lightning_fastft.packing.reading.text_files import RawRow
from lightning_fastft.packing.rows.formats import (
    COLUMN_NAMES,
    TUNERS,
    FormatOptions,
    describe_formats,
    detect_format,
    find_wrong_mapping,
)
from lightning_fastft.packing.rows.parsing import parse_row
from lightning_fastft.packing.rows.rejects import Raw, RowRejectedError
from lightning_fastft.packing.tokens.formatter import Formatter

# The first rows of a file determine its format and columns. The run stops if all are rejected for one reason.
PEEK_ROWS = 100
_CHUNK_ROWS = 256
_CHUNK_BYTES = 2**22
# With at least _ROWS_ENOUGH rows, a column in fewer than _COLUMN_ROWS of them is unexpected.
_COLUMN_ROWS = 2
_ROWS_ENOUGH = 10


class Chunk(NamedTuple):
    """Consecutive rows of one source; unread are the columns of a table that no format has."""

    source: str
    format: str | None
    expected: frozenset[str] | None
    rows: list[RawRow]
    is_first: bool
    counts: str = "line"
    folder: str = ""
    unread: tuple[str, ...] = ()


def make_chunks(sources: Iterable[Source], *, formatter: Formatter, options: FormatOptions) -> Iterator[Chunk]:
    """Yield the rows of all sources in chunks; the first chunk of a source determines its format and columns.

    Raises:
        DataError: A source has no rows, or its format is unknown or not supported by the tokenizer; or one source has
            completions, and another has none.
        OptionError: The options do not fit the format.
    """
    first_of_kind: dict[bool, tuple[str, str]] = {}
    for source in sources:
        wanted: frozenset[str] | None = None
        unread: tuple[str, ...] = ()
        if source.columns is not None:
            wanted = frozenset((options.columns or {}).get(name, name) for name in COLUMN_NAMES) | COLUMN_NAMES
            unread = tuple(name for name in source.columns if name not in wanted)
        rows = source.read(wanted)
        first = take_first_rows(rows)
        format, expected = learn_format(source, first, options=options)
        if format is not None:
            formatter.check_can_serve(format, file=source.name)
            first_of_kind.setdefault(format in TUNERS, (source.name, format))
            if len(first_of_kind) > 1:
                one, other = (f"{name} ({format})" for name, format in first_of_kind.values())
                raise DataError(
                    f"{one} and {other} cannot be one data set: only one of them has completions that are compared or "
                    "scored. Train them one after the other, or give format."
                )
        yield Chunk(source.name, format, expected, first, True, source.counts, source.folder, unread)
        for more in split_rows(rows):
            yield Chunk(source.name, format, expected, more, False, source.counts, source.folder, unread)


def take_first_rows(rows: Iterator[RawRow]) -> list[RawRow]:
    """Return the rows that determine the format of a source."""
    first, num_rows = [], 0
    for row in rows:
        first.append(row)
        num_rows += row.raw is not None
        if num_rows == PEEK_ROWS:
            break
    return first


def split_rows(rows: Iterator[RawRow], *, num_rows: int = _CHUNK_ROWS) -> Iterator[list[RawRow]]:
    """Yield the rows in lists of ``num_rows``, or fewer if they are long."""
    chunk: list[RawRow] = []
    num_bytes = 0
    for row in rows:
        chunk.append(row)
        num_bytes += len(row.raw) if isinstance(row.raw, bytes) else 0
        if len(chunk) == num_rows or num_bytes > _CHUNK_BYTES:
            yield chunk
            chunk, num_bytes = [], 0
    if chunk:
        yield chunk


def learn_format(
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
