"""LoRA on a model: PEFT's configuration from plain values, and the adapters it describes, equal on every rank."""

from __future__ import annotations

import copy
import difflib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from lightning_fastft.checks import check_float, check_int, check_share
from lightning_fastft.errors import OptionError
from lightning_fastft.models.dtypes import seeded

if TYPE_CHECKING:
    from peft import LoraConfig, PeftModel
    from transformers import PreTrainedModel

# Wider than any layer is; alpha divided by rank is what scales an adapter.
LARGEST_RANK, LARGEST_ALPHA = 2**16, 2.0**20
# What a field of PEFT is called elsewhere, and no spelling shows.
_NAMES_ELSEWHERE = {"rank": "r"}


def add_adapters(model: PreTrainedModel, *, lora: LoraConfig, adapter_dtype: torch.dtype, seed: int = 0) -> PeftModel:
    """Return model with LoRA adapters on it, the base frozen.

    Without ``target_modules`` and ``target_parameters`` every linear layer of the text part but the head gets an adapter ("all-linear"), which is
    what QLoRA found to be needed to match full fine-tuning; PEFT's own default is the query and value projections only. Towers for images and sound
    get none (text alone would leave them without gradients), nor do routers that extend a linear layer and return more (phimoe). Experts and routers
    get them where PEFT's "all-linear" includes them: name them, or leave them out, with ``target_modules`` and ``target_parameters``.

    Args:
        model: The base model, quantised or not.
        lora: PEFT's configuration; it is copied. ``task_type`` is set to CAUSAL_LM.
        adapter_dtype: Dtype of the adapter Parameters.
        seed: Seed of their initialisation, the same on every rank, device and strategy.

    Raises:
        OptionError: The configuration selects no layer of this model.

    Source:
        LoRA, arXiv 2106.09685; all linear layers: QLoRA, arXiv 2305.14314, section 4.
    """
    from peft import TaskType, get_peft_model
    from peft.tuners.lora import LoraLayer

    lora = copy.deepcopy(lora)
    lora.task_type = TaskType.CAUSAL_LM
    if lora.target_modules is None and not lora.target_parameters:
        lora.target_modules = "all-linear"
        outside = _not_text_linears(model)
        if outside and lora.exclude_modules is None:
            lora.exclude_modules = outside
    # Drawn on the host, whatever default device Lightning's strategies set: the same adapters on every device and under every strategy.
    with seeded(seed, device=next(model.parameters()).device), torch.device("cpu"):
        try:
            adapted = get_peft_model(model, lora, autocast_adapter_dtype=adapter_dtype == torch.float32)
        except ValueError as error:
            raise OptionError(f"lora does not fit {type(model).__name__}: {error}") from error
    for layer in adapted.modules():
        if isinstance(layer, LoraLayer):
            for parameter in layer.parameters():
                if parameter.requires_grad:
                    parameter.data = parameter.data.to(adapter_dtype)
    return adapted


def _not_text_linears(model: PreTrainedModel) -> list[str]:
    """Return the names of linear layers outside the text part, and of routers that extend a linear layer and return more than it does."""
    text = {id(module) for module in (*model.get_decoder().modules(), model.get_output_embeddings())}
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and (id(module) not in text or "Router" in type(module).__name__)
    ]


def parse_lora(lora: LoraConfig | Mapping[str, Any]) -> LoraConfig:
    """Return PEFT's configuration from itself or from its fields.

    Raises:
        OptionError: A field is unknown to PEFT, or its value is refused by it or cannot be trained with.
    """
    from peft import LoraConfig

    if isinstance(lora, LoraConfig):
        return lora
    if not isinstance(lora, Mapping):
        raise OptionError(f"lora must be PEFT's LoraConfig or a mapping of its fields, got {lora!r} ({type(lora).__name__}).")
    # PEFT finds these wrong when a layer is made, or never.
    if "r" in lora:
        check_int("lora.r", lora["r"], low=1, high=LARGEST_RANK)
    if "lora_alpha" in lora:
        check_float("lora.lora_alpha", lora["lora_alpha"], low=0.0, high=LARGEST_ALPHA)
    if "lora_dropout" in lora:
        check_share("lora.lora_dropout", lora["lora_dropout"])
    known = set(LoraConfig.__dataclass_fields__)
    unknown = sorted(set(lora) - known)
    if unknown:
        near = [_NAMES_ELSEWHERE.get(name) or next(iter(difflib.get_close_matches(name, known, n=1, cutoff=0.6)), "") for name in unknown]
        advice = f"Did you mean {', '.join(filter(None, near))}?\n" if any(near) else ""
        raise OptionError(
            f"lora has the unknown fields {unknown}.\n{advice}"
            "The fields are those of PEFT's LoraConfig, most used r, lora_alpha, lora_dropout and target_modules; help(peft.LoraConfig) explains all."
        )
    try:
        return LoraConfig(**lora)
    except (TypeError, ValueError) as error:
        raise OptionError(f"lora={dict(lora)!r} is refused by PEFT: {error}") from error


def describe_lora(lora: LoraConfig) -> dict[str, Any]:
    """Return the fields of a configuration that differ from PEFT's defaults, as plain types that a checkpoint may hold."""
    from peft import LoraConfig

    default = LoraConfig().to_dict()
    changed = {key: to_plain(value) for key, value in lora.to_dict().items() if key != "peft_type" and value != default.get(key)}
    return {"r": lora.r, "lora_alpha": lora.lora_alpha, **changed}


def to_plain(value: Any) -> Any:  # noqa: ANN401 - any content of a configuration
    """Return value as dicts, lists, strings, numbers, booleans and None only."""
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, (set, frozenset)):
        return [to_plain(item) for item in sorted(value)]
    if isinstance(value, Iterable):
        return [to_plain(item) for item in value]
    return str(value)
