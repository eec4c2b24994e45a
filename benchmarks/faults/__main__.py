"""Plant faults in the default stack and in ours, and print the number of failed trials.

    python -m benchmarks.faults run --out runs/faults                     all of them, about 14 minutes on two CPU cores
    python -m benchmarks.faults run --quick --only R2 R3 --out runs/quick a few trials of some; rows stay in the folder

Rows are appended to benchmarks/faults.csv, from which ``python docs/generate.py`` makes the table of
docs/reliability.md. POSIX only.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import os
import shutil
import sys
import time
import warnings
from datetime import date
from pathlib import Path
from typing import NamedTuple

from benchmarks.faults.table import ROWS_PATH, STACKS, TITLES, append_rows, make_row, render_table


class Fault(NamedTuple):
    """Where the trials of a fault are, and how many there are in a whole run and in a quick one."""

    module: str
    function: str
    num_trials: int
    num_quick: int


FAULTS = {
    "R1": Fault("saves", "kill_in_save", 100, 4),
    "R2": Fault("saves", "damage", 1250, 50),
    "R3": Fault("saves", "impossible", 7, 7),
    "R4": Fault("resume", "every_step", 20, 2),
    "R5": Fault("resume", "every_example", 48, 3),
    "R6": Fault("resume", "signals", 30, 2),
    "R7": Fault("steps", "bad_steps", 40, 4),
    "R8": Fault("rows", "bad_rows", 90, 3),
    "R17": Fault("ranks", "hurt_ranks", 7, 1),
    "R18": Fault("inputs", "hostile", 10_000, 4),
    # Options, each with some twenty values.
    "R22": Fault("inputs", "fuzzed", 10_000, 1),
}
PACKAGES = ("torch", "lightning", "transformers", "peft", "datasets", "torchdata", "jsonargparse")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="plant faults and print the table")
    run.add_argument("--only", nargs="+", choices=list(FAULTS), default=list(FAULTS), help="these faults (all)")
    run.add_argument("--stacks", nargs="+", choices=STACKS, default=list(STACKS), help="these stacks (both)")
    run.add_argument("--quick", action="store_true", help="a few trials of each; rows go to OUT/faults.csv")
    run.add_argument(
        "--out", type=Path, required=True, help="folder for what children write; its subfolders are emptied"
    )
    run.add_argument(
        "--rows", type=Path, help=f"file that rows are appended to ({ROWS_PATH}, OUT/faults.csv with --quick)"
    )
    return parser


def run(options: argparse.Namespace) -> int:
    """Run the trials, store a row after each fault and stack, and return 1 if one of ours ended badly."""
    rows_path = options.rows or (options.out / "faults.csv" if options.quick else ROWS_PATH)
    origin = {
        "date": date.today().isoformat(),
        "versions": " ".join(f"{name} {_version(name)}" for name in PACKAGES),
        "command": f"python -m benchmarks.faults {options.words}",
    }
    rows = []
    for name in options.only:
        fault = FAULTS[name]
        function = getattr(importlib.import_module(f"benchmarks.faults.{fault.module}"), fault.function)
        for stack in options.stacks:
            folder = options.out.absolute() / f"{name}-{stack}"
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            begin = time.monotonic()
            verdicts = function(folder, stack=stack, num_trials=fault.num_quick if options.quick else fault.num_trials)
            row = make_row(name, stack, verdicts, seconds=time.monotonic() - begin, **origin)
            print(
                f"{name} {TITLES[name]}\n    {stack}: {row['bad']} of {row['trials']} ended badly, {row['seconds']} s. "
                f"{row['how']}",
                flush=True,
            )
            append_rows([row], path=rows_path)
            rows.append(row)
    print("\n" + render_table(rows))
    return int(any(row["stack"] == "ours" and row["bad"] != "0" for row in rows))


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "-"


def main(words: list[str]) -> int:
    """Parse the command line, and keep the hub and the threads of libraries out of the trials."""
    options = _parser().parse_args(words)
    options.words = " ".join(words)
    # Read when the libraries are first imported, which the modules of the faults do.
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    warnings.simplefilter("ignore")
    return run(options)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
