"""Count, on a CPU, the operations that would make the host wait for a GPU, with the recorder of the package.

Copies inside C++ kernels stay unseen; the GPU lane covers them with torch.cuda.set_sync_debug_mode("error").
"""

import contextlib
from collections import Counter

import lightning.pytorch as pl
import torch

from lightning_fastft.monitor.report.waits import WaitRecorder


class HostWaits:
    """What waited, by operation, and where each wait came from."""

    def __init__(self):
        self.recorder = WaitRecorder(torch.device("cpu"))

    def __enter__(self):
        self.recorder.start()
        return self

    def __exit__(self, *error):
        self.recorder.stop()

    @property
    def count(self):
        count = Counter()
        for wait, number in self.recorder.count.items():
            count[wait.operation] += number
        return count

    @property
    def total(self):
        return sum(self.recorder.count.values())

    @property
    def origin(self):
        places = [(wait.operation, wait.library or wait.place, number) for wait, number in self.recorder.count.items()]
        return [f"{operation}: {place} {place.text}" for operation, place, number in places for _ in range(number)]


def count_host_waits():
    """Return a HostWaits that counts in its block; covers the backward and recomputation on a CPU, which run in
    the calling thread.
    """
    return HostWaits()


class CountSteps(pl.Callback):
    """Count host waits from the arrival of each batch until all other callbacks are done with it."""

    def __init__(self):
        self.stack = contextlib.ExitStack()
        self.waits = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.waits.append(self.stack.enter_context(count_host_waits()))

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.stack.close()


@contextlib.contextmanager
def waits_are_errors():
    """On a CUDA device: whatever makes the host wait raises."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
