"""What the tests of Triton kernels run in processes of their own: whether kernels are interpreted is read when triton is imported."""

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
    _run_tests(file, "-k", LANES[lane], environment={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"})


def run_on_device(file):
    """Run a file of tests with kernels compiled for the CUDA device that is here."""
    _run_tests(file, environment=_compiled())


def compile_kernels(script, *arguments):
    """Run a script that compiles kernels for GPUs that need not be here; return what it prints."""
    pytest.importorskip("triton")
    command = [sys.executable, "-W", "ignore", "-c", script, *arguments]
    done = subprocess.run(command, cwd=ROOT, env=_compiled(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def _run_tests(file, *options, environment):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, f"tests/kernels/{file}"]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]


def _compiled():
    return {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
