"""The tests of all Triton kernels, run in Triton's interpreter on the CPU."""

from pathlib import Path

import pytest

from tests.support.children import run_in_interpreter

FILES = sorted(path.name for path in Path(__file__).parent.glob("triton_*.py"))


@pytest.mark.slow(90)
def test_kernels_pass_their_tests():
    assert len(FILES) >= 20
    # In one process: to start one takes longer than the tests of most files.
    run_in_interpreter(*FILES, lane="promises")


@pytest.mark.fault
@pytest.mark.parametrize("file", FILES)
def test_planted_faults_are_seen_and_combinations_pass(file):
    run_in_interpreter(file, lane="faults")
