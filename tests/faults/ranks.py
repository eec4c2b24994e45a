"""Ranks of a run that are hurt: made by fork, so that none of them has to load torch again, and waited for with a
limit.
"""

import os
import re
import signal
import socket
import sys
import time
from datetime import timedelta
from typing import NamedTuple

import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from lightning_fastft.callbacks.packed_training import PackedTraining
from lightning_fastft.callbacks.watchdog import Watchdog
from lightning_fastft.monitor import rank_watch
from lightning_fastft.strategies.ddp import FastFTDDPStrategy
from lightning_fastft.strategies.fsdp2 import FastFTFSDPStrategy
from tests.faults.saves import fork
from tests.strategies.strategy_worker import Lazy
from tests.support.processes import children_of
from tests.support.training_parts import packed_loader, quiet_trainer

NUM_RANKS = 2
# Micro-batch 7 of the run is the first of optimizer step 4, behind those that are given longer.
ACCUMULATE, HURT_AT, HURT_STEP = 2, 6, 4
SLOW_WATCHDOG = """
import runpy, time
time.sleep(5)
runpy.run_path({path!r}, run_name="__main__")
"""


class Fault(Callback):
    """Hurts one rank in a training batch, and tells the test of it."""

    def __init__(self, kind, write, *, rank=1):
        self.kind, self.write, self.rank = kind, write, rank
        self.first_step = kind.endswith("_in_the_first_step")

    def on_train_start(self, trainer, pl_module):
        print(f"begins after step {trainer.global_step}", file=sys.stderr, flush=True)
        if trainer.world_size > 1:
            self.group = torch.distributed.new_group()

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if self.first_step and batch_idx == 0 and trainer.global_rank == self.rank:
            self.hurt()
        elif batch_idx == HURT_AT and self.kind.endswith("_in_a_save"):
            trainer.save_checkpoint(os.path.join(trainer.default_root_dir, "a.ckpt"))
        elif batch_idx == HURT_AT and trainer.global_rank == self.rank and not self.first_step:
            self.hurt()
        elif batch_idx == HURT_AT and self.kind == "kill_beside_one_that_is_busy":
            time.sleep(1000)

    def hurt(self):
        os.write(self.write, b"x")
        getattr(self, self.kind)()

    def kill(self):
        os.kill(os.getpid(), signal.SIGKILL)

    def lose_node(self, number=signal.SIGKILL):
        """Send a signal to all processes on the node of this rank, including its watchdog."""
        for child in children_of(os.getpid()):
            os.kill(child, number)
        os.kill(os.getpid(), number)

    lose_node_in_the_first_step = lose_node

    def stop_node(self):
        self.lose_node(signal.SIGSTOP)

    def none(self):
        """Hurt nothing."""

    # In the forward of every micro-batch.
    slow = none

    def on_before_backward(self, trainer, pl_module, loss):
        if self.kind == "slow":
            time.sleep(0.1 if trainer.global_rank == self.rank else 0.02)

    kill_beside_one_that_is_busy = kill

    def on_save_checkpoint(self, trainer, pl_module, checkpoint):
        if trainer.global_step < HURT_STEP - 1 or not self.kind.endswith("_in_a_save"):
            return
        if trainer.global_rank == self.rank:
            os.write(self.write, b"x")
            self.kill() if self.kind == "kill_in_a_save" else self.lose_node()
        if self.kind != "kill_in_a_save":
            return
        try:
            torch.distributed.barrier(self.group)
        except RuntimeError:
            # As torch does in threads of its own where a peer is gone: without a word to Python.
            os.kill(os.getpid(), signal.SIGABRT)

    def error(self):
        raise ValueError("planted")

    def stop(self):
        os.kill(os.getpid(), signal.SIGSTOP)

    def collective(self):
        # A group of its own, so that nothing of the others answers.
        torch.distributed.barrier(self.group)

    def lock(self):
        # Holds the interpreter's lock all the while: no thread of this process runs.
        re.match(r"(a+)+$", "a" * 64 + "b")

    def sleep(self):
        time.sleep(1000)


class End(NamedTuple):
    """How a job ended: exit codes by rank, seconds after the fault, what the ranks wrote to stderr, and the report."""

    codes: list
    seconds: float
    said: str
    report: str


def make_strategy(name):
    # Rank 0 must not be freed by a timeout of the group.
    hour = timedelta(hours=1)
    return {
        "fastft_ddp": lambda: FastFTDDPStrategy(timeout=hour),
        "fastft_fsdp": lambda: FastFTFSDPStrategy(timeout=hour),
        "ddp": lambda: "ddp",
        "one": lambda: "auto",
    }[name]()


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def train(
    folder,
    *,
    strategy,
    num_ranks,
    callbacks,
    num_batches=24,
    max_steps=12,
    ckpt_path=None,
    module=None,
    loader=None,
    **options,
):
    """Train a tiny model on packs of its own, or module on loader."""
    options = {"accumulate_grad_batches": ACCUMULATE, **options}
    if not strategy.startswith("fastft"):
        callbacks = [*callbacks, PackedTraining()]
    quiet_trainer(
        folder,
        strategy=make_strategy(strategy),
        devices=num_ranks,
        callbacks=callbacks,
        max_steps=max_steps,
        use_distributed_sampler=False,
        **options,
    ).fit(module or Lazy(), packed_loader(num_batches) if loader is None else loader, ckpt_path=ckpt_path)


def join(number, *, num_ranks, port, are_nodes):
    """Set what torchrun would set for a rank; with are_nodes each rank is a node of its own."""
    local, node = (0, number) if are_nodes else (number, 0)
    names = {
        "RANK": number,
        "LOCAL_RANK": local,
        "WORLD_SIZE": num_ranks,
        "LOCAL_WORLD_SIZE": 1 if are_nodes else num_ranks,
        "GROUP_RANK": node,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "TORCHELASTIC_RUN_ID": "test",
    }
    os.environ |= {name: str(value) for name, value in names.items()}


def node_options(folder, num_nodes, callbacks):
    """Options of a job whose ranks are nodes: it saves every step, and begins with the newest checkpoint."""
    callbacks.append(ModelCheckpoint(folder / "runs", filename="{step}", every_n_train_steps=1, save_last=True))
    shared = {"enable_checkpointing": True, "accumulate_grad_batches": 1, "ckpt_path": "last"}
    return {"num_ranks": 1, "num_nodes": num_nodes, **shared}


def kill_with_children(child):
    """A stopped watchdog would stay behind a rank that is killed."""
    for pid in (*children_of(child), child):
        os.kill(pid, signal.SIGKILL)
    os.waitpid(child, 0)


def run_job(
    folder,
    *,
    kind,
    strategy="fastft_ddp",
    num_ranks=NUM_RANKS,
    timeout_s=1.0,
    rank=1,
    watched=True,
    num_batches=(24, 24),
    limit_s=300.0,
    slow_watchdog=None,
    are_nodes=False,
    max_steps=12,
):
    """Run a job with one hurt rank, and return how it ended.

    A rank that is left after limit_s is killed, with code None. The watchdog process of rank slow_watchdog starts 5 s
    late, as on a busy machine. With are_nodes each rank is a node of its own (node_options); with kind "none" there is
    no fault.
    """
    port = free_port()

    def act(number, write):
        log = os.open(folder / f"stderr-{number}", os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
        os.dup2(log, 2)
        # Not the file in which pytest keeps what its own process says.
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
        if num_ranks > 1:
            join(number, num_ranks=num_ranks, port=port, are_nodes=are_nodes)
        if number == slow_watchdog:
            slow = folder / "rank_watch" / "__main__.py"
            slow.parent.mkdir()
            slow.write_text(SLOW_WATCHDOG.format(path=rank_watch.ENTRY))
            rank_watch.ENTRY = str(slow)
        callbacks = [Watchdog(timeout_s=timeout_s)] if watched else []
        fault = [Fault(kind, write, rank=rank)] if hasattr(Fault, kind) or kind.endswith("_in_a_save") else []
        # The pause is in the forward, before the end of the forward that the watchdog records.
        callbacks = [*fault, *callbacks] if kind == "slow" else [*callbacks, *fault]
        options = node_options(folder, num_ranks, callbacks) if are_nodes else {"num_ranks": num_ranks}
        options |= {"num_batches": num_batches[number], "max_steps": max_steps}
        train(folder, strategy=strategy, callbacks=callbacks, **options)

    children = [fork(lambda write, number=number: act(number, write)) for number in range(num_ranks)]
    try:
        os.read(children[rank][1], 1)
        begin = time.monotonic()
        codes = [None] * num_ranks
        while None in codes and time.monotonic() - begin < limit_s:
            for number, (child, _) in enumerate(children):
                if codes[number] is None:
                    found, status = os.waitpid(child, os.WNOHANG)
                    codes[number] = os.waitstatus_to_exitcode(status) if found else None
            time.sleep(0.02)
        seconds = time.monotonic() - begin
    finally:
        for number, (child, read) in enumerate(children):
            os.close(read)
            if codes[number] is None:
                kill_with_children(child)
    # The processes that watched end a moment later.
    deadline = time.monotonic() + 120
    while list(folder.rglob(".watchdog-*")) and time.monotonic() < deadline:
        time.sleep(0.05)
    said = "".join((folder / f"stderr-{number}").read_text() for number in range(num_ranks))
    reports = list(folder.rglob("watchdog-*.txt"))
    return End(codes, seconds, said, reports[0].read_text() if len(reports) == 1 else f"{len(reports)} reports")
