"""Train an image tower on two ranks, one of which has packs without images: ``-m tests.training.images_worker
<folder>``; each rank writes its trained tensors to ``<folder>/<rank>.pt``.
"""

import os
import sys
from pathlib import Path

import torch

from lightning_fastft.strategies.registry import register_strategies
from lightning_fastft.training.datamodule import PackedDataModule
from tests.support.rank_exit import leave
from tests.support.training_parts import quiet_trainer
from tests.support.vision import chat, make_image
from tests.training.test_images import TowerModule

# As many of either kind, and one example per pack: some steps have images on one rank alone, some on none.
WORDS = "two plus two " * 3


def make_rows():
    return [chat([make_image(0, 16, 16), WORDS] if number < 3 else [WORDS * 2], "four") for number in range(8)]


def main(folder):
    register_strategies()
    module = TowerModule()
    data = PackedDataModule(make_rows(), max_tokens=64, cache_dir=None, num_proc=1, num_workers=0, show_progress=False)
    trainer = quiet_trainer(folder, strategy="fastft_ddp", devices=2, max_steps=4)
    trainer.fit(module, data)
    kinds = [batch.has_images for batch in data.train_dataloader()]
    trained = {name: tensor.detach() for name, tensor in module.named_parameters() if tensor.requires_grad}
    torch.save({"trained": trained, "has_images": kinds}, Path(folder) / f"{os.environ['RANK']}.pt")
    leave()


if __name__ == "__main__":
    main(sys.argv[1])
