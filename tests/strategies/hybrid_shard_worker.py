"""Train under hybrid sharding, two copies of two ranks each; run on four ranks: ``-m
tests.strategies.hybrid_shard_worker <folder>``.
"""

import os
import sys
from pathlib import Path

import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from lightning_fastft.hf.sharding.state import gather_state
from lightning_fastft.strategies.fsdp2 import FastFTFSDPStrategy
from lightning_fastft.training.optimizer import FusedAdamW
from tests.strategies.strategy_worker import CLIP_NORM, make_tuner
from tests.support.token_weighting_worker import micro_batches
from tests.support.training_parts import quiet_trainer

NUM_RANKS, NUM_STEPS = 4, 3


def batches_of(rank, *, num_steps=NUM_STEPS):
    """A micro-batch of each step for a rank; for None those of all ranks, one after the other."""
    if rank is not None:
        return micro_batches(accumulate=1, world_size=NUM_RANKS, rank=rank) * num_steps
    rows = [micro_batches(accumulate=1, world_size=NUM_RANKS, rank=number)[0] for number in range(NUM_RANKS)]
    return rows * num_steps


def train(kind, *, folder, rank, shard=2, is_folder=True, max_steps=NUM_STEPS, ckpt_path=None):
    torch.manual_seed(5)
    module = make_tuner(kind, optimizer=lambda parameters: FusedAdamW(parameters, lr=0.01))
    strategy = FastFTFSDPStrategy(shard=shard, save_distributed_checkpoint=is_folder)
    trainer = quiet_trainer(
        folder,
        devices=NUM_RANKS,
        strategy=strategy,
        max_steps=NUM_STEPS,
        use_distributed_sampler=False,
        gradient_clip_val=CLIP_NORM,
        callbacks=[ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)],
        enable_checkpointing=True,
    )
    trainer.fit(module, DataLoader(batches_of(rank), batch_size=None), ckpt_path=ckpt_path)
    return module, trainer


def main(folder):
    rank, folder = int(os.environ["RANK"]), Path(folder)
    found = {}
    for kind in ("lora", "full"):
        for is_folder in (True, False):
            place = folder / f"{kind}-{is_folder}"
            module, trainer = train(kind, folder=place, rank=rank, is_folder=is_folder)
            found[kind, is_folder, "whole"] = gather_state(module.model, is_trained_only=True)
            found[kind, is_folder, "status"] = next(
                status.reason for status in trainer.strategy.statuses() + module.statuses() if "FSDP2" in status.reason
            )
            module, _ = train(
                kind, folder=place / "resumed", rank=rank, is_folder=is_folder, ckpt_path=place / "step=2.ckpt"
            )
            found[kind, is_folder, "resumed"] = gather_state(module.model, is_trained_only=True)
    if rank == 0:
        torch.save(found, folder / "found.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
