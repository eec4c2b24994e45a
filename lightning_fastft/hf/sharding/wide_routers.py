"""Trained routers that a model keeps in a wider dtype than it computes in."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import nn

from lightning_fastft.core.errors import UnsupportedModelError
from lightning_fastft.hf.families import is_on_interface


def is_wider(parameter: nn.Parameter, compute_dtype: torch.dtype | None) -> bool:
    """Return whether a parameter has a wider dtype than its unit computes in."""
    if compute_dtype is None or not parameter.is_floating_point():
        return False
    return parameter.dtype.itemsize > compute_dtype.itemsize


def find_wide_routers(
    model: nn.Module, layers: Collection[nn.Module], compute_dtype: torch.dtype | None
) -> dict[int, nn.Module]:
    """Return the routers of decoder layers whose trained tensors are all wider than compute_dtype, by their ids.

    transformers 5.24 keeps the weights of many routers in fp32. Their blocks call them as modules, so that each can be
    a unit of its own dtype. Other wide tensors may be read without a call of their module.

    Raises:
        UnsupportedModelError: Another trained tensor is wider.
    """
    routers = {
        id(child): child
        for layer in layers
        for block in layer.modules()
        if any(map(is_on_interface, block.children()))
        for child in block.children()
        if not is_on_interface(child) and all(is_wider(each, compute_dtype) for each in child.parameters())
    }
    found = {}
    for name, parameter in model.named_parameters():
        if not (parameter.requires_grad and is_wider(parameter, compute_dtype)):
            continue
        owner = model.get_submodule(name.rpartition(".")[0])
        if id(owner) not in routers:
            raise UnsupportedModelError(
                f"{type(model).__name__} keeps {name} in {short_name(parameter.dtype)} and computes in "
                f"{short_name(compute_dtype)}; under FSDP2 a decoder layer computes in one dtype. Use "
                "FineTuner(dtype='float32'), or lora, which keeps that tensor frozen."
            )
        found[id(owner)] = owner
    return found


def short_name(dtype: torch.dtype | None) -> str:
    """Return the name of a dtype without its module.

    Example:
        >>> short_name(torch.bfloat16)
        'bfloat16'
    """
    return str(dtype).removeprefix("torch.")
