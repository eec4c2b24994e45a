"""Stream text files through ``datasets``: the rows that the readers of whole files yield, as texts in columns of ours.

The JSON and CSV readers of ``datasets`` infer a type for each column: an integer may become a float, a date a timestamp
and "NA" a null, keys of an object change their order, and a later key ends the run.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lightning_fastft.packing.reading.text_files import choose_reader
from lightning_fastft.packing.rows.rejects import Raw, RowRejectedError

# The bytes of a line (a record of a table as JSON) as Latin-1, in which every byte is a character; and the reason,
# detail and first bytes of a row that cannot be read.
ROW, REJECT = "fastft_row", "fastft_reject"


def stream_text_files(files: list[str]) -> Any:
    """Return an IterableDataset of the rows of local text files, with one shard per file."""
    import datasets

    features = datasets.Features({name: datasets.Value("string") for name in (ROW, REJECT)})
    return datasets.IterableDataset.from_generator(_read_files, features=features, gen_kwargs={"files": files})


def stream_lines(urls: list[str]) -> Any:
    """Return an IterableDataset of the lines of files of JSON lines, which may be on the hub."""
    import datasets

    features = datasets.Features({ROW: datasets.Value("string")})
    return datasets.load_dataset(
        "text", data_files=urls, features=features, encoding="latin-1", split="train", streaming=True
    )


def decode_row(row: Mapping[str, Any]) -> Raw | None:
    """Return a row of these streams as its reader yielded it: None for a blank line.

    A mixture fills the columns of its other sources with null: their rows are returned without nulls.
    """
    if (reject := row.get(REJECT)) is not None:
        reason, detail, first = json.loads(reject)
        return RowRejectedError(reason, detail, first.encode("latin-1"))
    if (text := row[ROW]) is not None:
        content: bytes = text.encode("latin-1")
        return content if content.strip() else None
    return {name: value for name, value in row.items() if value is not None}


def _read_files(files: list[str]) -> Iterator[dict[str, str | None]]:
    for file in files:
        reader, _ = choose_reader(Path(file))
        for row in reader(Path(file)):
            yield _encode_row(row.raw)


def _encode_row(raw: Raw | None) -> dict[str, str | None]:
    if isinstance(raw, RowRejectedError):
        return {ROW: None, REJECT: json.dumps([raw.reason, raw.detail, raw.first_bytes.decode("latin-1")])}
    content = b"" if raw is None else raw if isinstance(raw, bytes) else json.dumps(raw).encode()
    return {ROW: content.decode("latin-1"), REJECT: None}
