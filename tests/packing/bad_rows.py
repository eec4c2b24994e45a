"""Thirty kinds of bad rows, each with the answer that a data module must give: accept, quarantine for a reason, or
stop.

The kinds and answers are the table of bad inputs in the project's reliability notes (part C); a file of good rows gets
one of them at its first, middle or last line.
"""

import json
from typing import NamedTuple

from lightning_fastft.packing.rows import rejects

VOCAB_SIZE = 400
MAX_TOKENS = 128


class BadRow(NamedTuple):
    """One kind: the line as it stands in the file, what must happen, and the good row it holds if it is accepted."""

    kind: str
    family: str
    line: bytes
    answer: str
    reason: str = ""
    accepted: dict | None = None
    line_end: bytes = b"\n"
    too_long: str = "refuse"


def good_row(family, number):
    if family == "ids":
        return {"input_ids": [10 + number % 50, 11, 12 + number % 7], "labels": [-100, 11, 12 + number % 7]}
    return {
        "messages": [
            {"role": "user", "content": f"what is two plus {number}"},
            {"role": "assistant", "content": f"the answer is {number}"},
        ]
    }


def _chat(*turns):
    return json.dumps({"messages": [{"role": role, "content": content} for role, content in turns]}).encode()


def _ids(ids, labels):
    return json.dumps({"input_ids": ids, "labels": labels}).encode()


GOOD = _chat(("user", "two plus two"), ("assistant", "four"))
GOOD_ROW = json.loads(GOOD)
LONG = [10] * (MAX_TOKENS + 1)

BAD_ROWS = (
    BadRow("truncated line", "chat", GOOD[:-9], "quarantine", rejects.MALFORMED),
    BadRow("garbage line", "chat", b"%%% not json at all", "quarantine", rejects.MALFORMED),
    BadRow("two objects on a line", "chat", GOOD + GOOD, "quarantine", rejects.MALFORMED),
    BadRow(
        "nested too deeply",
        "chat",
        b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        "quarantine",
        rejects.MALFORMED,
    ),
    BadRow("not an object", "chat", b'["messages"]', "quarantine", rejects.NOT_AN_OBJECT),
    BadRow("NUL byte", "chat", GOOD.replace(b"four", b"fo\0ur"), "quarantine", rejects.NUL),
    BadRow("lone surrogate", "chat", GOOD.replace(b"four", b"fo\\ud83dur"), "quarantine", rejects.SURROGATE),
    BadRow("non-UTF-8 byte", "chat", GOOD.replace(b"four", b"fo\xffur"), "quarantine", rejects.NOT_UTF8),
    BadRow("duplicate key", "chat", b'{"messages": [], ' + GOOD[1:], "quarantine", rejects.DUPLICATE_KEY),
    BadRow("NaN literal", "chat", GOOD.replace(b'"four"', b"NaN"), "quarantine", rejects.NOT_FINITE),
    BadRow("Infinity literal", "chat", GOOD.replace(b'"four"', b"-Infinity"), "quarantine", rejects.NOT_FINITE),
    BadRow("blank line", "chat", b" \t", "accept"),
    BadRow("byte order mark", "chat", b"\xef\xbb\xbf" + GOOD, "accept", accepted=GOOD_ROW),
    BadRow("CRLF", "chat", GOOD, "accept", accepted=GOOD_ROW, line_end=b"\r\n"),
    BadRow("missing column", "chat", b"{}", "quarantine", rejects.MISSING_COLUMN),
    BadRow("extra column", "chat", b'{"score": 1, ' + GOOD[1:], "quarantine", rejects.EXTRA_COLUMN),
    BadRow(
        "messages of a wrong type", "chat", b'{"messages": "two plus two is four"}', "quarantine", rejects.WRONG_TYPE
    ),
    BadRow(
        "content of a wrong type", "chat", _chat(("user", "two"), ("assistant", 4)), "quarantine", rejects.WRONG_TYPE
    ),
    BadRow("unknown role", "chat", _chat(("user", "two"), ("robot", "four")), "quarantine", rejects.UNKNOWN_ROLE),
    BadRow("empty messages", "chat", b'{"messages": []}', "quarantine", rejects.EMPTY_MESSAGES),
    BadRow("no assistant turn", "chat", _chat(("user", "two plus two")), "quarantine", rejects.NO_ASSISTANT),
    BadRow(
        "empty text", "chat", _chat(("user", "two plus two"), ("assistant", " \n")), "quarantine", rejects.EMPTY_TEXT
    ),
    BadRow("zero tokens", "ids", _ids([], []), "quarantine", rejects.ZERO_TOKENS),
    BadRow("fewer than 2 tokens", "ids", _ids([5], [5]), "quarantine", rejects.ONE_TOKEN),
    BadRow("all labels masked", "ids", _ids([5, 6, 7], [5, -100, -100]), "quarantine", rejects.ALL_MASKED),
    BadRow(
        "all labels masked after truncation",
        "ids",
        _ids(LONG, [-100] * MAX_TOKENS + [10]),
        "quarantine",
        rejects.ALL_MASKED_TRUNCATED,
        too_long="truncate",
    ),
    BadRow("longer than the pack", "ids", _ids(LONG, LONG), "stop", "max_tokens=128"),
    BadRow("token id below 0", "ids", _ids([5, -1, 7], [-100, -100, 7]), "stop", "token id -1"),
    BadRow(
        "token id beyond the embedding",
        "ids",
        _ids([5, VOCAB_SIZE, 7], [-100, -100, 7]),
        "stop",
        f"token id {VOCAB_SIZE}",
    ),
    BadRow("label outside", "ids", _ids([5, 6, 7], [-100, -7, 7]), "stop", "label -7"),
)
POSITIONS = ("first", "middle", "last")
NUM_GOOD = 150


def write_corpus(path, bad, position):
    """Write good rows with one bad line among them; return the good rows in order and the number of the bad line."""
    good = [good_row(bad.family, number) for number in range(NUM_GOOD)]
    place = {"first": 0, "middle": NUM_GOOD // 2, "last": NUM_GOOD}[position]
    lines = [json.dumps(row).encode() + b"\n" for row in good]
    lines.insert(place, bad.line + (b"" if position == "last" and bad.line_end == b"\n" else bad.line_end))
    path.write_bytes(b"".join(lines))
    if bad.accepted is not None:
        good.insert(place, bad.accepted)
    return good, place + 1
