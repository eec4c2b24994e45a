"""Open sources of rows: text and Parquet files, folders of them, saved data sets, hub data sets, and lists of rows.

``folders`` finds files, ``text_files`` reads the rows of text files, ``arrow`` those of tables.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

from lightning_fastft.core.errors import DataError, OptionError, printable
from lightning_fastft.core.hub import ask_hub
from lightning_fastft.packing.reading.arrow import read_arrow_rows
from lightning_fastft.packing.reading.folders import (
    ALLOWED,
    SAVED,
    SAVED_SPLITS,
    SUFFIXES,
    find_in_folder,
    find_matches,
    is_litdata,
    is_local,
    is_pattern,
    is_saved,
)
from lightning_fastft.packing.reading.text_files import (
    RawRow,
    choose_reader,
    count_lines,
    file_kind,
)

# Files up to this size are hashed completely, at about 1.2 GB/s; of larger files, blocks at regular offsets.
WHOLE_FINGERPRINT_BYTES = 2**30
_FINGERPRINT_BLOCKS, _BLOCK_BYTES = 64, 2**20
# File of rejected rows (data modules also write rejected_val.jsonl). It is never read as data.
REJECTED = "rejected.jsonl"
# Files of the hub, which are only streamed.
HUB_URL = "hf://"
_BATCH_ROWS = 1000


class Source(NamedTuple):
    """Describe one file, data set or list.

    Args:
        name: Shown in messages and in rejected.jsonl.
        fingerprint: Digest of the content.
        read: Yields the rows; takes the requested columns, None for all.
        columns: Column names if all rows share them; None if each row has its own.
        count_rows: Returns an upper bound of the number of rows, for the progress bar.
        counts: Unit of row numbers: "line" or "row".
        stamp: Modification stamp of a file whose fingerprint does not cover all bytes; "" otherwise.
        folder: Paths of images are relative to it; "" for the current folder.
        entry: Number of the entry of a mapping (a mixture, named sets) that the source belongs to; 0 without one.
    """

    name: str
    fingerprint: str
    read: Callable[[frozenset[str] | None], Iterator[RawRow]]
    columns: tuple[str, ...] | None
    count_rows: Callable[[], int]
    counts: str = "row"
    stamp: str = ""
    folder: str = ""
    entry: int = 0


def open_sources(sources: object) -> list[Source]:
    """Return the sources to read; the files of a folder and of a glob pattern are sorted.

    Args:
        sources: A path of a file or folder, a glob pattern such as "data/*.jsonl.gz", an id of a hub data set
            ("owner/name", "owner/name:config" or "owner/name:config:split"; split "train" unless named), a
            datasets.Dataset, a list of rows (dicts), or a list of these; or a mapping of them
            (``sources_of_mapping``).

    Returns:
        At least one source.

    Raises:
        DataError: A file is missing, empty or of an unknown kind, a folder or a pattern has no data files, or a data
            set cannot be loaded.
        OptionError: sources has another type.

    Cost:
        Hashes at most 1 GiB of each file.
    """
    if _is_rows(sources):
        return [_open_rows(sources)]
    if is_mapping(sources):
        entries = enumerate(sources_of_mapping(sources))
        return [source._replace(entry=number) for number, given in entries for source in open_sources(given)]
    opened: list[Source] = []
    for source in sources if isinstance(sources, (list, tuple)) else [sources]:
        if isinstance(source, (str, os.PathLike)):
            opened.extend(_open_path(os.fspath(source)))
        elif is_dataset(source):
            opened.append(_open_dataset(source, name=f"data set {len(opened) + 1}"))
        elif _is_rows(source):
            opened.append(_open_rows(source)._replace(name=f"list {len(opened) + 1}"))
        else:
            raise OptionError(
                "A source must be a path, a hub id, a datasets.Dataset or a list of dicts, got "
                f"{type(source).__name__}."
            )
    if not opened:
        raise DataError("No data: the list of sources is empty.")
    return opened


def is_dataset(value: object) -> bool:
    """Return whether a value is a Dataset, a stream or a dict of them of ``datasets``, without importing it."""
    return hasattr(value, "column_names") and hasattr(value, "with_format")


def is_mapping(sources: object) -> TypeGuard[Mapping[str, Any]]:
    """Return whether data is a mixture or named sets, which a DatasetDict is too."""
    return isinstance(sources, Mapping)


def sources_of_mapping(sources: Mapping[str, Any]) -> list[Any]:
    """Return the sources of a mixture, which are its keys, or of named sets, which are their values.

    Example:
        >>> sources_of_mapping({"a.jsonl": 0.7, "b.jsonl": 0.3}), sources_of_mapping({"math": "a.jsonl"})
        (['a.jsonl', 'b.jsonl'], ['a.jsonl'])
    """
    return [name if isinstance(value, (int, float)) else value for name, value in sources.items()]


def list_sources(sources: object) -> list[Any]:
    """Return the single sources of an option, as they are given: of a list, a mixture, or named sets and their lists.

    Example:
        >>> list_sources({"math": ["a.jsonl", "b.jsonl"], "chat": "c.jsonl"})
        ['a.jsonl', 'b.jsonl', 'c.jsonl']
    """
    if is_mapping(sources):
        return [source for given in sources_of_mapping(sources) for source in list_sources(given)]
    return list(sources) if isinstance(sources, (list, tuple)) else [sources]


def _is_rows(value: object) -> bool:
    return isinstance(value, (list, tuple)) and any(
        isinstance(entry, Mapping) and not hasattr(entry, "column_names") for entry in value
    )


def fingerprint_file(path: Path) -> str:
    """Return a digest of the content of a file, independent of its name, folder and modification time.

    The digest of a file above 1 GiB covers its size, its modification time and 64 blocks of 1 MiB.
    """
    stat = path.stat()
    digest = hashlib.sha256(f"{stat.st_size}\n".encode())
    with path.open("rb") as file:
        if stat.st_size <= WHOLE_FINGERPRINT_BYTES:
            while block := file.read(_BLOCK_BYTES):
                digest.update(block)
            return digest.hexdigest()
        # Only the modification time covers the bytes between the blocks.
        digest.update(f"{stat.st_mtime_ns}\n".encode())
        for number in range(_FINGERPRINT_BLOCKS):
            file.seek(number * (stat.st_size - _BLOCK_BYTES) // (_FINGERPRINT_BLOCKS - 1))
            digest.update(file.read(_BLOCK_BYTES))
    return digest.hexdigest()


def stamp_file(path: Path) -> str:
    """Return the inode change time of a file too large to hash completely, which programs cannot reset; else ""."""
    stat = path.stat()
    return str(stat.st_ctime_ns) if stat.st_size > WHOLE_FINGERPRINT_BYTES else ""


def _open_path(given: str) -> list[Source]:
    if given.startswith(HUB_URL):
        raise DataError(f"{given} is a URL, which is read as a stream. Set streaming=True.")
    if is_pattern(given):
        return [source for match in find_matches(given) for source in _open_path(str(match))]
    path = Path(given).expanduser()
    if path.is_dir():
        return _open_folder(path, given=given)
    if path.is_file():
        return [_open_file(path)]
    check_exists(given)
    return [_open_dataset(load_hub(given), name=printable(given))]


def check_exists(given: str) -> None:
    """Check that there is a file or folder, or a match of a glob pattern; what may be a hub id is not checked.

    What may be either, because the folder before its slash is there, is refused if the hub cannot be reached.

    Raises:
        DataError: There is none.
    """
    path = Path(given).expanduser()
    if given.startswith(HUB_URL):
        return
    if is_pattern(given):
        find_matches(given)
    elif is_local(given) and not path.is_dir() and not path.is_file():
        parts = [part.strip() for part in given.split(",")]
        is_list = len(parts) > 1 and all(Path(part).exists() for part in parts)
        advice = f" Write several as a list: '[{', '.join(parts)}]'." if is_list else ""
        raise DataError(f"There is no file or folder {given} (searched from {Path.cwd()}).{advice}")
    elif not path.exists() and (reason := _ask_hub(given)):
        raise DataError(f"There is no file or folder {given} (searched from {Path.cwd()}){reason}. Correct the path.")


def _ask_hub(given: str) -> str:
    """Return why the hub cannot be asked for a name that may be a path; "" for other names and for cached data sets."""
    parent, slash, name = given.partition(":")[0].partition("/")
    if not slash or not Path(parent).is_dir():
        return ""
    import datasets

    is_cached = any(Path(datasets.config.HF_DATASETS_CACHE).glob(f"{parent}___*"))
    return "" if is_cached else ask_hub(f"{parent}/{name}", kind="dataset")


def _open_folder(path: Path, *, given: str) -> list[Source]:
    if (path / SAVED_SPLITS).is_file():
        splits = sorted(entry.name for entry in path.iterdir() if (entry / SAVED).is_file()) or ["none"]
        first = "train" if "train" in splits else splits[0]
        raise DataError(
            f"{given} is a saved data set with the splits {', '.join(splits)}. Give the folder of one of them, for "
            f"example {path / first}."
        )
    if is_litdata(path):
        raise DataError(f"{given} is a folder of LitData, which is read as a stream. Set streaming=True.")
    if is_saved(path):
        return [_open_saved(path)]
    return [_open_file(file) for file in find_in_folder(path, given=given)]


def _open_file(path: Path) -> Source:
    kind = file_kind(path)
    if kind not in SUFFIXES:
        raise DataError(f"{path} has the suffix {path.suffix or '(none)'}. Supported are {ALLOWED}.")
    try:
        if path.stat().st_size == 0:
            raise DataError(f"{path} is empty: 0 bytes.")
        fingerprint = fingerprint_file(path)
        if kind == ".parquet":
            return _open_parquet(path, fingerprint)
        reader, counts = choose_reader(path)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    name = printable(str(path))
    stamp, folder = stamp_file(path), str(path.parent)
    return Source(name, fingerprint, lambda _: reader(path), None, lambda: count_lines(path), counts, stamp, folder)


def _open_parquet(path: Path, fingerprint: str) -> Source:
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            columns, num_rows = tuple(file.schema_arrow.names), file.metadata.num_rows
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        raise DataError(f"{path} cannot be read as a Parquet file: {error}") from error
    if len(set(columns)) != len(columns):
        raise DataError(f"{path} repeats a column: {', '.join(columns)}. Rename one of them.")
    return Source(
        printable(str(path)),
        fingerprint,
        lambda wanted: _read_parquet(path, wanted),
        columns,
        lambda: num_rows,
        stamp=stamp_file(path),
        folder=str(path.parent),
    )


def _read_parquet(path: Path, wanted: frozenset[str] | None) -> Iterator[RawRow]:
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            columns = None if wanted is None else [name for name in file.schema_arrow.names if name in wanted]
            rows = read_arrow_rows(file.iter_batches(batch_size=_BATCH_ROWS, columns=columns))
            for number, (raw, num_absent) in enumerate(rows, start=1):
                yield RawRow(number, raw, num_absent)
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        raise DataError(f"{path} cannot be read after row {number}: {error}") from error


def _open_saved(path: Path) -> Source:
    """Open a folder of datasets.Dataset.save_to_disk."""
    import datasets

    try:
        return _open_dataset(datasets.load_from_disk(str(path)), name=printable(str(path)))
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise DataError(
            f"{path} is a saved data set that cannot be read: {error}. Save it again with save_to_disk."
        ) from error


def load_hub(given: str, *, is_streaming: bool = False) -> Any:
    """Return the hub data set of "owner/name", "owner/name:config" or "owner/name:config:split".

    Raises:
        DataError: There is no such data set, or the name is the name of a reader.
    """
    import datasets
    from datasets.packaged_modules import _PACKAGED_DATASETS_MODULES

    name, _, rest = given.partition(":")
    if name in _PACKAGED_DATASETS_MODULES or name.endswith(".py"):
        # load_dataset would run these readers on local files; "pandas" unpickles them.
        raise DataError(
            f"{given} names a reader of the datasets library, not a data set. Give files, a folder or a hub id such as "
            "owner/name."
        )
    config, _, split = rest.partition(":")
    try:
        return datasets.load_dataset(name, config or None, split=split or "train", streaming=is_streaming)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        raise DataError(
            f"{given} is no file or folder (searched from {Path.cwd()}) and no available hub data set: {error}"
        ) from error


def _open_dataset(dataset: Any, *, name: str) -> Source:
    if isinstance(dataset, Mapping):
        raise DataError(f"{name} has the splits {', '.join(dataset)}. Give one of them.")
    if not hasattr(dataset, "num_rows"):
        raise DataError(
            f"{name} is a stream: only the option paths accepts one, and only one. Load it without streaming, or join "
            "streams with datasets.interleave_datasets."
        )
    if dataset.num_rows == 0:
        raise DataError(f"{name} is empty: 0 rows.")
    if dataset.format["type"] == "custom":
        raise DataError(
            f"{name} has a transform (set_transform or with_transform), and its stored rows are read without it. Give "
            "dataset.with_format(None).map(function), or dataset.with_format(None) for the stored rows."
        )

    def read(wanted: frozenset[str] | None) -> Iterator[RawRow]:
        plain = dataset.with_format(None)
        if wanted is not None:
            plain = plain.select_columns([column for column in plain.column_names if column in wanted])
        batches = (
            batch for table in plain.with_format("arrow").iter(batch_size=_BATCH_ROWS) for batch in table.to_batches()
        )
        number = 0
        try:
            for number, (raw, num_absent) in enumerate(read_arrow_rows(batches), start=1):
                yield RawRow(number, raw, num_absent)
        except (OSError, ValueError) as error:
            raise DataError(f"{name} cannot be read after row {number}: {error}") from error

    fingerprint = getattr(dataset, "_fingerprint", None) or _fingerprint_rows(list(dataset))
    # The fingerprint of a data set does not change if its Arrow files are replaced.
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
    if hasattr(value, "tobytes") and hasattr(value, "mode"):
        # The repr of a PIL image is its address.
        return [value.mode, value.size, hashlib.sha256(value.tobytes()).hexdigest()]
    # The repr of a long array omits its middle.
    return value.tolist() if hasattr(value, "tolist") else repr(value)
