"""Streams of text files: the rows that the same files give when they are read whole."""

import itertools
import json

import datasets
import pytest

from lightning_fastft.core.errors import DataError
from lightning_fastft.packing.reading.file_streams import decode_row, stream_lines
from lightning_fastft.packing.reading.sources import open_sources
from lightning_fastft.packing.reading.streams import open_stream
from lightning_fastft.packing.rows.parsing import parse_row
from lightning_fastft.packing.rows.rejects import RowRejectedError
from tests.support.datamodule_worker import make_data, make_rows, rows_in


def called(arguments, **more):
    # All messages of a column have the same keys: datasets infers types of the arguments.
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    return {
        "prompt": [{"role": "user", "content": "q"}],
        "completion": [{"role": "assistant", "content": "", "tool_calls": [call], **more}],
    }


def as_lines(rows):
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


FILES = {
    "integers and floats.jsonl": as_lines([called({"x": 1}), called({"x": 1.5})]),
    "dates.jsonl": as_lines([called({"day": "2024-01-05"}), called({"day": "2024-01-06T10:00:00"})]),
    "nulls.jsonl": as_lines([called({"x": None}), called({"x": 1})]),
    "orders of keys.ndjson": as_lines([called({"x": 1, "y": 2}), called({"y": 1, "x": 2})]),
    "keys of later rows.json": as_lines([*[called({})] * 200, called({"x": 1}, reasoning_content="hm")]),
    "array.json": json.dumps([called({"day": "2024-01-05"}), {"text": "é"}], indent=1).encode(),
    "blank and bad lines.jsonl": b'\xef\xbb\xbf{"text": "\xe2\x80\xa8"}\r\n\n{"text": "\xff"}\n{"text": NaN}\n{"a": 1, "a": 2}\n{"t',
    "table.csv": b"prompt,completion\na,NA\nb,007\nc,null\nd\n\xff,x\n\ne,\n",
    "table.tsv": b"prompt\tcompletion\na\t1.50\nb\tNone\n",
}  # fmt: skip


def rows_of(found):
    """Rows as dicts, None for blank lines, and the reason and bytes of a row that cannot be read."""
    for row in found:
        try:
            yield None if row.raw is None else json.dumps(parse_row(row.raw))
        except RowRejectedError as error:
            shown = row.raw if isinstance(row.raw, bytes) else row.raw.first_bytes
            yield error.reason, error.detail, shown


@pytest.mark.parametrize("name", FILES)
def test_stream_has_the_rows_of_the_file(tmp_path, name):
    (tmp_path / name).write_bytes(FILES[name])
    stream = open_stream(str(tmp_path / name), seed=0)
    found = list(rows_of(stream.read(epoch=0, state="", num_behind=0)))
    (source,) = open_sources(str(tmp_path / name))
    assert found == list(rows_of(source.read(None)))
    assert len(found) > 1


def test_lines_of_an_url_are_those_of_the_file(tmp_path):
    for name in ("dates.jsonl", "blank and bad lines.jsonl"):
        (tmp_path / name).write_bytes(FILES[name])
        found = [decode_row(row) for row in stream_lines([str(tmp_path / name)])]
        (source,) = open_sources(str(tmp_path / name))
        # A carriage return in front of a line feed is dropped.
        expected = [row.raw for row in source.read(None)]
        assert [raw and raw.removeprefix(b"\xef\xbb\xbf") for raw in found] == expected


def test_sources_with_other_columns_are_mixed(tmp_path):
    """Texts, chats with tools, and a table with a column of its own."""
    (tmp_path / "plain.jsonl").write_bytes(as_lines([{"prompt": "q", "completion": "a"}] * 20))
    (tmp_path / "tools.jsonl").write_bytes(as_lines([called({"x": number}) | {"tools": []} for number in range(20)]))
    table = datasets.Dataset.from_list([{"prompt": "q", "completion": "b", "id": n} for n in range(20)])
    table.to_parquet(tmp_path / "table.parquet")
    paths = [str(tmp_path / name) for name in ("plain.jsonl", "tools.jsonl", "table.parquet")]
    expected = {row for source in open_sources(paths) for row in rows_of(source.read(None))}
    for source in (paths, dict.fromkeys(paths, 1.0)):
        stream = open_stream(source, seed=0)
        assert set(rows_of(stream.read(epoch=0, state="", num_behind=0))) == expected


@pytest.mark.parametrize("is_split", [False, True])
def test_columns_of_later_rows_are_unexpected_in_one_file(tmp_path, is_split):
    rows = make_rows(200)
    for row in rows[150:]:
        row["id"] = 1
    parts = [rows[:150], rows[150:]] if is_split else [rows]
    for number, part in enumerate(parts):
        (tmp_path / f"{number}.jsonl").write_bytes(as_lines(part))
    data = make_data(rows=str(tmp_path), streaming=True)
    data.setup("fit")
    if is_split:
        # The first rows do not show the columns of other files.
        seen = {row for batch in itertools.islice(data.train_dataloader(), 60) for row in rows_in(batch)}
        assert seen == set(range(200))
    else:
        with pytest.raises(DataError, match="unexpected column"):
            next(iter(data.train_dataloader()))


def test_tables_of_parquet_and_text_are_streamed_apart(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(as_lines([{"text": "a"}]))
    datasets.Dataset.from_list([{"text": "b"}]).to_parquet(tmp_path / "b.parquet")
    with pytest.raises(DataError, match=r"\.jsonl, \.parquet\. A stream reads Parquet files, or text files"):
        open_stream(str(tmp_path), seed=0)
