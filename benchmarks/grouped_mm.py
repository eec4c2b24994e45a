"""Products of rows sorted by expert: torch's grouped GEMM against our own kernel.

    python -m benchmarks.grouped_mm --out runs/grouped_mm
    python -m benchmarks.grouped_mm --out runs/tiles --cases "qwen3-30b-a3b gate_up" --tiles 128,64,128,8,3 128,64,256,8,3 64,64,256,8,4

The products of Qwen3-30B-A3B (8,192 tokens, 8 of 128 experts) and gpt-oss-20b (8,192 tokens, 4 of 32) in bf16: forward, gradient of the rows (the
stored matrix read the other way), gradient of the matrices, the thin products of rank-16 adapters, and products with low-rank part and bias. Rows
spread evenly, or half of them on a tenth of the experts; one expert has none. Every arm is first compared with a loop over experts in fp32: error at
most twice that of the loop in bf16, or one unit in the last place of the largest value. Then 5 warm-up runs and 30 timed ones by CUDA events: p50 in
the table, p10 and p90 in rows.csv. Tiles (rows, inputs, outputs, warps, stages) given by hand are further arms.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.results import append_rows
from benchmarks.ruler.cases import versions
from benchmarks.ruler.measure import StepClock, summarise_ms
from lightning_fastft.errors import OptionError
from lightning_fastft.kernels.grouped_mm.op import grouped_mm, grouped_weight_grad
from lightning_fastft.kernels.grouped_mm.reference import RowAddend

NUM_WARMUP, NUM_RUNS = 5, 30
RANK = 16
LOADS = ("balanced", "skewed")
# Model: experts, routed slots; its products: rows in, columns out.
MODELS = {
    "qwen3-30b-a3b": (128, 65536, {"gate_up": (2048, 1536), "down": (768, 2048)}),
    "gpt-oss-20b": (32, 32768, {"gate_up": (2880, 5760), "down": (2880, 2880)}),
}


class Case(NamedTuple):
    """One product: its sizes, whether the matrix is stored as (E, O, I), and what is asked of it."""

    name: str
    num_experts: int
    num_rows: int
    num_inputs: int
    num_outputs: int
    is_transposed: bool = False
    has_addend: bool = False
    is_grad: bool = False


class Inputs(NamedTuple):
    """Tensors of one case; counts are those of the host, which only the check reads."""

    x_NI: torch.Tensor
    weight_EIO: torch.Tensor
    d_NO: torch.Tensor
    end_E: torch.Tensor
    addend: RowAddend
    counts: list[int]


Arm = Callable[[Inputs], torch.Tensor]


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    is_cuda = options.device == "cuda"
    command = "python -m benchmarks.grouped_mm " + " ".join(sys.argv[1:])
    found = versions()
    shared = {
        "benchmark": "grouped_mm", "version": f"torch {found['torch']}; triton {found.get('triton', 'none')}", "n": options.runs, "command": command,
        "device": found.get("device", "cpu"),
    }  # fmt: skip
    failed = False
    print(f"{'case':<42} {'load':<9} {'arm':<28} {'p50 ms':>9} {'TFLOP/s':>9} {'of torch':>9}")
    for case in all_cases(is_small=not is_cuda):
        if options.cases and not any(part in case.name for part in options.cases):
            continue
        for load in LOADS:
            torch.manual_seed(0)
            inputs = make_inputs(case, load, device=options.device)
            truth, bound = check_values(case, inputs)
            torch_ms = None
            for name, arm in all_arms(case, tiles=options.tiles, is_cuda=is_cuda).items():
                reason, milliseconds = measure(arm, inputs, truth=truth, bound=bound, num_runs=options.runs, is_cuda=is_cuda)
                if reason is not None:
                    failed = failed or not reason.startswith("refused")
                    print(f"{case.name:<42} {load:<9} {name:<28} {reason}", flush=True)
                    continue
                told = summarise_ms(milliseconds)
                torch_ms = told["median"] if name == "torch" else torch_ms
                rate = 2 * case.num_rows * case.num_inputs * case.num_outputs / told["median"] / 1e9
                share = f"{told['median'] / torch_ms:9.2f}" if torch_ms else " " * 9
                print(f"{case.name:<42} {load:<9} {name:<28} {told['median']:9.3f} {rate:9.1f} {share}", flush=True)
                row = {"workload": f"{case.name}, {load}", "system": name, "metric": "time", "value": told["median"], "unit": "ms"}
                append_rows([{**shared, **row, "p10": told["p10"], "p90": told["p90"]}], path=options.out / "rows.csv")
    return int(failed)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cases", nargs="*", default=[], help="parts of the names of the cases to run; all without")
    parser.add_argument("--tiles", nargs="*", default=[], help="rows,inputs,outputs,warps,stages of further arms")
    parser.add_argument("--runs", type=int, default=NUM_RUNS)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu: tiny sizes, to see that the script runs")
    return parser


def all_cases(*, is_small: bool) -> list[Case]:
    """Return every product of the models, in the order of the table."""
    cases = []
    for model, (num_experts, num_rows, products) in MODELS.items():
        if is_small:
            num_experts, num_rows = 4, 96
        for product, sizes in products.items():
            num_inputs, num_outputs = (size // 32 // 8 * 8 for size in sizes) if is_small else sizes
            name = f"{model} {product}"
            # As transformers stores them: gpt-oss (E, I, O), the others (E, O, I).
            is_transposed = not model.startswith("gpt-oss")
            forward = Case(name, num_experts, num_rows, num_inputs, num_outputs, is_transposed)
            backward = forward._replace(name=f"{name} dX", num_inputs=num_outputs, num_outputs=num_inputs, is_transposed=not is_transposed)
            cases += [
                forward,
                forward._replace(name=f"{name} + low rank + bias", has_addend=True),
                backward,
                backward._replace(name=f"{name} dX + low rank", has_addend=True),
                forward._replace(name=f"{name} dW", is_grad=True),
                forward._replace(name=f"{name} rank {RANK} A", num_outputs=RANK, is_transposed=False),
                forward._replace(name=f"{name} rank {RANK} B", num_inputs=RANK, is_transposed=False),
                forward._replace(name=f"{name} rank {RANK} dA", num_outputs=RANK, is_grad=True),
                forward._replace(name=f"{name} rank {RANK} dB", num_inputs=RANK, is_grad=True),
            ]
    return cases


def spread_rows(num_rows: int, num_experts: int, load: str) -> list[int]:
    """Return the rows of each expert: as even as can be, or half of them on a tenth of the experts; the last has none."""
    num_busy = max(1, num_experts // 10) if load == "skewed" else 0
    num_others = num_experts - 1 - num_busy
    busy_rows = num_rows // 2 if num_busy else 0

    def evenly(rows: int, experts: int) -> list[int]:
        return [rows // experts + (expert < rows % experts) for expert in range(experts)] if experts else []

    return [*evenly(busy_rows, num_busy), *evenly(num_rows - busy_rows, num_others), 0]


def make_inputs(case: Case, load: str, *, device: str) -> Inputs:
    """Make seeded tensors of the size that activations and weights have."""
    counts = spread_rows(case.num_rows, case.num_experts, load)

    def values(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, dtype=torch.bfloat16)

    if case.is_transposed:
        weight_EIO = values(case.num_experts, case.num_outputs, case.num_inputs).transpose(1, 2)
    else:
        weight_EIO = values(case.num_experts, case.num_inputs, case.num_outputs)
    addend = RowAddend()
    if case.has_addend:
        bias_EO = None if " dX" in case.name else values(case.num_experts, case.num_outputs)
        addend = RowAddend(bias_EO, values(case.num_rows, RANK), values(case.num_experts, RANK, case.num_outputs), 0.5)
    end_E = torch.tensor(counts, dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)
    weight_EIO.mul_(case.num_inputs**-0.5)
    return Inputs(values(case.num_rows, case.num_inputs), weight_EIO, values(case.num_rows, case.num_outputs), end_E, addend, counts)


def all_arms(case: Case, *, tiles: Sequence[str], is_cuda: bool) -> dict[str, Arm]:
    """Return what is timed, torch first: the public functions by backend, then our kernel with tiles given by hand."""

    def public(backend: str) -> Arm:
        if case.is_grad:
            return lambda inputs: grouped_weight_grad(inputs.x_NI, inputs.d_NO, inputs.end_E, backend=backend)
        return lambda inputs: grouped_mm(
            inputs.x_NI, inputs.weight_EIO, inputs.end_E, bias_EO=inputs.addend.bias_EO, low_NR=inputs.addend.low_NR, low_ERO=inputs.addend.low_ERO,
            low_scale=inputs.addend.low_scale, backend=backend,
        )  # fmt: skip

    arms = {name: public(name) for name in ("torch", "triton" if is_cuda else "reference")}
    for text in tiles if is_cuda else ():
        from lightning_fastft.kernels.grouped_mm import triton

        size = triton.Tiles(*(int(part) for part in text.split(",")))

        def arm(inputs: Inputs, size: triton.Tiles = size) -> torch.Tensor:
            if case.is_grad:
                return triton.grouped_weight_grad(inputs.x_NI, inputs.d_NO, inputs.end_E, dtype=inputs.x_NI.dtype, tiles=size)
            out_NO = inputs.x_NI.new_empty(case.num_rows, case.num_outputs)
            return triton.grouped_mm(inputs.x_NI, inputs.weight_EIO, inputs.end_E, addend=inputs.addend, out_NO=out_NO, tiles=size)

        arms[f"triton {text}"] = arm
    return arms


def check_values(case: Case, inputs: Inputs) -> tuple[torch.Tensor, float]:
    """Return the result of a loop over experts in fp32, and the largest error that is allowed."""
    truth, plain = (loop_over_experts(case, inputs, dtype) for dtype in (torch.float32, torch.bfloat16))
    largest = truth.abs().max()
    unit = torch.finfo(torch.bfloat16).eps * 2.0 ** largest.log2().floor().item()
    return truth, max(2 * (plain.float() - truth).abs().max().item(), unit)


def loop_over_experts(case: Case, inputs: Inputs, dtype: torch.dtype) -> torch.Tensor:
    """Compute the product expert by expert in one dtype."""
    parts, begin = [], 0
    for expert, count in enumerate(inputs.counts):
        rows = slice(begin, begin + count)
        begin += count
        if case.is_grad:
            parts.append((inputs.x_NI[rows].to(dtype).T @ inputs.d_NO[rows].to(dtype))[None])
            continue
        part = inputs.x_NI[rows].to(dtype) @ inputs.weight_EIO[expert].to(dtype)
        if inputs.addend.low_NR is not None and inputs.addend.low_ERO is not None:
            part += inputs.addend.low_scale * (inputs.addend.low_NR[rows].to(dtype) @ inputs.addend.low_ERO[expert].to(dtype))
        parts.append(part if inputs.addend.bias_EO is None else part + inputs.addend.bias_EO[expert].to(dtype))
    return torch.cat(parts)


def measure(arm: Arm, inputs: Inputs, *, truth: torch.Tensor, bound: float, num_runs: int, is_cuda: bool) -> tuple[str | None, list[float]]:
    """Compare one arm with the truth, then time it; returns why it has no time, or its milliseconds."""
    try:
        result = arm(inputs)
    except OptionError as error:
        return f"refused: {error}", []
    error = (result.float() - truth).abs().max().item()
    # Written this way round, NaN is no success.
    if not error <= bound:
        return f"WRONG: error {error:.3g} above {bound:.3g}", []
    del result
    for _ in range(NUM_WARMUP):
        arm(inputs)
    clock = StepClock(is_cuda=is_cuda)
    clock.mark()
    for _ in range(num_runs):
        arm(inputs)
        clock.mark()
    return None, clock.read_ms()


if __name__ == "__main__":
    raise SystemExit(main())
