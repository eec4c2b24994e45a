"""Rejected rows: the reasons, the error that carries one, and the record of a row in rejected.jsonl."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

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
TEMPLATE_DROPS = "dropped by the chat template"
LABELS_DIFFER = "labels are not the ids"
PADDED = "padded tokens"
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
SAME_COMPLETIONS_TRUNCATED = "chosen and rejected are identical after truncation"
LENGTHS_DIFFER = "lists of different lengths"
NOT_A_SHARE = "label is not from 0 to 1"
NOT_A_LOG_PROB = "log-probability above 0"
PROMPT_TOO_LONG = "prompt too long"

FIRST_BYTES = 80


class RowRejectedError(DataError):
    """Raised for one invalid row, and yielded by readers in place of a row that they cannot read.

    Other rows are not affected.

    Args:
        reason: One of the reasons of this module; rejects are counted by it.
        detail: The value that was found, for the user who repairs the row.
        first_bytes: Beginning of a row that its reader could not read.
    """

    def __init__(self, reason: str, detail: str = "", first_bytes: bytes = b"") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.detail = detail
        self.first_bytes = first_bytes

    def __reduce__(self) -> tuple[type[RowRejectedError], tuple[str, str, bytes]]:
        # Pickled by worker processes; the default would rebuild it from the joined message.
        return type(self), (self.reason, self.detail, self.first_bytes)


def name_reason(reason: str, detail: str) -> str:
    """Return a reason with its detail, if it has one, in brackets."""
    return f"{reason} ({detail})" if detail else reason


Raw = bytes | Mapping[str, Any] | RowRejectedError


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


def read_rejects(path: Path) -> list[Reject]:
    """Return the rejected rows of a file; none if there is no such file."""
    if not path.is_file():
        return []
    return [Reject(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]


def is_rejects(head: bytes) -> bool:
    """Return whether the first bytes of a file are those of a file of rejected rows.

    Example:
        >>> is_rejects(Reject("a.jsonl", 1, "NaN", "", "").to_json().encode()), is_rejects(b"export PATH=")
        (True, False)
    """
    return re.match(rb'\{"file": ".*?", "line": \d+, "reason": "', head) is not None


def make_reject(error: RowRejectedError, *, file: str, line: int, raw: Raw) -> Reject:
    """Return the record of a rejected row; invalid UTF-8 is shown as escapes."""
    if isinstance(raw, bytes):
        first = raw[:FIRST_BYTES]
    elif isinstance(raw, RowRejectedError):
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


def check_token_counts(*, num_tokens: int, num_labelled: int, is_truncated: bool = False) -> None:
    """Raise RowRejectedError if an example has no trained token.

    The first token is never predicted, so num_labelled must not count it.
    """
    if num_tokens == 0:
        raise RowRejectedError(ZERO_TOKENS, "the row has no ids, or the tokenizer returns none for its text")
    if num_tokens < 2:
        raise RowRejectedError(ONE_TOKEN)
    if num_labelled == 0:
        raise RowRejectedError(ALL_MASKED_TRUNCATED if is_truncated else ALL_MASKED, f"{num_tokens} tokens")
