"""Two ranks that save, lose the newest checkpoint, and go on by ckpt_path="last": ``-m
tests.checkpoint.last_worker <folder>``.
"""

import sys
import warnings
from pathlib import Path

import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from tests.strategies.strategy_worker import Lazy
from tests.support.training_parts import packed_loader, quiet_trainer


def fit(folder, *, max_steps, ckpt_path=None):
    callback = ModelCheckpoint(folder / "runs", save_last=True, save_top_k=-1, every_n_train_steps=1, filename="{step}")
    options = {"strategy": "fastft_ddp", "devices": 2, "use_distributed_sampler": False, "enable_checkpointing": True}
    trainer = quiet_trainer(folder, max_steps=max_steps, callbacks=[callback], **options)
    trainer.fit(Lazy(), packed_loader(6), ckpt_path=ckpt_path)
    return trainer


def main(folder):
    warnings.simplefilter("ignore")
    first = fit(folder, max_steps=3)
    if first.global_rank == 0:
        (folder / "runs" / "last.ckpt").write_bytes(b"torn")
    torch.distributed.barrier()
    trainer = fit(folder, max_steps=4, ckpt_path="last")
    total = sum(float(parameter.detach().double().sum()) for parameter in trainer.lightning_module.parameters())
    (folder / f"rank{trainer.global_rank}").write_text(f"{trainer.global_step} {total}")
    if trainer.global_rank == 0:
        (folder / "taken").write_text(Path(trainer.ckpt_path).name)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
