"""What is said of memory, and what the witness of a step sees; runs that fail in the step are in
tests/faults/test_oom.py.
"""

import sys
from pathlib import Path

import pytest
import torch

from lightning_fastft.activations.budgets import peak_memory_bytes
from lightning_fastft.strategies.memory_errors import StepWitness, describe_peak

CPU = torch.device("cpu")
# Two weights, each with two averages and a count of steps; "note" stands for what is no tensor.
NUM_TENSORS = 8


def stepped_optimizer():
    params = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    optimizer = torch.optim.AdamW(params, lr=0.1)
    for param in params:
        param.grad = torch.ones(3)
    optimizer.step()
    for values in optimizer.state.values():
        values["note"] = 3
    return params, optimizer


@pytest.mark.parametrize("place", ["weight", "exp_avg_sq", "step"])
def test_witness_counts_each_tensor_that_changed_and_nothing_else(place):
    params, optimizer = stepped_optimizer()
    witness = StepWitness(optimizer)
    witness.note()
    with torch.no_grad():
        (params[1] if place == "weight" else optimizer.state[params[1]][place]).add_(1)
    optimizer.state[params[0]]["note"] = 4
    assert f"AdamW had already changed 1 of {NUM_TENSORS} tensors of weights and state" in witness.describe()


def test_witness_of_a_step_that_changed_nothing_takes_away_what_it_made():
    params, optimizer = stepped_optimizer()
    del optimizer.state[params[1]]
    witness = StepWitness(optimizer)
    witness.note()
    optimizer.state[params[1]]["step"] = torch.zeros(())
    assert witness.describe() == "Weights and optimizer state are as before the step."
    assert list(optimizer.state) == [params[0]]


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs the /proc of Linux")
def test_the_peak_of_the_process_is_that_of_the_kernel_in_bytes():
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    kibibytes = int(lines["VmHWM"].split()[0])
    assert peak_memory_bytes(CPU) == pytest.approx(kibibytes * 1024, rel=0.05)
    assert describe_peak(CPU) == f"peak of this process so far {peak_memory_bytes(CPU) / 2**30:.2f} GiB"


def test_where_nothing_is_counted_nothing_is_claimed(monkeypatch):
    monkeypatch.setattr(sys, "platform", "win32")
    assert peak_memory_bytes(CPU) == 0
    assert describe_peak(CPU) == "peak of this process not counted on Windows"
