"""A worker of the tests on two ranks."""

import os
import subprocess
import sys
import warnings
from pathlib import Path

ROOT = Path(__file__).parents[1]
_ABORTED = "(SIGABRT)"


def run_two_ranks(module, *arguments, timeout_s=300):
    """Run a module with these arguments on two ranks; fail with the end of what they say.

    Now and then torch (2.13) aborts a rank with a gloo group, in threads of its own (see ``rank_exit``; once in some hundred runs in the middle of
    one). Nothing of ours ends a process like that, so such a run gets a second try, and a warning.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m", module, *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for has_another in (True, False):
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False)
        if not (has_another and done.returncode and _ABORTED in done.stderr):
            break
        warnings.warn(f"A rank of {module} was aborted by torch and is run again: {done.stderr[-2000:]}", stacklevel=2)
    assert done.returncode == 0, done.stderr[-6000:]
