"""Read the one adapter that is active around a linear layer, for a product that includes it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from peft.tuners.lora.layer import LoraLayer
from torch import nn

from lightning_fastft.fused.low_precision_adapters import (
    LAYER_ATTRIBUTE,
    WEIGHT_ATTRIBUTE,
    LowPrecisionAdapters,
    class_for,
)
from lightning_fastft.fused.row_factors import (
    RowFactors,
    draws,
    factors_of,
    forget_merged,
    fresh_factors,
    variant_obstacle,
)
from lightning_fastft.moe.low_precision_copy import LowPrecisionCopy

if TYPE_CHECKING:
    from lightning_fastft.fused.linear_parts import LinearPart

# End of the reason that install.py answers with a remedy of its own.
WITHOUT_COPIES = "without the low-precision copies that FineTuner keeps"


def copies_read(layer: LoraLayer, *, dtype: torch.dtype) -> list[LowPrecisionCopy | RowFactors] | None:
    """Return the low-precision copies that ``read_adapter`` takes from a layer for rows of this dtype.

    They and the row factors of DoRA are kept equal to their masters. None if a tensor that it returns is made for the
    call, or if it returns the memory of a master, which may be replaced.
    """
    adapters: LowPrecisionAdapters | None = vars(layer).get(LAYER_ATTRIBUTE)
    if adapters is None or dtype is not adapters.compute_dtype or adapters.is_sharded:
        return None
    linears = [
        sides[name] for name in layer.active_adapters if name in layer.lora_A for sides in (layer.lora_A, layer.lora_B)
    ]
    copies = [vars(linear).get(WEIGHT_ATTRIBUTE) for linear in linears]
    factors = factors_of(layer)
    copies += [factors.get(name) for name in layer.active_adapters if name in layer.lora_variant]
    return None if None in copies else copies


def read_adapter(
    layer: LoraLayer, part: LinearPart, *, dtype: torch.dtype, awaits_gather: bool = False
) -> LinearPart | str:
    """Return a linear layer with the one LoRA or DoRA that is active around it, for rows of this dtype.

    Args:
        layer: PEFT's layer.
        part: The base alone.
        dtype: Dtype of the rows that it reads.
        awaits_gather: Weights are sharded, and gathered before the first call.

    Returns:
        The base and the adapter; ``part`` if only the base computes, because no adapter is active, or they are disabled
        or merged. Row factors are None until sharded weights are gathered. A str is the reason why PEFT's own forward
        must run.

    Cost:
        A few microseconds of the host; a copy if the low-precision copy is stale, and ``RowFactors.update`` if the
        row factors of DoRA are.
    """
    forget_merged(layer)
    if layer.merged or layer.disable_adapters:
        return "adapters are disabled while they are merged" if layer.merged and layer.disable_adapters else part
    adapters: LowPrecisionAdapters | None = vars(layer).get(LAYER_ATTRIBUTE)
    if class_for(type(layer)) is None and adapters is None:
        return f"{type(layer).__name__} is not a LoRA layer that is read"
    names = [name for name in layer.active_adapters if name in layer.lora_A]
    if len(names) != 1:
        return "several adapters are active" if names else part
    name = names[0]
    linears = (layer.lora_A[name], layer.lora_B[name])
    reason = _adapter_obstacle(layer, name)
    if reason:
        return reason
    masters = [linear.weight for linear in linears]
    if adapters is not None and dtype is adapters.compute_dtype:
        copies = [adapters.read(linear) for linear in linears]
    elif all(weight.dtype is dtype for weight in masters):
        copies = [weight.detach() for weight in masters]
    else:
        return f"the adapter is in {masters[0].dtype} and rows are in {dtype}, {WITHOUT_COPIES}"
    magnitude = factors = None
    if name in layer.lora_variant:
        magnitude = layer.lora_magnitude_vector[name].weight
        if not awaits_gather:
            factors = _read_factors(adapters, layer, name)
    return part._replace(
        a_RI=masters[0], b_OR=masters[1], copy_a_RI=copies[0], copy_b_OR=copies[1], scale=float(layer.scaling[name]),
        magnitude_O=magnitude, factors_2O=factors,
    )  # fmt: skip


def _adapter_obstacle(layer: LoraLayer, name: str) -> str:
    """Return why an active adapter cannot be read; empty if it can."""
    reason = variant_obstacle(layer, name)
    if reason:
        return reason
    if draws(layer, name, is_training=layer.training):
        return "the adapter has dropout"
    linears = (layer.lora_A[name], layer.lora_B[name])
    if any(type(linear) is not nn.Linear or linear._forward_hooks or linear._forward_pre_hooks for linear in linears):
        return "lora_A or lora_B has another class than nn.Linear, or hooks"
    return ""


def _read_factors(adapters: LowPrecisionAdapters | None, layer: LoraLayer, name: str) -> torch.Tensor:
    """Return the row factors; in new memory without low-precision copies, whose owner refreshes what is kept."""
    if adapters is not None:
        return adapters.read_factors(layer, name)
    a, b = (side[name].weight.detach() for side in (layer.lora_A, layer.lora_B))
    return fresh_factors(layer, name, a, b)
