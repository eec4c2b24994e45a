"""The watchdog's time of a micro-batch is that of the device, and costs no host sync."""

import pytest
import torch

from lightning_fastft.callbacks.watchdog import NUM_TIMES, _OwnTimes

pytestmark = [pytest.mark.gpu, pytest.mark.alone]


def test_own_time_is_that_of_the_device_without_a_host_sync():
    device = torch.device("cuda", torch.cuda.current_device())
    times = _OwnTimes()
    torch.cuda._sleep(1_000_000)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(NUM_TIMES):
            times.load()
            times.begin(device)
            # About 25 ms at 2 GHz, without a host sync.
            torch.cuda._sleep(50_000_000)
            times.end(device)
            times.note()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert times.median_s == 0.0
    torch.cuda.synchronize()
    times.note()
    assert 0.01 < times.median_s < 0.1
