"""Convert rows of Arrow tables (Parquet files, data sets of the datasets package) to plain values.

A struct column has the keys of all rows, with null for keys that a row lacks. Such nulls are dropped. JSON text (the
Json feature of datasets) is parsed, and keeps the nulls that the user wrote.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from lightning_fastft.packing.rows.parsing import parse_json
from lightning_fastft.packing.rows.rejects import NOT_UTF8, Raw, RowRejectedError, UnreadableRow

_Convert = Callable[[Any], Any]


def read_arrow_rows(batches: Iterable[Any]) -> Iterator[tuple[Raw, int]]:
    """Yield each row as a dict with the number of nulls dropped from its nested values."""
    reader = _RowReader()
    for batch in batches:
        try:
            rows: list[Raw] = batch.to_pylist()
        except UnicodeDecodeError:
            rows = [_take_row(batch.slice(index, 1)) for index in range(batch.num_rows)]
        for row in rows:
            yield reader.convert(row, schema=batch.schema)


def _take_row(batch: Any) -> Raw:
    try:
        row: dict[str, Any] = batch.to_pylist()[0]
    except UnicodeDecodeError as error:
        return UnreadableRow(NOT_UTF8, f"byte 0x{error.object[error.start]:02x}", error.object)
    return row


class _RowReader:
    """Convert rows by their column types."""

    def __init__(self) -> None:
        self._converts: dict[str, _Convert] | None = None
        self._num_absent = 0

    def convert(self, row: Raw, *, schema: Any) -> tuple[Raw, int]:
        """Return the row without absent keys, and the number of absent keys."""
        if self._converts is None:
            self._converts = {
                field.name: convert for field in schema if (convert := self._make_convert(field.type)) is not None
            }
        self._num_absent = 0
        if isinstance(row, dict):
            try:
                for name, convert in self._converts.items():
                    row[name] = convert(row[name])
            except RowRejectedError as error:
                return UnreadableRow(error.reason, error.detail, repr(row)[:80].encode("utf-8", "backslashreplace")), 0
        return row, self._num_absent

    def _make_convert(self, kind: Any) -> _Convert | None:
        """Return the converter of an Arrow type; None if its values need none."""
        from pyarrow import types

        if getattr(kind, "extension_name", "") == "arrow.json":
            return lambda value: parse_json(value.encode("utf-8", "surrogatepass")) if isinstance(value, str) else value
        if types.is_struct(kind):
            return self._make_struct_convert(kind)
        is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
        convert = self._make_convert(kind.value_type) if is_list else None
        if convert is None:
            return None
        return lambda values: None if values is None else [convert(value) for value in values]

    def _make_struct_convert(self, kind: Any) -> _Convert:
        fields = [kind.field(index) for index in range(kind.num_fields)]
        converts = {field.name: self._make_convert(field.type) for field in fields}

        def take(value: dict[str, Any] | None) -> dict[str, Any] | None:
            if value is None:
                return None
            present = [(name, entry) for name, entry in value.items() if entry is not None]
            self._num_absent += len(value) - len(present)
            return {name: entry if (convert := converts[name]) is None else convert(entry) for name, entry in present}

        return take
