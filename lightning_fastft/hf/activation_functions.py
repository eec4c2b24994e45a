"""Map the activation of a transformers module to its name in the kernels."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from torch import nn
from transformers import activations

from lightning_fastft.core.errors import UnsupportedModelError

_ACTIVATIONS = MappingProxyType(
    {
        nn.SiLU: "silu",
        activations.SiLUActivation: "silu",
        nn.functional.silu: "silu",
        activations.GELUActivation: "gelu",
        nn.functional.gelu: "gelu",
        activations.GELUTanh: "gelu_tanh",
        activations.NewGELUActivation: "gelu_tanh",
        activations.FastGELUActivation: "gelu_tanh",
    }
)


def activation_name(module: nn.Module) -> str:
    """Return the name of a feed-forward block's activation, as in ``GateForm``.

    The block has it as ``act_fn`` or ``activation_fn`` (Phi-3), a module or a function.

    Raises:
        UnsupportedModelError: The activation is unknown; it is never guessed.

    Example:
        >>> block = nn.Module()
        >>> block.act_fn = nn.SiLU()
        >>> activation_name(block)
        'silu'
    """
    activation: Any = getattr(module, "act_fn", None) or getattr(module, "activation_fn", None)
    # Look up a function itself, and a module by its class.
    name = _ACTIVATIONS.get(type(activation) if isinstance(activation, nn.Module) else activation)
    if name is None:
        shown = (
            type(activation).__name__
            if isinstance(activation, nn.Module)
            else getattr(activation, "__name__", activation)
        )
        raise UnsupportedModelError(
            f"the activation {shown} of {type(module).__name__} is unknown (supported: silu, gelu, gelu_tanh)"
        )
    return name
