"""Gradients of trained image towers on ranks whose pack has no image."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from lightning_fastft.core.linear_map import linear_map
from lightning_fastft.hf.families import tower_parameters


def give_tower_gradients(model: PreTrainedModel) -> None:
    """Give each trained parameter of the towers a gradient in every backward: zeros where no image needs it.

    FSDP2 reduces the parameters of a unit that have a gradient, so each rank must have one for the same parameters.

    Cost:
        One sum of gradients over the trained parameters of the towers; nothing without such parameters.
    """
    trained = {id(parameter) for parameter in tower_parameters(model) if parameter.requires_grad}
    places = [
        (module, name)
        for module in model.modules()
        for name, parameter in module._parameters.items()
        if id(parameter) in trained
    ]
    if places:
        model.base_model.register_forward_hook(functools.partial(_join_towers, places))


def _join_towers(places: list[tuple[nn.Module, str]], base: nn.Module, args: Any, output: Any) -> Any:
    """Make the hidden states depend on the parameters, in a forward hook."""
    if torch.is_grad_enabled():
        # Looked up in each forward: FSDP2 puts gathered parameters in place of the shards.
        parameters = [parameter for module, name in places if (parameter := module._parameters[name]) is not None]
        shapes = [(each.shape, each.dtype, each.device) for each in parameters]

        def give_zeros(d_hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
            zeros = [torch.zeros((), dtype=dtype, device=device).expand(shape) for shape, dtype, device in shapes]
            return d_hidden, *zeros

        output.last_hidden_state = linear_map(
            lambda hidden, *_: hidden.view_as(hidden), give_zeros, output.last_hidden_state, *parameters
        )
    return output
