"""Write the config of ``fastft init`` as commented YAML."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from textwrap import wrap
from typing import Any, NamedTuple

import numpy as np
import yaml

from lightning_fastft.cli.recipe.lengths import Lengths
from lightning_fastft.cli.recipe.plans import LORA_RANK, Method, Planned, Steps, token_mean_length
from lightning_fastft.estimate.machines import Gpu
from lightning_fastft.planner.picture import describe_plan
from lightning_fastft.training.data.subsets import choose_held_out

_GIB = 2**30
_WIDTH = 118
# PackedDataModule's default, which no config of fastft init changes.
_DATA_SEED = 0
METHOD_WORDS: Mapping[Method, str] = {
    "qlora": "QLoRA: the frozen base in 4 bits (NF4), trained adapters",
    "lora": "LoRA: the frozen base in bf16, trained adapters",
    "full": "full fine-tuning: every weight, with fp32 masters",
}


class Recipe(NamedTuple):
    """All that a config says.

    Args:
        model: Hub id or folder.
        data: File, folder or hub id.
        reading: Options of PackedDataModule that say how the data is read, such as columns.
        out: The config file.
        method: How the model is trained.
        method_reason: Why this method.
        has_experts: Whether the model is a mixture of experts.
        lengths: Lengths of the examples.
        steps: Packs and steps of an epoch.
        gpu: None for a machine without a GPU.
        planned: Plan on the GPU; None without one.
    """

    model: str
    data: str
    reading: Mapping[str, Any]
    out: Path
    method: Method
    method_reason: str
    has_experts: bool
    lengths: Lengths
    steps: Steps
    gpu: Gpu | None
    planned: Planned | None

    @property
    def folder(self) -> str:
        """Folder of the checkpoints."""
        return f"runs/{self.out.stem}"

    @property
    def fit_words(self) -> list[str]:
        """Command line that trains."""
        return ["fastft", "fit", "--config", str(self.out)]

    @property
    def plan_words(self) -> list[str]:
        """Command line that shows the plan of this GPU; empty without one."""
        if self.gpu is None:
            return []
        tokens = round(token_mean_length(self.lengths.length_N, max_tokens=self.steps.max_tokens))
        words = ["--gpu", self.gpu.name, "--document-tokens", str(tokens)]
        return ["fastft", "plan", "--config", str(self.out), *words]

    @property
    def chat_words(self) -> list[str]:
        """Command line that talks with the trained model."""
        return ["fastft", "chat", f"{self.folder}/last.ckpt", *(["--plain"] if self.lengths.is_plain else [])]


def describe_lengths(lengths: Lengths, steps: Steps) -> str:
    """Return the lengths of the examples in one sentence."""
    length_N = lengths.length_N
    middle, high = np.percentile(length_N, [50, 99])
    counted = f"assumed: {lengths.assumption}" if lengths.assumption else "with the model's tokenizer"
    rejected = f"; {lengths.num_rejected:,} rows are rejected" if lengths.num_rejected else ""
    dropped = float(np.maximum(length_N - steps.max_tokens, 0).sum() / length_N.sum())
    cut = f"; {steps.num_cut:,} longer than a pack, cut: {dropped:.1%} of the tokens dropped" if steps.num_cut else ""
    return (
        f"{len(length_N):,} examples, {int(length_N.sum()):,} tokens ({counted}): median {middle:.0f}, 99th percentile "
        f"{high:.0f}, longest {int(length_N.max()):,}{rejected}{cut}"
    )


def describe_expectation(recipe: Recipe) -> list[str]:
    """Return the planned speed, memory and time, each in a line."""
    planned, steps = recipe.planned, recipe.steps
    if planned is None or recipe.gpu is None:
        return ["not planned: there is no GPU here, and --gpu names none"]
    seconds = planned.step_ms * steps.num_packs / 1e3
    speed = steps.num_tokens / seconds
    peak, held = _size(planned.plan.prediction.peak_bytes), _size(planned.held_bytes)
    host = _size(planned.plan.prediction.host_bytes)
    origin = "measured rates" if recipe.gpu.is_measured else "published rates"
    return [
        f"{speed:,.0f} tokens/s, {peak} of device memory ({held} of them weights, gradients, optimizer), "
        f"{host} of pinned host memory, {_duration(seconds)} for an epoch (planned for {recipe.gpu.name} from "
        f"{origin})"
    ]


def render_config(recipe: Recipe) -> str:
    """Return the YAML of a recipe."""
    method, steps = recipe.method, recipe.steps
    head = [
        ("Purpose", f"{METHOD_WORDS[method]}. Written by fastft init; change it as you like"),
        ("Command", shlex.join(recipe.fit_words)),
        ("Hardware", recipe.gpu.name if recipe.gpu else "none planned: a CPU trains this too, slowly"),
        ("Expected", describe_expectation(recipe)[0]),
        *([("Plan", shlex.join(recipe.plan_words))] if recipe.gpu else []),
        ("Data", describe_lengths(recipe.lengths, steps)),
    ]
    lines = [line for name, text in head for line in _comment(f"{name}: {text}")]
    lines += ["data:", "  class_path: lightning_fastft.PackedDataModule", "  init_args:"]
    lines += [f"    paths: {_scalar(recipe.data)}"]
    if recipe.reading:
        lines += [f"    {line}" for line in yaml.safe_dump(dict(recipe.reading), sort_keys=False).splitlines()]
    if steps.val_share:
        is_held_out_N = choose_held_out(len(recipe.lengths.length_N), share=steps.val_share, seed=_DATA_SEED)
        num_held_out = int(is_held_out_N.sum())
        lines += [
            f"    # Held out for validation: {num_held_out:,} example{'' if num_held_out == 1 else 's'}.",
            f"    val_share: {steps.val_share}",
        ]
    lines += [
        f"    # Length of a pack; several examples share one. An epoch has {steps.num_packs:,} packs.",
        f"    max_tokens: {steps.max_tokens}",
    ]
    if steps.num_cut or recipe.lengths.assumption:
        why = "Longer examples are cut" + (" (lengths are assumed)" if recipe.lengths.assumption else "")
        lines += [f'    # {why}; "refuse" stops instead, "split" makes several of one.', "    too_long: truncate"]
    if recipe.gpu:
        lines += ["    # Packs of one length need the fewest CUDA graphs of layers.", "    pad_to_max: true"]
    lines += _model_lines(recipe)
    lines += _trainer_lines(recipe)
    return "\n".join(lines) + "\n"


def _model_lines(recipe: Recipe) -> list[str]:
    lines = [
        "model:",
        "  class_path: lightning_fastft.FineTuner",
        "  init_args:",
        f"    model: {_scalar(recipe.model)}",
    ]
    lines += [f"    # {recipe.method_reason}"]
    if recipe.method == "qlora":
        lines += ["    quantization: nf4"]
    if recipe.method == "full" and recipe.gpu is None:
        return [*lines, "    dtype: float32", "    learning_rate: 1.0e-5", "    weight_decay: 0.01"]
    if recipe.method == "full":
        return [
            *lines,
            "    # bf16 weights alone would round small updates away.",
            "    dtype: bfloat16",
            "    master_dtype: float32",
            "    learning_rate: 1.0e-5",
            "    weight_decay: 0.01",
        ]
    return [
        *lines,
        "    lora:",
        f"      r: {LORA_RANK}",
        f"      lora_alpha: {2 * LORA_RANK}",
        "    learning_rate: 2.0e-4",
    ]


def _trainer_lines(recipe: Recipe) -> list[str]:
    steps = recipe.steps
    lines = ["trainer:"]
    if recipe.planned:
        plan = describe_plan(recipe.planned.plan)
        lines += _comment("Activations, as planned (the first steps of a run are measured, and the plan made anew):", 2)
        lines += [f"  #   {line}" for line in plan]
    lines += ["  strategy: fastft", "  callbacks:"]
    if recipe.has_experts:
        lines += ["    - class_path: lightning_fastft.BincountRouter"]
    lines += ["    - class_path: lightning_fastft.FusedKernels"]
    if recipe.gpu:
        lines += ["      init_args:", "        cuda_graphs: auto"]
    names = ("GradientHealth", "FiniteGuard", "TokenThroughput", "FastFTProgressBar")
    lines += [f"    - class_path: lightning_fastft.{name}" for name in names]
    packs = f"{steps.accumulate} packs" if steps.accumulate > 1 else "1 pack"
    return [
        *lines,
        "    # Writes last.ckpt, which fastft chat, eval, export and push read. Use a new folder for every run.",
        "    - class_path: lightning.pytorch.callbacks.ModelCheckpoint",
        "      init_args:",
        f"        dirpath: {_scalar(recipe.folder)}",
        "        save_last: true",
        "  devices: 1",
        "  precision: 32-true",
        f"  max_epochs: {steps.num_epochs}",
        f"  # An optimizer step has {packs}, up to {steps.accumulate * steps.max_tokens:,} tokens; an epoch has "
        f"{steps.num_steps:,} steps.",
        f"  accumulate_grad_batches: {steps.accumulate}",
        "  gradient_clip_val: 1.0",
    ]


def _comment(text: str, indent: int = 0) -> list[str]:
    """Return a text as comment lines."""
    begin = " " * indent + "# "
    return wrap(text, _WIDTH, initial_indent=begin, subsequent_indent=f"{begin}    ", break_long_words=False)


def _scalar(text: str) -> str:
    """Return a text as YAML: plain where that is safe, else in quotes."""
    try:
        is_plain = yaml.safe_load(text) == text and "\n" not in text and ": " not in text and " #" not in text
    except yaml.YAMLError:
        is_plain = False
    return text if is_plain else json.dumps(text)


def _size(num_bytes: float) -> str:
    """Return a size in the unit that reads best.

    Example:
        >>> _size(0), _size(5_000_000), _size(3 * 2**30)
        ('0.0 GiB', '5 MiB', '3.0 GiB')
    """
    is_small = 0 < num_bytes < _GIB / 10
    return f"{num_bytes / 2**20:.0f} MiB" if is_small else f"{num_bytes / _GIB:.1f} GiB"


def _duration(seconds: float) -> str:
    """Return a time in the unit that reads best.

    Example:
        >>> _duration(42), _duration(3_000), _duration(20_000)
        ('42 s', '50 min', '5.6 h')
    """
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
