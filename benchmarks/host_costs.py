"""Time digests and tokenising on the host: ``python -m benchmarks.host_costs``.

Prints p10, p50 and p90 of each after one warm-up; takes about a minute on two cores and writes nothing but temporary
files. A busy machine gives slower figures.

- ``sha256``: seconds per GB (10^9 bytes) of the digest of a checkpoint file, from the page cache, so without the disk.
- ``base digest``: seconds for the sampled digest of safetensors files of 137 GB in all. The files are sparse: they hold
  headers and zeros and take no space, so no disk is read either.
- ``tokenise``: chat rows per second with the package's demo tokenizer, in this process: as they are, and with a control
  token in every question, which is read as plain text. The rows are generated, or those of a JSON-lines file with the
  columns of GSM8K: ``--rows gsm8k.jsonl``.

``python -m benchmarks.host_costs --workload qwen3-0.6b-lora --root ROOT --device cuda`` measures instead the cost of
argument checks of kernels: milliseconds of steps of a pack of 64 tokens, which are launch-bound, with fused layers and
without CUDA graphs. Steps with checks in every call (as in the tests) and without alternate. ROOT is a
folder that ``benchmarks.train_step build`` has filled.
"""

from __future__ import annotations

import argparse
import json
import struct
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, Trainer
from transformers import AutoTokenizer

from benchmarks.ruler.arms import ours
from benchmarks.ruler.plans import parse_mode
from benchmarks.ruler.workloads import FIRST_WORD, WORKLOADS, WorkloadFiles
from lightning_fastft.callbacks.fused_kernels import FusedKernels
from lightning_fastft.checkpoint.digests import hash_file
from lightning_fastft.demo.files import TURN_END, write_demo_files
from lightning_fastft.demo.generator import generate_rows
from lightning_fastft.hf.base_digest import digest_files
from lightning_fastft.kernels import backends
from lightning_fastft.packing.rows.formats import FormatOptions
from lightning_fastft.packing.store.cache import tokenize_sources
from lightning_fastft.strategies.single_device import FastFTStrategy

GB = 10**9
BASE_GB, NUM_FILES = 137, 28
MAX_TOKENS = 4096


def measure(work: Callable[[], Any], *, repeats: int) -> np.ndarray:
    """Return p10, p50 and p90 of the seconds that a call takes, after one that is not counted."""
    seconds = []
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - begin)
    return np.percentile(seconds[1:], (10, 50, 90))


def show(name: str, values: np.ndarray, unit: str, *, repeats: int) -> None:
    """Print one line."""
    low, middle, high = np.sort(values)
    print(f"{name:<44} {middle:>10.3g} {unit:<7} p10 {low:.3g}, p90 {high:.3g}, n {repeats}")


def write_sparse(path: Path, num_bytes: int) -> Path:
    """Write a safetensors file that holds one tensor of zeros and takes no space."""
    entry = {"dtype": "U8", "shape": [num_bytes], "data_offsets": [0, num_bytes]}
    header = json.dumps({"weight": entry}).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + num_bytes)
    return path


def read_chats(path: Path | None, num_rows: int) -> list[dict[str, Any]]:
    """Return chats of one question and one answer: those of a file, or generated ones."""
    if path is None:
        return [dict(row) for row in generate_rows(num_train=num_rows).train]
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line][:num_rows]
    roles = (("user", "question"), ("assistant", "answer"))
    return [{"messages": [{"role": role, "content": row[column]} for role, column in roles]} for row in rows]


def with_control_tokens(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows with a control token of the tokenizer in every question."""

    def change(turn: dict[str, str]) -> dict[str, str]:
        return {**turn, "content": f"{turn['content']} {TURN_END}"} if turn["role"] == "user" else turn

    return [{"messages": [change(turn) for turn in row["messages"]]} for row in rows]


class StepTimes(Callback):
    """Time steps, with argument checks of every kernel call in each second one.

    Attributes:
        milliseconds: Of the steps without checks and with, in this order, after the warm-up.
    """

    def __init__(self, *, num_warmup: int) -> None:
        self.num_warmup = num_warmup
        self.milliseconds: tuple[list[float], list[float]] = ([], [])
        self._begin = 0.0

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Switch the checks and start the clock."""
        backends._CHECKS_EVERY_CALL = batch_idx % 2 == 1
        self._synchronise()
        self._begin = time.perf_counter()

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Stop the clock."""
        self._synchronise()
        if batch_idx >= self.num_warmup:
            self.milliseconds[batch_idx % 2].append((time.perf_counter() - self._begin) * 1e3)

    @staticmethod
    def _synchronise() -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()


def measure_checks(files: WorkloadFiles, *, num_steps: int, is_cuda: bool) -> None:
    """Print what a step costs without and with argument checks of kernels."""
    tuner = ours.make_tuner(files, optimizer="adamw_fused", is_cuda=is_cuda)
    times = StepTimes(num_warmup=20)
    strategy = FastFTStrategy(activations=parse_mode("keep+fused").checkpointing)
    trainer = ours.make_trainer(strategy, times, max_steps=num_steps + times.num_warmup, is_cuda=is_cuda)
    trainer.callbacks.append(FusedKernels())
    ids = torch.arange(FIRST_WORD, FIRST_WORD + 64)
    document = (ids, ids)
    packs = [ours.make_batch([document]) for _ in range(num_steps + times.num_warmup)]
    trainer.fit(tuner, torch.utils.data.DataLoader(packs, batch_size=None))
    layers = tuner.model.config.num_hidden_layers
    without, checked = (np.percentile(values, (10, 50, 90)) for values in times.milliseconds)
    show("step, 64 tokens, kernels unchecked", without, "ms", repeats=num_steps // 2)
    show("step, 64 tokens, every kernel call checked", checked, "ms", repeats=num_steps // 2)
    print(f"{'checks, per layer (medians)':<44} {(checked[1] - without[1]) * 1e3 / layers:>10.3g} us")


def main() -> None:
    """Measure and print all three, or the checks of kernels."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--num_rows", type=int, default=2000)
    parser.add_argument("--rows", type=Path, help="JSON lines with question and answer; generated where not given")
    parser.add_argument("--workload", choices=sorted(WORKLOADS), help="measure argument checks of kernels on its model")
    parser.add_argument("--root", type=Path, default=Path("/dev/shm/fastft"))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    given = parser.parse_args()
    if given.workload is not None:
        workload = WorkloadFiles(given.root, WORKLOADS[given.workload])
        measure_checks(workload, num_steps=given.repeats * 20, is_cuda=given.device == "cuda")
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        blob = folder / "blob"
        blob.write_bytes(np.random.default_rng(0).bytes(GB // 4))
        seconds = measure(lambda: hash_file(blob), repeats=given.repeats)
        show("sha256", seconds * 4, "s/GB", repeats=given.repeats)
        files = [write_sparse(folder / f"{n}.safetensors", BASE_GB * GB // NUM_FILES) for n in range(NUM_FILES)]
        seconds = measure(lambda: digest_files(files), repeats=given.repeats)
        show(f"base digest, {BASE_GB} GB in {NUM_FILES} sparse files", seconds, "s", repeats=given.repeats)
        tokenizer = AutoTokenizer.from_pretrained(write_demo_files(generate_rows(), folder / "demo").model)
        chats = read_chats(given.rows, given.num_rows)
        kind = "generated rows" if given.rows is None else given.rows.name
        options = FormatOptions(max_tokens=MAX_TOKENS)
        for text, rows in ((kind, chats), (f"{kind}, control tokens", with_control_tokens(chats))):
            num_taken = len(tokenize_sources(rows, tokenizer=tokenizer, options=options))
            assert num_taken == len(rows), f"{num_taken} of {len(rows)} rows were taken"
            seconds = measure(
                lambda rows=rows: tokenize_sources(rows, tokenizer=tokenizer, options=options), repeats=given.repeats
            )
            show(f"tokenise, {text}", len(rows) / seconds, "rows/s", repeats=given.repeats)


if __name__ == "__main__":
    main()
