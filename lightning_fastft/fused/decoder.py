"""Fused decoder layers: subclasses of transformers' layers that run as a few autograd Functions.

Names, parameters and files do not change.

Axes: B rows, S positions, T = B * S tokens, D model width, H query heads, G key/value heads, W head width.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from lightning_fastft.activations.segments import Session, unwatched
from lightning_fastft.activations.values import find_session
from lightning_fastft.core.autocast import is_autocast_on
from lightning_fastft.fused.attention import attend_layer
from lightning_fastft.fused.delta_mixers import mix_delta
from lightning_fastft.fused.fp8_base import refresh_written, refuse_own_forward
from lightning_fastft.fused.functions.feed_forward import feed_forward_between_norms, norm_feed_forward
from lightning_fastft.fused.functions.rows import norm_rows
from lightning_fastft.fused.layer_forms import LayerForm
from lightning_fastft.fused.layer_parts import (
    FUSION_ATTRIBUTE,
    Parts,
    find_delta_rule,
    find_parts,
    form_of,
    has_own_mixer,
    read_norm,
)
from lightning_fastft.hf.caches import has_cache
from lightning_fastft.packing.context import BatchContext
from lightning_fastft.patches.attention import NAME as ATTENTION_NAME

# Also an instance attribute: the recordings of the layer, set by lightning_fastft.graphs.
GRAPH_ATTRIBUTE = "fastft_layer_graph"

_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


class FusedLayer:
    """The forward of a decoder layer as a few Functions; all other calls run the forward of the layer's own class.

    A layer that FSDP2 sharded stays in the model after the run. Without a ``Fusion`` it runs its own class's forward.
    """

    # In transformers.
    own_class: type[nn.Module]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer, or its graph; overridden because transformers begins checkpointing in ``__call__``."""
        graph = vars(self).get(GRAPH_ATTRIBUTE)
        run = super().__call__  # type: ignore[misc]
        if graph is None:
            return run(*args, **kwargs)
        refresh_written(self)  # type: ignore[arg-type]
        return graph.call(run, *args, **kwargs)

    def forward(
        self,
        hidden_states: torch.Tensor,
        *args: Any,
        attention_mask: Any = None,
        position_ids: torch.Tensor | None = None,
        use_cache: bool | None = False,
        position_embeddings: Any = None,
        per_layer_input: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Return the hidden states after the layer; arguments and shapes as in the layer's own class."""
        layer: Any = self
        if args and form_of(layer).has_layer_inputs:
            (per_layer_input,) = args
        elif args:
            (attention_mask,) = args
        session = find_session(layer)
        with unwatched(session):
            parts = _read_call(layer, hidden_states, position_embeddings, kwargs)
        if parts is None:
            refuse_own_forward(layer)
            options = {
                "attention_mask": attention_mask, "position_ids": position_ids,
                "position_embeddings": position_embeddings, **kwargs,
            }  # fmt: skip
            # Layers without these arguments (Gemma's) would pass them to attention.
            options |= {"use_cache": use_cache} if use_cache else {}
            options |= {} if per_layer_input is None else {"per_layer_input": per_layer_input}
            return super().forward(hidden_states, **options)  # type: ignore[misc]
        form = vars(layer)[FUSION_ATTRIBUTE].form
        # Outputs are multiplied by it before they are added.
        factor = float(layer.residual_multiplier) if form.has_multiplier else 1.0
        x_TD = hidden_states.reshape(-1, hidden_states.shape[-1])
        if parts.qkv is None or parts.out is None:
            options = {"attention_mask": attention_mask, "position_ids": position_ids, **kwargs}
            mix = functools.partial(_mix, layer, angles=position_embeddings, options=options)
            x_TD = _run_module(mix, parts, 0, x_TD, shape=hidden_states.shape, factor=factor, session=session)
        elif (delta_rule := find_delta_rule(layer, form)) is not None:
            with unwatched(session):
                x_TD = mix_delta(
                    delta_rule, x_TD, norm=parts.norms[0], projections=parts.qkv, last=parts.out,
                    context=kwargs["context"], session=session,
                )  # fmt: skip
        else:
            with unwatched(session):
                x_TD = attend_layer(
                    layer.self_attn, form, parts, x_TD, shape=hidden_states.shape, angles=position_embeddings,
                    mask=attention_mask, options=kwargs, factor=factor, session=session,
                )  # fmt: skip
        shape, block = hidden_states.shape, layer._modules.get(form.block)
        x_BSD = _feed_forward(block, parts, x_TD, shape=shape, factor=factor, session=session).view(shape)
        return _add_layer_inputs(x_BSD, layer, form, per_layer_input) if form.has_layer_inputs else x_BSD

    def __reduce__(self) -> tuple[Any, ...]:
        """Create the class again in a copied or pickled layer, because pickle cannot find classes made at run time."""
        return _new_instance, (fused_class, self.own_class), vars(self)


class FusedNorm:
    """The forward of an RMSNorm as one kernel, mixed in before the norm's own class."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return the normed rows; shape as in the norm's own class."""
        norm: Any = self
        if not _computes_as_is(hidden_states):
            return super().forward(hidden_states)  # type: ignore[misc]
        x_TD = hidden_states.reshape(-1, hidden_states.shape[-1])
        return norm_rows(x_TD, read_norm(norm, vars(norm)[FUSION_ATTRIBUTE].form))[0].view(hidden_states.shape)

    def __reduce__(self) -> tuple[Any, ...]:
        """Create the class again in a copied or pickled norm."""
        return _new_instance, (fused_norm_class, type(self).__mro__[2]), vars(self)


@functools.cache
def fused_class(old: type[Any]) -> type[nn.Module]:
    """Return the fused subclass of a decoder layer's class, made once."""
    return type(
        f"Fused{old.__name__}",
        (FusedLayer, old),
        {"__doc__": f"transformers' {old.__name__} as a few fused Functions.", "own_class": old},
    )


@functools.cache
def fused_norm_class(old: type[Any]) -> type[nn.Module]:
    """Return the fused subclass of a norm's class, made once."""
    return type(f"Fused{old.__name__}", (FusedNorm, old), {"__doc__": f"transformers' {old.__name__} as one kernel."})


def _new_instance(make_class: Callable[[type[Any]], type[nn.Module]], old: type[Any]) -> nn.Module:
    new_class = make_class(old)
    return new_class.__new__(new_class)


def _computes_as_is(x: torch.Tensor) -> bool:
    """Return whether a call computes in the dtype of its rows, and outside of torch.compile."""
    return x.dtype in _DTYPES and not is_autocast_on(x.device.type) and not torch.compiler.is_compiling()


def _read_call(layer: Any, x: torch.Tensor, angles: object, options: dict[str, Any]) -> Parts | None:
    """Return the products of a layer for one call, or None if the layer's own forward must run."""
    if FUSION_ATTRIBUTE not in vars(layer):
        return None
    if has_cache(options) or not _computes_as_is(x):
        return None
    form = form_of(layer)
    if find_delta_rule(layer, form) is not None:
        # Without a context the mixer may read a mask, a cache, or rows with document borders that only it knows.
        context = options.get("context")
        if not isinstance(context, BatchContext) or x.shape[:2] != (1, context.num_tokens):
            return None
    elif not has_own_mixer(layer, form):
        config = layer.self_attn.config
        asks_for_weights = options.get("output_attentions") or getattr(config, "output_attentions", False)
        if asks_for_weights or (angles is None and not form.has_layers_without_angles):
            return None
        if config._attn_implementation != ATTENTION_NAME:
            return None
        # Queries of later positions are scaled.
        num_unscaled = config.rope_parameters["original_max_position_embeddings"] if form.scales_late_queries else 0
        if num_unscaled and _longest(x, options) > num_unscaled:
            return None
    return find_parts(layer, dtype=x.dtype)


def _longest(x_BSD: torch.Tensor, options: dict[str, Any]) -> int:
    """Return an upper bound of the positions of a call: the longest document of a pack, or the width of padded rows."""
    context = options.get("context")
    return context.max_length if isinstance(context, BatchContext) else x_BSD.shape[1]


def _run_module(
    run: Callable[[torch.Tensor], Any],
    parts: Parts,
    place: int,
    x_TD: torch.Tensor,
    *,
    shape: torch.Size,
    factor: float,
    session: Session | None,
) -> torch.Tensor:
    """Return the residual stream after a mixer (place 0) or a block (place 1) that runs as a module."""
    norm, post_norm = parts.norms[place], parts.post_norms[place]
    h_TD = x_TD
    if norm is not None:
        with unwatched(session):
            h_TD, x_TD = norm_rows(x_TD, norm)
    out = run(h_TD.view(shape))
    # Some blocks also return the scores of their router.
    out_TD = (out[0] if isinstance(out, tuple) else out).reshape(x_TD.shape)
    if post_norm is not None:
        out_TD = norm_rows(out_TD, post_norm)[0]
    return torch.add(x_TD, out_TD, alpha=factor)


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
        x_BSD = x_BSD + norm_rows(out_TD, read_norm(layer.post_per_layer_input_norm, form))[0].view(x_BSD.shape)
    # The scalar may be in another dtype.
    return (x_BSD * layer.layer_scalar).to(x_BSD.dtype)


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
        out: torch.Tensor = layer.conv(hidden_states=h_BSD, **options)
        return out
    out, _ = layer.self_attn(hidden_states=h_BSD, position_embeddings=angles, **options)
    return out


def _feed_forward(
    block: Any, parts: Parts, x_TD: torch.Tensor, *, shape: torch.Size, factor: float, session: Session | None
) -> torch.Tensor:
    """Return the residual stream after the feed-forward block, shape (T, D)."""
    gate_up, down, gate, norm = parts.gate_up, parts.down, parts.gate, parts.norms[1]
    if gate_up is None or down is None:
        return _run_module(block, parts, 1, x_TD, shape=shape, factor=factor, session=session)
    assert gate is not None
    with unwatched(session):
        if parts.post_norms[1] is not None:
            return feed_forward_between_norms(
                x_TD, norm, gate_up, down, parts.post_norms[1], form=gate, session=session
            )
        assert norm is not None
        return norm_feed_forward(x_TD, norm, gate_up, down, form=gate, factor=factor, session=session)
