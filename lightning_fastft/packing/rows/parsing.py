"""Parse one row: strict JSON, the columns of its format, and their texts."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

from lightning_fastft.packing.rows.rejects import (
    DUPLICATE_KEY,
    EMPTY_TEXT,
    EXTRA_COLUMN,
    MALFORMED,
    MISSING_COLUMN,
    NOT_AN_OBJECT,
    NOT_FINITE,
    NOT_UTF8,
    NUL,
    SURROGATE,
    WRONG_TYPE,
    Raw,
    RowRejectedError,
)

BOM = b"\xef\xbb\xbf"
# JSON escapes of a NUL or of a surrogate. Only rows with such an escape need a check of the decoded strings.
_RISKY_ESCAPE = re.compile(rb"\\u(0000|[dD][89a-fA-F])")


def parse_row(raw: Raw) -> dict[str, Any]:
    """Return the row as a dict.

    A line must be one strict JSON object: no duplicate keys, NaN, Infinity, NUL or lone surrogates. A leading byte
    order mark and a trailing carriage return are removed.

    Returns:
        A dict with string keys.

    Raises:
        RowRejectedError: The row is not a valid object.

    Example:
        >>> parse_row(b'{"text": "a"}')
        {'text': 'a'}
        >>> parse_row(b'{"text": "a", "text": "b"}')  # doctest: +IGNORE_EXCEPTION_DETAIL
        Traceback (most recent call last):
        lightning_fastft.packing.rows.rejects.RowRejectedError: duplicate key: 'text'
    """
    if isinstance(raw, RowRejectedError):
        raise RowRejectedError(raw.reason, raw.detail)
    row = parse_json(raw) if isinstance(raw, bytes) else raw
    if not isinstance(row, Mapping):
        raise RowRejectedError(NOT_AN_OBJECT, f"it is a {type(row).__name__}")
    for key in row:
        if not isinstance(key, str):
            raise RowRejectedError(WRONG_TYPE, f"column names must be strings, got {key!r} ({type(key).__name__})")
    return dict(row)


def parse_json(raw: bytes) -> Any:
    """Return the value of strict JSON text, by the rules of parse_row."""
    while raw.startswith(BOM):
        raw = raw[len(BOM) :]
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RowRejectedError(NOT_UTF8, f"byte 0x{raw[error.start]:02x} at byte {error.start} of the line") from None
    if "\0" in text:
        raise RowRejectedError(NUL, f"at character {text.index(chr(0))}")
    try:
        value = _STRICT_JSON.decode(text)
    except RowRejectedError:
        raise
    except RecursionError:
        raise RowRejectedError(MALFORMED, "nested too deeply") from None
    except ValueError as error:
        raise RowRejectedError(MALFORMED, str(error)) from None
    if _RISKY_ESCAPE.search(raw):
        for text in _walk_strings(value):
            check_characters(text, column="the row")
    return value


def _walk_strings(value: object) -> Iterator[str]:
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict):
            waiting.extend(value.keys())
            waiting.extend(value.values())
        elif isinstance(value, list):
            waiting.extend(value)


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        keys = [key for key, _ in pairs]
        raise RowRejectedError(DUPLICATE_KEY, repr(next(key for key in keys if keys.count(key) > 1)))
    return found


def _refuse_constant(name: str) -> NoReturn:
    raise RowRejectedError(NOT_FINITE, f"literal {name}")


def _finite_float(digits: str) -> float:
    value = float(digits)
    if value in (float("inf"), float("-inf")):
        raise RowRejectedError(NOT_FINITE, f"number {digits[:40]} is too large")
    return value


_STRICT_JSON = json.JSONDecoder(
    object_pairs_hook=_refuse_duplicates, parse_constant=_refuse_constant, parse_float=_finite_float
)


def take_columns(
    row: Mapping[str, Any],
    *,
    required: Sequence[str],
    optional: Sequence[str],
    mapping: Mapping[str, str],
    expected: frozenset[str] | None,
    decisive: Sequence[str] = (),
) -> dict[str, Any]:
    """Return the columns of a format under the names of this package; a null column counts as missing.

    mapping has the user's name of each column where it differs; expected None accepts any other column. decisive are
    optional columns that no row may miss if its source has them.

    Raises:
        RowRejectedError: A required column is missing, or a column is not expected.
    """
    if expected is not None and not row.keys() <= expected:
        raise RowRejectedError(EXTRA_COLUMN, repr(sorted(row.keys() - expected)[0]))
    taken = {}
    known = row.keys() if expected is None else expected
    for name in (*required, *(name for name in decisive if mapping.get(name, name) in known)):
        theirs = mapping.get(name, name)
        if row.get(theirs) is None:
            raise RowRejectedError(MISSING_COLUMN, f"{theirs!r} is null" if theirs in row else repr(theirs))
        taken[name] = row[theirs]
    for name in optional:
        value = row.get(mapping.get(name, name))
        if value is not None:
            taken[name] = value
    return taken


def check_text(value: object, *, column: str, may_be_empty: bool = False) -> str:
    """Return value if it is a non-empty string without NUL or lone surrogates.

    Raises:
        RowRejectedError: The value is not such a string.
    """
    if not isinstance(value, str):
        raise RowRejectedError(WRONG_TYPE, f"{column} must be a string, got {type(value).__name__}")
    if not may_be_empty and not value.strip():
        raise RowRejectedError(EMPTY_TEXT, column)
    check_characters(value, column=column)
    return value


def check_characters(text: str, *, column: str) -> None:
    """Raise RowRejectedError if text contains a NUL or a lone surrogate."""
    if "\0" in text:
        raise RowRejectedError(NUL, column)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RowRejectedError(SURROGATE, f"U+{ord(text[error.start]):04X} in {column}") from None
