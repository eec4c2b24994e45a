"""Convert raw records to the printed table and to rows of results.csv."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.ruler.cases import REFERENCE_ONLY
from benchmarks.ruler.judge import Limits
from benchmarks.ruler.systems import SYSTEMS

_HEADER = (
    "system mode",
    "labels",
    "optim",
    "ms",
    "p10",
    "p90",
    "n",
    "tok/s",
    "lab.tok/s",
    "GiB",
    "resv",
    "used",
    "waits",
    "min cos",
    "x plain",
)


def read_records(path: Path) -> list[dict[str, Any]]:
    """Return the records of a raw log, oldest first."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def render_table(records: Sequence[dict[str, Any]]) -> str:
    """Return the table: a row for every case that passed, the reason for every other case, and the bars against the
    plain arm.
    """
    timed = [record for record in records if not record["reason"]]
    lines = []
    for workload in dict.fromkeys(record["workload"] for record in records):
        rows = [_HEADER] + [_row(record, timed) for record in timed if record["workload"] == workload]
        lines += [workload, *align(rows)]
        lines += [
            f"  note: {_name(record)}: {note}"
            for record in timed
            if record["workload"] == workload
            for note in _dtype_notes(record)
        ]
        lines += [
            f"  no row: {_name(record)}: {record['reason'][:300]}{_diagnosis(record)}"
            for record in records
            if _is_refused(record, workload)
        ]
    return "\n".join(lines)


def align(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows of cells as lines of aligned columns, the first one left-aligned, the others right-aligned."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  "
        + "  ".join(
            cell.rjust(width) if number else cell.ljust(width) for number, (cell, width) in enumerate(zip(row, widths))
        )
        for row in rows
    ]


def result_rows(records: Sequence[dict[str, Any]], *, command: str) -> list[dict[str, Any]]:
    """Return rows for results.csv, without cases that were refused or failed."""
    rows = []
    for record in records:
        if record["reason"]:
            continue
        shared = {
            "benchmark": "train_step",
            "workload": f"{record['workload']}, packed, labels {record['label_share']:.0%}",
            "system": f"{record['title']}, {record['optimizer']}",
            "version": version_text(record),
            "command": command,
            "device": record["versions"].get("device", "cpu"),
        }
        summary = record["summary"]
        spread = {"p10": summary["p10"], "p90": summary["p90"], "n": summary["n"]}
        rows.append({**shared, "metric": "step", "value": summary["median"], "unit": "ms", **spread})
        figures = [
            ("tokens", record["tokens_per_s"], "tokens/s"),
            ("labelled tokens", record["labelled_tokens_per_s"], "tokens/s"),
            ("peak allocated", record["peak_gib"]["allocated"], "GiB"),
            ("peak reserved", record["peak_gib"]["reserved"], "GiB"),
            ("host waits", record.get("host_waits", ""), "per step"),
            *optional_figures(record),
            (f"lowest gradient cosine{_limits_text(record)}", record["verdict"]["worst_cosine"][1], "1"),
        ]
        rows += [
            {**shared, "metric": metric, "value": value, "unit": unit, "n": summary["n"]}
            for metric, value, unit in figures
        ]
    return rows


def optional_figures(record: dict[str, Any]) -> list[tuple[str, Any, str]]:
    """Return metric, value and unit of figures that records of older runs do not have."""
    figures = [
        ("step, mean", record["summary"].get("mean"), "ms"),
        ("host waits, whole step", record.get("host_waits_step"), "per step"),
        ("device memory", record.get("device_memory_gib"), "GiB"),
        (f"whole run of {record.get('num_whole_steps')} steps", record.get("whole_run_s"), "s"),
    ]
    return [figure for figure in figures if figure[1] is not None]


def host_syncs_text(record: dict[str, Any]) -> str:
    """Return the host syncs of a step for a table; a + marks counts up to the end of the backward in older records.

    Example:
        >>> host_syncs_text({"host_waits": 2, "host_waits_step": 5}), host_syncs_text({"host_waits": 2})
        ('5', '2+')
    """
    whole, partial = record.get("host_waits_step"), record.get("host_waits")
    return str(whole) if whole is not None else "-" if partial is None else f"{partial}+"


def version_text(record: dict[str, Any]) -> str:
    """Return the versions of the libraries that this system uses."""
    versions = record.get("versions", {})
    used = SYSTEMS[record["system"]].packages
    packages = [f"{package} {versions[package]}" for package in used if package in versions]
    return "; ".join([*packages, *([f"attention: {record['attention']}"] if record.get("attention") else [])])


def _limits_text(record: dict[str, Any]) -> str:
    """Return the limits of a row if they differ from those of all others."""
    limits = record["verdict"].get("limits", asdict(Limits()))
    return (
        ""
        if limits == asdict(Limits())
        else f", judged by cosine {limits['min_cosine']} and norm within {limits['max_norm_error']:.0%}"
    )


def _dtype_notes(record: dict[str, Any]) -> list[str]:
    """Return the tensors that a system trains in another dtype than its matrices (see benchmarks/ruler/proof.py)."""
    dtypes = record.get("dtypes", {"matrices": {}, "vectors": {}})
    return [
        f"{number} norm weights in {dtype}"
        for dtype, number in dtypes["vectors"].items()
        if dtype not in dtypes["matrices"]
    ]


def _name(record: dict[str, Any]) -> str:
    return f"{record['title']}, labels {record['label_share']:.0%}, {record['optimizer']}"


def _is_refused(record: dict[str, Any], workload: str) -> bool:
    return record["workload"] == workload and bool(record["reason"]) and record["reason"] != REFERENCE_ONLY


def _diagnosis(record: dict[str, Any]) -> str:
    return (
        f" [measured all the same: {record['summary']['median']:.0f} ms, {record['peak_gib']['allocated']:.1f} GiB]"
        if "summary" in record
        else ""
    )


def _row(record: dict[str, Any], timed: Sequence[dict[str, Any]]) -> tuple[str, ...]:
    summary, peak = record["summary"], record["peak_gib"]
    baseline = [
        other
        for other in timed
        if (other["workload"], other["system"], other["mode"], other["label_share"])
        == (record["workload"], "plain", "recompute", record["label_share"])
    ]
    ratio = f"{record['tokens_per_s'] / baseline[-1]['tokens_per_s']:.2f}" if baseline else "-"
    return (
        record["title"],
        f"{record['label_share']:.0%}",
        record["optimizer"].removeprefix("adamw_"),
        f"{summary['median']:.1f}",
        f"{summary['p10']:.1f}",
        f"{summary['p90']:.1f}",
        str(summary["n"]),
        f"{record['tokens_per_s']:.0f}",
        f"{record['labelled_tokens_per_s']:.0f}",
        f"{peak['allocated']:.1f}",
        f"{peak['reserved']:.1f}",
        f"{record['device_memory_gib']:.1f}" if record.get("device_memory_gib") else "-",
        host_syncs_text(record),
        f"{record['verdict']['worst_cosine'][1]:.5f}",
        ratio,
    )
