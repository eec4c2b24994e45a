"""The examples in the docstrings of the benchmarks print what they say."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow(15)
def test_examples_print_what_they_say():
    # In a process of its own: the benchmarks set environment variables when they are imported.
    words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--doctest-modules", "benchmarks"]
    # Its import needs Unsloth.
    words.append("--ignore=benchmarks/ruler/arms/unsloth.py")
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
