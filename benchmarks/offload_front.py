"""Measure the front of step time against device memory, from the smallest plan to all kept, and Unsloth's two ends.

Every figure comes from the ruler (benchmarks/train_step.py): same packs, weights and optimizer, gradients compared with
the plain arm. First our own ends - recompute all, offload all, keep all - then budgets between them, each a case of "auto" with
that much memory, last Unsloth in its default and without checkpointing, all in the same session on the same GPU.
"""

from __future__ import annotations

import argparse
import csv
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

# Where budgets lie, the most telling first: between recompute all (0) and keep all (1), and below 0 between offload all
# (-1) and recompute all. The bars need the one at 0; above 1 everything can be kept.
SHARES = (0.0, 0.5, 1.05, 0.25, 0.75, -0.5, -1.0, 0.1, 0.9)
# What a measured peak may differ from another and still count as the same memory; the least budget gets as much.
LEAST_SLACK = 1.01
MAX_PEAK_ERROR, MAX_TIME_ERROR = 0.05, 0.10
# How much faster a plan is at the memory of recompute all, and how much with fused layers, which keep less for it.
MIN_GAIN, MIN_FUSED_GAIN = 0.05, 0.10
# With streamed weights, by workload: GiB to stay under. And how much slower than recompute all with resident weights
# that may be.
STREAMED_GIB = {"qwen3-14b-qlora-16k": 6.0}
MAX_STREAMED_LOSS = 0.10
# What one run differs from the next: a point that much above the line is on it.
LINE_TOLERANCE = 0.01
BENCHMARK = "offload front"
UNSLOTH = ("unsloth:unsloth", "unsloth:off")
# Whose layers a case ran, by the word in its mode, the first that is found: what the picture calls them, and their
# color.
_LAYERS = {
    "": ("transformers' layers", "tab:gray"),
    "liger": ("Liger's layers", "tab:cyan"),
    "fp8": ("fused layers, fp8 products", "tab:purple"),
    "graphs": ("fused layers, CUDA graphs", "tab:green"),
    "fused": ("fused layers", "tab:blue"),
}
_FUSED = ("fp8", "graphs", "fused")


def add_arguments(commands: Any, shared: argparse.ArgumentParser) -> None:
    """Add the subcommands "front" and "plot"."""
    one = commands.add_parser("front", parents=[shared], help="step time against memory, through the ruler")
    one.add_argument("--root", type=Path, required=True, help="where the workloads are built")
    one.add_argument("--workload", nargs="+", required=True)
    one.add_argument(
        "--liger", nargs="*", default=[], metavar="WORKLOAD", help="workloads whose cases have Liger's layers"
    )
    one.add_argument(
        "--fused", nargs="*", default=[], metavar="WORKLOAD", help="workloads whose cases have fused layers"
    )
    one.add_argument("--host-gib", type=float, default=32.0, help="pinned memory of each plan")
    one.add_argument(
        "--extra-modes", nargs="*", default=[], help="modes of ours beyond the front, as the ruler writes them"
    )
    one.add_argument("--peers", nargs="*", default=list(UNSLOTH))
    one.add_argument("--warmup", type=int, default=6)
    one.add_argument("--optimizer", default="adamw_8bit", choices=("adamw_8bit", "adamw_fused"))
    one.add_argument("--num-budgets", type=int, default=7)
    one.add_argument(
        "--budgets-gib", type=float, nargs="*", help="these budgets instead of those computed from the ends"
    )
    two = commands.add_parser("plot", help="draw step time against memory from result rows")
    two.add_argument("rows", type=Path, nargs="+")
    two.add_argument("--out", type=Path, default=Path(__file__).parent / "plots")
    two.add_argument("--format", default="svg", choices=("svg", "png"))


def front(options: argparse.Namespace) -> int:
    """Measure the front of every workload; the table and the bars come last."""
    options.out.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + options.budget_s
    for number, name in enumerate(options.workload):
        left = deadline - time.monotonic()
        Front(name, options).run(deadline=time.monotonic() + left / (len(options.workload) - number))
    print(_write_table(options), flush=True)
    return 0


def _write_table(options: argparse.Namespace) -> str:
    """Write the table of all that was measured and return it."""
    records = read_records(options.out / "raw.jsonl")
    table = "\n".join(front_table(name, records) for name in options.workload)
    (options.out / "table.txt").write_text(table + "\n", encoding="utf-8")
    return table


class Front:
    """The cases of one workload.

    Args:
        workload: Built under root.
        options: Of the command line.
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
        """Measure ends, budgets and peers, as far as the time reaches; what is in the raw log already is not
        repeated.
        """
        if not self._files.reference(1.0).exists():
            self._arms(["plain:reference"], deadline=deadline)
        # Peers last, but their time is kept for them.
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
        """Budgets in GiB, the most telling first."""
        ends = {end: self._peak(end) for end in ("recompute", "offload", "keep")}
        low = ends["recompute"]
        if low is None:
            return []
        # Without a keep that fits, the far end is what the card has.
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

    # The part of the card that "auto" would fill.
    return 0.9 * torch.cuda.get_device_properties(0).total_memory / 2**30 if torch.cuda.is_available() else None


def mode_name(mode: str) -> str:
    """Return the name of a mode without budgets and layers.

    Example:
        >>> mode_name("offload:32+liger"), mode_name("auto=20:32")
        ('offload', 'auto')
    """
    return mode.partition("+")[0].partition(":")[0].partition("=")[0]


def budget_gib(mode: str) -> float | None:
    """Return the budget in a mode's name; None where it has none.

    Example:
        >>> budget_gib("auto=20.5:32+liger")
        20.5
    """
    text = mode.partition("+")[0].partition(":")[0].partition("=")[2]
    return float(text) if text else None


def _timed(workload: str, records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        record for record in records if record["workload"] == workload and "system" in record and not record["reason"]
    ]


def front_rows(records: Sequence[dict[str, Any]], *, command: str) -> list[dict[str, Any]]:
    """Return rows for results.csv: the ruler's, and for plans what was predicted, what compute waited for copies,
    and the host memory.
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
    """Return the front of a workload, predicted beside measured, and whether each bar is met."""
    timed = sorted(_timed(workload, records), key=lambda record: record["peak_gib"]["allocated"])
    lines = [
        f"{workload}: front, by measured peak; errors of the prediction: at most {MAX_PEAK_ERROR:.0%} of the peak, "
        f"{MAX_TIME_ERROR:.0%} of the time",
        f"  {'system mode':<30} {'ms':>8} {'p10':>8} {'p90':>8} {'n':>3} {'GiB':>7} | {'pred. ms':>8} {'error':>6} "
        f"{'pred. GiB':>9} {'error':>6} | "
        f"{'exposed':>7} {'host GiB':>8}  plan's gradients",
    ]
    lines += [_front_line(record) for record in timed]
    titles = {record["title"] for record in timed}
    # The latest try of what was never timed.
    tried = {
        record["title"]: record
        for record in records
        if record["workload"] == workload and record["title"] not in titles
    }
    refused = [record for record in tried.values() if record["reason"] != REFERENCE_ONLY]
    lines += [f"  no row: {record['title']}: {record['reason'][:240]}" for record in refused]
    return "\n".join([*lines, *(f"  bar: {text}" for text in front_bars(timed))])


def _front_line(record: dict[str, Any]) -> str:
    summary, peak = record["summary"], record["peak_gib"]["allocated"]
    plan = record.get("plan") or {}
    predicted, engine, copies, check = (
        plan.get("predicted"),
        plan.get("engine"),
        record.get("copies"),
        record.get("plan_check"),
    )
    told = f"{'':>8} {'':>6} {'':>9} {'':>6}"
    if predicted:
        time_error, peak_error = (
            predicted["step_ms"] / summary["median"] - 1,
            predicted["peak_gib"] / peak - 1 if peak else 0.0,
        )
        told = f"{predicted['step_ms']:>8.0f} {time_error:>+6.1%} {predicted['peak_gib']:>9.2f} {peak_error:>+6.1%}"
    exposed = f"{copies['exposed_ms']:.1f}" if copies else ""
    host = f"{engine['pinned_bytes'] / 2**30:.1f}" if engine else ""
    equal = ("bit-equal" if check["is_bitwise"] else f"cosine {check['worst_cosine'][1]:.6f}") if check else ""
    return (
        f"  {record['title']:<30} {summary['median']:>8.1f} {summary['p10']:>8.1f} {summary['p90']:>8.1f} "
        f"{summary['n']:>3} {peak:>7.2f} | {told} | "
        f"{exposed:>7} {host:>8}  {equal}"
    )


def front_bars(timed: Sequence[dict[str, Any]]) -> list[str]:
    """Return one line per bar."""
    own = [record for record in timed if record["system"] == "ours" and "+stream" not in record["mode"]]
    ends = {mode_name(record["mode"]): record for record in own if budget_gib(record["mode"]) is None}
    planned = [record for record in own if budget_gib(record["mode"]) is not None]
    lines = []
    predicted = [record for record in planned if (record.get("plan") or {}).get("predicted")]
    if predicted:
        worst_peak = max(_error(record, "peak_gib") for record in predicted)
        worst_time = max(_error(record, "step_ms") for record in predicted)
        lines += [
            f"{len(predicted)} budgets, largest error of the predicted peak {worst_peak:.1%}: "
            f"{_verdict(worst_peak <= MAX_PEAK_ERROR)}",
            f"largest error of the predicted step time {worst_time:.1%}: {_verdict(worst_time <= MAX_TIME_ERROR)}",
        ]
    if "recompute" not in ends:
        return [*lines, "recompute all was not timed: no further bars"]
    low = ends["recompute"]
    if "keep" in ends:
        lines += [_line_bar(record, low, ends["keep"]) for record in planned]
    at_low = [record for record in planned if _peak_of(record) <= _peak_of(low) * LEAST_SLACK]
    if at_low:
        best = min(at_low, key=lambda record: record["summary"]["median"])
        gain = low["summary"]["median"] / best["summary"]["median"] - 1
        least = MIN_FUSED_GAIN if _layers_of(best["mode"]) in _FUSED else MIN_GAIN
        lines.append(
            f"at the memory of recompute all ({_peak_of(low):.2f} GiB) {best['mode']} is {gain:+.1%} faster: "
            f"{_verdict(gain >= least)}"
        )
    else:
        lines.append(f"no plan within the memory of recompute all ({_peak_of(low):.2f} GiB): {_verdict(False)}")
    peers = {record["mode"]: record for record in timed if record["system"] == "unsloth"}
    if {"unsloth", "off"} <= set(peers):
        lines += [_peer_bar(record, peers["unsloth"], peers["off"]) for record in own]
    return lines + [
        _streamed_bar(record, low) for record in timed if record["system"] == "ours" and "+stream" in record["mode"]
    ]


def _streamed_bar(record: dict[str, Any], low: dict[str, Any]) -> str:
    """Whether streamed weights need little enough memory, and cost little enough time."""
    slower = record["summary"]["median"] / low["summary"]["median"] - 1
    most_gib = STREAMED_GIB.get(record["workload"])
    told = f"{record['mode']} needs {_peak_of(record):.2f} GiB and {slower:+.1%} of the time of recompute all"
    if most_gib is None:
        return told
    return (
        f"{told}; under {most_gib:g} GiB and {MAX_STREAMED_LOSS:+.0%} wanted: "
        f"{_verdict(_peak_of(record) < most_gib and slower <= MAX_STREAMED_LOSS)}"
    )


def _line_bar(record: dict[str, Any], low: dict[str, Any], high: dict[str, Any]) -> str:
    """Whether a point lies on or below the straight line between the two ends; beyond them, no slower than the
    nearer one.
    """
    apart = _apart_from_line(record, low, high)
    if _peak_of(record) < _peak_of(low) / LEAST_SLACK:
        return f"{record['mode']} needs less than recompute all ({_peak_of(record):.2f} GiB), {apart:+.1%} of its time"
    return (
        f"{record['mode']} at {_peak_of(record):.2f} GiB is {apart:+.1%} of the line between the ends: "
        f"{_verdict(apart <= LINE_TOLERANCE)}"
    )


def _peer_bar(record: dict[str, Any], low: dict[str, Any], high: dict[str, Any]) -> str:
    """Whether a point lies below the straight line between the peer's two; beyond them, faster than the nearer one."""
    apart = _apart_from_line(record, low, high)
    return f"{record['mode']} at {_peak_of(record):.2f} GiB is {apart:+.1%} of Unsloth's line: {_verdict(apart < 0.0)}"


def _apart_from_line(record: dict[str, Any], low: dict[str, Any], high: dict[str, Any]) -> float:
    """Return how far the time of a point is from that of the line at its memory, as a share of it."""
    width = max(_peak_of(high) - _peak_of(low), 1e-9)
    share = min(1.0, max(0.0, (_peak_of(record) - _peak_of(low)) / width))
    line_ms = low["summary"]["median"] + share * (high["summary"]["median"] - low["summary"]["median"])
    return float(record["summary"]["median"] / line_ms - 1)


def _error(record: dict[str, Any], which: str) -> float:
    measured = _peak_of(record) if which == "peak_gib" else record["summary"]["median"]
    return abs(record["plan"]["predicted"][which] / measured - 1) if measured else 0.0


def _peak_of(record: dict[str, Any]) -> float:
    return float(record["peak_gib"]["allocated"])


def _verdict(is_met: bool) -> str:
    return "pass" if is_met else "FAIL"


def plot(options: argparse.Namespace) -> int:
    """Draw step time against peak memory, one file per workload, from rows of results.csv."""
    import matplotlib

    matplotlib.use("Agg")
    points = read_points(options.rows)
    if not points:
        print(f"no rows of benchmark {BENCHMARK!r} in {', '.join(map(str, options.rows))}")
        return 1
    options.out.mkdir(parents=True, exist_ok=True)
    for workload, systems in points.items():
        path = options.out / f"front_{workload.partition(',')[0]}.{options.format}"
        _draw(workload, systems, path)
        print(f"{path}: {len(systems)} points, {path.stat().st_size / 1024:.0f} KiB")
    return 0


def read_points(paths: Sequence[Path]) -> dict[str, dict[str, dict[str, float]]]:
    """Return, by workload and system, the latest figure of every metric of this benchmark; systems without time
    and peak are left out.
    """
    found: dict[str, dict[str, dict[str, float]]] = {}
    for path in paths:
        with path.open(newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                if row["benchmark"] == BENCHMARK and row["value"]:
                    found.setdefault(row["workload"], {}).setdefault(row["system"], {})[row["metric"]] = float(
                        row["value"]
                    )
    complete = {
        workload: {system: figures for system, figures in systems.items() if {"step", "peak allocated"} <= set(figures)}
        for workload, systems in found.items()
    }
    return {workload: systems for workload, systems in complete.items() if systems}


def _layers_of(system: str) -> str:
    """Return whose layers a system ran, as its mode says it.

    Example:
        >>> _layers_of("ours auto=12:24+fused, adamw_8bit"), _layers_of("ours keep+graphs, adamw_8bit"), _layers_of("ours keep, adamw_8bit")
        ('fused', 'graphs', '')
    """
    return next((kind for kind in _LAYERS if kind and f"+{kind}" in system), "")


def _draw_layers(axes: Any, systems: dict[str, dict[str, float]], *, label: str, color: str) -> None:
    """Draw plans between the ends of one kind of layers, measured and predicted."""
    plans = sorted(
        (figures["peak allocated"], figures["step"])
        for system, figures in systems.items()
        if system.startswith("ours auto")
    )
    predicted = sorted(
        (figures["predicted peak"], figures["predicted step"])
        for figures in systems.values()
        if {"predicted peak", "predicted step"} <= set(figures)
    )
    ends = {
        mode_name(system.split(",")[0].removeprefix("ours ")): (figures["peak allocated"], figures["step"])
        for system, figures in systems.items()
        if not system.startswith("ours auto") and "+stream" not in system
    }
    if {"recompute", "keep"} <= set(ends):
        axes.plot(*zip(ends["recompute"], ends["keep"]), color=color, linewidth=1, linestyle="--", alpha=0.6)
    if plans:
        axes.plot(*zip(*plans), marker="o", markersize=4, color=color, label=f"auto, {label}")
    if predicted:
        axes.plot(
            *zip(*predicted), marker="x", markersize=5, color=color, linestyle="none", label=f"predicted, {label}"
        )
    for name, point in ends.items():
        axes.plot(*point, marker="s", markersize=5, color=color, linestyle="none")
        offset, side = ((-5, 6), "right") if name == "offload" else ((5, 6), "left")
        axes.annotate(f"{name} all", point, textcoords="offset points", xytext=offset, ha=side, fontsize=8, color=color)


def _draw(workload: str, systems: dict[str, dict[str, float]], path: Path) -> None:
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 4.2), layout="constrained")
    axes = figure.add_subplot()
    for kind, (label, color) in _LAYERS.items():
        own = {
            system: figures
            for system, figures in systems.items()
            if system.startswith("ours ") and _layers_of(system) == kind
        }
        _draw_layers(axes, own, label=label, color=color)
    for system, figures in systems.items():
        if system.startswith("unsloth"):
            point = (figures["peak allocated"], figures["step"])
            axes.plot(*point, marker="^", markersize=6, color="tab:red", linestyle="none")
            axes.annotate(
                system.split(",")[0], point, textcoords="offset points", xytext=(5, -10), fontsize=8, color="tab:red"
            )
    axes.set_xlabel("peak device memory, GiB")
    axes.set_ylabel("optimizer step, ms")
    axes.set_title(workload, fontsize=10)
    axes.set_ylim(0, 1.12 * max(figures["step"] for figures in systems.values()))
    axes.set_xlim(0, 1.15 * max(figures["peak allocated"] for figures in systems.values()))
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="lower left")
    # No date and no random names in the file, so that the same rows give the same bytes.
    with rc_context({"svg.hashsalt": workload}):
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None, dpi=110)
