"""Two ranks save to a URL, fail to, and resume "last": ``-m tests.checkpoint.remote_worker <folder>``."""

import sys
import warnings
from pathlib import Path

import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from lightning_fastft.checkpoint.files import RECORD
from lightning_fastft.core.errors import CheckpointNotSavedError
from tests.checkpoint.faulty_files import DriverError, FaultyFiles, register
from tests.strategies.strategy_worker import Lazy
from tests.support.training_parts import packed_loader, quiet_trainer


class First(Callback):
    """Where the run began."""

    def on_train_start(self, trainer, pl_module):
        self.step = trainer.global_step


def fit(folder, *, max_steps, ckpt_path=None):
    first = First()
    every = {"save_last": True, "save_top_k": -1, "every_n_train_steps": 1, "filename": "{step}"}
    callback = ModelCheckpoint(f"faulty://{folder}/runs", **every)
    options = {"strategy": "fastft_ddp", "devices": 2, "use_distributed_sampler": False, "enable_checkpointing": True}
    trainer = quiet_trainer(folder, max_steps=max_steps, callbacks=[callback, first], **options)
    trainer.fit(Lazy(), packed_loader(6), ckpt_path=ckpt_path)
    return trainer, first.step


def main(folder):
    warnings.simplefilter("ignore")
    register()
    trainer, _ = fit(folder, max_steps=2)

    def fail(steps):
        if steps[-1] == f"half {RECORD}":
            raise DriverError("no network")

    FaultyFiles.fault = staticmethod(fail)
    error = None
    try:
        trainer.save_checkpoint(f"faulty://{folder}/runs/last.ckpt")
    except CheckpointNotSavedError as failure:
        error = type(failure).__name__
    uploads = sum(step.startswith("begin") for step in FaultyFiles.steps)
    FaultyFiles.reset()
    torch.distributed.barrier()
    _, step = fit(folder, max_steps=4, ckpt_path="last")
    torch.save({"error": error, "resumed_at": step, "uploads": uploads}, folder / f"rank{trainer.global_rank}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
