"""The default stack: a LightningModule around transformers and PEFT, padded batches of Hugging Face datasets,
torch's or torchdata's loader.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from datasets import Dataset
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import Callback
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM

from tests.parity.resume_worker import LORA
from tests.support.datamodule_worker import VOCABULARY
from tests.support.token_weighting_worker import CONFIG

BATCH_SIZE = 4
# An epoch is a whole number of windows of two micro-batches, so that steps can be counted in micro-batches.
NUM_ROWS = 88
LOADERS = ("DataLoader", "StatefulDataLoader", "StatefulDataLoader, streamed")


class DefaultModule(pl.LightningModule):
    """A model of transformers with adapters of PEFT, as their documentation trains it; notes which rows it was
    given.
    """

    def __init__(self, *, vocab_size: int = VOCABULARY, lora: Mapping[str, Any] | None = LORA) -> None:
        super().__init__()
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**{**CONFIG, "vocab_size": vocab_size}))
        self.model = model if lora is None else get_peft_model(model, LoraConfig(target_modules="all-linear", **lora))
        self.losses: list[float] = []
        self.rows: list[list[list[int]]] = []

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        """Train on one padded batch."""
        loss = self.model(**batch).loss
        self.log("train_loss", loss)
        self.losses.append(float(loss.detach()))
        lengths = batch["attention_mask"].sum(1).tolist()
        self.rows.append([ids[:length] for ids, length in zip(batch["input_ids"].tolist(), lengths)])
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW on what is trained."""
        return torch.optim.AdamW([parameter for parameter in self.parameters() if parameter.requires_grad], lr=1e-2)


def pad(rows: Sequence[Mapping[str, list[int]]]) -> dict[str, torch.Tensor]:
    """Return rows as one batch, padded to the longest."""
    length = max(len(row["input_ids"]) for row in rows)

    def fill(name: str, value: int) -> torch.Tensor:
        return torch.tensor([[*row[name], *[value] * (length - len(row[name]))] for row in rows], dtype=torch.int64)

    mask = [[1] * len(row["input_ids"]) + [0] * (length - len(row["input_ids"])) for row in rows]
    return {
        "input_ids": fill("input_ids", 0),
        "labels": fill("labels", -100),
        "attention_mask": torch.tensor(mask, dtype=torch.int64),
    }


def make_loader(rows: Sequence[Mapping[str, list[int]]], kind: str, *, num_workers: int = 0) -> Any:
    """Return the loader of LOADERS that is named.

    Raises:
        ImportError: torchdata is not installed.
    """
    data: Any = Dataset.from_list(list(rows))
    options: dict[str, Any] = {"batch_size": BATCH_SIZE, "collate_fn": pad, "num_workers": num_workers}
    if kind == "DataLoader":
        return DataLoader(data, shuffle=True, **options)
    from torchdata.stateful_dataloader import StatefulDataLoader

    if kind == "StatefulDataLoader":
        return StatefulDataLoader(data, shuffle=True, **options)
    return StatefulDataLoader(data.to_iterable_dataset(num_shards=max(1, num_workers)), **options)


def train(
    folder: Path,
    rows: Sequence[Mapping[str, list[int]]],
    *,
    loader: str,
    callbacks: Sequence[Callback] = (),
    ckpt_path: Path | None = None,
    num_workers: int = 0,
    **options: Any,
) -> DefaultModule:
    """Train as a user would: a fixed seed, a Trainer, and what it was told to go on from."""
    seed_everything(3, verbose=False)
    module = DefaultModule()
    options = {"enable_checkpointing": False, "num_sanity_val_steps": 0, **options}
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        gradient_clip_val=1.0,
        callbacks=list(callbacks),
        **options,
    )
    trainer.fit(module, make_loader(rows, loader, num_workers=num_workers), ckpt_path=ckpt_path)
    return module


def trained_state(module: DefaultModule) -> dict[str, torch.Tensor]:
    """Return copies of the weights that are trained."""
    return {
        name: parameter.detach().clone() for name, parameter in module.named_parameters() if parameter.requires_grad
    }


def numbers_of(batches: Sequence[Sequence[Sequence[int]]]) -> list[int]:
    """Return the rows of tests.support.datamodule_worker.make_rows in batches, by number: their first two ids
    name them.
    """
    return [ids[0] * 48 + ids[1] - 48 for batch in batches for ids in batch]
