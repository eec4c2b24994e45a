"""The benchmark of the kernels that move rows, in its tiny form in Triton's interpreter, and what it refuses to
time.
"""

import csv
import importlib
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from benchmarks.results import COLUMNS
from benchmarks.row_kernels import (
    CANDIDATES,
    CONSTANTS,
    TINY_SIZES,
    all_cases,
    compare,
    constants_set,
    measure,
)
from lightning_fastft.kernels.block_diagonal import reference as block_diagonal
from tests.support.children import ROOT

CASES = all_cases(TINY_SIZES)
SCRIPT = """
import os, sys
os.environ["TRITON_INTERPRET"] = "1"
import tests.support.bare_package
from tests.support.interpreter import exchange_language_once
from benchmarks.row_kernels import main
exchange_language_once()
raise SystemExit(main(sys.argv[1:]))
"""


@pytest.mark.fault
def test_every_kernel_has_a_time(tmp_path):
    pytest.importorskip("triton")
    arguments = [
        "--device",
        "cpu",
        "--runs",
        "1",
        "--out",
        str(tmp_path),
        "--tiles",
        "block_diagonal=512,4",
        "adamw_step=256,4,64,1,1",
    ]
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT, *arguments]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    with (tmp_path / "rows.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == COLUMNS
    timed = {(row["workload"], row["system"]) for row in rows if row["metric"] == "time"}
    expected = set()
    for case in CASES:
        arms = {"block_diagonal": ["512,4"], "adamw_step": ["256,4,64,1,1"]}.get(case.kernel, [])
        expected |= {(f"{case.name}, {case.workload}", arm) for arm in arms}
        assert sum(workload == f"{case.name}, {case.workload}" for workload, _ in timed) == len(arms) + 1
    assert expected < timed
    assert len(done.stdout.splitlines()) == 1 + len(timed)
    assert {row["unit"] for row in rows} == {"us", "TB/s"}
    assert all(float(row["value"]) > 0 for row in rows if row["metric"] == "time")


class Recorder:
    """Stands for a kernel's module: calls its twin, and adds up the bytes of what it was given and what it returned."""

    def __init__(self, kernel):
        self.twin = importlib.import_module(f"lightning_fastft.kernels.{kernel}.reference")
        self.bytes = {}

    def __getattr__(self, name):
        def call(*arguments, **options):
            self.note((arguments, list(options.values())))
            result = getattr(self.twin, name)(*arguments, **options)
            self.note(result)
            return result

        return call

    def note(self, value):
        if isinstance(value, torch.Tensor):
            # A tensor that is returned as it was given is neither read again nor written.
            self.bytes[value.data_ptr(), value.shape] = value.numel() * value.element_size()
        elif isinstance(value, (list, tuple)):
            for part in value:
                self.note(part)


@pytest.mark.parametrize("case", [case for case in CASES if case.kernel != "adamw_step"], ids=lambda case: case.name)
def test_bytes_are_those_of_the_tensors(case):
    recorder = Recorder(case.kernel)
    case.make("cpu")(recorder)
    # What is written over what was read.
    in_place = {"cross_entropy loss and gradient": TINY_SIZES.num_loss_rows * TINY_SIZES.vocabularies[0]}
    in_place["divergence"] = in_place["cross_entropy loss and gradient"]
    in_place["low_rank_add"] = TINY_SIZES.num_rows * TINY_SIZES.width
    written_again = sum(2 * count for name, count in in_place.items() if case.name.startswith(name))
    assert case.num_bytes == sum(recorder.bytes.values()) + written_again


def test_constants_and_candidates_are_those_of_the_kernels():
    assert CONSTANTS.keys() == CANDIDATES.keys() == {case.kernel for case in CASES}
    for kernel, names in CONSTANTS.items():
        source = (ROOT / "lightning_fastft" / "kernels" / kernel / "triton.py").read_text()
        assert all(name in source for name in names)
        assert all(len(text.split(",")) == len(names) for text in CANDIDATES[kernel])


def test_a_wrong_result_is_no_time():
    case = next(case for case in CASES if case.kernel == "block_diagonal")

    def wrong(out_OC, blocks):
        block_diagonal.write_block_diagonal(out_OC, blocks)
        out_OC[0, 0] += 1.0

    reason, times = measure(case, SimpleNamespace(write_block_diagonal=wrong), device="cpu", num_runs=1)
    assert reason.startswith("WRONG")
    assert times == []
    assert len(measure(case, block_diagonal, device="cpu", num_runs=3)[1]) == 3


@pytest.mark.parametrize(
    ("ours", "truth"),
    [
        (torch.tensor([1.0, float("nan")]), torch.ones(2)),
        (torch.tensor([1.0, 1.0001]), torch.ones(2)),
        (torch.tensor([1.0, 1.02]).half(), torch.ones(2).half()),
        (torch.tensor([True]), torch.tensor([False])),
        (None, torch.ones(2)),
    ],
)
def test_what_differs_is_told(ours, truth):
    assert compare([truth, None], [truth, None]) is None
    assert compare([truth, ours], [truth, truth]).startswith("WRONG: result 1")


def test_constants_are_put_back_after_an_error():
    module = SimpleNamespace(TILE_SIZE=1, NUM_WARPS=2)

    def fail():
        with constants_set("block_diagonal", module, "7,8"):
            assert (module.TILE_SIZE, module.NUM_WARPS) == (7, 8)
            raise OSError("in between")

    with pytest.raises(OSError, match="in between"):
        fail()
    assert (module.TILE_SIZE, module.NUM_WARPS) == (1, 2)
