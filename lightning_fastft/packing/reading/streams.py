"""Rows of corpora larger than disk: ``datasets.IterableDataset`` and LitData's ``StreamingDataset``.

A stream is read row by row, from its beginning or from a state that was saved after a row. Each rank reads its own
shards. ``datasets`` and ``litdata`` keep the position; where they cannot, rows are read again and skipped.
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from lightning_fastft.core.errors import DataError, OptionError, printable
from lightning_fastft.core.extras import pip_line
from lightning_fastft.packing.reading.file_streams import ROW, decode_row, stream_lines, stream_text_files
from lightning_fastft.packing.reading.folders import (
    SUFFIXES,
    find_in_folder,
    find_matches,
    is_litdata,
    is_pattern,
    is_saved,
)
from lightning_fastft.packing.reading.sources import HUB_URL, check_exists, load_hub
from lightning_fastft.packing.reading.text_files import RawRow, file_kind

# Readers of the datasets package for files that are not read by ours, by their suffix.
_BUILDERS = {".json": "json", ".parquet": "parquet", ".csv": "csv", ".tsv": "csv"}
_LINES = (".jsonl", ".ndjson")


class HubStream:
    """Read a ``datasets.IterableDataset``; its own state_dict is the position.

    ``has_state`` says whether a position is restored without reading the rows before it again. That state does not
    include a shuffle buffer. With one, rows before a position are read again and skipped. ``is_uniform`` says whether
    the first rows show the columns of all rows; those of several files do not.
    """

    def __init__(self, dataset: Any, *, name: str, is_uniform: bool = True) -> None:
        # A copy, because reading sets its epoch and its state.
        self._dataset = copy.copy(dataset)
        self.name = name
        # None if each row has its own columns.
        names = dataset.column_names
        self.columns = None if names is None or ROW in names else tuple(names)
        self.is_uniform = is_uniform
        self.has_state = not _has_buffer(dataset)

    def split(self, *, rank: int, world_size: int) -> HubStream:
        """Return the shards of one rank, or every world_size-th row if the shards do not divide evenly."""
        from datasets.distributed import split_dataset_by_node

        if world_size == 1:
            return self
        own = split_dataset_by_node(self._dataset, rank=rank, world_size=world_size)
        return HubStream(own, name=self.name, is_uniform=self.is_uniform)

    def read(self, *, epoch: int, state: str, num_behind: int) -> Iterator[RawRow]:
        """Yield the rows of a pass after a position."""
        self._dataset.set_epoch(epoch)
        self._dataset.load_state_dict(json.loads(state) if state else None)
        rows = iter(self._dataset)
        if not state:
            _skip(rows, num_behind, name=self.name)
        yield from _number_rows(rows, num_behind=num_behind, name=self.name, features=self._dataset.features)

    def save(self, *, num_behind: int) -> str:
        """Return the data set's state as JSON."""
        return json.dumps(self._dataset.state_dict(), default=_as_plain) if self.has_state else ""


class ChunkStream:
    """Read a LitData ``StreamingDataset``; samples are dicts, or arrays of token ids."""

    has_state = is_uniform = True

    def __init__(self, dataset: Any, *, name: str) -> None:
        self._dataset = copy.copy(dataset)
        self.name = name
        self.columns: tuple[str, ...] | None = None

    def split(self, *, rank: int, world_size: int) -> ChunkStream:
        """Return the chunks of one rank."""
        found = ChunkStream(self._dataset, name=self.name)
        # LitData reads the ranks when the data set is built, perhaps before the launcher starts them, and treats ranks
        # that share their data as different ranks.
        environment = copy.copy(self._dataset.distributed_env)
        environment.world_size, environment.global_rank = world_size, rank
        found._dataset.distributed_env, found._dataset.shuffler = environment, None
        found._dataset.set_drop_last(False)
        return found

    def read(self, *, epoch: int, state: str, num_behind: int) -> Iterator[RawRow]:
        """Yield the rows of a pass after a position."""
        self._dataset.reset_state_dict()
        self._dataset.set_epoch(epoch + 1)
        if state:
            self._dataset.load_state_dict(json.loads(state))
        yield from _number_rows(iter(self._dataset), num_behind=num_behind, name=self.name)

    def save(self, *, num_behind: int) -> str:
        """Return the data set's state as JSON."""
        found = self._dataset.state_dict(num_samples_yielded=num_behind, num_workers=1, batch_size=1)
        return json.dumps(found, default=_as_plain)


RowStream = HubStream | ChunkStream


def open_stream(source: Any, *, seed: int) -> RowStream:
    """Return the stream of a source.

    Args:
        source: A datasets.IterableDataset or a litdata.StreamingDataset. A hub id ("owner/name:config:split"),
            an ``hf://`` URL, a file, a folder, a glob pattern, a folder of LitData, a list of them, or a mapping from
            them to weights, which are shares of the rows.
        seed: Seed of the shuffle of a LitData folder, and of a mixture.

    Raises:
        DataError: There is no such data.
        OptionError: The source cannot be streamed.
    """
    if is_hub_stream(source):
        return HubStream(source, name="stream")
    if _is_instance(source, "litdata", "StreamingDataset"):
        return ChunkStream(source, name="stream")
    name = " and ".join(map(str, source)) if isinstance(source, (list, tuple, Mapping)) else str(source)
    if isinstance(source, (str, Path)) and is_litdata(Path(source).expanduser()):
        return ChunkStream(_open_litdata(Path(source).expanduser(), seed=seed), name=printable(name))
    paths = list(source) if isinstance(source, (list, tuple, Mapping)) else [source]
    wrong = next((path for path in paths if not isinstance(path, (str, Path)) or is_litdata(Path(path))), None)
    if wrong is not None or not paths:
        raise OptionError(
            f"streaming=True reads paths, hub ids and hf:// URLs, or one folder of LitData, got {wrong!r:.80}. Give "
            "rows and data sets in memory with streaming=False."
        )
    import datasets

    opened = [_load(str(path)) for path in paths]
    joined = opened[0]
    try:
        if isinstance(source, Mapping):
            total = sum(source.values())
            joined = datasets.interleave_datasets(
                opened,
                probabilities=[weight / total for weight in source.values()],
                seed=seed,
                stopping_strategy="all_exhausted",
            )
        elif len(opened) > 1:
            joined = datasets.concatenate_datasets(opened)
    except ValueError as error:
        raise DataError(f"{printable(name)} cannot be one stream: {error}") from error
    return HubStream(joined, name=printable(name), is_uniform=len(opened) == 1 and joined.num_shards == 1)


def is_hub_stream(source: object) -> bool:
    """Return whether an object is a ``datasets.IterableDataset``, without importing datasets."""
    return _is_instance(source, "datasets", "IterableDataset")


def is_stream(source: object) -> bool:
    """Return whether an object is a stream of rows, without importing its library."""
    return is_hub_stream(source) or _is_instance(source, "litdata", "StreamingDataset")


def _is_instance(value: object, module: str, name: str) -> bool:
    loaded = sys.modules.get(module)
    kind = None if loaded is None else getattr(loaded, name, None)
    return isinstance(kind, type) and isinstance(value, kind)


def _open_litdata(folder: Path, *, seed: int) -> Any:
    try:
        from litdata import StreamingDataset
    except ImportError as error:
        raise OptionError(f"{folder} is a folder of LitData, which needs litdata: {pip_line('litdata')}") from error
    return StreamingDataset(str(folder), shuffle=True, seed=seed)


def _load(given: str) -> Any:
    """Return the IterableDataset of a path, a URL or a hub id."""
    import datasets

    if given.startswith(HUB_URL):
        kind = file_kind(Path(given))
        try:
            return stream_lines([given]) if kind in _LINES else _load_files([given], kind=kind)
        except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
            raise DataError(f"{given} cannot be streamed: {error}") from error
    check_exists(given)
    path = Path(given).expanduser()
    if is_pattern(given):
        files = [str(match) for match in find_matches(given)]
    elif path.is_dir() and is_saved(path):
        return datasets.load_from_disk(str(path)).to_iterable_dataset()
    elif path.is_dir():
        files = [str(file) for file in find_in_folder(path, given=given)]
    elif path.is_file():
        files = [str(path)]
    else:
        return load_hub(given, is_streaming=True)
    kinds = {file_kind(Path(file)) for file in files}
    if kinds == {".parquet"}:
        return _load_files(files, kind=".parquet")
    if ".parquet" in kinds or not kinds.issubset(SUFFIXES):
        raise DataError(
            f"{given} has files that end in {', '.join(kind or '(nothing)' for kind in sorted(kinds))}. A stream reads "
            f"Parquet files, or text files: {', '.join(SUFFIXES)}."
        )
    return stream_text_files(files)


def _load_files(files: list[str], *, kind: str) -> Any:
    """Return the IterableDataset of files that ``datasets`` reads."""
    import datasets

    if kind not in _BUILDERS:
        raise DataError(f"{files[0]} has the suffix {kind or '(none)'}. Supported are {', '.join(SUFFIXES)}.")
    options: dict[str, Any] = {"sep": "\t"} if kind == ".tsv" else {}
    return datasets.load_dataset(_BUILDERS[kind], data_files=files, split="train", streaming=True, **options)


def _has_buffer(dataset: Any) -> bool:
    """Return whether rows pass a shuffle buffer, which the state of ``datasets`` does not include."""
    from datasets.iterable_dataset import BufferShuffledExamplesIterable

    waiting = [dataset._ex_iterable]
    while waiting:
        stage = waiting.pop()
        if isinstance(stage, BufferShuffledExamplesIterable):
            return True
        waiting += [stage.ex_iterable] if hasattr(stage, "ex_iterable") else getattr(stage, "ex_iterables", [])
    return False


def _skip(rows: Iterator[Any], num_rows: int, *, name: str) -> None:
    num_found = sum(1 for _ in islice(rows, num_rows))
    if num_found < num_rows:
        raise DataError(
            f"{name} has {num_found} rows on this rank, and the checkpoint was written after row {num_rows}."
        )


def _number_rows(rows: Iterator[Any], *, num_behind: int, name: str, features: Any = None) -> Iterator[RawRow]:
    number = num_behind
    try:
        for number, row in enumerate(rows, start=num_behind + 1):
            raw = row if isinstance(row, Mapping) else {"input_ids": row}
            found = decode_row(raw) if ROW in raw else raw
            yield RawRow(number, *(_drop_absent(found, features) if isinstance(found, Mapping) else (found,)))
    except (OSError, ValueError, RuntimeError) as error:
        raise DataError(f"{name} cannot be read after row {number}: {error}") from error


def _drop_absent(row: Mapping[str, Any], features: Any) -> tuple[dict[str, Any], int]:
    """Return a row with lists in place of arrays and without nulls in nested dicts, and the number of these nulls.

    The Json feature of datasets keeps its nulls, which the user wrote.
    """
    num_absent = 0

    def clean(value: Any, feature: Any) -> Any:
        nonlocal num_absent
        if type(feature).__name__ == "Json":
            return value
        if isinstance(value, Mapping):
            num_absent += sum(entry is None for entry in value.values())
            return {name: clean(entry, _part(feature, name)) for name, entry in value.items() if entry is not None}
        if isinstance(value, list) and value and not isinstance(value[0], (int, float, str)):
            return [clean(entry, getattr(feature, "feature", None)) for entry in value]
        return value.tolist() if hasattr(value, "tolist") else value

    return {name: clean(value, _part(features, name)) for name, value in row.items()}, num_absent


def _part(features: Any, name: str) -> Any:
    return features.get(name) if isinstance(features, Mapping) else None


def _as_plain(value: Any) -> Any:
    """Return a number or list in place of a NumPy scalar or array."""
    return value.tolist()
