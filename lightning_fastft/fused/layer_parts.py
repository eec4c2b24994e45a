"""What a fused layer computes itself: its products at present, or the reason why it cannot be fused."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

from lightning_fastft.fused.delta_mixers import delta_modules, delta_obstacle
from lightning_fastft.fused.dense_weights import DenseWeights
from lightning_fastft.fused.fp8_base import in_fp8
from lightning_fastft.fused.layer_forms import LAYERS, LayerForm
from lightning_fastft.fused.linear_parts import read_part
from lightning_fastft.fused.linears import FusedLinear, fuse_linears
from lightning_fastft.hf.activation_functions import activation_name
from lightning_fastft.mixers.install import PackedMixer

# An instance attribute, so no state_dict has it.
FUSION_ATTRIBUTE = "fastft_fusion"

_RECORDING = "transformers.utils.output_capturing"


class Fusion(NamedTuple):
    """State of a fused layer in addition to its modules."""

    form: LayerForm
    dense: DenseWeights


class Parts(NamedTuple):
    """Products of a layer at present.

    Attention without qkv and out, and a feed-forward block without gate_up and down, run as modules.
    """

    qkv: FusedLinear | None
    out: FusedLinear | None
    gate_up: FusedLinear | None
    down: FusedLinear | None


def read_for_norms(layer: nn.Module) -> Parts | str:
    """Return the products of a layer for rows in the dtype of its norms, or the reason why it cannot be fused."""
    return read_parts(layer, dtype=norm_dtype(layer, form_of(layer)), awaits_copies=True)


def read_parts(layer: Any, *, dtype: torch.dtype, awaits_copies: bool = False) -> Parts | str:
    """Return the products of a layer for rows of this dtype, or the reason why it cannot be fused."""
    fusion: Fusion | None = vars(layer).get(FUSION_ATTRIBUTE)
    form = form_of(layer)
    dense = fusion.dense if fusion is not None else DenseWeights()
    passed_over = [layer._modules[name] for name in (*form.norms, *form.post_norms, *form.dropouts)]
    if form.has_layer_inputs and layer.hidden_size_per_layer_input:
        passed_over.append(layer.post_per_layer_input_norm)
    obstacle = _mixer_obstacle(layer, form)
    if obstacle:
        return obstacle
    modules, products = _mixer_products(layer, form)
    passed_over += modules
    is_fused_block, block = is_known_block(layer, form), layer._modules[form.block]
    if is_fused_block:
        passed_over += [block, *(block._modules[name] for name in (*form.gate_up, form.down))]
    hooked = next((type(module).__name__ for module in passed_over if _has_hooks(module)), None)
    if hooked is not None:
        return f"{hooked} has hooks or a replaced forward, which would be skipped"
    drawing = next((name for name in form.dropouts if not _draws_nothing(layer._modules[name])), None)
    if drawing is not None:
        return f"{drawing} has dropout in training"
    if is_fused_block:
        products += [(block, form.gate_up), (block, (form.down,))]
    fused_linears: list[FusedLinear] = []
    for place, (module, names) in enumerate(products):
        linears: Any = [module._modules[name] for name in names]
        fused_linear = fuse_linears(
            [read_part(linear, dtype=dtype, awaits_copies=awaits_copies) for linear in linears], dense
        )
        if isinstance(fused_linear, str):
            return fused_linear
        fused_linears.append(in_fp8(fused_linear, linears, layer=layer, place=place, dtype=dtype))
    of_attention = (None, None) if has_own_mixer(layer, form) else tuple(fused_linears[:2])
    of_block = tuple(fused_linears[-2:]) if is_fused_block else (None, None)
    return Parts(*of_attention, *of_block)


def _mixer_obstacle(layer: Any, form: LayerForm) -> str:
    """Return why a gated delta rule cannot be fused; "" if it can, and for any other mixer."""
    delta_rule = find_delta_rule(layer, form)
    return "" if delta_rule is None else delta_obstacle(delta_rule, form.delta_projections)


def _mixer_products(layer: Any, form: LayerForm) -> tuple[list[nn.Module], list[tuple[Any, tuple[str, ...]]]]:
    """Return the modules of attention or of a gated delta rule whose forward does not run, and its products."""
    delta_rule = find_delta_rule(layer, form)
    if delta_rule is not None:
        modules = delta_modules(delta_rule, form.delta_projections)
        return modules, [(delta_rule, form.delta_projections), (delta_rule, ("out_proj",))]
    if has_own_mixer(layer, form):
        return [], []
    attention = layer.self_attn
    names = (*form.projections, form.out, *form.head_norms)
    parts = [attention._modules[name] for name in names if name in attention._modules]
    return [attention, *parts], [(attention, form.projections), (attention, (form.out,))]


def find_delta_rule(layer: Any, form: LayerForm) -> Any:
    """Return the gated delta rule of a layer that has one in place of attention, else None."""
    return layer._modules.get("linear_attn") if form.delta_projections else None


def _has_hooks(module: nn.Module) -> bool:
    """Return whether a module has foreign hooks or a replaced forward; packed mixers have our own forward."""
    own_forward = vars(module).get("forward")
    is_replaced = own_forward is not None and not isinstance(getattr(own_forward, "__self__", None), PackedMixer)
    is_hooked = module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks or is_replaced
    # transformers leaves hooks on every attention layer after a call that recorded outputs; they have no effect unless
    # attention weights are requested.
    return bool(is_hooked) or any(
        getattr(hook, "__module__", "") != _RECORDING for hook in module._forward_hooks.values()
    )


def _draws_nothing(module: nn.Module | None) -> bool:
    return type(module) is nn.Identity or (type(module) is nn.Dropout and (module.p == 0.0 or not module.training))


def form_of(layer: nn.Module) -> LayerForm:
    """Return the description of a layer, fused or not."""
    fusion: Fusion | None = vars(layer).get(FUSION_ATTRIBUTE)
    return LAYERS[type(layer).__name__] if fusion is None else fusion.form


def norm_dtype(layer: Any, form: LayerForm) -> torch.dtype:
    """Return the dtype of a layer's norms."""
    dtype: torch.dtype = layer._modules[(*form.norms, *form.post_norms)[0]].weight.dtype
    return dtype


def has_own_mixer(layer: Any, form: LayerForm) -> bool:
    """Return whether attention, or the mixer in its place, runs as a module."""
    return form.has_own_mixer or ("self_attn" not in layer._modules and find_delta_rule(layer, form) is None)


def is_known_block(layer: Any, form: LayerForm) -> bool:
    """Return whether a feed-forward block can be fused; one that runs in tiles has a replaced forward and cannot."""
    block = layer._modules[form.block]
    return type(block).__name__ in form.feed_forward and "forward" not in vars(block)


def block_activation(layer: Any, form: LayerForm) -> str:
    """Return the name of the activation of a dense block."""
    return form.activation or activation_name(layer._modules[form.block])
