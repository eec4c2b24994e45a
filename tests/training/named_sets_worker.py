"""Train with named validation sets on this rank; write the metrics: ``-m tests.training.named_sets_worker <folder>``."""

import os
import random
import sys
from pathlib import Path

import torch

from tests.support.datamodule_worker import make_data
from tests.support.fine_tuners import tuner
from tests.support.rank_exit import leave
from tests.support.training_parts import VOCAB_SIZE, quiet_trainer


def make_rows(num_rows, *, seed):
    draws = random.Random(seed)
    lengths = [draws.randrange(3, 40) for _ in range(num_rows)]
    return [{"input_ids": [draws.randrange(3, VOCAB_SIZE) for _ in range(length)]} for length in lengths]


# One set has fewer packs than there are ranks.
SETS = {"math": make_rows(20, seed=1), "chat.de": make_rows(1, seed=2)}


def train(folder, *, devices=1, max_epochs=2, callbacks=(), ckpt_path=None, val_paths=SETS):
    """Metrics of a run on one or two ranks, at a learning rate of 0: they do not depend on the order of training."""
    module = tuner("lora", learning_rate=0.0)
    trainer = quiet_trainer(
        folder, strategy="fastft" if devices == 1 else "fastft_ddp", devices=devices, max_steps=-1,
        max_epochs=max_epochs, callbacks=[*callbacks], enable_checkpointing=bool(callbacks),
    )  # fmt: skip
    data = make_data(rows=make_rows(12, seed=3), val_paths=val_paths, test_paths=val_paths)
    torch.manual_seed(0)
    trainer.fit(module, data, ckpt_path=ckpt_path)
    return module, trainer, data


def read_metrics(trainer):
    return {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("val")}


def main(folder):
    _, trainer, _ = train(folder, devices=2)
    torch.save(read_metrics(trainer), Path(folder) / f"{os.environ['RANK']}.pt")
    leave()


if __name__ == "__main__":
    main(*sys.argv[1:])
