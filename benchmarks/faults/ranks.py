"""R17: one of two ranks fails. Both stacks are started by Lightning's own launcher, as ``python train.py`` is.

As a script, one job: python -m benchmarks.faults.ranks <stack> <fault> <folder>
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import Callback

from benchmarks.faults.table import GOOD
from lightning_fastft.callbacks.watchdog import Watchdog
from tests.faults.ranks import HURT_AT, NUM_RANKS, Fault, train
from tests.support.rank_exit import leave

# In this order: the five of the promise first, then a sleeping rank and one whose interpreter stands still.
KINDS = ("stop", "kill", "error", "collective", "uneven", "sleep", "lock")
ROOT = Path(__file__).parents[2]
# Ours is told to wait so long; the default stack is given LIMIT_S, then SIGTERM as a scheduler sends it, then GRACE_S.
TIMEOUT_S, LIMIT_S, GRACE_S = 10.0, 60.0, 15.0
_START_LIMIT_S = 180.0


class Begins(Callback):
    """Tells that the micro-batch has come in which a rank is hurt elsewhere."""

    def __init__(self, write: int) -> None:
        self.write = write

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Write a byte, once."""
        if batch_idx == HURT_AT:
            os.write(self.write, b"x")


def main(stack: str, kind: str, folder: Path) -> None:
    """Train as one rank; Lightning starts the other one."""
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    (folder / f"pid-{rank}").write_text(str(os.getpid()))
    write = os.open(folder / "hurt", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    callbacks: list[Callback] = [Watchdog(timeout_s=TIMEOUT_S)] if stack == "ours" else []
    callbacks.append(Begins(write) if kind == "uneven" else Fault(kind, write))
    options = {"num_batches": 22 if kind == "uneven" and rank else 24, "callbacks": callbacks}
    # One epoch, as most runs are planned: with a number of steps the shorter rank would begin its data anew, and nobody
    # would say so.
    length = {"max_steps": -1, "max_epochs": 1}
    train(folder, strategy="fastft_ddp" if stack == "ours" else "ddp", num_ranks=NUM_RANKS, **options, **length)
    leave()


def hurt_ranks(folder: Path, *, stack: str, num_trials: int) -> list[str]:
    """R17: a job of two ranks for each kind of fault, two at a time."""
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda kind: _run_job(folder / kind, stack, kind), KINDS[:num_trials]))


def _run_job(folder: Path, stack: str, kind: str) -> str:
    folder.mkdir()
    command = [sys.executable, "-m", "benchmarks.faults.ranks", stack, kind, str(folder)]
    with (folder / "log").open("w") as log:
        job = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    try:
        return _judge_job(folder, job)
    finally:
        for pid in _alive(folder):
            os.kill(pid, signal.SIGKILL)
        job.wait()


def _judge_job(folder: Path, job: subprocess.Popen[bytes]) -> str:
    """Wait as long as a user would, then as long as a scheduler does."""
    hurt = folder / "hurt"
    _wait(lambda: job.poll() is not None or (hurt.exists() and hurt.stat().st_size > 0), _START_LIMIT_S)
    if not _wait(lambda: job.poll() is not None and not list(_alive(folder)), LIMIT_S):
        alive = list(_alive(folder))
        for pid in alive:
            os.kill(pid, signal.SIGTERM)
        is_over = _wait(lambda: job.poll() is not None and not list(_alive(folder)), GRACE_S)
        return f"still alive after {LIMIT_S:.0f} s" + ("" if is_over else f", and {GRACE_S:.0f} s after SIGTERM")
    return "ended with exit code 0" if job.returncode == 0 else GOOD


def _wait(is_over: Any, limit_s: float) -> bool:
    deadline = time.monotonic() + limit_s
    while not is_over():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def _alive(folder: Path) -> Iterator[int]:
    """Yield the process ids of ranks that are there and not dead."""
    for path in folder.glob("pid-*"):
        text = path.read_text()
        stat = Path(f"/proc/{text}/stat")
        if text and stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z":
            yield int(text)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
