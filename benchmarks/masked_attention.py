"""Time packed attention of wide heads, forward and backward: with document offsets, and with dense masks by the number
of queries in a block.

    python -m benchmarks.masked_attention
    python -m benchmarks.masked_attention --device cpu --dtype float32 --width 64

The defaults are a global layer of Gemma 4 E4B (8 query heads of 512, 2 key/value heads, bf16) on the ruler's first pack
of 8,192 tokens, mean 512. Each variant is compared with one mask of the whole pack before it is timed: outputs and
gradients. Then 5 warm-up runs and 30 timed ones. ``QUERY_ROWS`` in kernels/attention/sdpa.py comes from this script.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from benchmarks.results import append_rows
from benchmarks.ruler.cases import versions
from benchmarks.ruler.measure import StepClock, summarise_ms
from benchmarks.ruler.workloads import WORKLOADS, make_packs
from lightning_fastft.kernels.attention import sdpa
from lightning_fastft.packing.context import BatchContext

NUM_WARMUP, NUM_RUNS = 5, 30
BLOCKS = (256, 512, 1024, 2048)
# Largest relative difference of two roundings of the same sums.
BOUNDS = {"bfloat16": 1e-2, "float32": 1e-5}


def run(inputs: list[torch.Tensor], context: BatchContext, *, num_rows: int) -> list[torch.Tensor]:
    """Return output and gradients of queries, keys and values, with blocks of this many queries; 0 for offsets."""
    scale = inputs[0].shape[-1] ** -0.5
    if num_rows:
        sdpa.QUERY_ROWS = num_rows
        out = sdpa.block_attention(*inputs, context=context, scale=scale, window=None)
    else:
        out = sdpa.offset_attention(*inputs, context=context, scale=scale)
    return [out.detach(), *torch.autograd.grad(out, inputs, torch.ones_like(out))]


def measure(inputs: list[torch.Tensor], context: BatchContext, *, num_rows: int) -> dict[str, float]:
    """Return milliseconds of a forward and backward."""
    for _ in range(NUM_WARMUP):
        run(inputs, context, num_rows=num_rows)
    clock = StepClock(is_cuda=inputs[0].is_cuda)
    clock.mark()
    for _ in range(NUM_RUNS):
        run(inputs, context, num_rows=num_rows)
        clock.mark()
    return summarise_ms(clock.read_ms())


def main() -> int:
    """Compare, time and append rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"heads": 8, "groups": 2, "width": 512}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtype", default="bfloat16", choices=tuple(BOUNDS))
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--out", type=Path, default=Path("runs/masked_attention"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    lengths = make_packs(WORKLOADS["gemma-4-e4b-lora"])[0].lengths
    num_tokens = sum(lengths)
    label_T = torch.full((num_tokens,), -100)
    context = BatchContext(lengths=lengths, label_T=label_T, num_items=1).to(options.device)
    torch.manual_seed(0)
    inputs = [
        torch.randn(num_tokens, heads, options.width, device=options.device, dtype=getattr(torch, options.dtype))
        for heads in (options.heads, options.groups, options.groups)
    ]
    inputs = [each.requires_grad_() for each in inputs]
    truth = run(inputs, context, num_rows=num_tokens)
    rows = []
    for num_rows in (*([0] if options.device == "cuda" else []), *BLOCKS, num_tokens):
        name = f"blocks of {num_rows} queries" if num_rows else "offsets"
        for place, (value, true) in enumerate(zip(run(inputs, context, num_rows=num_rows), truth)):
            error = float((value.float() - true.float()).norm() / true.float().norm())
            if not error <= BOUNDS[options.dtype]:
                raise SystemExit(f"{name}: output {place} is off by {error:.3g}")
        times = measure(inputs, context, num_rows=num_rows)
        sys.stdout.write(f"{name:24} {times['median']:8.2f} ms [{times['p10']:.2f}, {times['p90']:.2f}]\n")
        rows.append(
            {
                "benchmark": "masked_attention",
                "workload": f"{num_tokens} tokens, {options.heads} and {options.groups} heads of {options.width}, "
                f"{options.dtype}",
                "system": name,
                "version": f"torch {torch.__version__.partition('+')[0]}",
                "metric": "forward and backward",
                "value": times["median"],
                "p10": times["p10"],
                "p90": times["p90"],
                "n": times["n"],
                "unit": "ms",
                "command": "python -m benchmarks.masked_attention " + " ".join(sys.argv[1:]),
                "device": versions().get("device", "cpu"),
            }
        )
    append_rows(rows, path=options.out / "rows.csv")
    return 0


if __name__ == "__main__":
    sys.exit(main())
