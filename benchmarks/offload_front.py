"""Measure the front of step time against device memory, from the smallest plan to all kept, and Unsloth's two ends.

Every figure comes from the ruler (benchmarks/train_step.py): same packs, weights and optimizer, gradients compared with
the plain arm. Our end points come first (recompute all, offload all, keep all), then budgets between them, each a case
of "auto" with that much memory, and last Unsloth with its default and without checkpointing, all in one call on one
GPU.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.results import append_rows
from benchmarks.ruler.cases import REFERENCE_ONLY, Case
from benchmarks.ruler.driver import parse_arm, run_arms
from benchmarks.ruler.report import read_records, result_rows
from benchmarks.ruler.workloads import WORKLOADS, WorkloadFiles

# Positions of the budgets, most informative first: from recompute all (0) to keep all (1), and below 0 from offload all
# (-1) to recompute all. Above 1 everything can be kept.
SHARES = (0.0, 0.5, 1.05, 0.25, 0.75, -0.5, -1.0, 0.1, 0.9)
# Peaks that differ by less than this count as equal memory; the smallest budget gets this much more.
LEAST_SLACK = 1.01
BENCHMARK = "offload front"
UNSLOTH = ("unsloth:unsloth", "unsloth:off")


def add_arguments(commands: Any, shared: argparse.ArgumentParser) -> None:
    """Add the subcommand "front"."""
    one = commands.add_parser("front", parents=[shared], help="step time against memory, through the ruler")
    one.add_argument("--root", type=Path, required=True, help="folder of the built workloads")
    one.add_argument("--workload", nargs="+", required=True)
    one.add_argument("--liger", nargs="*", default=[], metavar="WORKLOAD", help="workloads with Liger's layers")
    one.add_argument("--fused", nargs="*", default=[], metavar="WORKLOAD", help="workloads with fused layers")
    one.add_argument("--host-gib", type=float, default=32.0, help="pinned memory of each plan")
    one.add_argument("--extra-modes", nargs="*", default=[], help="further modes of ours, written as in the ruler")
    one.add_argument("--peers", nargs="*", default=list(UNSLOTH))
    one.add_argument("--warmup", type=int, default=6)
    one.add_argument("--optimizer", default="adamw_8bit", choices=("adamw_8bit", "adamw_fused"))
    one.add_argument("--num-budgets", type=int, default=7)
    one.add_argument("--budgets-gib", type=float, nargs="*", help="budgets; by default computed from the end points")


def front(options: argparse.Namespace) -> int:
    """Measure the front of every workload; the table comes last."""
    options.out.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + options.budget_s
    for number, name in enumerate(options.workload):
        left = deadline - time.monotonic()
        Front(name, options).run(deadline=time.monotonic() + left / (len(options.workload) - number))
    print(_write_table(options), flush=True)
    return 0


def _write_table(options: argparse.Namespace) -> str:
    """Write the table of all measurements and return it."""
    records = read_records(options.out / "raw.jsonl")
    table = "\n".join(front_table(name, records) for name in options.workload)
    (options.out / "table.txt").write_text(table + "\n", encoding="utf-8")
    return table


class Front:
    """The cases of one workload.

    Args:
        workload: A workload that is built under root.
        options: Options of the command line.
    """

    def __init__(self, workload: str, options: argparse.Namespace) -> None:
        self.workload = workload
        self._options = options
        self._files = WorkloadFiles(options.root, WORKLOADS[workload])
        self._raw: Path = options.out / "raw.jsonl"
        self._suffix = "+fused" if workload in options.fused else "+liger" if workload in options.liger else ""
        self._template = Case(
            workload, "", "", optimizer=options.optimizer, num_warmup=options.warmup, num_steps=options.steps
        )
        self._command = "python -m benchmarks.offload " + " ".join(sys.argv[1:])

    def run(self, *, deadline: float) -> None:
        """Measure end points, budgets and peers within the time budget; skip cases of the raw log."""
        if not self._files.reference(1.0).exists():
            self._arms(["plain:reference"], deadline=deadline)
        # Peers come last, with reserved time.
        num_peers = sum(not self._done(peer.partition(":")[2], "unsloth") for peer in self._options.peers)
        own_deadline = deadline - num_peers * 0.2 * max(0.0, deadline - time.monotonic())
        host = f":{self._options.host_gib:g}"
        self._modes(
            [f"recompute{self._suffix}", f"keep{self._suffix}", f"offload{host}{self._suffix}"], deadline=own_deadline
        )
        budgets = self._options.budgets_gib or self._budgets()
        self._modes(
            [*self._options.extra_modes, *(f"auto={gib:.3f}{host}{self._suffix}" for gib in budgets)],
            deadline=own_deadline,
        )
        self._arms(
            [peer for peer in self._options.peers if not self._done(peer.partition(":")[2], "unsloth")],
            deadline=deadline,
        )

    def _budgets(self) -> list[float]:
        """Return budgets in GiB, most informative first."""
        ends = {end: self._peak(end) for end in ("recompute", "offload", "keep")}
        low = ends["recompute"]
        if low is None:
            return []
        # If keep does not fit, the upper end is the memory of the card.
        high = ends["keep"] or _card_gib() or low * 4
        least = (ends["offload"] or low) * LEAST_SLACK
        return [
            low + share * (high - low if share >= 0 else low - least) for share in SHARES[: self._options.num_budgets]
        ]

    def _peak(self, end: str) -> float | None:
        for record in _timed(self.workload, read_records(self._raw)):
            if record["system"] == "ours" and mode_name(record["mode"]) == end and "+stream" not in record["mode"]:
                return float(record["peak_gib"]["allocated"]) or 1e-3
        return None

    def _done(self, mode: str, system: str = "ours") -> bool:
        return any(
            record["system"] == system and record["mode"] == mode
            for record in _timed(self.workload, read_records(self._raw))
        )

    def _modes(self, modes: Sequence[str], *, deadline: float) -> None:
        left = [mode for mode in dict.fromkeys(modes) if not self._done(mode)]
        if left:
            self._arms([f"ours:{','.join(left)}"], deadline=deadline)

    def _arms(self, arms: Sequence[str], *, deadline: float) -> None:
        """Run arms one by one and flush the rows of each."""
        for arm in arms:
            num_before = len(read_records(self._raw))
            left = max(0.0, deadline - time.monotonic())
            run_arms(
                [parse_arm(arm, template=self._template)],
                root=self._options.root,
                raw=self._raw,
                log=self._options.out / "log.txt",
                device=self._options.device,
                budget_seconds=left,
                arm_seconds=left,
            )
            rows = front_rows(read_records(self._raw)[num_before:], command=self._command)
            append_rows(rows, path=self._options.out / "rows.csv")
            _write_table(self._options)


def _card_gib() -> float | None:
    import torch

    # The share of the card that "auto" would use.
    return 0.9 * torch.cuda.get_device_properties(0).total_memory / 2**30 if torch.cuda.is_available() else None


def mode_name(mode: str) -> str:
    """Return the name of a mode without budgets and layers.

    Example:
        >>> mode_name("offload:32+liger"), mode_name("auto=20:32")
        ('offload', 'auto')
    """
    return mode.partition("+")[0].partition(":")[0].partition("=")[0]


def _timed(workload: str, records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        record for record in records if record["workload"] == workload and "system" in record and not record["reason"]
    ]


def front_rows(records: Sequence[dict[str, Any]], *, command: str) -> list[dict[str, Any]]:
    """Return rows for results.csv: the ruler's, and for plans the prediction, the waits of compute for copies, and the
    host memory.
    """
    rows = []
    for record in records:
        own = [{**row, "benchmark": BENCHMARK} for row in result_rows([record], command=command)]
        rows += own
        if not own:
            continue
        shared = {
            **{key: own[0][key] for key in ("benchmark", "workload", "system", "version", "command", "device")},
            "n": own[0]["n"],
        }
        plan = record.get("plan") or {}
        predicted, engine, copies = plan.get("predicted") or {}, plan.get("engine") or {}, record.get("copies") or {}
        figures = [
            ("predicted step", predicted.get("step_ms"), "ms"),
            ("predicted peak", predicted.get("peak_gib"), "GiB"),
            ("predicted exposed copies", predicted.get("exposed_ms"), "ms"),
            ("exposed copies", copies.get("exposed_ms"), "ms"),
            ("pinned host memory", engine["pinned_bytes"] / 2**30 if engine else None, "GiB"),
        ]
        rows += [
            {**shared, "metric": metric, "value": value, "unit": unit}
            for metric, value, unit in figures
            if value is not None
        ]
    return rows


def front_table(workload: str, records: Sequence[dict[str, Any]]) -> str:
    """Return the front of a workload, with predicted and measured values."""
    timed = sorted(_timed(workload, records), key=lambda record: record["peak_gib"]["allocated"])
    lines = [
        f"{workload}: front, by measured peak",
        f"  {'system mode':<30} {'ms':>8} {'p10':>8} {'p90':>8} {'n':>3} {'GiB':>7} | {'pred. ms':>8} {'error':>6} "
        f"{'pred. GiB':>9} {'error':>6} | "
        f"{'exposed':>7} {'host GiB':>8}  plan's gradients",
    ]
    lines += [_front_line(record) for record in timed]
    titles = {record["title"] for record in timed}
    # The latest record of cases that were never timed.
    tried = {
        record["title"]: record
        for record in records
        if record["workload"] == workload and record["title"] not in titles
    }
    refused = [record for record in tried.values() if record["reason"] != REFERENCE_ONLY]
    lines += [f"  no row: {record['title']}: {record['reason'][:240]}" for record in refused]
    return "\n".join(lines)


def _front_line(record: dict[str, Any]) -> str:
    summary, peak = record["summary"], record["peak_gib"]["allocated"]
    plan = record.get("plan") or {}
    predicted, engine, copies, check = (
        plan.get("predicted"),
        plan.get("engine"),
        record.get("copies"),
        record.get("plan_check"),
    )
    text = f"{'':>8} {'':>6} {'':>9} {'':>6}"
    if predicted:
        time_error, peak_error = (
            predicted["step_ms"] / summary["median"] - 1,
            predicted["peak_gib"] / peak - 1 if peak else 0.0,
        )
        text = f"{predicted['step_ms']:>8.0f} {time_error:>+6.1%} {predicted['peak_gib']:>9.2f} {peak_error:>+6.1%}"
    exposed = f"{copies['exposed_ms']:.1f}" if copies else ""
    host = f"{engine['pinned_bytes'] / 2**30:.1f}" if engine else ""
    equal = ("bit-equal" if check["is_bitwise"] else f"cosine {check['worst_cosine'][1]:.6f}") if check else ""
    return (
        f"  {record['title']:<30} {summary['median']:>8.1f} {summary['p10']:>8.1f} {summary['p90']:>8.1f} "
        f"{summary['n']:>3} {peak:>7.2f} | {text} | "
        f"{exposed:>7} {host:>8}  {equal}"
    )
