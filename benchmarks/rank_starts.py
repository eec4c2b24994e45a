"""Start two ranks many times and count hangs, aborts and wrong results.

    python -m benchmarks.rank_starts --starts 2000 --pairs 16

The parent imports torch, Lightning and the package once, starts no thread, and forks both ranks of every start. Each
rank opens a gloo group, trains two optimizer steps on packs (FineTuner, PackedDataModule with its loader,
FastFTDDPStrategy) with a validation between them, and ends like a script: the interpreter is finalised and the C++
destructors run. A start is

- hung if a rank is still there after ``--limit`` seconds: the Python stacks of both ranks are printed, then both are
  killed;
- aborted if a signal ended a rank, failed if a rank ended with another code than 0; the end of its stderr is printed;
- wrong if its weights are not those of the other rank, or not those of the first start;
- untidy if one of its processes is still there after both ranks have ended.

One summary line is printed at the end. The exit code is 0 if every start was good.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import hashlib
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections import Counter
from itertools import cycle
from pathlib import Path
from typing import NamedTuple

# Before torch and numpy are imported: the parent must have one thread.
for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

NUM_RANKS = 2
VOCABULARY = 97
CONFIG = {
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
}
# Below the system's ephemeral ports.
PORTS = range(10_000, 30_000)
STACKS_WAIT_S = 3.0
SAID_CHARACTERS = 4000


class Start(NamedTuple):
    """Two started ranks: their process ids, their files, and their deadline."""

    number: int
    pids: list[int]
    folder: Path
    deadline_s: float
    codes: list[int | None]


def train(folder: Path, num_workers: int | None) -> str:
    """Train two steps on this rank and return a digest of the weights."""
    import lightning.pytorch as pl
    from lightning.pytorch import seed_everything

    from lightning_fastft import FastFTDDPStrategy, FineTuner, PackedDataModule

    seed_everything(3, verbose=False)
    rows = [{"input_ids": [(7 * row + column) % VOCABULARY for column in range(4 + row % 9)]} for row in range(24)]
    options = {} if num_workers is None else {"num_workers": num_workers}
    data = PackedDataModule(
        rows, val_paths=rows[:4], max_tokens=32, cache_dir=None, num_proc=1, show_progress=False, seed=5, **options
    )
    module = FineTuner(CONFIG, init="random", dtype="float32", learning_rate=1e-2, warmup_steps=1, lora={"r": 2})
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=NUM_RANKS,
        strategy=FastFTDDPStrategy(),
        accumulate_grad_batches=2,
        max_steps=2,
        val_check_interval=2,
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    trainer.fit(module, data)
    digest = hashlib.sha256()
    for name, parameter in sorted(module.named_parameters()):
        digest.update(name.encode() + parameter.detach().numpy().tobytes())
    return digest.hexdigest()


def run_rank(rank: int, port: int, folder: Path, num_workers: int | None) -> None:
    """Run one rank in a child; returning ends the process like a script."""
    os.setpgid(0, 0)
    stderr = os.open(folder / f"stderr-{rank}", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(stderr, descriptor)
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    names = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": NUM_RANKS,
        "LOCAL_WORLD_SIZE": NUM_RANKS,
        "GROUP_RANK": 0,
        "MASTER_PORT": port,
    }
    os.environ |= {name: str(value) for name, value in names.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RUN_ID": "starts"}
    (folder / f"weights-{rank}").write_text(train(folder, num_workers))


def start_ranks(number: int, port: int, limit_s: float, num_workers: int | None) -> Start | None:
    """Fork both ranks; return None in a rank that has trained and must end."""
    folder = Path(tempfile.mkdtemp(prefix="rank-start-"))
    pids = []
    for rank in range(NUM_RANKS):
        pid = os.fork()
        if pid == 0:
            run_rank(rank, port, folder, num_workers)
            return None
        pids.append(pid)
    return Start(number, pids, folder, time.monotonic() + limit_s, [None] * NUM_RANKS)


def wait_for(start: Start) -> bool:
    """Record the ranks that have ended; return whether all have."""
    for rank, pid in enumerate(start.pids):
        if start.codes[rank] is None:
            ended, status = os.waitpid(pid, os.WNOHANG)
            start.codes[rank] = os.waitstatus_to_exitcode(status) if ended else None
    return None not in start.codes


def end_ranks(start: Start) -> bool:
    """Kill the remaining processes of a start; return whether there were any."""
    was_left = False
    for pid in start.pids:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
            was_left = True
    for rank, pid in enumerate(start.pids):
        if start.codes[rank] is None:
            os.waitpid(pid, 0)
    return was_left


def dump_stacks(start: Start) -> None:
    """Make the remaining ranks write their Python stacks."""
    for rank, pid in enumerate(start.pids):
        if start.codes[rank] is None:
            os.kill(pid, signal.SIGUSR2)
    time.sleep(STACKS_WAIT_S)


def judge(start: Start, is_hung: bool, truth: list[str]) -> str:
    """Return the outcome of a start in one word, and end its remaining processes."""
    if is_hung:
        dump_stacks(start)
    was_left = end_ranks(start)
    codes = start.codes
    if is_hung:
        end = "hung"
    elif any(code is not None and code < 0 for code in codes):
        end = "aborted"
    elif any(codes):
        end = "failed"
    else:
        digests = [(start.folder / f"weights-{rank}").read_text() for rank in range(NUM_RANKS)]
        truth.extend(digests[:1] if not truth else [])
        end = "wrong" if set(digests) != set(truth) else "untidy" if was_left else "good"
    if end != "good":
        print(f"start {start.number}: {end}, exit codes {codes}")
        for rank in range(NUM_RANKS):
            stderr = start.folder / f"stderr-{rank}"
            print(
                f"--- rank {rank}:\n{stderr.read_text(errors='replace')[-SAID_CHARACTERS:] if stderr.exists() else ''}",
                flush=True,
            )
    shutil.rmtree(start.folder)
    return end


def find_port(ports: cycle[int]) -> int:
    """Return the next free port."""
    for port in ports:
        with socket.socket() as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with contextlib.suppress(OSError):
                trial.bind(("127.0.0.1", port))
                return port
    raise AssertionError


def main() -> int:
    """Run all starts; return the exit code of the parent, or of a rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--starts", type=int, default=2000)
    parser.add_argument("--pairs", type=int, default=max(1, (os.cpu_count() or 2) // 2), help="concurrent starts")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds after which a start is hung")
    parser.add_argument(
        "--workers", type=int, default=None, help="num_workers of the loader; the default of the package if not given"
    )
    options = parser.parse_args()
    # Import all modules of a rank here, so that ranks need not.
    import bitsandbytes  # noqa: F401
    import peft  # noqa: F401
    import torch
    import transformers.models.llama.modeling_llama  # noqa: F401

    import lightning_fastft
    from lightning_fastft import FastFTDDPStrategy, FineTuner, PackedDataModule  # noqa: F401

    num_threads = len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else 1
    if num_threads > 1:
        # Some libraries start threads on import (a CUDA build of torch does). A lock that one holds would hang a rank,
        # which would be counted.
        print(f"the parent has {num_threads} threads, and forks", flush=True)
    ports = cycle(PORTS)
    ends: Counter[str] = Counter()
    truth: list[str] = []
    running: list[Start] = []
    begin = time.monotonic()
    num_started = 0
    while num_started < options.starts or running:
        while num_started < options.starts and len(running) < options.pairs:
            start = start_ranks(num_started, find_port(ports), options.limit, options.workers)
            if start is None:
                return 0
            running.append(start)
            num_started += 1
        for start in list(running):
            has_ended = wait_for(start)
            is_launch_bound = not has_ended and time.monotonic() > start.deadline_s
            # A rank may wait for a partner that died by a signal; this counts as aborted.
            if has_ended or is_launch_bound:
                running.remove(start)
                ends[judge(start, is_launch_bound, truth)] += 1
        time.sleep(0.01)
    bad = ", ".join(f"{ends[end]} {end}" for end in ("hung", "aborted", "failed", "wrong", "untidy"))
    print(
        f"rank starts: {ends['good']} of {options.starts} good; {bad}; {options.pairs} side by side, "
        f"{time.monotonic() - begin:.0f} s, "
        f"torch {torch.__version__}, Python {sys.version.split()[0]}, lightning_fastft {lightning_fastft.__version__}"
    )
    return int(ends["good"] != options.starts)


if __name__ == "__main__":
    sys.exit(main())
