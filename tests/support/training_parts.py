"""Tiny models, modules and packed batches that the tests of strategies and callbacks train on."""

import lightning.pytorch as pl
import numpy as np
import torch
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_fastft.packing.collate import Document, collate
from lightning_fastft.training.datamodule import PackedDataModule
from tests.support.sizes import sizes

VOCAB_SIZE = 97


def tiny_llama(**options):
    config = LlamaConfig(
        **sizes(vocab=VOCAB_SIZE, width=32, inner=48, layers=2, heads=4, key_heads=2, positions=256),
        tie_word_embeddings=False,
        **options,
    )
    return LlamaForCausalLM(config).train()


def random_documents(num_documents, *, seed, has_labels=True):
    rng = np.random.default_rng(seed)
    documents = []
    for _ in range(num_documents):
        ids = rng.integers(1, VOCAB_SIZE, size=int(rng.integers(3, 20)))
        documents.append(Document(ids, ids.copy() if has_labels else np.full_like(ids, -100)))
    return documents


def packed_batches(num_batches, *, seed=0, has_labels=True, **options):
    return [
        collate(random_documents(3, seed=seed + index, has_labels=has_labels), **options)
        for index in range(num_batches)
    ]


def packed_loader(num_batches=4, **options):
    """A plain loader over ready batches, as anybody would write it."""
    return DataLoader(packed_batches(num_batches, **options), batch_size=None)


class PlainModule(pl.LightningModule):
    """What a user has: no knowledge of packing."""

    def __init__(self, model, *, lr=1e-2):
        super().__init__()
        self.model = model
        self.lr = lr

    def training_step(self, batch, batch_idx):
        loss = self.model(**batch).loss
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.model(**batch).loss)

    def test_step(self, batch, batch_idx):
        self.log("test_loss", self.model(**batch).loss)

    def configure_optimizers(self):
        return torch.optim.AdamW(
            [parameter for parameter in self.parameters() if parameter.requires_grad], lr=self.lr, weight_decay=0.0
        )


def quiet_data(paths, **options):
    """Rows that are read in this process, without a cache and without a word."""
    quiet = {"num_workers": 0, "num_proc": 1, "cache_dir": None, "show_progress": False}
    return PackedDataModule(paths, **{**quiet, **options})


def quiet_trainer(folder=None, **options):
    options = {
        "accelerator": "cpu",
        "devices": 1,
        "max_steps": 3,
        "logger": False,
        "enable_checkpointing": False,
        **options,
    }
    return pl.Trainer(default_root_dir=folder, enable_progress_bar=False, enable_model_summary=False, **options)


class SaveAtStep(pl.Callback):
    """Write a checkpoint after a step."""

    def __init__(self, step, path):
        self.step, self.path = step, path

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)
