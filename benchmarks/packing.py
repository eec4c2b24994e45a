"""Compare fill, number of packs and time of packing: ours, sequential greedy and TRL's pack_dataset.

    python -m benchmarks.packing            (add --record to append the rows to results.csv)

Workloads: 60,000 seeded log-normal lengths (median 403 tokens, clipped to 8 - 4,096) at 4,096 tokens, and GSM8K's
training questions with answers, tokenised by GPT-2's BPE (../shared/data), at 4,096 and 8,192. Each system is checked
before it is timed: every document is in one pack, and no pack exceeds its capacity. 30 runs, or 10 if a run exceeds 3
s; median, p10, p90. TRL runs as users call it (batches of 1,000 documents) and over the whole set at once. Its time
includes the copy of the tokens, because its packs hold tokens, while ours point to them. Without TRL its rows are
skipped, and the output says so.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import lightning_fastft
from benchmarks.results import append_rows
from lightning_fastft.packing.packs import pack_best_fit_decreasing

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
NUM_RUNS = 30
NUM_LONG_RUNS = 10
LONG_RUN_S = 3.0
NUM_SYNTHETIC = 60_000


class Workload(NamedTuple):
    """Lengths to pack and the capacity of a pack, in tokens."""

    name: str
    length_N: np.ndarray
    max_tokens: int


class System(NamedTuple):
    """A packing algorithm, which returns the documents of each pack."""

    name: str
    version: str
    pack: Callable[[Workload], Sequence[Sequence[int]]]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", help="append the rows to results.csv")
    options = parser.parse_args(arguments)
    rows = [row for workload in workloads() for system in systems() for row in measure(workload, system)]
    if options.record:
        append_rows(rows)
    return 0


def workloads() -> list[Workload]:
    workloads = [Workload("60,000 log-normal lengths at 4,096", synthetic_lengths(), 4096)]
    length_N = gsm8k_lengths()
    if length_N is None:
        print(f"GSM8K is left out: {DATA} or the package tokenizers is missing.")
        return workloads
    return [*workloads, *(Workload(f"GSM8K at {max_tokens:,}", length_N, max_tokens) for max_tokens in (4096, 8192))]


def synthetic_lengths() -> np.ndarray:
    return np.clip(np.random.RandomState(0).lognormal(6.0, 0.8, NUM_SYNTHETIC).astype(np.int64), 8, 4096)


def gsm8k_lengths() -> np.ndarray | None:
    try:
        from tokenizers import ByteLevelBPETokenizer
    except ImportError:
        return None
    if not (DATA / "gsm8k" / "train.jsonl").exists():
        return None
    tokenizer = ByteLevelBPETokenizer(str(DATA / "gpt2_bpe" / "vocab.json"), str(DATA / "gpt2_bpe" / "merges.txt"))
    rows = [json.loads(line) for line in (DATA / "gsm8k" / "train.jsonl").read_text(encoding="utf-8").splitlines()]
    # Plus the end-of-sequence token.
    return np.array(
        [len(entry.ids) + 1 for entry in tokenizer.encode_batch([row["question"] + row["answer"] for row in rows])]
    )


def systems() -> list[System]:
    systems = [
        System("lightning_fastft", lightning_fastft_version(), pack_ours),
        System("sequential greedy", "", pack_greedy),
    ]
    try:
        import trl
    except ImportError as error:
        print(f"TRL is left out: {error}.")
        return systems
    return [
        *systems,
        System("TRL bfd, batches of 1,000", trl.__version__, lambda workload: pack_trl(workload, batch_size=1000)),
        System(
            "TRL bfd, whole set",
            trl.__version__,
            lambda workload: pack_trl(workload, batch_size=len(workload.length_N)),
        ),
    ]


def lightning_fastft_version() -> str:
    return str(getattr(lightning_fastft, "__version__", ""))


def pack_ours(workload: Workload) -> Sequence[Sequence[int]]:
    return pack_best_fit_decreasing(workload.length_N, max_tokens=workload.max_tokens)  # type: ignore[return-value]


def pack_greedy(workload: Workload) -> Sequence[Sequence[int]]:
    packs: list[list[int]] = [[]]
    room = workload.max_tokens
    for document, length in enumerate(workload.length_N.tolist()):
        if length > room:
            packs.append([])
            room = workload.max_tokens
        packs[-1].append(document)
        room -= length
    return packs


def pack_trl(workload: Workload, *, batch_size: int) -> Sequence[Sequence[int]]:
    import datasets
    from trl import pack_dataset

    datasets.disable_progress_bars()
    datasets.disable_caching()
    # Each token is the number of its document, so that packs show their documents.
    ids = [np.full(length, document, dtype=np.int32) for document, length in enumerate(workload.length_N.tolist())]
    data = datasets.Dataset.from_dict({"input_ids": ids})
    begin = time.perf_counter()
    packed = pack_dataset(data, seq_length=workload.max_tokens, strategy="bfd", map_kwargs={"batch_size": batch_size})
    elapsed = time.perf_counter() - begin
    rows = packed.with_format("numpy")["input_ids"]
    return _Timed([list(dict.fromkeys(np.asarray(row).tolist())) for row in rows], elapsed)


class _Timed(list):
    """Return packs and the time of packing, without building and reading the data set."""

    def __init__(self, packs: list[list[int]], elapsed_s: float) -> None:
        super().__init__(packs)
        self.elapsed_s = elapsed_s


def check(workload: Workload, packs: Sequence[Sequence[int]]) -> list[int]:
    """Return the tokens of each pack, after checking that every document is there once and none is cut."""
    members = [list(map(int, packs[number])) for number in range(len(packs))]
    if sorted(document for documents in members for document in documents) != list(range(len(workload.length_N))):
        raise SystemExit(f"{workload.name}: documents are lost or repeated.")
    tokens = [int(workload.length_N[documents].sum()) for documents in members]
    if max(tokens) > workload.max_tokens:
        raise SystemExit(f"{workload.name}: a pack overflows.")
    return tokens


def measure(workload: Workload, system: System) -> list[dict[str, Any]]:
    num_packs = len(check(workload, system.pack(workload)))
    times: list[float] = []
    while len(times) < (NUM_LONG_RUNS if times and times[0] > LONG_RUN_S else NUM_RUNS):
        begin = time.perf_counter()
        packs = system.pack(workload)
        elapsed = time.perf_counter() - begin
        times.append(packs.elapsed_s if isinstance(packs, _Timed) else elapsed)
    num_tokens = int(workload.length_N.sum())
    fill = 100 * num_tokens / (num_packs * workload.max_tokens)
    deciles = statistics.quantiles(times, n=10, method="inclusive")
    print(
        f"{workload.name:36} {system.name:26} packs {num_packs:6} (ceiling {-(-num_tokens // workload.max_tokens):6})  "
        f"fill {fill:7.3f} %  "
        f"{1000 * statistics.median(times):9.1f} ms [{1000 * deciles[0]:.1f}, {1000 * deciles[-1]:.1f}] n={len(times)}",
        flush=True,
    )
    shared = {
        "benchmark": "packing",
        "workload": workload.name,
        "system": system.name,
        "version": system.version,
        "command": "python -m benchmarks.packing --record",
        "device": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
    }
    return [
        {**shared, "metric": "packs", "value": num_packs, "unit": "packs"},
        {**shared, "metric": "fill", "value": fill, "unit": "%"},
        {
            **shared,
            "metric": "time",
            "value": 1000 * statistics.median(times),
            "p10": 1000 * deciles[0],
            "p90": 1000 * deciles[-1],
            "n": len(times),
            "unit": "ms",
        },
    ]


if __name__ == "__main__":
    sys.exit(main())
