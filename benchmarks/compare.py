r"""Compare every system that can be imported, on the same packs, weights and adapters; write a table and a chart.

    python -m benchmarks.compare --row qwen3-14b-qlora
    python -m benchmarks.compare --workload qwen3-14b-qlora
    python -m benchmarks.compare --workload tiny --device cpu --systems plain ours

The script builds missing files, reports every system that cannot run with its error, and measures the others in the
order A B C ... A' | A' ... C B A: each setting in two processes, half of its timed steps in each. A' repeats our first
setting as the A/A control. Gradient check, clock and proof of training are the ruler's (benchmarks/train_step.py). If
the two medians of the control differ by more than 2 %, no row and no ratio is written. A run on a CPU shows only that
everything runs: no rows, no ratios, exit status 0 if every process ran and was checked.

In OUT: raw.jsonl (every process), log.txt (their output), clocks.csv, table.txt, rows.csv (columns of results.csv),
chart.png. `--row NAME` (benchmarks/ruler/rows.py) measures a headline: its settings of every system with 8-bit and with
32-bit moments, 200 timed steps each, and one setting of each system twice. A run that reached its time limit continues with the same --out: processes in raw.jsonl are not run again.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

# As in train_step: set before anything is imported.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("UNSLOTH_DISABLE_STATISTICS", "1")

from benchmarks.results import append_rows
from benchmarks.ruler.cases import Case
from benchmarks.ruler.clocks import ClockLog, read_clocks
from benchmarks.ruler.driver import LEAST_SECONDS, run_arms
from benchmarks.ruler.model_configs import num_weights
from benchmarks.ruler.pairs import (
    CONTROL,
    UNFINISHED,
    comparison_rows,
    comparison_table,
    control_of,
    find_unfinished,
    pool,
)
from benchmarks.ruler.report import read_records
from benchmarks.ruler.rows import OPTIMIZERS, ROWS, width_of
from benchmarks.ruler.systems import OUR_OPTIMIZERS, SYSTEMS, Setting, find_gap, missing_module, settings_of
from benchmarks.ruler.workloads import WORKLOADS, WorkloadFiles

_KEY = ("workload", "system", "mode", "label_share", "optimizer", "half", "repeat", "num_steps")
_SHARED_MEMORY = Path("/dev/shm")
NUM_STEPS, NUM_ROW_STEPS = 30, 200
# In a row, every system gets as many as plans and CUDA graphs need, so that runs have equal numbers of steps.
NUM_WARMUP, NUM_ROW_WARMUP = 6, 16


def main(arguments: list[str] | None = None) -> int:
    words = sys.argv[1:] if arguments is None else arguments
    options = read_options(words)
    if not options.no_chart and importlib.util.find_spec("matplotlib") is None:
        raise SystemExit("compare: the chart needs matplotlib: pip install matplotlib, or add --no-chart")
    # A driver that is told to stop ends its process first: SystemExit runs through the finally of run_arms.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    stamp = datetime.now().astimezone().strftime("%Y%m%d-%H%M%S")
    out: Path = options.out or Path("runs") / "compare" / f"{options.row or options.workload}-{stamp}"
    out.mkdir(parents=True, exist_ok=True)
    files = WorkloadFiles(options.root or default_root(options.workload), WORKLOADS[options.workload])
    print(f"compare: {options.workload} on {options.device}; weights in {files.folder}, results in {out}", flush=True)
    settings, gaps = find_settings(options.systems, device=options.device, row=options.row)
    for name, reason in gaps.items():
        print(f"not run: {name}: {reason}", flush=True)
    run = ComparisonRun(options, files=files, out=out)
    run.build()
    with ClockLog(out / "clocks.csv"):
        run.measure(settings)
    return _report(run, settings, gaps, command=" ".join(["python -m benchmarks.compare", *words]))


def read_options(words: Sequence[str]) -> argparse.Namespace:
    """Return the options; a row sets the workload, the optimizers, and how many steps are timed."""
    options = _parser().parse_args(words)
    row = ROWS.get(options.row)
    if row is not None:
        options.workload = row.workload
    if options.device is None:
        options.device = "cpu" if options.row == "tiny" else "cuda"
    options.optimizers = (options.optimizer,) if options.optimizer else OPTIMIZERS if row else OPTIMIZERS[:1]
    options.steps = options.steps or (NUM_ROW_STEPS if row else NUM_STEPS)
    options.warmup = options.warmup or (NUM_ROW_WARMUP if row else NUM_WARMUP)
    return options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compare", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    asked = parser.add_mutually_exclusive_group(required=True)
    asked.add_argument("--row", choices=list(ROWS), help="a headline of docs/numbers.md, all of it in one run")
    asked.add_argument("--workload", choices=[name for name, workload in WORKLOADS.items() if not workload.num_experts])
    parser.add_argument("--systems", nargs="+", default=list(SYSTEMS), choices=list(SYSTEMS))
    parser.add_argument(
        "--root",
        type=Path,
        help="where weights are built; by default a folder in memory where they fit, else runs/weights",
    )
    parser.add_argument("--out", type=Path, help="folder of results; by default a new one in runs/compare")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="cuda; cpu for --row tiny")
    parser.add_argument(
        "--optimizer",
        choices=OPTIMIZERS,
        help="adamw_8bit: moments in 8 bits, by bitsandbytes at the peers and by FusedAdamW in ours; adamw_fused: in "
        "32; by default 8 bits, and both with --row",
    )
    parser.add_argument(
        "--steps",
        type=int,
        help=f"timed steps of a setting, over both of its processes; {NUM_STEPS}, {NUM_ROW_STEPS} with --row, 10 where "
        "one exceeds 3 s",
    )
    parser.add_argument("--warmup", type=int, help=f"{NUM_WARMUP}, {NUM_ROW_WARMUP} with --row")
    parser.add_argument("--budget-s", type=float, default=7200.0, help="for all processes together")
    parser.add_argument("--arm-s", type=float, default=400.0, help="most for one process")
    parser.add_argument("--no-chart", action="store_true")
    return parser


def default_root(workload: str) -> Path:
    """Return where a workload's weights are built: shared memory where they fit twice, a folder of runs/ otherwise."""
    num_bytes = 2 * num_weights(WORKLOADS[workload].model_config)
    if _SHARED_MEMORY.is_dir():
        root = _SHARED_MEMORY / "fastft"
        is_there = WorkloadFiles(root, WORKLOADS[workload]).is_built()
        if is_there or shutil.disk_usage(_SHARED_MEMORY).free > 2 * num_bytes:
            return root
    return Path("runs") / "weights"


def find_settings(
    systems: Iterable[str], *, device: str, row: str | None = None
) -> tuple[list[tuple[str, str]], dict[str, str]]:
    """Return (arm, mode) of every setting that can run here, in the order of the first pass, and why others
    cannot, by their names. A row has settings of its own.
    """
    of_row = ROWS[row].settings if row else None
    found, gaps = [], {}
    for name in (name for name in SYSTEMS if name in set(systems) & set(SYSTEMS if of_row is None else of_row)):
        system = SYSTEMS[name]
        settings = settings_of(system, device=device)
        if of_row is not None:
            settings = tuple(
                Setting(mode, needs="liger_kernel" if "liger" in mode else "") for mode in of_row.get(name, ())
            )
        reason = find_gap(system)
        if reason:
            gaps[name] = reason
            continue
        for setting in settings:
            missing = missing_module(setting)
            if missing:
                gaps[f"{name} {setting.mode}"] = f"ModuleNotFoundError: No module named {missing!r}"
            else:
                found.append((system.arm, setting.mode))
    return found, gaps


class ComparisonRun:
    """The processes of one comparison.

    Args:
        options: Of the command line.
        files: The workload.
        out: Folder of results.
    """

    def __init__(self, options: argparse.Namespace, *, files: WorkloadFiles, out: Path) -> None:
        self.options = options
        self.files = files
        self.out = out
        self.raw = out / "raw.jsonl"
        self._template = Case(
            options.workload,
            "",
            "",
            optimizer=options.optimizers[0],
            num_warmup=options.warmup,
            num_steps=max(1, (options.steps + 1) // 2),
        )
        self._deadline = time.monotonic() + options.budget_s
        self._longest_s = LEAST_SECONDS
        self._has_asked_for_reference = False

    def build(self) -> None:
        """Write the workload where it is missing, in a process of its own, so that nothing of it stays on the device.

        Raises:
            CalledProcessError: The build failed; it has said why.
        """
        if self.files.is_built():
            return
        words = [
            "build",
            "--workload",
            self.options.workload,
            "--root",
            str(self.files.folder.parent),
            "--device",
            self.options.device,
        ]
        subprocess.run([sys.executable, "-m", "benchmarks.train_step", *words], check=True)

    def measure(self, settings: Sequence[tuple[str, str]]) -> None:
        """Run the first pass, the control, and all of it backwards; in a row, a control of each system.

        Args:
            settings: Arm and mode, in the order of the first pass.
        """
        optimizers = self.options.optimizers
        first = [self._case(system, mode, optimizer) for system, mode in settings for optimizer in optimizers]
        for number, case in enumerate(first):
            # The first case leaves the gradients that all others are judged by.
            leaves_reference = number == 0 and case.system == "plain"
            first[number] = case if leaves_reference else replace(case, is_judged=True)
            self._run(first[number])
        passed = [case for case in first if self._row_of(case)]
        # Ours where it is there, else whoever passed.
        ours_first = sorted(passed, key=lambda case: case.system != "ours")
        firsts: dict[str, Case] = {}
        for case in ours_first:
            firsts.setdefault(case.system, case)
        for case in firsts.values() if self.options.row else ours_first[:1]:
            passed.append(replace(case, repeat=CONTROL, is_judged=True))
            self._run(passed[-1])
        for case in reversed(passed):
            if self._row_of(case):
                self._run(replace(case, half=2, is_judged=True))

    def _case(self, system: str, mode: str, asked: str) -> Case:
        """Return the first process of a setting; on a GPU ours steps with its own optimizer of as many bits."""
        optimizer = OUR_OPTIMIZERS.get(asked, asked) if system == "ours" and self.options.device == "cuda" else asked
        return replace(self._template, system=system, mode=mode, half=1, optimizer=optimizer)

    def records(self) -> list[dict[str, Any]]:
        """Return what all processes have left, oldest first."""
        return read_records(self.raw)

    def _run(self, case: Case) -> None:
        """Run one process, unless it has been run; where the reference is gone, the plain arm leaves it first."""
        if self._find(case) is not None:
            return
        if case.is_judged and not self._has_asked_for_reference and not self.files.reference(case.label_share).exists():
            self._has_asked_for_reference = True
            reference = replace(self._template, system="plain", mode="recompute", num_warmup=1, num_steps=0)
            self._start(reference)
        self._start(case)

    def _start(self, case: Case) -> None:
        left, start = self._deadline - time.monotonic(), time.monotonic()
        run_arms(
            [[case]],
            root=self.files.folder.parent,
            raw=self.raw,
            log=self.out / "log.txt",
            device=self.options.device,
            # A process that would be cut off in the middle is left for the next call.
            budget_seconds=left if left >= self._longest_s else 0.0,
            arm_seconds=self.options.arm_s,
            module="benchmarks.moe" if self.files.workload.num_experts else "benchmarks.train_step",
        )
        self._longest_s = max(self._longest_s, time.monotonic() - start)

    def _find(self, case: Case) -> Mapping[str, Any] | None:
        """Return the record of a process that needs no other try."""
        own = [record for record in self.records() if all(record[name] == getattr(case, name) for name in _KEY)]
        return own[-1] if own and not own[-1]["reason"].startswith(UNFINISHED) else None

    def _row_of(self, case: Case) -> bool:
        record = self._find(case)
        return record is not None and not record["reason"]


def _report(run: ComparisonRun, settings: Sequence[tuple[str, ...]], gaps: Mapping[str, str], *, command: str) -> int:
    """Write table, rows and chart; return 0 where rows were written, on a CPU where everything ran."""
    device, workload = run.options.device, run.options.workload
    rows = pool(run.records(), clocks=read_clocks(run.out / "clocks.csv"))
    hardware = next((row["versions"].get("device", "cpu") for row in rows if "versions" in row), device)
    title = f"{workload}, {WORKLOADS[workload].max_tokens:,} tokens a step, {hardware}"
    widths = [width_of({"optimizer": name}) for name in run.options.optimizers]
    settings = [(*setting, width) for setting in settings for width in widths]
    table = f"{title}\n{comparison_table(rows, gaps, settings=settings, device=device)}"
    (run.out / "table.txt").write_text(table + "\n", encoding="utf-8")
    print(table, flush=True)
    unfinished = find_unfinished(rows, settings)
    if unfinished:
        print(f"not finished: the same command with --out {run.out} goes on from here", flush=True)
    figures = [] if device == "cpu" else comparison_rows(rows, command=command)
    path = run.out / "rows.csv"
    # Made anew from raw.jsonl, which may have grown since.
    path.unlink(missing_ok=True)
    if figures:
        append_rows(figures, path=path)
    if not run.options.no_chart:
        from benchmarks.ruler.picture import draw_comparison

        draw_comparison(rows, gaps, device=device, title=title, path=run.out / "chart.png")
        print(f"chart: {run.out / 'chart.png'}", flush=True)
    if device == "cpu":
        return _report_cpu(rows, is_finished=not unfinished)
    print(f"rows: {path}: {len(figures)}" if figures else f"rows: none; {control_of(rows).describe()}", flush=True)
    return 0 if figures else 1


def _report_cpu(rows: Sequence[Mapping[str, Any]], *, is_finished: bool) -> int:
    """Say whether everything ran, the case that is measured twice with it; return 0 if it did."""
    failed = [row["title"] for row in rows if row["reason"]]
    if is_finished and not failed and any(row["repeat"] for row in rows):
        print(
            f"everything ran: {len(rows)} cases in two processes each, gradients judged; no row is written on a CPU",
            flush=True,
        )
        return 0
    print(f"not everything ran: {', '.join(failed) or 'some cases are still to be measured'}", flush=True)
    return 1


if __name__ == "__main__":
    sys.exit(main())
