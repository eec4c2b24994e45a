"""Launches of compiled kernels: Triton compiles once for each kind of arguments, and later launches skip its binding."""

import ast
import importlib
import threading
import time
from pathlib import Path

import pytest
import torch

import lightning_fastft.kernels
from lightning_fastft.core.phases import LOGGER
from lightning_fastft.kernels.backends import uses_triton
from lightning_fastft.kernels.compilation import Compilation
from lightning_fastft.kernels.launch import Launch, LaunchRecorder, launch, run_on_meta

KERNELS = Path(lightning_fastft.kernels.__file__).parent


class Kernel:
    """What launch needs of Triton: a kernel that compiles at every call of its own, and notes launches."""

    arg_names = ("x_ptr", "size", "factor", "HAS_BIAS", "BLOCK")

    def __init__(self, *, is_interpreted=False):
        self.is_interpreted = is_interpreted
        self.num_compiled = 0
        self.launched = []

    def __getitem__(self, grid):
        def run(*arguments, **options):
            self.num_compiled += 1
            self.launched.append((grid, arguments, options))
            return None if self.is_interpreted else Compiled(self.launched)

        return run


class Compiled:
    def __init__(self, launched):
        self.launched = launched

    def __getitem__(self, grid):
        return lambda *arguments: self.launched.append((grid, arguments))


ROWS = torch.zeros(64)
OPTIONS = {"BLOCK": 128, "HAS_BIAS": True, "num_warps": 4}
# As the compiler gets them.
COMPILED_OPTIONS = {**OPTIONS, "enable_fp_fusion": True}


def test_a_compiled_kernel_gets_a_grid_of_three_and_its_constants_in_their_order():
    kernel = Kernel()
    launch(kernel, (2,), ROWS, 32, 0.5, **OPTIONS)
    launch(kernel, (3, 4), ROWS, 48, 0.25, **OPTIONS)
    assert kernel.num_compiled == 1
    assert kernel.launched == [
        ((2,), (ROWS, 32, 0.5), COMPILED_OPTIONS),
        ((3, 4, 1, 1), (ROWS, 48, 0.25, True, 128)),
    ]


OTHERS = {
    "a dtype": ((ROWS.bfloat16(), 32, 0.5), {}),
    "an address that 16 does not divide": ((ROWS[1:], 32, 0.5), {}),
    "a number that 16 does not divide": ((ROWS, 33, 0.5), {}),
    "1": ((ROWS, 1, 0.5), {}),
    "a number of 64 bits": ((ROWS, 2**40, 0.5), {}),
    "a number without sign": ((ROWS, 2**63, 0.5), {}),
    "a whole number in place of a fraction": ((ROWS, 32, 2), {}),
    "a bool": ((ROWS, True, 0.5), {}),
    "nothing": ((ROWS, None, 0.5), {}),
    "several tensors": (((ROWS, ROWS), 32, 0.5), {}),
    "a constant": ((ROWS, 32, 0.5), {"BLOCK": 64}),
    "a number of warps": ((ROWS, 32, 0.5), {"num_warps": 8}),
}


@pytest.mark.parametrize("other", OTHERS)
def test_arguments_of_another_kind_are_compiled_for(other):
    kernel = Kernel()
    launch(kernel, (1,), ROWS, 32, 0.5, **OPTIONS)
    arguments, options = OTHERS[other]
    for _ in range(2):
        launch(kernel, (1,), *arguments, **{**OPTIONS, **options})
    assert kernel.num_compiled == 2
    launch(kernel, (1,), ROWS, 32, 0.5, **OPTIONS)
    assert kernel.num_compiled == 2


def test_1_is_compiled_for_apart_from_other_odd_numbers():
    kernel = Kernel()
    for size in (33, 1, 33, 1):
        launch(kernel, (1,), ROWS, size, 0.5, **OPTIONS)
    assert kernel.num_compiled == 2


def test_a_kernel_that_wants_every_rounding_keeps_its_option():
    kernel = Kernel()
    launch(kernel, (1,), ROWS, 32, 0.5, **OPTIONS, enable_fp_fusion=False)
    assert kernel.launched == [((1,), (ROWS, 32, 0.5), {**OPTIONS, "enable_fp_fusion": False})]


def test_an_interpreted_kernel_runs_at_every_launch():
    kernel = Kernel(is_interpreted=True)
    for _ in range(3):
        launch(kernel, (1,), ROWS, 32, 0.5, **OPTIONS)
    assert kernel.num_compiled == 3


def test_every_kernel_ends_with_its_constants_and_gets_nothing_else_by_name():
    pytest.importorskip("triton")
    num_launches = 0
    for path in KERNELS.glob("*/triton.py"):
        module = importlib.import_module(f"lightning_fastft.kernels.{path.parent.name}.triton")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or getattr(node.func, "id", "") != "launch":
                continue
            num_launches += 1
            kernel = getattr(module, node.args[0].id)
            are_constants = [parameter.is_constexpr for parameter in kernel.params]
            assert are_constants == sorted(are_constants), kernel
            assert not any(parameter.has_default for parameter in kernel.params), kernel
            constants = {parameter.name for parameter in kernel.params if parameter.is_constexpr}
            named = {keyword.arg for keyword in node.keywords} - {None, "num_warps", "num_stages", "enable_fp_fusion"}
            assert named <= constants, (kernel, named - constants)
    assert num_launches > 40


def test_a_recorder_keeps_one_launch_for_each_code_and_makes_none():
    kernel, row = Kernel(), torch.empty(64, device="meta")
    with LaunchRecorder() as recorder:
        assert uses_triton(row.device)
        for size in (32, 48, 7):
            launch(kernel, (2,), row, size, 0.5, **OPTIONS)
    assert [recorded.arguments[1] for recorded in recorder.launches.values()] == [32, 7]
    assert kernel.launched == []
    assert not uses_triton(row.device)
    launch(kernel, (2,), row, 32, 0.5, **OPTIONS)
    assert kernel.num_compiled == 1


class Warmed:
    """What Launch needs of Triton: a kernel that is compiled without a launch, and then prepared for launches."""

    def __init__(self, fails=False):
        self.fails, self.warmed, self.threads = fails, [], set()

    def warmup(self, *arguments, grid, **options):
        if self.fails:
            raise KeyError("no such operation")
        return {(1, 1, 1): self.warmed.append((arguments, options, threading.current_thread().name))}


@pytest.fixture
def no_device(monkeypatch):
    chosen = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    return chosen


def test_launches_are_compiled_in_threads_of_the_device(no_device):
    kernels = [Warmed(), Warmed()]
    launches = [Launch(kernel, (number,), OPTIONS) for number in range(3) for kernel in kernels]
    compilation = Compilation(launches, device=torch.device("cuda", 3), num_threads=2)
    compilation.wait()
    for kernel in kernels:
        assert [(arguments, options) for arguments, options, _ in kernel.warmed] == [
            ((n,), COMPILED_OPTIONS) for n in range(3)
        ]
        assert all("fastft-compile" in thread for *_, thread in kernel.warmed)
    assert set(no_device) == {torch.device("cuda", 3)}
    assert not [thread for thread in threading.enumerate() if "fastft-compile" in thread.name]
    compilation.cancel()
    # A model of another family may launch none.
    Compilation([], device=torch.device("cuda"), num_threads=2).wait()


def test_the_first_kernel_is_compiled_alone(no_device):
    order, others = [], threading.Barrier(2, timeout=10.0)

    class Ordered(Warmed):
        def warmup(self, *arguments, **options):
            order.append("begin")
            # Two others run at once, and nothing beside the first.
            _ = others.wait() if arguments else time.sleep(0.05)
            order.append("end")
            return super().warmup(*arguments, **options)

    launches = [Launch(Ordered(), (), {}), Launch(Ordered(), (1,), {}), Launch(Ordered(), (2,), {})]
    Compilation(launches, device=torch.device("cuda"), num_threads=3).wait()
    assert order[:2] == ["begin", "end"]
    assert len(order) == 6


def test_kernels_that_fail_are_reported_once(no_device, caplog):
    launches = [
        Launch(Warmed(fails=True), (), {}),
        Launch(good := Warmed(), (), {}),
        Launch(Warmed(fails=True), (), {}),
    ]
    with caplog.at_level("INFO", LOGGER.name):
        compilation = Compilation(launches, device=torch.device("cuda", 0), num_threads=1)
        compilation.wait()
        compilation.wait()
    assert len(good.warmed) == 1
    assert [record.getMessage() for record in caplog.records] == [
        "2 kernels were not compiled ahead of the first step: KeyError('no such operation')"
    ]


def test_a_cancelled_compilation_starts_no_other_kernel(no_device):
    begun, end = threading.Event(), threading.Event()

    class Slow(Warmed):
        def warmup(self, *arguments, **options):
            begun.set()
            end.wait(10.0)
            return super().warmup(*arguments, **options)

    slow, other = Slow(), Warmed()
    compilation = Compilation([Launch(slow, (), {}), Launch(other, (), {})], device=torch.device("cuda"), num_threads=1)
    assert begun.wait(10.0)
    threading.Timer(0.05, end.set).start()
    compilation.cancel()
    assert len(slow.warmed) == 1
    assert other.warmed == []


def test_a_product_that_torch_2_11_cannot_run_on_the_meta_device_returns_where_it_writes():
    out = torch.empty(4, 4, device="meta")
    # Without operands: nothing is run.
    assert run_on_meta(torch.ops.aten.addmm.dtype_out, (), {"out": out}) is out
    assert run_on_meta(torch.ops.aten.neg.default, (out,), {}) is not out
