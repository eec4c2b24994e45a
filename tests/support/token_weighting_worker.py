"""Gradients of one optimizer step over the same 64 ragged examples, however they are packed, accumulated and spread
over ranks.

Imported by test_token_weighting.py, and run by torchrun for two ranks:
``torchrun --nproc_per_node=2 -m tests.support.token_weighting_worker <file>``.
"""

import os
import sys

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM

from lightning_fastft.callbacks.packed_training import PackedTraining
from lightning_fastft.packing.collate import Document, collate
from lightning_fastft.patches.attention import register
from lightning_fastft.strategies.single_device import FastFTStrategy
from lightning_fastft.training.fine_tuner import FineTuner
from tests.support.rank_exit import leave
from tests.support.sizes import tiny_qwen3
from tests.support.training_parts import quiet_trainer

VOCAB_SIZE = 61
NUM_EXAMPLES = 64
CONFIG = tiny_qwen3(vocab=VOCAB_SIZE, head_width=8, tie_word_embeddings=True)
# How the examples become micro-batches on every rank, and the accumulation that makes one step of them.
ONE_RANK = {"accumulate 1": 1, "accumulate 2": 2, "accumulate 4": 4, "accumulate 8": 8, "unpacked": NUM_EXAMPLES}
TWO_RANKS = {"accumulate 1": 1, "accumulate 4": 4}


def ragged_examples(num_examples=NUM_EXAMPLES):
    """Documents of 2 to 40 tokens, from one to all of them labelled."""
    rng = np.random.default_rng(0)
    documents = []
    for _ in range(num_examples):
        ids = rng.integers(1, VOCAB_SIZE, size=int(rng.integers(2, 41)))
        labels = ids.copy()
        labels[: rng.integers(1, len(ids))] = -100
        documents.append(Document(ids, labels))
    return documents


def micro_batches(*, accumulate, world_size=1, rank=0, num_items=None, num_examples=NUM_EXAMPLES):
    """The share of one rank: consecutive examples, very different numbers of labelled tokens in each micro-batch."""
    documents = sorted(ragged_examples(num_examples), key=lambda document: len(document.input_ids))
    window_tokens = sum(int((document.labels[1:] != -100).sum()) for document in documents)
    parts = np.array_split(np.arange(num_examples), accumulate * world_size)[rank::world_size]
    divisor = window_tokens / (accumulate * world_size)
    return [
        collate([documents[index] for index in part], num_items=divisor if num_items is None else num_items)
        for part in parts
    ]


class OwnModule(pl.LightningModule):
    """What a user writes: a stock model with its stock loss."""

    def __init__(self):
        super().__init__()
        register()
        self.model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**CONFIG), attn_implementation="fastft")

    def training_step(self, batch, batch_idx):
        return self.model(**batch).loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


class KeepGradient(Callback):
    """Holds the gradient that the optimizer is about to see."""

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.gradient = flat_gradient(pl_module)
        self.head = str(type(pl_module.model.get_output_embeddings()).__name__)


def gradient(kind, batches, *, num_ranks=1):
    """Gradient of one optimizer step of ``Trainer.fit`` over the batches of this rank.

    Args:
        kind: "ours" (FineTuner, our head), "ours_lora" (adapters only), or "stock" (a user's module, transformers' own
            loss).
        batches: The micro-batches of this rank; all of them make one step.
        num_ranks: 1 or 2 (gloo).
    """
    seed_everything(0, verbose=False)
    module = make_module(kind)
    keep = KeepGradient()
    callbacks = [keep]
    if num_ranks == 2:
        strategy = DDPStrategy(process_group_backend="gloo")
        callbacks += [PackedTraining()] if kind != "stock" else []
    else:
        strategy = "auto" if kind == "stock" else FastFTStrategy()
    trainer = quiet_trainer(
        devices=num_ranks,
        strategy=strategy,
        max_steps=1,
        accumulate_grad_batches=len(batches),
        callbacks=callbacks,
        use_distributed_sampler=False,
    )
    trainer.fit(module, DataLoader(batches, batch_size=None))
    assert keep.head == ("Linear" if kind == "stock" else "LazyHead"), keep.head
    return keep.gradient


def make_module(kind):
    """The module of a kind; equal weights after the same seed."""
    if kind == "stock":
        return OwnModule()
    lora = {"r": 4, "lora_alpha": 1, "init_lora_weights": False} if kind == "ours_lora" else None
    return FineTuner(CONFIG, init="random", dtype="float32", lora=lora, scheduler="constant")


def flat_gradient(module):
    """Gradients of all trainable parameters, one behind the other in the order of their names."""
    named = sorted((name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad)
    return torch.cat([parameter.grad.flatten() for _, parameter in named])


def main():
    """Write the gradients of two ranks, by kind and accumulation."""
    rank = int(os.environ["RANK"])
    found = {}
    for kind in ("ours", "ours_lora", "stock"):
        for name, accumulate in TWO_RANKS.items():
            found[kind, name] = gradient(
                kind, micro_batches(accumulate=accumulate, world_size=2, rank=rank), num_ranks=2
            )
    torch.save(found, f"{sys.argv[1]}.{rank}")


if __name__ == "__main__":
    main()
    leave()
