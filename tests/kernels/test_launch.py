"""Launches of compiled kernels: Triton compiles once for each kind of arguments, and later launches skip its binding."""

import ast
import importlib
from pathlib import Path

import pytest
import torch

import lightning_fastft.kernels
from lightning_fastft.kernels.launch import launch

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


def test_a_compiled_kernel_gets_a_grid_of_three_and_its_constants_in_their_order():
    kernel = Kernel()
    launch(kernel, (2,), ROWS, 32, 0.5, **OPTIONS)
    launch(kernel, (3, 4), ROWS, 48, 0.25, **OPTIONS)
    assert kernel.num_compiled == 1
    assert kernel.launched == [
        ((2,), (ROWS, 32, 0.5), OPTIONS),
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
