"""Train on streams and resume: in this process, or on each rank (``run_two_ranks``).

As a script: <folder>; rank r writes <folder>/rank<r>.json.
"""

import json
import logging
import sys
import warnings
from pathlib import Path

import datasets
import torch

from lightning_fastft.core.errors import FastFTError
from tests.support.datamodule_worker import SaveAt, TinyModel, make_data, make_rows, make_trainer, rows_in
from tests.support.rank_exit import leave

NUM_ROWS = 900


def make_stream(num_rows=NUM_ROWS, *, num_shards=4):
    return datasets.Dataset.from_list(make_rows(num_rows)).to_iterable_dataset(num_shards=num_shards)


def uneven_stream():
    """Two shards of which one is four times as long: one rank ends first."""
    rows = make_rows(500)

    def generate(parts):
        for begin, end in parts:
            yield from rows[begin:end]

    return datasets.IterableDataset.from_generator(generate, gen_kwargs={"parts": [(0, 400), (400, 500)]})


class Counting(TinyModel):
    """Also notes the divisor and the labelled tokens of each micro-batch."""

    def training_step(self, batch, batch_idx):
        self.seen.append((batch.index, rows_in(batch), batch.context.num_items, batch.context.num_labelled))
        return self.loss(batch)


def train(folder, *, stream, trainer=None, ckpt_path=None, callbacks=(), **data):
    """Return the model and the data of a run."""
    model, module = Counting(), make_data(rows=stream, **data)
    options = {"max_steps": 60, "max_epochs": -1, **(trainer or {})}
    make_trainer(folder, callbacks=list(callbacks), **options).fit(model, module, ckpt_path=ckpt_path)
    return model, module


def train_and_resume(folder, *, make, save_at, **options):
    """Return the model of a run without a stop that saves on its way, and of the run that goes on from the save."""
    path = folder / "saved.ckpt"
    whole, _ = train(folder, stream=make(), callbacks=[SaveAt(path, micro_batch=save_at)], **options)
    resumed, _ = train(folder, stream=make(), ckpt_path=path, **options)
    return whole, resumed


CASES = {
    "shards": {"make": make_stream, "save_at": 100, "trainer": {"max_steps": 120}},
    "odd shards": {
        "make": lambda: make_stream(600, num_shards=3),
        "save_at": 80,
        "trainer": {"accumulate_grad_batches": 3, "max_steps": 32},
    },
    # Rank 1 has no rows left at the save, and the pass ends later.
    "uneven": {"make": uneven_stream, "save_at": 70, "trainer": {"max_steps": 140}, "num_workers": 1},
}


def main(folder):
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    results = {}
    for name, case in CASES.items():
        place = folder / name
        place.mkdir(exist_ok=True)
        options = {**case, "trainer": {**case.get("trainer", {}), "devices": 2, "strategy": "ddp"}}
        whole, resumed = train_and_resume(place, **options)
        results[name] = {
            "whole": whole.seen,
            "resumed": resumed.seen,
            "equal": torch.equal(whole.weight, resumed.weight),
            "sum": float(whole.weight.sum()),
        }
    rank = torch.distributed.get_rank()
    two = {"devices": 2, "strategy": "ddp"}
    refused = {
        # One rank cannot read its rows: both end.
        "broken": lambda: make_stream().map(lambda row: row if rank or row["input_ids"][0] < 9 else 1 / 0),
        "split by hand": lambda: datasets.distributed.split_dataset_by_node(make_stream(), rank=rank, world_size=2),
    }
    for name, make in refused.items():
        try:
            train(folder, stream=make(), trainer=two)
        except (FastFTError, ArithmeticError) as error:
            results[name] = f"{type(error).__name__}: {error}"
    (folder / f"rank{rank}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    leave()
