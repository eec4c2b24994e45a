"""Convert rows of Arrow tables (Parquet files, data sets of the datasets package) to plain values.

A struct column has the keys of all rows, with null for keys that a row lacks. Such nulls are dropped. JSON text (the
Json feature of datasets) is parsed, and keeps the nulls that the user wrote.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from lightning_fastft.packing.rows.parsing import parse_json
from lightning_fastft.packing.rows.rejects import NOT_UTF8, Raw, RowRejectedError

_Convert = Callable[[Any], Any]


def read_arrow_rows(batches: Iterable[Any]) -> Iterator[tuple[Raw, int]]:
    """Yield each row as a dict with the number of nulls dropped from its nested values."""
    converts: dict[str, _Convert] | None = None
    dropped: Counter[str] = Counter()
    for batch in batches:
        if converts is None:
            converts = {
                field.name: convert
                for field in batch.schema
                if (convert := _make_convert(field.type, dropped=dropped)) is not None
            }
        try:
            rows: list[Raw] = batch.to_pylist()
        except UnicodeDecodeError:
            rows = [_take_row(batch.slice(index, 1)) for index in range(batch.num_rows)]
        for row in rows:
            dropped.clear()
            converted = _convert_row(row, converts)
            yield converted, 0 if isinstance(converted, RowRejectedError) else dropped.total()


def _take_row(batch: Any) -> Raw:
    try:
        row: dict[str, Any] = batch.to_pylist()[0]
    except UnicodeDecodeError as error:
        return RowRejectedError(NOT_UTF8, f"byte 0x{error.object[error.start]:02x}", error.object)
    return row


def _convert_row(row: Raw, converts: dict[str, _Convert]) -> Raw:
    """Return the row with the converted values of its columns."""
    if isinstance(row, dict):
        try:
            for name, convert in converts.items():
                row[name] = convert(row[name])
        except RowRejectedError as error:
            return RowRejectedError(error.reason, error.detail, repr(row)[:80].encode("utf-8", "backslashreplace"))
    return row


def _make_convert(kind: Any, *, dropped: Counter[str]) -> _Convert | None:
    """Return the converter of an Arrow type, which counts the nulls that it drops; None if its values need none."""
    from pyarrow import types

    if getattr(kind, "extension_name", "") == "arrow.json":
        return lambda value: parse_json(value.encode("utf-8", "surrogatepass")) if isinstance(value, str) else value
    if types.is_struct(kind):
        return _make_struct_convert(kind, dropped=dropped)
    is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    convert = _make_convert(kind.value_type, dropped=dropped) if is_list else None
    if convert is None:
        return None
    return lambda values: None if values is None else [convert(value) for value in values]


def _make_struct_convert(kind: Any, *, dropped: Counter[str]) -> _Convert:
    fields = [kind.field(index) for index in range(kind.num_fields)]
    converts = {field.name: _make_convert(field.type, dropped=dropped) for field in fields}

    def take(value: dict[str, Any] | None) -> dict[str, Any] | None:
        if value is None:
            return None
        present = [(name, entry) for name, entry in value.items() if entry is not None]
        dropped["nulls"] += len(value) - len(present)
        return {name: entry if (convert := converts[name]) is None else convert(entry) for name, entry in present}

    return take
