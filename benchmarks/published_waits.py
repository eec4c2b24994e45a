"""Count host syncs in a layer of experts and in one build of packed metadata: ``benchmarks.published waits``."""

from __future__ import annotations

import argparse
import functools
import json
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks import moe_layer
from benchmarks.packed_metadata import _builders
from benchmarks.results import append_rows
from benchmarks.ruler import judge
from benchmarks.ruler.cases import base_dtype, case_failures, versions
from benchmarks.ruler.measure import HostWaits
from benchmarks.ruler.workloads import Pack, plan_packs, read_lengths
from lightning_fastft.core.patcher import ModelPatcher
from lightning_fastft.monitor.report.waits import WaitRecorder
from lightning_fastft.packing.collate import Document, collate

# The published layers are in bf16, and fp8 has other gradients.
ARMS = tuple(arm for arm in moe_layer.ARMS if "fp8" not in arm)


def measure(options: argparse.Namespace) -> int:
    """Count the host syncs of masks, then of layers, and write every count at once."""
    is_cuda = options.device == "cuda"
    options.out.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + options.budget_s
    num_tokens = options.tokens or (8192 if is_cuda else 64)
    command = "python -m benchmarks.published " + " ".join(sys.argv[1:])
    lines: list[str] = []

    def tell(line: str, rows: Sequence[dict[str, Any]]) -> None:
        append_rows(rows, path=options.out / "rows.csv")
        lines.append(line)
        print(line, flush=True)
        with (options.out / "table.txt").open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    tell(
        f"host waits, {options.device}: a layer of experts in its forward / backward, one build of packed metadata", []
    )
    for kind, count in build_waits(num_tokens, device=options.device).items():
        is_counted = isinstance(count, int)
        tell(
            f"  {kind:<28} {count}",
            [_wait_row(f"{num_tokens} tokens", kind, "one build", count, command=command)] if is_counted else [],
        )
    for shape in options.shapes or (("qwen3-30b-a3b", "gpt-oss-20b") if is_cuda else ("tiny-qwen3", "tiny-gpt-oss")):
        if time.monotonic() > deadline:
            tell(f"  {shape}: not started: budget used up", [])
            continue
        cases = [moe_layer.Case(shape, num_tokens, "balanced", "none", arm) for arm in ARMS]

        def write(record: dict[str, Any]) -> None:
            with (options.out / "raw.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
            head = f"  {record['shape']} {record['arm']:<12}"
            if record["reason"]:
                tell(f"{head} no row: {record['reason'][:200]}", [])
                return
            forward, backward = record["waits"]
            spans = (
                f", {record['forward']['median']:.2f} / {record['backward']['median']:.2f} ms"
                if "forward" in record
                else ""
            )
            rows = [
                _wait_row(
                    f"a layer of {record['shape']}, {num_tokens} tokens", record["arm"], part, count, command=command
                )
                for part, count in (("forward", forward), ("backward", backward))
            ]
            tell(
                f"{head} {forward} / {backward}{spans}",
                rows + (moe_layer.result_rows(record, command=command) if "forward" in record else []),
            )

        if is_cuda:
            moe_layer.run_group(cases, num_runs=options.runs, device=options.device, write=write)
        else:
            layer_waits(cases, write=write)
    return 0


def _wait_row(workload: str, system: str, part: str, count: int | str, *, command: str) -> dict[str, Any]:
    packages = versions()
    return {
        "benchmark": "published waits",
        "workload": workload,
        "system": system,
        "metric": f"host waits, {part}",
        "value": count,
        "n": 1,
        "unit": "per build" if part == "one build" else "per pass",
        "command": command,
        "device": packages.get("device", "cpu"),
        "version": "; ".join(
            f"{name} {packages[name]}" for name in ("lightning_fastft", "torch", "transformers") if name in packages
        ),
    }


def build_waits(num_tokens: int, *, device: str) -> dict[str, int | str]:
    """Return the host syncs in one build of each kind of metadata, or the reason if it cannot be built."""
    (lengths,) = plan_packs(
        [max(2, length * num_tokens // 8192) for length in read_lengths()["lengths"]],
        max_tokens=num_tokens,
        num_packs=1,
    )
    pack = Pack(input_id_T=torch.ones(num_tokens, dtype=torch.int64).numpy(), lengths=lengths)
    context = collate([Document(ids, labels) for ids, labels in pack.documents(1.0)]).to(device).context
    builders = _builders(context, base_dtype(is_cuda=device == "cuda"))
    # It compiles for a minute and is not in the published figures.
    builders.pop("block mask, transformers")
    counts: dict[str, int | str] = {}
    for kind, build_one in {**builders, "varlen, ours": context.varlen}.items():
        try:
            # Once before, because allocations of a first call do not count.
            build_one()
            counts[kind] = count_waits(build_one, device=device)
        except case_failures() as error:
            counts[kind] = f"no row: {type(error).__name__}: {str(error)[:200]}"
    return counts


def layer_waits(cases: Sequence[moe_layer.Case], *, write: Callable[[dict[str, Any]], None]) -> None:
    """Count, on a CPU, the host syncs of one layer in every arm, after comparing its results with the eager form."""
    first = cases[0]
    inputs, _ = moe_layer.make_inputs(first.shape, num_tokens=first.num_tokens, load=first.load, device="cpu")
    truth = moe_layer._truth(first, inputs, device="cpu")
    for case in cases:
        model = moe_layer.make_model(case.shape, adapter=case.adapter, device="cpu", dtype=torch.float32)
        moe_layer.set_arm(model, case.arm, ModelPatcher())
        layer = moe_layer.Layer(model, inputs)
        verdict = judge.judge(layer.results(), truth)
        outputs: list[torch.Tensor] = []
        waits = (
            count_waits(functools.partial(_keep_output, layer, outputs), device="cpu"),
            count_waits(functools.partial(_pop_backward, layer, outputs), device="cpu"),
        )
        write(
            {
                **case._asdict(),
                "reason": verdict.reason,
                "verdict": verdict.to_dict(),
                "waits": waits,
                "versions": versions(),
            }
        )


def _keep_output(layer: moe_layer.Layer, outputs: list[torch.Tensor]) -> None:
    outputs.append(layer.forward())


def _pop_backward(layer: moe_layer.Layer, outputs: list[torch.Tensor]) -> None:
    layer.backward(outputs.pop())


def count_waits(work: Callable[[], object], *, device: str) -> int:
    """Return the host syncs of some work; on a CPU, those that it would have with its tensors on a GPU."""
    if device == "cuda":
        with HostWaits(is_cuda=True) as waits:
            work()
        return waits.count
    recorder = WaitRecorder(torch.device("cpu"))
    with recorder.watch():
        work()
    # On a CPU our grouped products are loops in plain PyTorch; on CUDA these lines do not run.
    return sum(
        count
        for wait, count in recorder.count.items()
        if "grouped_mm/reference.py" not in str(wait.library or wait.place)
    )
