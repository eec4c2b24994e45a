"""Train the tiny model under DDP with PackedTraining and write its weights; run by torchrun on two ranks, with
the folder as its argument.
"""

import os
import sys
from pathlib import Path

import torch
from torch.utils.data import DataLoader

from lightning_fastft.activations.checkpointing import OffloadCheckpointing
from lightning_fastft.callbacks.gradient_health import GradientHealth
from lightning_fastft.callbacks.packed_training import PackedTraining
from lightning_fastft.packing.collate import collate
from tests.support.rank_exit import leave
from tests.support.training_parts import PlainModule, quiet_trainer, random_documents, tiny_llama

NUM_WINDOWS, NUM_PARTS = 4, 2


def window_batches():
    """Windows of two micro-batches; what the loss is divided by makes one process and two ranks the same."""
    windows = []
    for number in range(NUM_WINDOWS):
        parts = [random_documents(2 + part, seed=10 * number + part) for part in range(NUM_PARTS)]
        num_labelled = sum(len(document.labels) - 1 for documents in parts for document in documents)
        windows.append([collate(documents, num_items=num_labelled / NUM_PARTS) for documents in parts])
    return windows


def seeded_module():
    torch.manual_seed(3)
    return PlainModule(tiny_llama())


def train_on_one_process(folder):
    module = seeded_module()
    batches = [batch for window in window_batches() for batch in window]
    trainer = quiet_trainer(folder, strategy="fastft", accumulate_grad_batches=NUM_PARTS, max_steps=NUM_WINDOWS)
    trainer.fit(module, DataLoader(batches, batch_size=None))
    return module.model.state_dict()


def main(folder):
    rank = int(os.environ["RANK"])
    batches = [window[rank] for window in window_batches()]
    callbacks = [PackedTraining(activations=OffloadCheckpointing("recompute")), GradientHealth(num_steps=3)]
    trainer = quiet_trainer(
        folder, devices=2, strategy="ddp", max_steps=NUM_WINDOWS, callbacks=callbacks, use_distributed_sampler=False
    )
    module = seeded_module()
    trainer.fit(module, DataLoader(batches, batch_size=None))
    assert "moved" in callbacks[1].status().reason
    torch.save(module.model.state_dict(), Path(folder) / f"rank{rank}.pt")


if __name__ == "__main__":
    main(sys.argv[1])
    leave()
