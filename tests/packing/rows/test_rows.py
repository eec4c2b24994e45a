"""Rows are judged one by one, each for one reason."""

import json
import pickle
from datetime import datetime
from decimal import Decimal

import pytest

from lightning_fastft.packing.rows import parsing, rejects
from lightning_fastft.packing.rows.messages import check_messages, check_tools
from lightning_fastft.packing.rows.rejects import RowRejectedError


def reason_of(call, *args, **kwargs):
    with pytest.raises(RowRejectedError) as caught:
        call(*args, **kwargs)
    return caught.value.reason


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"text": "a\\u0000b"}', rejects.NUL),
        (b'{"text": {"deep": ["a\\udc00b"]}}', rejects.SURROGATE),
        (b'{"a\\ud800": 1}', rejects.SURROGATE),
        (b'{"text": "\xed\xa0\x80"}', rejects.NOT_UTF8),
        (b'{"number": 1e999}', rejects.NOT_FINITE),
        (b'{"number": ' + b"1" * 5000 + b"}", rejects.MALFORMED),
        (b'{"text": "a\tb"}', rejects.MALFORMED),
        (b'{"a": {"b": 1, "b": 2}}', rejects.DUPLICATE_KEY),
        (b"null", rejects.NOT_AN_OBJECT),
        (b'{"text": "a"}\xef\xbb\xbf', rejects.MALFORMED),
        ("{}".encode("utf-16"), rejects.NOT_UTF8),
    ],
)
def test_parse_row_refuses_what_strict_json_is_not(line, reason):
    assert reason_of(parsing.parse_row, line) == reason


@pytest.mark.parametrize(
    ("line", "value"),
    [
        (b' {"text": "a"}\r', {"text": "a"}),
        (b'\xef\xbb\xbf\xef\xbb\xbf{"text": "a"}', {"text": "a"}),
        (b'{"text": "\\ud83d\\ude00"}', {"text": "\U0001f600"}),
        (b'{"text": "a backslash: \\\\u0000 \\\\ud800"}', {"text": "a backslash: \\u0000 \\ud800"}),
        ('{"text": "\u2028\x85"}'.encode(), {"text": "\u2028\x85"}),
    ],
)
def test_parse_row_takes_what_strict_json_is(line, value):
    assert parsing.parse_row(line) == value


def test_parse_row_takes_what_a_reader_found():
    assert (
        reason_of(parsing.parse_row, rejects.RowRejectedError(rejects.FIELD_COUNT, "3 fields", b"a,b,c"))
        == rejects.FIELD_COUNT
    )
    assert reason_of(parsing.parse_row, {1: "a"}) == rejects.WRONG_TYPE


def test_rejection_survives_a_process_border():
    error = pickle.loads(pickle.dumps(RowRejectedError(rejects.WRONG_TYPE, "text")))
    assert (error.reason, error.detail, str(error)) == (rejects.WRONG_TYPE, "text", "wrong type: text")


def test_take_columns_maps_and_refuses():
    take = {"required": ("prompt", "completion"), "optional": ("input",), "mapping": {"prompt": "question"}}
    row = {"question": "q", "completion": "c", "input": None}
    assert parsing.take_columns(row, **take, expected=None) == {"prompt": "q", "completion": "c"}
    assert (
        reason_of(parsing.take_columns, {"question": None, "completion": "c"}, **take, expected=None)
        == rejects.MISSING_COLUMN
    )
    assert (
        reason_of(parsing.take_columns, {"prompt": "q", "completion": "c"}, **take, expected=None)
        == rejects.MISSING_COLUMN
    )
    assert (
        reason_of(parsing.take_columns, row, **take, expected=frozenset({"question", "completion"}))
        == rejects.EXTRA_COLUMN
    )


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ({"role": "user"}, rejects.WRONG_TYPE),
        ([], rejects.EMPTY_MESSAGES),
        (["hello"], rejects.WRONG_TYPE),
        ([{"content": "a"}], rejects.WRONG_TYPE),
        ([{"role": "human", "content": "a"}], rejects.UNKNOWN_ROLE),
        ([{"role": "user", "content": "a"}], rejects.NO_ASSISTANT),
        ([{"role": "user", "content": ""}, {"role": "assistant", "content": "b"}], rejects.EMPTY_TEXT),
        ([{"role": "user", "content": "a"}, {"role": "assistant"}], rejects.WRONG_TYPE),
        ([{"role": "user", "content": [{"type": "video"}]}, {"role": "assistant", "content": "b"}], rejects.WRONG_TYPE),
        ([{"role": "user", "content": "a"}, {"role": "assistant", "content": "\ud800"}], rejects.SURROGATE),
    ],
)
def test_check_messages_names_what_is_wrong(messages, reason):
    assert reason_of(check_messages, messages) == reason


def test_check_messages_takes_tool_calls_parts_and_nulls():
    messages = [
        {"role": "system", "content": ""},
        {"role": "user", "content": [{"type": "text", "text": "a"}], "tool_calls": None},
        {"role": "assistant", "content": None, "tool_calls": [{"name": "add"}]},
        {"role": "tool", "content": "4"},
        {"role": "assistant", "content": "4"},
    ]
    checked = check_messages(messages)
    assert [message["role"] for message in checked] == ["system", "user", "assistant", "tool", "assistant"]
    assert "tool_calls" not in checked[1]


@pytest.mark.parametrize("value", [datetime(2024, 1, 5), b"x", Decimal("1.5")])
def test_arguments_and_tools_of_a_table_that_json_lacks_are_refused(value):
    """A template would write <datetime> in their place."""
    for name in ("tool_calls", "function_call"):
        call = {"name": "f", "arguments": {"days": [value]}}
        answer = {"role": "assistant", name: [{"function": call}] if name == "tool_calls" else call}
        assert reason_of(check_messages, [{"role": "user", "content": "a"}, answer]) == rejects.WRONG_TYPE
    tool = {"type": "function", "function": {"name": "f", "parameters": {"default": value}}}
    assert reason_of(check_tools, [tool]) == rejects.WRONG_TYPE
    assert check_tools('[{"name": "f"}]') == check_tools([{"name": "f"}]) == [{"name": "f"}]


@pytest.mark.parametrize(
    ("counts", "reason"),
    [
        ((0, 0, False), rejects.ZERO_TOKENS),
        ((1, 0, False), rejects.ONE_TOKEN),
        ((9, 0, False), rejects.ALL_MASKED),
        ((9, 0, True), rejects.ALL_MASKED_TRUNCATED),
    ],
)
def test_check_token_counts_refuses_what_cannot_train(counts, reason):
    num_tokens, num_labelled, is_truncated = counts
    assert (
        reason_of(
            rejects.check_token_counts, num_tokens=num_tokens, num_labelled=num_labelled, is_truncated=is_truncated
        )
        == reason
    )
    rejects.check_token_counts(num_tokens=2, num_labelled=1)


def test_reject_shows_the_first_80_bytes_of_anything():
    error = RowRejectedError(rejects.NOT_UTF8)
    record = rejects.make_reject(error, file="a.jsonl", line=3, raw=b"\xff" + b"x" * 200)
    assert record.first_bytes == "\\xff" + "x" * 79
    assert json.loads(record.to_json())["line"] == 3
    assert (
        rejects.make_reject(error, file="list", line=1, raw={"text": "y" * 10**6}).first_bytes
        == '{"text": "' + "y" * 70
    )
    assert rejects.make_reject(error, file="list", line=1, raw=7).first_bytes == "7"
