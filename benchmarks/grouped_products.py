r"""Time the grouped products of experts alone: bf16 and fp8, ours and torch's, and candidates for the tiles of ours.

    python -m benchmarks.grouped_products --out runs/grouped_products
    python -m benchmarks.grouped_products --out runs/grouped_products --tiles --budget-s 90

8,192 tokens, routed uniformly at random. Forward and backward of both products of Qwen3-30B-A3B (8 of 128 experts) and
of
gpt-oss (4 of 32 and 4 of 128), with a low-rank product of rank 16 where adapters add one. Arms:

- ``bf16 torch``: torch's grouped GEMM; rows are copied into the order of experts before timing.
- ``bf16 ours``, ``bf16 ours + rank 16``: our kernel; gathered rows are read in place.
- ``fp8 torch``: torch's scaled grouped GEMM on rows that are quantised and copied before timing.
- ``fp8 ours``, ``fp8 ours + rank 16``: our kernel; ``fp8 ours, rows too`` includes quantisation of the rows.

Every arm is compared with the product in fp32 of the first rows before it is timed: within 1 % of its norm in bf16, 5 %
in fp8. 3 runs to warm up and 20 timed ones by CUDA events; p50, p10, p90. ``--tiles`` compiles candidates in parallel
processes, then times each on each shape, and prints the fastest and the present choice.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch

from benchmarks.results import append_rows
from lightning_fastft.kernels.expert_rows.op import gather_rows
from lightning_fastft.kernels.expert_sort.op import sort_by_expert
from lightning_fastft.kernels.fp8_linear.op import find_obstacle, quantise_rows
from lightning_fastft.kernels.fp8_linear.reference import FP8
from lightning_fastft.kernels.grouped_mm import op
from lightning_fastft.kernels.grouped_mm.reference import Fp8Scales, GatheredRows, RowAddend

NUM_TOKENS, RANK = 8192, 16
NUM_WARMUP, NUM_RUNS = 3, 20
LIMITS = {"bf16": 0.01, "fp8": 0.05}
NUM_CHECKED = 512


class Shape(NamedTuple):
    """One grouped product.

    Args:
        num_experts: E.
        num_chosen: Experts per token.
        num_inputs: Columns of the sum.
        num_outputs: Columns of the result.
        is_gathered: Rows are tokens, found by their slots; else they are in the order of experts.
        is_backward: The weight is stored along the outputs.
    """

    num_experts: int
    num_chosen: int
    num_inputs: int
    num_outputs: int
    is_gathered: bool
    is_backward: bool


def _shapes(num_experts: int, num_chosen: int, width: int, expert_width: int) -> dict[str, Shape]:
    experts, inner = (num_experts, num_chosen), 2 * expert_width
    return {
        "gate_up": Shape(*experts, width, inner, True, False),
        "down": Shape(*experts, expert_width, width, False, False),
        "d down": Shape(*experts, width, expert_width, True, True),
        "d gate_up": Shape(*experts, inner, width, False, True),
    }


MODELS = {
    "30b-a3b": _shapes(128, 8, 2048, 768),
    "gpt-oss-20b": _shapes(32, 4, 2880, 2880),
    "gpt-oss-120b": _shapes(128, 4, 2880, 2880),
    "tiny": _shapes(4, 2, 64, 32),
}


class Product(NamedTuple):
    """Operands of one product in both dtypes."""

    shape: Shape
    x: GatheredRows | torch.Tensor
    weight_EIO: torch.Tensor
    end_E: torch.Tensor
    addend: RowAddend
    x_fp8: GatheredRows | torch.Tensor
    weight_EOI_fp8: torch.Tensor
    scales: Fp8Scales

    @property
    def num_flop(self) -> int:
        """Arithmetic of the product, without the addend."""
        return 2 * self.x.shape[0] * self.shape.num_inputs * self.shape.num_outputs

    def rows(self) -> torch.Tensor:
        """Return the tensor that holds the rows."""
        return self.x.x_TI if isinstance(self.x, GatheredRows) else self.x


def make_product(shape: Shape, *, num_tokens: int, device: str, dtype: torch.dtype = torch.bfloat16) -> Product:
    """Return seeded operands; columns of the result have a size of about 1."""
    generator = torch.Generator(device).manual_seed(3)

    def values(*sizes: int, size: float = 1.0) -> torch.Tensor:
        return torch.randn(sizes, generator=generator, device=device).mul_(size).to(dtype)

    num_experts, num_chosen, num_inputs, num_outputs = shape[:4]
    expert_TK = torch.rand(num_tokens, num_experts, generator=generator, device=device).topk(num_chosen, dim=1).indices
    order = sort_by_expert(expert_TK, num_experts=num_experts)
    num_rows = num_tokens * num_chosen
    rows = values(num_tokens if shape.is_gathered else num_rows, num_inputs)
    stored = (num_inputs, num_outputs) if shape.is_backward else (num_outputs, num_inputs)
    weight = values(num_experts, *stored, size=num_inputs**-0.5)
    weight_EIO = weight if shape.is_backward else weight.transpose(1, 2)
    addend = RowAddend(None, values(num_rows, RANK), values(num_experts, RANK, num_outputs, size=0.1 * RANK**-0.5), 2.0)
    scale_E = torch.full((num_experts,), 2.0**-8, device=device)
    weight_fp8 = torch.empty(num_experts, num_outputs, num_inputs, dtype=FP8, device=device)
    for expert in range(num_experts):
        weight_fp8[expert] = (weight_EIO[expert].T.float() * 2.0**8).to(FP8)
    values_fp8, scale_T = quantise_rows(rows)

    def gathered(rows: torch.Tensor) -> GatheredRows | torch.Tensor:
        return GatheredRows(rows, order.slot_N, num_chosen) if shape.is_gathered else rows

    scales = Fp8Scales(scale_T, scale_E)
    return Product(shape, gathered(rows), weight_EIO, order.end_E, addend, gathered(values_fp8), weight_fp8, scales)


def arms_of(product: Product, *, device: str) -> dict[str, Callable[[], torch.Tensor]]:
    """Return the timed functions by name."""
    x, weight, end_E, x_fp8, scales = product.x, product.weight_EIO, product.end_E, product.x_fp8, product.scales
    low = {"low_NR": product.addend.low_NR, "low_ERO": product.addend.low_ERO, "low_scale": product.addend.low_scale}
    ours = {"backend": "triton" if device == "cuda" else "reference", "is_checked": False}

    def narrow(x: Any, scales: Fp8Scales, **addend: Any) -> torch.Tensor:
        weight_fp8 = product.weight_EOI_fp8
        return op.grouped_mm_fp8(x, weight_fp8, end_E, scales=scales, dtype=weight.dtype, **addend, **ours)

    def rows_too() -> torch.Tensor:
        values, scale_T = quantise_rows(product.rows(), is_checked=False)
        rows = x_fp8._replace(x_TI=values) if isinstance(x_fp8, GatheredRows) else values
        return narrow(rows, scales._replace(x_scale_T=scale_T))

    arms = {
        "bf16 ours": lambda: op.grouped_mm(x, weight, end_E, **ours),
        "bf16 ours + rank 16": lambda: op.grouped_mm(x, weight, end_E, **low, **ours),
        "fp8 ours": lambda: narrow(x_fp8, scales),
        "fp8 ours + rank 16": lambda: narrow(x_fp8, scales, **low),
        "fp8 ours, rows too": rows_too,
    }
    if device != "cuda":
        return arms
    rows_NI, rows_fp8, scale_N = x, x_fp8, scales.x_scale_T
    if isinstance(x, GatheredRows) and isinstance(x_fp8, GatheredRows):
        rows_NI = gather_rows(x.x_TI, x.slot_N, num_experts_per_token=x.num_slots_per_row)
        # Two bytes at once: e4m3 rows are only moved.
        pairs = x_fp8.x_TI.view(torch.bfloat16)
        rows_fp8 = gather_rows(pairs, x.slot_N, num_experts_per_token=x.num_slots_per_row).view(FP8)
        scale_N = scales.x_scale_T[x.slot_N // x.num_slots_per_row]
    scale_EO = scales.weight_scale_E[:, None].expand(-1, product.shape.num_outputs).contiguous()
    return {
        "bf16 torch": lambda: torch.nn.functional.grouped_mm(rows_NI, weight, offs=end_E),
        **arms,
        "fp8 torch": lambda: torch._scaled_grouped_mm(
            rows_fp8,
            product.weight_EOI_fp8.transpose(1, 2),
            scale_N,
            scale_EO,
            offs=end_E,
            out_dtype=torch.bfloat16,
            use_fast_accum=True,
        ),
    }


def error_of(product: Product, result: torch.Tensor, *, has_addend: bool) -> float:
    """Return the relative distance of the first rows of a result from the product in fp32."""
    x = product.x
    num = min(NUM_CHECKED, x.shape[0])
    rows = x.x_TI[x.slot_N[:num] // x.num_slots_per_row] if isinstance(x, GatheredRows) else x[:num]
    expert_N = torch.searchsorted(product.end_E, torch.arange(num, device=rows.device, dtype=torch.int32), right=True)
    truth = torch.empty(num, product.shape.num_outputs, device=rows.device)
    for expert in expert_N.unique().tolist():
        own = expert_N == expert
        truth[own] = rows[own].float() @ product.weight_EIO[expert].float()
        if has_addend:
            _, low_NR, low_ERO, low_scale = product.addend
            assert low_NR is not None
            assert low_ERO is not None
            truth[own] += low_scale * (low_NR[:num][own].float() @ low_ERO[expert].float())
    return ((result[:num].float() - truth).norm() / truth.norm()).item()


def times_ms(run: Callable[[], Any], *, device: str, num_runs: int = NUM_RUNS) -> list[float]:
    """Return sorted times of single runs."""
    for _ in range(NUM_WARMUP):
        run()
    if device != "cuda":
        start = time.perf_counter()
        run()
        return [1e3 * (time.perf_counter() - start)]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(num_runs + 1)]
    events[0].record()
    for event in events[1:]:
        run()
        event.record()
    torch.cuda.synchronize()
    return sorted(first.elapsed_time(second) for first, second in itertools.pairwise(events))


def quantile(times: Sequence[float], share: float) -> float:
    return times[min(len(times) - 1, int(share * len(times)))]


def measure(name: str, product: Product, *, device: str) -> Iterator[dict[str, Any]]:
    """Yield a record for each arm."""
    for arm, run in arms_of(product, device=device).items():
        record: dict[str, Any] = {"product": name, "arm": arm}
        try:
            record["error"] = error_of(product, run(), has_addend="rank" in arm)
        except launch_errors() as error:
            yield {**record, "reason": f"{type(error).__name__}: {str(error)[:200]}"}
            continue
        if not record["error"] <= LIMITS[arm.split()[0]]:
            yield {**record, "reason": f"wrong by {record['error']:.3f} of its norm"}
            continue
        times = times_ms(run, device=device)
        p50, p10, p90 = (quantile(times, share) for share in (0.5, 0.1, 0.9))
        tflops = product.num_flop / p50 / 1e9
        yield {**record, "reason": "", "p50": p50, "p10": p10, "p90": p90, "n": len(times), "tflops": tflops}


# Tiles

# Rows, inputs, outputs, warps, stages.
CANDIDATES = {
    "bf16": [
        (128, 64, 256, 8, 3), (128, 64, 256, 8, 4), (128, 32, 256, 8, 5), (128, 64, 128, 8, 4), (128, 64, 128, 4, 4),
        (128, 64, 128, 4, 3), (128, 128, 128, 8, 3), (256, 64, 128, 8, 3), (256, 64, 128, 8, 4), (64, 64, 256, 4, 4),
        (64, 64, 256, 8, 4), (64, 64, 128, 4, 5),
    ],
    "fp8": [
        (128, 128, 256, 8, 3), (128, 128, 256, 8, 4), (128, 64, 256, 8, 4), (128, 64, 256, 8, 6), (128, 128, 128, 8, 4),
        (128, 128, 128, 4, 4), (256, 128, 128, 8, 3), (256, 128, 128, 8, 4), (64, 128, 256, 4, 4), (64, 128, 256, 8, 4),
        (128, 256, 128, 8, 3), (64, 256, 128, 4, 3), (64, 128, 128, 4, 5),
    ],
}  # fmt: skip
GROUPS = (1, 2, 4, 16, 32)


def run_tiles(product: Product, kind: str, tiles: Sequence[int] | None, *, group: int | None = None) -> torch.Tensor:
    """Run our kernel with tiles; None for the present ones."""
    from lightning_fastft.kernels.grouped_mm import triton

    weight = product.weight_EIO if kind == "bf16" else product.weight_EOI_fp8.transpose(1, 2)
    x = product.x if kind == "bf16" else product.x_fp8
    out_NO = torch.empty(x.shape[0], product.shape.num_outputs, dtype=torch.bfloat16, device=weight.device)
    with mock.patch.object(triton, "ROW_TILES_PER_GROUP", group or triton.ROW_TILES_PER_GROUP):
        return triton.grouped_mm(
            x,
            weight,
            product.end_E,
            addend=product.addend,
            out_NO=out_NO,
            scales=product.scales if kind == "fp8" else None,
            tiles=None if tiles is None else triton.Tiles(*tiles),
        )


def compile_candidates(work: Sequence[tuple[Shape, str, tuple[int, ...]]]) -> None:
    """Launch candidates on a few rows, so that they are cached when they are timed; failures appear again then."""
    made: dict[Shape, Product] = {}
    for shape, kind, tiles in work:
        if shape not in made:
            made[shape] = _few_rows(shape)
        try:
            run_tiles(made[shape], kind, tiles)
        except launch_errors() as error:
            print(f"{kind} {tiles}: {type(error).__name__}: {str(error)[:100]}", flush=True)
    torch.cuda.synchronize()


def _few_rows(shape: Shape) -> Product:
    """Return operands of a few rows whose experts share one matrix, for which the same code is compiled."""
    num_experts = shape.num_experts
    small = make_product(shape._replace(num_experts=shape.num_chosen), num_tokens=64, device="cuda")
    low_ERO = torch.zeros(num_experts, RANK, shape.num_outputs, dtype=torch.bfloat16, device="cuda")
    return small._replace(
        weight_EIO=small.weight_EIO[:1].expand(num_experts, -1, -1),
        weight_EOI_fp8=small.weight_EOI_fp8[:1].expand(num_experts, -1, -1),
        end_E=torch.cat([small.end_E, small.end_E[-1:].expand(num_experts - shape.num_chosen)]),
        addend=small.addend._replace(low_ERO=low_ERO),
        scales=small.scales._replace(weight_scale_E=small.scales.weight_scale_E[:1].expand(num_experts).contiguous()),
    )


def launch_errors() -> tuple[type[Exception], ...]:
    """Return the exceptions of a kernel that does not fit the device or cannot be compiled."""
    from triton.errors import TritonError

    return (RuntimeError, ValueError, TritonError)


def compile_in_parallel(shapes: Sequence[Shape], *, num_processes: int) -> None:
    """Compile all candidates for some shapes."""
    kinds = {
        (shape.num_experts, shape.is_gathered, shape.is_backward, shape.num_inputs % 256): shape for shape in shapes
    }
    work = [(shape, kind, tiles) for shape in kinds.values() for kind in CANDIDATES for tiles in CANDIDATES[kind]]
    context = multiprocessing.get_context("spawn")
    children = [
        context.Process(target=compile_candidates, args=(work[start::num_processes],)) for start in range(num_processes)
    ]
    for child in children:
        child.start()
    for child in children:
        child.join()


def sweep(name: str, product: Product, kind: str) -> Iterator[dict[str, Any]]:
    """Yield a record for each choice of tiles, then for each order of the best ones."""
    choices: list[tuple[tuple[int, ...] | None, int | None]] = [(None, None)]
    choices += [(tiles, None) for tiles in CANDIDATES[kind]]
    best: tuple[float, tuple[int, ...] | None] = (float("inf"), None)
    orders_left: list[tuple[tuple[int, ...] | None, int | None]] | None = None
    while choices:
        tiles, group = choices.pop(0)
        record = {"product": name, "arm": f"{kind} tiles", "tiles": tiles, "group": group, "reason": ""}
        try:
            error = error_of(product, run_tiles(product, kind, tiles, group=group), has_addend=True)
            if error > LIMITS[kind]:
                record["reason"] = f"wrong by {error:.3f} of its norm"
            else:
                times = times_ms(lambda: run_tiles(product, kind, tiles, group=group), device="cuda", num_runs=10)  # noqa: B023
                record |= {"p50": quantile(times, 0.5), "tflops": product.num_flop / quantile(times, 0.5) / 1e9}
                best = min(best, (record["p50"], tiles), key=lambda pair: pair[0])
        except launch_errors() as error:
            record["reason"] = f"{type(error).__name__}: {str(error)[:80]}"
        yield record
        if not choices and orders_left is None:
            choices = orders_left = [(best[1], group) for group in GROUPS]


def render(records: Sequence[dict[str, Any]]) -> str:
    """Return a table of the arms, and for tiles the best and the present choice."""
    lines = []
    for name in dict.fromkeys(record["product"] for record in records):
        own = [record for record in records if record["product"] == name]
        lines.append(name)
        for record in own:
            if "tiles" in record["arm"]:
                continue
            text = record["reason"] or (
                f"{record['p50']:.3f} ms ({record['p10']:.3f} to {record['p90']:.3f})  {record['tflops']:.0f} TFLOPS  "
                f"error {record['error']:.4f}"
            )
            lines.append(f"  {record['arm']:22} {text}")
        for kind in CANDIDATES:
            timed = sorted(
                (record for record in own if record["arm"] == f"{kind} tiles" and not record["reason"]),
                key=lambda record: record["p50"],
            )
            for record in timed[:4] + [record for record in timed[4:] if record["tiles"] is None]:
                tiles = "in use" if record["tiles"] is None else " ".join(map(str, record["tiles"]))
                group = f" group {record['group']}" if record["group"] else ""
                lines.append(f"  {kind} {tiles}{group}: {record['p50']:.3f} ms  {record['tflops']:.0f} TFLOPS")
            lines += [
                f"  no time: {kind} {record['tiles']}: {record['reason']}"
                for record in own
                if record["arm"] == f"{kind} tiles" and record["reason"]
            ]
    return "\n".join(lines)


def result_rows(records: Sequence[dict[str, Any]], *, device: str, command: str) -> list[dict[str, Any]]:
    """Return the rows of timed arms for results.csv."""
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    return [
        {
            "benchmark": "grouped_products",
            "workload": f"{record['product']}, {NUM_TOKENS} tokens",
            "system": record["arm"],
            "metric": "time",
            "value": record["p50"],
            "p10": record["p10"],
            "p90": record["p90"],
            "n": record["n"],
            "unit": "ms",
            "command": command,
            "device": name,
            "version": f"torch {torch.__version__.partition('+')[0]}",
        }
        for record in records
        if not record["reason"] and "n" in record
    ]


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    device = options.device
    obstacle = find_obstacle(torch.device(device)) if device == "cuda" else ""
    if obstacle:
        print(obstacle, file=sys.stderr)
        return 1
    options.out.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + options.budget_s
    shapes = {
        f"{model} {name}": shape
        for model in options.models
        for name, shape in MODELS[model].items()
        if name in options.products
    }
    if options.tiles:
        compile_in_parallel(list(shapes.values()), num_processes=max(1, len(os.sched_getaffinity(0)) - 2))
        print(f"compiled, {deadline - time.monotonic():.0f} s left", flush=True)
    records: list[dict[str, Any]] = []
    for name, shape in shapes.items():
        product = make_product(shape, num_tokens=options.tokens, device=device)
        sweeps = [sweep(name, product, kind) for kind in CANDIDATES] if options.tiles else []
        for source in sweeps or [measure(name, product, device=device)]:
            for record in source:
                records.append(record)
                if time.monotonic() > deadline:
                    break
    with (options.out / "raw.jsonl").open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)
    command = "python -m benchmarks.grouped_products " + " ".join(sys.argv[1:])
    append_rows(result_rows(records, device=device, command=command), path=options.out / "rows.csv")
    print(render(records), flush=True)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for raw.jsonl and rows.csv")
    parser.add_argument("--models", nargs="+", choices=tuple(MODELS), default=["30b-a3b", "gpt-oss-20b"])
    parser.add_argument("--products", nargs="+", choices=tuple(MODELS["tiny"]), default=list(MODELS["tiny"]))
    parser.add_argument("--tokens", type=int, default=NUM_TOKENS)
    parser.add_argument("--tiles", action="store_true", help="time candidates for the tiles instead of the arms")
    parser.add_argument("--budget-s", type=float, default=600.0, help="start no measurement after this")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    return parser


if __name__ == "__main__":
    sys.exit(main())
