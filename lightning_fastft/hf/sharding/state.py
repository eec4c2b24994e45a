"""Questions to a sharded model, and its whole state."""

from __future__ import annotations

from typing import cast

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lightning_fastft.hf.sharding.stand_ins import find_uncast, is_trained


def is_sharded(module: nn.Module) -> bool:
    """Return whether any parameter of module is sharded."""
    return any(isinstance(parameter, DTensor) for parameter in module.parameters())


def unsharded_trained_names(module: nn.Module) -> list[str]:
    """Return the trained parameters outside of sharded modules; nothing averages their gradients over the ranks."""
    inside = {id(parameter) for root in sharded_roots(module) for parameter in cast("nn.Module", root).parameters()}
    return [
        name
        for name, parameter in module.named_parameters()
        if parameter.requires_grad and not isinstance(parameter, DTensor) and id(parameter) not in inside
    ]


def interleaved_names(module: nn.Module) -> list[str]:
    """Return the parameters of which each tensor-parallel rank holds rows of several parts, as of a fused gate and up
    projection that transformers' ``tp_plan`` splits.

    torch (2.13) writes overlapping pieces of them, and loads each rank the wrong rows of a whole tensor.
    """
    return [
        name
        for name, parameter in module.named_parameters()
        # The last axis of the mesh is the tensor-parallel one. torch keeps the class to itself.
        if isinstance(parameter, DTensor) and type(parameter.placements[-1]).__name__ == "_StridedShard"
    ]


def replicated_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Return the trained parameters inside of sharded modules that are whole on every rank, each once."""
    found = {
        id(parameter): parameter
        for root in sharded_roots(module)
        for parameter in cast("nn.Module", root).parameters()
        if parameter.requires_grad and not isinstance(parameter, DTensor)
    }
    return list(found.values())


def sharded_roots(module: nn.Module) -> list[FSDPModule]:
    """Return the outermost FSDP modules inside module."""
    if isinstance(module, FSDPModule):
        return [module]
    return [root for child in module.children() for root in sharded_roots(child)]


def reshard(module: nn.Module) -> None:
    """Reshard every FSDP module: after an evaluation the root still holds its weights whole.

    Cost:
        Frees memory; no communication.
    """
    for child in module.modules():
        if isinstance(child, FSDPModule):
            child.reshard()


def reshard_trained(module: nn.Module) -> None:
    """Reshard the FSDP modules whose unit has trained weights, after they have changed: a forward without a backward
    leaves them whole, and the next forward would use what they were.

    Cost:
        Frees memory; no communication. Host time of a walk over all modules.
    """
    for child in module.modules():
        if isinstance(child, FSDPModule) and is_trained(child):
            child.reshard()


def gather_state(
    model: nn.Module, *, is_trained_only: bool, dtype: torch.dtype | None = None
) -> dict[str, torch.Tensor]:
    """Return the whole state of a sharded model in host memory on rank 0, and an empty dictionary elsewhere; every rank
    must call this.

    Args:
        model: The sharded model.
        is_trained_only: Whether to skip frozen parameters.
        dtype: Dtype of master weights in the result; None keeps their own. Other tensors keep theirs, such as routers
            and their biases that a model keeps in fp32.

    Cost:
        One gather per tensor, host memory of the result on rank 0.
    """
    reshard(model)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=is_trained_only)
    # torch's annotation covers every kind of state; the state of a model has only tensors.
    state = cast("dict[str, torch.Tensor]", get_model_state_dict(model, options=options))
    if is_trained_only:
        # torch keeps the second name of a frozen tied weight.
        trained = {
            name for name, parameter in model.named_parameters(remove_duplicate=False) if parameter.requires_grad
        }
        state = {name: tensor for name, tensor in state.items() if name in trained}
    if dtype is not None:
        state = _cast_masters(model, state, dtype=dtype)
    # torch gathers a tied weight once for each of its names; save_pretrained writes memory that names share once.
    names: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first = names.setdefault(id(parameter), name)
        if name in state and first in state:
            state[name] = state[first]
    return state


def _cast_masters(model: nn.Module, state: dict[str, torch.Tensor], *, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    units = [unit for unit in model.modules() if isinstance(unit, FSDPModule)]
    uncast = {id(parameter) for unit in units for parameter in find_uncast(unit)}
    cast_names = {
        name
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if parameter.requires_grad and isinstance(parameter, DTensor) and id(parameter) not in uncast
    }
    return {name: tensor.to(dtype) if name in cast_names else tensor for name, tensor in state.items()}
