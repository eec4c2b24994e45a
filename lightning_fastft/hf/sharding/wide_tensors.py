"""Trained tensors that a model keeps in a wider dtype than it computes in, and the FSDP unit that they form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import PreTrainedModel

from lightning_fastft.core.errors import UnsupportedModelError
from lightning_fastft.hf.families import decoder_layers

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_HOLDER = "fastft_wide_tensors"


class Place(NamedTuple):
    """Where a module keeps a parameter, which is another object after the model is filled."""

    module: nn.Module
    key: str

    @property
    def parameter(self) -> nn.Parameter:
        """The parameter that is there now."""
        parameter = self.module._parameters[self.key]
        assert parameter is not None
        return parameter


def is_wider(parameter: nn.Parameter, compute_dtype: torch.dtype | None) -> bool:
    """Return whether a parameter has a wider dtype than its unit computes in."""
    if compute_dtype is None or not parameter.is_floating_point():
        return False
    return parameter.dtype.itemsize > compute_dtype.itemsize


def find_wide(model: PreTrainedModel, compute_dtype: torch.dtype | None) -> list[Place]:
    """Return the places of the trained tensors of a model that are wider than their unit computes in.

    transformers 5.24 keeps weights of many routers in fp32, and decay rates of linear attention.

    Args:
        model: Whose decoder layers will be units, and itself one more.
        compute_dtype: Dtype in which all units compute; None for the narrowest trained dtype of each.

    Raises:
        UnsupportedModelError: One is outside of the base model, such as a head in fp32.
    """
    names = {module: name for name, module in model.named_modules()}
    inside = set() if model.base_model is model else set(model.base_model.modules())
    wide = []
    for unit in (*decoder_layers(model), model):
        places = [
            Place(module, key)
            for module in unit.modules()
            if module in names
            for key, parameter in module._parameters.items()
            if parameter is not None and parameter.requires_grad
        ]
        dtypes = {place.parameter.dtype for place in places}
        dtype = compute_dtype or min(dtypes, key=lambda each: each.itemsize, default=None)
        for place in places:
            if not is_wider(place.parameter, dtype):
                continue
            if place.module not in inside:
                raise UnsupportedModelError(
                    f"{type(model).__name__} keeps {names[place.module]}.{place.key} in "
                    f"{short_name(place.parameter.dtype)} and computes in {short_name(dtype)}; under FSDP2 only "
                    f"tensors of its base model ({model.base_model_prefix!r}) can be wider. Use "
                    "FineTuner(dtype='float32'), or lora, which keeps that tensor frozen."
                )
            wide.append(place)
        for module in unit.modules():
            names.pop(module, None)
    return wide


def shard_wide(model: PreTrainedModel, places: Sequence[Place], mesh: DeviceMesh) -> None:
    """Make the tensors of these places one more FSDP unit of a model whose other units exist, in their own dtype.

    The base model gathers the unit before its first layer and keeps it until the backward ends, so that layers may read
    the tensors in any way: called, fused, or recomputed.

    Cost:
        One gather at the start of a forward and one reduction at the end of a backward; whole tensors between them.
    """
    base = model.base_model
    # In one order on all ranks; modules may share one.
    wide = dict.fromkeys(place.parameter for place in places)
    # FSDP2 takes no parameters from modules of other units: here they are parameters of one more module.
    holder = nn.Module()
    for number, parameter in enumerate(wide):
        holder.register_parameter(str(number), parameter)
    base.add_module(_HOLDER, holder)
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
    others = {parameter for parameter in base.parameters() if parameter not in wide}
    fully_shard(base, mesh=mesh, mp_policy=policy, reshard_after_forward=False, ignored_params=others)
    delattr(base, _HOLDER)


def short_name(dtype: torch.dtype | None) -> str:
    """Return the name of a dtype without its module.

    Example:
        >>> short_name(torch.bfloat16)
        'bfloat16'
    """
    return str(dtype).removeprefix("torch.")
