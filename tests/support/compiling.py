"""Compile the Triton kernels that a function launches, for GPUs that need not be here."""

import re
import subprocess
import tempfile
from collections import defaultdict
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest

# Shared memory of a program in KiB by compute capability; the least is that of a consumer card.
SHARED_KIB = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}


class _Driver:
    """As much of Triton's driver as a launch asks for before it compiles."""

    def __init__(self, capability):
        from triton.backends.compiler import GPUTarget

        self.target = GPUTarget("cuda", capability, 32)

    def get_current_device(self):
        # Kernels are cached by device.
        return self.target

    def get_current_target(self):
        return self.target

    def get_current_stream(self, device):
        return 0


@contextmanager
def compiled_for(capability):
    """Let launches compile for a compute capability instead of running, and fail where shared memory is too small.

    A GPU that SHARED_KIB does not list has the least. Yields the compiled kernels by the name of their function;
    tensors may be on the meta device.
    """
    from triton import knobs
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    run, compiled = JITFunction.run, defaultdict(list)
    shared_kib = SHARED_KIB.get(capability, min(SHARED_KIB.values()))

    def compile_only(self, *arguments, grid, warmup, **options):
        kernel = run(self, *arguments, grid=grid, warmup=True, **options)
        compiled[self.fn.__name__].append(kernel)
        assert kernel.metadata.shared <= shared_kib * 1024, (self.fn.__name__, kernel.metadata.shared)
        # Without a result, as an interpreted kernel: a launch would run a kernel that it has kept.

    with (
        mock.patch.object(JITFunction, "run", compile_only),
        mock.patch.object(driver, "_active", _Driver(capability)),
        # Line numbers for a profiler take a quarter of the time of a compilation.
        mock.patch.object(knobs.compilation, "disable_line_info", True),
    ):
        yield compiled


def stack_bytes(kernel):
    """Return the bytes of stack of a thread: more than 0 where a kernel needs more registers than a thread has."""
    import triton

    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(kernel.asm["cubin"])
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(cubin)]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return int(re.search(r"STACK:(\d+)", usage)[1])


def skip_before_triton(version, reason):
    """Skip the rest of a test with an older Triton than a version, such as (3, 9)."""
    import triton

    if tuple(int(part) for part in triton.__version__.split(".")[:2]) < version:
        pytest.skip(f"Triton {triton.__version__}: {reason} before {'.'.join(map(str, version))}")
