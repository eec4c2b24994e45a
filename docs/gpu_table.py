"""Write docs/which_gpu.md: planned and measured speed of models by method and GPU.

Command: python docs/gpu_table.py        (three minutes on one core; the planner of fastft init and fastft plan)
"""

from __future__ import annotations

import csv
import functools
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lightning_fastft.cli.recipe.plans import METHODS, Method, Planned, plan_run
from lightning_fastft.core.errors import FastFTError, OptionError
from lightning_fastft.estimate.costs import meter_step
from lightning_fastft.estimate.machines import Gpu, find_gpu
from lightning_fastft.estimate.meta_model import build_on_meta
from lightning_fastft.hf.loading.source import ModelSource

DOCS = Path(__file__).parent
# Python adds the folder of the script, not that of the repository.
sys.path.insert(0, str(DOCS.parent))
from benchmarks.ruler.workloads import WORKLOADS  # noqa: E402

PAGE = DOCS / "which_gpu.md"
HEAD = "<!-- Written by `python docs/gpu_table.py`; edit the script, not this file. -->\n"
PACK_TOKENS, DOCUMENT_TOKENS, HOST_GIB = 8192, 512, 64
_GIB = 2**30
CARDS = ("RTX 4060", "RTX 4070", "RTX 4080", "RTX 4090", "RTX 5090")
CARDS += ("A100 40GB", "L40S", "A100 80GB", "H100", "H200")
TITLES: dict[Method, str] = {
    "qlora": "QLoRA: base in NF4",
    "lora": "LoRA: base in bf16",
    "full": "Full fine-tuning: bf16 weights with fp32 masters",
}


def _config(workload: str, **changes: Any) -> dict[str, Any]:
    """Return the configuration of a workload of the ruler with some values changed."""
    return {"model_type": WORKLOADS[workload].model_type, **WORKLOADS[workload].model_config, **changes}


def _qwen(width: int, feed_forward: int, layers: int, heads: int) -> dict[str, Any]:
    return _config(
        "qwen3-0.6b-lora",
        hidden_size=width,
        intermediate_size=feed_forward,
        num_hidden_layers=layers,
        num_attention_heads=heads,
    )


MODELS: dict[str, dict[str, Any]] = {
    "Qwen3-0.6B": _config("qwen3-0.6b-lora"),
    "Qwen3-1.7B": _qwen(2048, 6144, 28, 16),
    "Qwen3-4B": _qwen(2560, 9728, 36, 32),
    "Qwen3-8B": _config("qwen3-8b-lora"),
    "Qwen3-14B": _config("qwen3-14b-qlora"),
    "Qwen3-32B": _config("qwen3-32b-qlora"),
    "Llama-3.3-70B": _config(
        "llama-3.1-8b-lora-32k",
        hidden_size=8192,
        intermediate_size=28_672,
        num_hidden_layers=80,
        num_attention_heads=64,
    ),
    "Qwen3.5-9B": _config("qwen3.5-9b-lora"),
    "Qwen3.5-35B-A3B": _config("qwen3.5-35b-a3b-12l-usual-lora", num_hidden_layers=40),
    "Gemma-4-E4B": _config("gemma-4-e4b-lora"),
    "Qwen3-30B-A3B": _config("qwen3-30b-a3b-lora"),
    "gpt-oss-20b": _config("gpt-oss-20b-lora"),
    "gpt-oss-120b": _config("gpt-oss-20b-lora", num_hidden_layers=36, num_local_experts=128),
    "Mixtral-8x7B": {
        "model_type": "mixtral",
        "vocab_size": 32_000,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "tie_word_embeddings": False,
    },
}


class Measured(NamedTuple):
    """Where results.csv has a measured step: its workload; systems with a word in without are left out."""

    workload: str
    without: str = ""


MEASURED: dict[tuple[str, Method, str], Measured] = {
    ("Qwen3-14B", "qlora", "H200"): Measured("qwen3-14b-qlora, packed, labels 100%", without="fp8"),
    ("Qwen3-0.6B", "lora", "H200"): Measured("qwen3-0.6b-lora, packed, labels 100%"),
    ("Qwen3.5-9B", "lora", "H200"): Measured("qwen3.5-9b-lora, packed, labels 100%"),
}


def write_page() -> str:
    """Return docs/which_gpu.md."""
    lines, gpus = [write_head()], [find_gpu(name) for name in CARDS]
    for method in METHODS:
        lines += [
            f"## {TITLES[method]}\n",
            f"| model | {' | '.join(f'{gpu.name}, {gpu.memory_bytes // _GIB} GiB' for gpu in gpus)} |",
            "|---|" + "---|" * len(gpus),
        ]
        for model in MODELS:
            lines.append(f"| {model} | {' | '.join(describe_cell(model, method, gpu) for gpu in gpus)} |")
            sys.stderr.write(f"{method} {lines[-1]}\n")
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def write_head() -> str:
    """Return the part of the page before its tables."""
    return f"""\
{HEAD}
# Which GPU for which model

Tokens per second of one GPU, for packs of {PACK_TOKENS:,} tokens (documents of {DOCUMENT_TOKENS}), adapters of rank 16
and {HOST_GIB} GiB of pinned host memory. A planner chooses which activations are kept, offloaded or recomputed.

- A number in **bold** is measured: the run with the most steps in `benchmarks/results.csv`, with `FusedKernels`.
- All other numbers are planned from published rates, and from the shares of them that an H200 reaches. They are for
  layers with `FusedKernels`, and with CUDA graphs where layers are launch-bound, as `fastft init` writes them.
- `at N`: only packs of N tokens fit. `s`: frozen weights are streamed from the host. `-`: does not fit.
- LoRA of a mixture of experts adapts its attention and shared layers, not its routed experts.

For your own data and model: `fastft init --model Qwen/Qwen3-8B --data train.jsonl --gpu "RTX 4090"`. For another pack
length, rank or budget: `fastft plan --config qlora_qwen3_8b --gpu "RTX 4090"`.
"""


def describe_cell(model: str, method: Method, gpu: Gpu) -> str:
    """Return the speed of a model by a method on a GPU, and how it was reached."""
    if (model, method, gpu.name) in MEASURED:
        return f"**{read_measured(MEASURED[model, method, gpu.name], gpu):,.0f}**"
    if _least_bytes(model, method) > gpu.memory_bytes + (0 if method == "full" else HOST_GIB * _GIB):
        return "-"
    try:
        planned = plan_run(
            _source(model),
            gpu=gpu,
            methods=[method],
            length_N=np.full(1, DOCUMENT_TOKENS),
            max_tokens=PACK_TOKENS,
            host_bytes=HOST_GIB * _GIB,
            meter=_meter,
        )
    except OptionError:
        return "-"
    except FastFTError as error:
        return f"not planned: {type(error).__name__}"
    return _describe(planned)


def read_measured(measured: Measured, gpu: Gpu) -> float:
    """Return the tokens/s of our fastest setting for a workload on a GPU, in the newest run with the most steps."""
    with (DOCS.parent / "benchmarks" / "results.csv").open(encoding="utf-8") as file:
        rows = [
            (int(row["n"]), row["date"], float(row["value"]))
            for row in csv.DictReader(file)
            if row["benchmark"] in ("train_step", "compare")
            and (row["workload"], row["metric"]) == (measured.workload, "tokens")
            and row["device"].endswith(gpu.name)
            and row["system"].startswith("ours")
            and "A/A" not in row["system"]
            and not (measured.without and measured.without in row["system"])
        ]
    return max(rows)[-1]


def _describe(planned: Planned) -> str:
    speed = planned.max_tokens / planned.step_ms * 1e3
    notes = f" at {planned.max_tokens:,}" if planned.max_tokens < PACK_TOKENS else ""
    notes += " s" if any(segment.is_streamed for segment in planned.plan.segments) else ""
    return f"{speed:,.0f}{notes}" if speed >= 10 else f"{speed:.1f}{notes}"


# A step on the meta device is the same for all GPUs.
_meter = functools.cache(meter_step)


@functools.cache
def _source(model: str) -> ModelSource:
    return ModelSource(MODELS[model], init="random")


@functools.cache
def _least_bytes(model: str, method: Method) -> int:
    """Return the memory of the weights, trained with masters or frozen, without planning."""
    weights = build_on_meta(_source(model)).parameters()
    return int(sum(weight.numel() for weight in weights) * {"qlora": 0.5, "lora": 2, "full": 16}[method])


if __name__ == "__main__":
    PAGE.write_text(write_page(), encoding="utf-8")
