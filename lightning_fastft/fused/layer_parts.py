"""Read the products that a fused layer computes itself, or the reason why it cannot be fused."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from peft.tuners.lora.layer import LoraLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import nn

from lightning_fastft.fused.active_adapters import copies_read
from lightning_fastft.fused.delta_mixers import delta_modules, delta_obstacle
from lightning_fastft.fused.dense_weights import DenseWeights
from lightning_fastft.fused.fp8_base import FP8_ATTRIBUTE, in_fp8
from lightning_fastft.fused.fp8_obstacles import adapter_obstacle, gather_obstacle
from lightning_fastft.fused.functions.rows import Norm
from lightning_fastft.fused.joined_copies import join_copies
from lightning_fastft.fused.layer_forms import LAYERS, LayerForm
from lightning_fastft.fused.linear_parts import read_part
from lightning_fastft.fused.linears import FusedLinear, fuse_linears
from lightning_fastft.fused.row_factors import RowFactors
from lightning_fastft.hf.activation_functions import activation_name
from lightning_fastft.kernels.expert_gate.reference import GateForm
from lightning_fastft.kernels.rms_norm.reference import NormForm
from lightning_fastft.mixers.install import run_mixer
from lightning_fastft.moe.low_precision_copy import LowPrecisionCopy

# An instance attribute, so no state_dict has it.
FUSION_ATTRIBUTE = "fastft_fusion"

# Attributes of modules that change what a product or a norm computes; the last two are of PEFT's trained copies.
_SETTINGS = {"p", "training", "compute_dtype", "_disable_adapters", "_active_adapter"}
_RECORDING = "transformers.utils.output_capturing"


class Fusion:
    """State of a fused layer in addition to its modules.

    It keeps the products of the last call and what they were read from. If any of it changes, such as a module, a
    parameter, a hook, the active adapter, its scale or the master of a low-precision copy, the next call reads the
    modules again.

    Args:
        form: Description of the layer.
        dense: Its dense weights.
    """

    def __init__(self, form: LayerForm, dense: DenseWeights) -> None:
        self.form = form
        self.dense = dense
        self._forget()

    def _forget(self) -> None:
        self._parts: Parts | None = None
        self._dtype: torch.dtype | None = None
        self._mappings: list[dict[str, Any]] = []
        self._names: list[str] = []
        self._values: list[Any] = []
        self._modules: list[nn.Module] = []
        self._classes: list[type[Any]] = []
        self._empty: list[Any] = []
        self._weights: list[torch.Tensor] = []
        self._described: list[Any] = []
        self._copies: list[LowPrecisionCopy | RowFactors] = []

    def __reduce__(self) -> tuple[Any, ...]:
        """Keep no products in a copy or pickle, which has modules of its own."""
        return Fusion, (self.form, self.dense)

    def find(self, *, dtype: torch.dtype) -> Parts | None:
        """Return the products for rows of this dtype; None if they must be read.

        Cost:
            About 20 microseconds of the host for a layer with seven adapters.
        """
        is_same = (
            self._parts is not None
            and dtype is self._dtype
            and not any(self._empty)
            and all(map(operator.is_, map(dict.get, self._mappings, self._names), self._values))
            and list(map(type, self._modules)) == self._classes
            and _describe(self._weights) == self._described
            and all(copy.is_current() for copy in self._copies)
        )
        return self._parts if is_same else None

    def keep(self, parts: Parts, layer: Any, *, dtype: torch.dtype) -> None:
        """Keep products that were read from a layer just now.

        Products of a layer with an fp8 base, a gated delta rule or per-layer inputs, and products whose adapters are
        cast for each call, are not kept.
        """
        self._forget()
        form = self.form
        if form.delta_projections or form.has_layer_inputs or FP8_ATTRIBUTE in vars(layer):
            return
        modules, products = _read_modules(layer, form)
        linears = [module._modules[name] for module, names in products for name in names]
        for linear in linears:
            if isinstance(linear, LoraLayer):
                copies = copies_read(linear, dtype=dtype)
                if copies is None:
                    return
                self._copies += copies
                self._watch_adapter(linear)
                modules.append(linear.get_base_layer())
            modules.append(linear)
        self._watch(vars(layer), FP8_ATTRIBUTE)
        for module in dict.fromkeys([layer, *modules]):
            self._watch_module(module, has_hooks=module is not layer)
        self._classes = list(map(type, self._modules))
        self._values = list(map(dict.get, self._mappings, self._names))
        self._described = _describe(self._weights)
        self._parts, self._dtype = parts, dtype

    def _watch_module(self, module: nn.Module, *, has_hooks: bool) -> None:
        """Compare a module whose forward a product replaces."""
        self._modules.append(module)
        self._watch(module._modules, *module._modules)
        self._watch_weights(module, *module._parameters)
        # Any module may get its own forward; only some have the other attributes.
        self._watch(vars(module), "forward", *(_SETTINGS & vars(module).keys()))
        if has_hooks:
            self._empty += [module._forward_hooks, module._forward_pre_hooks]
            self._empty += [module._backward_hooks, module._backward_pre_hooks]

    def _watch_adapter(self, layer: LoraLayer) -> None:
        """Compare what read_adapter reads of a layer."""
        self._empty.append(layer.merged_adapters)
        self._watch(vars(layer), "merged_adapters", "lora_variant", "_disable_adapters", "_active_adapter")
        for setting in (layer.scaling, layer.lora_bias, layer.lora_variant):
            self._watch(setting, *layer.active_adapters)
        for name in layer.active_adapters:
            for side in (layer.lora_A, layer.lora_B, layer.lora_dropout, layer.lora_magnitude_vector):
                self._watch(side._modules, name)
                module = side._modules.get(name)
                if module is not None:
                    self._modules.append(module)
                    self._watch_weights(module, *({"weight"} & module._parameters.keys()))
                    self._watch(vars(module), *({"p"} & vars(module).keys()))
            for side in (layer.lora_A, layer.lora_B):
                if name in side:
                    self._empty += [side[name]._forward_hooks, side[name]._forward_pre_hooks]

    def _watch_weights(self, module: nn.Module, *names: str) -> None:
        """Compare parameters of a module."""
        self._watch(module._parameters, *names)
        weights = [weight for weight in map(module._parameters.get, names) if weight is not None]
        self._weights += weights
        for weight in weights:
            if hasattr(weight, "quant_state"):
                self._watch(vars(weight), "quant_state")

    def _watch(self, mapping: dict[str, Any], *names: str) -> None:
        """Compare entries of a mapping, by identity."""
        self._mappings += [mapping] * len(names)
        self._names += names


def _describe(weights: Sequence[torch.Tensor]) -> list[Any]:
    """Return the properties of weights that decide how a product reads them; only copies depend on addresses."""
    return list(map(operator.attrgetter("dtype", "requires_grad"), weights))


class Parts(NamedTuple):
    """Products and norms of a layer at present.

    Attention without qkv and out, and a feed-forward block without gate_up and down, run as modules. Norms are None
    for a layer without them; those before and after attention come first, then those before and after the block.
    """

    qkv: FusedLinear | None
    out: FusedLinear | None
    gate_up: FusedLinear | None
    down: FusedLinear | None
    norms: tuple[Norm | None, Norm | None]
    post_norms: tuple[Norm | None, Norm | None]
    head_norms: tuple[Norm | None, Norm | None]
    gate: GateForm | None

    @property
    def products(self) -> list[FusedLinear]:
        """The products that the layer computes itself."""
        return [product for product in self[:4] if product is not None]


def read_for_norms(layer: nn.Module) -> Parts | str:
    """Return the products of a layer for rows in the dtype of its norms, or the reason why it cannot be fused."""
    return read_parts(layer, dtype=norm_dtype(layer, form_of(layer)), awaits_copies=True)


def find_parts(layer: Any, *, dtype: torch.dtype) -> Parts | None:
    """Return the products of a fused layer for rows of this dtype, or None if it cannot be fused at present."""
    fusion: Fusion = vars(layer)[FUSION_ATTRIBUTE]
    kept = fusion.find(dtype=dtype)
    if kept is not None:
        return kept
    found = read_parts(layer, dtype=dtype)
    if isinstance(found, str):
        return None
    fusion.keep(found, layer, dtype=dtype)
    return found


def read_parts(
    layer: Any, *, dtype: torch.dtype, awaits_copies: bool = False, awaits_gather: bool = False
) -> Parts | str:
    """Return the products of a layer for rows of this dtype, or the reason why it cannot be fused.

    awaits_copies and awaits_gather are those of ``read_part``.
    """
    fusion: Fusion | None = vars(layer).get(FUSION_ATTRIBUTE)
    form = form_of(layer)
    dense = fusion.dense if fusion is not None else DenseWeights()
    obstacle = _mixer_obstacle(layer, form)
    if obstacle:
        return obstacle
    passed_over, products = _read_modules(layer, form)
    hooked = next((type(module).__name__ for module in passed_over if _has_hooks(module)), None)
    if hooked is not None:
        return f"{hooked} has hooks or a replaced forward, which would be skipped"
    drawing = next((name for name in form.dropouts if not _draws_nothing(layer._modules[name])), None)
    if drawing is not None:
        return f"{drawing} has dropout in training"
    fused_linears: list[FusedLinear] = []
    for place, (module, names) in enumerate(products):
        linears: Any = [module._modules[name] for name in names]
        fused_linear = fuse_linears(
            [
                read_part(linear, dtype=dtype, awaits_copies=awaits_copies, awaits_gather=awaits_gather)
                for linear in linears
            ],
            dense,
        )
        if isinstance(fused_linear, str):
            return fused_linear
        fused_linear = in_fp8(fused_linear, linears, layer=layer, place=place, dtype=dtype)
        if isinstance(fused_linear, str):
            return fused_linear
        fused_linears.append(join_copies(fused_linear, _copies_of_a(linears, dtype=dtype)))
    return _with_norms(fused_linears, layer, form)


def _with_norms(products: Sequence[FusedLinear], layer: Any, form: LayerForm) -> Parts:
    """Return products of a layer, in their order, with what else its fused form reads of its modules."""
    is_mixer_fused, is_block_fused = not has_own_mixer(layer, form), is_known_block(layer, form)
    attention = layer._modules.get("self_attn") if is_mixer_fused else None
    return Parts(
        qkv=products[0] if is_mixer_fused else None,
        out=products[1] if is_mixer_fused else None,
        gate_up=products[-2] if is_block_fused else None,
        down=products[-1] if is_block_fused else None,
        norms=_read_norms(layer, form.norms, form),
        post_norms=_read_norms(layer, form.post_norms, form),
        head_norms=_read_norms(attention, form.head_norms, form),
        gate=GateForm(activation=block_activation(layer, form)) if is_block_fused else None,
    )


def _copies_of_a(linears: Sequence[nn.Module], *, dtype: torch.dtype) -> list[LowPrecisionCopy]:
    """Return the low-precision copies of A of the active adapters of layers that read the same rows."""
    read = [copies_read(linear, dtype=dtype) for linear in linears if isinstance(linear, LoraLayer)]
    # Those of A come first; a disabled layer has none in its part.
    return [copies[0] for copies in read if copies and isinstance(copies[0], LowPrecisionCopy)]


def read_norm(module: Any, form: LayerForm) -> Norm:
    """Return a norm of a layer of this form."""
    # Gemma's norms name their epsilon differently.
    eps = float(module.eps if hasattr(module, "eps") else module.variance_epsilon)
    return Norm(module.weight, NormForm(eps=eps, weight_offset=form.norm_offset, is_weight_wide=form.is_norm_wide))


def _read_norms(module: nn.Module | None, names: Sequence[str], form: LayerForm) -> tuple[Norm | None, Norm | None]:
    """Return the two norms of these names; LFM3's norms after attention and block are an option."""
    found = [None, None] if module is None or not names else [module._modules.get(name) for name in names]
    # PEFT may train a copy of an empty one.
    first, second = (
        None if type(getattr(norm, "original_module", norm)) in (nn.Identity, type(None)) else read_norm(norm, form)
        for norm in found
    )
    return first, second


def linear_modules(layer: Any) -> list[list[nn.Module]]:
    """Return for each product of a layer its linear layers, with PEFT's wrappers."""
    return [[module._modules[name] for name in names] for module, names in _read_modules(layer, form_of(layer))[1]]


def fp8_shapes(layer: nn.Module) -> list[list[torch.Size]]:
    """Return the shapes, (O, I), of the frozen weights of each product of a layer, fused or not, that FSDP2 gathers in
    e4m3 with ``base_compute="fp8"``.
    """
    if own_class(layer).__name__ not in LAYERS or has_own_mixer(layer, form_of(layer)):
        return []
    products: list[list[Any]] = [
        [module.get_base_layer() if isinstance(module, LoraLayer) else module for module in modules]
        for modules in linear_modules(layer)
        if not adapter_obstacle(modules)
    ]
    return [[base.weight.shape for base in bases] for bases in products if not gather_obstacle(bases)]


def _read_modules(layer: Any, form: LayerForm) -> tuple[list[nn.Module], list[tuple[Any, tuple[str, ...]]]]:
    """Return the modules whose forward does not run in a fused call, and the products: modules and names of layers."""
    passed_over = [layer._modules[name] for name in (*form.norms, *form.post_norms, *form.dropouts)]
    if form.has_layer_inputs and layer.hidden_size_per_layer_input:
        passed_over.append(layer.post_per_layer_input_norm)
    modules, products = _mixer_products(layer, form)
    passed_over += modules
    if is_known_block(layer, form):
        block = layer._modules[form.block]
        passed_over += [block, *(block._modules[name] for name in (*form.gate_up, form.down))]
        products += [(block, form.gate_up), (block, (form.down,))]
    copied = [module for module in passed_over if isinstance(module, AuxiliaryTrainingWrapper)]
    return [*passed_over, *(part for module in copied for part in module.modules() if part is not module)], products


def _mixer_obstacle(layer: Any, form: LayerForm) -> str:
    """Return why attention or a gated delta rule cannot be fused; "" if it can, and for any other mixer."""
    delta_rule = find_delta_rule(layer, form)
    attention = layer._modules.get("self_attn")
    if isinstance(attention, AuxiliaryTrainingWrapper) and not has_own_mixer(layer, form):
        return "modules_to_save trains a copy of self_attn"
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
    is_replaced = own_forward is not None and getattr(own_forward, "func", None) is not run_mixer
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
    return LAYERS[own_class(layer).__name__] if fusion is None else fusion.form


def own_class(layer: nn.Module) -> type[Any]:
    """Return the class of a layer in transformers, fused or not."""
    found: type[Any] = getattr(type(layer), "own_class", type(layer))
    return found


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
