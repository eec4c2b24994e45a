"""Fused decoder layers: subclasses of transformers' layers that run as a few autograd Functions.

Names, parameters and files do not change.

Axes: B rows, S positions, T = B * S tokens, D model width, H query heads, G key/value heads, W head width.
"""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from lightning_fastft.activations.segments import Session, unwatched
from lightning_fastft.activations.values import SEGMENT_ATTRIBUTE, find_session
from lightning_fastft.core.errors import UnsupportedModelError
from lightning_fastft.core.patcher import ModelPatcher, share_state
from lightning_fastft.core.status import Status
from lightning_fastft.fused.delta_mixers import delta_modules, delta_obstacle, mix_delta
from lightning_fastft.fused.dense_weights import DenseWeights, FusedWeightBuffer
from lightning_fastft.fused.fp8_base import FP8_ATTRIBUTE, Fp8Base, in_fp8
from lightning_fastft.fused.functions import (
    HeadShares,
    Norm,
    Rope,
    feed_forward_between_norms,
    norm_feed_forward,
    norm_head_columns,
    norm_project,
    norm_rows,
    project_add,
    project_norm_add,
    split_heads,
)
from lightning_fastft.fused.layer_check import find_difference
from lightning_fastft.fused.layer_forms import LAYERS, LayerForm
from lightning_fastft.fused.linear_parts import read_part
from lightning_fastft.fused.linears import FusedLinear, fuse_linears
from lightning_fastft.hf.activation_functions import activation_name
from lightning_fastft.hf.families import decoder_layers, find_causal_models
from lightning_fastft.kernels.expert_gate.reference import GateForm
from lightning_fastft.kernels.head_columns import HeadColumns
from lightning_fastft.kernels.head_gate.op import RowGradient, gate_heads
from lightning_fastft.kernels.head_gate.reference import HeadGateForm
from lightning_fastft.kernels.qk_rope.reference import RopeForm
from lightning_fastft.kernels.rms_norm.reference import NormForm
from lightning_fastft.mixers.install import PackedMixer
from lightning_fastft.packing.context import BatchContext
from lightning_fastft.patches.attention import NAME as ATTENTION_NAME
from lightning_fastft.patches.attention import attend

STATUS_NAME = "fused layers"
WEIGHT_BUFFERS_NAME = "weights next to adapters"
# An instance attribute, so no state_dict has it.
_FUSION_ATTRIBUTE = "fastft_fusion"
# Also an instance attribute: the recordings of the layer, set by lightning_fastft.graphs.
GRAPH_ATTRIBUTE = "fastft_layer_graph"
_RECORDING = "transformers.utils.output_capturing"
_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


class _Fusion(NamedTuple):
    """State of a fused layer in addition to its modules."""

    form: LayerForm
    dense: DenseWeights


class _Parts(NamedTuple):
    """Products of a layer at present.

    Attention without qkv and out, and a feed-forward block without gate_up and down, run as modules.
    """

    qkv: FusedLinear | None
    out: FusedLinear | None
    gate_up: FusedLinear | None
    down: FusedLinear | None


class _FusedLayer:
    """The forward of a decoder layer as a few Functions; all other calls run the forward of the layer's own class."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer, or its graph; overridden because transformers begins checkpointing in ``__call__``."""
        graph = vars(self).get(GRAPH_ATTRIBUTE)
        run = super().__call__  # type: ignore[misc]
        return run(*args, **kwargs) if graph is None else graph.call(run, *args, **kwargs)

    def forward(
        self,
        hidden_states: torch.Tensor,
        *args: Any,
        attention_mask: Any = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = False,
        position_embeddings: Any = None,
        per_layer_input: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        layer: Any = self
        if args and _form(layer).has_layer_inputs:
            (per_layer_input,) = args
        elif args:
            (attention_mask,) = args
        session = _open_session(layer)
        with unwatched(session):
            parts = _read_call(layer, hidden_states, past_key_values, position_embeddings, kwargs)
        if parts is None:
            options = {
                "attention_mask": attention_mask,
                "position_ids": position_ids,
                "past_key_values": past_key_values,
            }
            # Layers without these arguments (Gemma's) would pass them to attention.
            options |= {"use_cache": use_cache} if use_cache else {}
            options |= {} if per_layer_input is None else {"per_layer_input": per_layer_input}
            return super().forward(hidden_states, **options, position_embeddings=position_embeddings, **kwargs)  # type: ignore[misc]
        form = vars(layer)[_FUSION_ATTRIBUTE].form
        x_TD = hidden_states.reshape(-1, hidden_states.shape[-1])
        delta_rule = _delta_rule(layer, form)
        if parts.qkv is not None and parts.out is not None and delta_rule is not None:
            with unwatched(session):
                x_TD = mix_delta(
                    delta_rule,
                    _norm(layer.input_layernorm, form),
                    (parts.qkv, parts.out),
                    x_TD,
                    context=kwargs["context"],
                    session=session,
                )
        elif parts.qkv is None or parts.out is None:
            with unwatched(session):
                h_TD, x_TD = _norm_before(x_TD, layer, form, place=0)
            options = {"attention_mask": attention_mask, "position_ids": position_ids, **kwargs}
            out = _mix(layer, h_TD.view(hidden_states.shape), angles=position_embeddings, options=options)
            x_TD = _add(x_TD, out, layer, form, place=0)
        else:
            with unwatched(session):
                x_TD = _attend(
                    layer,
                    form,
                    (parts.qkv, parts.out),
                    x_TD,
                    shape=hidden_states.shape,
                    angles=position_embeddings,
                    mask=attention_mask,
                    options=kwargs,
                )
        if parts.gate_up is not None and parts.down is not None:
            with unwatched(session):
                x_TD = _feed_forward(layer, form, (parts.gate_up, parts.down), x_TD, session=session)
        else:
            with unwatched(session):
                h_TD, x_TD = _norm_before(x_TD, layer, form, place=1)
            out = layer._modules[form.block](h_TD.view(hidden_states.shape))
            # Some blocks also return the scores of their router.
            out = out[0] if isinstance(out, tuple) else out
            x_TD = _add(x_TD, out, layer, form, place=1)
        x_BSD = x_TD.view(hidden_states.shape)
        return _add_layer_inputs(x_BSD, layer, form, per_layer_input) if form.has_layer_inputs else x_BSD

    def __reduce__(self) -> tuple[Any, ...]:
        """Create the class again in a copied or pickled layer, because pickle cannot find classes made at run time."""
        return _new_instance, (_fused_class, type(self).__mro__[2]), vars(self)


class _FusedNorm:
    """The forward of an RMSNorm as one kernel, mixed in before the norm's own class."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        norm: Any = self
        if (
            hidden_states.dtype not in _DTYPES
            or torch.is_autocast_enabled(hidden_states.device.type)
            or torch.compiler.is_compiling()
        ):
            return super().forward(hidden_states)  # type: ignore[misc]
        x_TD = hidden_states.reshape(-1, hidden_states.shape[-1])
        return norm_rows(x_TD, _norm(norm, vars(norm)[_FUSION_ATTRIBUTE].form))[0].view(hidden_states.shape)

    def __reduce__(self) -> tuple[Any, ...]:
        """Create the class again in a copied or pickled norm."""
        return _new_instance, (_fused_norm_class, type(self).__mro__[2]), vars(self)


def install_fused_layers(root: nn.Module, patcher: ModelPatcher, *, awaits_copies: bool = False) -> list[Status]:
    """Run the decoder layers of every model inside root as a few fused Functions, if their family is known.

    A layer is swapped for a subclass that shares its state. Each call reads the layer's modules again. It runs the
    forward of the layer's own class if a Function would not be exact: with a cache, under autocast or torch.compile,
    with adapters other than plain LoRA, with hooks on a module that would be skipped, or with another attention
    implementation.

    Args:
        root: Any module: a model, a PEFT model, a LightningModule around them.
        patcher: Records every change.
        awaits_copies: Accept fp32 adapters, because they get low-precision copies
            (``install_low_precision_adapters``) before the first call.

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


def install_fp8_base(root: nn.Module, patcher: ModelPatcher, *, is_emulated: bool = False) -> list[Fp8Base]:
    """Compute the frozen base products of the fused layers of every model inside root in fp8.

    Args:
        root: The module given to install_fused_layers.
        patcher: Records the changes.
        is_emulated: Compute in plain PyTorch, on any device.

    Returns:
        One ``Fp8Base`` per model with fused layers.
    """
    found = []
    for _, model in find_causal_models(root):
        layers = fused_layers(model)
        if layers:
            found.append(Fp8Base(layers, read=_read_as_it_stands, is_emulated=is_emulated))
            found[-1].install(patcher)
    return found


def fuse_weight_buffers(
    root: nn.Module, patcher: ModelPatcher, *, device_types: Sequence[str] = ("cuda",)
) -> list[FusedWeightBuffers]:
    """Move the frozen dense weights of the fused layers of every model inside root into buffers with their adapters.

    One product then reads both. Call this when models are on their device, and after any sharding. Without it, each
    product copies weights next to their adapters.

    Args:
        root: The module given to install_fused_layers.
        patcher: Records the moves; undo returns every weight to separate memory.
        device_types: Types of devices on which weights are moved.

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
            parts = _read_as_it_stands(layer) if isinstance(layer, _FusedLayer) else ""
            if isinstance(parts, str):
                continue
            for fused_linear in parts:
                if (
                    fused_linear is not None
                    and fused_linear.base is None
                    and fused_linear.parts[0].weight.device.type in device_types
                ):
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


def _read_as_it_stands(layer: nn.Module) -> _Parts | str:
    """Return the products of a layer for rows in the dtype of its norms, or the reason why it cannot be fused."""
    return _read_parts(layer, dtype=_dtype(layer, _form(layer)), awaits_copies=True)


def fused_layers(model: PreTrainedModel) -> list[nn.Module]:
    """Return the decoder layers of a model if all of them are fused, attention included, else none."""
    layers = decoder_layers(model)
    return layers if all(_is_fused_whole(layer) for layer in layers) else []


def _is_fused_whole(layer: nn.Module) -> bool:
    return isinstance(layer, _FusedLayer) and not _has_own_mixer(layer, _form(layer))


def shared_memory(layer: nn.Module) -> list[torch.Tensor]:
    """Return the buffers of a fused layer that it shares with other layers or that belong to its products."""
    fusion: _Fusion = vars(layer)[_FUSION_ATTRIBUTE]
    weights = vars(layer).get(FP8_ATTRIBUTE, ())
    held = [tensor for weight in weights for tensor in weight.memory()]
    return [*fusion.dense.memory(), *(weights[0].owner.memory() if weights else ()), *held]


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
        return Status(
            STATUS_NAME,
            "refused",
            f"{count} of {len(layers)} layers: {reason}",
            "change it, or remove FusedKernels",
        )
    dense, names = DenseWeights(), {id(module): name for name, module in model.named_modules()}
    num_fused = num_mixers = 0
    for layer in layers:
        form = forms[type(layer)]
        assert form is not None
        new = share_state(layer, _fused_class(type(layer)))  # type: ignore[arg-type]
        patcher.replace_module(model, names[id(layer)], new)
        patcher.set_attribute(new, _FUSION_ATTRIBUTE, _Fusion(form, dense))
        num_fused += _is_known_block(layer, form)
        num_mixers += _has_own_mixer(layer, form)
    form = LAYERS[type(layers[0]).__name__]
    last_norm = getattr(model.get_decoder(), form.last_norm, None)
    if type(last_norm) is type(layers[0]._modules[(*form.norms, *form.post_norms)[0]]):
        # The norm before the head belongs to the same family.
        new = share_state(last_norm, _fused_norm_class(type(last_norm)))  # type: ignore[arg-type]
        patcher.replace_module(model, names[id(last_norm)], new)
        patcher.set_attribute(new, _FUSION_ATTRIBUTE, _Fusion(form, dense))
    blocks = (
        ""
        if num_fused == len(layers)
        else f", feed-forward blocks of {num_fused}"
        if num_fused
        else ", without the blocks of experts"
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


def _known_form(layer: nn.Module) -> LayerForm | None:
    """Return the description of a layer that is not fused yet; None if it is not supported."""
    form = LAYERS.get(type(layer).__name__)
    return None if form is None or _extras(layer) else form


def _extras(layer: nn.Module) -> list[str]:
    """Return the operations of a layer that its description does not cover."""
    form = LAYERS.get(type(layer).__name__)
    return [] if form is None else [name for name in form.without if getattr(layer, name, False)]


def _describe(layer: nn.Module) -> str:
    """Return the class of an unsupported layer, with the reason if other layers of the class are supported."""
    extras = _extras(layer)
    return type(layer).__name__ + (f" ({', '.join(extras)})" if extras else "")


@functools.cache
def _fused_class(old: type[Any]) -> type[nn.Module]:
    return type(
        f"Fused{old.__name__}",
        (_FusedLayer, old),
        {"__doc__": f"transformers' {old.__name__} as a few fused Functions."},
    )


@functools.cache
def _fused_norm_class(old: type[Any]) -> type[nn.Module]:
    return type(f"Fused{old.__name__}", (_FusedNorm, old), {"__doc__": f"transformers' {old.__name__} as one kernel."})


def _new_instance(make_class: Callable[[type[Any]], type[nn.Module]], old: type[Any]) -> nn.Module:
    new_class = make_class(old)
    return new_class.__new__(new_class)


def _read_call(layer: Any, x: torch.Tensor, cache: object, angles: object, options: dict[str, Any]) -> _Parts | None:
    """Return the products of a layer for one call, or None if the layer's own forward must run."""
    if cache is not None or x.dtype not in _DTYPES or torch.compiler.is_compiling():
        return None
    if torch.is_autocast_enabled(x.device.type):
        return None
    form = _form(layer)
    if _delta_rule(layer, form) is not None:
        # Without a context the mixer may read a mask, a cache, or rows whose document borders only it knows.
        context = options.get("context")
        if not isinstance(context, BatchContext) or x.shape[:2] != (1, context.num_tokens):
            return None
    elif not _has_own_mixer(layer, form):
        config = layer.self_attn.config
        if angles is None or options.get("output_attentions") or getattr(config, "output_attentions", False):
            return None
        if config._attn_implementation != ATTENTION_NAME:
            return None
        if form.scales_late_queries and _longest(x, options) > _num_unscaled(config):
            return None
    found = _read_parts(layer, dtype=x.dtype)
    return None if isinstance(found, str) else found


def _longest(x_BSD: torch.Tensor, options: dict[str, Any]) -> int:
    """Return an upper bound of the positions of a call: the longest document of a pack, or the width of padded rows."""
    context = options.get("context")
    return context.max_length if isinstance(context, BatchContext) else x_BSD.shape[1]


def _num_unscaled(config: Any) -> float:
    """Return the number of positions whose queries are not scaled."""
    return float(config.rope_parameters["original_max_position_embeddings"])


def _obstacle(layer: Any, *, awaits_copies: bool) -> str:
    """Return why no call of a layer can be fused at present; empty if one can."""
    try:
        form = _form(layer)
        if _is_known_block(layer, form):
            _activation(layer, form)
    except UnsupportedModelError as error:
        return str(error)
    found = _read_parts(layer, dtype=_dtype(layer, form), awaits_copies=awaits_copies)
    return found if isinstance(found, str) else ""


def _find_differences(model: PreTrainedModel, layers: Sequence[nn.Module]) -> Counter[str]:
    """Return how layers with a gated delta rule differ from their fused form; each kind of layer is run once."""
    found: dict[tuple[type[Any], bool, bool], str] = {}
    counts: Counter[str] = Counter()
    for index, layer in enumerate(layers):
        kind: type[Any] = type(layer)
        form = LAYERS[kind.__name__]
        if not form.delta_projections:
            continue
        is_dense = _is_known_block(layer, form)
        key = (kind, _delta_rule(layer, form) is None, is_dense)
        if key not in found:
            config = model.config.get_text_config(decoder=True)
            found[key] = find_difference(kind, config, index=index, fuse=_fuse_alone, is_dense=is_dense)
        counts.update([found[key]] if found[key] else [])
    return counts


def _fuse_alone(layer: nn.Module) -> nn.Module:
    """Return the fused layer that shares the parameters of a layer outside of a model."""
    new = share_state(layer, _fused_class(type(layer)))  # type: ignore[arg-type]
    vars(new)[_FUSION_ATTRIBUTE] = _Fusion(LAYERS[type(layer).__name__], DenseWeights())
    return new


def _read_parts(layer: Any, *, dtype: torch.dtype, awaits_copies: bool = False) -> _Parts | str:
    """Return the products of a layer for rows of this dtype, or the reason why it cannot be fused."""
    fusion: _Fusion | None = vars(layer).get(_FUSION_ATTRIBUTE)
    form = _form(layer)
    dense = fusion.dense if fusion is not None else DenseWeights()
    passed_over = [layer._modules[name] for name in (*form.norms, *form.post_norms, *form.dropouts)]
    if form.has_layer_inputs and layer.hidden_size_per_layer_input:
        passed_over.append(layer.post_per_layer_input_norm)
    obstacle = _mixer_obstacle(layer, form)
    if obstacle:
        return obstacle
    modules, products = _mixer_products(layer, form)
    passed_over += modules
    is_known_block, block = _is_known_block(layer, form), layer._modules[form.block]
    if is_known_block:
        passed_over += [block, *(block._modules[name] for name in (*form.gate_up, form.down))]
    hooked = next((type(module).__name__ for module in passed_over if _has_hooks(module)), None)
    if hooked is not None:
        return f"{hooked} has hooks or a replaced forward, which would be skipped"
    drawing = next((name for name in form.dropouts if not _draws_nothing(layer._modules[name])), None)
    if drawing is not None:
        return f"{drawing} has dropout in training"
    if is_known_block:
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
    of_attention = (None, None) if _has_own_mixer(layer, form) else tuple(fused_linears[:2])
    of_block = tuple(fused_linears[-2:]) if is_known_block else (None, None)
    return _Parts(*of_attention, *of_block)


def _mixer_obstacle(layer: Any, form: LayerForm) -> str:
    """Return why a gated delta rule cannot be fused; "" if it can, and for any other mixer."""
    delta_rule = _delta_rule(layer, form)
    return "" if delta_rule is None else delta_obstacle(delta_rule, form.delta_projections)


def _mixer_products(layer: Any, form: LayerForm) -> tuple[list[nn.Module], list[tuple[Any, tuple[str, ...]]]]:
    """Return the modules of attention or of a gated delta rule whose forward does not run, and its products."""
    delta_rule = _delta_rule(layer, form)
    if delta_rule is not None:
        modules = delta_modules(delta_rule, form.delta_projections)
        return modules, [(delta_rule, form.delta_projections), (delta_rule, ("out_proj",))]
    if _has_own_mixer(layer, form):
        return [], []
    attention = layer.self_attn
    names = (*form.projections, form.out, *form.head_norms)
    parts = [attention._modules[name] for name in names if name in attention._modules]
    return [attention, *parts], [(attention, form.projections), (attention, (form.out,))]


def _delta_rule(layer: Any, form: LayerForm) -> Any:
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


def _form(layer: nn.Module) -> LayerForm:
    """Return the description of a layer, fused or not."""
    fusion: _Fusion | None = vars(layer).get(_FUSION_ATTRIBUTE)
    return LAYERS[type(layer).__name__] if fusion is None else fusion.form


def _dtype(layer: Any, form: LayerForm) -> torch.dtype:
    """Return the dtype of a layer's norms."""
    dtype: torch.dtype = layer._modules[(*form.norms, *form.post_norms)[0]].weight.dtype
    return dtype


def _has_own_mixer(layer: Any, form: LayerForm) -> bool:
    """Return whether attention, or the mixer in its place, runs as a module."""
    return form.has_own_mixer or ("self_attn" not in layer._modules and _delta_rule(layer, form) is None)


def _is_known_block(layer: Any, form: LayerForm) -> bool:
    """Return whether a feed-forward block can be fused; one that runs in tiles has a replaced forward and cannot."""
    block = layer._modules[form.block]
    return type(block).__name__ in form.feed_forward and "forward" not in vars(block)


def _activation(layer: Any, form: LayerForm) -> str:
    """Return the name of the activation of a dense block."""
    return form.activation or activation_name(layer._modules[form.block])


def _norm(module: Any, form: LayerForm) -> Norm:
    return Norm(
        module.weight, NormForm(eps=_eps(module), weight_offset=form.norm_offset, is_weight_wide=form.is_norm_wide)
    )


def _named_norm(layer: Any, form: LayerForm, names: tuple[str, ...], *, place: int) -> Norm | None:
    """Return one of the norms of attention (place 0) or of the block (place 1), or None for a layer without."""
    # LFM3's norms after attention and block are an option.
    has_norm = names and type(layer._modules[names[place]]) is not nn.Identity
    return _norm(layer._modules[names[place]], form) if has_norm else None


def _norm_before(x_TD: torch.Tensor, layer: Any, form: LayerForm, *, place: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the input of a mixer or a block that runs as a module, and the residual stream."""
    norm = _named_norm(layer, form, form.norms, place=place)
    return (x_TD, x_TD) if norm is None else norm_rows(x_TD, norm)


def _add(x_TD: torch.Tensor, out: torch.Tensor, layer: Any, form: LayerForm, *, place: int) -> torch.Tensor:
    """Return the residual stream after the output of a mixer or a block that ran as a module."""
    norm = _named_norm(layer, form, form.post_norms, place=place)
    out_TD = out.reshape(x_TD.shape)
    if norm is not None:
        out_TD = norm_rows(out_TD, norm)[0]
    return torch.add(x_TD, out_TD, alpha=_factor(layer, form))


def _add_layer_inputs(
    x_BSD: torch.Tensor, layer: Any, form: LayerForm, per_layer_input: torch.Tensor | None
) -> torch.Tensor:
    """Return the output of a layer that reads per-layer inputs, if the model has them, and has a scalar (Gemma 4).

    Cost:
        Two thin products as modules, a norm, and elementwise passes: about 2 % of a layer.
    """
    if layer.hidden_size_per_layer_input:
        gate = layer.act_fn(layer.per_layer_input_gate(x_BSD)) * per_layer_input
        out_TD = layer.per_layer_projection(gate).flatten(0, 1)
        x_BSD = x_BSD + norm_rows(out_TD, _norm(layer.post_per_layer_input_norm, form))[0].view(x_BSD.shape)
    # The scalar may be in another dtype.
    return (x_BSD * layer.layer_scalar).to(x_BSD.dtype)


def _factor(layer: Any, form: LayerForm) -> float:
    """Return the factor by which outputs are multiplied before they are added."""
    return float(layer.residual_multiplier) if form.has_multiplier else 1.0


def _eps(module: Any) -> float:
    """Return the epsilon of a norm; Gemma's norms name it differently."""
    return float(module.eps if hasattr(module, "eps") else module.variance_epsilon)


def _open_session(layer: Any) -> Session | None:
    """Return the open session of a layer; layers without attention have value points in their block."""
    if "self_attn" in layer._modules:
        return find_session(layer.self_attn)
    block = layer._modules[_form(layer).block]
    point = next((part for part in block.modules() if SEGMENT_ATTRIBUTE in vars(part)), None)
    return None if point is None else find_session(point)


def _mix(
    layer: Any, h_BSD: torch.Tensor, *, angles: tuple[torch.Tensor, torch.Tensor], options: dict[str, Any]
) -> torch.Tensor:
    """Return the output of attention, or of the convolution in its place, for normed hidden states."""
    if "conv" in layer._modules:
        # transformers 5.17 passes no further keywords to its convolutions.
        known = inspect.signature(type(layer.conv).forward).parameters
        takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values())
        options = {
            name: value for name, value in options.items() if name in known or (takes_all and name != "position_ids")
        }
        out: torch.Tensor = layer.conv(hidden_states=h_BSD, past_key_values=None, **options)
        return out
    out, _ = layer.self_attn(hidden_states=h_BSD, past_key_values=None, position_embeddings=angles, **options)
    return out


def _attend(
    layer: Any,
    form: LayerForm,
    products: tuple[FusedLinear, FusedLinear],
    x_TD: torch.Tensor,
    *,
    shape: torch.Size,
    angles: tuple[torch.Tensor, torch.Tensor],
    mask: Any,
    options: dict[str, Any],
) -> torch.Tensor:
    """Return the residual stream after attention, shape (T, D)."""
    attention, session = layer.self_attn, find_session(layer.self_attn)
    qkv, projection = products
    qkv_TC, x_TD = norm_project(x_TD, _named_norm(layer, form, form.norms, place=0), qkv, session=session)
    if form.has_joint_head_norms:
        q_norm, k_norm = (_norm(attention._modules[name], form) for name in form.head_norms)
        qkv_TC = norm_head_columns(qkv_TC, q_norm, k_norm)
    # The input of the output projection is as wide as the query heads.
    shares, row_gradient = HeadShares(), RowGradient()
    rope = _rope(attention, form, angles, rows_TC=qkv_TC, num_query_columns=projection.num_inputs)
    heads = split_heads(qkv_TC, rope, shares, row_gradient)
    # Attention layers pass (B, H, S, W).
    q, k, v = (x_THW.view(shape[0], shape[1], *x_THW.shape[1:]).transpose(1, 2) for x_THW in heads)
    out, _ = attend(
        attention,
        q,
        k,
        v,
        mask,
        # LFM2's layers have no dropout.
        dropout=getattr(attention, "attention_dropout", 0.0) if attention.training else 0.0,
        scaling=attention.scaling,
        sliding_window=getattr(attention.config if form.has_config_window else attention, "sliding_window", None),
        softcap=attention.attn_logit_softcapping if form.has_softcap else None,
        s_aux=getattr(attention, "sinks", None),
        collect=shares.put,
        **options,
    )
    out_TI = out.reshape(x_TD.shape[0], -1)
    if form.has_gated_heads:
        width, num_heads = rope.form.head_width, rope.form.num_heads
        gate = HeadGateForm(HeadColumns(width, width, num_heads, group_size=1, group_step=2 * width))
        out_TI = gate_heads(out_TI.unflatten(1, (num_heads, width)), qkv_TC, form=gate, row_gradient=row_gradient)
    post_norm = _named_norm(layer, form, form.post_norms, place=0)
    if post_norm is not None:
        return project_norm_add(out_TI, x_TD, post_norm, projection, session=session)
    return project_add(out_TI, x_TD, projection, factor=_factor(layer, form), session=session)


def _feed_forward(
    layer: Any,
    form: LayerForm,
    products: tuple[FusedLinear, FusedLinear],
    x_TD: torch.Tensor,
    *,
    session: Session | None,
) -> torch.Tensor:
    """Return the residual stream after a dense feed-forward block, shape (T, D)."""
    gate = GateForm(activation=_activation(layer, form))
    norm, post_norm = (_named_norm(layer, form, names, place=1) for names in (form.norms, form.post_norms))
    if post_norm is not None:
        return feed_forward_between_norms(x_TD, norm, *products, post_norm, form=gate, session=session)
    assert norm is not None
    return norm_feed_forward(x_TD, norm, *products, form=gate, factor=_factor(layer, form), session=session)


def _rope(
    attention: Any,
    layer_form: LayerForm,
    angles: tuple[torch.Tensor, torch.Tensor],
    *,
    rows_TC: torch.Tensor,
    num_query_columns: int,
) -> Rope:
    """Return the rotation and the norms that turn projections into heads."""
    width, (num_tokens, num_columns) = int(attention.head_dim), rows_TC.shape
    q_norm, k_norm = (
        None if layer_form.has_joint_head_norms else getattr(attention, name, None) for name in layer_form.head_norms
    )
    cos, sin = (
        _angle_rows(angle, num_tokens=num_tokens, is_half=layer_form.has_half_angles, dtype=rows_TC.dtype)
        for angle in angles
    )
    if not getattr(attention, "use_rope", True):
        # Layers without positions (SmolLM3): rotate by an angle of 0.
        cos, sin = torch.ones_like(cos), torch.zeros_like(sin)
    num_gates = num_query_columns if layer_form.has_gated_heads else 0
    form = RopeForm(
        num_heads=num_query_columns // width,
        num_kv_heads=(num_columns - num_query_columns - num_gates) // (2 * width),
        head_width=width,
        rotary_width=cos.shape[1],
        has_norm=q_norm is not None,
        eps=1e-6 if q_norm is None else _eps(q_norm),
        weight_offset=layer_form.norm_offset,
        is_weight_wide=layer_form.is_norm_wide,
        has_gate=layer_form.has_gated_heads,
    )
    return Rope(cos, sin, None if q_norm is None else q_norm.weight, None if k_norm is None else k_norm.weight, form)


def _angle_rows(angle_BSW: torch.Tensor, *, num_tokens: int, is_half: bool, dtype: torch.dtype) -> torch.Tensor:
    """Return cos or sin with a row per token, for both halves of the rotated columns."""
    if is_half:
        angle_BSW = torch.cat([angle_BSW, angle_BSW], dim=-1)
    rows = angle_BSW.expand(num_tokens // angle_BSW.shape[1], -1, -1).reshape(num_tokens, -1)
    return rows if rows.dtype in (dtype, torch.float32) else rows.to(dtype)
