"""R14: compute-sanitizer reports nothing over the smallest case of every Triton kernel; on a CPU, that every
kernel has a case that launches it.
"""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu.sanitizer import CASES, PACKAGE, all_kernels, kernels_of

ROOT = Path(__file__).parents[2]
LAUNCHED = re.compile(r"^kernels/(\w+): (\w+) launched (\d+) times$", flags=re.MULTILINE)
# What each tool looks for, and the line with which it says that there was nothing: access outside of an allocation,
# threads that meet in shared memory, reads of device memory that nobody wrote.
TOOLS = {
    "memcheck": r"^========= ERROR SUMMARY: 0 errors$",
    "racecheck": r"^========= RACECHECK SUMMARY: 0 hazards displayed \(0 errors, 0 warnings\)",
    "initcheck": r"^========= ERROR SUMMARY: 0 errors$",
}
HOW_TO_INSTALL = (
    "compute-sanitizer is not installed: pip install nvidia-cuda-sanitizer-api (CUDA 13) or "
    "nvidia-cuda-sanitizer-api-cu12 (CUDA 12), or the toolkit"
)
ERROR_CODE = 99
# Processes of a tool, which may run side by side: every kernel is compiled and watched, minutes in all.
NUM_LANES = 4
TIMEOUT_S = 600
# The sanitizer lets go of a process that has not used CUDA after some seconds, and its first use of it then hangs:
# first of all, and with more time.
CASES_SCRIPT = (
    "import torch; torch.zeros(1, device='cuda'); import sys, tests.gpu.sanitizer as cases; cases.main(sys.argv[1:])"
)
LAUNCH_TIMEOUT_S = 300


def find_sanitizer():
    """On the path, else where NVIDIA's packages for pip put it."""
    found = shutil.which("compute-sanitizer")
    spec = importlib.util.find_spec("nvidia")
    folders = [Path(folder) for folder in (spec.submodule_search_locations or [])] if spec else []
    beside = [str(path) for folder in folders for path in sorted(folder.glob("*/bin/compute-sanitizer"))]
    return found or (beside[-1] if beside else None)


def launched(text):
    return {(folder, kernel) for folder, kernel, num_launches in LAUNCHED.findall(text) if int(num_launches) > 0}


def run_alone(command, *, environment, timeout_s=TIMEOUT_S):
    """Run a command without this process's standard input, which under pytest-xdist is the worker's channel; fail
    with its output after a while.
    """
    given = {
        "cwd": ROOT,
        "env": environment,
        "stdin": subprocess.DEVNULL,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.STDOUT,
    }
    try:
        return subprocess.run(command, **given, timeout=timeout_s, text=True, check=False)
    except subprocess.TimeoutExpired as error:
        pytest.fail(
            f"{command[0]} did not end within {timeout_s} s; its output so "
            f"far:\n{(error.stdout or b'').decode(errors='replace')[-8000:]}"
        )


def watched_by(sanitizer, tool):
    """The beginning of a command that a tool of the sanitizer watches."""
    options = {
        "--tool": tool,
        "--error-exitcode": ERROR_CODE,
        "--target-processes": "application-only",
        "--launch-timeout": LAUNCH_TIMEOUT_S,
    }
    return [sanitizer, *(str(part) for option in options.items() for part in option)]


def kernels():
    return {(path.parent.name, name) for path, names in all_kernels().items() for name in names}


def lanes():
    """Folders with kernels, dealt out."""
    return [sorted(CASES)[lane::NUM_LANES] for lane in range(NUM_LANES)]


def test_every_folder_is_in_one_lane():
    assert sorted(name for names in lanes() for name in names) == sorted(CASES)


@pytest.mark.fault
def test_every_kernel_is_launched_by_the_case_of_its_folder():
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = run_alone([sys.executable, "-m", "tests.gpu.sanitizer"], environment=environment)
    assert done.returncode == 0, done.stdout[-6000:]
    assert launched(done.stdout) == kernels()
    print(f"R14: {len(kernels())} kernels in {len(CASES)} folders")


def test_every_folder_with_a_kernel_has_a_case():
    missing = [name for name, case in CASES.items() if case is None]
    assert missing == [], "write functions of these names in tests/gpu/sanitizer.py"
    assert {path.relative_to(PACKAGE).as_posix() for path in all_kernels()} == {
        f"kernels/{name}/triton.py" for name in CASES
    }
    assert len(kernels()) >= 24


@pytest.mark.parametrize("decorator", ["triton.jit", "jit", "triton.jit(do_not_specialize=['n'])"])
@pytest.mark.parametrize("call", ["launch(anew, (3,), x, num_warps=4)", "anew[(3,)](x, num_warps=4)"])
def test_a_new_kernel_is_seen(tmp_path, decorator, call):
    """Whatever its name is; a function that other kernels call is none."""
    path = tmp_path / "triton.py"
    path.write_text(
        f"@{decorator}\ndef helper(x): pass\n\n@{decorator}\ndef anew(x): helper(x)\n\ndef run(x):\n    {call}\n"
    )
    assert kernels_of(path) == ["anew"]


def test_a_command_finds_its_standard_input_at_an_end():
    """Whatever this process's own is: here a pipe that nobody closes."""
    kept, (read_end, write_end) = os.dup(0), os.pipe()
    os.dup2(read_end, 0)
    try:
        done = run_alone(
            [sys.executable, "-c", "import sys; print(repr(sys.stdin.read()))"],
            environment=dict(os.environ),
            timeout_s=20,
        )
    finally:
        os.dup2(kept, 0)
        for descriptor in (kept, read_end, write_end):
            os.close(descriptor)
    assert done.stdout == "''\n"


def test_a_command_that_hangs_fails_with_its_output():
    with pytest.raises(pytest.fail.Exception, match=r"did not end within 0.5 s; its output so far:\nthe first case"):
        run_alone(["sh", "-c", "echo the first case; exec sleep 60"], environment=dict(os.environ), timeout_s=0.5)


def test_a_case_that_leaves_a_kernel_out_is_seen():
    text = (
        "kernels/rms_norm: _rms_norm_forward_kernel launched 8 times\nkernels/rms_norm: _rms_norm_backward_kernel "
        "launched 0 times\n"
    )
    assert launched(text) == {("rms_norm", "_rms_norm_forward_kernel")}


@pytest.mark.gpu
@pytest.mark.slow(40)
@pytest.mark.parametrize("lane", range(NUM_LANES))
@pytest.mark.parametrize("tool", TOOLS)
def test_the_sanitizer_has_nothing_to_report(tool, lane):
    sanitizer = find_sanitizer()
    if sanitizer is None:
        pytest.skip(HOW_TO_INSTALL)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    # Otherwise torch hands out parts of large blocks, and an access beyond a tensor lies in the next one.
    environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    names = lanes()[lane]
    done = run_alone(
        [*watched_by(sanitizer, tool), sys.executable, "-c", CASES_SCRIPT, *names], environment=environment
    )
    assert done.returncode == 0, done.stdout[-8000:]
    assert re.search(TOOLS[tool], done.stdout, flags=re.MULTILINE), done.stdout[-4000:]
    assert launched(done.stdout) == {found for found in kernels() if found[0] in names}


@pytest.mark.gpu
@pytest.mark.slow
def test_a_write_beyond_a_tensor_is_reported(tmp_path):
    """The same command over a kernel without its mask: what the other test would see."""
    sanitizer = find_sanitizer()
    if sanitizer is None:
        pytest.skip(HOW_TO_INSTALL)
    path = tmp_path / "beyond.py"
    path.write_text(
        "import torch, triton\nimport triton.language as tl\n\n@triton.jit\ndef beyond(ptr, BLOCK: tl.constexpr):\n"
        "    tl.store(ptr + tl.arange(0, BLOCK), 1.0)\n\nbeyond[(1,)](torch.empty(5, device='cuda'), "
        "BLOCK=4096)\ntorch.cuda.synchronize()\n"
    )
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    done = run_alone([*watched_by(sanitizer, "memcheck"), sys.executable, str(path)], environment=environment)
    assert done.returncode != 0
    assert "Invalid __global__ write" in done.stdout
