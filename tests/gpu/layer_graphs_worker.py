"""Train a small model with and without CUDA graphs under DDP; run by torchrun on two GPUs: ``-m
tests.gpu.layer_graphs_worker <folder>``.
"""

import os
import sys
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch import seed_everything
from torch.utils.data import DataLoader

from lightning_fastft.activations.checkpointing import OffloadCheckpointing
from lightning_fastft.callbacks.fused_kernels import FusedKernels
from lightning_fastft.strategies.ddp import FastFTDDPStrategy
from lightning_fastft.training.fine_tuner import FineTuner
from tests.support.packs import make_batch
from tests.support.rank_exit import leave

NUM_STEPS, NUM_LAYERS = 8, 3
CONFIG = {
    "model_type": "qwen3",
    "vocab_size": 97,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
}
LORA = {"r": 16, "lora_alpha": 32, "target_modules": "all-linear", "init_lora_weights": False}
# 512 tokens each, all of one kind, other ones on each rank.
PACKS = ((190, 1, 64, 257), (200, 56, 256), (250, 250, 12), (5, 200, 300, 7))
# What is trained, micro-batches of a step, further options of DistributedDataParallel.
CASES = [("lora", 1, ()), ("lora", 2, (("gradient_as_bucket_view", False),)), ("full", 1, ())]


def train(kind, accumulate, options, *, is_recorded, rank):
    """Trained weights before and after, on this rank, and how often a graph was launched."""
    seed_everything(5, verbose=False)
    tuner = FineTuner(
        CONFIG,
        init="random",
        dtype="bfloat16",
        lora=LORA if kind == "lora" else None,
        learning_rate=3e-3,
        scheduler="constant",
        warmup_share=0.0,
    )
    callback, begin = FusedKernels(cuda_graphs=is_recorded), {}

    class Begin(pl.Callback):
        def on_train_start(self, trainer, pl_module):
            begin.update(weights_of(pl_module))

    batches = [
        make_batch(PACKS[(number + rank) % 4], seed=2 * number + rank) for number in range(NUM_STEPS * accumulate)
    ]
    trainer = pl.Trainer(
        accelerator="cuda",
        devices=2,
        strategy=FastFTDDPStrategy(activations=OffloadCheckpointing("keep"), **dict(options)),
        callbacks=[callback, Begin()],
        max_steps=NUM_STEPS,
        accumulate_grad_batches=accumulate,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    trainer.fit(tuner, DataLoader(batches, batch_size=None))
    return {
        "before": begin,
        "after": weights_of(tuner),
        "replays": callback._graphs[0].num_replays if is_recorded else 0,
    }


def weights_of(tuner):
    return {
        name: parameter.detach().float().cpu().clone()
        for name, parameter in tuner.named_parameters()
        if parameter.requires_grad
    }


def main(folder):
    rank = int(os.environ["RANK"])
    found = {
        (*case, is_recorded): train(*case, is_recorded=is_recorded, rank=rank)
        for case in CASES
        for is_recorded in (True, False)
    }
    torch.save(found, Path(folder) / f"found{rank}.pt")


if __name__ == "__main__":
    main(sys.argv[1])
    leave()
