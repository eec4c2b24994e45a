r"""Measure how long a sharded checkpoint blocks the step under FSDP2: synchronously, and in the background.

    torchrun --standalone --nproc_per_node=2 -m benchmarks.save_hold --device cpu --width 512 --layers 8
    torchrun --standalone --nproc_per_node=2 -m benchmarks.save_hold --width 4096 --layers 12 --out runs/saves

Trains every weight of a Llama with random weights, with FusedAdamW. Each mode saves ``--saves`` times, ``--every``
steps apart; the first save, which allocates the copies, is reported separately. "hold" is the time of
``trainer.save_checkpoint`` on rank 0, with the device synchronised before and after. "step" is a step without a save;
"step beside a write" is the step after each save, during the write. The folders are in ``--folder``, and each replaces
the previous one. The last step is saved once more, synchronously: both folders must have the same shards, or nothing is
reported.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, Trainer
from torch.utils.data import DataLoader

from benchmarks.results import append_rows
from lightning_fastft.checkpoint.files import read_record
from lightning_fastft.packing.collate import Document, collate
from lightning_fastft.strategies.fsdp2 import FastFTFSDPStrategy
from lightning_fastft.training.fine_tuner import FineTuner

VOCABULARY = 1024
MODES = {"at once": False, "background": True}


class Saves(Callback):
    """Save every few steps, and record the milliseconds of saves and of steps.

    Args:
        path: Path of the checkpoint.
        again: Path of the last step's checkpoint that is written synchronously.
        every: Steps between two saves.
    """

    def __init__(self, path: Path, again: Path, *, every: int) -> None:
        self.path, self.again, self.every = path, again, every
        self.hold_ms: list[float] = []
        self.step_ms: dict[bool, list[float]] = {True: [], False: []}
        self._begin, self._follows_save = 0.0, False

    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        """Start the clock of a step."""
        self._begin = now(trainer)

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        """Stop the clock of a step; save, and record the time of the save."""
        if trainer.global_step > 2:
            self.step_ms[self._follows_save].append(1e3 * (now(trainer) - self._begin))
        self._follows_save = trainer.global_step % self.every == 0
        if self._follows_save:
            begin = now(trainer)
            trainer.save_checkpoint(self.path)
            self.hold_ms.append(1e3 * (now(trainer) - begin))
        if trainer.global_step == trainer.max_steps:
            trainer.strategy.async_save = False
            trainer.save_checkpoint(self.again)


def now(trainer: Trainer) -> float:
    """Return the time, in seconds, once the device is idle."""
    if trainer.strategy.root_device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def measure(options: argparse.Namespace, mode: str, folder: Path) -> tuple[Saves, bool, int]:
    """Return the times of a mode, whether its checkpoint is right, and the bytes of this rank's files."""
    torch.manual_seed(0)
    is_cuda = options.device == "cuda"
    config = {
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": options.width,
        "intermediate_size": 4 * options.width,
        "num_hidden_layers": options.layers,
        "num_attention_heads": options.width // 64,
        "num_key_value_heads": options.width // 64,
        "tie_word_embeddings": False,
    }
    tuner = FineTuner(config, init="random", dtype="bfloat16" if is_cuda else "float32", scheduler="constant")
    ids = torch.arange(1, options.tokens + 1).numpy() % VOCABULARY
    num_steps = options.saves * options.every
    saves = Saves(folder / "last.ckpt", folder / "again.ckpt", every=options.every)
    trainer = Trainer(
        accelerator=options.device,
        devices=int(os.environ["WORLD_SIZE"]),
        strategy=FastFTFSDPStrategy(async_save=MODES[mode]),
        max_steps=num_steps,
        callbacks=[saves],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        default_root_dir=folder,
    )
    trainer.fit(tuner, DataLoader([collate([Document(ids, ids.copy())])] * num_steps, batch_size=None))
    record = read_record(saves.path)
    own = sum(digest.num_bytes for name, digest in record.items() if name.startswith(f"__{trainer.global_rank}_"))
    shards, again = (
        {name: digest for name, digest in each.items() if name.endswith(".distcp")}
        for each in (record, read_record(saves.again))
    )
    return saves, shards == again, own


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=2048, help="tokens of the pack of each rank")
    parser.add_argument("--saves", type=int, default=6)
    parser.add_argument("--every", type=int, default=10, help="steps from one save to the next")
    parser.add_argument(
        "--folder", type=Path, help="folder of the checkpoints, shared by the ranks; default: temporary"
    )
    parser.add_argument("--out", type=Path, help="folder for rows.csv")
    options = parser.parse_args()
    port = os.environ.get("MASTER_PORT", "")
    folder = options.folder or Path(tempfile.gettempdir()) / f"save-hold-{port}"
    rows, wrong = [], []
    for mode in MODES:
        saves, is_right, num_bytes = measure(options, mode, folder / mode.replace(" ", "-"))
        wrong += [] if is_right else [mode]
        title = f"{num_bytes / 1e6:.0f} MB per rank, {os.environ['WORLD_SIZE']} ranks"
        figures = {
            "first hold": saves.hold_ms[:1],
            "hold": saves.hold_ms[1:],
            "step": saves.step_ms[False],
            "step beside a write": saves.step_ms[True],
        }
        for name, values in figures.items():
            rows.append(make_row(title, mode, name, values, options))
            if int(os.environ["RANK"]) == 0:
                row = rows[-1]
                print(f"{title} | {mode} | {name} | {row['value']} ms | n {row['n']}", flush=True)
    dist.barrier()
    if int(os.environ["RANK"]) == 0:
        shutil.rmtree(folder)
        if wrong:
            print(f"Other shards than those of a synchronous save: {', '.join(wrong)}.", file=sys.stderr)
            return 1
        if options.out is not None:
            options.out.mkdir(parents=True, exist_ok=True)
            append_rows(rows, path=options.out / "rows.csv")
    return 0


def make_row(title: str, mode: str, name: str, values: list[float], options: argparse.Namespace) -> dict[str, Any]:
    """Return a row of results: the median of some times."""
    spread = statistics.quantiles(values, n=10) if len(values) > 1 else [values[0]] * 9
    return {
        "benchmark": "save_hold",
        "workload": title,
        "system": f"fastft_fsdp, {mode}",
        "version": f"torch {torch.__version__}",
        "metric": name,
        "value": round(statistics.median(values), 1),
        "p10": round(spread[0], 1),
        "p90": round(spread[-1], 1),
        "n": len(values),
        "unit": "ms",
        "command": f"torchrun --nproc_per_node={os.environ['WORLD_SIZE']} -m benchmarks.save_hold {' '.join(sys.argv[1:])}",
        "device": torch.cuda.get_device_name() if options.device == "cuda" else "CPU",
    }


if __name__ == "__main__":
    sys.exit(main())
