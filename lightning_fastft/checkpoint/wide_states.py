"""restore_wide_states: load states that an optimizer holds in more bits than its weights without rounding them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer


def restore_wide_states(optimizers: Iterable[Optimizer], checkpoint: Mapping[str, Any], module: nn.Module) -> None:
    """Give loaded states the dtypes and bits of a checkpoint where PyTorch has rounded them.

    ``Optimizer.load_state_dict`` casts each floating-point tensor except ``step`` to the dtype of its weight. Adafactor
    of transformers holds fp32 statistics of bf16 weights, and NAdam and ASGD of PyTorch fp32 numbers. States of weights
    that had another dtype in the checkpoint stay cast.

    Args:
        optimizers: They have loaded their states.
        checkpoint: Has ``state_dict`` and ``optimizer_states``.
        module: Its parameters have the names of ``state_dict``.
    """
    saved_weights = checkpoint.get("state_dict", {})
    unchanged = {
        parameter
        for name, parameter in module.named_parameters()
        if getattr(saved_weights.get(name), "dtype", None) is parameter.dtype
    }
    for optimizer, saved in zip(optimizers, checkpoint["optimizer_states"]):
        numbers = chain.from_iterable(group["params"] for group in saved["param_groups"])
        parameters = chain.from_iterable(group["params"] for group in optimizer.param_groups)
        for number, parameter in zip(numbers, parameters):
            held = optimizer.state.get(parameter, {}) if parameter in unchanged else {}
            for name, value in saved["state"].get(number, {}).items():
                if _is_rounded(held.get(name), value, parameter.dtype):
                    held[name] = value.detach().to(device=held[name].device, copy=True)


def _is_rounded(held: object, saved: object, dtype: torch.dtype) -> bool:
    """Return whether a state was cast to the dtype of its weight, which has fewer bits than the saved one."""
    if type(held) is not torch.Tensor or type(saved) is not torch.Tensor or not saved.is_floating_point():
        return False
    return held.dtype is dtype and saved.dtype.itemsize > held.dtype.itemsize
