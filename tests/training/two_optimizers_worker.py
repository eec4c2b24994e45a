"""Train on two ranks, and go on from the middle: ``-m tests.training.two_optimizers_worker <folder> <kind>``

Kinds: "muon" (``MuonAdamW`` over shards), "schedule_free" (under DDP). Rank 0 writes the weights of both runs at their
end to ``<folder>/weights.pt``, and every rank, for "muon", matrices that were stepped in shards to ``<folder>/matrices<RANK>.pt``.
"""

import functools
import os
import sys
from pathlib import Path

import torch
from lightning.pytorch import Callback, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils.data import DataLoader

from lightning_fastft.optim import MuonAdamW
from lightning_fastft.strategies.registry import register_strategies
from tests.support.fine_tuners import trainable, tuner
from tests.support.rank_exit import leave
from tests.support.schedule_free import ScheduleFreeSGD
from tests.support.training_parts import packed_batches, quiet_trainer

KINDS = {
    "muon": {"optimizer": MuonAdamW, "weight_decay": 0.1},
    "schedule_free": {
        "optimizer": functools.partial(ScheduleFreeSGD, lr=0.1), "learning_rate": None, "scheduler": "constant",
    },
}  # fmt: skip


class Whole(Callback):
    """The whole weights behind the last step."""

    def on_train_batch_end(self, trainer, pl_module, *args):
        self.weights = {
            name: (each.full_tensor() if hasattr(each, "full_tensor") else each).detach().clone()
            for name, each in trainable(pl_module).items()
        }


def run(kind, *, folder, ckpt_path=None, **options):
    seed_everything(7, verbose=False)
    keep, whole = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=2, save_top_k=-1), Whole()
    trainer = quiet_trainer(
        folder, max_steps=4, callbacks=[keep, whole], gradient_clip_val=0.5, enable_checkpointing=True, **options
    )
    loader = DataLoader(packed_batches(1) * 12, batch_size=None)
    trainer.fit(tuner("full", **KINDS[kind]), loader, ckpt_path=ckpt_path)
    return whole.weights


def step_matrices(cut):
    """Return matrices after two steps: more and fewer than ranks, rows that do not divide, experts."""
    torch.manual_seed(3)
    weights = [torch.nn.Parameter(cut(torch.randn(shape))) for shape in [(5, 7)] * 3 + [(7, 5), (3, 4, 6), (3, 4, 6)]]
    optimizer = MuonAdamW(weights, lr=0.1)
    for _ in range(2):
        for weight in weights:
            weight.grad = cut(torch.randn(weight.shape))
        optimizer.step()
    return [weight.detach() for weight in weights]


def main(folder, kind):
    register_strategies()
    options = {"devices": 2, "strategy": "fastft_fsdp" if kind == "muon" else "fastft_ddp"}
    first = run(kind, folder=f"{folder}/a", **options)
    second = run(kind, folder=f"{folder}/b", ckpt_path=f"{folder}/a/step=2.ckpt", **options)
    if kind == "muon":
        mesh = init_device_mesh("cpu", (2,))
        stepped = [
            each.full_tensor() for each in step_matrices(lambda whole: distribute_tensor(whole, mesh, [Shard(0)]))
        ]
        torch.save(stepped, Path(folder) / f"matrices{os.environ['RANK']}.pt")
    if os.environ["RANK"] == "0":
        torch.save([first, second], Path(folder) / "weights.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
    leave()
