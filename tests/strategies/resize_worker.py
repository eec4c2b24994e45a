"""Save with one number of ranks, resume with another: ``-m tests.strategies.resize_worker <folder> <strategy> <save or
resume> <checkpoint> <bits of the moments>``; each rank writes the examples that it trained.
"""

import json
import os
import sys
from pathlib import Path

import torch
from lightning.pytorch.callbacks import Callback

from lightning_fastft.hf.sharding.state import gather_state
from lightning_fastft.strategies.ddp import FastFTDDPStrategy
from lightning_fastft.strategies.fsdp2 import FastFTFSDPStrategy
from lightning_fastft.strategies.single_device import FastFTStrategy
from lightning_fastft.training.optimizer import FusedAdamW
from tests.strategies.strategy_worker import make_tuner
from tests.support.training_parts import quiet_data, quiet_trainer

NUM_ROWS, SAVED_STEP = 60, 3
STRATEGIES = {
    "ddp": FastFTDDPStrategy,
    "fsdp": FastFTFSDPStrategy,
    "fsdp file": lambda: FastFTFSDPStrategy(save_distributed_checkpoint=False),
    "hybrid": lambda: FastFTFSDPStrategy(shard=2),
    "one": FastFTStrategy,
}


def make_rows():
    """Rows of four tokens, of which the second is the row's number."""
    return [{"input_ids": [3, 4 + number, 5, 6 + number % 40]} for number in range(NUM_ROWS)]


def moments_of(optimizer):
    """The state of all trained tensors, whole, in their order: moments, in 8 bits with the sizes of their blocks."""
    found = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            for _, moment in sorted(optimizer.state[parameter].items()):
                found.append((moment.full_tensor() if hasattr(moment, "full_tensor") else moment).flatten().clone())
    return torch.cat(found)


class Watch(Callback):
    """Keep the rows that this rank trains, and weights and moments at the save and after the load."""

    def __init__(self, path, *, saves):
        self.path, self.saves, self.rows, self.state = path, saves, [], {}

    def keep(self, trainer, module):
        sharded = isinstance(trainer.strategy, FastFTFSDPStrategy)
        weights = gather_state(module.model, is_trained_only=True) if sharded else dict(module.model.named_parameters())
        self.state = {
            "weights": {name: value.detach().clone() for name, value in weights.items()},
            "moments": moments_of(trainer.optimizers[0]),
        }

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if not self.saves and not self.state:
            self.keep(trainer, module)
        starts = batch.context.start_host_S1[:-1].tolist()
        ids = batch["input_ids"][0].tolist()
        self.rows += [ids[start + 1] - 4 for start in starts if start < batch.context.num_real_tokens]

    def on_train_batch_end(self, trainer, module, *_):
        if self.saves and trainer.global_step == SAVED_STEP:
            self.keep(trainer, module)
            trainer.save_checkpoint(self.path)


def main(folder, strategy, action, checkpoint, bits):
    rank, folder = int(os.environ.get("RANK", 0)), Path(folder)
    torch.manual_seed(5)
    module = make_tuner(
        "full", optimizer=lambda parameters: FusedAdamW(parameters, lr=0.01, optim_bits=int(bits)),
        # Groups of matrices and of vectors: another order than that of the model.
        tie_word_embeddings=False, weight_decay=0.1,
        # Rows of one whole block; their number is not divisible by the numbers of ranks.
        config={"vocab_size": 97, "hidden_size": 256 if bits == "8" else 32},
    )  # fmt: skip
    watch = Watch(checkpoint, saves=action == "save")
    trainer = quiet_trainer(
        folder,
        devices=int(os.environ.get("WORLD_SIZE", 1)),
        strategy=STRATEGIES[strategy](),
        max_epochs=1,
        max_steps=SAVED_STEP if action == "save" else -1,
        callbacks=[watch],
    )
    data = quiet_data(make_rows(), max_tokens=8)
    trainer.fit(module, data, ckpt_path=None if action == "save" else checkpoint)
    (folder / f"rows-{rank}.json").write_text(json.dumps(watch.rows))
    if rank == 0:
        torch.save(watch.state, folder / "state.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
