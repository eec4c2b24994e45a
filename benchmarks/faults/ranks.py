"""R17: one of two ranks fails. Both stacks are started by Lightning's own launcher, as ``python train.py`` is.

As a script, one job of R17, or a real model whose rank is hurt at full load on any number of ranks:

    python -m benchmarks.faults.ranks job <stack> <fault> <folder>
    python -m benchmarks.faults.ranks load runs/load --ranks 4 --resumed-on 4 2

"load" trains every weight under FSDP2, kills rank 1 in one job and stops it in another, both at once, and resumes each
from its newest checkpoint, the first on as many ranks as --resumed-on names first, and so on. All ranks train on the same
pack, so that losses do not depend on their number. 0 means that all jobs ended and resumed as they must.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from benchmarks.faults.table import GOOD
from lightning_fastft.callbacks.watchdog import Watchdog
from tests.faults.ranks import HURT_AT, NUM_RANKS, Fault, free_port, join, train
from tests.support.rank_exit import leave

# In this order: the five of the promise first, then a sleeping rank and one whose interpreter stands still.
KINDS = ("stop", "kill", "error", "collective", "uneven", "sleep", "lock")
ROOT = Path(__file__).parents[2]
# Ours is told to wait so long; the default stack is given LIMIT_S, then SIGTERM as a scheduler sends it, then GRACE_S.
TIMEOUT_S, LIMIT_S, GRACE_S = 10.0, 60.0, 15.0
_START_LIMIT_S = 180.0
# Of "load": what the report says of a rank that is hurt, seconds until all have ended, steps of the whole run.
BLAMED = {"kill": "rank 1 is dead: killed", "stop": "rank 1 is stopped (SIGSTOP)"}
END_LIMITS_S = {"kill": 10.0, "stop": TIMEOUT_S + 10.0}
SAVE_EVERY, NUM_STEPS = 2, 12
# Sums over another number of ranks, in bf16.
LOSS_TOLERANCE = 1e-3


class Begins(Callback):
    """Tells that the micro-batch has come in which a rank is hurt elsewhere."""

    def __init__(self, write: int) -> None:
        self.write = write

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Write a byte, once."""
        if batch_idx == HURT_AT:
            os.write(self.write, b"x")


class Losses(Callback):
    """Tells the loss of every step once the run is over; until then nothing waits for the device."""

    def __init__(self) -> None:
        self.losses: dict[int, Any] = {}

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        """Keep the loss."""
        self.losses[trainer.global_step + 1] = loss.detach()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Write to stderr, as the fault does."""
        if trainer.is_global_zero:
            for step, loss in self.losses.items():
                print(f"step {step}: loss {float(loss):.6f}", file=sys.stderr, flush=True)


def main(words: list[str]) -> int:
    """Run a job, one rank of "load", or "load"."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("job", help="one job of R17")
    one.add_argument("stack")
    one.add_argument("kind")
    one.add_argument("folder", type=Path)
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("folder", type=Path)
    shared.add_argument("--ranks", type=int, default=NUM_RANKS)
    shared.add_argument("--workload", default="qwen3-0.6b-full")
    shared.add_argument("--tokens", type=int, default=8192, help="of a pack")
    shared.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    two = commands.add_parser("load", parents=[shared], help="hurt a rank at full load, and resume")
    two.add_argument("--resumed-on", type=int, nargs=len(BLAMED), default=[NUM_RANKS] * len(BLAMED), metavar="RANKS")
    three = commands.add_parser("rank", parents=[shared], help="one rank of load")
    three.add_argument("--kind", required=True)
    three.add_argument("--rank", type=int, required=True)
    three.add_argument("--port", type=int, required=True)
    options = parser.parse_args(words)
    if options.command == "load":
        return hurt_at_load(options)
    if options.command == "rank":
        run_rank(options)
    else:
        run_job(options.stack, options.kind, options.folder)
    return 0


def run_job(stack: str, kind: str, folder: Path) -> None:
    """Train as one rank of R17; Lightning starts the other one."""
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


def run_rank(options: argparse.Namespace) -> None:
    """Train every weight of a workload as one rank, from the newest checkpoint in the folder if there is one."""
    from torch.utils.data import DataLoader

    from benchmarks.ruler.workloads import WORKLOADS, make_packs
    from lightning_fastft.packing.collate import Document, collate
    from lightning_fastft.training.fine_tuner import FineTuner

    folder, is_cuda, workload = options.folder, options.device == "cuda", WORKLOADS[options.workload]
    join(options.rank, num_ranks=options.ranks, port=options.port, are_nodes=False)
    (folder / f"pid-{options.rank}").write_text(str(os.getpid()))
    write = os.open(folder / "hurt", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    # A seed of the model's own would differ from job to job.
    torch.manual_seed(0)
    (pack,) = make_packs(replace(workload, max_tokens=options.tokens, num_packs=1))
    batch = collate([Document(ids, labels) for ids, labels in pack.documents(1.0)])
    # Found by ckpt_path="last", each.
    saves = ModelCheckpoint(folder / "runs", filename="last-{step}", every_n_train_steps=SAVE_EVERY, save_top_k=-1)
    train(
        folder,
        strategy="fastft_fsdp",
        num_ranks=options.ranks,
        callbacks=[Watchdog(timeout_s=TIMEOUT_S), Fault(options.kind, write), Losses(), saves],
        module=FineTuner(
            {"model_type": workload.model_type, **workload.model_config},
            init="random",
            dtype="bfloat16" if is_cuda else "float32",
            scheduler="constant",
            warmup_share=0.0,
        ),
        loader=DataLoader([batch] * (2 * NUM_STEPS), batch_size=None),
        max_steps=NUM_STEPS,
        ckpt_path="last",
        accelerator="gpu" if is_cuda else "cpu",
        accumulate_grad_batches=1,
        enable_checkpointing=True,
    )
    leave()


def hurt_at_load(options: argparse.Namespace) -> int:
    """Hurt rank 1 in a job for each fault, resume each, and print what became of them; 1 if one is not as it must be."""
    for kind in BLAMED:
        (options.folder / kind).mkdir(parents=True)
    with ThreadPoolExecutor(len(BLAMED)) as pool:
        ends = list(pool.map(lambda kind: _hurt(options, kind), BLAMED))
        resumed = list(pool.map(lambda kind, num: _resume(options, kind, num), BLAMED, options.resumed_on))
    verdicts = [verdict for verdict, _ in resumed]
    common = set.intersection(*({*losses} for _, losses in resumed))
    worst = max((abs(resumed[0][1][step] / resumed[1][1][step] - 1) for step in common), default=float("nan"))
    is_same = worst <= LOSS_TOLERANCE
    for kind, end, verdict, num in zip(BLAMED, ends, verdicts, options.resumed_on):
        ended, went_on = end or "named and ended in time", verdict or "from the newest checkpoint to the end"
        print(f"{kind}, {options.ranks} ranks: {ended}; resumed on {num}: {went_on}", flush=True)
    print(f"losses of {len(common)} steps after both resumptions differ by {worst:.1e}", flush=True)
    return int({*ends, *verdicts} != {GOOD} or not is_same)


def _spawn(options: argparse.Namespace, kind: str, num_ranks: int, *, fault: str) -> list[subprocess.Popen[bytes]]:
    folder, port = options.folder / kind, free_port()
    # From an earlier job in this folder.
    for path in (*folder.glob("pid-*"), folder / "hurt"):
        path.unlink(missing_ok=True)
    shared = [f"--{name}={getattr(options, name)}" for name in ("workload", "tokens", "device")]
    ranks = []
    for rank in range(num_ranks):
        own = [f"--ranks={num_ranks}", f"--rank={rank}", f"--port={port}", f"--kind={fault}"]
        command = [sys.executable, "-m", "benchmarks.faults.ranks", "rank", str(folder.absolute()), *own, *shared]
        with (folder / f"{fault}-{rank}.log").open("w") as log:
            ranks.append(subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log))
    return ranks


def _finish(ranks: Sequence[subprocess.Popen[bytes]], limit_s: float) -> list[int | None]:
    """Wait for the ranks of a job; kill those that are left, whose code is None."""
    _wait(lambda: all(rank.poll() is not None for rank in ranks), limit_s)
    codes = [rank.poll() for rank in ranks]
    for rank in ranks:
        rank.kill()
        rank.wait()
    return codes


def _hurt(options: argparse.Namespace, kind: str) -> str:
    """Return how a job ended whose rank 1 was hurt."""
    folder = options.folder / kind
    ranks = _spawn(options, kind, options.ranks, fault=kind)
    hurt = folder / "hurt"
    _wait(
        lambda: (hurt.exists() and hurt.stat().st_size > 0) or any(rank.poll() is not None for rank in ranks),
        _START_LIMIT_S,
    )
    begin = time.monotonic()
    codes = _finish(ranks, END_LIMITS_S[kind])
    seconds = time.monotonic() - begin
    if not hurt.exists() or hurt.stat().st_size == 0:
        return f"rank 1 was not hurt, exit codes {codes}"
    if None in codes or 0 in codes:
        return f"exit codes {codes} after {seconds:.1f} s"
    # The processes that watched end a moment later.
    _wait(lambda: not list(folder.rglob(".watchdog-*")), END_LIMITS_S[kind])
    reports = [path.read_text(encoding="utf-8") for path in folder.rglob("watchdog-*.txt")]
    if len(reports) != 1 or f"Watchdog: {BLAMED[kind]}" not in reports[0]:
        return f"{len(reports)} reports, which do not say: {BLAMED[kind]}"
    print(f"{kind}: exit codes {codes} {seconds:.1f} s after the fault: {reports[0].splitlines()[0]}", flush=True)
    return GOOD


def _resume(options: argparse.Namespace, kind: str, num_ranks: int) -> tuple[str, dict[int, float]]:
    """Return how a job resumed, and its losses by step."""
    folder = options.folder / kind
    saved = [int(path.stem.partition("=")[2]) for path in (folder / "runs").glob("last-step=*.ckpt")]
    codes = _finish(_spawn(options, kind, num_ranks, fault="none"), _START_LIMIT_S)
    said = "".join(path.read_text(errors="replace") for path in folder.glob("none-*.log"))
    begun = {int(step) for step in re.findall(r"begins after step (\d+)", said)}
    losses = {int(step): float(loss) for step, loss in re.findall(r"step (\d+): loss (\S+)", said)}
    print(
        f"{kind}: {saved} saved, resumed after {begun} on {num_ranks} ranks, exit codes {codes}: {losses}", flush=True
    )
    if any(codes):
        return f"exit codes {codes}", losses
    if not saved or begun != {max(saved)}:
        return f"began after steps {begun}, not after {max(saved, default=0)}", losses
    return (GOOD if max(losses, default=0) == NUM_STEPS else f"ended at step {max(losses, default=0)}"), losses


def hurt_ranks(folder: Path, *, stack: str, num_trials: int) -> list[str]:
    """R17: a job of two ranks for each kind of fault, two at a time."""
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda kind: _run_job(folder / kind, stack, kind), KINDS[:num_trials]))


def _run_job(folder: Path, stack: str, kind: str) -> str:
    folder.mkdir()
    command = [sys.executable, "-m", "benchmarks.faults.ranks", "job", stack, kind, str(folder)]
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
    sys.exit(main(sys.argv[1:]))
