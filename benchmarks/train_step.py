r"""The ruler: one training step of every system on the same packs, weights and adapters; time, memory, host syncs.

    python -m benchmarks.train_step build --workload qwen3-14b-qlora --root /dev/shm/fastft
    python -m benchmarks.train_step run --workload qwen3-14b-qlora --root /dev/shm/fastft --out runs/ruler \
        --arms plain:recompute,keep+liger ours:recompute+liger,keep+liger unsloth:unsloth unsloth:off
        trl:recompute+liger
    python -m benchmarks.train_step table runs/ruler/raw.jsonl

An arm is one process: SYSTEM:MODE[@LABEL_SHARE][/OPTIMIZER][,...]. Before a case is timed, one step on the first pack
must give the plain arm's gradients (benchmarks/ruler/judge.py). Then: warm-up (6 steps, the last one counts host
syncs), 30 timed steps (10 if a step exceeds 3 s), median, p10, p90 of the time between the ends of steps by CUDA
events, with batch copy, clipping and optimizer; peaks of the timed steps. Timed steps must prove that they train
(benchmarks/ruler/proof.py). Plain runs first, because it writes the reference. Workloads named "-full" train all
weights instead of adapters. benchmarks/compare.py runs all systems by one command.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path

# Set before anything is imported, so that no system uses the network. Each system sets the allocator itself.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("UNSLOTH_DISABLE_STATISTICS", "1")


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    return {"build": _build, "run": _run, "arm": _arm, "table": _table}[options.command](options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    build = commands.add_parser("build", help="write models, adapters and token files")
    build.add_argument("--workload", nargs="+", required=True)
    build.add_argument(
        "--grow-host-gib",
        type=int,
        default=0,
        help="host memory to touch once, so that a growing machine grants it to peers",
    )
    run = commands.add_parser("run", help="run arms and print the table")
    run.add_argument("--workload", required=True)
    run.add_argument("--arms", nargs="+", required=True)
    run.add_argument("--out", type=Path, required=True, help="folder for raw.jsonl, log.txt, rows.csv and table.txt")
    run.add_argument("--steps", type=int, default=30)
    run.add_argument("--warmup", type=int, default=6)
    run.add_argument("--optimizer", default="adamw_8bit", choices=("adamw_8bit", "adamw_fused"))
    run.add_argument(
        "--diagnose", action="store_true", help="time refused cases for the raw log; they still get no row"
    )
    run.add_argument("--budget-s", type=float, default=3600.0)
    run.add_argument("--arm-s", type=float, default=400.0)
    arm = commands.add_parser("arm", help="one process of run")
    arm.add_argument("--cases", required=True)
    arm.add_argument("--raw", type=Path, required=True)
    table = commands.add_parser("table", help="print the table of raw logs")
    table.add_argument("raw", type=Path, nargs="+")
    for command in (build, run, arm):
        command.add_argument("--root", type=Path, required=True, help="folder of the built workloads, in memory")
        command.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    return parser


def _build(options: argparse.Namespace) -> int:
    from benchmarks.ruler.building import build
    from benchmarks.ruler.cases import base_dtype
    from benchmarks.ruler.workloads import WORKLOADS

    for name in options.workload:
        seconds = build(
            WORKLOADS[name],
            root=options.root,
            device=options.device,
            dtype=base_dtype(is_cuda=options.device == "cuda"),
        )
        print(f"build: {name}: {json.dumps(seconds)}", flush=True)
    if options.grow_host_gib:
        import numpy as np

        start = time.perf_counter()
        np.full(options.grow_host_gib * 2**30, 1, dtype=np.uint8)
        print(
            f"build: touched {options.grow_host_gib} GiB of host memory in {time.perf_counter() - start:.0f} s",
            flush=True,
        )
    return 0


def _run(options: argparse.Namespace) -> int:
    from benchmarks.results import append_rows
    from benchmarks.ruler.cases import Case
    from benchmarks.ruler.driver import check_references, parse_arm, run_arms
    from benchmarks.ruler.report import read_records, render_table, result_rows

    template = Case(
        options.workload,
        "",
        "",
        optimizer=options.optimizer,
        num_warmup=options.warmup,
        num_steps=options.steps,
        diagnose=options.diagnose,
    )
    arms = [parse_arm(text, template=template) for text in options.arms]
    check_references(arms, root=options.root)
    # On SIGTERM the driver ends its arm first: SystemExit runs the finally block of run_arms.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    options.out.mkdir(parents=True, exist_ok=True)
    raw = options.out / "raw.jsonl"
    num_before = len(read_records(raw))
    run_arms(
        arms,
        root=options.root,
        raw=raw,
        log=options.out / "log.txt",
        device=options.device,
        budget_seconds=options.budget_s,
        arm_seconds=options.arm_s,
    )
    records = read_records(raw)
    command = "python -m benchmarks.train_step " + " ".join(sys.argv[1:])
    append_rows(result_rows(records[num_before:], command=command), path=options.out / "rows.csv")
    table = render_table(records)
    (options.out / "table.txt").write_text(table + "\n", encoding="utf-8")
    print(table, flush=True)
    return 0


def _arm(options: argparse.Namespace) -> int:
    cases = json.loads(options.cases)
    system = cases[0]["system"]
    if system == "unsloth":
        # Unsloth patches torch and transformers on import, so it must be imported first.
        import unsloth  # noqa: F401

    from importlib import import_module

    from benchmarks.ruler.cases import Case, CaseLog
    from benchmarks.ruler.workloads import WORKLOADS, WorkloadFiles

    arm = import_module(f"benchmarks.ruler.arms.{system}")
    files = WorkloadFiles(options.root, WORKLOADS[cases[0]["workload"]])
    arm.run([Case(**case) for case in cases], files=files, log=CaseLog(options.raw), device=options.device)
    return 0


def _table(options: argparse.Namespace) -> int:
    from benchmarks.ruler.report import read_records, render_table

    print(render_table([record for path in options.raw for record in read_records(path)]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
