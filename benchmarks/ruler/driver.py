"""Run arms one after the other, each in its own process, within a time budget; a failed arm stops no other."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from benchmarks.ruler.cases import OPTIMIZERS, OUR_OPTIMIZERS, Case, CaseLog
from benchmarks.ruler.flash_attn_stand_in import write_package
from benchmarks.ruler.report import read_records
from benchmarks.ruler.systems import ARMS
from benchmarks.ruler.workloads import WORKLOADS, WorkloadFiles

# Least time to import, load and warm up.
LEAST_SECONDS = 30.0


def parse_arm(text: str, *, template: Case) -> list[Case]:
    """Return the cases of one arm from "system:mode,mode": one process.

    A mode may have a label share and an optimizer: "keep+liger@0.3/adamw_fused". "plain:reference" writes the
    reference gradients and is not timed; further parts ("reference+flex") apply.

    Raises:
        ValueError: The text has no system or no mode, or an optimizer that its system does not have.

    Example:
        >>> [case.label_share for case in parse_arm("ours:keep,keep@0.3", template=Case("tiny", "", ""))]
        [1.0, 0.3]
    """
    system, _, modes = text.partition(":")
    if system not in ARMS or not modes:
        raise ValueError(
            f"An arm is SYSTEM:MODE[@SHARE][/OPTIMIZER][,...], and SYSTEM is one of {', '.join(ARMS)}; got {text!r}."
        )
    cases = []
    for item in modes.split(","):
        rest, _, optimizer = item.partition("/")
        known = OUR_OPTIMIZERS if system == "ours" else OPTIMIZERS
        if optimizer and optimizer not in known:
            raise ValueError(f"Optimizers of {system} are {', '.join(known)}; got {text!r}.")
        mode, _, share = rest.partition("@")
        case = replace(
            template,
            system=system,
            mode=mode,
            label_share=float(share or 1.0),
            optimizer=optimizer or template.optimizer,
        )
        if mode.partition("+")[0] == "reference":
            case = replace(case, mode=mode.replace("reference", "recompute", 1), num_warmup=1, num_steps=0)
        cases.append(case)
    return cases


def check_references(arms: Sequence[Sequence[Case]], *, root: Path) -> None:
    """Refuse arms without reference gradients, before the first arm runs.

    Raises:
        ValueError: There is no earlier plain arm, and no earlier run wrote its gradients.
    """
    shares: set[float] = set()
    for case in (case for cases in arms for case in cases):
        files = WorkloadFiles(root, WORKLOADS[case.workload])
        if case.system == "plain":
            shares.add(case.label_share)
        elif case.label_share not in shares and not files.reference(case.label_share).exists():
            share = "" if case.label_share == 1 else f"@{case.label_share:g}"
            raise ValueError(
                f"Nothing to compare the gradients of {case.title!r} with: put plain:reference{share} before it."
            )


def run_arms(
    arms: Sequence[Sequence[Case]],
    *,
    root: Path,
    raw: Path,
    log: Path,
    device: str,
    budget_seconds: float,
    arm_seconds: float,
    module: str = "benchmarks.train_step",
) -> None:
    """Run every arm that the budget allows.

    Args:
        arms: Cases of one process each.
        root: Folder of the built workloads.
        raw: JSON-lines file that every process appends to.
        log: File for the output of the processes.
        device: "cuda" or "cpu".
        budget_seconds: Limit of all arms together.
        arm_seconds: Limit of one arm.
        module: Module whose command "arm" runs one arm.
    """
    deadline = time.monotonic() + budget_seconds
    for cases in arms:
        names = ", ".join(case.title for case in cases)
        left = deadline - time.monotonic()
        if left < LEAST_SECONDS:
            _note_missing(
                cases,
                raw=raw,
                num_before=len(read_records(raw)),
                reason=f"not started: {left:.0f} s of the budget left",
            )
            continue
        num_before = len(read_records(raw))
        start = time.monotonic()
        reason = _run_process(
            cases, root=root, raw=raw, log=log, device=device, seconds=min(left, arm_seconds), module=module
        )
        print(f"arm: {names}: {time.monotonic() - start:.0f} s{'; ' + reason if reason else ''}", flush=True)
        _note_missing(cases, raw=raw, num_before=num_before, reason=reason or "its process left no record")


def _run_process(
    cases: Sequence[Case], *, root: Path, raw: Path, log: Path, device: str, seconds: float, module: str
) -> str:
    """Run one arm; return the error of its process, empty if there is none."""
    command = [
        sys.executable, "-m", module, "arm", "--cases", json.dumps([asdict(case) for case in cases]),
        "--root", str(root), "--raw", str(raw), "--device", device,
    ]  # fmt: skip
    with log.open("ab") as sink:
        sink.write(f"\n===== {' '.join(case.title for case in cases)} =====\n".encode())
        sink.flush()
        # A session of its own, so that processes of a peer (compile workers, data loaders) end with it.
        environment = environment_of(cases[0].system, device=device, folder=raw.parent / "flash_attn")
        process = subprocess.Popen(
            command, stdout=sink, stderr=subprocess.STDOUT, start_new_session=True, env=environment
        )
        try:
            code = process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            return f"stopped after {seconds:.0f} s"
        finally:
            end_session(process)
    return "" if code == 0 else f"its process ended with code {code}: {_last_line(log)}"


def environment_of(system: str, *, device: str, folder: Path) -> dict[str, str]:
    """Return the environment of an arm; for a peer on a GPU without flash-attn, with a stand-in that folder holds.

    Only the compiled kernels identify the real package: an earlier stand-in must not be taken for it.
    """
    path = os.environ.get("PYTHONPATH", "")
    if system != "ours" and device == "cuda" and importlib.util.find_spec("flash_attn_2_cuda") is None:
        path = os.pathsep.join(filter(None, [str(write_package(folder).resolve()), path]))
    return {**os.environ, "PYTHONPATH": path}


def end_session(process: subprocess.Popen[bytes]) -> None:
    """End the process and its children, also if the process itself has ended."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else ""


def _note_missing(cases: Sequence[Case], *, raw: Path, num_before: int, reason: str) -> None:
    """Write a record for every case without one."""
    present = {_key(record) for record in read_records(raw)[num_before:]}
    for case in cases:
        record = {**asdict(case), "title": case.title, "reason": reason}
        if _key(record) not in present:
            CaseLog(raw).write(record)


def _key(record: dict[str, object]) -> tuple[object, ...]:
    return tuple(record[name] for name in ("workload", "system", "mode", "label_share", "optimizer", "repeat"))
