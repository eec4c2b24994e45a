"""Statuses of a built model: its quantisation and its adapters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_fastft.core.status import Status


def describe_model(model: Any, *, quantization: str | None, skipped: Mapping[str, int] | None) -> list[Status]:
    """Return the statuses of the NF4 base and of LoRA."""
    found = [Status("NF4 base", "inactive", "not asked for")]
    if quantization is not None:
        from lightning_fastft.hf.expert_nf4 import describe_experts

        found = [Status("NF4 base", "active", "bitsandbytes, double quantisation")]
        experts = describe_experts(model)
        if experts.state == "active":
            found.append(experts)
    if hasattr(model, "peft_config"):
        from lightning_fastft.hf.lora_targets import describe_adapters

        lora = next(iter(model.peft_config.values()))
        found.append(Status("LoRA", "active", describe_adapters(model, lora, skipped=skipped)))
    return found
