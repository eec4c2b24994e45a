"""The rows of fault trials, and the table made from them; this module imports nothing heavy."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.results import check_header

COLUMNS = ("date", "fault", "stack", "trials", "bad", "how", "seconds", "versions", "command")
ROWS_PATH = Path(__file__).parents[1] / "faults.csv"
STACKS = ("default", "ours")
# Verdict of a trial that ended as it should.
GOOD = ""
# By the numbers of the promises in docs/reliability.md.
TITLES = {
    "R1": "kill -9 while one path is saved over and over; half the trials with `TMPDIR` on another file system",
    "R2": "one flipped bit, or the end cut off, in a checkpoint that is then loaded",
    "R3": "a save that cannot be: folder read-only, no room, folder vanishes, name taken, no file can be made",
    "R4": "stop after each of 20 optimizer steps, LoRA with dropout, and resume: equal to the run that went on",
    "R5": "stop inside an epoch and resume: every example trained once",
    "R6": "SIGTERM at a random moment, two micro-batches per step: exit code not 0, checkpoint of that step",
    "R7": "NaN or infinity in a row, a loss or a gradient of one micro-batch",
    "R8": "30 kinds of bad rows among 150 good ones, at the first, middle and last line",
    "R17": "one of two ranks is killed, fails, is stopped, hangs, or has fewer batches: the job ends",
    "R18": "configs, weights, tokenizers, templates and rows from strangers: code runs, or the process hangs or dies",
    "R22": "values of options out of their range: negative, huge, NaN, wrong type",
}


def make_row(fault: str, stack: str, verdicts: Sequence[str], *, seconds: float, **origin: str) -> dict[str, str]:
    """Return the row of one fault in one stack.

    Args:
        fault: A key of TITLES.
        stack: "default" or "ours".
        verdicts: One per trial: GOOD, or how it ended badly.
        seconds: What all trials took.
        **origin: The columns date, versions and command.
    """
    bad = Counter(verdict for verdict in verdicts if verdict != GOOD)
    how = "; ".join(f"{count} {verdict}" for verdict, count in bad.most_common())
    return {
        "fault": fault,
        "stack": stack,
        "trials": str(len(verdicts)),
        "bad": str(bad.total()),
        "how": how,
        "seconds": f"{seconds:.0f}",
        **origin,
    }


def append_rows(rows: Sequence[Mapping[str, str]], *, path: Path = ROWS_PATH) -> None:
    """Append rows to a file, with the names of the columns first where there is none yet.

    Raises:
        ValueError: The file has other columns, or a row has.
    """
    if path.exists() and path.stat().st_size:
        check_header(path, COLUMNS)
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(",".join(COLUMNS) + "\n", encoding="utf-8")
    with path.open("a", newline="", encoding="utf-8") as file:
        csv.DictWriter(file, fieldnames=COLUMNS, restval="", lineterminator="\n").writerows(rows)


def read_rows(path: Path = ROWS_PATH) -> list[dict[str, str]]:
    """Return the rows of a file, in their order."""
    check_header(path, COLUMNS)
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def render_table(rows: Sequence[Mapping[str, str]]) -> str:
    """Return one Markdown table: a line per fault, with the newest row of each stack.

    Example:
        >>> row = make_row("R3", "ours", ["", "torn"], seconds=1.0, date="2026-01-01")
        >>> print(render_table([row]).splitlines()[-1].rpartition("taken, ")[2])
        no file can be made | not run |  | 1 of 2: 1 torn | 2026-01-01 |
    """
    newest: dict[str, dict[str, Mapping[str, str]]] = {}
    for row in rows:
        newest.setdefault(row["fault"], {})[row["stack"]] = row
    lines = ["| | fault | default stack, ended badly | how | ours, ended badly | date |", "|---|---|---|---|---|---|"]
    for fault in (fault for fault in TITLES if fault in newest):
        default, ours = (newest[fault].get(stack) for stack in STACKS)
        date = max(row["date"] for row in newest[fault].values())
        lines.append(
            f"| {fault} | {TITLES[fault]} | {_share(default)} | {default['how'] if default else ''} | "
            f"{_share(ours, has_how=True)} | {date} |"
        )
    return "\n".join(lines) + "\n"


def _share(row: Mapping[str, str] | None, *, has_how: bool = False) -> str:
    """Say how many of how many trials ended badly, and how they did."""
    if row is None:
        return "not run"
    return f"{row['bad']} of {row['trials']}" + (f": {row['how']}" if has_how and row["how"] else "")
