"""Time the scan of Mamba-2 over packed documents, forward and backward: ours against fla-core's simple_gla.

    python -m benchmarks.state_scan
    python -m benchmarks.state_scan --tokens 32768 --heads 96 --states 256

The defaults are the mixers of Granite 4.0 H Small: 128 heads of 64, one group, states of 128, bf16, documents of 700
tokens on average. simple_gla needs B and C copied to every head, and the product of x and dt; its time includes both.
Both are compared with the plain twin in fp32 on 2,048 tokens before they are timed. Then 5 warm-up runs and 30 timed
ones, each between two CUDA events; the peak excludes the inputs of a run.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from benchmarks.results import append_rows
from benchmarks.ruler.cases import versions
from benchmarks.ruler.measure import StepClock, summarise_ms
from lightning_fastft.kernels.state_scan import reference
from lightning_fastft.kernels.state_scan.op import state_scan
from lightning_fastft.packing.chunks import Chunks

NUM_WARMUP, NUM_RUNS, CHUNK = 5, 30, 64
MEAN_LENGTH, NUM_COMPARED = 700, 2048
# Largest relative error of bf16 products against fp32 ones.
BOUND = 2e-2


def make_chunks(lengths: Sequence[int], device: torch.device) -> Chunks:
    """Return the documents and chunks of a pack."""
    counts = [-(-length // CHUNK) for length in lengths]
    offsets = [[0, *itertools.accumulate(values)] for values in (lengths, counts)]
    index = [(document, chunk) for document, count in enumerate(counts) for chunk in range(count)]
    start, first, index_C2 = (torch.tensor(each, dtype=torch.int32, device=device) for each in (*offsets, index))
    return Chunks(start, first, index_C2, CHUNK)


def draw_lengths(num_tokens: int) -> list[int]:
    """Return lengths of documents that fill a pack."""
    draw, lengths = random.Random(0), []
    while sum(lengths) < num_tokens:
        lengths.append(min(int(draw.expovariate(1 / MEAN_LENGTH)) + 1, num_tokens - sum(lengths)))
    return lengths


def make_inputs(options: argparse.Namespace, num_tokens: int, device: torch.device) -> list[torch.Tensor]:
    """Return x, dt, a, b, c and skip; x, b and c are parts of one tensor, as after a convolution."""
    sizes = [options.heads * options.width, *[options.groups * options.states] * 2]
    x, b, c = torch.randn(num_tokens, sum(sizes), device=device, dtype=torch.bfloat16).split(sizes, dim=1)
    dt_TH = torch.rand(num_tokens, options.heads, device=device) * 0.1
    a_H = -torch.rand(options.heads, device=device) * 16
    inputs = [x.unflatten(1, (options.heads, -1)), dt_TH, a_H]
    inputs += [each.unflatten(1, (options.groups, -1)) for each in (b, c)]
    return [each.detach().requires_grad_() for each in (*inputs, torch.randn(options.heads, device=device))]


def scan_with_simple_gla(
    x_THW: torch.Tensor,
    dt_TH: torch.Tensor,
    a_H: torch.Tensor,
    b_TGN: torch.Tensor,
    c_TGN: torch.Tensor,
    skip_H: torch.Tensor,
    *,
    chunks: Chunks,
) -> torch.Tensor:
    """Return the same outputs, computed by fla-core."""
    from fla.ops.simple_gla import chunk_simple_gla

    repeats = x_THW.shape[1] // b_TGN.shape[1]
    b_THN, c_THN = (each.repeat_interleave(repeats, dim=1) for each in (b_TGN, c_TGN))
    value_THW = (x_THW * dt_TH[..., None]).to(x_THW.dtype)
    y_1THW, _ = chunk_simple_gla(
        c_THN[None], b_THN[None], value_THW[None], (dt_TH * a_H)[None], scale=1.0, cu_seqlens=chunks.start_S1
    )
    return (y_1THW[0] + skip_H[:, None] * x_THW).to(x_THW.dtype)


def run(scan: Callable[..., torch.Tensor], inputs: list[torch.Tensor], chunks: Chunks) -> list[torch.Tensor]:
    """Return outputs and gradients."""
    y_THW = scan(*inputs, chunks=chunks)
    return [y_THW.detach(), *torch.autograd.grad(y_THW, inputs, torch.ones_like(y_THW))]


def check(scan: Callable[..., torch.Tensor], options: argparse.Namespace, device: torch.device) -> None:
    """Compare an arm with the plain twin in fp32."""
    chunks = make_chunks(draw_lengths(NUM_COMPARED), device)
    inputs = make_inputs(options, NUM_COMPARED, device)
    wide = [each.detach().float().requires_grad_() for each in inputs]
    truth = run(lambda *each, chunks: reference.scan(*each, chunks=chunks), wide, chunks)
    for place, (value, true_value) in enumerate(zip(run(scan, inputs, chunks), truth)):
        error = float((value.float() - true_value).norm() / true_value.norm())
        if not error <= BOUND:
            raise SystemExit(f"output {place} of {scan.__name__} is off by {error:.3g}")


def measure(scan: Callable[..., torch.Tensor], options: argparse.Namespace, device: torch.device) -> dict[str, float]:
    """Return milliseconds and GiB of a forward and backward."""
    chunks = make_chunks(draw_lengths(options.tokens), device)
    inputs = make_inputs(options, options.tokens, device)
    for _ in range(NUM_WARMUP):
        run(scan, inputs, chunks)
    torch.cuda.reset_peak_memory_stats()
    before, clock = torch.cuda.memory_allocated(), StepClock(is_cuda=True)
    clock.mark()
    for _ in range(NUM_RUNS):
        run(scan, inputs, chunks)
        clock.mark()
    return summarise_ms(clock.read_ms()) | {"peak": (torch.cuda.max_memory_allocated() - before) / 2**30}


def main() -> None:
    """Compare, time and append rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"tokens": 16_384, "heads": 128, "width": 64, "groups": 1, "states": 128}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--out", type=Path, default=Path("runs/state_scan"))
    options = parser.parse_args()
    device = torch.device("cuda")
    options.out.mkdir(parents=True, exist_ok=True)
    found_versions = versions()
    workload = f"{options.tokens} tokens, {options.heads} x {options.width}, states {options.states}"
    for system, scan in {"fastft": state_scan, "fla-core simple_gla": scan_with_simple_gla}.items():
        check(scan, options, device)
        measured = measure(scan, options, device)
        print(system, {name: round(value, 3) for name, value in measured.items()})
        row = {
            "benchmark": "state_scan",
            "workload": workload,
            "system": system,
            "version": " ".join(
                f"{name} {found_versions[name]}" for name in ("torch", "triton") if name in found_versions
            ),
            "n": NUM_RUNS,
            "command": f"python -m benchmarks.state_scan {' '.join(sys.argv[1:])}".strip(),
            "device": found_versions["device"],
        }
        spread = {name: measured[name] for name in ("p10", "p90")}
        rows = [
            {**row, "metric": "step", "value": measured["median"], "unit": "ms", **spread},
            {**row, "metric": "peak allocated", "value": measured["peak"], "unit": "GiB"},
        ]
        append_rows(rows, path=options.out / "rows.csv")


if __name__ == "__main__":
    main()
