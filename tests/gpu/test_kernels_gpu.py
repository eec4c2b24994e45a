"""The tests of all Triton kernels, compiled for the device."""

from pathlib import Path

import pytest

from tests.support.children import run_on_device

FILES = sorted(path.name for path in (Path(__file__).parents[1] / "kernels").glob("triton_*.py"))


@pytest.mark.gpu
@pytest.mark.parametrize("file", [file for file in FILES if "adamw" not in file and "fp8" not in file])
def test_kernels_pass_their_tests_on_the_device(file):
    run_on_device(file)
