"""Train models in bf16 that keep some weights in fp32; run on one or two ranks:
``-m tests.strategies.wide_tensor_worker <folder>``.
"""

import os
import sys
from pathlib import Path

import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader
from transformers import CONFIG_MAPPING

from lightning_fastft.activations.checkpointing import OffloadCheckpointing
from lightning_fastft.callbacks.bincount_router import BincountRouter
from lightning_fastft.strategies.fsdp2 import FastFTFSDPStrategy
from lightning_fastft.training.optimizer import FusedAdamW
from tests.strategies.strategy_worker import ACCUMULATE, CLIP_NORM, NUM_RANKS, batches_of, make_tuner, trained_state
from tests.support.tiny_models import HYBRIDS, MORE_MOE
from tests.support.training_parts import quiet_trainer

# Family, policy of activations, options of FastFTFSDPStrategy. Every release of transformers keeps the routers of
# ERNIE 4.5 in fp32.
CASES = {
    "routers": ("ernie4_5_moe", "keep", {}),
    "routers, recomputed": ("ernie4_5_moe", "recompute", {}),
    "routers, experts owned": ("ernie4_5_moe", "recompute", {"expert_parallel": NUM_RANKS}),
}
if "lara_mini" in CONFIG_MAPPING:
    # transformers 5.24 and later.
    CASES |= {
        "olmo_hybrid": ("olmo_hybrid", "recompute", {"gradient_sync": "batch"}),
        "kimi_linear": ("kimi_linear", "recompute", {"gradient_sync": "batch"}),
        "bailing_hybrid": ("bailing_hybrid", "keep", {"gradient_sync": "batch"}),
        "bailing_hybrid, two copies": ("bailing_hybrid", "recompute", {"gradient_sync": "batch", "shard": 1}),
    }
# Two documents in each micro-batch: transformers' delta rule takes 30 ms for each, however short.
NUM_EXAMPLES = 2 * ACCUMULATE * NUM_RANKS
# Saved after two of four steps, as a folder or one file.
RESUMED = {"folder": True, "file": False}
RESUMED_CASE = "kimi_linear" if "kimi_linear" in CASES else "routers"


class Look(Callback):
    """Holds the loss of each micro-batch, and the gradients of fp32 weights before the first step."""

    def __init__(self):
        self.losses, self.gradients = [], []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.losses.append(outputs["loss"].detach().clone())

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.gradients.append(
            {
                # A copy: the whole of one shard is the shard, which is clipped.
                name: (parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad).clone()
                for name, parameter in pl_module.model.named_parameters()
                if parameter.grad is not None
            }
        )


def train(case, strategy_class, *, num_ranks=1, rank=0, folder=None, optimizer=None, is_folder=True, **options):
    """The finished module, its callback, and the reasons of statuses of a run with the batches of two ranks."""
    family, policy, sizes = CASES[case]
    torch.manual_seed(5)
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = {"model_type": family, **{**MORE_MOE, **HYBRIDS}[family][1], **tokens}
    module = make_tuner("full", dtype="bfloat16", config=config, tie_word_embeddings=False, optimizer=optimizer)
    is_sharded = strategy_class is FastFTFSDPStrategy
    # One rank has nothing to divide, and reduces as often as two: torch 2.15 sums the uses of a weight in another dtype
    # in a backward that reduces.
    sizes = {name: value for name, value in sizes.items() if num_ranks > 1 or name == "gradient_sync"}
    settings = {**sizes, "save_distributed_checkpoint": is_folder} if is_sharded else {}
    look = Look()
    trainer = quiet_trainer(
        folder,
        devices=num_ranks,
        strategy=strategy_class(activations=OffloadCheckpointing(policy), **settings),
        use_distributed_sampler=False,
        gradient_clip_val=CLIP_NORM,
        accumulate_grad_batches=ACCUMULATE * NUM_RANKS // num_ranks,
        callbacks=[BincountRouter(), look, *options.pop("callbacks", ())],
        **{"max_steps": 2, **{name: value for name, value in options.items() if name != "ckpt_path"}},
    )
    batches = batches_of(rank, world_size=num_ranks, num_windows=trainer.max_steps, num_examples=NUM_EXAMPLES)
    trainer.fit(module, DataLoader(batches, batch_size=None), ckpt_path=options.get("ckpt_path"))
    reasons = [status.reason for status in (*trainer.strategy.statuses(), *module.statuses())]
    return module, look, next((reason for reason in reasons if "FSDP2" in reason), "")


def find(case, strategy_class, *, folder, **options):
    module, look, reason = train(case, strategy_class, folder=folder, **options)
    module.save_pretrained(str(folder / "export" / case))
    return {
        "losses": torch.stack(look.losses),
        "gradients": look.gradients,
        "status": reason,
        "state": trained_state(module),
    }


def resume(*, folder, is_folder, **options):
    """The states after four steps at once, and after two from the checkpoint of the first two."""
    options |= {"is_folder": is_folder, "optimizer": lambda parameters: FusedAdamW(parameters, lr=0.01)}
    saver = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=2, save_top_k=-1)
    more = {"callbacks": [saver], "enable_checkpointing": True, "max_steps": 4}
    whole, *_ = train(RESUMED_CASE, FastFTFSDPStrategy, folder=folder, **options, **more)
    path = folder / "step=2.ckpt"
    resumed, *_ = train(RESUMED_CASE, FastFTFSDPStrategy, folder=folder, ckpt_path=path, max_steps=4, **options)
    return [trained_state(whole), trained_state(resumed)]


def main(folder):
    rank, num_ranks, folder = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), Path(folder)
    options = {"rank": rank, "num_ranks": num_ranks}
    # One rank has no other one to own experts of.
    cases = [case for case in CASES if num_ranks > 1 or "owned" not in case]
    found = {case: find(case, FastFTFSDPStrategy, folder=folder, **options) for case in cases}
    for form, is_folder in RESUMED.items() if num_ranks > 1 else ():
        found["resumed", form] = resume(folder=folder / form, is_folder=is_folder, **options)
    if rank == 0:
        torch.save(found, folder / "found.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
