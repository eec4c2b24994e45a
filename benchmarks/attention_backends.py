"""Time the attention backends on packs, forward and backward, by the lengths of the documents.

    python -m benchmarks.attention_backends
    python -m benchmarks.attention_backends --models qwen3-14b --tokens 131072 --runs 5
    python -m benchmarks.attention_backends --device cpu --models tiny

The heads of one layer, bf16, gradients of keys and values per query head, as fused layers read them. Packs of 8,192
tokens: two of the ruler (documents of 512 on average), and documents of 2,048, 4,096 and 8,192. Every backend is
compared with the first one before it is timed: outputs and gradients of queries. Then 5 warm-up runs and 30 timed ones.
The memory is the peak of a forward and backward minus the memory allocated before. `--tokens` uses one document
instead. The order of backends in kernels/attention/op.py comes from this script.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.results import append_rows
from benchmarks.ruler.cases import versions
from benchmarks.ruler.measure import StepClock, peak_memory_gib, summarise_ms
from benchmarks.ruler.workloads import WORKLOADS, make_packs
from lightning_fastft.core.errors import FastFTError
from lightning_fastft.kernels.attention.op import packed_attention
from lightning_fastft.packing.context import BatchContext

NUM_WARMUP = 5
BACKENDS = {"cuda": ("varlen", "tiled", "cudnn"), "cpu": ("sdpa", "reference")}
# Largest relative difference of two roundings of the same sums.
BOUND = 1e-2


class Heads(NamedTuple):
    """Query heads, key/value heads and their width; keys that a query sees, None for all."""

    queries: int
    keys: int
    width: int
    window: int | None = None


MODELS = {
    "qwen3-0.6b": Heads(16, 8, 128),
    "qwen3-14b": Heads(40, 8, 128),
    "qwen3-30b-a3b": Heads(32, 4, 128),
    "gpt-oss-20b": Heads(64, 8, 64),
    "gpt-oss-20b, window": Heads(64, 8, 64, 128),
    "tiny": Heads(4, 2, 16, 5),
}


def packs_of(device: str) -> dict[str, list[int]]:
    """Return document lengths by the name of the pack."""
    if device == "cpu":
        return {"3 documents": [20, 1, 11]}
    ruler = make_packs(WORKLOADS["qwen3-0.6b-lora"])
    packs = {f"{len(pack.lengths)} documents": pack.lengths for pack in (ruler[0], ruler[3])}
    return packs | {
        f"{8192 // length} of {length} tokens": [length] * (8192 // length) for length in (2048, 4096, 8192)
    }


def run(leaves: list[torch.Tensor], context: BatchContext, heads: Heads, *, backend: str) -> list[torch.Tensor]:
    """Return the output and the gradient of the queries."""
    out = packed_attention(
        *leaves, context=context, scale=heads.width**-0.5, window=heads.window, softcap=None, sink_H=None,
        backend=backend, collect=lambda *_: None,
    )  # fmt: skip
    gradient = torch.autograd.grad(out, leaves, torch.ones_like(out), allow_unused=True)[0]
    assert gradient is not None
    return [out.detach(), gradient]


def measure(
    leaves: list[torch.Tensor], context: BatchContext, heads: Heads, *, backend: str, num_runs: int
) -> tuple[dict[str, float], float]:
    """Return the milliseconds of a forward and backward, and its memory in GiB, 0 on a CPU."""
    is_cuda = leaves[0].is_cuda
    before_gib = torch.cuda.memory_allocated() / 2**30 if is_cuda else 0.0
    if is_cuda:
        torch.cuda.reset_peak_memory_stats()
    clock = StepClock(is_cuda=is_cuda)
    for number in range(NUM_WARMUP + num_runs + 1):
        if number >= NUM_WARMUP:
            clock.mark()
        run(leaves, context, heads, backend=backend)
    return summarise_ms(clock.read_ms()), peak_memory_gib(is_cuda=is_cuda)["allocated"] - before_gib


def rows_of(model: str, pack: str, lengths: list[int], *, device: str, num_runs: int) -> Iterator[dict[str, Any]]:
    """Compare the backends on one pack, print their times, and yield a row for each that can run."""
    heads, num_tokens = MODELS[model], sum(lengths)
    label_T = torch.full((num_tokens,), -100)
    context = BatchContext(lengths=lengths, label_T=label_T, num_items=1).to(device)
    torch.manual_seed(0)
    leaves = [
        torch.randn(num_tokens, number, heads.width, device=device).bfloat16().requires_grad_()
        for number in (heads.queries, heads.keys, heads.keys)
    ]
    truth: list[torch.Tensor] = []
    for backend in BACKENDS[device]:
        try:
            results = run(leaves, context, heads, backend=backend)
        except FastFTError as error:
            sys.stdout.write(f"{model:20} {pack:18} {backend:9} {error}\n")
            continue
        truth = truth or results
        for value, true in zip(results, truth):
            if not float((value.float() - true.float()).norm() / true.float().norm()) <= BOUND:
                raise SystemExit(f"{model}, {pack}: {backend} differs from {BACKENDS[device][0]}")
        times, gib = measure(leaves, context, heads, backend=backend, num_runs=num_runs)
        text = f"{times['median']:8.3f} ms [{times['p10']:.3f}, {times['p90']:.3f}] {gib:6.2f} GiB"
        sys.stdout.write(f"{model:20} {pack:18} {backend:9} {text}\n")
        row = {
            "benchmark": "attention_backends",
            "workload": f"{model}, {num_tokens} tokens, {pack}",
            "system": backend,
            "version": f"torch {torch.__version__.partition('+')[0]}",
            "command": "python -m benchmarks.attention_backends " + " ".join(sys.argv[1:]),
            "device": versions().get("device", "cpu"),
        }
        spread = {name: times[name] for name in ("p10", "p90", "n")}
        yield {**row, "metric": "forward and backward", "value": times["median"], **spread, "unit": "ms"}
        if gib:
            yield {**row, "metric": "peak of forward and backward", "value": gib, "n": 1, "unit": "GiB"}


def main() -> int:
    """Compare, time and append rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    usual = [name for name in MODELS if name != "tiny"]
    parser.add_argument("--models", nargs="+", default=usual, choices=tuple(MODELS))
    parser.add_argument("--tokens", type=int, help="time one document of this length instead of the usual packs")
    parser.add_argument("--runs", type=int, default=30, help="timed runs of each backend")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--out", type=Path, default=Path("runs/attention_backends"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    packs = {"1 document": [options.tokens]} if options.tokens else packs_of(options.device)
    for model in options.models:
        for pack, lengths in packs.items():
            rows = rows_of(model, pack, lengths, device=options.device, num_runs=options.runs)
            append_rows(list(rows), path=options.out / "rows.csv")
    return 0


if __name__ == "__main__":
    sys.exit(main())
