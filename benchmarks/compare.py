r"""Compare every system that can be imported, on the same packs, weights and adapters; write a table and a chart.

    python -m benchmarks.compare --row qwen3-14b-qlora
    python -m benchmarks.compare --workload qwen3-14b-qlora
    python -m benchmarks.compare --workload tiny --device cpu --arms plain ours

The script builds missing files, reports every system that cannot run with its error, and measures the others in two
passes, A B C | C B A, and A' at the end: half of the timed steps of a setting in each. A' repeats our default setting
as the A/A control. Gradient check, clock and proof of training are the ruler's (benchmarks/train_step.py). If the
medians of the control differ by more than 2 %, no row and no ratio is written. A run on a CPU shows only that
everything runs: no rows, no ratios, exit status 0 if every process ran and was checked.

In OUT: raw.jsonl (every case, written when it ends), log.txt (their output), clocks.csv, table.txt, rows.csv (columns
of results.csv), NAME-*.jsonl.gz (all of raw.jsonl with versions, driver and clocks, for benchmarks/logs), chart.png.
`--row NAME` (benchmarks/ruler/rows.py) measures a headline: its settings of every system with 8-bit and with 32-bit
moments, and one setting of each system twice. In five minutes of a GPU:

    python -m benchmarks.compare --row qwen3-0.6b-lora --passes 1 --steps 60 --case-s 2.5 --warmup 5 --budget-s 270

A run that reached its time limit continues with the same --out; on another machine with --resume LOG.
"""

from __future__ import annotations

import argparse
import difflib
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

# As in train_step: set before anything is imported.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("UNSLOTH_DISABLE_STATISTICS", "1")

from benchmarks.results import append_rows
from benchmarks.ruler.cases import Case
from benchmarks.ruler.clocks import ClockLog, find_card, read_clocks
from benchmarks.ruler.driver import LEAST_SECONDS, run_arms
from benchmarks.ruler.logs import join_logs, read_log, write_log
from benchmarks.ruler.model_configs import num_weights
from benchmarks.ruler.pairs import (
    CONTROL,
    UNFINISHED,
    comparison_table,
    control_of,
    find_unfinished,
    pool,
)
from benchmarks.ruler.report import read_records
from benchmarks.ruler.rows import NUM_ROW_STEPS, OPTIMIZERS, ROWS, width_of
from benchmarks.ruler.systems import OUR_FORMS, SYSTEMS, Setting, find_gap, missing_module, settings_of, system_of
from benchmarks.ruler.workloads import WORKLOADS, WorkloadFiles

_KEY = ("workload", "system", "mode", "label_share", "optimizer", "half", "repeat")
_SHARED_MEMORY = Path("/dev/shm")
NUM_STEPS = 30
NUM_WARMUP = 6


def main(arguments: list[str] | None = None) -> int:
    words = sys.argv[1:] if arguments is None else arguments
    options = read_options(words)
    if not options.no_chart and importlib.util.find_spec("matplotlib") is None:
        raise SystemExit("compare: the chart needs matplotlib: pip install matplotlib, or add --no-chart")
    # On SIGTERM the driver ends its process first: SystemExit runs the finally block of run_arms.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    stamp = datetime.now().astimezone().strftime("%Y%m%d-%H%M%S")
    out: Path = options.out or Path("runs") / "compare" / f"{options.row or options.workload}-{stamp}"
    out.mkdir(parents=True, exist_ok=True)
    files = WorkloadFiles(options.root or default_root(options.workload), WORKLOADS[options.workload])
    print(f"compare: {options.workload} on {options.device}; weights in {files.folder}, results in {out}", flush=True)
    settings, gaps = find_settings(SYSTEMS, device=options.device, row=options.row)
    chosen = [setting for setting in settings if is_chosen(setting, options.arms)]
    check_arms(options.arms, settings, gaps, name=options.row or options.workload)
    for name, reason in gaps.items():
        print(f"not run: {name}: {reason}", flush=True)
    if options.resume and not (out / "raw.jsonl").exists():
        num_others = join_logs(options.resume, out=out, card=find_card())
        if num_others:
            print(f"left out: {num_others} records of another card, which are measured again", flush=True)
    run = ComparisonRun(options, files=files, out=out)
    run.build()
    with ClockLog(out / "clocks.csv"):
        run.measure(chosen)
    wanted = settings if options.row else of_named_systems(settings, options.arms)
    return _report(run, wanted, gaps, command=describe_command(words))


def describe_command(words: Sequence[str]) -> str:
    """Return the command for rows and logs, without folders of this machine.

    Example:
        >>> describe_command(["--row", "tiny", "--root", "a/weights", "--out", "b", "--resume", "c/log.jsonl.gz"])
        'python -m benchmarks.compare --row tiny --root ROOT --out runs --resume log.jsonl.gz'
    """
    shown, option = ["python -m benchmarks.compare"], ""
    for word in words:
        if word.startswith("--"):
            option = word
        elif option == "--resume":
            word = Path(word).name
        else:
            word = {"--root": "ROOT", "--out": "runs"}.get(option, word)
        shown.append(word)
    return " ".join(shown)


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
    unknown = [arm for arm in options.arms if arm.partition(":")[0] not in SYSTEMS]
    if unknown:
        raise SystemExit(f"compare: no system {', '.join(unknown)}; there are {', '.join(SYSTEMS)}")
    return options


class _ShortErrors(argparse.ArgumentParser):
    """Exit with the error only, because the usage fills a screen."""

    def error(self, message: str) -> NoReturn:
        unknown = re.match(r"unrecognized arguments: (--[\w-]+)", message)
        known = [option for option in self._option_string_actions if option.startswith("--")]
        near = difflib.get_close_matches(unknown[1], known, n=1) if unknown else []
        advice = f" Did you mean {near[0]}?" if near else ""
        self.exit(2, f"compare: {message}.{advice} All options: {self.prog} --help\n")


def _parser() -> argparse.ArgumentParser:
    parser = _ShortErrors(
        prog="python -m benchmarks.compare", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    asked = parser.add_mutually_exclusive_group(required=True)
    asked.add_argument("--row", choices=list(ROWS), help="measure a whole headline of docs/numbers.md in one run")
    asked.add_argument("--workload", choices=[name for name, workload in WORKLOADS.items() if not workload.num_experts])
    parser.add_argument(
        "--arms",
        "--systems",
        nargs="+",
        default=list(SYSTEMS),
        metavar="SYSTEM[:MODE]",
        help=f"measure these only; all by default. Systems: {', '.join(SYSTEMS)}",
    )
    parser.add_argument(
        "--resume",
        nargs="+",
        type=Path,
        default=[],
        metavar="LOG",
        help="logs of earlier calls for the same row, whose cases are not measured again; rows are written only if the "
        "A/A control of ours agrees over all calls; those of another card are left out",
    )
    parser.add_argument(
        "--root",
        type=Path,
        help="folder for weights; by default in memory if they fit, else runs/weights",
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
        help=f"timed steps of a setting, over all passes; {NUM_STEPS}, {NUM_ROW_STEPS} with --row, 10 where "
        "one exceeds 3 s",
    )
    parser.add_argument(
        "--warmup", type=int, default=NUM_WARMUP, help="warm-up steps; ours runs as many as plans and graphs need"
    )
    parser.add_argument(
        "--case-s",
        type=float,
        default=0.0,
        help="limit of the timed steps of a case in one process, at least 10 steps; 0 for all steps",
    )
    parser.add_argument(
        "--passes", type=int, default=2, help="processes of a setting, each with its share of the steps"
    )
    parser.add_argument("--budget-s", type=float, default=7200.0, help="limit of all processes together")
    parser.add_argument("--arm-s", type=float, default=400.0, help="limit of one process")
    parser.add_argument("--no-chart", action="store_true")
    return parser


def default_root(workload: str) -> Path:
    """Return the folder for a workload's weights: shared memory if they fit twice, otherwise a folder of runs/."""
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
    """Return (arm, mode) of every setting that can run here, in the order of the first pass, and why others cannot, by
    their names. A row has its own settings.
    """
    of_row = ROWS[row].settings if row else None
    chosen, gaps = [], {}
    for name in (name for name in SYSTEMS if name in set(systems)):
        system = SYSTEMS[name]
        if of_row is not None and name not in of_row and system.arm:
            continue
        settings = settings_of(system, device=device)
        if of_row is not None:
            settings = tuple(
                Setting(mode, needs="liger_kernel" if "liger" in mode else "") for mode in of_row.get(name, ())
            )
        reason = find_gap(system, device=device)
        if reason:
            gaps[name] = reason
            continue
        for setting in settings:
            missing = missing_module(setting)
            if missing:
                gaps[f"{name} {setting.mode}"] = f"ModuleNotFoundError: No module named {missing!r}"
            else:
                chosen.append((system.arm, setting.mode))
    return chosen, gaps


def is_chosen(setting: tuple[str, str], arms: Iterable[str]) -> bool:
    """Return whether --arms names a setting or its system.

    Example:
        >>> is_chosen(("trl", "keep+liger"), ["trl+liger"]), is_chosen(("trl", "keep"), ["trl+liger", "trl:recompute"])
        (True, False)
    """
    name = system_of({"system": setting[0], "mode": setting[1]})
    return name in arms or f"{name}:{setting[1]}" in arms


def check_arms(arms: Iterable[str], settings: Iterable[tuple[str, str]], gaps: Mapping[str, str], *, name: str) -> None:
    """Check that --arms names settings of the row or workload, or what cannot run here.

    Raises:
        SystemExit: It names another setting.
    """
    able = [f"{system_of({'system': system, 'mode': mode})}:{mode}" for system, mode in settings]
    known = {*able, *(gap.replace(" ", ":") for gap in gaps)}
    unknown = [arm for arm in arms if ":" in arm and arm not in known and arm.partition(":")[0] not in gaps]
    if unknown:
        raise SystemExit(f"compare: {name} has no setting {', '.join(unknown)}; there are {', '.join(able)}")


def of_named_systems(settings: Iterable[tuple[str, str]], arms: Iterable[str]) -> list[tuple[str, str]]:
    """Return all settings of the systems that --arms names; the best of a system is known only after all are measured.

    Example:
        >>> of_named_systems([("ours", "keep"), ("ours", "recompute"), ("trl", "recompute")], ["ours:keep"])
        [('ours', 'keep'), ('ours', 'recompute')]
    """
    named = {arm.partition(":")[0] for arm in arms}
    return [setting for setting in settings if system_of({"system": setting[0], "mode": setting[1]}) in named]


class ComparisonRun:
    """The processes of one comparison.

    Args:
        options: Options of the command line.
        files: The workload.
        out: Folder of results.
    """

    def __init__(self, options: argparse.Namespace, *, files: WorkloadFiles, out: Path) -> None:
        self.options = options
        self.files = files
        self.out = out
        self.raw = out / "raw.jsonl"
        calls = [record["call"] for record in self.records()]
        self._template = Case(
            options.workload,
            "",
            "",
            num_warmup=options.warmup,
            num_steps=-(-options.steps // options.passes),
            most_seconds=options.case_s,
            call=max(calls, default=0) + 1,
        )
        self._deadline = time.monotonic() + options.budget_s
        # Time reserved for the control, without which a call cannot be used.
        self._control_seconds = 2 * LEAST_SECONDS
        self._has_asked_for_reference = False

    def build(self) -> None:
        """Write the workload if it is missing, in a separate process, so that none of its memory stays on the device.

        Raises:
            CalledProcessError: The build failed; its output has the reason.
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
        """Run the processes of every pass, in reverse order in even passes, then the control of ours.

        Args:
            settings: Arm and mode, in the order of the first pass.
        """
        processes = list_processes(settings)
        by_system = {system_of({"system": arm, "mode": mode}): (arm, mode) for arm, mode in reversed(settings)}
        firsts = set(by_system.values())
        for number in range(1, self.options.passes + 1):
            for system, modes in processes if number % 2 else reversed(processes):
                cases = [self._case(system, mode, name) for name in self.options.optimizers for mode in modes]
                # A setting without a row in the first pass has none in the second.
                cases = [replace(case, half=number) for case in cases if number == 1 or self._row_of(case)]
                # Ours is repeated in its own process, at the end.
                if cases and system != "ours" and (system, modes[0]) in firsts:
                    cases.append(replace(cases[0], repeat=CONTROL))
                self._run(cases)
        ours = [self._case("ours", mode, self.options.optimizers[0]) for mode in self._our_modes(settings)]
        able = [case for case in ours if self._find(case) is None or self._row_of(case)]
        # Every call repeats one case, which shows whether calls may be joined: that of earlier calls, else one with a row.
        repeated = {(record["mode"], record["optimizer"]) for record in self.records() if record["repeat"]}
        able.sort(key=lambda case: ((case.mode, case.optimizer) not in repeated, not self._row_of(case)))
        self._control_seconds = 0.0
        self._run([replace(case, repeat=CONTROL, half=case.call) for case in able[:1]])

    def _our_modes(self, settings: Sequence[tuple[str, str]]) -> list[str]:
        """Return the modes of ours, also if this call measures only other systems."""
        row = ROWS.get(self.options.row)
        return list(row.settings["ours"]) if row else [mode for system, mode in settings if system == "ours"]

    def _case(self, system: str, mode: str, optimizer_name: str) -> Case:
        """Return the first process of a setting; on a GPU ours has its own optimizer with moments of equal width."""
        optimizer = (
            OUR_FORMS.get(optimizer_name, optimizer_name)
            if system == "ours" and self.options.device == "cuda"
            else optimizer_name
        )
        return replace(self._template, system=system, mode=mode, half=1, optimizer=optimizer)

    def records(self) -> list[dict[str, Any]]:
        """Return the records of all processes, oldest first."""
        return read_records(self.raw)

    def _run(self, cases: Sequence[Case]) -> None:
        """Run the cases of one process that have not been run; if the reference is missing, plain writes it first."""
        left = [case for case in cases if self._find(case) is None]
        if not left:
            return
        has_reference = self.files.reference(1.0).exists()
        # Liger's loss is no reference.
        leaves_reference = left[0].system == "plain" and "liger" not in left[0].mode and not has_reference
        if not leaves_reference and not has_reference and not self._has_asked_for_reference:
            self._has_asked_for_reference = True
            reference = ROWS[self.options.row].settings["plain"][0] if self.options.row else "recompute"
            self._start([replace(self._template, system="plain", mode=reference, num_warmup=1, num_steps=0)])
        left = [
            replace(case, is_fresh=number == 0, is_judged=number > 0 or not leaves_reference)
            for number, case in enumerate(left)
        ]
        self._start(left)

    def _start(self, cases: Sequence[Case]) -> None:
        start = time.monotonic()
        run_arms(
            [cases],
            root=self.files.folder.parent,
            raw=self.raw,
            log=self.out / "log.txt",
            device=self.options.device,
            budget_seconds=self._deadline - start - self._control_seconds,
            arm_seconds=self.options.arm_s,
            module="benchmarks.moe" if self.files.workload.num_experts else "benchmarks.train_step",
        )
        if cases[0].system == "ours" and self._control_seconds:
            # The time of one case, and of the start of the process, which its cases share.
            seconds = time.monotonic() - start
            self._control_seconds = min(seconds, 1.5 * LEAST_SECONDS + seconds / len(cases))

    def _find(self, case: Case) -> Mapping[str, Any] | None:
        """Return the record of a process that need not be tried again."""
        own = [record for record in self.records() if all(record[name] == getattr(case, name) for name in _KEY)]
        return own[-1] if own and not own[-1]["reason"].startswith(UNFINISHED) else None

    def _row_of(self, case: Case) -> bool:
        record = self._find(case)
        return record is not None and not record["reason"]


def list_processes(settings: Sequence[tuple[str, str]]) -> list[tuple[str, list[str]]]:
    """Return arm and modes of each process; TRL and Unsloth prepare a model for one mode only.

    Example:
        >>> list_processes([("ours", "keep"), ("ours", "recompute"), ("trl", "keep"), ("trl", "recompute")])
        [('ours', ['keep', 'recompute']), ('trl', ['keep']), ('trl', ['recompute'])]
    """
    processes: dict[tuple[str, str], list[str]] = {}
    for system, mode in settings:
        processes.setdefault((system, "" if system in ("plain", "ours") else mode), []).append(mode)
    return [(system, modes) for (system, _), modes in processes.items()]


def _report(run: ComparisonRun, settings: Sequence[tuple[str, ...]], gaps: Mapping[str, str], *, command: str) -> int:
    """Write table, rows, log and chart; return 0 if rows were written, or on a CPU if everything ran."""
    device, workload, out = run.options.device, run.options.workload, run.out
    records, clocks = run.records(), read_clocks(out / "clocks.csv")
    rows = pool(records, clocks=clocks, num_passes=run.options.passes)
    hardware = next((row["versions"].get("device", "cpu") for row in rows if "versions" in row), device)
    title = f"{workload}, {WORKLOADS[workload].max_tokens:,} tokens a step, {hardware}"
    widths = [width_of({"optimizer": name}) for name in run.options.optimizers]
    settings = [(*setting, width) for setting in settings for width in widths]
    table = f"{title}\n{comparison_table(rows, gaps, settings=settings, device=device)}"
    (out / "table.txt").write_text(table + "\n", encoding="utf-8")
    print(table, flush=True)
    unfinished = find_unfinished(rows, settings)
    if unfinished:
        print(f"not finished: the same command with --out {out} goes on from here", flush=True)
    log = write_log(out, name=run.options.row or workload, command=command, gaps=gaps, num_passes=run.options.passes)
    print(f"log: {log}", flush=True)
    figures = [] if device == "cpu" else read_log(log).rows()
    path = out / "rows.csv"
    # Computed again from raw.jsonl, which may have more records by now.
    path.unlink(missing_ok=True)
    if figures:
        append_rows(figures, path=path)
    if not run.options.no_chart:
        from benchmarks.ruler.picture import draw_comparison

        draw_comparison(rows, gaps, device=device, title=title, path=out / "chart.png")
        print(f"chart: {out / 'chart.png'}", flush=True)
    if device == "cpu":
        return _report_cpu(rows, is_finished=not unfinished)
    print(f"rows: {path}: {len(figures)}" if figures else f"rows: none; {control_of(rows).describe()}", flush=True)
    return 0 if figures else 1


def _report_cpu(rows: Sequence[Mapping[str, Any]], *, is_finished: bool) -> int:
    """Print whether everything ran, including the repeated case; return 0 if it did."""
    failed = [row["title"] for row in rows if row["reason"]]
    if is_finished and not failed and any(row["repeat"] for row in rows):
        print(
            f"everything ran: {len(rows)} cases, gradients judged; no row is written on a CPU",
            flush=True,
        )
        return 0
    print(f"not everything ran: {', '.join(failed) or 'some cases are still to be measured'}", flush=True)
    return 1


if __name__ == "__main__":
    sys.exit(main())
