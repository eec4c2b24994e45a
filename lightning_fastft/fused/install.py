"""Swap the decoder layers of a model for fused ones, and move their weights where their products read them."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import MutableMapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from lightning_fastft.activations.vram_budget import SAVED_ATTRIBUTE
from lightning_fastft.core.errors import UnsupportedModelError
from lightning_fastft.core.patcher import ModelPatcher, share_state
from lightning_fastft.core.status import Status
from lightning_fastft.fused.active_adapters import WITHOUT_COPIES
from lightning_fastft.fused.decoder import FusedLayer, fused_class, fused_norm_class
from lightning_fastft.fused.dense_weights import DenseWeights, FusedWeightBuffer
from lightning_fastft.fused.fp8_base import FP8_ATTRIBUTE, Fp8Base
from lightning_fastft.fused.layer_check import find_difference
from lightning_fastft.fused.layer_forms import LAYERS, LayerForm
from lightning_fastft.fused.layer_parts import (
    FUSION_ATTRIBUTE,
    Fusion,
    block_activation,
    find_delta_rule,
    form_of,
    has_own_mixer,
    is_known_block,
    linear_modules,
    norm_dtype,
    own_class,
    read_for_norms,
    read_parts,
)
from lightning_fastft.fused.linears import FusedLinear
from lightning_fastft.hf.families import decoder_layers, find_causal_models
from lightning_fastft.moe.fp8_experts import held_memory

STATUS_NAME = "fused layers"
# Bound of the memory that a fused layer saves for its backward, per output byte of its linear layers. With temporary
# memory, another 1.0, dense layers take 1.3 to 2.0 (0.6B to 14B), and up to 2.4 with feed-forward blocks in tiles
# (metered without a GPU: tests/estimate/test_costs.py).
_SAVED_PER_OUTPUT = 1.5

WEIGHT_BUFFERS_NAME = "weights next to adapters"

# PEFT makes float32 adapters on a bfloat16 model.
_HOLD_IN_ONE_DTYPE = (
    "use FineTuner, or get_peft_model(..., autocast_adapter_dtype=False), which trains adapters in the model's dtype"
)


def install_fused_layers(root: nn.Module, patcher: ModelPatcher, *, awaits_copies: bool = False) -> list[Status]:
    """Run the decoder layers of every model inside root as a few fused Functions, if their family is known.

    A layer is swapped for a subclass that shares its state. Each call reads the layer's modules again. It runs the
    forward of the layer's own class if a Function would not be exact: with a cache, under autocast or torch.compile,
    with adapters other than LoRA and DoRA, with hooks on a module that would be skipped, or with another attention
    implementation. awaits_copies accepts fp32 adapters, which get low-precision copies before the first call.

    Returns:
        One status "fused layers" for each model: active; inactive if the family is not supported; refused if a layer
        prevents it.

    Cost:
        Host work once; no device work.
    """
    models = find_causal_models(root)
    if not models:
        return [Status(STATUS_NAME, "inactive", f"{type(root).__name__} holds no transformers model")]
    statuses = []
    for name, model in models:
        status = _install(model, patcher, awaits_copies=awaits_copies)
        statuses.append(status._replace(name=f"{STATUS_NAME} ({name})") if len(models) > 1 else status)
    return statuses


def install_fp8_base(root: nn.Module, patcher: ModelPatcher, *, is_emulated: bool) -> list[Fp8Base]:
    """Compute the frozen base products of the fused layers of every model inside root in fp8.

    is_emulated computes in plain PyTorch, on any device.

    Returns:
        One ``Fp8Base`` per model with fused layers.
    """
    found = []
    for _, model in find_causal_models(root):
        layers = fused_layers(model)
        if layers:
            found.append(Fp8Base(layers, read=_read_products, find=linear_modules, is_emulated=is_emulated))
            found[-1].install(patcher)
    return found


def _read_products(layer: nn.Module) -> list[FusedLinear] | str:
    """Return the products of a layer, or the reason why it cannot be fused."""
    parts = read_for_norms(layer)
    return parts if isinstance(parts, str) else parts.products


def fuse_weight_buffers(
    root: nn.Module, patcher: ModelPatcher, *, device_types: Sequence[str] = ("cuda",)
) -> list[FusedWeightBuffers]:
    """Move the frozen dense weights of the fused layers of every model inside root into buffers with their adapters.

    One product then reads both. Call this when models are on their device, and after any sharding. Without it, each
    product copies weights next to their adapters. Only weights on a device of the given types are moved; undo returns
    each to separate memory.

    Returns:
        One ``FusedWeightBuffers`` for each model in which weights were moved.

    Cost:
        One copy of these weights, and memory for those of one product during the move. Reserved memory may grow,
        because the allocator keeps blocks of the old sizes.
    """
    found = []
    for _, model in find_causal_models(root):
        layers, products = decoder_layers(model), []
        for layer in layers:
            parts = read_for_norms(layer) if _is_fused(layer) else ""
            if isinstance(parts, str):
                continue
            for fused_linear in parts.products:
                if fused_linear.base is None and fused_linear.parts[0].weight.device.type in device_types:
                    weight_buffer = fused_linear.dense.fuse_buffer(fused_linear.parts)
                    if weight_buffer is not None:
                        patcher.add_undo(weight_buffer.give_back)
                        products.append(weight_buffer)
        if products:
            found.append(FusedWeightBuffers(products, num_layers=len(layers)))
    return found


class FusedWeightBuffers:
    """The weights of one model that are in fused buffers."""

    def __init__(self, products: Sequence[FusedWeightBuffer], *, num_layers: int) -> None:
        self._products = list(products)
        self._num_layers = num_layers
        self._is_given_back = False

    def status(self) -> Status:
        """Return how many products read weights and adapters from one buffer; after the run, how many did."""
        num_there = (
            len(self._products) if self._is_given_back else sum(product.is_there() for product in self._products)
        )
        if not num_there:
            return Status(WEIGHT_BUFFERS_NAME, "inactive", "the weights were moved to other memory")
        return Status(
            WEIGHT_BUFFERS_NAME,
            "active",
            f"{num_there} products of {self._num_layers} layers read both from one buffer until the training ends",
        )

    def give_back(self) -> None:
        """Return every weight to separate memory."""
        for product in self._products:
            product.give_back()
        self._is_given_back = True

    def make_whole(self, state: MutableMapping[str, Any]) -> None:
        """Replace weights in fused buffers by copies on the host, in a state dict that is about to be written."""
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and any(product.holds(value) for product in self._products):
                state[name] = torch.empty(value.shape, dtype=value.dtype).copy_(value.detach())


def fused_layers(model: PreTrainedModel) -> list[nn.Module]:
    """Return the decoder layers of a model if all of them are fused, attention included, else none."""
    layers = decoder_layers(model)
    is_whole = all(_is_fused(layer) and not has_own_mixer(layer, form_of(layer)) for layer in layers)
    return layers if is_whole else []


def _is_fused(layer: nn.Module) -> bool:
    """Return whether a layer is fused in the present run."""
    return FUSION_ATTRIBUTE in vars(layer)


def shared_memory(layer: nn.Module) -> list[torch.Tensor]:
    """Return the buffers of a fused layer that it shares with other layers or that belong to its products."""
    fusion: Fusion = vars(layer)[FUSION_ATTRIBUTE]
    weights = vars(layer).get(FP8_ATTRIBUTE, ())
    held = [tensor for weight in weights for tensor in weight.memory()]
    return [*fusion.dense.memory(), *(weights[0].owner.memory() if weights else ()), *held, *held_memory(layer)]


def _install(model: PreTrainedModel, patcher: ModelPatcher, *, awaits_copies: bool) -> Status:
    layers = decoder_layers(model)
    forms = {type(layer): _known_form(layer) for layer in layers}
    unknown = sorted({_describe(layer) for layer in layers if forms[type(layer)] is None})
    if unknown:
        known = ", ".join(sorted(name.removesuffix("DecoderLayer") for name in LAYERS))
        return Status(
            STATUS_NAME, "inactive", f"{', '.join(unknown)} is not supported; supported are the layers of {known}"
        )
    obstacles = Counter(filter(None, (_obstacle(layer, awaits_copies=awaits_copies) for layer in layers)))
    obstacles = obstacles or _find_differences(model, layers)
    if obstacles:
        reason, count = obstacles.most_common(1)[0]
        remedy = f"{_remedy_for(reason)}, or remove FusedKernels"
        return Status(STATUS_NAME, "refused", f"{count} of {len(layers)} layers: {reason}", remedy)
    dense, names = DenseWeights(), {id(module): name for name, module in model.named_modules()}
    num_fused = num_mixers = 0
    for layer in layers:
        form = forms[type(layer)]
        assert form is not None
        if not isinstance(layer, FusedLayer):
            new = share_state(layer, fused_class(type(layer)))  # type: ignore[arg-type]
            model.set_submodule(names[id(layer)], new)
            patcher.add_undo(functools.partial(_put_back, model, names[id(layer)], layer, fused=new))
        patcher.set_attribute(layer, FUSION_ATTRIBUTE, Fusion(form, dense))
        if is_known_block(layer, form) and not has_own_mixer(layer, form):
            patcher.set_attribute(layer, SAVED_ATTRIBUTE, _SAVED_PER_OUTPUT)
        num_fused += is_known_block(layer, form)
        num_mixers += has_own_mixer(layer, form)
    _install_norms(model, layers, names, dense, patcher)
    blocks = (
        ""
        if num_fused == len(layers)
        else f", feed-forward blocks of {num_fused}"
        if num_fused
        else ", feed-forward blocks as modules"
    )
    mixers = (
        ""
        if not num_mixers
        else ", attention and mixers as modules"
        if num_mixers == len(layers)
        else f", the mixers of {num_mixers} as modules"
    )
    family = model.config.get_text_config().model_type
    return Status(STATUS_NAME, "active", f"{len(layers)} layers of {family}{blocks}{mixers}")


def _install_norms(
    model: PreTrainedModel, layers: Sequence[Any], names: dict[int, str], dense: DenseWeights, patcher: ModelPatcher
) -> None:
    """Run the norm before the head, and those inside attention that runs as a module, as one kernel each."""
    form = form_of(layers[0])
    kind = type(layers[0]._modules[(*form.norms, *form.post_norms)[0]])
    attentions = [layer.self_attn for layer in layers if "self_attn" in layer._modules and has_own_mixer(layer, form)]
    inner = [part for attention in attentions for part in attention.modules()]
    for norm in (getattr(model.get_decoder(), form.last_norm, None), *inner):
        # Norms of the class of the layers' own norms compute the same.
        if norm is not None and type(norm) is kind and "weight" in norm._parameters:
            new = share_state(norm, fused_norm_class(kind))  # type: ignore[arg-type]
            patcher.replace_module(model, names[id(norm)], new)
            patcher.set_attribute(new, FUSION_ATTRIBUTE, Fusion(form, dense))


def _put_back(model: nn.Module, name: str, layer: nn.Module, *, fused: nn.Module) -> None:
    """Put a layer back in the place of its fused one, unless FSDP2 sharded that one: a unit is one object."""
    if not isinstance(fused, FSDPModule):
        model.set_submodule(name, layer)


def _known_form(layer: nn.Module) -> LayerForm | None:
    """Return the description of a layer; None if it is not supported."""
    form = LAYERS.get(own_class(layer).__name__)
    return None if form is None or _extras(layer) else form


def _extras(layer: nn.Module) -> list[str]:
    """Return the operations of a layer that its description does not cover."""
    form = LAYERS.get(own_class(layer).__name__)
    return [] if form is None else [name for name in form.without if getattr(layer, name, False)]


def _describe(layer: nn.Module) -> str:
    """Return the class of an unsupported layer, with the reason if other layers of the class are supported."""
    if isinstance(layer, FSDPModule):
        return "A model that was sharded by a run without FusedKernels"
    extras = _extras(layer)
    return type(layer).__name__ + (f" ({', '.join(extras)})" if extras else "")


def _obstacle(layer: Any, *, awaits_copies: bool) -> str:
    """Return why no call of a layer can be fused at present; empty if one can."""
    try:
        form = form_of(layer)
        if is_known_block(layer, form):
            block_activation(layer, form)
    except UnsupportedModelError as error:
        return str(error)
    is_sharded = isinstance(layer, FSDPModule)
    found = read_parts(
        layer, dtype=norm_dtype(layer, form), awaits_copies=awaits_copies or is_sharded, awaits_gather=is_sharded
    )
    return found if isinstance(found, str) else ""


def _remedy_for(obstacle: str) -> str:
    """Return what to change for layers to be fused."""
    if obstacle.endswith(WITHOUT_COPIES):
        return _HOLD_IN_ONE_DTYPE
    if "dropout" in obstacle:
        return "set dropout to 0 (lora_dropout of adapters)"
    return "remove what the reason names"


def _find_differences(model: PreTrainedModel, layers: Sequence[nn.Module]) -> Counter[str]:
    """Return how layers with a gated delta rule differ from their fused form; each kind of layer is run once."""
    found: dict[tuple[type[Any], bool, bool], str] = {}
    counts: Counter[str] = Counter()
    for index, layer in enumerate(layers):
        kind = own_class(layer)
        form = LAYERS[kind.__name__]
        if not form.delta_projections:
            continue
        is_dense = is_known_block(layer, form)
        key = (kind, find_delta_rule(layer, form) is None, is_dense)
        if key not in found:
            config = model.config.get_text_config(decoder=True)
            found[key] = find_difference(kind, config, index=index, fuse=_fuse_alone, is_dense=is_dense)
        counts.update([found[key]] if found[key] else [])
    return counts


def _fuse_alone(layer: nn.Module) -> nn.Module:
    """Return the fused layer that shares the parameters of a layer outside of a model."""
    new = share_state(layer, fused_class(type(layer)))  # type: ignore[arg-type]
    vars(new)[FUSION_ATTRIBUTE] = Fusion(form_of(layer), DenseWeights())
    return new
