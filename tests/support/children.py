"""What the tests of Triton kernels run in processes of their own: whether kernels are interpreted is read when
triton is imported.
"""

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# What the kernels promise belongs to every run; that planted faults are seen, and combinations of what every run shows
# one by one, to `make test-faults` and whoever changes a kernel. On a device every case runs.
LANES = {"promises": "not fault", "faults": "fault"}
in_both_lanes = pytest.mark.parametrize("lane", ["promises", pytest.param("faults", marks=pytest.mark.fault)])


def run_in_interpreter(*files, lane):
    """Run files of tests with kernels interpreted on the CPU, in one process.

    Args:
        files: Their names in tests/kernels, or paths from the root of the repository.
        lane: "promises", or "faults": the tests whose names end in ``is_seen``, and the cases that ``thinned`` leaves
            out.
    """
    pytest.importorskip("triton")
    _run_tests(
        *files,
        options=("-p", "tests.support.interpreter", "-m", LANES[lane]),
        environment={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
    )


def thinned(*axes, keep):
    """Return every combination of some axes as cases of one test, of which the interpreter runs a part in every run.

    Args:
        axes: Values of one parameter each.
        keep: Takes the place of each value in its axis; says whether the case belongs to the lane of promises. Every
            value must be in one that does.
    """
    places = list(itertools.product(*(range(len(axis)) for axis in axes)))
    kept = {place for place in places if keep(*place)}
    for number, axis in enumerate(axes):
        assert {place[number] for place in kept} == set(range(len(axis))), f"no case has every value of axis {number}"
    cases = []
    for at in places:
        values = [axis[place] for axis, place in zip(axes, at)]
        name = "-".join(str(place if isinstance(value, tuple) else value) for value, place in zip(values, at))
        cases.append(pytest.param(*values, marks=() if at in kept else pytest.mark.fault, id=name))
    return cases


def run_on_device(file, *, num_processes=1):
    """Run a file of tests with kernels compiled for the CUDA device that is here; Triton compiles one at a time in each
    process.
    """
    options = ("-p", "xdist.plugin", "-n", str(num_processes)) if num_processes > 1 else ()
    _run_tests(file, options=options, environment=_compiled())


def _run_tests(*files, options=(), environment):
    # Other plugins take longer to load than most files to run.
    environment = {**environment, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options]
    command += [file if "/" in file else f"tests/kernels/{file}" for file in files]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]


def _compiled():
    return {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
