"""The tests of all Triton kernels, compiled for the device."""

from pathlib import Path

import pytest

from tests.support.children import run_on_device

FILES = sorted(path.name for path in (Path(__file__).parents[1] / "kernels").glob("triton_*.py"))
# Seconds in one process, beside 28 others on 64 cores with four H100; where none are given, less than a minute.
SECONDS = {
    "triton_expert_gate.py": 263,
    "triton_fp8_linear.py": 170,
    "triton_grouped_mm.py": 141,
    "triton_expert_sort.py": 136,
    "triton_qk_rope.py": 129,
    "triton_low_rank_add.py": 98,
    "triton_divergence.py": 79,
    "triton_delta_inputs.py": 65,
}
MOST_SECONDS = 90


def cases():
    for file in FILES:
        seconds = SECONDS.get(file, 50)
        num_processes = -(-seconds // MOST_SECONDS)
        yield pytest.param(file, num_processes, id=file, marks=pytest.mark.slow(seconds // num_processes))


@pytest.mark.gpu
@pytest.mark.parametrize(("file", "num_processes"), cases())
def test_kernels_pass_their_tests_on_the_device(file, num_processes):
    run_on_device(file, num_processes=num_processes)


def test_files_with_seconds_exist():
    assert set(SECONDS) <= set(FILES)
