"""Where rows come from: JSON lines, JSON, CSV and Parquet files, folders of them, data sets of the Hugging Face hub, lists of rows.

Lines are split here and not by a data-frame reader, so that the neighbours of a bad row survive and every row keeps its line number.
"""

from __future__ import annotations

import csv
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lightning_fastft.errors import DataError, OptionError
from lightning_fastft.packing.rows import BOM, FIELD_COUNT, MALFORMED, NOT_UTF8, Raw, UnreadableRow

SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet", ".csv")
FINGERPRINT_BYTES = 2**20
# Name of the file that rejected rows are written to (data modules write rejected_val.jsonl too); never read from a folder.
REJECTED = "rejected.jsonl"
_BLANK = b" \t\r\n\x0b\x0c"
_BATCH_ROWS = 1000


class RawRow(NamedTuple):
    """A row as it was read, with its line (text files) or row number, from 1; None for a blank line."""

    line: int
    raw: Raw | None


class Source(NamedTuple):
    """One file, data set or list.

    Args:
        name: Shown in messages and in rejected.jsonl.
        fingerprint: Changes when the content does.
        read: Yields the rows; takes the columns that are wanted, None for all.
        columns: Column names, where all rows have the same; None where each row has its own.
        count_rows: Returns how many rows there are at most, for the progress bar.
    """

    name: str
    fingerprint: str
    read: Callable[[frozenset[str] | None], Iterator[RawRow]]
    columns: tuple[str, ...] | None
    count_rows: Callable[[], int]


def open_sources(sources: object) -> list[Source]:
    """Return what there is to read, files of a folder in sorted order.

    Args:
        sources: A path of a file or folder, an id of a hub data set ("owner/name", "owner/name:config" or "owner/name:config:split"; split "train"
            unless named), a datasets.Dataset, a list of rows (dicts), or a list of these.

    Returns:
        At least one source.

    Raises:
        DataError: A file is missing, empty, or of no known kind, a folder holds none, or a data set cannot be had.
        OptionError: sources is nothing of the above.

    Cost:
        Reads the first and last MiB of each file.
    """
    if _is_rows(sources):
        return [_open_rows(sources)]
    opened: list[Source] = []
    for source in sources if isinstance(sources, (list, tuple)) else [sources]:
        if isinstance(source, (str, os.PathLike)):
            opened.extend(_open_path(os.fspath(source)))
        elif hasattr(source, "column_names"):
            opened.append(_open_dataset(source, name=f"data set {len(opened) + 1}"))
        elif _is_rows(source):
            opened.append(_open_rows(source)._replace(name=f"list {len(opened) + 1}"))
        else:
            raise OptionError(f"A source is a path, a hub id, a datasets.Dataset or a list of dicts; got {type(source).__name__}.")
    if not opened:
        raise DataError("No data: the list of sources is empty.")
    return opened


def _is_rows(value: object) -> bool:
    return isinstance(value, (list, tuple)) and any(isinstance(entry, Mapping) and not hasattr(entry, "column_names") for entry in value)


def fingerprint_file(path: Path) -> str:
    """Return a digest of name, size, time of change and the first and last MiB of a file."""
    stat = path.stat()
    digest = hashlib.sha256(f"{path.resolve()}\n{stat.st_size}\n{stat.st_mtime_ns}\n".encode("utf-8", "surrogateescape"))
    with path.open("rb") as file:
        digest.update(file.read(FINGERPRINT_BYTES))
        file.seek(max(0, stat.st_size - FINGERPRINT_BYTES))
        digest.update(file.read(FINGERPRINT_BYTES))
    return digest.hexdigest()


def _open_path(given: str) -> list[Source]:
    path = Path(given).expanduser()
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix.lower() in SUFFIXES and file.is_file() and not _is_no_data(file, root=path))
        if not files:
            raise DataError(f"The folder {given} holds no file that ends in {', '.join(SUFFIXES)}.")
        return [_open_file(file) for file in files]
    if path.is_file():
        return [_open_file(path)]
    if path.suffix.lower() in SUFFIXES or path.is_absolute() or given.startswith((".", "~")):
        raise DataError(f"There is no file or folder {given} (looked from {Path.cwd()}).")
    return [_open_hub(given)]


def _is_no_data(file: Path, *, root: Path) -> bool:
    """Say whether a file of a folder is hidden, or was written by us: rejected rows and cache entries."""
    is_hidden = any(part.startswith((".", "_")) for part in file.relative_to(root).parts)
    return is_hidden or file.match("rejected*.jsonl") or (file.parent / "ids.bin").exists()


def _open_file(path: Path) -> Source:
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise DataError(f"{path} ends in {suffix or 'nothing'}; files end in {', '.join(SUFFIXES)}.")
    try:
        if path.stat().st_size == 0:
            raise DataError(f"{path} is empty: 0 bytes.")
        fingerprint = fingerprint_file(path)
        if suffix == ".parquet":
            return _open_parquet(path, fingerprint)
        if suffix == ".csv":
            return Source(str(path), fingerprint, lambda _: _read_csv(path), None, lambda: _count_lines(path))
        is_list = suffix == ".json" and _first_character(path) == b"["
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    reader = _read_json_list if is_list else _read_lines
    return Source(str(path), fingerprint, lambda _: reader(path), None, lambda: _count_lines(path))


def _first_character(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(4096).removeprefix(BOM).lstrip()[:1]


def _count_lines(path: Path) -> int:
    num_lines, last = 0, b"\n"
    with path.open("rb") as file:
        while block := file.read(2**20):
            num_lines, last = num_lines + block.count(b"\n"), block[-1:]
    return num_lines + (last != b"\n")


def _read_lines(path: Path) -> Iterator[RawRow]:
    """Yield the lines of a file; only a line feed ends one, so that strange line ends within strings are kept."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            bare = line.removesuffix(b"\n").removesuffix(b"\r").removeprefix(BOM)
            yield RawRow(number, bare if bare.strip(_BLANK) else None)


def _read_json_list(path: Path) -> Iterator[RawRow]:
    """Yield the elements of a JSON list as the bytes that they are written in, so that each is judged like a line."""
    text = path.read_bytes().removeprefix(BOM).decode("utf-8", "surrogateescape")
    decoder = json.JSONDecoder(strict=False)
    place, line, first = text.index("[") + 1, 1, True
    counted = 0
    while True:
        place = _skip_space(text, place)
        line, counted = line + text.count("\n", counted, place), place
        if text[place : place + 1] == "]":
            break
        if not first:
            if text[place : place + 1] != ",":
                raise DataError(f"{path}, line {line}: no comma and no end of the list here, so that no row behind it can be found. Repair the file.")
            place = _skip_space(text, place + 1)
            line, counted = line + text.count("\n", counted, place), place
        try:
            _, end = decoder.raw_decode(text, place)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path}, line {line}: the list is broken, so that no row behind it can be found: {error}. Repair the file.") from None
        yield RawRow(line, text[place:end].encode("utf-8", "surrogateescape"))
        place, first = end, False
    if text[place + 1 :].strip():
        raise DataError(f"{path}, line {line}: text follows the end of the list. Repair the file.")


def _skip_space(text: str, place: int) -> int:
    while text[place : place + 1] in {" ", "\t", "\r", "\n"}:
        place += 1
    return place


def _read_csv(path: Path) -> Iterator[RawRow]:
    """Yield the records of a CSV file with a header line; a record has the number of its first line."""
    previous_limit = csv.field_size_limit(2**31 - 1)
    try:
        with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
            reader = csv.reader(file, strict=True)
            header: list[str] | None = None
            while True:
                line = reader.line_num + 1
                try:
                    fields = next(reader)
                except StopIteration:
                    return
                except csv.Error as error:
                    if "unexpected end of data" in str(error):
                        raise DataError(f"{path}, line {line}: a quote that opens there is never closed. Repair the file.") from None
                    yield RawRow(line, UnreadableRow(MALFORMED, str(error), b""))
                    continue
                if header is None and fields:
                    header = _check_header(fields, path=path)
                elif header is not None:
                    yield RawRow(line, _judge_record(fields, header=header) if fields else None)
    finally:
        csv.field_size_limit(previous_limit)


def _check_header(fields: list[str], *, path: Path) -> list[str]:
    if len(set(fields)) != len(fields):
        raise DataError(f"{path}: the header names a column twice: {', '.join(fields)}.")
    return fields


def _judge_record(fields: list[str], *, header: list[str]) -> Raw:
    first = ",".join(fields).encode("utf-8", "surrogateescape")
    if len(fields) != len(header):
        return UnreadableRow(FIELD_COUNT, f"{len(fields)} fields, the header has {len(header)}", first)
    try:
        first.decode("utf-8")
    except UnicodeDecodeError as error:
        return UnreadableRow(NOT_UTF8, f"byte 0x{first[error.start]:02x}", first)
    return dict(zip(header, fields))


def _open_parquet(path: Path, fingerprint: str) -> Source:
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            columns, num_rows = tuple(file.schema_arrow.names), file.metadata.num_rows
    except (OSError, ValueError) as error:
        raise DataError(f"{path} is no readable Parquet file: {error}") from error
    return Source(str(path), fingerprint, lambda wanted: _read_parquet(path, wanted), columns, lambda: num_rows)


def _read_parquet(path: Path, wanted: frozenset[str] | None) -> Iterator[RawRow]:
    import pyarrow.parquet

    number = 0
    with pyarrow.parquet.ParquetFile(path) as file:
        columns = None if wanted is None else [name for name in file.schema_arrow.names if name in wanted]
        try:
            for batch in file.iter_batches(batch_size=_BATCH_ROWS, columns=columns):
                for index in range(batch.num_rows):
                    number += 1
                    yield RawRow(number, _take_arrow_row(batch.slice(index, 1)))
        except (OSError, ValueError) as error:
            raise DataError(f"{path} cannot be read behind row {number}: {error}") from error


def _take_arrow_row(batch: Any) -> Raw:  # noqa: ANN401 - pyarrow.RecordBatch
    try:
        row: dict[str, Any] = batch.to_pylist()[0]
    except UnicodeDecodeError as error:
        return UnreadableRow(NOT_UTF8, f"byte 0x{error.object[error.start]:02x}", error.object)
    return row


def _open_hub(given: str) -> Source:
    import datasets

    name, _, rest = given.partition(":")
    config, _, split = rest.partition(":")
    try:
        dataset = datasets.load_dataset(name, config or None, split=split or "train")
    except (OSError, ValueError) as error:
        raise DataError(f"{given} is neither a file or folder here nor a data set of the hub that can be had: {error}") from error
    return _open_dataset(dataset, name=given)


def _open_dataset(dataset: Any, *, name: str) -> Source:  # noqa: ANN401 - datasets.Dataset
    if isinstance(dataset, Mapping):
        raise DataError(f"{name} holds the splits {', '.join(dataset)}; give one of them.")
    if not hasattr(dataset, "num_rows"):
        raise DataError(f"{name} is a streaming data set; packs are planned over all examples, load it without streaming.")
    if dataset.num_rows == 0:
        raise DataError(f"{name} is empty: 0 rows.")

    def read(wanted: frozenset[str] | None) -> Iterator[RawRow]:
        plain = dataset.with_format(None)
        if wanted is not None:
            plain = plain.select_columns([column for column in plain.column_names if column in wanted])
        number = 0
        for batch in plain.iter(batch_size=_BATCH_ROWS):
            for values in zip(*batch.values()):
                number += 1
                yield RawRow(number, dict(zip(batch, values)))

    fingerprint = getattr(dataset, "_fingerprint", None) or _fingerprint_rows(list(dataset))
    return Source(name, f"{name}:{fingerprint}", read, tuple(dataset.column_names), lambda: dataset.num_rows)


def _open_rows(rows: Any) -> Source:  # noqa: ANN401 - rows are judged one by one, later
    def read(wanted: frozenset[str] | None) -> Iterator[RawRow]:
        for number, row in enumerate(rows, start=1):
            yield RawRow(number, row)

    return Source("list of rows", _fingerprint_rows(rows), read, None, lambda: len(rows))


def _fingerprint_rows(rows: Sequence[Mapping[str, Any]]) -> str:
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json.dumps(row, default=_to_json, skipkeys=True).encode())
    return digest.hexdigest()


def _to_json(value: Any) -> Any:  # noqa: ANN401 - any value that a row holds
    # The repr of a long array leaves its middle out.
    return value.tolist() if hasattr(value, "tolist") else repr(value)
