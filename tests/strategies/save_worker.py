"""Two ranks that train while a checkpoint is written: ``-m tests.strategies.save_worker <folder>``. The second rank
writes its shards only when told to.
"""

import os
import signal
import sys
import threading
import time
from pathlib import Path
from unittest import mock

import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch.utils.data import DataLoader

from lightning_fastft.checkpoint import folder_writer
from lightning_fastft.checkpoint.files import RECORD, find_damage
from lightning_fastft.checkpoint.stops import RunStopped
from lightning_fastft.core.errors import CheckpointNotSavedError
from lightning_fastft.hf.sharding.state import gather_state
from lightning_fastft.strategies.fsdp2 import FastFTFSDPStrategy
from lightning_fastft.training.optimizer import FusedAdamW
from tests.strategies.strategy_worker import make_tuner
from tests.support.token_weighting_worker import micro_batches
from tests.support.training_parts import quiet_trainer

NUM_STEPS, EVERY = 7, 2
KINDS = {"full": 8, "lora": 32}
real_write = folder_writer.write_folder


class Gate(Callback):
    """Delay the shards of the second rank until after the step that follows a save, and check the folder before; or
    delay both ranks, and stop one of them meanwhile.
    """

    def __init__(self, folder, *, stops=None):
        self.folder, self.stops, self.is_open, self.seen = folder, stops, threading.Event(), {}

    def write(self, pieces, part, path, **options):
        if self.stops is not None:
            time.sleep(0.3)
        elif torch.distributed.get_rank() == 1:
            assert self.is_open.wait(60)
            self.is_open.clear()
        real_write(pieces, part, path, **options)

    def on_train_batch_end(self, trainer, *_):
        step = trainer.global_step
        if step % EVERY == 0 or step < EVERY:
            return
        places = {place.name: place for place in self.folder.iterdir() if not place.name.startswith(".")}
        self.seen[step] = {name: (place / RECORD).exists() for name, place in places.items() if not place.is_symlink()}
        trainer.strategy.barrier()
        self.is_open.set()
        if self.stops and step == EVERY + 1:
            os.kill(os.getpid(), signal.SIGTERM)

    def on_train_end(self, *_):
        self.is_open.set()


def train(kind, *, folder, gate=None, ckpt_path=None):
    rank = int(os.environ["RANK"])
    torch.manual_seed(5)
    module = make_tuner(kind, optimizer=lambda parameters: FusedAdamW(parameters, lr=0.01, optim_bits=KINDS[kind]))
    saved = ModelCheckpoint(
        folder, filename="{step}", monitor="step", mode="max", save_top_k=2, every_n_train_steps=EVERY, save_last="link"
    )
    trainer = quiet_trainer(
        folder,
        devices=2,
        strategy=FastFTFSDPStrategy(),
        max_steps=NUM_STEPS,
        use_distributed_sampler=False,
        callbacks=[saved] if gate is None else [gate, saved],
        enable_checkpointing=True,
    )
    batches = micro_batches(accumulate=1, world_size=2, rank=rank) * NUM_STEPS
    with mock.patch.object(folder_writer, "write_folder", real_write if gate is None else gate.write):
        trainer.fit(module, DataLoader(batches, batch_size=None), ckpt_path=ckpt_path)
    return gather_state(module.model, is_trained_only=True)


def fails(kind, *, folder, at, exception):
    """The error of a run in which the second rank cannot write a save, and the remaining files."""

    class Full(Gate):
        def write(self, pieces, part, path, **options):
            if path.name == f"step={at}.ckpt" and torch.distributed.get_rank() == 1:
                # Without its shards, rank 0 would wait in a collective of the save.
                pieces = {"state_dict": {"x": lambda: None}}
            real_write(pieces, part, path, **options)

    try:
        train(kind, folder=folder, gate=Full(folder))
    except exception as error:
        names = {place.name: find_damage(place) for place in folder.iterdir() if not place.is_symlink()}
        return {"error": str(error), "names": names}
    raise AssertionError("nothing failed")


def stopped(kind, *, folder):
    """Files of a run that SIGTERM stops while a save is being written."""
    try:
        train(kind, folder=folder, gate=Gate(folder, stops=os.environ["RANK"] == "0"))
    except RunStopped as stop:
        return {"step": stop.step, "damage": find_damage(Path(stop.path), needs_digest=True)}
    raise AssertionError("the run was not stopped")


def main(folder):
    folder, found = Path(folder), {}
    for kind in KINDS:
        place = folder / kind
        gate = Gate(place)
        found[kind, "whole"] = train(kind, folder=place, gate=gate)
        found[kind, "seen"] = gate.seen
        found[kind, "left"] = sorted(path.name for path in place.iterdir())
        # Step 4 was written after step 5.
        found[kind, "resumed"] = train(kind, folder=folder / f"{kind} resumed", ckpt_path=place / "step=4.ckpt")
    found["failed"] = fails("full", folder=folder / "failed", at=EVERY, exception=CheckpointNotSavedError)
    found["failed at the end"] = fails(
        "full", folder=folder / "end", at=NUM_STEPS - 1, exception=CheckpointNotSavedError
    )
    found["stopped"] = stopped("full", folder=folder / "stopped")
    torch.save(found, folder / f"found-{os.environ['RANK']}.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
