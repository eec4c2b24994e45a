"""Train a tiny model on planned packs, save in the middle, resume, and write what was seen: in this process, or on each
rank of torchrun.

As a script: torchrun --nproc_per_node 2 tests/support/datamodule_worker.py <folder>; rank r writes
<folder>/rank<r>.json.
"""

import json
import logging
import sys
import warnings
from pathlib import Path
from typing import NamedTuple

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger

from lightning_fastft.core.errors import DataError
from lightning_fastft.training.datamodule import PackedDataModule
from tests.support.rank_exit import leave

VOCABULARY = 97


def make_rows(num_rows: int = 61, seed: int = 0) -> list[dict]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, 30, (num_rows,), generator=generator).tolist()
    rows = []
    for number, length in enumerate(lengths):
        # The first two ids name the row, so that a batch tells which rows it holds.
        ids = [
            number // 48,
            48 + number % 48,
            *torch.randint(0, VOCABULARY, (length - 2,), generator=generator).tolist(),
        ]
        labels = [-100, *ids[1:]] if number % 3 else [-100] * (length // 2) + ids[length // 2 :]
        rows.append({"input_ids": ids, "labels": labels})
    return rows


def make_data(**options) -> PackedDataModule:
    options = {
        "num_workers": 0,
        "max_tokens": 64,
        "cache_dir": None,
        "num_proc": 1,
        "show_progress": False,
        "seed": 5,
        **options,
    }
    return PackedDataModule(options.pop("rows", make_rows()), **options)


def rows_in(batch) -> list[int]:
    """The rows of a batch, pad documents left out, in their order."""
    starts = batch.context.start_host_S1[:-1].tolist()
    ids = batch["input_ids"][0]
    return [
        int(ids[start]) * 48 + int(ids[start + 1]) - 48 for start in starts if start < batch.context.num_real_tokens
    ]


class TinyModel(LightningModule):
    """Next-token model with weights that depend on every batch and on the order of batches."""

    def __init__(self, *, asks_for_steps: bool = False) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.weight = torch.nn.Parameter(torch.randn(VOCABULARY, VOCABULARY, generator=generator) * 0.1)
        self.asks_for_steps = asks_for_steps
        self.seen: list[tuple[int, list[int]]] = []

    def loss(self, batch) -> torch.Tensor:
        context = batch.context
        rows = context.labelled_row_R[: context.num_labelled]
        targets = context.labelled_target_R[: context.num_labelled]
        logits = self.weight[batch["input_ids"][0, rows]]
        return torch.nn.functional.cross_entropy(logits, targets, reduction="sum") / batch["num_items_in_batch"]

    def training_step(self, batch, batch_idx):
        self.seen.append((batch.index, rows_in(batch)))
        return self.loss(batch)

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch), on_epoch=True, sync_dist=True)

    def configure_optimizers(self):
        if self.asks_for_steps:
            assert self.trainer.estimated_stepping_batches > 0
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class SaveAt(Callback):
    """Save once, at the end of the micro-batch, epoch or validation with this number."""

    def __init__(
        self, path: Path, *, micro_batch: int | None = None, epoch: int | None = None, validation: int | None = None
    ) -> None:
        self.path, self.micro_batch, self.epoch, self.validation = path, micro_batch, epoch, validation
        self.num_micro_batches = 0
        self.num_validations = 0

    def on_train_batch_end(self, trainer, *_) -> None:
        self.num_micro_batches += 1
        if self.num_micro_batches == self.micro_batch:
            trainer.save_checkpoint(self.path)

    def on_train_epoch_end(self, trainer, *_) -> None:
        if trainer.current_epoch == self.epoch:
            trainer.save_checkpoint(self.path)

    def on_validation_end(self, trainer, *_) -> None:
        if not trainer.sanity_checking:
            self.num_validations += 1
            if self.num_validations == self.validation:
                trainer.save_checkpoint(self.path)


def make_trainer(folder: Path, **options) -> Trainer:
    defaults = {
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": folder,
        "max_epochs": 3,
        "num_sanity_val_steps": 0,
    }
    return Trainer(**{**defaults, **options})


class Run(NamedTuple):
    """What a run saw, and the weights that it ended with."""

    seen: list
    weight: torch.Tensor
    data: PackedDataModule


def run(folder: Path, *, data: dict, trainer: dict, callbacks=(), ckpt_path=None, asks_for_steps: bool = False) -> Run:
    model, module = TinyModel(asks_for_steps=asks_for_steps), make_data(**data)
    make_trainer(folder, callbacks=list(callbacks), **trainer).fit(model, module, ckpt_path=ckpt_path)
    return Run(model.seen, model.weight.detach().clone(), module)


def run_and_resume(
    folder: Path, *, save: dict, data: dict, trainer: dict, asks_for_steps: bool = False
) -> tuple[Run, Run]:
    """Return a run without a stop that saves on its way, and the run that goes on from the save."""
    path = folder / "saved.ckpt"
    whole = run(folder, data=data, trainer=trainer, callbacks=[SaveAt(path, **save)], asks_for_steps=asks_for_steps)
    resumed = run(folder, data=data, trainer=trainer, ckpt_path=path, asks_for_steps=asks_for_steps)
    return whole, resumed


TWO_PROCESS_CASES = [
    {
        "save": save,
        "data": {"num_workers": num_workers},
        "trainer": {"accumulate_grad_batches": accumulate},
        "asks_for_steps": accumulate == 3,
    }
    for num_workers in (0, 2)
    for accumulate in (1, 3)
    for save in ({"micro_batch": 9}, {"epoch": 1})
]


def warnings_of_a_bad_row(folder: Path) -> list[str]:
    """Train on rows of which one is rejected, through a cache that one rank fills, with a logger that has a
    folder of its own.
    """
    data = {
        "rows": str(folder / "rows.jsonl"),
        "cache_dir": str(folder.with_name("bad_cache")),
        "max_reject_share": 0.5,
    }
    options = {"devices": 2, "strategy": "ddp", "max_epochs": 1, "logger": CSVLogger(folder / "logs")}
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        run(folder, data=data, trainer=options)
    return [str(warning.message) for warning in heard]


def main(folder: Path) -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    results = []
    for number, case in enumerate(TWO_PROCESS_CASES):
        case_folder = folder / str(number)
        case_folder.mkdir(exist_ok=True)
        data = dict(case["data"])
        if number % 2:
            # From a file through the cache, which one rank fills for both.
            data.update(rows=str(folder / "rows.jsonl"), cache_dir=str(case_folder / "cache"))
        options = {**case["trainer"], "devices": 2, "strategy": "ddp"}
        whole, resumed = run_and_resume(
            case_folder, save=case["save"], data=data, trainer=options, asks_for_steps=case["asks_for_steps"]
        )
        equal = torch.equal(whole.weight, resumed.weight)
        results.append({"whole": whole.seen, "resumed": resumed.seen, "equal": equal, "sum": float(whole.weight.sum())})
    rank = whole.data.trainer.global_rank
    warned = warnings_of_a_bad_row(folder / "bad")
    (folder / f"bad/warned{rank}.json").write_text(json.dumps(warned))
    try:
        run(folder, data={"rows": make_rows(40 + rank)}, trainer={"devices": 2, "strategy": "ddp"})
    except DataError as error:
        results.append({"refused": str(error)})
    (folder / f"rank{rank}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    leave()
