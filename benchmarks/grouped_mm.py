r"""Time products of rows sorted by expert: torch's grouped GEMM against our own kernel.

    python -m benchmarks.grouped_mm --out runs/grouped_mm
    python -m benchmarks.grouped_mm --out runs/adapters --adapters
    python -m benchmarks.grouped_mm --out runs/tiles --cases "qwen3-30b-a3b gate_up" \
        --tiles 128,64,128,8,3 128,64,256,8,3 64,64,256,8,4

The products of Qwen3-30B-A3B (8,192 tokens, 8 of 128 experts) and gpt-oss-20b (8,192 tokens, 4 of 32) in bf16: forward,
gradient of the rows (the stored matrix read the other way), gradient of the matrices, the thin products of rank-16
adapters, and products with low-rank part and bias. Rows spread evenly, or half of them on a tenth of the experts; one
expert has none. Every arm is first compared with a loop over experts in fp32: error at most twice that of the loop in
bf16, or one unit in the last place of the largest value. Then 5 warm-up runs and 30 timed ones by CUDA events: p50 in
the table, p10 and p90 in rows.csv. Tiles (rows, inputs, outputs, warps, stages) given by hand are further arms.

With --adapters, one short table has only the work that an adapter of rank 16 adds to a step, with evenly spread rows:
the thin products, their gradients in fp32, the addition to a wide result, and the wide products with it, each with the
tiles in use and with candidates.
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
from lightning_fastft.core.errors import OptionError
from lightning_fastft.kernels.grouped_mm import reference
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


# Candidates for the table of tiles in kernels/grouped_mm/triton.py, beside what stands there: rows, inputs, outputs,
# warps, stages.
CANDIDATES = {
    "thin": ("128,64,16,4,4", "128,128,16,4,3", "64,256,16,4,2", "64,64,16,4,5", "32,256,16,4,3"),
    "grad": ("64,16,256,4,3", "128,16,128,4,3", "32,16,256,4,4"),
    "add": ("64,32,256,8,1", "128,32,128,8,1", "32,32,256,4,1"),
    "fused": ("128,64,256,8,3", "128,64,256,8,4", "256,64,128,8,3", "128,128,256,8,2"),
}
# Cycles for which the device sleeps before it is timed, so that the host is ahead of kernels that take less than a
# launch.
SLEEP_CYCLES = 20_000_000


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
    if options.adapters:
        return adapters_table(options, is_cuda=is_cuda)
    command = "python -m benchmarks.grouped_mm " + " ".join(sys.argv[1:])
    found = versions()
    shared = {
        "benchmark": "grouped_mm",
        "version": f"torch {found['torch']}; triton {found.get('triton', 'none')}",
        "n": options.runs,
        "command": command,
        "device": found.get("device", "cpu"),
    }
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
                reason, milliseconds = measure(
                    arm, inputs, truth=truth, bound=bound, num_runs=options.runs, is_cuda=is_cuda
                )
                if reason is not None:
                    failed = failed or not reason.startswith("refused")
                    print(f"{case.name:<42} {load:<9} {name:<28} {reason}", flush=True)
                    continue
                told = summarise_ms(milliseconds)
                torch_ms = told["median"] if name == "torch" else torch_ms
                rate = 2 * case.num_rows * case.num_inputs * case.num_outputs / told["median"] / 1e9
                share = f"{told['median'] / torch_ms:9.2f}" if torch_ms else " " * 9
                print(f"{case.name:<42} {load:<9} {name:<28} {told['median']:9.3f} {rate:9.1f} {share}", flush=True)
                row = {
                    "workload": f"{case.name}, {load}",
                    "system": name,
                    "metric": "time",
                    "value": told["median"],
                    "unit": "ms",
                }
                append_rows([{**shared, **row, "p10": told["p10"], "p90": told["p90"]}], path=options.out / "rows.csv")
    return int(failed)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cases", nargs="*", default=[], help="parts of the names of the cases to run; all without")
    parser.add_argument("--tiles", nargs="*", default=[], help="rows,inputs,outputs,warps,stages of further arms")
    parser.add_argument(
        "--adapters", action="store_true", help="only what an adapter adds, with candidates for its tiles"
    )
    parser.add_argument("--runs", type=int, default=NUM_RUNS)
    parser.add_argument(
        "--device", default="cuda", choices=("cuda", "cpu"), help="cpu: tiny sizes, to see that the script runs"
    )
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
            backward = forward._replace(
                name=f"{name} dX", num_inputs=num_outputs, num_outputs=num_inputs, is_transposed=not is_transposed
            )
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
    """Return the rows of each expert: as even as can be, or half of them on a tenth of the experts; the last has
    none.
    """
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
    return Inputs(
        values(case.num_rows, case.num_inputs),
        weight_EIO,
        values(case.num_rows, case.num_outputs),
        end_E,
        addend,
        counts,
    )


def all_arms(case: Case, *, tiles: Sequence[str], is_cuda: bool) -> dict[str, Arm]:
    """Return what is timed, torch first: the public functions by backend, then our kernel with tiles given by hand."""

    def public(backend: str) -> Arm:
        if case.is_grad:
            return lambda inputs: grouped_weight_grad(inputs.x_NI, inputs.d_NO, inputs.end_E, backend=backend)
        return lambda inputs: grouped_mm(
            inputs.x_NI,
            inputs.weight_EIO,
            inputs.end_E,
            bias_EO=inputs.addend.bias_EO,
            low_NR=inputs.addend.low_NR,
            low_ERO=inputs.addend.low_ERO,
            low_scale=inputs.addend.low_scale,
            backend=backend,
        )

    arms = {name: public(name) for name in ("torch", "triton" if is_cuda else "reference")}
    for text in tiles if is_cuda else ():
        from lightning_fastft.kernels.grouped_mm import triton

        size = triton.Tiles(*(int(part) for part in text.split(",")))

        def arm(inputs: Inputs, size: triton.Tiles = size) -> torch.Tensor:
            if case.is_grad:
                return triton.grouped_weight_grad(
                    inputs.x_NI, inputs.d_NO, inputs.end_E, dtype=inputs.x_NI.dtype, tiles=size
                )
            out_NO = inputs.x_NI.new_empty(case.num_rows, case.num_outputs)
            return triton.grouped_mm(
                inputs.x_NI, inputs.weight_EIO, inputs.end_E, addend=inputs.addend, out_NO=out_NO, tiles=size
            )

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
            part += inputs.addend.low_scale * (
                inputs.addend.low_NR[rows].to(dtype) @ inputs.addend.low_ERO[expert].to(dtype)
            )
        parts.append(part if inputs.addend.bias_EO is None else part + inputs.addend.bias_EO[expert].to(dtype))
    return torch.cat(parts)


def measure(
    arm: Arm, inputs: Inputs, *, truth: torch.Tensor, bound: float, num_runs: int, is_cuda: bool
) -> tuple[str | None, list[float]]:
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
    if is_cuda:
        torch.cuda._sleep(SLEEP_CYCLES)
    clock = StepClock(is_cuda=is_cuda)
    clock.mark()
    for _ in range(num_runs):
        arm(inputs)
        clock.mark()
    return None, clock.read_ms()


class AdapterCase(NamedTuple):
    """One step of an adapter: the product behind it, what kind of step it is, and what it costs at least."""

    case: Case
    kind: str
    num_bytes: int
    num_flop: int


def adapters_table(options: argparse.Namespace, *, is_cuda: bool) -> int:
    """Measure every step of the adapters and print one line per arm; 1 where a result is wrong."""
    failed = False
    lines = []
    print(f"{'case':<44} {'arm':<24} {'ms':>8} {'rate':>14}")
    for adapter_case in adapter_cases(is_small=not is_cuda):
        case, kind = adapter_case.case, adapter_case.kind
        if options.cases and not any(part in case.name for part in options.cases):
            continue
        torch.manual_seed(0)
        inputs = make_inputs(case, "balanced", device=options.device)
        truth, bound = check_values(case, inputs) if kind != "add" else check_sum(inputs)
        for name, arm in adapter_arms(kind, tiles=options.tiles, is_cuda=is_cuda).items():
            reason, milliseconds = measure(
                arm, inputs, truth=truth, bound=bound, num_runs=options.runs, is_cuda=is_cuda
            )
            if reason is not None:
                failed = failed or not reason.startswith("refused")
                lines.append(f"{case.name:<44} {name:<24} {reason}")
            else:
                median = summarise_ms(milliseconds)["median"]
                amount, unit = (
                    (adapter_case.num_flop, "TFLOP/s") if kind == "fused" else (adapter_case.num_bytes, "TB/s")
                )
                lines.append(f"{case.name:<44} {name:<24} {median:8.3f} {amount / median / 1e9:6.2f} {unit}")
            print(lines[-1], flush=True)
    (options.out / "adapters.txt").write_text("\n".join(lines) + "\n")
    return int(failed)


def adapter_cases(*, is_small: bool) -> list[AdapterCase]:
    """Return the steps of the adapters on both products of every model, with the factors stored as (E, R, columns)."""
    cases = []
    for whole in all_cases(is_small=is_small):
        # What has an addend stands for its product: both directions, each with its own matrix.
        if not whole.has_addend:
            continue
        name = whole.name.partition(" + ")[0]
        experts, rows, inputs, outputs = whole[1:5]
        factor, low = experts * RANK * outputs, rows * RANK
        thin = Case(f"{name} thin", experts, rows, inputs, RANK, is_transposed=True)
        grad = Case(f"{name} thin gradient", experts, rows, RANK, inputs, is_grad=True)
        cases += [
            AdapterCase(thin, "thin", 2 * (rows * inputs + low + experts * RANK * inputs), 2 * rows * inputs * RANK),
            AdapterCase(
                grad, "grad", 2 * (rows * inputs + low) + 4 * experts * RANK * inputs, 2 * rows * inputs * RANK
            ),
            AdapterCase(
                whole._replace(name=f"{name} add to rows"),
                "add",
                2 * (2 * rows * outputs + low + factor),
                2 * rows * outputs * RANK,
            ),
            AdapterCase(whole, "fused", 0, 2 * rows * inputs * outputs),
        ]
    return cases


def adapter_arms(kind: str, *, tiles: Sequence[str], is_cuda: bool) -> dict[str, Arm]:
    """Return what is timed for one kind of step; without a GPU the plain twins."""

    def product(backend: str) -> Arm:
        return lambda inputs: grouped_mm(
            inputs.x_NI,
            inputs.weight_EIO,
            inputs.end_E,
            bias_EO=inputs.addend.bias_EO,
            low_NR=inputs.addend.low_NR,
            low_ERO=inputs.addend.low_ERO,
            low_scale=inputs.addend.low_scale,
            backend=backend,
        )

    def gradient(backend: str) -> Arm:
        return lambda inputs: grouped_weight_grad(
            inputs.x_NI, inputs.d_NO, inputs.end_E, dtype=torch.float32, backend=backend
        )

    ours = "triton" if is_cuda else "reference"
    arms: dict[str, Arm] = {}
    if kind == "add":
        arms[ours] = added("" if is_cuda else None)
    elif kind == "grad":
        arms[ours] = gradient(ours)
    else:
        arms = {"torch" if kind == "thin" else "torch + add to rows": product("torch"), ours: product(ours)}
    if is_cuda:
        arms |= {f"triton {text}": with_tiles(kind, text) for text in (*CANDIDATES[kind], *tiles)}
    return arms


def added(text: str | None) -> Arm:
    """Return the sum of d_NO and the addend: the plain twin for None, else our kernel, with tiles where the text
    holds some.
    """

    def arm(inputs: Inputs) -> torch.Tensor:
        out_NO = torch.empty_like(inputs.d_NO)
        if text is None:
            return reference.add_to_rows(inputs.d_NO, inputs.end_E, addend=inputs.addend, out_NO=out_NO)
        from lightning_fastft.kernels.grouped_mm import triton

        tiles = triton.Tiles(*(int(part) for part in text.split(","))) if text else triton.ADD_TILES
        return triton.add_to_rows(inputs.d_NO, inputs.end_E, addend=inputs.addend, out_NO=out_NO, tiles=tiles)

    return arm


def with_tiles(kind: str, text: str) -> Arm:
    """Return our kernel with these tiles."""
    if kind == "add":
        return added(text)

    def arm(inputs: Inputs) -> torch.Tensor:
        from lightning_fastft.kernels.grouped_mm import triton

        tiles = triton.Tiles(*(int(part) for part in text.split(",")))
        if kind == "grad":
            return triton.grouped_weight_grad(inputs.x_NI, inputs.d_NO, inputs.end_E, dtype=torch.float32, tiles=tiles)
        out_NO = inputs.x_NI.new_empty(inputs.x_NI.shape[0], inputs.weight_EIO.shape[2])
        return triton.grouped_mm(
            inputs.x_NI, inputs.weight_EIO, inputs.end_E, addend=inputs.addend, out_NO=out_NO, tiles=tiles
        )

    return arm


def check_sum(inputs: Inputs) -> tuple[torch.Tensor, float]:
    """Return d_NO and what is added to it in fp32, and the largest error that is allowed: a rounding of the
    largest value.
    """
    bias_EO, low_NR, low_ERO = (None if part is None else part.float() for part in inputs.addend[:3])
    wide = RowAddend(bias_EO, low_NR, low_ERO, inputs.addend.low_scale)
    d_NO = inputs.d_NO.float()
    truth = reference.add_to_rows(d_NO, inputs.end_E, addend=wide, out_NO=torch.empty_like(d_NO))
    return truth, torch.finfo(torch.bfloat16).eps * 2.0 ** truth.abs().max().log2().floor().item()


if __name__ == "__main__":
    raise SystemExit(main())
