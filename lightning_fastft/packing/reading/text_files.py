"""Read rows of text files: JSON lines, JSON arrays, CSV and TSV, also compressed.

Lines are split here and not by a data-frame reader, so that a bad row does not affect other rows and every row keeps
its line number.
"""

from __future__ import annotations

import bz2
import csv
import gzip
import json
import lzma
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from io import BufferedReader, TextIOWrapper
from itertools import chain
from pathlib import Path
from typing import IO, Any, NamedTuple

from lightning_fastft.core.errors import DataError
from lightning_fastft.packing.rows.parsing import BOM
from lightning_fastft.packing.rows.rejects import FIELD_COUNT, MALFORMED, NOT_UTF8, Raw, RowRejectedError


def _open_zstd(path: Path, mode: str) -> IO[bytes]:
    """Open a zstd file for reading with pyarrow, which ``datasets`` brings; the standard library has no zstd yet."""
    import pyarrow

    return BufferedReader(pyarrow.input_stream(path, compression="zstd"))


# Compressed text is decompressed while it is read; Parquet files compress themselves.
COMPRESSED: Mapping[str, Callable[..., Any]] = {
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
    ".zst": _open_zstd,
}

# Magic bytes of files with a wrong suffix.
_BEGINNINGS = (
    (b"\x1f\x8b", "compressed with gzip"),
    (b"BZh", "compressed with bzip2"),
    (b"\xfd7zXZ", "compressed with xz"),
    (b"\x28\xb5\x2f\xfd", "compressed with zstd"),
    (b"PK\x03\x04", "a zip archive"),
    (b"PAR1", "a Parquet file"),
    (b"ARROW1", "an Arrow file"),
)

TABLES = (".csv", ".tsv")

# No pack takes a longer line, and a single line of a small compressed file could exhaust host memory.
MAX_LINE_BYTES = 2**28

MAX_ARRAY_BYTES = 2**34

_BLANK = b" \t\r\n\x0b\x0c"


class RawRow(NamedTuple):
    """A row as read, with its line (JSON lines, CSV) or row number (JSON arrays, tables, lists) from 1.

    raw is None for a blank line. num_absent counts dropped nulls inside nested table values: keys the row lacks.
    """

    line: int
    raw: Raw | None
    num_absent: int = 0


def file_kind(path: Path) -> str:
    """Return the suffix that selects the reader; for a compressed file the suffix before .gz."""
    suffix = path.suffix.lower()
    inner = Path(path.stem).suffix.lower()
    return inner if suffix in COMPRESSED and inner != ".parquet" else suffix


@contextmanager
def open_bytes(path: Path) -> Iterator[IO[bytes]]:
    """Open a file and decompress it if needed; a read error becomes a DataError."""
    unpack = COMPRESSED.get(path.suffix.lower())
    try:
        with path.open("rb") if unpack is None else unpack(path, "rb") as file:
            yield file
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        failed = "read" if unpack is None else "decompressed"
        raise DataError(f"{path} cannot be {failed}: {error}. The file is damaged or truncated.") from error


def check_beginning(path: Path, beginning: bytes, *, is_json: bool) -> None:
    """Reject a file whose content does not match its suffix, and JSON objects that span several lines."""
    found = next((kind for start, kind in _BEGINNINGS if beginning.startswith(start)), None)
    if found is not None:
        raise DataError(f"{path} has the suffix of a text file but is {found}. Rename it, or decompress it.")
    lines = [line.strip() for line in beginning.removeprefix(BOM).split(b"\n") if line.strip()]
    # A line such as ["a"] is one bad row.
    is_array = bool(lines) and re.match(rb"\[\s*({|$)", lines[0]) is not None
    if is_json and file_kind(path) != ".json" and is_array:
        raise DataError(f"{path} holds an array, not one row per line. Rename it: a .json file may hold an array.")
    # A truncated row is followed by other rows; an object that spans lines is followed by its keys.
    if (
        is_json
        and len(lines) > 1
        and lines[0].startswith(b"{")
        and not lines[0].endswith(b"}")
        and lines[1][:1] in (b'"', b"}")
    ):
        raise DataError(
            f"{path}: a JSON object goes over several lines. Write one row per line, or one array of rows ([...]) in a "
            ".json file. If one object wraps all rows, write only its array."
        )


def choose_reader(path: Path) -> tuple[Callable[[Path], Iterator[RawRow]], str]:
    """Return the reader of a text file, by its suffix and its beginning, and what it counts: "line" or "row".

    Raises:
        DataError: The content does not match the suffix, or is UTF-16.
    """
    with open_bytes(path) as file:
        beginning = file.read(4096)
    kind = file_kind(path)
    check_beginning(path, beginning, is_json=kind not in TABLES)
    # UTF-16 starts with a byte order mark, or every second byte of ASCII text is zero.
    if beginning.startswith((b"\xff\xfe", b"\xfe\xff")) or (
        len(beginning) > 3 and 0 in beginning[:2] and 0 in beginning[2:4]
    ):
        raise DataError(f"{path} is UTF-16; files are read as UTF-8. Convert it with: iconv -f UTF-16 -t UTF-8")
    if kind in TABLES:
        return read_csv, "line"
    if kind == ".json" and beginning.removeprefix(BOM).lstrip().startswith(b"["):
        return read_json_array, "row"
    return read_lines, "line"


def count_lines(path: Path) -> int:
    """Return the number of lines of a file, for the progress bar."""
    num_lines, last = 0, b"\n"
    with open_bytes(path) as file:
        while block := file.read(2**20):
            num_lines, last = num_lines + block.count(b"\n"), block[-1:]
    return num_lines + (last != b"\n")


def read_lines(path: Path) -> Iterator[RawRow]:
    """Yield the lines of a file. Only a line feed ends a line, because strings may contain other line separators."""
    with open_bytes(path) as file:
        for number, line in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES), b""), start=1):
            if len(line) == MAX_LINE_BYTES:
                raise DataError(
                    f"{path}, line {number} has at least {MAX_LINE_BYTES} bytes, the limit for a row. Write one row "
                    "per line."
                )
            bare = line.removesuffix(b"\n").removesuffix(b"\r").removeprefix(BOM)
            yield RawRow(number, bare if bare.strip(_BLANK) else None)


def read_json_array(path: Path) -> Iterator[RawRow]:
    """Yield the elements of a JSON array as raw bytes, which are validated like lines."""
    with open_bytes(path) as file:
        content = file.read(MAX_ARRAY_BYTES)
    if len(content) == MAX_ARRAY_BYTES:
        raise DataError(
            f"{path} is a JSON array of at least {MAX_ARRAY_BYTES} bytes, which must be read at once. Write one row "
            "per line (.jsonl)."
        )
    text = content.removeprefix(BOM).decode("utf-8", "surrogateescape")
    decoder = json.JSONDecoder(strict=False)
    place, line, counted, number = text.index("[") + 1, 1, 0, 0
    while True:
        place = _skip_space(text, place)
        line, counted = line + text.count("\n", counted, place), place
        if text[place : place + 1] == "]":
            break
        if number:
            if text[place : place + 1] != ",":
                raise DataError(
                    f"{path}, line {line}: expected a comma or the end of the array, so later rows cannot be read. "
                    "Repair the file."
                )
            place = _skip_space(text, place + 1)
            line, counted = line + text.count("\n", counted, place), place
        try:
            _, end = decoder.raw_decode(text, place)
        except (ValueError, RecursionError) as error:
            raise DataError(
                f"{path}, line {line}: the array is malformed ({error}), so later rows cannot be read. Repair the file."
            ) from None
        number += 1
        yield RawRow(number, text[place:end].encode("utf-8", "surrogateescape"))
        place = end
    if text[place + 1 :].strip():
        raise DataError(f"{path}, line {line}: text follows the end of the array. Repair the file.")


def _skip_space(text: str, place: int) -> int:
    while text[place : place + 1] in {" ", "\t", "\r", "\n"}:
        place += 1
    return place


def read_csv(path: Path) -> Iterator[RawRow]:
    """Yield the records of a CSV or TSV file with a header line, numbered by their first line.

    Fields are divided by tabs in a .tsv file. In a .csv file they are divided by commas, or by the semicolons or tabs
    of a header that has no comma.
    """
    previous_limit = csv.field_size_limit(2**31 - 1)
    try:
        with (
            open_bytes(path) as binary,
            TextIOWrapper(binary, encoding="utf-8-sig", errors="surrogateescape", newline="") as file,
        ):
            begin = list(_read_header(file))
            delimiter = "\t" if file_kind(path) == ".tsv" else _find_delimiter(begin[-1] if begin else "")
            reader = csv.reader(chain(begin, file), strict=True, delimiter=delimiter)
            header: list[str] | None = None
            while True:
                line = reader.line_num + 1
                try:
                    fields = next(reader)
                except StopIteration:
                    return
                except csv.Error as error:
                    if "unexpected end of data" in str(error):
                        raise DataError(
                            f"{path}, line {line}: a quote that opens here is never closed. Repair the file."
                        ) from None
                    yield RawRow(line, RowRejectedError(MALFORMED, str(error), b""))
                    continue
                if header is None and fields:
                    header = _check_header(fields, path=path)
                elif header is not None:
                    yield RawRow(line, _parse_record(fields, header=header) if fields else None)
    finally:
        csv.field_size_limit(previous_limit)


def _read_header(file: Iterable[str]) -> Iterator[str]:
    """Yield the lines of a file up to the first that is not blank."""
    for line in file:
        yield line
        if line.strip():
            return


def _find_delimiter(header: str) -> str:
    """Return what divides the fields of a CSV file.

    Example:
        >>> _find_delimiter("prompt;completion")
        ';'
    """
    return next((mark for mark in ",;\t" if mark in header), ",")


def _check_header(fields: list[str], *, path: Path) -> list[str]:
    if len(set(fields)) != len(fields):
        raise DataError(f"{path}: the header repeats a column: {', '.join(fields)}. Rename one of them.")
    return fields


def _parse_record(fields: list[str], *, header: list[str]) -> Raw:
    first = ",".join(fields).encode("utf-8", "surrogateescape")
    if len(fields) != len(header):
        return RowRejectedError(FIELD_COUNT, f"{len(fields)} fields, the header has {len(header)}", first)
    try:
        first.decode("utf-8")
    except UnicodeDecodeError as error:
        return RowRejectedError(NOT_UTF8, f"byte 0x{first[error.start]:02x}", first)
    return dict(zip(header, fields))
