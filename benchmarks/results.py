"""results.csv: the table to which every benchmark appends; rows are never edited.

Merge the rows of a run on another machine:  python -m benchmarks.results rows.csv
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

COLUMNS = (
    "date",
    "benchmark",
    "workload",
    "system",
    "version",
    "metric",
    "value",
    "p10",
    "p90",
    "n",
    "unit",
    "command",
    "device",
)
RESULTS_PATH = Path(__file__).parent / "results.csv"


def append_rows(rows: Sequence[Mapping[str, Any]], *, path: Path = RESULTS_PATH) -> None:
    """Append measured figures to the table, writing its header first if there is no file.

    Args:
        rows: Values by column name; a missing date is today's, other missing columns stay empty.
        path: File of the table.

    Raises:
        ValueError: A row has a column that the table does not have, or the file has another header.
    """
    for row in rows:
        unknown = set(row) - set(COLUMNS)
        if unknown:
            raise ValueError(f"Unknown columns {sorted(unknown)}; results.csv has {', '.join(COLUMNS)}.")
    is_new = not path.exists() or path.stat().st_size == 0
    if not is_new:
        check_header(path, COLUMNS)
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=COLUMNS, restval="")
        if is_new:
            writer.writeheader()
        for row in rows:
            writer.writerow({"date": date.today().isoformat(), **{key: _text(value) for key, value in row.items()}})


def merge(source: Path, *, path: Path = RESULTS_PATH) -> int:
    """Append every row of another results file and return their number."""
    check_header(source, COLUMNS)
    with source.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    append_rows(rows, path=path)
    return len(rows)


def check_header(path: Path, columns: Sequence[str]) -> None:
    """Raise if a table does not start with the names of these columns.

    Raises:
        ValueError: It does not.
    """
    with path.open(newline="", encoding="utf-8") as file:
        header = next(csv.reader(file), [])
    if header != list(columns):
        raise ValueError(f"{path} has the columns {', '.join(header)}; expected {', '.join(columns)}.")


def _text(value: object) -> object:
    return f"{value:.6g}" if isinstance(value, float) else value


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(f"{merge(Path(name))} rows of {name} appended to {RESULTS_PATH}")
