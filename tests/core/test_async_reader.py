"""AsyncScalarReader: values come back in order, unchanged by what happens to the tensor afterwards, and nobody
waits.
"""

import pickle

import pytest
import torch

from lightning_fastft.core.async_reader import AsyncScalarReader


def test_values_arrive_in_order_as_they_were():
    copies, value = AsyncScalarReader(), torch.tensor([1.0])
    for step in range(3):
        copies.push(step, value)
        value += 1
    assert [(step, float(found)) for step, found in copies.poll()] == [(0, 1.0), (1, 2.0), (2, 3.0)]
    assert copies.poll() == []


def test_values_carry_no_graph():
    copies = AsyncScalarReader()
    copies.push(None, torch.ones(2, requires_grad=True) * 2)
    ((_, value),) = copies.wait()
    assert not value.requires_grad


def test_clear_and_pickle():
    copies = AsyncScalarReader()
    copies.push(0, torch.ones(1))
    assert len(copies) == 1
    copies.clear()
    assert pickle.loads(pickle.dumps(copies)).poll() == []


@pytest.mark.gpu
@pytest.mark.alone
def test_no_host_wait_on_a_gpu_and_buffers_are_reused():
    copies, value, arrived = AsyncScalarReader(), torch.zeros(4, device="cuda"), []
    torch.cuda._sleep(20_000_000)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in range(5):
            copies.push(step, value)
            value += 1
            # A slow host finds the first ones here.
            arrived += copies.poll()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    arrived += copies.wait()
    assert [float(found[0]) for _, found in arrived] == [0.0, 1.0, 2.0, 3.0, 4.0]
    buffers = {buffer.data_ptr() for buffer in copies._free}
    copies.push(9, value)
    assert copies._pending[0][1].data_ptr() in buffers
