"""Where rows come from: JSON lines, JSON, CSV and Parquet files, folders of them, saved data sets, data sets of the
hub, lists of rows.

Lines are split here and not by a data-frame reader, so that the neighbours of a bad row survive and every row keeps its
line number.
"""

from __future__ import annotations

import bz2
import csv
import gzip
import hashlib
import json
import logging
import lzma
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import TextIOWrapper
from pathlib import Path
from typing import IO, Any, NamedTuple

from lightning_fastft.core.errors import DataError, OptionError, printable
from lightning_fastft.packing.arrow import read_arrow_rows
from lightning_fastft.packing.rows import BOM, FIELD_COUNT, MALFORMED, NOT_UTF8, Raw, UnreadableRow

_LOGGER = logging.getLogger(__name__)

SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet", ".csv")
# Read while they are unpacked; Parquet compresses itself.
_PACKED: Mapping[str, Callable[..., Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
_ALLOWED = f"{', '.join(SUFFIXES)}, text files also with {', '.join(_PACKED)} behind that"
# Files of a folder that are likely to be data in a form that is not read: they are named, not skipped.
_OTHER_DATA = (
    ".zst",
    ".zip",
    ".tar",
    ".tgz",
    ".7z",
    ".arrow",
    ".feather",
    ".orc",
    ".tsv",
    ".xls",
    ".xlsx",
    ".pkl",
    ".pickle",
    ".db",
    ".sqlite",
)
# How files begin that have the ending of another kind.
_BEGINNINGS = (
    (b"\x1f\x8b", "compressed with gzip"),
    (b"BZh", "compressed with bzip2"),
    (b"\xfd7zXZ", "compressed with xz"),
    (b"\x28\xb5\x2f\xfd", "compressed with zstd"),
    (b"PK\x03\x04", "a zip archive"),
    (b"PAR1", "a Parquet file"),
    (b"ARROW1", "an Arrow file"),
)
# A longer line is no example of any pack; one line of a small compressed file could fill the memory.
MAX_LINE_BYTES = 2**28
MAX_ARRAY_BYTES = 2**34
# What datasets.Dataset.save_to_disk leaves.
_SAVED, _SAVED_SPLITS = "state.json", "dataset_dict.json"
# A file of up to this size is hashed whole, about 1.2 GB/s; of a larger one, blocks that are spread over it.
WHOLE_FINGERPRINT_BYTES = 2**30
_FINGERPRINT_BLOCKS, _BLOCK_BYTES = 64, 2**20
# Name of the file that rejected rows are written to (data modules write rejected_val.jsonl too); never read from a
# folder.
REJECTED = "rejected.jsonl"
_BLANK = b" \t\r\n\x0b\x0c"
_BATCH_ROWS = 1000


class RawRow(NamedTuple):
    """A row as it was read, with its line (JSON lines, CSV) or its number (JSON arrays, tables, lists), from 1; None
    for a blank line.

    num_absent counts the nulls inside nested values of a table that were dropped: keys that the row does not have.
    """

    line: int
    raw: Raw | None
    num_absent: int = 0


class Source(NamedTuple):
    """One file, data set or list.

    Args:
        name: Shown in messages and in rejected.jsonl.
        fingerprint: Changes when the content does.
        read: Yields the rows; takes the columns that are wanted, None for all.
        columns: Column names, where all rows have the same; None where each row has its own.
        count_rows: Returns how many rows there are at most, for the progress bar.
        counts: What the number of a row counts: "line" or "row".
        stamp: Changes when the source is written, where the fingerprint does not cover all of it.
    """

    name: str
    fingerprint: str
    read: Callable[[frozenset[str] | None], Iterator[RawRow]]
    columns: tuple[str, ...] | None
    count_rows: Callable[[], int]
    counts: str = "row"
    stamp: str = ""


def open_sources(sources: object) -> list[Source]:
    """Return what there is to read, files of a folder in sorted order.

    Args:
        sources: A path of a file or folder, an id of a hub data set ("owner/name", "owner/name:config" or
            "owner/name:config:split"; split "train" unless named), a datasets.Dataset, a list of rows (dicts), or a
            list of these.

    Returns:
        At least one source.

    Raises:
        DataError: A file is missing, empty, or of no known kind, a folder holds none, or a data set cannot be had.
        OptionError: sources is nothing of the above.

    Cost:
        Hashes each file, 1 GiB of it at most.
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
            raise OptionError(
                f"A source is a path, a hub id, a datasets.Dataset or a list of dicts; got {type(source).__name__}."
            )
    if not opened:
        raise DataError("No data: the list of sources is empty.")
    return opened


def _is_rows(value: object) -> bool:
    return isinstance(value, (list, tuple)) and any(
        isinstance(entry, Mapping) and not hasattr(entry, "column_names") for entry in value
    )


def fingerprint_file(path: Path) -> str:
    """Return a digest of the content of a file, whatever its name, place and time of change.

    Of a file above 1 GiB it covers the size, the time of change and 64 blocks of 1 MiB.
    """
    stat = path.stat()
    digest = hashlib.sha256(f"{stat.st_size}\n".encode())
    with path.open("rb") as file:
        if stat.st_size <= WHOLE_FINGERPRINT_BYTES:
            while block := file.read(_BLOCK_BYTES):
                digest.update(block)
            return digest.hexdigest()
        # What lies between the blocks is known by the time of change alone.
        digest.update(f"{stat.st_mtime_ns}\n".encode())
        for number in range(_FINGERPRINT_BLOCKS):
            file.seek(number * (stat.st_size - _BLOCK_BYTES) // (_FINGERPRINT_BLOCKS - 1))
            digest.update(file.read(_BLOCK_BYTES))
    return digest.hexdigest()


def stamp_file(path: Path) -> str:
    """Return the time at which the inode of a file too large to be hashed whole last changed, which no program
    sets back; "" for other files.
    """
    stat = path.stat()
    return str(stat.st_ctime_ns) if stat.st_size > WHOLE_FINGERPRINT_BYTES else ""


def _open_path(given: str) -> list[Source]:
    path = Path(given).expanduser()
    if path.is_dir():
        return _open_folder(path, given=given)
    if path.is_file():
        return [_open_file(path)]
    if _kind(path) in SUFFIXES or path.is_absolute() or given.startswith((".", "~")):
        raise DataError(f"There is no file or folder {given} (looked from {Path.cwd()}).")
    return [_open_hub(given)]


def _open_folder(path: Path, *, given: str) -> list[Source]:
    if (path / _SAVED_SPLITS).is_file():
        splits = sorted(entry.name for entry in path.iterdir() if (entry / _SAVED).is_file()) or ["none"]
        raise DataError(
            f"{given} is a saved data set with the splits {', '.join(splits)}; give one of them, for example "
            f"{path / splits[0]}."
        )
    if (path / _SAVED).is_file():
        return [_open_saved(path)]
    files = sorted(file for file in _walk_files(path) if not _is_no_data(file, root=path))
    chosen = [file for file in files if _kind(file) in SUFFIXES]
    others = [file.relative_to(path) for file in files if file not in set(chosen)]
    unread = [str(file) for file in others if file.suffix.lower() in (*_OTHER_DATA, *_PACKED)]
    if unread:
        raise DataError(
            f"The folder {given} holds {len(unread)} files in a form that is not read, the first is {unread[0]}. Files "
            f"end in {_ALLOWED}: "
            "convert or remove the others, or list the files to train on."
        )
    if not chosen:
        raise DataError(f"The folder {given} holds no file that ends in {_ALLOWED}.")
    if others:
        _LOGGER.info(
            "%s: %d files are no data and are skipped, the first is %s.",
            printable(given),
            len(others),
            printable(str(others[0])),
        )
    return [_open_file(file) for file in chosen]


def _walk_files(folder: Path) -> Iterator[Path]:
    """Yield all files of a folder and of those in it, linked ones too, each folder once."""
    seen: set[str] = set()
    for root, folders, names in os.walk(folder, followlinks=True, onerror=_refuse_folder):
        seen.add(os.path.realpath(root))
        folders[:] = [name for name in folders if os.path.realpath(Path(root, name)) not in seen]
        for name in names:
            path = Path(root, name)
            if path.is_file():
                yield path
            elif _kind(path) in SUFFIXES and not name.startswith((".", "_")):
                raise DataError(f"{path} is no file that can be read: a broken link, or a device. Repair or remove it.")


def _refuse_folder(error: OSError) -> None:
    raise DataError(f"The folder {error.filename} cannot be read: {error.strerror}.") from error


def _kind(path: Path) -> str:
    """Return the suffix that tells how a file is read: that before .gz where it is compressed."""
    suffix = path.suffix.lower()
    inner = Path(path.stem).suffix.lower()
    return inner if suffix in _PACKED and inner != ".parquet" else suffix


@contextmanager
def _open_bytes(path: Path) -> Iterator[IO[bytes]]:
    """Open a file, unpacking what is compressed; damage in it is a DataError."""
    unpack = _PACKED.get(path.suffix.lower())
    try:
        with path.open("rb") if unpack is None else unpack(path, "rb") as file:
            yield file
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        failed = "read" if unpack is None else "unpacked"
        raise DataError(
            f"{path} cannot be {failed}: {error}. The file is damaged, cut short or on a failing disk."
        ) from error


def _is_no_data(file: Path, *, root: Path) -> bool:
    """Say whether a file of a folder is hidden, or was written by us: rejected rows and cache entries."""
    is_hidden = any(part.startswith((".", "_")) for part in file.relative_to(root).parts)
    return is_hidden or file.match("rejected*.jsonl") or (file.parent / "ids.bin").exists()


def _open_file(path: Path) -> Source:
    kind = _kind(path)
    if kind not in SUFFIXES:
        raise DataError(f"{path} ends in {path.suffix or 'nothing'}; files end in {_ALLOWED}.")
    try:
        if path.stat().st_size == 0:
            raise DataError(f"{path} is empty: 0 bytes.")
        fingerprint = fingerprint_file(path)
        if kind == ".parquet":
            return _open_parquet(path, fingerprint)
        with _open_bytes(path) as file:
            beginning = file.read(4096)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    _check_beginning(path, beginning, is_json=kind != ".csv")
    # Two bytes a character: a byte order mark, or every other byte of the first ones is zero.
    if beginning.startswith((b"\xff\xfe", b"\xfe\xff")) or (
        len(beginning) > 3 and 0 in beginning[:2] and 0 in beginning[2:4]
    ):
        raise DataError(f"{path} is UTF-16; files are read as UTF-8. Convert it: iconv -f UTF-16 -t UTF-8.")
    reader, counts = _read_lines, "line"
    if kind == ".csv":
        reader = _read_csv
    elif kind == ".json" and beginning.removeprefix(BOM).lstrip().startswith(b"["):
        reader, counts = _read_json_array, "row"
    name = printable(str(path))
    return Source(name, fingerprint, lambda _: reader(path), None, lambda: _count_lines(path), counts, stamp_file(path))


def _check_beginning(path: Path, beginning: bytes, *, is_json: bool) -> None:
    """Refuse a file that is not what its name says, and JSON that goes over lines: reasons row by row would mislead."""
    found = next((kind for start, kind in _BEGINNINGS if beginning.startswith(start)), None)
    if found is not None:
        raise DataError(f"{path} is {found}, its name says text. Give it the right ending, or unpack it.")
    lines = [line.strip() for line in beginning.removeprefix(BOM).split(b"\n") if line.strip()]
    # A row that is cut short is followed by rows; an object that goes over lines is followed by its keys.
    if (
        is_json
        and len(lines) > 1
        and lines[0].startswith(b"{")
        and not lines[0].endswith(b"}")
        and lines[1][:1] in (b'"', b"}")
    ):
        raise DataError(
            f"{path}: a JSON object goes over several lines. Write one row a line, or all rows as one array ([...]) in "
            "a file that ends in .json; "
            "of an object around all rows, write its array alone."
        )


def _count_lines(path: Path) -> int:
    num_lines, last = 0, b"\n"
    with _open_bytes(path) as file:
        while block := file.read(2**20):
            num_lines, last = num_lines + block.count(b"\n"), block[-1:]
    return num_lines + (last != b"\n")


def _read_lines(path: Path) -> Iterator[RawRow]:
    """Yield the lines of a file; only a line feed ends one, so that strange line ends within strings are kept."""
    with _open_bytes(path) as file:
        for number, line in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES), b""), start=1):
            if len(line) == MAX_LINE_BYTES:
                raise DataError(
                    f"{path}, line {number} has {MAX_LINE_BYTES} bytes or more, which is no row. Write one row a line."
                )
            bare = line.removesuffix(b"\n").removesuffix(b"\r").removeprefix(BOM)
            yield RawRow(number, bare if bare.strip(_BLANK) else None)


def _read_json_array(path: Path) -> Iterator[RawRow]:
    """Yield the elements of a JSON array as the bytes that they are written in, so that each is judged like a line."""
    with _open_bytes(path) as file:
        content = file.read(MAX_ARRAY_BYTES)
    if len(content) == MAX_ARRAY_BYTES:
        raise DataError(
            f"{path} is an array of {MAX_ARRAY_BYTES} bytes or more, which has to be read at once. Write one row a "
            "line (.jsonl)."
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
                    f"{path}, line {line}: no comma and no end of the array here, so that no row behind it can be "
                    "found. Repair the file."
                )
            place = _skip_space(text, place + 1)
            line, counted = line + text.count("\n", counted, place), place
        try:
            _, end = decoder.raw_decode(text, place)
        except (ValueError, RecursionError) as error:
            raise DataError(
                f"{path}, line {line}: the array is broken, so that no row behind it can be found: {error}. Repair the "
                "file."
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


def _read_csv(path: Path) -> Iterator[RawRow]:
    """Yield the records of a CSV file with a header line; a record has the number of its first line."""
    previous_limit = csv.field_size_limit(2**31 - 1)
    try:
        with (
            _open_bytes(path) as binary,
            TextIOWrapper(binary, encoding="utf-8-sig", errors="surrogateescape", newline="") as file,
        ):
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
                        raise DataError(
                            f"{path}, line {line}: a quote that opens there is never closed. Repair the file."
                        ) from None
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
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        raise DataError(f"{path} is no readable Parquet file: {error}") from error
    if len(set(columns)) != len(columns):
        raise DataError(f"{path} names a column twice: {', '.join(columns)}.")
    return Source(
        printable(str(path)),
        fingerprint,
        lambda wanted: _read_parquet(path, wanted),
        columns,
        lambda: num_rows,
        stamp=stamp_file(path),
    )


def _read_parquet(path: Path, wanted: frozenset[str] | None) -> Iterator[RawRow]:
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            columns = None if wanted is None else [name for name in file.schema_arrow.names if name in wanted]
            for raw, num_absent in read_arrow_rows(file.iter_batches(batch_size=_BATCH_ROWS, columns=columns)):
                number += 1
                yield RawRow(number, raw, num_absent)
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        raise DataError(f"{path} cannot be read behind row {number}: {error}") from error


def _open_saved(path: Path) -> Source:
    """Open what datasets.Dataset.save_to_disk wrote."""
    import datasets

    try:
        return _open_dataset(datasets.load_from_disk(str(path)), name=printable(str(path)))
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise DataError(
            f"{path} is a saved data set that cannot be read: {error}. Save it again with save_to_disk."
        ) from error


def _open_hub(given: str) -> Source:
    import datasets
    from datasets.packaged_modules import _PACKAGED_DATASETS_MODULES

    name, _, rest = given.partition(":")
    if name in _PACKAGED_DATASETS_MODULES or name.endswith(".py"):
        # These read local files, "pandas" by unpickling them, where load_dataset is asked for them by name.
        raise DataError(
            f"{given} names a reader of the datasets library, not a data set. Give files, a folder or a hub id, for "
            "example owner/name."
        )
    config, _, split = rest.partition(":")
    try:
        dataset = datasets.load_dataset(name, config or None, split=split or "train")
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        raise DataError(
            f"{given} is neither a file or folder here nor a data set of the hub that can be had: {error}"
        ) from error
    return _open_dataset(dataset, name=printable(given))


def _open_dataset(dataset: Any, *, name: str) -> Source:
    if isinstance(dataset, Mapping):
        raise DataError(f"{name} holds the splits {', '.join(dataset)}; give one of them.")
    if not hasattr(dataset, "num_rows"):
        raise DataError(
            f"{name} is a streaming data set; packs are planned over all examples, load it without streaming."
        )
    if dataset.num_rows == 0:
        raise DataError(f"{name} is empty: 0 rows.")

    def read(wanted: frozenset[str] | None) -> Iterator[RawRow]:
        plain = dataset.with_format(None)
        if wanted is not None:
            plain = plain.select_columns([column for column in plain.column_names if column in wanted])
        batches = (
            batch for table in plain.with_format("arrow").iter(batch_size=_BATCH_ROWS) for batch in table.to_batches()
        )
        number = 0
        try:
            for raw, num_absent in read_arrow_rows(batches):
                number += 1
                yield RawRow(number, raw, num_absent)
        except (OSError, ValueError) as error:
            raise DataError(f"{name} cannot be read behind row {number}: {error}") from error

    fingerprint = getattr(dataset, "_fingerprint", None) or _fingerprint_rows(list(dataset))
    # An Arrow file that was replaced keeps the fingerprint of the data set.
    files = [Path(entry["filename"]) for entry in getattr(dataset, "cache_files", ())]
    stamp = " ".join(fingerprint_file(file) + stamp_file(file) for file in files if file.is_file())
    return Source(
        name, f"{name}:{fingerprint}", read, tuple(dataset.column_names), lambda: dataset.num_rows, stamp=stamp
    )


def _open_rows(rows: Any) -> Source:
    def read(wanted: frozenset[str] | None) -> Iterator[RawRow]:
        for number, row in enumerate(rows, start=1):
            yield RawRow(number, row)

    return Source("list of rows", _fingerprint_rows(rows), read, None, lambda: len(rows))


def _fingerprint_rows(rows: Sequence[Mapping[str, Any]]) -> str:
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json.dumps(row, default=_to_json, skipkeys=True).encode())
    return digest.hexdigest()


def _to_json(value: Any) -> Any:
    # The repr of a long array leaves its middle out.
    return value.tolist() if hasattr(value, "tolist") else repr(value)
