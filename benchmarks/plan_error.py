r"""Compare the predictions of ``fastft plan`` with every measured step of one GPU in results.csv.

    python -m benchmarks.plan_error

No GPU, and bitsandbytes is needed. Each row is predicted from published rates and the shares of them that kernels reach
(lightning_fastft/estimate), with the options of its run. Five constants there come from the rows marked "used": the
host time per kernel, the bandwidth of element-wise operators of PyTorch and of fla-core's kernels, and both for the
optimizers of bitsandbytes. The last column
names options of the run that the estimate does not know. The last lines count the rows within 10 %: of all, of those
without such options, of these without used rows, and of the newest of these for each setting and kind of GPU, because
older rows measured older code.
"""

from __future__ import annotations

import csv
import functools
import re
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from bitsandbytes.optim import AdamW8bit

from benchmarks.cluster_model import DEFAULT_HOST_GIB, DOCUMENT_TOKENS, Row, count_within
from benchmarks.results import RESULTS_PATH
from benchmarks.ruler.workloads import WORKLOADS, lora_config
from lightning_fastft.activations.tiles import AUTO_TILES
from lightning_fastft.core.errors import FastFTError, OptionError
from lightning_fastft.estimate.costs import MeteredStep, meter_step, plan_on
from lightning_fastft.estimate.machines import Gpu, find_gpu
from lightning_fastft.estimate.meta_model import Swaps, build_on_meta
from lightning_fastft.planner.prediction import predict
from lightning_fastft.planner.step import uniform_plan
from lightning_fastft.training.optimizer import FusedAdamW

BENCHMARKS = ("train_step", "compare", "moe", "multi_gpu", "offload front", "offload buffers", "offload small-cards")
_SYSTEM = re.compile(
    r"ours (?P<kind>keep|recompute|offload|auto)(?P<buffers>1?)(=(?P<vram>[\d.]+))?(:(?P<host>[\d.]+))?(?P<parts>(\+[\w=]+)*)"
    r"( A/A)?(, (?P<optimizer>\w+))?"
)
_GIB = 2**30
# Rows from which the constants in estimate/costs.py, metering.py and optimizer_cost.py were fitted.
USED = {
    ("2026-11-20", "qwen3-0.6b-lora, packed, labels 100%", "ours keep, adamw_8bit"),
    ("2026-11-20", "qwen3-14b-qlora, packed, labels 100%", "ours keep, adamw_8bit"),
    ("2026-11-22", "qwen3-0.6b-lora, packed, labels 100%", "ours keep+fused, adamw_fused"),
    ("2026-11-22", "qwen3-0.6b-lora, packed, 8192 tokens per GPU, keep+fused", "ours keep+fused"),
    ("2026-11-29", "qwen3-8b-full, packed, labels 100%", "ours keep+fused, adamw_8bit"),
    ("2026-11-29", "qwen3-8b-qlora, packed, labels 100%", "ours auto=8:64+fused, adamw_8bit"),
    ("2026-11-24", "qwen3.5-9b-usual-lora, packed, labels 100%", "ours keep+fused, adamw_fused"),
}
# Options of a run that the estimate does not know.
UNKNOWN = {"liger": "fused kernels of Liger"}
# Others are AdamW with moments in the dtype of the weights, fp32 of adapters.
_OPTIMIZERS = {"adamw_8bit": AdamW8bit, "adamw_fused_8bit": functools.partial(FusedAdamW, optim_bits=8)}


def main() -> int:
    """Print the table; return 1 if a row without unknown options is off by more than 10 %."""
    rows, skipped = compare_rows()
    sys.stdout.write(describe(rows, skipped) + "\n")
    return int(any(row.is_off for row in rows if not row.unknown))


def compare_rows(path: Path = RESULTS_PATH) -> tuple[list[Row], list[str]]:
    """Return every measured step of one GPU with its prediction, and a line for each step without one."""
    rows, skipped = [], []
    for measured, peak_gib in _measured(path):
        title = f"{measured['date']} {measured['workload']}: {measured['system']}"
        match, name = _SYSTEM.fullmatch(measured["system"]), measured["workload"].partition(",")[0]
        if match is None or name not in WORKLOADS:
            skipped.append(f"{title}: no mode of the planner")
            continue
        gpu = find_gpu(measured["device"].removeprefix("1 x "))
        if cap := re.search(rf"--cards .*{re.escape(name)}=([\d.]+)", measured["command"]):
            # The run was capped to the memory of a smaller card.
            gpu = gpu._replace(memory_bytes=int(float(cap[1]) * _GIB))
        tokens = re.search(r"(\d+) tokens", measured["workload"])
        num_tokens = int(tokens[1]) if tokens else WORKLOADS[name].max_tokens
        try:
            predicted = _predict(measured["workload"], match, gpu, num_tokens=num_tokens)
        except FastFTError as error:
            skipped.append(f"{title}: {error}")
            continue
        unknown = _unknown(measured["workload"], match)
        run = measured["date"], measured["workload"], measured["system"]
        facts = {"is_used": run in USED, "gpu": gpu.name, "unknown": unknown}
        rows.append(Row(*run, float(measured["value"]), peak_gib, *predicted, **facts))
    return rows, skipped


def describe(rows: Sequence[Row], skipped: Sequence[str]) -> str:
    """Return the rows as a table, those without a prediction, and a summary."""
    lines = [
        f"{row.date:<11}{row.gpu:<6}{row.workload:<66}{row.system:<54}"
        f"{row.step_ms:>7,.0f} {row.predicted_ms:>7,.0f} ms {row.step_error:>+7.1%}"
        f"{row.peak_gib:>8.1f} {row.predicted_gib:>7.1f} GiB {row.peak_error:>+7.1%}"
        f"{'  OFF' if row.is_off else '     '}{' used' if row.is_used else ''}{f'  not known: {row.unknown}' if row.unknown else ''}"
        for row in rows
    ]
    lines += [f"not predicted: {text}" for text in skipped]
    known = [row for row in rows if not row.unknown]
    unused = [row for row in known if not row.is_used]
    for title, chosen in (
        ("all rows", rows),
        ("rows of which all is known", known),
        ("of these, rows that gave no constant", unused),
        (
            "of them, the newest of each setting",
            list({(row.gpu, row.workload, row.system): row for row in unused}.values()),
        ),
    ):
        if chosen:
            lines.append(f"{title}: {count_within(chosen)}")
    return "\n".join(lines)


def _measured(path: Path) -> Iterator[tuple[dict[str, str], float]]:
    """Yield the row of each step of ours on one GPU, with the allocated GiB of the same run, NaN without them.

    The GiB of a run from graphs include the memory of the graphs, except in rows of ``multi_gpu``.
    """
    with path.open(encoding="utf-8") as file:
        table = [row for row in csv.DictReader(file) if row["benchmark"] in BENCHMARKS]
    for place, row in enumerate(table):
        is_alone = row["benchmark"] != "multi_gpu" or row["system"] == "ours one GPU"
        if row["metric"] != "step" or not row["system"].startswith("ours") or not is_alone:
            continue
        # The rows of a run follow each other, the step first.
        run = []
        for other in table[place + 1 :]:
            if other["metric"] == "step" or (other["workload"], other["system"]) != (row["workload"], row["system"]):
                break
            run.append(other)
        peaks = [float(other["value"]) for other in run if other["metric"].startswith("peak allocated")]
        if row["benchmark"] == "multi_gpu":
            row = {**row, "system": f"ours {row['workload'].rpartition(', ')[2]}"}
            if "+graphs" in row["system"]:
                peaks = []
        yield row, peaks[0] if peaks else float("nan")


@cache
def _meter(
    name: str, *, num_tokens: int, is_one: bool, swaps: Swaps, optimizer: str, label_share: float
) -> MeteredStep:
    workload = WORKLOADS[name]
    lengths = (num_tokens,) if is_one else workload.document_lengths
    mean = sum(length**2 for length in lengths) / sum(lengths) if lengths else DOCUMENT_TOKENS
    return meter_step(
        build_on_meta({"model_type": workload.model_type, **workload.model_config}),
        num_tokens=num_tokens,
        mean_document_tokens=min(mean, num_tokens),
        quantization=None if workload.is_full else workload.quantization,
        lora=lora_config(workload),
        optimizer=_OPTIMIZERS.get(optimizer),
        swaps=swaps,
        label_share=label_share,
    )


def _predict(workload: str, match: re.Match[str], gpu: Gpu, *, num_tokens: int) -> tuple[float, float]:
    """Return ms and GiB of a mode."""
    parts, kind = match["parts"], match["kind"]
    tiles, labels = re.search(r"\+tiles(\d+)", parts), re.search(r"labels (\d+)%", workload)
    swaps = Swaps(
        is_fused=any(part in parts for part in ("+fused", "+graphs", "+fp8")),
        is_graphed="auto" if "+graphs=auto" in parts else "+graphs" in parts,
        is_fp8="+fp8" in parts,
        mlp_tiles=int(tiles[1]) if tiles else 1,
    )
    metered = functools.partial(
        _meter,
        workload.partition(",")[0],
        num_tokens=num_tokens,
        is_one=", one document," in workload,
        optimizer=match["optimizer"] or "",
        label_share=int(labels[1]) / 100 if labels else 1.0,
    )
    is_streamed = "+stream" in parts
    buffers = int(match["buffers"] or 2)
    if kind == "auto":
        options: dict[str, Any] = {
            "vram_budget_bytes": int(float(match["vram"]) * _GIB) if match["vram"] else None,
            "host_budget_bytes": int(float(match["host"] or DEFAULT_HOST_GIB) * _GIB),
            "buffers": buffers,
            "weights": "stream" if is_streamed else "auto",
        }
        try:
            plan = plan_on(gpu, metered(swaps=swaps).costs_on(gpu), **options)
        except OptionError:
            # As in a run, feed-forward blocks run in tiles if nothing else fits.
            plan = plan_on(gpu, metered(swaps=swaps._replace(mlp_tiles=AUTO_TILES)).costs_on(gpu), **options)
        planned = plan.prediction
    else:
        cost = metered(swaps=swaps).costs_on(gpu)
        segments = [segment._replace(is_streamed=is_streamed) for segment in uniform_plan(len(cost.segments), kind)]
        if kind == "offload":
            # As in a run, the inputs of the last layers stay on the device if host memory has no room for them.
            host_bytes = float(match["host"] or DEFAULT_HOST_GIB) * _GIB
            num_hosted = min(len(segments) - 1, int(host_bytes // cost.segments[0].input_bytes))
            segments[num_hosted:] = [segment._replace(input_place="device") for segment in segments[num_hosted:]]
        planned = predict(cost, segments, machine=gpu.machine, buffers=buffers)
    return planned.step_ms, planned.peak_bytes / _GIB


def _unknown(workload: str, match: re.Match[str]) -> str:
    """Return the options of the run that the estimate does not know."""
    parts = match["parts"]
    return "; ".join(text for part, text in UNKNOWN.items() if f"+{part}" in parts)


if __name__ == "__main__":
    sys.exit(main())
