"""Train on two ranks, one of which has packs without images:

    -m tests.training.images_worker <folder> tower           adapters of an image tower, under DDP
    -m tests.training.images_worker <folder> <strategy>      every weight of a model in <folder>

Each rank writes what it saw to ``<folder>/<rank>.pt``.
"""

import os
import sys
from pathlib import Path

import torch
from lightning.pytorch import Callback

from lightning_fastft.strategies.registry import register_strategies
from lightning_fastft.training.datamodule import PackedDataModule
from lightning_fastft.training.fine_tuner import FineTuner
from tests.support.rank_exit import leave
from tests.support.training_parts import quiet_trainer
from tests.support.vision import build_processor, chat, make_image
from tests.training.test_images import TowerModule

# As many of either kind, and one example per pack: some steps have images on one rank alone, some on none.
WORDS = "two plus two " * 3


def make_rows():
    return [chat([make_image(0, 16, 16), WORDS] if number < 3 else [WORDS * 2], "four") for number in range(8)]


class Losses(Callback):
    """The loss of each step."""

    def __init__(self):
        self.losses = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.losses.append(float(outputs["loss"]))


def main(folder, kind):
    register_strategies()
    options = {"cache_dir": None, "num_proc": 1, "num_workers": 0, "show_progress": False}
    losses = Losses()
    if kind == "tower":
        module, data = TowerModule(), PackedDataModule(make_rows(), max_tokens=64, **options)
        strategy = "fastft_ddp"
    else:
        module = FineTuner(folder, lora=None, dtype="float32", learning_rate=1e-2, warmup_share=0.0)
        data = PackedDataModule(make_rows(), tokenizer=build_processor("qwen3_vl"), max_tokens=128, **options)
        strategy = kind
    trainer = quiet_trainer(folder, strategy=strategy, devices=2, max_steps=4, callbacks=[losses])
    trainer.fit(module, data)
    kinds = [batch.has_images for batch in data.train_dataloader()]
    trained = {name: tensor.detach() for name, tensor in module.named_parameters() if tensor.requires_grad}
    found = {"has_images": kinds, "losses": losses.losses, **({"trained": trained} if kind == "tower" else {})}
    torch.save(found, Path(folder) / f"{os.environ['RANK']}.pt")
    leave()


if __name__ == "__main__":
    main(*sys.argv[1:])
