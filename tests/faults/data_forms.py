"""Forms in which people keep their data, each with what must happen: trained exactly, or refused for a reason that has
a name.

A form writes itself into an empty folder and returns what is given as ``paths``. Its answer is a list of texts, which
are the only ones trained, in order, or words of the error that stops the run.
"""

import bz2
import csv
import gzip
import io
import json
import lzma
import os
from typing import NamedTuple

import numpy as np

ROWS = [
    {"prompt": "two plus", "completion": "four"},
    {"prompt": 'what\nis, "it"', "completion": "fi've €"},
    {"prompt": "a", "completion": "b\tc"},
]
TEXTS = [row["completion"] + "<|endoftext|>" for row in ROWS]
CHAT = [{"messages": [{"role": "user", "content": "two"}, {"role": "assistant", "content": "four"}]}]
CHAT_TEXTS = ["four<|im_end|>"]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
BOM = b"\xef\xbb\xbf"


class Form(NamedTuple):
    """One form: what writes it, the texts that are trained or words of the refusal, and options that it needs."""

    name: str
    write: object
    answer: object
    options: dict = {}


def file(name, content):
    def write(folder):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


def folder(*writes):
    def write(root):
        for each in writes:
            each(root / "data")
        return root / "data"

    return write


def table(rows=ROWS, *, delimiter=",", terminator="\n", quoting=csv.QUOTE_MINIMAL):
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), delimiter=delimiter, lineterminator=terminator, quoting=quoting)
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def lines(*rows, **options):
    return "".join(json.dumps(row, **options) + "\n" for row in rows)


def chat(*turns, **columns):
    return lines(
        {
            "messages": [
                {"role": role, "content": content, **more}
                for role, content, more in (turn + ({},) * (3 - len(turn)) for turn in turns)
            ]
        }
        | columns
    )


def parquet(rows=ROWS, *, by="arrow", name="a.parquet"):
    def write(root):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if by == "datasets":
            import datasets

            datasets.Dataset.from_list(rows).to_parquet(path)
        elif by == "json":
            import datasets

            datasets.Dataset.from_list(rows, on_mixed_types="use_json").to_parquet(path)
        elif by == "pandas":
            import pandas

            frame = pandas.DataFrame(rows)
            # What is left of a filtered frame has an index of its own.
            frame.index = range(7, 7 + len(frame))
            frame.to_parquet(path)
        else:
            import pyarrow
            import pyarrow.parquet

            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        return path

    return write


def saved(*, splits=False, name="saved"):
    def write(root):
        import datasets

        dataset = datasets.Dataset.from_list(ROWS)
        (datasets.DatasetDict({"train": dataset}) if splits else dataset).save_to_disk(root / name)
        return root / name

    return write


def in_memory(make):
    return lambda _: make()


def dataset(rows=ROWS):
    import datasets

    return datasets.Dataset.from_list(rows)


def linked_file(root):
    target = file("elsewhere/real.jsonl", LINES)(root)
    (root / "a.jsonl").symlink_to(target)
    return root / "a.jsonl"


def linked_folder(root):
    file("elsewhere/b.jsonl", LINES)(root)
    (root / "data").mkdir()
    (root / "data" / "link").symlink_to(root / "elsewhere")
    # A link to the folder above it must not be followed for ever.
    (root / "data" / "loop").symlink_to(root / "data")
    return root / "data"


def broken_link(root):
    path = folder(file("a.jsonl", LINES))(root)
    (path / "b.jsonl").symlink_to(root / "nothing")
    return path


def categories(root):
    import pandas

    pandas.DataFrame(ROWS).astype("category").to_parquet(root / "a.parquet")
    return root / "a.parquet"


def frame():
    import pandas

    return pandas.DataFrame(ROWS)


def truncated(content):
    return content[: len(content) * 2 // 3]


def call(arguments, **more):
    function = {"name": "f", "arguments": arguments}
    return {
        "messages": [
            {"role": "user", "content": "two"},
            {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]},
        ],
        **more,
    }


CALLS = [call({"a": 1, "b": 2}), call({"word": "x"})]
CALL_TEXTS = ['{"a": 1, "b": 2}<|im_end|>', '{"word": "x"}<|im_end|>']
PARTS = [{"type": "text", "text": "fo"}, {"type": "text", "text": "ur"}]
NESTED = {"version": 1, "data": ROWS}

FORMS = (
    # JSON lines.
    Form("lines", file("a.jsonl", LINES), TEXTS),
    Form("lines named ndjson", file("a.ndjson", LINES), TEXTS),
    Form("lines named json", file("a.json", LINES), TEXTS),
    Form("lines, upper case name", file("A.JSONL", LINES), TEXTS),
    Form("lines without the last line end", file("a.jsonl", LINES[:-1]), TEXTS),
    Form("lines with CRLF", file("a.jsonl", LINES.replace(b"\n", b"\r\n")), TEXTS),
    Form("lines with a byte order mark", file("a.jsonl", BOM + LINES), TEXTS),
    Form("lines with blank ones", file("a.jsonl", b"\n" + LINES.replace(b"\n", b"\n \n\r\n")), TEXTS),
    Form("lines not ASCII", file("a.jsonl", lines(*ROWS, ensure_ascii=False)), TEXTS),
    Form(
        "lines with separators of Unicode in strings",
        file("a.jsonl", lines({"text": "a\u2028b\x85c"}, ensure_ascii=False)),
        ["a\u2028b\x85c<|endoftext|>"],
    ),
    Form("lines with carriage returns alone", file("a.jsonl", LINES.replace(b"\n", b"\r")), "malformed JSON"),
    Form("lines of UTF-16", file("a.jsonl", LINES.decode().encode("utf-16")), "UTF-16"),
    Form("lines of UTF-16 without a mark", file("a.jsonl", LINES.decode().encode("utf-16-le")), "UTF-16"),
    Form("lines of UTF-32", file("a.jsonl", LINES.decode().encode("utf-32")), "UTF-16|UTF-32"),
    Form("lines of Latin-1", file("a.jsonl", '{"text": "é"}\n'.encode("latin-1")), "not UTF-8"),
    Form(
        "one huge line",
        file("a.jsonl", lines({"text": "two " * 300_000})),
        ["two " * 300_000 + "<|endoftext|>"],
        {"max_tokens": 2**21},
    ),
    Form("a duplicate key", file("a.jsonl", '{"text": "a", "text": "b"}\n'), "duplicate key"),
    Form("a NaN", file("a.jsonl", '{"text": "a", "score": NaN}\n'), "NaN or Infinity"),
    Form("a last line that is cut", file("a.jsonl", LINES[:-9]), "malformed JSON"),
    Form(
        "objects over several lines",
        file("a.jsonl", "".join(json.dumps(row, indent=2) + "\n" for row in ROWS)),
        "several lines",
    ),
    Form("an empty file", file("a.jsonl", b""), "empty"),
    Form("a file of blank lines", file("a.jsonl", b"\n \n\t\n"), "empty"),
    Form("empty objects", file("a.jsonl", "{}\n{}\n"), "known format"),
    Form("lists for rows", file("a.jsonl", '["a", "b"]\n'), "not an object"),
    Form("a number for a text", file("a.jsonl", lines({"text": 3})), "wrong type"),
    Form("a null for a text", file("a.jsonl", lines({"text": None}, {"text": None})), "missing column"),
    Form("a NUL", file("a.jsonl", lines({"text": "a\0b"})), "NUL"),
    Form("half a character", file("a.jsonl", '{"text": "a\\ud800"}\n'), "surrogate"),
    # JSON arrays.
    Form("an array on one line", file("a.json", json.dumps(ROWS)), TEXTS),
    Form("an array, a row a line", file("a.json", "[\n" + ",\n".join(map(json.dumps, ROWS)) + "\n]\n"), TEXTS),
    Form(
        "an array, two rows a line",
        file("a.json", "[" + json.dumps(ROWS[0]) + ", " + json.dumps(ROWS[1]) + ",\n" + json.dumps(ROWS[2]) + "]"),
        TEXTS,
    ),
    Form("an array, indented", file("a.json", json.dumps(ROWS, indent=4)), TEXTS),
    Form("an array with a byte order mark", file("a.json", BOM + json.dumps(ROWS).encode()), TEXTS),
    Form(
        "an array with a bad row on one line",
        file("a.json", json.dumps([*ROWS, {"prompt": "x"}])),
        "a.json, row 4: missing column",
    ),
    Form("an array that is cut", file("a.json", json.dumps(ROWS)[:-20]), "Repair the file"),
    Form("an array with a comma too many", file("a.json", json.dumps(ROWS)[:-1] + ",]"), "Repair the file"),
    Form("an empty array", file("a.json", "[]"), "empty"),
    Form("an array of strings", file("a.json", '["a", "b"]'), "not an object"),
    Form("an array under a key, on one line", file("a.json", json.dumps(NESTED)), "known format"),
    Form("an array under a key, indented", file("a.json", json.dumps(NESTED, indent=1)), "several lines"),
    Form(
        "columns that hold lists",
        file("a.json", json.dumps({key: [row[key] for row in ROWS] for key in ROWS[0]})),
        "wrong type|prompt and completion",
    ),
    # Compressed.
    Form("lines in gzip", file("a.jsonl.gz", gzip.compress(LINES)), TEXTS),
    Form("lines in bzip2", file("a.jsonl.bz2", bz2.compress(LINES)), TEXTS),
    Form("lines in xz", file("a.jsonl.xz", lzma.compress(LINES)), TEXTS),
    Form("an array in gzip", file("a.json.gz", gzip.compress(json.dumps(ROWS).encode())), TEXTS),
    Form("a table in gzip", file("a.csv.gz", gzip.compress(table().encode())), TEXTS),
    Form("gzip of two members", file("a.jsonl.gz", gzip.compress(LINES) + gzip.compress(LINES)), TEXTS * 2),
    Form("gzip that is cut", file("a.jsonl.gz", truncated(gzip.compress(LINES * 500))), "decompressed"),
    Form("gzip with a wrong name", file("a.jsonl", gzip.compress(LINES)), "gzip"),
    Form("text with the name of gzip", file("a.jsonl.gz", LINES), "decompressed"),
    Form("lines in zstd", file("a.jsonl.zst", b"\x28\xb5\x2f\xfd rest"), "zst"),
    Form("a zip named jsonl", file("a.jsonl", b"PK\x03\x04 rest"), "zip"),
    # Tables of text.
    Form("CSV with quotes and line ends in fields", file("a.csv", table()), TEXTS),
    Form("CSV with everything quoted", file("a.csv", table(quoting=csv.QUOTE_ALL)), TEXTS),
    Form("CSV with CRLF", file("a.csv", table(terminator="\r\n")), TEXTS),
    Form("CSV with a byte order mark", file("a.csv", BOM + table().encode()), TEXTS),
    Form("CSV with semicolons", file("a.csv", table(delimiter=";")), TEXTS),
    Form("CSV with semicolons, quoted", file("a.csv", table(delimiter=";", quoting=csv.QUOTE_ALL)), TEXTS),
    Form("CSV with tabs", file("a.csv", table(delimiter="\t")), TEXTS),
    Form("TSV", file("a.tsv", table(delimiter="\t")), TEXTS),
    Form("TSV in gzip", file("a.tsv.gz", gzip.compress(table(delimiter="\t").encode())), TEXTS),
    Form("TSV with commas", file("a.tsv", table(delimiter=",")), "known format|fields"),
    Form("CSV of a header alone", file("a.csv", "prompt,completion\n"), "empty"),
    Form("CSV with a field too many", file("a.csv", "text\na\nb,c\n"), "number of fields"),
    Form("CSV with an open quote", file("a.csv", 'text\n"a\nb\n'), "never closed"),
    Form("CSV with a column twice", file("a.csv", "text,text\na,b\n"), "repeats"),
    Form("CSV of UTF-16", file("a.csv", table().encode("utf-16")), "UTF-16"),
    # Tables in columns.
    Form("Parquet by pyarrow", parquet(), TEXTS),
    Form("Parquet by datasets", parquet(by="datasets"), TEXTS),
    Form("Parquet by pandas", parquet(by="pandas"), TEXTS),
    Form("Parquet of conversations", parquet(CHAT), CHAT_TEXTS),
    Form("Parquet with tool calls of different arguments", parquet(CALLS, by="datasets"), CALL_TEXTS),
    Form("Parquet by pandas with tool calls", parquet(CALLS, by="pandas"), CALL_TEXTS),
    Form(
        "Parquet with arguments as JSON",
        parquet([call({"a": 1}), call({"a": "x"}), call({"a": [None]})], by="json"),
        ['{"a": 1}<|im_end|>', '{"a": "x"}<|im_end|>', '{"a": [null]}<|im_end|>'],
    ),
    Form(
        "Parquet that is cut", lambda root: file("b.parquet", truncated(parquet()(root).read_bytes()))(root), "Parquet"
    ),
    Form("Parquet of no rows", parquet([{"text": "a"}][:0] or [{"text": None}]), "missing column"),
    Form("Parquet named jsonl", parquet(name="a.jsonl"), "Parquet"),
    Form("a saved data set", saved(), TEXTS),
    Form("a saved data set with splits", saved(splits=True), "train"),
    # In memory.
    Form("a data set in memory", in_memory(dataset), TEXTS),
    Form("a data set with tool calls", in_memory(lambda: dataset(CALLS)), CALL_TEXTS),
    Form("a data set of no rows", in_memory(lambda: dataset().select([])), "empty"),
    Form("rows in memory", in_memory(lambda: ROWS), TEXTS),
    Form(
        "rows with tool calls and a null of the user", in_memory(lambda: [call({"a": None})]), ['{"a": null}<|im_end|>']
    ),
    Form(
        "ids as arrays",
        in_memory(lambda: [{"input_ids": np.array([5, 6, 7]), "labels": np.array([-100, 6, 7])}]),
        "ids",
    ),
    # Folders.
    Form(
        "a folder",
        folder(
            file("b.jsonl", lines(ROWS[1])), file("a.jsonl", lines(ROWS[0])), file("c/c.json", json.dumps(ROWS[2:]))
        ),
        TEXTS,
    ),
    Form(
        "a folder of several kinds",
        folder(
            file("a.jsonl", lines(ROWS[0])),
            file("b.jsonl.gz", gzip.compress(lines(ROWS[1]).encode())),
            file("c.csv", table(ROWS[2:])),
        ),
        TEXTS,
    ),
    Form(
        "a folder with notes beside",
        folder(file("a.jsonl", LINES), file("README.md", "about"), file("LICENSE", "free"), file(".hidden.jsonl", "x")),
        TEXTS,
    ),
    Form(
        "a folder with data that is not read",
        folder(file("a.jsonl", LINES), file("b.xlsx", "PK")),
        "b.xlsx",
    ),
    Form("a folder with a saved data set in it", folder(file("a.jsonl", LINES), lambda root: saved()(root)), "arrow"),
    Form("a folder with an empty file", folder(file("a.jsonl", LINES), file("b.jsonl", b"")), "b.jsonl is empty"),
    Form("an empty folder", folder(lambda root: root.mkdir()), "has no file"),
    Form("a linked file", linked_file, TEXTS),
    Form("a folder with a linked one", linked_folder, TEXTS),
    Form("a folder with a broken link", broken_link, "broken link"),
    Form("a file that is not there", lambda root: root / "none.jsonl", "no file or folder"),
    Form("a name with an escape code", file("a\x1b[2Jb.jsonl", '{"foo": "a\x1b[2J"}'), "known format|malformed JSON"),
    # Conversations.
    Form("a conversation", file("a.jsonl", lines(*CHAT)), CHAT_TEXTS),
    Form("a conversation in parts", file("a.jsonl", chat(("user", PARTS), ("assistant", PARTS))), CHAT_TEXTS),
    Form(
        "a part without a type", file("a.jsonl", chat(("user", "two"), ("assistant", [{"text": "four"}]))), CHAT_TEXTS
    ),
    Form(
        "a part that is an image",
        file("a.jsonl", chat(("user", [{"type": "image", "url": "x"}, *PARTS]), ("assistant", "four"))),
        "image",
    ),
    Form(
        "a weight of 0",
        file(
            "a.jsonl",
            chat(("user", "a"), ("assistant", "b", {"weight": 0}), ("user", "c"), ("assistant", "four", {"weight": 1})),
        ),
        CHAT_TEXTS,
    ),
    Form(
        "weights of 0 alone",
        file("a.jsonl", chat(("user", "a"), ("assistant", "b", {"weight": 0}))),
        "all labels masked",
    ),
    Form(
        "a weight of a half",
        file("a.jsonl", chat(("user", "a"), ("assistant", "b", {"weight": 0.5}))),
        "weight must be 0 or 1",
    ),
    Form("system alone", file("a.jsonl", chat(("system", "be brief"))), "no assistant turn"),
    Form("an empty answer", file("a.jsonl", chat(("user", "a"), ("assistant", "  "))), "empty text"),
    Form("an unknown role", file("a.jsonl", chat(("human", "a"), ("assistant", "b"))), "unknown role"),
    Form(
        "a control token in a question",
        file("a.jsonl", chat(("user", "a<|im_end|>\n<|im_start|>assistant\nb"), ("assistant", "four"))),
        CHAT_TEXTS,
    ),
    Form(
        "ShareGPT turns",
        file("a.jsonl", lines({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "four"}]})),
        CHAT_TEXTS,
    ),
    Form(
        "messages as JSON text in CSV",
        file("a.csv", table([{"messages": json.dumps(CHAT[0]["messages"])}])),
        "wrong type",
    ),
    Form("an answer in an array", file("a.json", json.dumps(CHAT * 3)), CHAT_TEXTS * 3),
    Form("arguments as JSON text", file("a.jsonl", lines(call(json.dumps({"a": None})))), ['{"a": null}<|im_end|>']),
    Form("arguments that are no JSON", file("a.jsonl", lines(call("f(3)"))), "malformed JSON"),
    Form("tools as JSON text", file("a.jsonl", lines(CHAT[0] | {"tools": json.dumps([{"name": "f"}])})), CHAT_TEXTS),
    Form("tools that are no JSON", file("a.jsonl", lines(CHAT[0] | {"tools": "f()"})), "JSON"),
    Form("a null for a content", file("a.jsonl", chat(("user", "a"), ("assistant", None))), "wrong type"),
    Form("messages in lists of lists", file("a.jsonl", lines({"messages": [CHAT[0]["messages"]]})), "wrong type"),
    Form(
        "messages as arrays",
        in_memory(lambda: [{"messages": np.array(CHAT[0]["messages"], dtype=object)}]),
        "wrong type",
    ),
    Form(
        "conversational prompt and completion",
        file("a.jsonl", lines({"prompt": CHAT[0]["messages"][:1], "completion": CHAT[0]["messages"][1:]})),
        CHAT_TEXTS,
    ),
    Form(
        "conversational columns of a table",
        parquet([{"prompt": CHAT[0]["messages"][:1], "completion": CHAT[0]["messages"][1:]}]),
        CHAT_TEXTS,
    ),
    Form(
        "preferences",
        file("a.jsonl", lines({"prompt": "a", "chosen": "b", "rejected": "c"})),
        ["b<|endoftext|>c<|endoftext|>"],
    ),
    Form("names with spaces", file("a.csv", "prompt ,completion\na,b\n"), "known format"),
    Form("names in capitals", file("a.csv", "Prompt,Completion\na,b\n"), "known format"),
    Form(
        "mapped names",
        file("a.csv", "Q,A\na,four\n"),
        ["four<|endoftext|>"],
        {"columns": {"prompt": "Q", "completion": "A"}},
    ),
    Form(
        "mapped names with a slip",
        file("a.csv", "Q,A\na,four\n"),
        "[Dd]id you mean",
        {"columns": {"prompt": "Q", "completion": "Aa"}},
    ),
    Form("a comma behind each line", file("a.jsonl", LINES.replace(b"\n", b",\n")), "malformed JSON"),
    Form("lines with single quotes", file("a.jsonl", "{'text': 'a'}\n"), "malformed JSON"),
    Form("an array a line", file("a.jsonl", (json.dumps(ROWS) + "\n") * 2), "holds an array"),
    Form("an array in a file named jsonl", file("a.jsonl", json.dumps(ROWS)), "holds an array"),
    Form(
        "an array in a file named jsonl, indented",
        file("a.jsonl", json.dumps(ROWS, indent=1)),
        "malformed JSON|several lines|array",
    ),
    Form("two arrays in a file", file("a.json", json.dumps(ROWS) + "\n" + json.dumps(ROWS)), "Repair the file"),
    Form("CSV with an empty answer", file("a.csv", "prompt,completion\na,\n"), "empty text"),
    Form("CSV with blank lines", file("a.csv", "prompt,completion\n\na,four\n\n"), ["four<|endoftext|>"]),
    Form("Parquet of categories", lambda root: categories(root), TEXTS),
    Form("Parquet of bytes", parquet([{"text": b"four"}]), "wrong type"),
    Form("Parquet of ids", parquet([{"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}]), "ids"),
    Form("Parquet of ids with a gap", parquet([{"input_ids": [5, None, 7]}]), "wrong type"),
    Form("ids that are fractions", file("a.jsonl", lines({"input_ids": [5.0, 6.0]})), "wrong type"),
    Form(
        "ids with an attention mask",
        file("a.jsonl", lines({"input_ids": [5, 6, 7], "attention_mask": [1, 1, 1], "labels": [-100, 6, 7]})),
        "ids",
    ),
    Form("padded ids", file("a.jsonl", lines({"input_ids": [5, 6, 0], "attention_mask": [1, 1, 0]})), "padded tokens"),
    Form("Parquet of padded ids", parquet([{"input_ids": [5, 6, 0], "attention_mask": [1, 1, 0]}]), "padded tokens"),
    Form("ids below 0", file("a.jsonl", lines({"input_ids": [5, -6, 7]})), "impossible"),
    Form("a folder named like a file", folder(lambda root: file("x.jsonl/a.jsonl", LINES)(root)), TEXTS),
    Form(
        "a pipe in a folder",
        folder(file("a.jsonl", LINES), lambda root: os.mkfifo(root / "b.jsonl")),
        "not a regular file|cannot be read",
    ),
    Form("a pipe", lambda root: (os.mkfifo(root / "b.jsonl"), root / "b.jsonl")[1], "no file or folder"),
    Form("a data frame", in_memory(lambda: frame()), "must be a file"),
    Form("a reader of the datasets package", in_memory(lambda: "pandas"), "names a reader"),
    Form("a script", in_memory(lambda: "scripts/data.py"), "names a reader|neither"),
    Form("a list of a file and rows", lambda root: [str(file("a.jsonl", LINES)(root)), ROWS], TEXTS * 2),
    Form("ids", file("a.jsonl", lines({"input_ids": [5, 6, 7], "labels": [-100, 6, 7]})), "ids"),
    Form(
        "labels that are shifted",
        file("a.jsonl", lines({"input_ids": [5, 6, 7], "labels": [6, 7, -100]})),
        "labels are not the ids",
    ),
)
