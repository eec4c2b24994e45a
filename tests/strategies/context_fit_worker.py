"""Train with the parts of packs: ``-m tests.strategies.context_fit_worker <part> <folder>``.
Every rank writes what it trained; ``train`` in one process gives what it is compared with.
"""

import os
import sys
from pathlib import Path

import torch
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from lightning_fastft.activations.checkpointing import OffloadCheckpointing
from lightning_fastft.callbacks.fused_kernels import FusedKernels
from lightning_fastft.strategies.ddp import FastFTDDPStrategy
from lightning_fastft.strategies.fsdp2 import FastFTFSDPStrategy
from tests.strategies.strategy_worker import make_tuner, trained_state
from tests.support.training_parts import quiet_data, quiet_trainer

NUM_STEPS, SAVED_STEP, MAX_TOKENS = 3, 2, 31
# Name -> strategy, kind of training.
RUNS = {
    "ddp": (lambda: FastFTDDPStrategy(context_parallel=2, activations=OffloadCheckpointing("recompute")), "lora"),
    "fsdp": (lambda: FastFTFSDPStrategy(context_parallel=2, activations=OffloadCheckpointing("recompute")), "full"),
    "ddp 2 x 2": (lambda: FastFTDDPStrategy(context_parallel=2), "full"),
    "fsdp 2 x 2": (lambda: FastFTFSDPStrategy(context_parallel=2), "lora"),
    "hybrid 2 x 2": (lambda: FastFTFSDPStrategy(context_parallel=2, shard=2), "full"),
    # Two ranks with whole packs.
    "full": (FastFTDDPStrategy, "full"),
    "lora": (FastFTDDPStrategy, "lora"),
}
PARTS = {
    "quick": ["ddp"],
    "two": ["fsdp"],
    "four": ["ddp 2 x 2", "fsdp 2 x 2", "hybrid 2 x 2"],
    "groups": ["full", "lora"],
}


def make_rows(num_rows, *, seed):
    """Documents of 2 to 30 tokens, whose first half is not trained."""
    draws = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(num_rows):
        length = 2 + int(torch.randint(29, (), generator=draws))
        ids = torch.randint(3, 61, (length,), generator=draws).tolist()
        rows.append({"input_ids": ids, "labels": [-100] * (length // 2) + ids[length // 2 :]})
    return rows


class Watch(Callback):
    """Keeps the logged losses of the steps, and the parts that this rank trained."""

    def __init__(self):
        self.losses, self.num_tokens, self.num_labelled = [], 0, 0

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.losses.append(float(trainer.callback_metrics["train_loss"]))
        self.num_tokens += batch.context.num_tokens
        self.num_labelled += batch.context.num_labelled


def train(kind, *, strategy, devices, folder, ckpt_path=None):
    """One run of accumulation 2; what it trained and logged."""
    seed_everything(5, verbose=False)
    module = make_tuner(kind, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.5))
    watch = Watch()
    saving = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=SAVED_STEP, save_top_k=-1)
    trainer = quiet_trainer(
        folder,
        devices=devices,
        strategy=strategy,
        max_steps=NUM_STEPS,
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
        num_sanity_val_steps=0,
        val_check_interval=2 * NUM_STEPS,
        callbacks=[FusedKernels(), watch, saving],
        enable_checkpointing=True,
    )
    data = quiet_data(make_rows(60, seed=1), val_paths=make_rows(8, seed=2), max_tokens=MAX_TOKENS)
    trainer.fit(module, data, ckpt_path=ckpt_path)
    return {
        "state": trained_state(module),
        "losses": watch.losses,
        "tokens": watch.num_tokens,
        "labelled": watch.num_labelled,
        "validation": {name: float(value) for name, value in trainer.callback_metrics.items() if "val" in name},
        "mesh": next((status.reason for status in trainer.strategy.statuses() if status.name == "mesh"), ""),
        "plan": [data.plan.world_size, data.plan.accumulate],
    }


def main(part, folder):
    rank, num_ranks, folder = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), Path(folder)
    found = {}
    for name in PARTS[part]:
        make_strategy, kind = RUNS[name]
        place = folder / name.replace(" ", "-")
        found[name] = train(kind, strategy=make_strategy(), devices=num_ranks, folder=place)
        if part in ("quick", "two"):
            found[name, "resumed"] = train(
                kind, strategy=make_strategy(), devices=num_ranks, folder=place / "again",
                ckpt_path=place / f"step={SAVED_STEP}.ckpt",
            )  # fmt: skip
    torch.save(found, folder / f"found-{rank}.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
