"""A worker of the tests on two ranks."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
# For the launcher to end what is left after a rank has given up.
_LAUNCHER_S = 60


def run_two_ranks(module, *arguments, timeout_s=300):
    """Run a module with these arguments on two ranks; fail with the end of what they say.

    A rank that has not ended after timeout_s writes its stacks and ends, and the launcher ends the other one: a hang is
    a failure that says where, and leaves no process behind. Nothing is run twice.
    """
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m"]
    command = [*launcher, "tests.support.rank_exit", str(timeout_s), module, *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    limit_s = timeout_s + _LAUNCHER_S
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=limit_s, check=False
    )
    assert done.returncode == 0, done.stderr[-8000:]
