"""Write the model card of a trained model: base, data, settings, final figures, versions, command."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from lightning_fastft.cli.trained.opening import COMMAND_KEY, Opened, read_task
from lightning_fastft.monitor.report.facts import describe_command
from lightning_fastft.training.model.run_record import RUN_KEY, find_versions

# Fields of adapters that a card shows where the run is not known.
_LORA = ("r", "lora_alpha", "target_modules")
_TAG = "lightning_fastft"
# Stands for the repository until fastft push knows it.
REPOSITORY = "THIS_REPOSITORY"
# Left in the card that PEFT writes.
_UNFILLED = "[More Information Needed]"
_HUB_ID = re.compile(r"^[\w.-]+/[\w.-]+$")
# Settings of a run that a card shows, in this order.
_SHOWN = (
    *("quantization", "dtype", "adapter_dtype", "master_dtype", "learning_rate", "weight_decay", "scheduler"),
    *("warmup_share", "warmup_steps", "min_learning_rate_share", "teacher", "kind", "loss", "beta"),
    *("label_smoothing", "gamma", "desirable_weight", "undesirable_weight", "sft_weight", "reference"),
    *("advantage", "ratio", "clip_low", "clip_high", "dual_clip", "sapo_temperature_pos", "sapo_temperature_neg"),
    *("max_completion_tokens", "kl_weight", "unbiased_kl", "sampler_clip", "temperature", "read", "center_weight"),
)
# The hub's names of tasks.
_PIPELINES = {
    "CausalLM": "text-generation",
    "SequenceClassification": "text-classification",
    "TokenClassification": "token-classification",
}
# Values with which a setting has no effect.
_IDLE = {
    **dict.fromkeys(("label_smoothing", "sft_weight", "kl_weight", "center_weight"), 0.0),
    **dict.fromkeys(("desirable_weight", "undesirable_weight", "temperature"), 1.0),
    "unbiased_kl": False,
}
# The losses that read a setting, where others do not.
_LOSSES_THAT_READ = {
    "gamma": ("simpo",),
    **dict.fromkeys(("sapo_temperature_pos", "sapo_temperature_neg"), ("sapo",)),
    "clip_low": ("grpo", "dapo", "dr_grpo"),
    "clip_high": ("grpo", "dapo", "dr_grpo", "cispo"),
}


class Facts(NamedTuple):
    """What a card says.

    Args:
        base: Name of the base model, or of the model itself; "" if it is not known.
        kind: "adapters", "merged weights" or "all weights".
        lora: Main fields of the adapters; empty without adapters.
        record: A checkpoint's hyperparameters, record of the run and command; empty if they are not known.
        task: "CausalLM", or "SequenceClassification" or "TokenClassification" for a reward model.
        revision: Revision of the base on the hub; None for its default branch.
    """

    base: str
    kind: str
    lora: Mapping[str, Any]
    record: Mapping[str, Any]
    task: str = "CausalLM"
    revision: str | None = None


def facts_of(opened: Opened, *, kind: str) -> Facts:
    """Return the facts of an opened model."""
    settings = opened.record.get("hyper_parameters") or {}
    config = next(iter(getattr(opened.module.model, "peft_config", {}).values()), None)
    lora = settings.get("lora") or ({} if config is None else {name: getattr(config, name) for name in _LORA})
    return Facts(opened.base, kind, lora, opened.record, revision=opened.revision)


def read_facts(folder: Path) -> Facts:
    """Return the facts of a folder of adapters or of a whole model, from its configuration."""
    file = folder / "adapter_config.json"
    if not file.is_file():
        return Facts("", "all weights", {}, {}, read_task(folder))
    config = json.loads(file.read_text(encoding="utf-8"))
    base = str(config.get("base_model_name_or_path") or "unknown")
    lora = {name: config.get(name) for name in _LORA}
    return Facts(base, "adapters", lora, {}, read_task(folder), config.get("revision"))


def render_card(facts: Facts, *, title: str = "") -> str:
    """Return the model card as Markdown; by default its title is base and method.

    Paths of this machine are shortened to their last part.
    """
    from huggingface_hub import ModelCardData

    base = _name_of(facts.base)
    run: Mapping[str, Any] = facts.record.get(RUN_KEY) or {}
    sources = [source for split in ("train", "val") for source in run.get("data", {}).get(split, {}).get(
        "rows_per_source", {}
    )]  # fmt: skip
    metadata = ModelCardData(
        base_model=base if _is_hub_id(facts.base) else None,
        datasets=[source for source in sources if _is_hub_id(source)] or None,
        library_name="peft" if facts.kind == "adapters" else "transformers",
        pipeline_tag=_PIPELINES[facts.task],
        tags=[_TAG, *(["lora"] if facts.kind == "adapters" else [])],
    )
    named = base if _is_hub_id(facts.base) else f"the local model `{base}`"
    if facts.revision is not None and _is_hub_id(facts.base):
        named += f" (revision `{facts.revision}`)"
    method = {"adapters": "LoRA", "merged weights": "LoRA merged", "all weights": "fine-tuned"}[facts.kind]
    title = title or f"{base.rpartition('/')[2]}, {method}"
    what = {
        "adapters": f"LoRA adapters for {named}",
        "merged weights": f"{named} with trained LoRA adapters merged into its weights",
        "all weights": f"{named}, with every weight fine-tuned" if base else "the weights of a model",
    }[facts.kind]
    what = what if _is_hub_id(facts.base) else what[0].upper() + what[1:]
    parts = [f"---\n{metadata.to_yaml()}\n---", f"# {title}", f"{what}, trained with lightning_fastft."]
    tables = (
        ("Data", _describe_data(run.get("data", {}))),
        ("Settings", _describe_settings(facts, run)),
        ("Final figures", ((name, f"{value:.6g}") for name, value in run.get("figures", {}).items())),
        ("Versions", (run.get("versions") or find_versions()).items()),
    )
    for heading, rows in tables:
        lines = [f"| {key} | {value} |" for key, value in rows]
        if lines:
            parts.append("\n".join([f"## {heading}", "| | |", "|---|---|", *lines]))
    command = facts.record.get(COMMAND_KEY)
    if command:
        # Checkpoints of earlier versions hold the secrets of a command.
        shown = describe_command(shlex.split(command))
        parts.append(f"## Command\n```\n{_shorten_paths(shown)}\n```")
    parts.append(f"## Use\n```python\n{_use_of(facts, base=base)}\n```")
    return "\n\n".join(parts) + "\n"


def keeps_card(text: str) -> bool:
    """Return whether a card that is there was filled in, unlike the one that PEFT writes."""
    return bool(text.strip()) and _UNFILLED not in text


def _describe_data(data: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for split, title in (("train", "training"), ("val", "validation")):
        found = data.get(split)
        if found:
            files = ", ".join(f"{_name_of(name)} ({rows:,} rows)" for name, rows in found["rows_per_source"].items())
            where = files or "held out of the training data"
            yield title, f"{where}: {found['examples']:,} examples, {found['tokens']:,} tokens"
    variables = data.get("chat_template_kwargs")
    if variables:
        yield "variables of the chat template", f"`{json.dumps(variables)}`"
    rollouts = data.get("rollouts")
    if rollouts:
        share = rollouts["sampled_share"]
        # Reports of older versions have none.
        options = {"temperature": rollouts["temperature"], **rollouts.get("sampling_options", {})}
        yield "prompts", f"{_name_of(rollouts['source'])}: {rollouts['prompts']:,} prompts"
        yield (
            "sampled completions",
            (
                f"{rollouts['num_completions']} per prompt of at most {rollouts['max_new_tokens']} tokens, "
                f"{', '.join(f'{name} {value:g}' for name, value in options.items())}"
                f"{'' if share == 1 else f', for {share:g} of the prompts'}"
                f"{'; not trained without an end' if rollouts.get('mask_truncated') else ''}"
            ),
        )


def _describe_settings(facts: Facts, run: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield how the model was trained, without values that were not set."""
    settings = facts.record.get("hyper_parameters") or {}
    if facts.lora:
        fields = ((name, value) for name, value in facts.lora.items() if value not in (None, [], {}))
        yield "LoRA", "; ".join(f"{name} {_join(value)}" for name, value in fields)
    for name in _SHOWN:
        value = settings.get(name)
        if value in (None, "auto") or value == _IDLE.get(name) or _is_unread(name, settings):
            continue
        yield name, _name_of(value) if name in ("teacher", "reference") else str(value)
    if run:
        length = run["data"].get("max_tokens")
        packs = f"{run['packs_per_step']} per optimizer step"
        yield "packs", packs if length is None else f"{length} tokens, {packs}"
        yield "length", f"{run['optimizer_steps']:,} optimizer steps, epoch {run['epochs']}"


def _is_unread(name: str, settings: Mapping[str, Any]) -> bool:
    """Return whether another setting decides that this one has no effect."""
    if name in _LOSSES_THAT_READ:
        return settings.get("loss") not in _LOSSES_THAT_READ[name]
    return name == "beta" and settings.get("kind", "jsd") != "jsd"


def _join(value: Any) -> str:
    return ", ".join(sorted(map(str, value))) if isinstance(value, (list, tuple, set)) else str(value)


def _use_of(facts: Facts, *, base: str) -> str:
    auto_class = f"AutoModelFor{facts.task}"
    if facts.kind == "adapters":
        labels = "" if facts.task == "CausalLM" else ", num_labels=1"
        labels += "" if facts.revision is None or not _is_hub_id(base) else f', revision="{facts.revision}"'
        return (
            f"from peft import PeftModel\nfrom transformers import {auto_class}\n\n"
            f'base = {auto_class}.from_pretrained("{base}"{labels}, dtype="auto")'
            f"{'' if _is_hub_id(base) else '  # your folder of this model'}\n"
            f'model = PeftModel.from_pretrained(base, "{REPOSITORY}")'
        )
    return (
        f'from transformers import {auto_class}\n\nmodel = {auto_class}.from_pretrained("{REPOSITORY}", dtype="auto")'
    )


def _is_hub_id(name: str) -> bool:
    return bool(_HUB_ID.match(name)) and not Path(name).exists()


def _name_of(name: str) -> str:
    """Return a hub id as it is, and the last part of a path."""
    return name if _is_hub_id(name) else Path(name).name


def _shorten_paths(command: str) -> str:
    """Return a command with absolute paths shortened to their last part.

    Example:
        >>> _shorten_paths("fastft fit --config a/b.yaml --data.paths=/home/me/rows.jsonl")
        'fastft fit --config a/b.yaml --data.paths=rows.jsonl'
    """
    return re.sub(r"(?<![\w.])[~/][^\s=,'\"]*/", "", command)
