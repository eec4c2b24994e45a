"""R1, R2, R3: kills during saves, damaged checkpoints, impossible saves."""

from __future__ import annotations

import os
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from lightning.pytorch.callbacks import Callback
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.faults import child
from benchmarks.faults.table import GOOD
from lightning_fastft.activations.checkpointing import OffloadCheckpointing
from lightning_fastft.checkpoint.files import load_file
from lightning_fastft.checkpoint.io import VerifiedCheckpointIO
from lightning_fastft.strategies.single_device import FastFTStrategy
from tests.faults.test_corrupt import flip, truncate
from tests.faults.test_impossible_saves import IMPOSSIBLE, OLD
from tests.support.training_parts import VOCAB_SIZE, PlainModule, packed_loader, quiet_trainer

# A save of this model takes some 50 ms; the kill comes anywhere in two of them.
_WIDTH, _MOST_SECONDS = 256, 0.15


def make_io(stack: str) -> CheckpointIO:
    """Return what writes and reads the checkpoints of a stack."""
    return VerifiedCheckpointIO() if stack == "ours" else TorchCheckpointIO()


class SaveLast(Callback):
    """Save over the same path after every step, and say which step is saved."""

    def __init__(self, path: Path, write: int) -> None:
        self.path, self.write = path, write

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        """Save, then say so."""
        trainer.save_checkpoint(self.path)
        os.write(self.write, trainer.global_step.to_bytes(4, "little"))


def _train_and_save(folder: Path, write: int, *, stack: str, temporary: Path) -> None:
    os.environ["TMPDIR"] = str(temporary)
    tempfile.tempdir = None
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=_WIDTH,
        intermediate_size=2 * _WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
    strategy: Any = FastFTStrategy(activations=OffloadCheckpointing("keep")) if stack == "ours" else "auto"
    trainer = quiet_trainer(
        folder, strategy=strategy, max_steps=100_000, callbacks=[SaveLast(folder / "last.ckpt", write)]
    )
    trainer.fit(PlainModule(LlamaForCausalLM(config).train()), packed_loader(4))


def kill_in_save(folder: Path, *, stack: str, num_trials: int) -> list[str]:
    """R1: kill -9 while a training run saves over and over to one path."""
    chance = random.Random(1)
    # Another file system, as the temporary folder of a cluster is.
    elsewhere = Path(tempfile.mkdtemp(dir="/dev/shm"))
    verdicts = []
    try:
        for trial in range(num_trials):
            place = folder / str(trial)
            beside = place.with_name(f"{trial}-tmp") if trial % 2 else elsewhere / str(trial)
            place.mkdir(parents=True)
            beside.mkdir(parents=True)
            pid, read = child.start(folder, partial(_train_and_save, place, stack=stack, temporary=beside))
            acknowledged = int.from_bytes(os.read(read, 4), "little")
            time.sleep(chance.uniform(0, _MOST_SECONDS))
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            while rest := os.read(read, 4):
                acknowledged = int.from_bytes(rest, "little")
            os.close(read)
            verdicts.append(_judge_save(place, beside, acknowledged, stack=stack))
            shutil.rmtree(place)
            shutil.rmtree(beside)
    finally:
        shutil.rmtree(elsewhere)
    return verdicts


def _judge_save(place: Path, temporary: Path, acknowledged: int, *, stack: str) -> str:
    """Start anew from what a killed run left."""
    io, path = make_io(stack), place / "last.ckpt"
    if not path.exists():
        return "no checkpoint at all"
    # What a stack says of a torn file is its own; what counts is that nothing can be gone on from.
    try:
        step = io.load_checkpoint(path)["global_step"]
    except Exception:  # noqa: BLE001
        return "unreadable file, and no other"
    if step < acknowledged:
        return "finished save lost"
    return "readable, but files left behind" if {*place.iterdir(), *temporary.iterdir()} != {path} else GOOD


def damage(folder: Path, *, stack: str, num_trials: int) -> list[str]:
    """R2: load checkpoints of which a bit is flipped (four fifths of the trials) or the end is missing."""
    return (
        child.run(folder, lambda: _load_damaged(folder, stack=stack, num_trials=num_trials), limit_s=600.0).answer
        or ["process died"] * num_trials
    )


def _load_damaged(folder: Path, *, stack: str, num_trials: int) -> list[str]:
    chance, io = random.Random(2), make_io(stack)
    content: dict[str, Any] = {
        "state_dict": {"weight": torch.randn(4000, generator=torch.Generator().manual_seed(0))},
        "global_step": 7,
    }
    good, path = folder / "good.ckpt", folder / "hurt" / "a.ckpt"
    path.parent.mkdir(exist_ok=True)
    io.save_checkpoint(content, good)
    verdicts = []
    for trial in range(num_trials):
        shutil.copy(good, path)
        (truncate if trial % 5 == 4 else flip)(path, chance)
        # Whatever is raised, the damage is noticed.
        try:
            found = io.load_checkpoint(path)
            is_same = found["global_step"] == 7 and torch.equal(
                found["state_dict"]["weight"], content["state_dict"]["weight"]
            )
        except Exception:  # noqa: BLE001
            verdicts.append(GOOD)
            continue
        verdicts.append(GOOD if is_same else "loaded without a word, values differ")
    return verdicts


def impossible(folder: Path, *, stack: str, num_trials: int) -> list[str]:
    """R3: save where no save can be made."""
    return [_attempt(folder, make, stack=stack) for make in IMPOSSIBLE[:num_trials]]


def _attempt(folder: Path, make: Callable[[Path], tuple[Path, Any]], *, stack: str) -> str:
    # Another user reaches it, which is who the read-only folder is tried by.
    place = Path(tempfile.mkdtemp(dir="/tmp"))
    place.chmod(0o755)
    make_io(stack).save_checkpoint(OLD, place / "a.ckpt")

    def act() -> None:
        path, content = make(place)
        make_io(stack).save_checkpoint(content, path)

    end = child.run(folder, act)
    place.chmod(0o755)
    # The parent reads without the limits of the child.
    try:
        is_whole = load_file(place / "a.ckpt") == OLD
    except Exception:  # noqa: BLE001
        is_whole = False
    shutil.rmtree(place)
    if end.code == 0:
        return f"returned without an error, nothing saved ({make.__name__.replace('_', ' ')})"
    return GOOD if is_whole else "old file lost"
