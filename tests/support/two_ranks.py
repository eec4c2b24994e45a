"""A worker of the tests on two ranks."""

import gc
import os
import subprocess
import sys
import tempfile
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch.multiprocessing import start_processes
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException

from tests.support import done_once, rank_exit  # noqa: F401 (done_once: before a rank imports Lightning)

ROOT = Path(__file__).parents[2]
NUM_RANKS = 2
# For what is left after a rank has given up.
_LAUNCHER_S = 60


def run_two_ranks(module, *arguments, timeout_s=300, num_ranks=NUM_RANKS):
    """Run a module with these arguments on two (or more) ranks; fail with the end of what they say.

    The ranks are forks of a process that has loaded what most of them need (see conftest.py) and see what torchrun
    would tell them. A rank that has not ended after timeout_s writes its stacks and ends, and so ends the other one: a
    hang is a failure that says where, and leaves no process behind. Nothing is run twice.
    """
    store = torch.distributed.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s)
    )
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_RUN_ID": "tests",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    with tempfile.TemporaryDirectory() as folder:
        given = (environment, folder, timeout_s, module, [str(argument) for argument in arguments])
        ranks = start_processes(_run_rank, given, nprocs=num_ranks, join=False, start_method="forkserver")
        try:
            while not ranks.join():
                pass
        except (ProcessExitedException, ProcessRaisedException) as error:
            said = "".join(path.read_text(errors="replace") for path in sorted(Path(folder).iterdir()))
            pytest.fail(f"{error}\n{said[-8000:]}")


def _run_rank(rank, environment, folder, limit_s, module, arguments):
    # Leave what the fork has loaded out of garbage collections: a fifth of the CPU time of a short worker.
    gc.freeze()
    os.chdir(ROOT)
    os.environ.clear()
    os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank))
    said = os.open(Path(folder) / f"{rank}", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(said, 1)
    os.dup2(said, 2)
    rank_exit.main(limit_s, module, *arguments)


def launch_two_ranks(module, *arguments, timeout_s=300):
    """Run a module on two ranks as ``run_two_ranks`` does, by torchrun: on GPUs, which forks cannot use."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m"]
    command = [*launcher, "tests.support.rank_exit", str(timeout_s), module, *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    limit_s = timeout_s + _LAUNCHER_S
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=limit_s, check=False
    )
    assert done.returncode == 0, done.stderr[-8000:]
