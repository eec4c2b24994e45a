"""Validate one row: strict JSON, required columns and messages, trainable tokens.

An invalid row raises RowRejectedError with one of a short list of reasons, which are counted.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from lightning_fastft.core.errors import DataError

NOT_UTF8 = "not UTF-8"
NUL = "NUL character"
SURROGATE = "lone surrogate"
MALFORMED = "malformed JSON"
DUPLICATE_KEY = "duplicate key"
NOT_FINITE = "NaN or Infinity"
NOT_AN_OBJECT = "row is not an object"
FIELD_COUNT = "wrong number of fields"
MISSING_COLUMN = "missing column"
EXTRA_COLUMN = "unexpected column"
WRONG_TYPE = "wrong type"
UNKNOWN_ROLE = "unknown role"
EMPTY_MESSAGES = "empty messages"
NO_ASSISTANT = "no assistant turn"
EMPTY_TEXT = "empty text"
TEMPLATE_REFUSED = "chat template refused the messages"
TEMPLATE_UNCLEAR = "assistant tokens cannot be told apart"
LABELS_DIFFER = "labels are not the ids"
ZERO_TOKENS = "zero tokens"
ONE_TOKEN = "fewer than 2 tokens"  # noqa: S105 - no password
ALL_MASKED = "all labels masked"
ALL_MASKED_TRUNCATED = "all labels masked after truncation"
IMAGE_UNREADABLE = "unreadable image"
IMAGE_URL = "image behind a URL"
IMAGE_COUNT = "images and their places differ in number"
IMAGE_UNSERVED = "images without an image processor"
IMAGE_TOO_LONG = "too long, with images"
IMAGE_WITH_COMPLETIONS = "images in a row with completions"
NO_PROMPT = "no prompt"
NO_COMPLETION = "empty completion"
SAME_COMPLETIONS = "chosen and rejected are identical"
LENGTHS_DIFFER = "lists of different lengths"
NOT_A_LOG_PROB = "log-probability above 0"
PROMPT_TOO_LONG = "prompt too long"

# A turn with one of these keys at 0 or false is not trained: OpenAI's name, and those of other trainers.
TRAINED_FLAGS = ("weight", "train", "training", "loss")
# Types of message parts that are images.
IMAGE_PARTS = frozenset({"image", "image_url"})
KNOWN_ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
# Speakers of the ShareGPT format, mapped to the roles of a chat template.
SPEAKERS = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "assistant"), "assistant"),
    "system": "system",
    **dict.fromkeys(("tool", "observation", "function_response"), "tool"),
}
BOM = b"\xef\xbb\xbf"
FIRST_BYTES = 80

# JSON escapes of a NUL or of a surrogate. Only rows with such an escape need a check of the decoded strings.
_RISKY_ESCAPE = re.compile(rb"\\u(0000|[dD][89a-fA-F])")


class RowRejectedError(DataError):
    """Raised for one invalid row; other rows are not affected.

    Args:
        reason: One of the reasons of this module; rejects are counted by it.
        detail: The value that was found, for the user who repairs the row.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.detail = detail

    def __reduce__(self) -> tuple[type[RowRejectedError], tuple[str, str]]:
        # Pickled by worker processes; the default would rebuild it from the joined message.
        return type(self), (self.reason, self.detail)


class UnreadableRow(NamedTuple):
    """Placeholder for a row that a reader could not parse."""

    reason: str
    detail: str
    first_bytes: bytes


Raw = bytes | Mapping[str, Any] | UnreadableRow


class Reject(NamedTuple):
    """A rejected row as written to rejected.jsonl: its place, the reason, and its first bytes."""

    file: str
    line: int
    reason: str
    detail: str
    first_bytes: str

    def to_json(self) -> str:
        """Return one line of JSON without a line feed."""
        return json.dumps(self._asdict(), ensure_ascii=True).replace("\x7f", "\\u007f")


def is_rejects(head: bytes) -> bool:
    """Return whether the first bytes of a file are those of a file of rejected rows.

    Example:
        >>> is_rejects(Reject("a.jsonl", 1, "NaN", "", "").to_json().encode()), is_rejects(b"export PATH=")
        (True, False)
    """
    return re.match(rb'\{"file": ".*?", "line": \d+, "reason": "', head) is not None


def make_reject(error: RowRejectedError, *, file: str, line: int, raw: Raw) -> Reject:
    """Return the record of a rejected row; invalid UTF-8 is shown as escapes.

    Args:
        error: The reason of the rejection.
        file: File, data set or list of the row.
        line: Line (text files) or row number, from 1.
        raw: The row as it was read.
    """
    if isinstance(raw, bytes):
        first = raw[:FIRST_BYTES]
    elif isinstance(raw, UnreadableRow):
        first = raw.first_bytes[:FIRST_BYTES]
    elif not isinstance(raw, Mapping):
        first = repr(raw)[:FIRST_BYTES].encode("utf-8", "backslashreplace")
    else:
        # Shorten values first; rendering a huge value only to truncate it is slow.
        shown = {
            str(key): value[:FIRST_BYTES] if isinstance(value, str) else value
            for key, value in list(raw.items())[:FIRST_BYTES]
        }
        first = json.dumps(shown, ensure_ascii=False, default=repr).encode("utf-8", "backslashreplace")[:FIRST_BYTES]
    return Reject(file, line, error.reason, error.detail[:200], first.decode("utf-8", "backslashreplace"))


def parse_row(raw: Raw) -> dict[str, Any]:
    """Return the row as a dict.

    A line must be one strict JSON object: no duplicate keys, NaN, Infinity, NUL or lone surrogates. A leading byte
    order mark and a trailing carriage return are removed.

    Args:
        raw: A line as bytes without its line feed, or a parsed row.

    Returns:
        A dict with string keys.

    Raises:
        RowRejectedError: The row is not a valid object.

    Example:
        >>> parse_row(b'{"text": "a"}')
        {'text': 'a'}
        >>> parse_row(b'{"text": "a", "text": "b"}')  # doctest: +IGNORE_EXCEPTION_DETAIL
        Traceback (most recent call last):
        lightning_fastft.packing.rows.RowRejectedError: duplicate key: 'text'
    """
    if isinstance(raw, UnreadableRow):
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
) -> dict[str, Any]:
    """Return the columns of a format under the names of this package; a null column counts as missing.

    Args:
        row: The row under the user's column names.
        required: Required columns.
        optional: Optional columns.
        mapping: Column names of this package to the user's, where they differ.
        expected: All columns of this file under the user's names; None accepts any.

    Raises:
        RowRejectedError: A required column is missing, or a column is not expected.
    """
    if expected is not None and not row.keys() <= expected:
        raise RowRejectedError(EXTRA_COLUMN, repr(sorted(row.keys() - expected)[0]))
    taken = {}
    for name in required:
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

    Args:
        value: The value of the row.
        column: The column of the value, for the message.
        may_be_empty: Whether an empty or blank string is allowed.

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


def check_messages(value: object, *, column: str = "messages", needs_assistant: bool = True) -> list[dict[str, Any]]:
    """Return the messages of a conversation, without null keys and with content as one string, or as a list of parts
    if one of them is an image.

    An untrained message has ``weight`` 0; other messages have no weight.

    Args:
        value: The value of the row.
        column: The column of the value, for the message.
        needs_assistant: Whether at least one assistant message is required.

    Raises:
        RowRejectedError: The value is not a list of messages with known roles and text.
    """
    if not isinstance(value, (list, tuple)):
        raise RowRejectedError(WRONG_TYPE, f"{column} must be a list of messages, got {type(value).__name__}")
    if not value:
        raise RowRejectedError(EMPTY_MESSAGES, column)
    messages = [_check_message(message, where=f"{column}[{number}]") for number, message in enumerate(value)]
    if needs_assistant and not any(message["role"] == "assistant" for message in messages):
        raise RowRejectedError(NO_ASSISTANT, f"roles are {', '.join(message['role'] for message in messages[:8])}")
    return messages


def read_conversation(value: object, *, system: object = None) -> list[dict[str, Any]]:
    """Return a ShareGPT conversation, ``{"from": "human", "value": "..."}``, as messages.

    Args:
        value: The value of the row; turns with ``role`` and ``content`` are messages already.
        system: Value of the row's system column, which becomes the first message; None or "" for none.

    Raises:
        RowRejectedError: The value is not a list of turns with known speakers and text.

    Example:
        >>> read_conversation([{"from": "human", "value": "2 + 2?"}, {"from": "gpt", "value": "4"}])
        [{'role': 'user', 'content': '2 + 2?'}, {'role': 'assistant', 'content': '4'}]
    """
    turns = (
        [_read_turn(turn, where=f"conversations[{number}]") for number, turn in enumerate(value)]
        if isinstance(value, (list, tuple))
        else value
    )
    messages = check_messages(turns, column="conversations")
    if system is None or system == "":
        return messages
    if messages[0]["role"] == "system":
        raise RowRejectedError(WRONG_TYPE, "the row has a system column and conversations has a system turn too")
    return [{"role": "system", "content": check_text(system, column="system", may_be_empty=True)}, *messages]


def _read_turn(turn: object, *, where: str) -> object:
    """Return a ShareGPT turn as a message; return any other value unchanged, for check_messages to reject."""
    if not isinstance(turn, Mapping) or turn.get("role") is not None or "from" not in turn:
        return turn
    speaker = turn["from"]
    if not isinstance(speaker, str) or speaker not in SPEAKERS:
        raise RowRejectedError(UNKNOWN_ROLE, f"{speaker!r} in {where}; allowed: {', '.join(sorted(SPEAKERS))}")
    return {"role": SPEAKERS[speaker], "content": turn.get("value")} | {
        name: turn[name] for name in TRAINED_FLAGS if name in turn
    }


def _check_message(value: object, *, where: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise RowRejectedError(
            WRONG_TYPE, f"{where} must be an object with role and content, got {type(value).__name__}"
        )
    message = {key: entry for key, entry in value.items() if entry is not None}
    role = message.get("role")
    if not isinstance(role, str):
        raise RowRejectedError(WRONG_TYPE, f"{where}.role must be a string, got {role!r}")
    if role not in KNOWN_ROLES:
        raise RowRejectedError(UNKNOWN_ROLE, f"{role!r} in {where}; allowed: {', '.join(sorted(KNOWN_ROLES))}")
    content = message.get("content")
    calls_a_tool = role == "assistant" and bool(message.get("tool_calls"))
    may_be_empty = calls_a_tool or role not in ("user", "assistant")
    if isinstance(content, (list, tuple)) and any(
        isinstance(part, Mapping) and part.get("type") in IMAGE_PARTS for part in content
    ):
        message["content"] = _check_parts(content, where=where)
    elif isinstance(content, (list, tuple)):
        parts = [
            part.get("text") if isinstance(part, Mapping) and part.get("type", "text") == "text" else None
            for part in content
        ]
        if any(not isinstance(part, str) for part in parts):
            kinds = sorted(
                {str(part.get("type")) if isinstance(part, Mapping) else type(part).__name__ for part in content}
                - {"text"}
            )
            raise RowRejectedError(WRONG_TYPE, f"{where} has a part that is not text: {', '.join(kinds)}")
        # Every template takes strings; only templates for images take parts.
        message["content"] = check_text(
            "".join(str(part) for part in parts), column=f"{where}.content", may_be_empty=may_be_empty
        )
    elif content is not None or not calls_a_tool:
        if content is None:
            raise RowRejectedError(WRONG_TYPE, f"{where} has no content")
        check_text(content, column=f"{where}.content", may_be_empty=may_be_empty)
    _take_weight(message, where=where)
    return message


def _check_parts(content: Sequence[Any], *, where: str) -> list[dict[str, Any]]:
    """Return the parts of a content with images, without null keys."""
    parts = []
    for number, part in enumerate(content):
        kind = part.get("type", "text") if isinstance(part, Mapping) else type(part).__name__
        if kind not in ("text", *IMAGE_PARTS):
            raise RowRejectedError(WRONG_TYPE, f"{where} has a part that is neither text nor image: {kind}")
        if kind == "text":
            text = check_text(part.get("text"), column=f"{where}.content[{number}].text", may_be_empty=True)
            parts.append({"type": "text", "text": text})
        else:
            parts.append({**{name: entry for name, entry in part.items() if entry is not None}, "type": kind})
    return parts


def _take_weight(message: dict[str, Any], *, where: str) -> None:
    """Replace the trained flags of a message by ``weight`` 0 if any flag is off, and by nothing otherwise."""
    flags = [(name, message.pop(name)) for name in TRAINED_FLAGS if name in message]
    for name, flag in flags:
        if flag not in (0, 1):
            raise RowRejectedError(WRONG_TYPE, f"{where}.{name} must be 0 or 1, got {flag!r}")
    if not all(flag for _, flag in flags):
        message["weight"] = 0


def check_token_counts(*, num_tokens: int, num_labelled: int, is_truncated: bool = False) -> None:
    """Raise RowRejectedError if an example has no trained token.

    Args:
        num_tokens: Tokens of the example.
        num_labelled: Trained tokens after the first one, which is never predicted.
        is_truncated: Whether the example was truncated.
    """
    if num_tokens == 0:
        raise RowRejectedError(ZERO_TOKENS)
    if num_tokens < 2:
        raise RowRejectedError(ONE_TOKEN)
    if num_labelled == 0:
        raise RowRejectedError(ALL_MASKED_TRUNCATED if is_truncated else ALL_MASKED, f"{num_tokens} tokens")
