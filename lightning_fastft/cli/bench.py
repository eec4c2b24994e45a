"""``fastft bench``: compare with other systems on the workload that fits this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import lightning_fastft
from lightning_fastft.cli.words import take_option
from lightning_fastft.core.errors import MissingDependencyError, OptionError
from lightning_fastft.core.files import find_write_obstacle

_GIB = 2**30


# Workloads and the GiB of device memory that they need, largest first. The baseline of all comparisons, transformers +
# PEFT with recompute, must fit: its peak is 26.9 GiB in the first workload and 15.6 in the last (H200,
# benchmarks/train_step.py). The first is built from 27.5 GiB of bf16 weights.
_FITS = (("qwen3-14b-qlora", 40.0), ("qwen3-8b-qlora", 30.0), ("qwen3-0.6b-lora", 20.0))
_CPU_WORKLOAD = "tiny"
# Where benchmarks.compare makes a folder for each comparison, in the current folder.
_RESULTS = Path("runs/compare")


def run_bench(words: Sequence[str]) -> int:
    """Run ``python -m benchmarks.compare`` on the workload that fits this machine and return its exit status.

    The status is 0 if rows were written; without a GPU, if all systems ran.

    Args:
        words: ``--workload NAME`` (default: the largest that fits the GPU, or a model of two layers without a GPU),
            ``--out FOLDER`` (default: a new one in runs/compare), and options of ``benchmarks.compare``.

    Raises:
        MissingDependencyError: There is no folder ``benchmarks`` next to the package or in the current folder. Wheels
            do not contain it.
        OptionError: The GPU is too small for every workload, or the folder of results cannot be written to.

    Cost:
        Minutes to an hour: every setting of every system runs in two processes. Host memory for one model.
    """
    workload, rest = take_option(words, "--workload", default="")
    out, rest = take_option(rest, "--out", default="")
    folder, results = find_repository(), Path(out or _RESULTS).expanduser()
    if obstacle := find_write_obstacle(results):
        raise OptionError(f"The comparison cannot write to {results}: {obstacle}. Give another folder: --out FOLDER.")
    # Imported on use: the help and a missing repository need no torch.
    import torch

    chosen, reason = (workload, "as asked") if workload else choose_workload()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sys.stdout.write(f"fastft bench: {chosen} on {device}: {reason}\n")
    sys.stdout.flush()
    command = [sys.executable, "-m", "benchmarks.compare", "--workload", chosen, "--device", device]
    if out:
        command += ["--out", str(results)]
    # Found by PYTHONPATH, so that files are written to the current folder; child processes inherit it.
    places = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(places)}
    done = subprocess.run([*command, *rest], env=environment, check=False)  # noqa: S603 - our own module, no shell
    return done.returncode


def find_repository() -> Path:
    """Return the folder with ``benchmarks``: that of an editable install, or the current folder.

    Raises:
        MissingDependencyError: Neither folder has it.
    """
    places = [Path(lightning_fastft.__file__).resolve().parents[1], Path.cwd()]
    for place in places:
        if (place / "benchmarks" / "compare.py").is_file():
            return place
    raise MissingDependencyError(
        f"fastft bench runs benchmarks/compare.py of the repository, which is neither in {places[0]} nor in "
        f"{places[1]}. Installed packages do not contain it. Clone the repository of lightning_fastft, run `pip "
        "install -e '.[qlora]' matplotlib` in the clone, then `fastft bench` there."
    )


def choose_workload() -> tuple[str, str]:
    """Return the workload that fits this machine, and the reason.

    Raises:
        OptionError: The GPU is too small for every workload.
    """
    import torch

    if not torch.cuda.is_available():
        return _CPU_WORKLOAD, (
            "there is no GPU here; a model of two layers shows that everything runs, not how fast it is (minutes; no "
            "row is written)"
        )
    name, memory_gib = torch.cuda.get_device_name(), torch.cuda.get_device_properties(0).total_memory / _GIB
    for workload, least_gib in _FITS:
        if memory_gib >= least_gib:
            return workload, f"{name} has {memory_gib:.1f} GiB, and it asks for {least_gib:.0f}"
    smallest, least_gib = _FITS[-1]
    raise OptionError(
        f"{name} has {memory_gib:.1f} GiB; the smallest workload, {smallest}, asks for "
        f"{least_gib:.0f}: transformers + PEFT, by "
        f"which the others are judged, must fit too. Name one to try it all the same: --workload {smallest}."
    )
