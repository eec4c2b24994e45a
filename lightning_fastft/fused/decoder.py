"""Fused decoder layers: subclasses of transformers' layers that run as a few autograd Functions.

Names, parameters and files do not change.

Axes: B rows, S positions, T = B * S tokens, D model width, H query heads, G key/value heads, W head width.
"""

from __future__ import annotations

import functools
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
# Also an instance attribute: the recordings of the layer, set by the room graphs.
GRAPH_ATTRIBUTE = "fastft_layer_graph"
_RECORDING = "transformers.utils.output_capturing"
_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_NORMS = ("input_layernorm", "post_attention_layernorm")
_POST_NORMS = ("pre_feedforward_layernorm", "post_feedforward_layernorm")


class _Fusion(NamedTuple):
    """What a fused layer knows in addition to its modules."""

    form: LayerForm
    dense: DenseWeights


class _Parts(NamedTuple):
    """The products of a layer at present; attention without qkv and out, and a feed-forward block without gate_up and
    down, run as modules.
    """

    qkv: FusedLinear | None
    out: FusedLinear | None
    gate_up: FusedLinear | None
    down: FusedLinear | None


class _FusedLayer:
    """The forward of a decoder layer as a few Functions; the layer's own class serves all other calls."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer, or its graph; here, because transformers begins checkpointing in ``__call__``."""
        graph = vars(self).get(GRAPH_ATTRIBUTE)
        run = super().__call__  # type: ignore[misc]
        return run(*args, **kwargs) if graph is None else graph.call(run, *args, **kwargs)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: Any = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = False,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        layer: Any = self
        session = _open_session(layer)
        with unwatched(session):
            parts = _read_call(layer, hidden_states, past_key_values, position_embeddings, kwargs)
        if parts is None or position_embeddings is None:
            options = {
                "attention_mask": attention_mask,
                "position_ids": position_ids,
                "past_key_values": past_key_values,
            }
            # Layers without this argument (Gemma's) would pass it to attention.
            options |= {"use_cache": use_cache} if use_cache else {}
            return super().forward(hidden_states, **options, position_embeddings=position_embeddings, **kwargs)  # type: ignore[misc]
        fusion: _Fusion = vars(layer)[_FUSION_ATTRIBUTE]
        x_TD = hidden_states.reshape(-1, hidden_states.shape[-1])
        if parts.qkv is not None and parts.out is not None and _mixer(layer) is not None:
            with unwatched(session):
                x_TD = mix_delta(
                    _mixer(layer),
                    _norm(layer.input_layernorm, fusion.form),
                    (parts.qkv, parts.out),
                    x_TD,
                    context=kwargs["context"],
                    session=session,
                )
        elif parts.qkv is None or parts.out is None:
            with unwatched(session):
                h_TD, x_TD = norm_rows(x_TD, _norm(layer.input_layernorm, fusion.form))
            options = {"attention_mask": attention_mask, "position_ids": position_ids, **kwargs}
            out = _mix(layer, h_TD.view(hidden_states.shape), angles=position_embeddings, options=options)
            x_TD = x_TD + out.reshape(x_TD.shape)
        else:
            with unwatched(session):
                x_TD = _attend(
                    layer,
                    fusion,
                    (parts.qkv, parts.out),
                    x_TD,
                    shape=hidden_states.shape,
                    angles=position_embeddings,
                    mask=attention_mask,
                    options=kwargs,
                )
        with unwatched(session):
            has_post_norms = fusion.form.has_post_norms
            norm = _norm(
                layer.pre_feedforward_layernorm if has_post_norms else layer.post_attention_layernorm, fusion.form
            )
            post_norm = _norm(layer.post_feedforward_layernorm, fusion.form) if has_post_norms else None
            if parts.gate_up is not None and parts.down is not None:
                form = GateForm(activation=activation_name(layer.mlp))
                if post_norm is None:
                    x_TD = norm_feed_forward(x_TD, norm, parts.gate_up, parts.down, form=form, session=session)
                else:
                    x_TD = feed_forward_between_norms(
                        x_TD, norm, parts.gate_up, parts.down, post_norm, form=form, session=session
                    )
                return x_TD.view(hidden_states.shape)
            h_TD, x_TD = norm_rows(x_TD, norm)
        out = layer.mlp(h_TD.view(hidden_states.shape))
        # Some blocks also return the scores of their router.
        out = out[0] if isinstance(out, tuple) else out
        if post_norm is not None:
            out = norm_rows(out.reshape(x_TD.shape), post_norm)[0].view(hidden_states.shape)
        return x_TD.view(hidden_states.shape) + out

    def __reduce__(self) -> tuple[Any, ...]:
        """A copied or pickled layer creates its class again, because pickle cannot find classes made at run time."""
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
        """As for a fused layer."""
        return _new_instance, (_fused_norm_class, type(self).__mro__[2]), vars(self)


def install_fused_layers(root: nn.Module, patcher: ModelPatcher, *, awaits_copies: bool = False) -> list[Status]:
    """Let the decoder layers of every model inside root run as a few fused Functions, if their family is known.

    A layer is swapped for a subclass that shares its state. Each call reads its modules again, and runs the forward of
    its own class if a Function would not be exact: with a cache, under autocast or torch.compile, with adapters other
    than plain LoRA, with hooks on a module that would be skipped, or with another attention implementation.

    Args:
        root: Any module: a model, a PEFT model, a LightningModule around them.
        patcher: Records every change.
        awaits_copies: Accept fp32 adapters, because they get low-precision copies
            (``install_low_precision_adapters``) before the first call.

    Returns:
        One status "fused layers" for each model: active; inactive if the family is not served; refused if a layer
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
    """Let the frozen base products of the fused layers of every model inside root compute in fp8
    (``fused/fp8_base.py``).

    Args:
        root: The module given to install_fused_layers.
        patcher: Records the changes.
        is_emulated: Compute in plain PyTorch, on any device.

    Returns:
        One per model with fused layers.
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
    """Move the frozen dense weights of the fused layers of every model inside root next to their adapters, so that one
    product reads both.

    Call it when models are on their device, and after any sharding. Without it, each product copies weights next to
    their adapters.

    Args:
        root: The module given to install_fused_layers.
        patcher: Records the moves; undo returns every weight to separate memory.
        device_types: Types of devices on which weights are moved.

    Returns:
        One for each model in which weights were moved.

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
    """The weights in a fused buffer of one model."""

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
            return Status(WEIGHT_BUFFERS_NAME, "inactive", "the weights were given other memory")
        return Status(
            WEIGHT_BUFFERS_NAME,
            "active",
            f"{num_there} products of {self._num_layers} layers read both from one place until the training ends",
        )

    def give_back(self) -> None:
        """Return every weight to separate memory."""
        for product in self._products:
            product.give_back()
        self._is_given_back = True

    def make_whole(self, state: MutableMapping[str, Any]) -> None:
        """Replace weights in fused buffers by copies on the host, in a state dict that will be written."""
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and any(product.holds(value) for product in self._products):
                state[name] = torch.empty(value.shape, dtype=value.dtype).copy_(value.detach())


def _read_as_it_stands(layer: nn.Module) -> _Parts | str:
    """Return the products of a layer for rows in the dtype of its norms, or what prevents them."""
    norm: Any = layer.input_layernorm
    return _read_parts(layer, dtype=norm.weight.dtype, awaits_copies=True)


def fused_layers(model: PreTrainedModel) -> list[nn.Module]:
    """Return the decoder layers of a model if all of them are fused, attention included, else none."""
    layers = decoder_layers(model)
    return layers if all(_is_fused_whole(layer) for layer in layers) else []


def _is_fused_whole(layer: nn.Module) -> bool:
    return isinstance(layer, _FusedLayer) and not vars(layer)[_FUSION_ATTRIBUTE].form.has_own_mixer


def shared_memory(layer: nn.Module) -> list[torch.Tensor]:
    """Return the buffers of a fused layer that it shares with other layers or that belong to its products."""
    fusion: _Fusion = vars(layer)[_FUSION_ATTRIBUTE]
    weights = vars(layer).get(FP8_ATTRIBUTE, ())
    held = [tensor for weight in weights for tensor in weight.memory()]
    return [*fusion.dense.memory(), *(weights[0].owner.memory() if weights else ()), *held]


def _install(model: PreTrainedModel, patcher: ModelPatcher, *, awaits_copies: bool) -> Status:
    layers = decoder_layers(model)
    forms = {type(layer): LAYERS.get(type(layer).__name__) for layer in layers}
    unknown = sorted(kind.__name__ for kind, form in forms.items() if form is None)
    if unknown:
        known = ", ".join(sorted(name.removesuffix("DecoderLayer") for name in LAYERS))
        return Status(STATUS_NAME, "inactive", f"{', '.join(unknown)} is not served; served are the layers of {known}")
    obstacles = Counter(filter(None, (_obstacle(layer, awaits_copies=awaits_copies) for layer in layers)))
    obstacles = obstacles or _find_differences(model, layers)
    if obstacles:
        reason, count = obstacles.most_common(1)[0]
        return Status(
            STATUS_NAME,
            "refused",
            f"{count} of {len(layers)} layers: {reason}",
            "change what is named, or leave FusedKernels out",
        )
    dense, names = DenseWeights(), {id(module): name for name, module in model.named_modules()}
    num_fused = 0
    for layer in layers:
        form = forms[type(layer)]
        assert form is not None
        new = share_state(layer, _fused_class(type(layer)))  # type: ignore[arg-type]
        patcher.replace_module(model, names[id(layer)], new)
        patcher.set_attribute(new, _FUSION_ATTRIBUTE, _Fusion(form, dense))
        num_fused += _is_known_block(layer.mlp, form)  # type: ignore[arg-type]
    last_norm = getattr(model.get_decoder(), "norm", None)
    if type(last_norm) is type(layers[0].input_layernorm):
        # The norm before the head belongs to the same family.
        new = share_state(last_norm, _fused_norm_class(type(last_norm)))  # type: ignore[arg-type]
        patcher.replace_module(model, names[id(last_norm)], new)
        patcher.set_attribute(new, _FUSION_ATTRIBUTE, _Fusion(LAYERS[type(layers[0]).__name__], dense))
    blocks = (
        ""
        if num_fused == len(layers)
        else f", feed-forward blocks of {num_fused}"
        if num_fused
        else ", without the blocks of experts"
    )
    mixers = ", attention as a module" if any(form and form.has_own_mixer for form in forms.values()) else ""
    family = model.config.get_text_config().model_type
    return Status(STATUS_NAME, "active", f"{len(layers)} layers of {family}{blocks}{mixers}")


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
    """Return the products of a layer for one call, or None if the layer's own forward must serve it."""
    if cache is not None or angles is None or x.dtype not in _DTYPES or torch.compiler.is_compiling():
        return None
    if torch.is_autocast_enabled(x.device.type):
        return None
    form: LayerForm = vars(layer)[_FUSION_ATTRIBUTE].form
    if _mixer(layer) is not None:
        # Without a context the mixer may read a mask; a cache, or rows of which only it knows the borders.
        context = options.get("context")
        if not isinstance(context, BatchContext) or x.shape[:2] != (1, context.num_tokens):
            return None
    elif not form.has_own_mixer:
        config = layer.self_attn.config
        if options.get("output_attentions") or getattr(config, "output_attentions", False):
            return None
        if config._attn_implementation != ATTENTION_NAME:
            return None
        if form.scales_late_queries and _longest(x, options) > _num_unscaled(config):
            return None
    found = _read_parts(layer, dtype=x.dtype)
    return None if isinstance(found, str) else found


def _longest(x_BSD: torch.Tensor, options: dict[str, Any]) -> int:
    """Return a bound of the positions of a call: the longest document of a pack, or the width of padded rows."""
    context = options.get("context")
    return context.max_length if isinstance(context, BatchContext) else x_BSD.shape[1]


def _num_unscaled(config: Any) -> float:
    """Return the number of positions whose queries are not scaled."""
    return float(config.rope_parameters["original_max_position_embeddings"])


def _obstacle(layer: Any, *, awaits_copies: bool) -> str:
    """Return why no call of a layer can be served at present; empty if one can."""
    try:
        if _is_known_block(layer.mlp, LAYERS[type(layer).__name__]):
            activation_name(layer.mlp)
    except UnsupportedModelError as error:
        return str(error)
    found = _read_parts(layer, dtype=layer.input_layernorm.weight.dtype, awaits_copies=awaits_copies)
    return found if isinstance(found, str) else ""


def _find_differences(model: PreTrainedModel, layers: Sequence[nn.Module]) -> Counter[str]:
    """Return why layers with a gated delta rule compute something else than what is fused: each kind is run once."""
    found: dict[tuple[type[Any], bool, bool], str] = {}
    counts: Counter[str] = Counter()
    for index, layer in enumerate(layers):
        kind: type[Any] = type(layer)
        form = LAYERS[kind.__name__]
        if not form.delta_projections:
            continue
        is_dense = _is_known_block(layer.mlp, form)  # type: ignore[arg-type]
        key = (kind, _mixer(layer) is None, is_dense)
        if key not in found:
            config = model.config.get_text_config(decoder=True)
            found[key] = find_difference(kind, config, index=index, fuse=_fuse_alone, is_dense=is_dense)
        counts.update([found[key]] if found[key] else [])
    return counts


def _fuse_alone(layer: nn.Module) -> nn.Module:
    """Return the fused layer that shares the parameters of a layer outside of a model."""
    new = share_state(layer, _fused_class(type(layer)))
    vars(new)[_FUSION_ATTRIBUTE] = _Fusion(LAYERS[type(layer).__name__], DenseWeights())
    return new


def _read_parts(layer: Any, *, dtype: torch.dtype, awaits_copies: bool = False) -> _Parts | str:
    """Return the products of a layer for rows of this dtype, or what prevents them."""
    fusion: _Fusion | None = vars(layer).get(_FUSION_ATTRIBUTE)
    form = fusion.form if fusion is not None else LAYERS[type(layer).__name__]
    dense = fusion.dense if fusion is not None else DenseWeights()
    norms = (*_NORMS, *(_POST_NORMS if form.has_post_norms else ()), *form.dropouts)
    passed_over = [layer._modules[name] for name in norms]
    products: list[tuple[Any, tuple[str, ...]]] = []
    mixer = _mixer(layer)
    if mixer is not None:
        obstacle = delta_obstacle(mixer, form.delta_projections)
        if obstacle:
            return obstacle
        passed_over += delta_modules(mixer, form.delta_projections)
        products += [(mixer, form.delta_projections), (mixer, ("out_proj",))]
    elif not form.has_own_mixer:
        attention = layer.self_attn
        names = (*form.projections, "o_proj", "q_norm", "k_norm")
        passed_over += [attention, *(attention._modules[name] for name in names if name in attention._modules)]
        products += [(attention, form.projections), (attention, ("o_proj",))]
    is_known_block = _is_known_block(layer.mlp, form)
    if is_known_block:
        passed_over += [layer.mlp, *(layer.mlp._modules[name] for name in (*form.gate_up, "down_proj"))]
    hooked = next((type(module).__name__ for module in passed_over if _has_hooks(module)), None)
    if hooked is not None:
        return f"{hooked} has hooks or a forward of its own, which would be passed over"
    drawing = next((name for name in form.dropouts if not _draws_nothing(layer._modules[name])), None)
    if drawing is not None:
        return f"{drawing} drops out in training"
    if is_known_block:
        products += [(layer.mlp, form.gate_up), (layer.mlp, ("down_proj",))]
    fused_linears: list[FusedLinear] = []
    for place, (module, names) in enumerate(products):
        linears: Any = [module._modules[name] for name in names]
        fused_linear = fuse_linears(
            [read_part(linear, dtype=dtype, awaits_copies=awaits_copies) for linear in linears], dense
        )
        if isinstance(fused_linear, str):
            return fused_linear
        fused_linears.append(in_fp8(fused_linear, linears, layer=layer, place=place, dtype=dtype))
    of_attention = (None, None) if form.has_own_mixer else tuple(fused_linears[:2])
    of_block = tuple(fused_linears[-2:]) if is_known_block else (None, None)
    return _Parts(*of_attention, *of_block)


def _mixer(layer: Any) -> Any:
    """Return the gated delta rule of a layer that has one in the place of attention, else None."""
    return layer._modules.get("linear_attn")


def _has_hooks(module: nn.Module) -> bool:
    """Return whether a module has foreign hooks or a replaced forward; that of packed mixers is ours."""
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


def _is_known_block(block: nn.Module, form: LayerForm) -> bool:
    """Whether a feed-forward block can be fused; a block that runs in tiles has a replaced forward and cannot."""
    return type(block).__name__ in form.feed_forward and "forward" not in vars(block)


def _norm(module: Any, form: LayerForm) -> Norm:
    return Norm(
        module.weight, NormForm(eps=_eps(module), weight_offset=form.norm_offset, is_weight_wide=form.is_norm_wide)
    )


def _eps(module: Any) -> float:
    """Return the epsilon of a norm; Gemma's norms name it differently."""
    return float(module.eps if hasattr(module, "eps") else module.variance_epsilon)


def _open_session(layer: Any) -> Session | None:
    """Return the open session of a layer; layers without attention have points of values in their block."""
    if "self_attn" in layer._modules:
        return find_session(layer.self_attn)
    point = next((part for part in layer.mlp.modules() if SEGMENT_ATTRIBUTE in vars(part)), None)
    return None if point is None else find_session(point)


def _mix(
    layer: Any, h_BSD: torch.Tensor, *, angles: tuple[torch.Tensor, torch.Tensor], options: dict[str, Any]
) -> torch.Tensor:
    """Return what attention gives for normed hidden states."""
    out: torch.Tensor
    out, _ = layer.self_attn(hidden_states=h_BSD, past_key_values=None, position_embeddings=angles, **options)
    return out


def _attend(
    layer: Any,
    fusion: _Fusion,
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
    qkv_TC, x_TD = norm_project(x_TD, _norm(layer.input_layernorm, fusion.form), qkv, session=session)
    # The input of the output projection is as wide as the query heads.
    shares, row_gradient = HeadShares(), RowGradient()
    rope = _rope(attention, fusion.form, angles, rows_TC=qkv_TC, num_query_columns=projection.num_inputs)
    heads = split_heads(qkv_TC, rope, shares, row_gradient)
    # As attention layers hand them over: (B, H, S, W).
    q, k, v = (x_THW.view(shape[0], shape[1], *x_THW.shape[1:]).transpose(1, 2) for x_THW in heads)
    out, _ = attend(
        attention,
        q,
        k,
        v,
        mask,
        dropout=attention.attention_dropout if attention.training else 0.0,
        scaling=attention.scaling,
        sliding_window=getattr(
            attention.config if fusion.form.has_config_window else attention, "sliding_window", None
        ),
        softcap=attention.attn_logit_softcapping if fusion.form.has_softcap else None,
        s_aux=getattr(attention, "sinks", None),
        collect=shares.put,
        **options,
    )
    out_TI = out.reshape(x_TD.shape[0], -1)
    if fusion.form.has_gated_heads:
        width, num_heads = rope.form.head_width, rope.form.num_heads
        gate = HeadGateForm(HeadColumns(width, width, num_heads, group_size=1, group_step=2 * width))
        out_TI = gate_heads(out_TI.unflatten(1, (num_heads, width)), qkv_TC, form=gate, row_gradient=row_gradient)
    if fusion.form.has_post_norms:
        return project_norm_add(
            out_TI, x_TD, _norm(layer.post_attention_layernorm, fusion.form), projection, session=session
        )
    return project_add(out_TI, x_TD, projection, session=session)


def _rope(
    attention: Any,
    layer_form: LayerForm,
    angles: tuple[torch.Tensor, torch.Tensor],
    *,
    rows_TC: torch.Tensor,
    num_query_columns: int,
) -> Rope:
    """Return how projections become heads."""
    width, (num_tokens, num_columns) = int(attention.head_dim), rows_TC.shape
    q_norm, k_norm = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
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
