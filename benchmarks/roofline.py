r"""Compare timed steps with the limits of the GPU: model-FLOPs utilisation, and the share of products in the step.

    python -m benchmarks.roofline
    python -m benchmarks.roofline --workloads llama-3.1-8b-lora-32k

No GPU: operations are counted from shapes (lightning_fastft/monitor/flops.py: nothing recomputed, frozen weights
without a gradient of their own) on the packs of the workload, and times are the newest rows of results.csv. Of each
workload the fastest system of each name is shown, with a base in fp8 apart, because its products have another ceiling.

- *MFU*: operations over the step's time, against the data sheet's dense bf16 peak of the device.
- *products alone*: the time of linear layers and head at 790 TFLOPS, a ceiling that is taken as given for bf16 products
  of random numbers on an H200, and of attention at what cuDNN 9.19 gives there for a causal document of that length
  (https://github.com/NVIDIA/cudnn-frontend, benchmark/sdpa_benchmark_training). Norms, activations, rotation, losses,
  optimizer and adapters' thin products move bytes on top of it, so no step can be at 100 %.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.results import RESULTS_PATH
from benchmarks.ruler.workloads import WORKLOADS, Workload, lora_config, make_packs
from lightning_fastft.core.device_peaks import peak_bf16_flops
from lightning_fastft.hf.families import decoder_layers
from lightning_fastft.monitor.flops import ModelFlops, count_flops

DEFAULT_WORKLOADS = (
    "qwen3-14b-qlora",
    "qwen3-0.6b-lora",
    "llama-3.1-8b-lora-32k",
    "llama-3.1-8b-lora-32k-one-document",
    "qwen3-8b-full",
    "qwen3-30b-a3b-12l-lora",
    "gpt-oss-20b-12l-lora",
)
PRODUCT_FLOPS = 790e12
# Longest document, forward and backward: operations per second.
ATTENTION_FLOPS = (
    (2048, 484e12, 370e12),
    (4096, 591e12, 474e12),
    (8192, 644e12, 541e12),
    (16_384, 673e12, 579e12),
    (32_768, 688e12, 581e12),
)
_STEPS = ("train_step", "moe")


class StepWork(NamedTuple):
    """What a step of a workload has to compute, mean over its packs.

    Args:
        flops: Operations, attention among them.
        least_seconds: Time of its products and its attention at their ceilings.
    """

    flops: float
    least_seconds: float


class Step(NamedTuple):
    """The newest timed step of one system."""

    system: str
    milliseconds: float
    device: str


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", choices=tuple(WORKLOADS), default=list(DEFAULT_WORKLOADS))
    parser.add_argument("--results", type=Path, default=RESULTS_PATH)
    options = parser.parse_args(arguments)
    with options.results.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    print(render({name: (step_work(WORKLOADS[name]), fastest_steps(rows, name)) for name in options.workloads}))
    return 0


def step_work(workload: Workload) -> StepWork:
    """Count what a step of a workload computes; every token but the first of each document is labelled."""
    model = count_model(workload)
    flops = seconds = 0.0
    packs = make_packs(workload)
    for lengths in ([end - start for start, end in pack.borders()] for pack in packs):
        num_tokens = sum(lengths)
        products = model.step_flops(
            num_tokens=num_tokens, num_labelled=num_tokens - len(lengths), sum_squared_lengths=0
        )
        flops += products
        seconds += products / PRODUCT_FLOPS
        for length in lengths:
            attention = model.step_flops(
                num_tokens=length, num_labelled=0, sum_squared_lengths=length**2
            ) - model.step_flops(num_tokens=length, num_labelled=0, sum_squared_lengths=0)
            flops += attention
            seconds += attention * _seconds_per_attention_flop(length)
    return StepWork(flops / len(packs), seconds / len(packs))


def count_model(workload: Workload) -> ModelFlops:
    """Count the operations of a workload's model with its adapters, from shapes alone."""
    from peft import get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(workload.model_type, **workload.model_config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        adapters = lora_config(workload)
        if adapters is not None:
            model = get_peft_model(model, adapters).base_model.model
    return count_flops(model, decoder_layers(model))


def fastest_steps(rows: Sequence[Mapping[str, str]], workload: str) -> list[Step]:
    """Return the newest step time of the fastest mode of each system on all labels, a base in fp8 apart.

    Padded batches are left out: their steps are not those of the packs.
    """
    newest: dict[str, Step] = {}
    for row in rows:
        # A mixture's routing stands behind its labels.
        is_wanted = (
            row["workload"].startswith(f"{workload}, packed, labels 100%")
            and row["benchmark"] in _STEPS
            and row["metric"] == "step"
        )
        if is_wanted and row["device"] not in ("", "cpu") and "+padded" not in row["system"]:
            newest[row["system"]] = Step(row["system"], float(row["value"]), row["device"])
    fastest: dict[tuple[str, bool], Step] = {}
    for step in sorted(newest.values(), key=lambda step: step.milliseconds):
        fastest.setdefault((step.system.split()[0], "fp8" in step.system), step)
    return list(fastest.values())


def render(found: Mapping[str, tuple[StepWork, Sequence[Step]]]) -> str:
    """Return the table in Markdown."""
    header = (
        "workload",
        "TFLOP a step",
        "products alone, ms",
        "system",
        "ms per step",
        "MFU",
        "share of products alone",
    )
    lines = [f"| {' | '.join(header)} |", "|---" * len(header) + "|"]
    for name, (work, steps) in found.items():
        least = 1e3 * work.least_seconds
        for step in steps:
            peak = peak_bf16_flops(step.device)
            mfu = "" if peak is None else f"{1e3 * work.flops / step.milliseconds / peak:.0%}"
            share = "" if "fp8" in step.system else f"{least / step.milliseconds:.0%}"
            lines.append(
                f"| {name} | {work.flops / 1e12:,.0f} | {least:,.0f} | {step.system} | {step.milliseconds:,.1f} | "
                f"{mfu} | {share} |"
            )
    return "\n".join(lines)


def _seconds_per_attention_flop(length: int) -> float:
    """Return the time of one operation of attention in a document, forward and backward as they come: one part to
    two.
    """
    _, forward, backward = next((row for row in ATTENTION_FLOPS if length <= row[0]), ATTENTION_FLOPS[-1])
    return (1 / forward + 2 / backward) / 3


if __name__ == "__main__":
    sys.exit(main())
