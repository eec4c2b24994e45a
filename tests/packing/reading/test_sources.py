"""Every kind of source yields its rows with their lines, and says by name what is wrong with it."""

import json
import os
from contextlib import nullcontext
from functools import partial

import pytest

from lightning_fastft.core.errors import DataError, OptionError
from lightning_fastft.packing.reading.sources import check_exists, open_sources
from lightning_fastft.packing.reading.text_files import check_beginning
from lightning_fastft.packing.rows import rejects
from lightning_fastft.packing.rows.formats import FormatOptions
from lightning_fastft.packing.rows.parsing import parse_row
from lightning_fastft.packing.rows.rejects import RowRejectedError
from lightning_fastft.packing.store.cache import tokenize_sources

VALUES = [
    {"prompt": "two", "completion": "four"},
    {"prompt": "t\nw,o", "completion": 'fi"ve'},
    {"prompt": "€", "completion": "six"},
]


def read(source, wanted=None):
    return [(row.line, None if row.raw is None else parse_row(row.raw)) for row in source.read(wanted)]


def write(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def write_jsonl(path, values=VALUES):
    return write(path, "".join(json.dumps(value) + "\n" for value in values))


def write_csv(path, values=VALUES):
    import csv

    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, ["prompt", "completion"])
        writer.writeheader()
        writer.writerows(values)
    return path


def write_parquet(path, values=VALUES):
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(values), path, row_group_size=2)
    return path


def test_all_kinds_give_the_same_rows(tmp_path):
    import datasets

    sources = [
        write_jsonl(tmp_path / "a.jsonl"),
        write(tmp_path / "b.json", json.dumps(VALUES, indent=2)),
        write_jsonl(tmp_path / "c.json"),
        write_csv(tmp_path / "d.csv"),
        write_parquet(tmp_path / "e.parquet"),
        datasets.Dataset.from_list(VALUES),
        VALUES,
    ]
    for source in sources:
        (opened,) = open_sources(source)
        assert [row for _, row in read(opened)] == VALUES
    assert [[row for _, row in read(opened)] for opened in open_sources(sources)] == [VALUES] * 7


def test_kinds_that_know_their_columns_read_only_those_wanted(tmp_path):
    import datasets

    for source in (write_parquet(tmp_path / "e.parquet"), datasets.Dataset.from_list(VALUES).with_format("numpy")):
        (opened,) = open_sources(source)
        assert opened.columns == ("prompt", "completion")
        assert read(opened, frozenset({"prompt", "text"})) == [
            (1, {"prompt": "two"}),
            (2, {"prompt": "t\nw,o"}),
            (3, {"prompt": "€"}),
        ]


def test_lines_are_counted_as_an_editor_counts_them(tmp_path):
    content = b'\xef\xbb\xbf{"a": 1}\r\n\n{"a": "\xe2\x80\xa8"}\n\xef\xbb\xbf \r\n\xef\xbb\xbf{"a": 3}'
    (source,) = open_sources(write(tmp_path / "a.jsonl", content))
    assert read(source) == [(1, {"a": 1}), (2, None), (3, {"a": "\u2028"}), (4, None), (5, {"a": 3})]
    assert source.count_rows() == 5
    (source,) = open_sources(write(tmp_path / "b.json", '\n[\n {"a": 1},\n\n {"a":\n 2}, {"a": 3}\n]\n'))
    # Elements of an array are counted: several may share a line.
    assert read(source) == [(1, {"a": 1}), (2, {"a": 2}), (3, {"a": 3})]
    (source,) = open_sources(write(tmp_path / "c.csv", b'\xef\xbb\xbfa,b\r\n1,"x\ny"\r\n\r\n2,z\r\n'))
    assert read(source) == [(2, {"a": "1", "b": "x\ny"}), (4, None), (5, {"a": "2", "b": "z"})]


def test_bad_elements_of_a_json_list_leave_their_neighbours(tmp_path):
    content = b'[{"a": 1}, {"a": 1, "a": 2}, {"a": NaN}, "text", {"a": "\xff"}, {"a": "\\ud800"}, {"a": 2}]'
    (source,) = open_sources(write(tmp_path / "a.json", content))
    reasons = []
    for row in source.read(None):
        try:
            parse_row(row.raw)
        except RowRejectedError as error:
            reasons.append(error.reason)
        else:
            reasons.append("")
    assert reasons == [
        "",
        rejects.DUPLICATE_KEY,
        rejects.NOT_FINITE,
        rejects.NOT_AN_OBJECT,
        rejects.NOT_UTF8,
        rejects.SURROGATE,
        "",
    ]


@pytest.mark.parametrize(
    "content", ['[{"a": 1}\n{"a": 2}]', '[{"a": 1},\n{"a": ]', '[{"a": 1},\n', '[{"a": 1}]\n{}', "[" * 100_000]
)
def test_broken_json_list_names_file_and_line(tmp_path, content):
    (source,) = open_sources(write(tmp_path / "a.json", content))
    with pytest.raises(DataError, match=r"a\.json, line [12]:"):
        read(source)


def test_bad_records_of_a_csv_leave_their_neighbours(tmp_path):
    (source,) = open_sources(write(tmp_path / "a.csv", b'a,b\n1,2\n1,2,3\n"1"x,2\n\xff,2\n3,4\n'))
    raws = [row.raw for row in source.read(None)]
    assert [raw.reason if isinstance(raw, RowRejectedError) else raw["a"] for raw in raws] == [
        "1",
        rejects.FIELD_COUNT,
        rejects.MALFORMED,
        rejects.NOT_UTF8,
        "3",
    ]
    (source,) = open_sources(write(tmp_path / "b.csv", "a\n1\n2\n" + "x" * 200_000 + '\n"3\n4\n5\n'))
    with pytest.raises(DataError, match=r"b\.csv, line 5: a quote"):
        read(source)
    with pytest.raises(DataError, match="repeats"):
        read(open_sources(write(tmp_path / "c.csv", "a,a\n1,2\n"))[0])


def test_folder_is_read_in_order_without_hidden_files(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / ".cache").mkdir()
    for name in ("b.jsonl", "a.csv", "sub/c.JSONL", ".hidden.jsonl", ".cache/d.jsonl", "_success.json", "notes.txt"):
        (write_csv if name.endswith("csv") else write_jsonl)(tmp_path / name)
    assert [os.path.relpath(source.name, tmp_path) for source in open_sources(tmp_path)] == [
        "a.csv",
        "b.jsonl",
        "sub/c.JSONL",
    ]


def test_missing_empty_and_unknown_sources_are_named(tmp_path, monkeypatch):
    # Whoever follows the README has a train.jsonl in the clone.
    monkeypatch.chdir(tmp_path)
    for given, message in (
        (tmp_path / "none.jsonl", "There is no file"),
        ("train.jsonl", "There is no file or folder train.jsonl"),
        (write(tmp_path / "a.txt", "a"), r"a\.txt has the suffix \.txt"),
        (write(tmp_path / "e.jsonl", ""), "empty"),
        (write(tmp_path / "p.parquet", "PAR1 but not really PAR1"), "Parquet"),
        ([], "No data"),
    ):
        with pytest.raises(DataError, match=message):
            open_sources(given)
    (tmp_path / "folder").mkdir()
    with pytest.raises(DataError, match="no file"):
        open_sources(tmp_path / "folder")
    with pytest.raises(OptionError, match="int"):
        open_sources([3])


def test_truncated_parquet_is_named(tmp_path):
    import pyarrow
    import pyarrow.parquet

    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(
        pyarrow.table({"text": [f"row {number} " * 20 for number in range(5000)]}), path, compression="none"
    )
    content = bytearray(path.read_bytes())
    content[2000:60000] = b"\xff" * 58000
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"a\.parquet"):
        list(open_sources(path)[0].read(None))


def test_hub_data_set_is_asked_for_by_name_config_and_split(monkeypatch):
    import datasets

    asked = []

    def load(name, config, *, split, streaming):
        assert not streaming
        asked.append((name, config, split))
        return datasets.Dataset.from_list(VALUES)

    monkeypatch.setattr(datasets, "load_dataset", load)
    for given in ("owner/name", "owner/name:main", "owner/name:main:test", "owner/name::test"):
        (source,) = open_sources(given)
        assert source.name == given
        assert [row for _, row in read(source)] == VALUES
    assert asked == [
        ("owner/name", None, "train"),
        ("owner/name", "main", "train"),
        ("owner/name", "main", "test"),
        ("owner/name", None, "test"),
    ]


def test_hub_data_set_that_cannot_be_had_names_both_readings(monkeypatch):
    import datasets

    def load(name, config, *, split, streaming):
        raise ConnectionError("offline")

    monkeypatch.setattr(datasets, "load_dataset", load)
    with pytest.raises(DataError, match=r"owner/name .*offline"):
        open_sources("owner/name")


@pytest.mark.parametrize("name", ["./nothing", "nothing/", "runs/nothing/", "a/b/c", "a/b/c:main"])
def test_paths_to_nothing_are_not_asked_of_the_hub(monkeypatch, name):
    import datasets

    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **options: pytest.fail("the hub was asked"))
    with pytest.raises(DataError, match=f"There is no file or folder {name}"):
        open_sources(name)


def test_a_name_below_a_folder_is_asked_of_the_hub_once(monkeypatch, tmp_path):
    import datasets
    import huggingface_hub

    (tmp_path / "owner").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    asked, loaded = [], []

    def ask(url):
        asked.append(url)
        if "unreachable" in url:
            raise OSError("no route")

    def load(name, *args, **options):
        loaded.append(name)
        return datasets.Dataset.from_list(VALUES)

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", ask)
    monkeypatch.setattr(datasets, "load_dataset", load)
    with pytest.raises(DataError, match=r"no file or folder owner/unreachable:x .* the hub cannot .*: no route\."):
        open_sources("owner/unreachable:x")
    open_sources("owner/name")
    assert [url.split("/datasets/")[1] for url in asked] == [
        f"owner/{name}/resolve/main/README.md" for name in ("unreachable", "name")
    ]
    # Files of this machine are not asked for, and what the cache may have needs no hub.
    write_jsonl(tmp_path / "owner" / "rows.jsonl")
    (tmp_path / "owner" / "folder").mkdir()
    write_jsonl(tmp_path / "owner" / "folder" / "rows.jsonl")
    for there in ("owner/rows.jsonl", "owner/folder"):
        open_sources(there)
        check_exists(there)
    (tmp_path / "cache" / "owner___unreachable").mkdir(parents=True)
    open_sources("owner/unreachable")
    assert loaded == ["owner/name", "owner/unreachable"]
    assert len(asked) == 2


def test_splits_and_streams_are_refused_with_the_reason():
    import datasets

    dataset = datasets.Dataset.from_list(VALUES)
    with pytest.raises(DataError, match="splits train, test"):
        open_sources([datasets.DatasetDict({"train": dataset, "test": dataset})])
    with pytest.raises(DataError, match="streaming"):
        open_sources(dataset.to_iterable_dataset())
    with pytest.raises(DataError, match="empty"):
        open_sources(dataset.select([]))


def test_transform_of_a_data_set_is_refused_and_not_dropped():
    import datasets

    dataset = datasets.Dataset.from_list(VALUES)
    with pytest.raises(DataError, match=r"transform.*map\(function\)"):
        open_sources([dataset.with_transform(lambda batch: batch)])
    assert open_sources(dataset.with_format("numpy"))


def test_every_row_of_an_array_on_one_line_is_trained(tmp_path, plain_tokenizer):
    rows_on_one_line = [{"text": f"row {number}"} for number in range(50)] + [{"text": ""}, {"text": "last"}]
    path = write(tmp_path / "a.json", json.dumps(rows_on_one_line))
    dataset = tokenize_sources(
        path,
        tokenizer=plain_tokenizer,
        options=FormatOptions(max_tokens=64),
        max_reject_share=0.1,
        rejected_path=tmp_path / "r",
    )
    assert (dataset.report.num_rows, dataset.report.num_documents, dataset.report.num_blank_lines) == (52, 51, 0)
    assert plain_tokenizer.decode(dataset[50].input_ids[:-1]) == "last"
    assert [json.loads(line)["line"] for line in (tmp_path / "r").read_text().splitlines()] == [51]


@pytest.mark.parametrize("indent", [None, 1])
def test_an_array_in_a_file_of_lines_is_refused_with_the_suffix_to_give(tmp_path, indent):
    path = write(tmp_path / "a.jsonl", json.dumps([{"text": "one"}, {"text": "two"}], indent=indent))
    with pytest.raises(DataError, match=r"Rename it: a \.json file"):
        open_sources(path)


def test_a_reason_without_detail_has_no_empty_brackets(tmp_path, plain_tokenizer):
    path = write(tmp_path / "a.jsonl", json.dumps({"prompt": "one", "chosen": "two", "rejected": "two"}))
    with pytest.raises(DataError, match=r"identical\. Repair"):
        tokenize_sources(path, tokenizer=plain_tokenizer, options=FormatOptions(max_tokens=64))


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".xz", ".zst"])
def test_compressed_text_is_read_and_damage_in_it_is_named(tmp_path, suffix):
    import bz2
    import gzip
    import lzma

    import pyarrow

    zstd = partial(pyarrow.Codec("zstd").compress, asbytes=True)
    compress = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": zstd}[suffix]
    packed = [
        write(tmp_path / f"{plain.name}{suffix}", compress(plain.read_bytes()))
        for plain in (
            write_jsonl(tmp_path / "a.jsonl"),
            write(tmp_path / "b.json", json.dumps(VALUES)),
            write_csv(tmp_path / "c.csv"),
        )
    ]
    for path in packed:
        (source,) = open_sources(path)
        assert [row for _, row in read(source)] == VALUES
        assert source.count_rows() > 0
    packed[0].write_bytes(packed[0].read_bytes()[:-9])
    with pytest.raises(DataError, match="damaged"):
        [read(source) for source in open_sources(packed[0])]


@pytest.mark.parametrize("name", ["b.txt.zst", "b.arrow", "sub/b.xls", "b.zip", "b.txt.gz"])
def test_folder_with_data_in_a_form_that_is_not_read_is_refused(tmp_path, name):
    write_jsonl(tmp_path / "a.jsonl")
    write(tmp_path / "README.md", "about")
    assert len(open_sources(tmp_path)) == 1
    (tmp_path / "sub").mkdir()
    write(tmp_path / name, "x")
    with pytest.raises(DataError, match=name):
        open_sources(tmp_path)


def test_pattern_gives_sorted_files_and_the_files_of_folders(tmp_path, monkeypatch):
    import datasets

    monkeypatch.chdir(tmp_path)
    for name in ("data/sub", "data/.hidden"):
        (tmp_path / name).mkdir(parents=True)
        write_jsonl(tmp_path / name / "c.jsonl")
    for name in ("b.jsonl", "a.jsonl", "a[1].jsonl", "rejected.jsonl", "d.ndjson"):
        write_jsonl(tmp_path / "data" / name)
    write(tmp_path / "data" / "README.md", "about")
    datasets.Dataset.from_list(VALUES).save_to_disk("data/saved")

    def names(pattern):
        return [os.path.relpath(source.name, "data") for source in open_sources(pattern)]

    assert names("data/*.jsonl") == ["a.jsonl", "a[1].jsonl", "b.jsonl"]
    every = ["a.jsonl", "a[1].jsonl", "b.jsonl", "d.ndjson", "saved", "sub/c.jsonl"]
    assert names("data/*") == names("./data/**") == every
    assert names("data/a[1].jsonl") == ["a[1].jsonl"]
    assert names(["data/[ab].jsonl", "data/d*"]) == ["a.jsonl", "b.jsonl", "d.ndjson"]


def test_folder_with_two_names_is_read_once(tmp_path):
    (tmp_path / "b").mkdir()
    write_jsonl(tmp_path / "b" / "x.jsonl")
    (tmp_path / "a").symlink_to("b")
    assert [os.path.relpath(source.name, tmp_path) for source in open_sources(tmp_path)] == ["a/x.jsonl"]


@pytest.mark.parametrize("pattern", ["data/*.jsonl.gz", "data/*.md", "nowhere/*.jsonl"])
def test_pattern_without_a_match_shows_the_folder(tmp_path, monkeypatch, pattern):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data" / "sub").mkdir(parents=True)
    write(tmp_path / "data" / "README.md", "about")
    with pytest.raises(DataError, match="no folder" if "nowhere" in pattern else r"README\.md, sub/"):
        open_sources(pattern)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be"])
@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv"])
def test_utf16_is_called_by_its_name(tmp_path, name, encoding):
    with pytest.raises(DataError, match="UTF-16"):
        open_sources(write(tmp_path / name, '{"text": "a"}'.encode(encoding)))


def test_saved_data_set_is_read_and_one_of_several_splits_is_asked_for(tmp_path):
    import datasets

    dataset = datasets.Dataset.from_list(VALUES)
    dataset.save_to_disk(tmp_path / "one")
    assert [row for _, row in read(open_sources(str(tmp_path / "one"))[0])] == VALUES
    datasets.DatasetDict({"train": dataset, "test": dataset}).save_to_disk(tmp_path / "two")
    with pytest.raises(DataError, match="test, train"):
        open_sources(tmp_path / "two")
    assert [row for _, row in read(open_sources(tmp_path / "two" / "train")[0])] == VALUES
    next((tmp_path / "one").glob("*.arrow")).write_bytes(b"no arrow")
    with pytest.raises(DataError, match="save_to_disk"):
        open_sources(tmp_path / "one")


@pytest.mark.parametrize("name", ["pandas", "json", "csv:config", "webdataset", "imagefolder"])
def test_readers_of_the_datasets_library_are_no_data_sets(tmp_path, monkeypatch, name):
    import datasets

    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: pytest.fail("load_dataset was asked"))
    with pytest.raises(DataError, match="owner/name"):
        open_sources(name)


def test_fingerprint_is_that_of_the_content_alone(tmp_path, monkeypatch):
    path = write(tmp_path / "a.jsonl", b'{"text": "0123456789"}\n' * 1000)
    first = open_sources(path)[0].fingerprint
    status = path.stat()
    copy = write(tmp_path / "copy.jsonl", path.read_bytes())
    os.utime(copy, ns=(1, 1))
    assert open_sources(copy)[0].fingerprint == first
    # In the middle, with size and time kept.
    path.write_bytes(path.read_bytes().replace(b"0123456789", b"0123456788", 501))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert open_sources(path)[0].fingerprint != first


def test_fingerprint_follows_content(tmp_path):
    import datasets

    path = write_jsonl(tmp_path / "a.jsonl")
    first = open_sources(path)[0].fingerprint
    assert open_sources(path)[0].fingerprint == first
    path.write_text(path.read_text().replace("four", "five"))
    assert open_sources(path)[0].fingerprint != first
    changed = [{**VALUES[0], "completion": "x"}, *VALUES[1:]]
    assert open_sources(VALUES)[0].fingerprint != open_sources(changed)[0].fingerprint
    one, two = (open_sources(datasets.Dataset.from_list(values))[0].fingerprint for values in (VALUES, changed))
    assert one != two


def test_row_of_a_list_that_is_no_dict_is_rejected(plain_tokenizer):
    values = [7, *({"text": f"row {number}"} for number in range(150))]
    dataset = tokenize_sources(values, tokenizer=plain_tokenizer, options=FormatOptions(max_tokens=64))
    assert dataset.report.rejects == {rejects.NOT_AN_OBJECT: 1}
    assert len(dataset) == 150


def test_folder_may_hold_several_formats(tmp_path, plain_tokenizer):
    write_jsonl(tmp_path / "a.jsonl")
    write_jsonl(tmp_path / "b.jsonl", [{"text": "two"}, {"text": "plus"}])
    write_parquet(tmp_path / "c.parquet", [{"instruction": "add", "input": None, "output": "four", "source": "x"}])
    dataset = tokenize_sources(tmp_path, tokenizer=plain_tokenizer, options=FormatOptions(max_tokens=64))
    assert dataset.report.rows_per_format == {"prompt_completion": 3, "text": 2, "instruction": 1}
    assert len(dataset) == 6


@pytest.mark.parametrize("kind", ["lines", "table", "list"])
def test_columns_with_values_that_the_format_does_not_read_are_reported(tmp_path, plain_tokenizer, kind):
    values = [
        {"instruction": "add", "output": "four", "history": [["two", "plus"]], "system": None, "id": 0},
        {"instruction": "add", "output": "five", "history": [], "system": None, "id": 1},
    ]
    makers = {"lines": (write_jsonl, "a.jsonl"), "table": (write_parquet, "a.parquet")}
    source = values if kind == "list" else makers[kind][0](tmp_path / makers[kind][1], values)
    tokenize = partial(tokenize_sources, source, tokenizer=plain_tokenizer, options=FormatOptions(max_tokens=64))
    for _ in range(2):
        # From the cache the second time.
        report = tokenize(cache_dir=tmp_path / "cache").report
        assert report.unread_columns == ["history", "id"]
        assert "columns not read: history, id" in report.render()


def test_unknown_columns_are_named_with_the_way_out(tmp_path, plain_tokenizer):
    path = write_jsonl(tmp_path / "a.jsonl", [{"question": "two", "answer": "four"}] * 5)
    with pytest.raises(
        DataError, match=r"a\.jsonl has the columns answer, question, which make no known format .*columns="
    ):
        tokenize_sources(path, tokenizer=plain_tokenizer, options=FormatOptions(max_tokens=64))
    mapped = FormatOptions(max_tokens=64, columns={"prompt": "question", "completion": "answer"})
    assert len(tokenize_sources(path, tokenizer=plain_tokenizer, options=mapped)) == 5


@pytest.mark.parametrize(("first", "is_array"), [('[{"text": "a"},', True), ("[", True), ('["a"]', False)])
def test_an_array_of_rows_is_told_from_a_bad_row(tmp_path, first, is_array):
    path = tmp_path / "rows.jsonl"
    path.write_text(first + '\n{"text": "b"}\n')
    with pytest.raises(DataError, match="holds an array") if is_array else nullcontext():
        check_beginning(path, path.read_bytes(), is_json=True)
