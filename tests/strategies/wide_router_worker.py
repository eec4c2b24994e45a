"""Train a mixture in bf16 whose router is in fp32; run on two ranks: ``-m tests.strategies.wide_router_worker
<folder>``.
"""

import os
import sys
from pathlib import Path

import torch
from lightning.pytorch.callbacks import Callback
from torch.distributed.tensor import DTensor

from lightning_fastft.activations.checkpointing import OffloadCheckpointing
from lightning_fastft.callbacks.bincount_router import BincountRouter
from lightning_fastft.strategies.fsdp2 import FastFTFSDPStrategy
from tests.strategies.strategy_worker import NUM_RANKS, fit, make_tuner, trained_state
from tests.support.tiny_models import MORE_MOE

# Policy of activations, and options of FastFTFSDPStrategy.
CASES = {
    "kept": ("keep", {}),
    "recomputed": ("recompute", {}),
    "experts owned": ("recompute", {"expert_parallel": NUM_RANKS}),
}
# Every release of transformers keeps its routers in fp32.
FAMILY = "ernie4_5_moe"
ROUTER = "model.layers.1.mlp.gate.weight"


class Look(Callback):
    """Holds the loss of each micro-batch, and gradients before each step."""

    def __init__(self):
        self.losses, self.gradients = [], []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.losses.append(outputs["loss"].detach().clone())

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        gradient = pl_module.model.get_parameter(ROUTER).grad
        assert gradient.dtype is torch.float32
        self.gradients.append(gradient.full_tensor() if isinstance(gradient, DTensor) else gradient.clone())


def train(strategy_class, case="kept", *, rank=0, folder=None):
    policy, options = CASES[case]
    torch.manual_seed(5)
    config = {"model_type": FAMILY, **MORE_MOE[FAMILY][1]}
    module = make_tuner("full", dtype="bfloat16", config=config, tie_word_embeddings=False)
    strategy, look = strategy_class(activations=OffloadCheckpointing(policy), **options), Look()
    trainer = fit(module, strategy=strategy, rank=rank, folder=folder, callbacks=[BincountRouter(), look])
    if case == "kept":
        module.save_pretrained(str(Path(folder) / "export"))
    reasons = [status.reason for status in (*trainer.strategy.statuses(), *module.statuses())]
    return {
        "losses": torch.stack(look.losses),
        "gradient": look.gradients[0],
        "status": next((reason for reason in reasons if "FSDP2" in reason), ""),
        "state": trained_state(module),
    }


def main(folder):
    rank, folder = int(os.environ["RANK"]), Path(folder)
    found = {case: train(FastFTFSDPStrategy, case, rank=rank, folder=folder) for case in CASES}
    if rank == 0:
        torch.save(found, folder / "found.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
