"""Value points: linear layers, attention and experts of a decoder layer whose outputs a plan can keep."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from lightning_fastft.activations.segments import Segment, Session
from lightning_fastft.activations.values import NAME_ATTRIBUTE, SEGMENT_ATTRIBUTE, find_session, unneeded, value_name
from lightning_fastft.core.autocast import is_autocast_on
from lightning_fastft.core.once_differentiable import once_differentiable
from lightning_fastft.core.patcher import ModelPatcher, share_state
from lightning_fastft.hf.families import is_on_interface

_ADAPTER_PARTS = {"lora_A", "lora_B", "lora_dropout", "lora_magnitude_vector"}


def install_value_points(
    root: nn.Module, layers: Sequence[nn.Module], segments: Sequence[Segment], patcher: ModelPatcher
) -> int:
    """Make linear layers and attention of each decoder layer read kept values from their segment.

    Linear layers are swapped for subclasses that share their state, so names, parameters and hooks do not change.
    Outside a segment run under a plan (evaluation, generation, kept layers) they run the code of their own class.

    Returns:
        The number of points; 0 for a model with other kinds of layers, which are recomputed as a whole.
    """
    names = {id(module): name for name, module in root.named_modules()}
    num_points = 0
    for layer, segment in zip(layers, segments):
        patcher.set_attribute(layer, SEGMENT_ATTRIBUTE, segment)
        for name, module in list(layer.named_modules()):
            if is_on_interface(module):
                patcher.set_attribute(module, SEGMENT_ATTRIBUTE, segment)
                patcher.set_attribute(module, NAME_ATTRIBUTE, name)
            if hasattr(module, "layer_idx") and hasattr(module, "is_causal"):
                patcher.set_attribute(module, SEGMENT_ATTRIBUTE, segment)
                num_points += 1
            # Low-rank GEMMs of an adapter cost less than keeping their outputs, and PEFT needs its own classes there.
            is_barred = bool(_ADAPTER_PARTS & set(name.split("."))) or _clips_in_place(layer, name)
            point_class = None if is_barred else _point_class(type(module))  # type: ignore[arg-type]
            if point_class is not None and id(module) in names:
                new = share_state(module, point_class)
                patcher.replace_module(root, names[id(module)], new)
                patcher.set_attribute(new, SEGMENT_ATTRIBUTE, segment)
                patcher.set_attribute(new, NAME_ATTRIBUTE, name)
                num_points += 1
            elif hasattr(module, "lora_A") and hasattr(module, "base_layer"):
                patcher.set_attribute(module, SEGMENT_ATTRIBUTE, segment)
                patcher.set_attribute(module, NAME_ATTRIBUTE, name)
    return num_points


def is_linear_point(module: nn.Module) -> bool:
    """Return whether a module is an ``nn.Linear`` that is a value point."""
    return isinstance(module, _LinearPoint)


def is_frozen_point(module: nn.Module) -> bool:
    """Return whether a module is a value point that saves nothing for its backward."""
    is_point = isinstance(module, (_LinearPoint, _QuantizedPoint))
    return is_point and not any(parameter.requires_grad for parameter in module.parameters())


def _clips_in_place(layer: nn.Module, name: str) -> bool:
    """Return whether a module is in an attention layer that clips projections in place (OLMo), which would change what
    a plan keeps.
    """
    owners = [layer.get_submodule(name[: match.start()]) for match in re.finditer(r"\.", name)]
    return any(getattr(getattr(owner, "config", None), "clip_qkv", None) is not None for owner in owners)


@functools.cache
def _point_class(old: type[Any]) -> type[nn.Module] | None:
    """Return the value-point class for a class of layers; None for a class whose backward is unknown."""
    if issubclass(old, (_LinearPoint, _QuantizedPoint)):
        return None
    if old is nn.Linear:
        return HeldLinear
    if old.forward is nn.Linear.forward:
        return type(f"Held{old.__name__}", (_LinearPoint, old), {})
    if old.__module__.startswith("bitsandbytes.") and old.__name__ in ("Linear4bit", "LinearNF4", "LinearFP4"):
        return type(f"Held{old.__name__}", (_QuantizedPoint, old), {})
    return None


class _LinearPoint:
    """Mixin of a value point for nn.Linear, frozen or trained; it comes before the layer's own class."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        session = find_session(self)  # type: ignore[arg-type]
        if session is None or is_autocast_on(x.device.type) or type(self.weight) is not nn.Parameter:  # type: ignore[attr-defined]
            return super().forward(x)  # type: ignore[misc]
        name = value_name(self)  # type: ignore[arg-type]
        return session.run_last(
            name,
            lambda: _HeldLinearFunction.apply(x, self.weight, self.bias, session, name),  # type: ignore[attr-defined]
            full=functools.partial(super().forward, x),  # type: ignore[misc]
        )


class HeldLinear(_LinearPoint, nn.Linear):
    """nn.Linear that is a value point."""


class _HeldLinearFunction(torch.autograd.Function):
    """Compute nn.functional.linear, or take its output from the session; its GEMMs are bit-equal to autograd's.

    It saves x and the weight if the weight is trained, and nothing if it is frozen, so that a recompute that skips the
    layer saves the same tensors.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight_ND: torch.Tensor,
        bias_N: torch.Tensor | None,
        session: Session,
        name: str,
    ) -> torch.Tensor:
        if ctx.needs_input_grad[1]:
            ctx.save_for_backward(x, weight_ND)
        else:
            ctx.weight_ND = weight_ND
        if session.is_last(name):
            session.skip(name)
            return unneeded(x, weight_ND.shape[0])
        (out,) = session.value(name, lambda: (nn.functional.linear(x, weight_ND, bias_N),))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        # Read once: activation checkpointing allows only one access to saved tensors.
        x, weight_ND = ctx.saved_tensors if needs_weight else (None, ctx.weight_ND)
        d_out_TN = d_out.reshape(-1, d_out.shape[-1])
        d_x = d_out_TN.mm(weight_ND).view(*d_out.shape[:-1], weight_ND.shape[1]) if needs_x else None
        d_weight_ND = d_out_TN.t().mm(x.reshape(-1, x.shape[-1])) if x is not None else None
        return d_x, d_weight_ND, d_out_TN.sum(0) if needs_bias else None, None, None


class _QuantizedPoint:
    """Mixin of a value point for bitsandbytes' 4-bit layer, whose weight is always frozen."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        session = find_session(self)  # type: ignore[arg-type]
        bias = self.bias  # type: ignore[attr-defined]
        is_plain = x.numel() > x.shape[-1] and (bias is None or not bias.requires_grad)
        if session is None or not is_plain or is_autocast_on(x.device.type):
            return super().forward(x)  # type: ignore[misc]
        name = value_name(self)  # type: ignore[arg-type]
        return _HeldQuantizedLinear.apply(x, self, super().forward, session, name)  # type: ignore[misc]


class _HeldQuantizedLinear(torch.autograd.Function):
    """Compute a 4-bit layer, or take its output from the session; save nothing and dequantise again in the backward."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        layer: Any,
        compute: Any,
        session: Session,
        name: str,
    ) -> torch.Tensor:
        ctx.layer = layer
        (out,) = session.value(name, lambda: (compute(x),))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        from bitsandbytes.functional import dequantize_4bit

        weight, compute_dtype = ctx.layer.weight, ctx.layer.compute_dtype or d_out.dtype
        narrow = d_out.to(compute_dtype)
        # FSDP2 gathers a weight without its state, which the layer's own forward puts back.
        state = getattr(weight, "quant_state", None) or ctx.layer.quant_state
        weight_ND = dequantize_4bit(weight.data.view(-1, 1), state).to(narrow.dtype)
        return torch.matmul(narrow, weight_ND).to(d_out.dtype), None, None, None, None
