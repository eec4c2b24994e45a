r"""Compare the predictions of ``fastft plan --gpus`` with every measured row of several GPUs in results.csv.

    python -m benchmarks.cluster_model

No GPU. The step on one GPU is the measured row of the same workload and mode, or the planner's estimate if there is
none; communication and memory follow from shapes and published link rates (lightning_fastft/estimate/layouts.py). Two
constants there come from the rows marked "used", so only the other rows test the model. The last column names options
of a run that the model does not know.
"""

from __future__ import annotations

import csv
import functools
import math
import re
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from transformers import PreTrainedModel

from benchmarks.results import RESULTS_PATH
from benchmarks.ruler.workloads import WORKLOADS, lora_config
from lightning_fastft.estimate.clusters import make_cluster
from lightning_fastft.estimate.costs import MeteredStep, meter_step, plan_on
from lightning_fastft.estimate.layouts import (
    Layout,
    forecast,
    keeps_fp8,
    rank_cost,
    scale_times,
)
from lightning_fastft.estimate.machines import Gpu, find_gpu
from lightning_fastft.estimate.meta_model import Swaps, build_on_meta
from lightning_fastft.estimate.model_size import ModelSize, measure_model
from lightning_fastft.planner.prediction import predict
from lightning_fastft.planner.step import StepCost, uniform_plan
from lightning_fastft.training.optimizer import FusedAdamW

MAX_ERROR = 0.10
# Mean over the tokens of the ruler's packs.
DOCUMENT_TOKENS = 910
# Costs of expert parallelism that the model does not know. Profiles of four H100 (gpt-oss-120b): kernels take 635 ms of
# 1,310, and 7,900 launches keep the host busy for the whole step, so ranks wait for the slowest host in each layer.
UNKNOWN = "the host: ranks wait for the slowest one in each layer"
# Rows from which RANK_WAIT and HANDLED_BYTES_PER_S were derived.
USED = {("2026-11-20", "ours ddp x2"), ("2026-11-22", "ours fsdp x2")}
_SYSTEM = re.compile(r"ours (?P<full>full )?(?P<kind>ddp|fsdp|context|experts) x(?P<gpus>\d+)")
_WORKLOAD = re.compile(
    r"(?P<name>[^,]+), (?P<packs>packed|one document), (?P<tokens>\d+) tokens [^,]*, (?P<mode>[^,]+)"
    r"(?P<moments>, moments in 8 bits)?"
)
# Host memory of an automatic plan without a value for it, in GiB.
DEFAULT_HOST_GIB = 64.0
# Every weight trained on one GPU, by the ruler, with the default optimizer.
_FULL = re.compile(r"(?P<model>.+)-full, packed, labels 100%: ours (?P<mode>\S+), adamw_fused")
_GIB = 2**30


class Row(NamedTuple):
    """A measured step and its prediction; memory is the peak of allocated bytes on the largest rank, NaN if the row has
    none.

    Args:
        is_used: Whether a constant of the model comes from the row.
        gpu: Name of the GPU.
        unknown: Options of the run that the estimate does not know.
    """

    date: str
    workload: str
    system: str
    step_ms: float
    peak_gib: float
    predicted_ms: float
    predicted_gib: float
    is_used: bool = False
    gpu: str = ""
    unknown: str = ""

    @property
    def step_error(self) -> float:
        """Predicted over measured time, minus 1."""
        return self.predicted_ms / self.step_ms - 1

    @property
    def peak_error(self) -> float:
        """Predicted over measured memory, minus 1."""
        return self.predicted_gib / self.peak_gib - 1

    @property
    def is_off(self) -> bool:
        """Whether time or memory is off by more than 10 %."""
        return abs(self.step_error) > MAX_ERROR or abs(self.peak_error) > MAX_ERROR


class Estimate(NamedTuple):
    """A step predicted by the planner, on one GPU or on each of several: ms and GiB."""

    step_ms: float
    peak_gib: float


def main() -> int:
    """Print the table; return 1 if a prediction without unknown options is off by more than 10 %."""
    rows = compare_rows()
    sys.stdout.write(describe(rows) + "\n")
    return int(any(row.is_off for row in rows if not row.unknown))


def compare_rows(path: Path = RESULTS_PATH) -> list[Row]:
    """Return every measured step of several GPUs with its prediction."""
    with path.open(encoding="utf-8") as file:
        table = [row for row in csv.DictReader(file) if row["benchmark"] in ("multi_gpu", "train_step")]
    rows, newest, step_ms = [], {}, 0.0
    for row in table:
        # The rows of a run follow each other, the step first.
        if row["metric"] == "step":
            step_ms = float(row["value"])
        if not row["metric"].startswith("peak allocated"):
            continue
        measured, date, name, system = (
            Estimate(step_ms, float(row["value"])),
            row["date"],
            row["workload"],
            row["system"],
        )
        if system == "ours one GPU":
            newest[name] = measured
        elif full := _FULL.fullmatch(f"{name}: {system}"):
            newest[f"{full['model']} {full['mode']}"] = measured
        match, workload = _SYSTEM.fullmatch(system), _WORKLOAD.fullmatch(name)
        if match is None or workload is None:
            continue
        num_gpus, alone_name = int(match["gpus"]), name.replace("+resident", "")
        layout = Layout(
            {"fsdp": "fsdp2", "experts": "expert"}.get(match["kind"], "ddp"),
            size=num_gpus if match["kind"] == "experts" else 1,
            context=num_gpus if match["kind"] == "context" else 1,
            is_resident=name != alone_name,
        )
        # The command "experts" trains every weight, "multi" adapters.
        is_full = bool(match["full"]) or "multi_gpu experts" in row["command"]
        options = {"device": row["device"], "is_full": is_full}
        predicted = estimate(workload, layout, num_gpus=num_gpus, **options)
        if is_full:
            alone_name = f"{workload['name'].rpartition('-')[0]} {workload['mode'].replace('+resident', '')}"
        if alone_name in newest:
            # Compute and activations depend on the mode of the row: both are taken from its own step on one GPU.
            one, alone = newest[alone_name], estimate(workload, Layout("ddp"), num_gpus=1, **options)
            scaled = estimate(workload, layout, num_gpus=num_gpus, factor=one.step_ms / alone.step_ms, **options)
            predicted = Estimate(scaled.step_ms, predicted.peak_gib + one.peak_gib - alone.peak_gib)
        is_used = (date, system) in USED and name.startswith("qwen3-8b")
        unknown = UNKNOWN if match["kind"] == "experts" else ""
        rows.append(Row(date, name, system, *measured, *predicted, is_used, unknown=unknown))
    return rows


@functools.cache
def _metered(
    name: str,
    *,
    num_tokens: int,
    document_tokens: int,
    is_full: bool,
    is_fused: bool,
    is_fp8: bool,
    has_8bit_moments: bool,
) -> tuple[PreTrainedModel, MeteredStep]:
    workload = WORKLOADS[name]
    model = build_on_meta({"model_type": workload.model_type, **workload.model_config})
    step = meter_step(
        model,
        num_tokens=num_tokens,
        mean_document_tokens=document_tokens,
        quantization=None if is_full else workload.quantization,
        lora=None if is_full else lora_config(workload),
        optimizer=functools.partial(FusedAdamW, optim_bits=8) if has_8bit_moments else None,
        swaps=Swaps(is_fused=is_fused, is_fp8=is_fp8),
    )
    return model, step


@functools.cache
def _costs(name: str, gpu: Gpu, *, is_fp8: bool, **options: Any) -> tuple[ModelSize, StepCost]:
    model, step = _metered(name, is_fp8=is_fp8, **options)
    cost = step.costs_on(gpu)
    return measure_model(model, cost, is_fp8=is_fp8), cost


def estimate(
    workload: re.Match[str], layout: Layout, *, device: str, num_gpus: int, is_full: bool, factor: float = 1.0
) -> Estimate:
    """Return the planner's step on one GPU of several; compute times are multiplied by factor."""
    gpu = find_gpu(device.partition(" x ")[2])
    cluster = make_cluster(gpu, num_gpus=num_gpus, num_nodes=1)
    num_tokens = int(workload["tokens"]) // layout.context
    document_tokens = int(workload["tokens"]) if workload["packs"] == "one document" else DOCUMENT_TOKENS
    measure = functools.partial(
        _costs,
        workload["name"],
        gpu,
        num_tokens=num_tokens,
        document_tokens=document_tokens,
        is_full=is_full,
        is_fused=any(part in workload["mode"] for part in ("+fused", "+graphs", "+fp8")),
        has_8bit_moments=workload["moments"] is not None,
    )
    size, whole = measure(is_fp8="+fp8" in workload["mode"])
    if not keeps_fp8(layout, cluster, size):
        size, whole = measure(is_fp8=False)
    cost = rank_cost(scale_times(whole, factor), layout, cluster, size, num_tokens=num_tokens)
    policy, _, host_gib = workload["mode"].partition("+")[0].partition(":")
    if policy == "auto":
        host_bytes = int(float(host_gib or DEFAULT_HOST_GIB) * _GIB)
        segments = plan_on(cluster.gpu, cost, vram_budget_bytes=None, host_budget_bytes=host_bytes).segments
    else:
        segments = uniform_plan(len(cost.segments), policy)
    prediction = predict(cost, segments, machine=gpu.machine)
    step = forecast(layout, cluster, size, cost=cost, segments=segments, prediction=prediction, num_tokens=num_tokens)
    return Estimate(step.step_ms, prediction.peak_bytes / _GIB)


def describe(rows: Sequence[Row]) -> str:
    """Return the rows as a table, and a summary."""
    lines = [f"{'date':<11}{'workload':<96}{'system':<18}{'step, predicted':>20}{'':>8}{'peak, predicted':>22}"]
    lines += [
        f"{row.date:<11}{row.workload:<96}{row.system:<18}"
        f"{row.step_ms:>8,.0f} {row.predicted_ms:>8,.0f} ms {row.step_error:>+7.1%}"
        f"{row.peak_gib:>9.1f} {row.predicted_gib:>7.1f} GiB {row.peak_error:>+7.1%}{'  OFF' if row.is_off else ''}"
        f"{' used' if row.is_used else ''}{f'  not known: {row.unknown}' if row.unknown else ''}"
        for row in rows
    ]
    known = [row for row in rows if not row.unknown]
    return "\n".join([*lines, f"all rows: {count_within(rows)}", f"rows of which all is known: {count_within(known)}"])


def count_within(rows: Sequence[Row]) -> str:
    """Return the numbers of steps and peaks within 10 %, as a clause."""
    errors, peaks = [abs(row.step_error) for row in rows], [abs(row.peak_error) for row in rows]
    return (
        f"{sum(error <= MAX_ERROR for error in errors)} of {len(errors)} steps within {MAX_ERROR:.0%}, median error "
        f"{statistics.median(errors):.1%}, largest {max(errors):.1%}; memory: "
        f"{sum(error <= MAX_ERROR for error in peaks)} of {sum(map(math.isfinite, peaks))} within {MAX_ERROR:.0%}"
    )


if __name__ == "__main__":
    sys.exit(main())
