"""The runs that the README and docs/numbers.md cite by name, and the headlines of README.md.

No figure is written by hand: prose refers to figures as {name}.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from docs.entries import (
    BITS,
    RESULTS,
    Entry,
    faster_of_repeats,
    fastest,
    figure,
    read_entries,
    short_label,
    table_head,
    table_row,
    workload_name,
)


class NamedRun(NamedTuple):
    """A run that the README cites: the newest one that has all of its labels.

    Args:
        workload: First word of the rows' workload.
        labels: Systems of its rows, with or without the optimizer.
    """

    workload: str
    labels: tuple[str, ...]


class Headline(NamedTuple):
    """A line of the README's table.

    Args:
        title: What is trained.
        run: A name in NAMED_RUNS.
        setting: Ours.
    """

    title: str
    run: str
    setting: str


_BUDGET = "auto=12.0:24+fused"
NAMED_RUNS = {
    "14b": NamedRun("qwen3-14b-qlora", ("ours shipped", f"ours {_BUDGET}", "unsloth off", "unsloth unsloth")),
    "14b-fp8": NamedRun("qwen3-14b-qlora", ("ours keep+fused+fp8", "ours keep+fused", "unsloth off")),
    "14b-16k": NamedRun("qwen3-14b-qlora-16k", ("ours auto=13.7:64+fused", "unsloth unsloth")),
    "14b-16k-bitsandbytes": NamedRun("qwen3-14b-qlora-16k", ("ours auto=13.7:64+fused, adamw_8bit", "unsloth unsloth")),
    "14b-128k": NamedRun("qwen3-14b-10l-qlora-128k-one-document", ("ours auto=33:64+fused", "unsloth unsloth")),
    "14b-metadata": NamedRun("qwen3-14b-qlora", ("varlen/once", "varlen/every-layer", "sdpa/every-layer-loop")),
    "14b-plain": NamedRun("qwen3-14b-qlora", ("ours shipped", "unsloth off", "trl keep+liger", "plain keep+liger")),
    "14b-trl": NamedRun("qwen3-14b-qlora", ("ours shipped", "unsloth off", "trl keep+liger", "trl recompute+liger")),
    "0.6b": NamedRun("qwen3-0.6b-lora", ("ours keep+graphs", "unsloth off", "unsloth unsloth")),
    "0.6b-launches": NamedRun("qwen3-0.6b-lora", ("ours recompute+fused", "ours offload:24+fused", "unsloth unsloth")),
    "0.6b-metadata": NamedRun("qwen3-0.6b-lora", ("varlen/once", "varlen/every-layer", "sdpa/every-layer-loop")),
    "30b-a3b": NamedRun("qwen3-30b-a3b-12l-lora", ("ours shipped", "unsloth off")),
    "30b-a3b-recomputed": NamedRun("qwen3-30b-a3b-12l-lora", ("ours recompute+graphs", "unsloth off")),
    "8b": NamedRun("qwen3-8b-qlora", ("ours shipped", "unsloth off", "unsloth unsloth")),
    "8b-budget": NamedRun("qwen3-8b-qlora", ("ours auto=7.9:64+fused", "unsloth unsloth")),
    "8b-budget-bitsandbytes": NamedRun("qwen3-8b-qlora", ("ours auto=8:64+fused, adamw_8bit", "unsloth unsloth")),
    "8b-full": NamedRun("qwen3-8b-full", ("ours keep+fused, adamw_fused", "unsloth off")),
    "8b-full-8-bit": NamedRun("qwen3-8b-full", ("ours keep+fused, adamw_fused_8bit", "unsloth off")),
    "8b-full-bitsandbytes": NamedRun("qwen3-8b-full", ("ours keep+fused, adamw_8bit", "unsloth off")),
    "8b-fp8-kept": NamedRun("qwen3-8b-full", ("ours keep+fused+fp8",)),
    "8b-lora-fp8": NamedRun("qwen3-8b-lora", ("ours keep+graphs+fp8", "unsloth off+fp8")),
    "8b-fp8": NamedRun("qwen3-8b-full", ("ours recompute+fused+fp8", "ours recompute+fused")),
    "32k": NamedRun("llama-3.1-8b-lora-32k", ("ours keep+fused", "unsloth off")),
    "32k-one-document": NamedRun("llama-3.1-8b-lora-32k-one-document", ("ours keep+fused", "unsloth off")),
    "128k": NamedRun("llama-3.1-8b-lora-128k-one-document", ("ours offload:40+fused+tiles8", "unsloth unsloth")),
    "30b-a3b-48-layers": NamedRun("qwen3-30b-a3b-lora", ("ours shipped", "unsloth off")),
    "gpt-oss": NamedRun(
        "gpt-oss-20b-12l-lora", ("ours keep+fused", "unsloth off+padded16", "unsloth unsloth+padded64")
    ),
    "32b-full": NamedRun("qwen3-32b-qlora", ("ours full fsdp x4",)),
    "32b-one-gpu": NamedRun(
        "qwen3-32b",
        ("ours auto+fused, moments in 8 bits, 100 % of the moments on the host, stochastic rounding",),
    ),
    "70b": NamedRun("llama-3.3-70b-qlora", ("ours auto=130:16+fused",)),
    "70b-fp8": NamedRun("llama-3.3-70b-qlora", ("ours auto=130:16+fused+fp8",)),
}
README_LINES = (
    Headline("Qwen3-14B QLoRA", "14b", "shipped"),
    Headline("the same with `vram_budget=12`", "14b", _BUDGET),
    Headline("Qwen3-8B QLoRA", "8b", "shipped"),
    Headline("Qwen3-30B-A3B LoRA", "30b-a3b-48-layers", "shipped"),
    Headline("Qwen3-0.6B LoRA", "0.6b", "keep+graphs"),
    Headline("Llama-3.1-8B LoRA, 32,768 tokens", "32k", "keep+fused"),
    Headline("the same, one document of 131,072 tokens", "128k", "offload:40+fused+tiles8"),
    Headline("Qwen3-8B, every weight trained", "8b-full", "keep+fused"),
)
README_TEMPLATE = """\
{table}

Each line is one run on one GPU, named in the last column: the width of the optimizer's moments, the same on both sides,
median time of a step, and peak memory. If a run measured a setting twice, its faster time counts, for every system.
*Times as fast* divides our tokens per second by those of Unsloth's fastest setting in that run; under `vram_budget=12`
by those of its default, the only one that needs as little memory. Empty cells were not measured in it.

Where ours loses: memory. With all activations kept, Qwen3-14B takes {keep_gib} GiB, Unsloth's default {unsloth_gib} GiB
({cite[14b]}). Qwen3-0.6B, recomputed and without CUDA graphs, takes {eager_gib} GiB and {eager_ms} ms, Unsloth's
default {unsloth_small_gib} GiB and {unsloth_small_ms} ms ({cite[0.6b-launches]}). With every weight of Qwen3-8B
trained, ours takes {full_gib} GiB, Unsloth {unsloth_full_gib} GiB ({cite[8b-full]}). With 8-bit moments, ours takes
{full_8_bit_ms} ms and {full_8_bit_gib} GiB, Unsloth {unsloth_full_8_bit_ms} ms and {unsloth_full_8_bit_gib} GiB
({cite[8b-full-8-bit]}). Nearly all of that gain is `FusedAdamW`: with `bitsandbytes.optim.AdamW8bit` in both, ours
takes {bitsandbytes_full_ms} ms, Unsloth {unsloth_bitsandbytes_full_ms} ms ({cite[8b-full-bitsandbytes]}).
"""


def find_named_run(entries: Sequence[Entry], name: str) -> list[Entry]:
    """Return the entries of a run that the README cites, of its workload; of a repeated setting the faster one.

    Raises:
        LookupError: No run has all of its labels.
    """
    wanted = NAMED_RUNS[name]
    runs: dict[tuple[str, str, str], list[Entry]] = {}
    for entry in entries:
        if workload_name(entry) == wanted.workload:
            runs.setdefault(entry.run, []).append(entry)
    for run in sorted(runs.values(), key=lambda found: max(e.order for e in found), reverse=True):
        if {*wanted.labels} <= {label for entry in run for label in (entry.label, short_label(entry))}:
            return faster_of_repeats(run)
    raise LookupError(f"no run of {wanted.workload} has {', '.join(wanted.labels)}")


def find_figures(entries: Sequence[Entry]) -> dict[str, str]:
    """Return the figures that prose names, each pair compared in one run."""
    cells = {
        "eager": ("0.6b-launches", "ours recompute+fused"),
        "unsloth_small": ("0.6b-launches", "unsloth unsloth"),
        "offload": ("0.6b-launches", "ours offload:24+fused"),
        "graph": ("0.6b", "ours keep+graphs"),
        "keep": ("14b", "ours shipped"),
        "budget": ("14b", f"ours {_BUDGET}"),
        "unsloth": ("14b", "unsloth unsloth"),
        "full": ("8b-full", "ours keep+fused"),
        "unsloth_full": ("8b-full", "unsloth off"),
        "full_8_bit": ("8b-full-8-bit", "ours keep+fused"),
        "unsloth_full_8_bit": ("8b-full-8-bit", "unsloth off"),
        "bitsandbytes_full": ("8b-full-bitsandbytes", "ours keep+fused"),
        "unsloth_bitsandbytes_full": ("8b-full-bitsandbytes", "unsloth off"),
        "small_budget": ("8b-budget", "ours auto=7.9:64+fused"),
        "unsloth_8b": ("8b-budget", "unsloth unsloth"),
        "small_budget_bnb": ("8b-budget-bitsandbytes", "ours auto=8:64+fused"),
        "unsloth_8b_bnb": ("8b-budget-bitsandbytes", "unsloth unsloth"),
        "long_budget": ("14b-16k", "ours auto=13.7:64+fused"),
        "unsloth_16k": ("14b-16k", "unsloth unsloth"),
        "long_budget_bnb": ("14b-16k-bitsandbytes", "ours auto=13.7:64+fused"),
        "unsloth_16k_bnb": ("14b-16k-bitsandbytes", "unsloth unsloth"),
        "four_ours": ("14b-plain", "ours shipped"),
        "four_unsloth": ("14b-plain", "unsloth off"),
        "four_trl": ("14b-plain", "trl keep+liger"),
        "four_plain": ("14b-plain", "plain keep+liger"),
        "trl_recompute": ("14b-trl", "trl recompute+liger"),
        "frozen_fp8": ("14b-fp8", "ours keep+fused+fp8"),
        "frozen_bf16": ("14b-fp8", "ours keep+fused"),
        "lora_fp8": ("8b-lora-fp8", "ours keep+graphs+fp8"),
        "unsloth_fp8": ("8b-lora-fp8", "unsloth off+fp8"),
        "full_fp8": ("8b-fp8", "ours recompute+fused+fp8"),
        "full_bf16": ("8b-fp8", "ours recompute+fused"),
        "full_fp8_kept": ("8b-fp8-kept", "ours keep+fused+fp8"),
        "experts_recomputed": ("30b-a3b-recomputed", "ours recompute+graphs"),
        "long": ("32k-one-document", "ours keep+fused"),
        "unsloth_long": ("32k-one-document", "unsloth off"),
        "longest": ("14b-128k", "ours auto=33:64+fused"),
        "unsloth_longest": ("14b-128k", "unsloth unsloth"),
        "gpt_oss": ("gpt-oss", "ours keep+fused"),
        "unsloth_gpt_oss": ("gpt-oss", "unsloth off+padded16"),
        "unsloth_gpt_oss_default": ("gpt-oss", "unsloth unsloth+padded64"),
    }
    found = {}
    for name, (run, label) in cells.items():
        entry = fastest([e for e in find_named_run(entries, run) if short_label(e) == label])
        for measure, unit in (("ms", "ms"), ("allocated", "gib"), ("tokens", "tokens")):
            found[f"{name}_{unit}"] = figure(entry, measure)
    return found


def write_readme_headlines(path: Path = RESULTS) -> str:
    """Return the headlines of README.md: every line is of one run."""
    entries = read_entries(path)
    lines = table_head(
        "one GPU", "moments", "ours", "Unsloth, default", "Unsloth, fastest", "times as fast", "run"
    )  # fmt: skip
    for title, name, setting in README_LINES:
        run = find_named_run(entries, name)
        ours = fastest(e for e in run if short_label(e) == f"ours {setting}")
        bits = BITS[ours.optimizer]
        others = [e for e in run if e.system == "unsloth" and BITS[e.optimizer] == bits]
        default = [e for e in others if e.setting == "unsloth"]
        # Only the default needs as little memory as the budget.
        other = fastest(default if setting == _BUDGET else others)
        ratio = f"{ours.rate / other.rate:.2f}"
        cells = (_cell(ours), *map(_cell, default or [None]), _cell(other))
        lines.append(table_row(title, bits, *cells, ratio, cite_run(name)))
    cite = {name: cite_run(name) for name in NAMED_RUNS}
    return README_TEMPLATE.format(table="\n".join(lines), cite=cite, **find_figures(entries))


def _cell(entry: Entry | None) -> str:
    """Return time and memory of an entry; empty without one."""
    return "" if entry is None else f"{figure(entry, 'ms')} ms, {figure(entry, 'allocated')} GiB"


def cite_run(name: str) -> str:
    """Return a link to the list of runs.

    Example:
        >>> cite_run("14b")
        '[run 14b](docs/numbers.md#runs-of-the-readme)'
    """
    return f"[run {name}](docs/numbers.md#runs-of-the-readme)"
