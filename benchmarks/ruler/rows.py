"""The headline rows: the workload and settings of each name of `python -m benchmarks.compare --row NAME`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from benchmarks.ruler.systems import SYSTEMS, settings_of, system_of
from benchmarks.ruler.workloads import WORKLOADS

# Bits of the moments: every system is measured with both.
OPTIMIZERS = ("adamw_8bit", "adamw_fused")
# Timed steps of a setting; a row with fewer is called short.
NUM_ROW_STEPS = 200
# Settings of a system in one row, in the order in which they are measured; the first is its default.
Settings = Mapping[str, tuple[str, ...]]
_PEERS: Settings = {
    "unsloth": ("unsloth", "off", "skip-max"),
    "trl": ("recompute", "keep"),
    "trl+liger": ("recompute+liger", "keep+liger"),
}
_PLAIN: Settings = {"plain": ("recompute", "keep", "keep+liger")}
# Launch-bound: the best setting runs from CUDA graphs.
_SMALL: Settings = {**_PLAIN, "ours": ("shipped", "keep+graphs", "recompute+graphs"), **_PEERS}
_LARGE: Settings = {**_PLAIN, "ours": ("shipped", "keep+fused", "recompute+fused"), **_PEERS}
_MIXTURE: Settings = {
    "plain": ("recompute+grouped_mm",),
    "ours": ("shipped", "keep+graphs", "recompute+graphs"),
    "unsloth": ("unsloth", "off"),
}
# Unsloth does not pack gpt-oss, so it gets padded batches, with and without checkpointing. Without it, 32 documents do
# not fit into the 140 GiB of an H200.
_GPT_OSS: Settings = {
    "plain": ("recompute+grouped_mm+flex",),
    "ours": ("shipped", "keep+fused", "recompute+fused"),
    "unsloth": ("unsloth+padded64", "off+padded16"),
}
# A step takes about a minute, and only the leanest settings fit.
_LONGEST: Settings = {"plain": ("recompute+liger",), "ours": ("offload:40+fused+tiles8",), "unsloth": ("unsloth",)}
_FULL: Settings = {
    **_LARGE,
    "ours": ("auto+graphs=auto", "keep+fused", "recompute+fused"),
    "unsloth": ("unsloth", "off"),
}


class HeadlineRow(NamedTuple):
    """One row.

    Args:
        workload: Workload of the ruler.
        settings: Modes of each system.
    """

    workload: str
    settings: Settings

    @property
    def is_mixture(self) -> bool:
        """Whether `benchmarks.moe` runs its arms."""
        return WORKLOADS[self.workload].num_experts > 0


ROWS: Mapping[str, HeadlineRow] = {
    "qwen3-14b-qlora": HeadlineRow(
        "qwen3-14b-qlora",
        {
            **_LARGE,
            "ours": (*_LARGE["ours"], "auto=12.0:24+fused", "keep+fused+fp8"),
            "unsloth": (*_LARGE["unsloth"], "off+fp8"),
        },
    ),
    # The budget is about what Unsloth's default reserves on an H200, 7.8 GiB.
    "qwen3-8b-qlora": HeadlineRow("qwen3-8b-qlora", {**_LARGE, "ours": (*_LARGE["ours"], "auto=8:24+fused")}),
    # Both hold a bf16 base or one in fp8, which is rounded from the same weights.
    "qwen3-8b-fp8": HeadlineRow(
        "qwen3-8b-lora",
        {
            "plain": ("recompute",),
            # With products in fp8, a slow host takes as long to launch the layers as the GPU to compute them.
            "ours": ("keep+fused", "keep+fused+fp8", "keep+graphs+fp8"),
            "unsloth": ("unsloth", "off", "off+fp8"),
        },
    ),
    "qwen3-0.6b-lora": HeadlineRow("qwen3-0.6b-lora", _SMALL),
    "llama-3.1-8b-32k": HeadlineRow("llama-3.1-8b-lora-32k", _LARGE),
    "llama-3.1-8b-32k-one-document": HeadlineRow("llama-3.1-8b-lora-32k-one-document", _LARGE),
    "llama-3.1-8b-128k-one-document": HeadlineRow("llama-3.1-8b-lora-128k-one-document", _LONGEST),
    "llama-3.1-8b-256k-one-document": HeadlineRow("llama-3.1-8b-6l-lora-256k-one-document", _LONGEST),
    "qwen3-14b-128k-one-document": HeadlineRow(
        "qwen3-14b-10l-qlora-128k-one-document", {**_LONGEST, "ours": ("auto=33:64+fused",)}
    ),
    "qwen3-8b-full": HeadlineRow("qwen3-8b-full", _FULL),
    "qwen3-30b-a3b": HeadlineRow("qwen3-30b-a3b-12l-lora", _MIXTURE),
    "qwen3-30b-a3b-48-layers": HeadlineRow("qwen3-30b-a3b-lora", _MIXTURE),
    "gpt-oss-20b": HeadlineRow("gpt-oss-20b-12l-lora", _GPT_OSS),
    "qwen3.5-9b": HeadlineRow(
        "qwen3.5-9b-usual-lora",
        {"plain": ("recompute+padded",), "ours": ("auto+graphs=auto", "keep+fused"), "unsloth": ("unsloth", "off")},
    ),
    "gemma-4-e4b": HeadlineRow(
        "gemma-4-e4b-lora",
        {
            "plain": ("keep+padded+sdpa", "recompute+padded+sdpa"),
            "ours": ("auto+graphs=auto", "keep+fused"),
            "unsloth": ("unsloth", "off"),
        },
    ),
    "qwen3.5-35b-a3b": HeadlineRow(
        "qwen3.5-35b-a3b-12l-usual-lora",
        {
            "plain": ("recompute+padded+grouped_mm",),
            "ours": ("auto+graphs=auto", "keep+fused"),
            "unsloth": ("unsloth", "off"),
        },
    ),
    # On a CPU, as a smoke test without meaningful times.
    "tiny": HeadlineRow("tiny", {"plain": ("recompute",), "ours": ("shipped", "keep")}),
}


def is_default(record: Mapping[str, Any], *, device: str) -> bool:
    """Whether a record was measured in the default setting of its system."""
    system, mode = system_of(record), record["mode"]
    own = settings_of(SYSTEMS[system], device=device)
    of_rows = (row.settings.get(system, ()) for row in ROWS.values() if row.workload == record["workload"])
    return any(s.is_default and s.mode == mode for s in own) or any(modes[:1] == (mode,) for modes in of_rows)


def width_of(record: Mapping[str, Any]) -> str:
    """Return the width of the optimizer's moments: "8-bit" or "32-bit"."""
    return "8-bit" if record["optimizer"].endswith("8bit") else "32-bit"
