"""Train a module whose first layer a callback unfreezes in the second epoch; run on two ranks: ``-m
tests.strategies.unfreezing_worker <folder>``. Each rank writes its weights to ``<folder>/<rank>.pt``.
"""

import os
import sys
from pathlib import Path

import torch
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import BaseFinetuning
from torch.utils.data import DataLoader

from lightning_fastft.core.errors import OptionError
from lightning_fastft.strategies.ddp import FastFTDDPStrategy
from lightning_fastft.strategies.fsdp2 import FastFTFSDPStrategy
from lightning_fastft.strategies.registry import register_strategies
from tests.support.rank_exit import leave
from tests.support.training_parts import PlainModule, packed_batches, quiet_trainer, tiny_llama

NUM_RANKS, NUM_EPOCHS = 2, 3


class Unfreeze(BaseFinetuning):
    """Trains the first layer from an epoch on."""

    def __init__(self, epoch=1):
        super().__init__()
        self.epoch = epoch

    def freeze_before_training(self, pl_module):
        self.freeze(pl_module.model.model.layers[0])

    def finetune_function(self, pl_module, epoch, optimizer):
        if epoch == self.epoch:
            self.unfreeze_and_add_param_group(pl_module.model.model.layers[0], optimizer, initial_denom_lr=2)


class WithSGD(PlainModule):
    """A step that is linear in the gradient, so that a bound on sums is one on weights."""

    def configure_optimizers(self):
        return torch.optim.SGD([parameter for parameter in self.parameters() if parameter.requires_grad], lr=0.5)


def train(strategy, *, rank=0, folder=None):
    """The weights of a run, whose two ranks have the batches of one process with twice the accumulation."""
    seed_everything(5, verbose=False)
    module = WithSGD(tiny_llama())
    num_ranks = 1 if strategy == "fastft" else NUM_RANKS
    batches = packed_batches(4, num_items=10.0)
    trainer = quiet_trainer(
        folder,
        strategy=strategy,
        devices=num_ranks,
        max_epochs=NUM_EPOCHS,
        max_steps=-1,
        accumulate_grad_batches=NUM_RANKS // num_ranks,
        use_distributed_sampler=False,
        callbacks=[Unfreeze()],
    )
    trainer.fit(module, DataLoader(batches[rank::num_ranks], batch_size=None))
    return {name: parameter.detach() for name, parameter in module.named_parameters()}


def main(folder):
    register_strategies()
    rank = int(os.environ["RANK"])
    found = {"weights": train(FastFTDDPStrategy(), rank=rank, folder=folder)}
    try:
        train(FastFTFSDPStrategy(), rank=rank, folder=folder)
    except OptionError as error:
        found["refused"] = str(error)
    torch.save(found, Path(folder) / f"{rank}.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
    leave()
