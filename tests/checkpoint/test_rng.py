"""RandomState: what is drawn after a restore is what was drawn after the capture, also through a file of plain
types.
"""

import random

import numpy as np
import pytest
import torch

from lightning_fastft.checkpoint.files import load_file, save_file
from lightning_fastft.checkpoint.rng import RandomState

CPU = torch.device("cpu")


def draw():
    return [
        random.random(),
        random.gauss(0, 1),
        float(np.random.rand()),
        float(np.random.randn()),
        *torch.rand(3).tolist(),
        *torch.randn(1).tolist(),
    ]


@pytest.mark.parametrize("has_spare", [False, True])
@pytest.mark.parametrize("is_saved", [False, True])
def test_restored_state_draws_the_same(tmp_path, has_spare, is_saved):
    """A spare: gauss and randn make two numbers and keep one."""
    if has_spare:
        random.gauss(0, 1)
        np.random.randn()
    state = RandomState.capture(CPU)
    expected = draw()
    if is_saved:
        save_file(state.to_plain(), tmp_path / "a")
        state = RandomState.from_plain(load_file(tmp_path / "a"))
    draw()
    state.restore(CPU)
    assert draw() == expected


def test_captured_state_does_not_move_on():
    state = RandomState.capture(CPU)
    expected = draw()
    for _ in range(2):
        state.restore(CPU)
        assert draw() == expected


@pytest.mark.gpu
def test_state_of_the_device_is_restored_without_a_wait():
    device = torch.device("cuda:0")
    torch.rand(3, device=device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        state = RandomState.capture(device)
        first = torch.rand(5, device=device)
        RandomState.from_plain(state.to_plain()).restore(device)
        second = torch.rand(5, device=device)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(first, second)
