"""The tests of the Triton kernels in Triton's interpreter, in a process of their own: its switch is read when triton is imported."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# What the kernels promise belongs to every run; that planted faults are seen, to `make test-faults` and whoever changes a kernel.
LANES = {"promises": "not is_seen", "faults": "is_seen"}
in_both_lanes = pytest.mark.parametrize("lane", ["promises", pytest.param("faults", marks=pytest.mark.fault)])


def run_in_interpreter(file, *, lane):
    """Run a file of tests with kernels interpreted on the CPU.

    Args:
        file: Its name in this folder.
        lane: "promises", or "faults": the tests whose names end in ``is_seen``.
    """
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", LANES[lane], f"tests/kernels/{file}"]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]
