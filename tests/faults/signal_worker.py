"""Rank 1 gets a signal inside a window, and each rank writes how it ended.

Run by torchrun on two ranks: ``-m tests.faults.signal_worker <strategy> <folder>``.
"""

import os
import signal
import sys
from pathlib import Path

from lightning.pytorch.callbacks import Callback

from tests.parity.resume_worker import train
from tests.support.rank_exit import leave


class SignalToSelf(Callback):
    """A real signal, in the first micro-batch of the third window."""

    def __init__(self, rank, number):
        self.rank, self.number = rank, number

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_rank == self.rank and batch.index == 4:
            os.kill(os.getpid(), self.number)


if __name__ == "__main__":
    strategy, folder = sys.argv[1], Path(sys.argv[2])
    code = 0
    try:
        train("lora", strategy, folder, callbacks=[SignalToSelf(1, signal.SIGUSR1)])
    except SystemExit as stop:
        code = stop.code
    (folder / f"rank{os.environ['RANK']}").write_text(str(code))
    leave()
