"""Reasons why the weights of linear layers do not compute in fp8, or are not gathered in e4m3."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from peft.tuners.lora.layer import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from lightning_fastft.fused.linear_parts import LinearPart
from lightning_fastft.kernels.fp8_linear.op import ALIGNED_COLUMNS


def product_obstacle(modules: Sequence[nn.Module], parts: Sequence[LinearPart]) -> str:
    """Return why layers that read the same rows do not compute in fp8, on any device; empty if they do.

    Args:
        modules: The modules of the layers in the model, with PEFT's wrappers.
        parts: The layers as read.
    """
    if len({part.weight.requires_grad for part in parts}) > 1:
        return "trained and frozen layers read the same rows"
    if any(isinstance(module, BaseTunerLayer) and module.merged for module in modules):
        return "adapters are merged into the weights"
    return _size_obstacle([(part.num_outputs, part.num_inputs) for part in parts])


def adapter_obstacle(modules: Sequence[nn.Module]) -> str:
    """Return why the adapters around these layers need weights that FSDP2 gathers in the dtype of the model; empty if
    they do not.
    """
    is_dora = any(isinstance(module, LoraLayer) and module.lora_variant for module in modules)
    return "the row norms of DoRA read the weights in the dtype of the model" if is_dora else ""


def shard_obstacle(bases: Sequence[Any]) -> str:
    """Return why FSDP2 cannot gather the weights of these layers in e4m3 as they are sharded; empty if it can."""
    weights = [base.weight for base in bases]
    if not all(isinstance(weight, DTensor) and isinstance(base, nn.Linear) for base, weight in zip(bases, weights)):
        return "weights are whole on every device (FSDP2)"
    if any(weight.placements[-1] != Shard(0) or weight.device_mesh.ndim > 2 for weight in weights):
        return "weights are not sharded by rows alone"
    return gather_obstacle(bases)


def gather_obstacle(bases: Sequence[Any]) -> str:
    """Return why the weights of these layers are not gathered in e4m3 where FSDP2 shards them; empty if they are."""
    weights = [base.weight for base in bases]
    if any(weight.requires_grad for weight in weights):
        return "trained weights are sharded (FSDP2)"
    if any(
        not weight.is_floating_point() or weight.shape != (base.out_features, base.in_features)
        for base, weight in zip(bases, weights)
    ):
        return "packed weights are sharded (FSDP2)"
    return _size_obstacle([weight.shape for weight in weights])


def _size_obstacle(sizes: Sequence[Sequence[int]]) -> str:
    """Return the first size, (O, I), that fp8 products do not have; empty if they have all."""
    odd = next((size for size in sizes if size[0] % ALIGNED_COLUMNS or size[1] % ALIGNED_COLUMNS), None)
    if odd is None:
        return ""
    return f"fp8 products need multiples of {ALIGNED_COLUMNS} columns, and a weight is {odd[0]} x {odd[1]}"
