"""``fastft doctor`` without a config: what this machine can do, in about a second, without importing torch."""

from __future__ import annotations

import platform
import shutil
import subprocess
from collections.abc import Iterator
from typing import NamedTuple

from lightning_fastft.core.cores import count_usable_cores
from lightning_fastft.core.extras import EXTRAS, missing_modules, pip_line, version_of
from lightning_fastft.core.status import Status, render_status_table

_PACKAGES = ("torch", "lightning", "transformers", "peft", "triton")
_QUERY = ("--query-gpu=name,memory.total,compute_cap,driver_version", "--format=csv,noheader,nounits")
_SECONDS_FOR_DRIVER = 10.0


class InstalledGpu(NamedTuple):
    """A GPU as the driver names it."""

    name: str
    gib: float
    capability: tuple[int, int]
    driver: str


def describe_machine() -> str:
    """Return the devices, the versions, and a table of what works here."""
    gpus = find_gpus()
    lines = [
        f"GPU {number}: {gpu.name}, {gpu.gib:.0f} GiB, compute capability {gpu.capability[0]}.{gpu.capability[1]}, "
        f"driver {gpu.driver}"
        for number, gpu in enumerate(gpus)
    ]
    if not gpus:
        lines.append("GPU: none that nvidia-smi lists")
    lines.append(f"CPU: {count_usable_cores()} usable cores, Python {platform.python_version()}")
    lines.append(", ".join(f"{name} {version_of(name) or 'not installed'}" for name in _PACKAGES))
    table = render_status_table([*_judge_gpu(gpus), *_judge_extras()])
    return (
        "\n".join([*lines, "", table, "", "For one model and its data: fastft doctor --config NAME --data.paths FILE"])
        + "\n"
    )


def find_gpus() -> list[InstalledGpu]:
    """Return the GPUs that nvidia-smi lists; none without a driver."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    try:
        done = subprocess.run(  # noqa: S603 - a fixed command, no shell
            [program, *_QUERY], capture_output=True, text=True, check=False, timeout=_SECONDS_FOR_DRIVER
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines() if done.returncode == 0]
    return [
        InstalledGpu(
            name, float(mib) / 1024, (int(capability.partition(".")[0]), int(capability.partition(".")[2])), driver
        )
        for name, mib, capability, driver in (row for row in rows if len(row) == 4)
        if mib.replace(".", "").isdigit()
    ]


def _judge_gpu(gpus: list[InstalledGpu]) -> Iterator[Status]:
    """Yield what the GPUs and the build of torch allow; the least capable GPU counts."""
    torch_version = version_of("torch")
    if not gpus or "+cpu" in torch_version:
        reason = f"torch {torch_version} is a build for the CPU" if gpus else "no GPU: training runs on the CPU, slowly"
        remedy = "install torch for CUDA, as pytorch.org says" if gpus else ""
        yield Status("GPU training", "refused" if gpus else "inactive", reason, remedy)
        return
    capability = min(gpu.capability for gpu in gpus)
    found = f"compute capability {capability[0]}.{capability[1]}"
    yield Status("GPU training", "active", f"{len(gpus)} GPUs" if len(gpus) > 1 else gpus[0].name)
    has_triton = bool(version_of("triton"))
    yield Status(
        "Triton kernels",
        "active" if has_triton else "refused",
        f"triton {version_of('triton')}" if has_triton else "triton is not installed",
        "" if has_triton else "pip install triton",
    )
    for name, least, use in (
        ("bf16 arithmetic", (8, 0), "dtype='float16' with precision='16-mixed' trains here"),
        ("flash attention", (8, 0), "attention='flex' or 'sdpa' serve here"),
        ("fp8 products", (8, 9), "not needed: only FusedKernels(base_compute='fp8') asks for it"),
        ("grouped GEMM of torch", (9, 0), "a Triton kernel serves experts here"),
    ):
        is_able = capability >= least
        reason = found if is_able else f"{found}, needs {least[0]}.{least[1]}; {use}"
        yield Status(name, "active" if is_able else "inactive", reason)


def _judge_extras() -> Iterator[Status]:
    """Yield one status for each extra."""
    for name, extra in EXTRAS.items():
        missing = missing_modules(name)
        reason = extra.enables if not missing else f"{extra.enables}; {', '.join(missing)} not installed"
        yield Status(f"[{name}]", "inactive" if missing else "active", reason, pip_line(name) if missing else "")
