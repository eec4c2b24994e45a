"""Rotary scaling that depends on length (longrope, dynamic), computed for each document of a pack separately.

Axes: T tokens of the pack, S documents (S1 = S + 1 offsets).
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from lightning_fastft.core.errors import BackendError, UnsupportedModelError
from lightning_fastft.core.patcher import ModelPatcher
from lightning_fastft.core.status import Status
from lightning_fastft.hf.families import decoder_layers, depends_on_length, find_decoder, length_scalings
from lightning_fastft.packing.context import BatchContext

STATUS_NAME = "rotary scaling"
# They are not called, so they have no hooks.
_LISTS = (nn.ModuleList, nn.ModuleDict)
# Number of document lengths whose "dynamic" frequencies are cached; each entry is half a head wide.
_MOST_LENGTHS = 4096


class DocumentRotary:
    """Compute the angles of a packed batch per document; without a context the model's own forward runs.

    transformers chooses the frequencies of a row by its largest position, so the angles of a short document would
    depend on the other documents. The formula is the model's own: it runs on a copy of the module that shares
    everything except the frequencies.

    Args:
        rotary: A rotary embedding whose forward transformers decorates with ``dynamic_rope_update``.
    """

    def __init__(self, rotary: nn.Module) -> None:
        self._rotary: Any = rotary
        self._context: BatchContext | None = None
        self._long_frequencies: dict[tuple[str | None, torch.device], torch.Tensor] = {}
        self._dynamic_frequencies: dict[tuple[str | None, int], torch.Tensor] = {}

    def enter(self, owner: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Store the context of this call, in a forward pre-hook of the module that calls the embedding."""
        context = kwargs.get("context")
        self._context = context if isinstance(context, BatchContext) else None

    def leave(self, owner: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Drop the context, in a forward hook of the same module."""
        self._context = None

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor, layer_type: str | None = None) -> Any:
        """Return the result of the rotary embedding, with the frequencies of each separate document.

        Raises:
            BackendError: The result has no token axis at the expected position.

        Cost:
            For longrope up to two calls of the model's formula; for dynamic one call for the pack and one per document
            above the limit.
        """
        rope_type = self._rotary.rope_type if layer_type is None else self._rotary.rope_type[layer_type]
        context = self._context
        if context is None or position_ids.shape[-1] != context.num_tokens or not depends_on_length(rope_type):
            return type(self._rotary).forward(self._rotary, x, position_ids, **_layer_keyword(layer_type))
        with torch.no_grad():
            blend = self._dynamic_angles if "dynamic" in rope_type else self._longrope_angles
            if context.part is None:
                return blend(x, position_ids, context, layer_type)
            # The formula may depend on positions in other parts of the pack.
            whole, rows = context.whole, context.part.rows
            angles = blend(x, whole.position_T[None], whole, layer_type)
            return _map(lambda angle, _: angle[..., rows, :], angles, angles)

    def _longrope_angles(
        self, x: torch.Tensor, position_ids: torch.Tensor, context: BatchContext, layer_type: str | None
    ) -> Any:
        config = self._rotary.config.rope_parameters
        limit = int((config if layer_type is None else config[layer_type])["original_max_position_embeddings"])
        self._check_prefixes(context, limit=limit)
        # The limit is one of positions, as in transformers. Images under M-RoPE have fewer positions than tokens.
        num_long = sum(length > limit for length in context.position_lengths)
        # The model's formula may use the largest position itself (phimoe scales by it). The clamp changes no position
        # of a short document.
        positions = position_ids if num_long == context.num_documents else position_ids.clamp(max=limit - 1)
        short = functools.partial(self._angles, x, positions, layer_type, self._original_inv_freq(layer_type))
        long = functools.partial(
            self._angles, x, position_ids, layer_type, self._long_inv_freq(x.device, limit, layer_type)
        )
        if num_long in (0, context.num_documents):
            return long() if num_long else short()
        # From pageable memory, so this is not a host sync.
        is_long_S = torch.tensor(context.position_lengths).to(x.device, non_blocking=True) > limit
        is_long_T1 = is_long_S[context.document_T][:, None]
        return _map(lambda of_long, of_short: torch.where(is_long_T1, of_long, of_short), long(), short())

    def _check_prefixes(self, context: BatchContext, *, limit: int) -> None:
        """Raise on prefixes whose completions would need different angles."""
        if context.has_prefixes and context.max_length > limit:
            raise UnsupportedModelError(
                f"{type(self._rotary).__name__} scales rotary positions by length from {limit} tokens on, and a prompt "
                f"with a completion has {context.max_length}, so prompts cannot be shared. Set "
                "PackedDataModule(share_prompts=False), or collate(..., shares_prompts=False)."
            )

    def _dynamic_angles(
        self, x: torch.Tensor, position_ids: torch.Tensor, context: BatchContext, layer_type: str | None
    ) -> Any:
        limit = int(self._rotary.original_max_seq_len)
        self._check_prefixes(context, limit=limit)
        whole = self._angles(x, position_ids, layer_type, self._original_inv_freq(layer_type))
        ends = itertools.accumulate(context.lengths)
        documents = zip(context.lengths, context.position_lengths, ends)
        spans = [(end - length, end, longest) for length, longest, end in documents if longest > limit]
        if not spans:
            return whole
        # One small copy for all documents from pageable memory, which the driver stages, so this is not a host sync.
        table = torch.stack([self._dynamic_inv_freq(longest, layer_type) for _, _, longest in spans]).to(
            x.device, non_blocking=True
        )
        for (begin, end, _), inv_freq in zip(spans, table):
            own = self._angles(x, position_ids[..., begin:end], layer_type, inv_freq)
            _map(functools.partial(_write_rows, begin=begin), whole, own)
        return whole

    def _angles(
        self, x: torch.Tensor, position_ids: torch.Tensor, layer_type: str | None, inv_freq: torch.Tensor
    ) -> Any:
        """Run the model's formula with these frequencies; the module itself does not change."""
        name = _prefixed("inv_freq", layer_type)
        twin = object.__new__(type(self._rotary))
        state = {key: value for key, value in vars(self._rotary).items() if key not in ("forward", name)}
        twin.__dict__ = {**state, "_buffers": {**self._rotary._buffers, name: inv_freq}}
        angles = inspect.unwrap(type(self._rotary).forward)(twin, x, position_ids, **_layer_keyword(layer_type))
        found = _map(lambda angle, _: angle.ndim >= 2 and angle.shape[-2] == position_ids.shape[-1], angles, angles)
        if not all(found if isinstance(found, tuple) else (found,)):
            raise BackendError(
                f"{type(self._rotary).__name__} scales positions by length, and its angles have no token axis before "
                "the last axis, so packed documents would not get their own angles. Train this model with one document "
                "per row."
            )
        return angles

    def _long_inv_freq(self, device: torch.device, limit: int, layer_type: str | None) -> torch.Tensor:
        key = (layer_type, device)
        if key not in self._long_frequencies:
            with torch.inference_mode(False):
                inv_freq, _ = ROPE_INIT_FUNCTIONS["longrope"](
                    self._rotary.config, device, seq_len=limit + 1, **_layer_keyword(layer_type)
                )
            self._long_frequencies[key] = inv_freq
        return self._long_frequencies[key]

    def _dynamic_inv_freq(self, length: int, layer_type: str | None) -> torch.Tensor:
        key = (layer_type, length)
        if key not in self._dynamic_frequencies:
            if len(self._dynamic_frequencies) >= _MOST_LENGTHS:
                self._dynamic_frequencies.clear()
            # Pass a tensor like transformers; a number would round the base differently.
            with torch.inference_mode(False):
                compute = ROPE_INIT_FUNCTIONS["dynamic"]
                inv_freq, _ = compute(
                    self._rotary.config, torch.device("cpu"), seq_len=torch.tensor(length), **_layer_keyword(layer_type)
                )
            self._dynamic_frequencies[key] = inv_freq
        return self._dynamic_frequencies[key]

    def _original_inv_freq(self, layer_type: str | None) -> torch.Tensor:
        value: torch.Tensor = getattr(self._rotary, _prefixed("original_inv_freq", layer_type))
        # In some versions this is a plain attribute, which does not move with the model.
        own: torch.Tensor = getattr(self._rotary, _prefixed("inv_freq", layer_type))
        return value.to(own.device, non_blocking=True)


def install_document_rotary(model: PreTrainedModel, patcher: ModelPatcher) -> list[Status]:
    """Replace rotary embeddings whose angles depend on length by ``DocumentRotary``.

    Returns:
        Status "rotary scaling" if angles depend on length, else an empty list.

    Raises:
        UnsupportedModelError: The embedding is inside a decoder layer, or its forward was replaced on the instance.
    """
    decoder: nn.Module = find_decoder(model)
    inside_layers = {id(module) for layer in decoder_layers(model) for module in layer.modules()}
    kinds: set[str] = set()
    for owner in decoder.modules():
        for rotary in _called_by(owner):
            switching = _switching_types(rotary)
            own_forward = vars(rotary).get("forward")
            if not switching or isinstance(getattr(own_forward, "__self__", None), DocumentRotary):
                continue
            if id(rotary) in inside_layers or own_forward is not None:
                place = (
                    "inside its decoder layers"
                    if own_forward is None
                    else "with a forward that was replaced on the instance"
                )
                raise UnsupportedModelError(
                    f"{type(model).__name__} ({model.config.model_type}) scales rotary positions by length "
                    f"({', '.join(sorted(switching))}) {place}, "
                    "so a document in a pack would get wrong angles. Train this model with one document per row."
                )
            document_rotary = DocumentRotary(rotary)
            patcher.set_attribute(rotary, "forward", document_rotary.forward)
            for handle in (
                owner.register_forward_pre_hook(document_rotary.enter, with_kwargs=True),
                owner.register_forward_hook(document_rotary.leave, always_call=True),
            ):
                patcher.add_undo(handle.remove)
            kinds |= switching
    return (
        [Status(STATUS_NAME, "active", f"{', '.join(sorted(kinds))}: factors by the length of each document")]
        if kinds
        else []
    )


def _called_by(owner: nn.Module) -> Iterator[nn.Module]:
    """Yield the children of a module, and those of its lists; nothing for a list itself."""
    if isinstance(owner, _LISTS):
        return
    for child in owner.children():
        yield from child.children() if isinstance(child, _LISTS) else (child,)


def check_row_angles(module: nn.Module, context: BatchContext) -> None:
    """Raise on a pack for an unpatched model whose rotary angles depend on the longest document.

    Raises:
        UnsupportedModelError: A document exceeds the length from which the angles change.
    """
    config = getattr(module, "config", None)
    for rope_type, scaling in length_scalings(config):
        limit = scaling.get("original_max_position_embeddings") or getattr(config, "max_position_embeddings", 0)
        if context.max_length > limit:
            raise UnsupportedModelError(
                f"{type(module).__name__} scales rotary positions by length ({rope_type}) from {limit} tokens on, and "
                f"the pack has a document of {context.max_length}: the other documents would get its angles. "
                "attn_implementation='fastft' alone does not patch this; use Trainer(strategy=\"fastft\") or "
                "Trainer(callbacks=[PackedTraining()])."
            )


def forget_lengths(model: nn.Module) -> None:
    """Let rotary embeddings of type "dynamic" choose the frequencies of the next row by its own length.

    transformers keeps those of the longest row so far until a row is shorter than the limit.
    """
    for rotary in model.modules():
        if not _switching_types(rotary):
            continue
        types: Any = rotary.rope_type
        for layer_type, kind in (types if isinstance(types, dict) else {None: types}).items():
            if isinstance(kind, str) and "dynamic" in kind:
                name = _prefixed("inv_freq", layer_type)
                original: torch.Tensor = getattr(rotary, _prefixed("original_inv_freq", layer_type))
                rotary.register_buffer(name, original.to(getattr(rotary, name).device), persistent=False)
                setattr(rotary, _prefixed("max_seq_len_cached", layer_type), rotary.original_max_seq_len)


def _switching_types(module: nn.Module) -> set[str]:
    """Return the rotary types of a module that depend on length; an empty set for other modules."""
    rope_type = getattr(module, "rope_type", None)
    types = set(rope_type.values()) if isinstance(rope_type, dict) else {rope_type}
    found = set(filter(depends_on_length, types))
    # Without transformers' decorator the frequencies never change.
    forward = type(module).forward
    return found if found and inspect.unwrap(forward) is not forward else set()


def _map(function: Callable[[Any, Any], Any], one: Any, other: Any) -> Any:
    return tuple(map(function, one, other)) if isinstance(one, tuple) else function(one, other)


def _write_rows(whole: torch.Tensor, own: torch.Tensor, *, begin: int) -> None:
    whole.narrow(-2, begin, own.shape[-2]).copy_(own)


def _prefixed(name: str, layer_type: str | None) -> str:
    return name if layer_type is None else f"{layer_type}_{name}"


def _layer_keyword(layer_type: str | None) -> dict[str, str]:
    return {} if layer_type is None else {"layer_type": layer_type}
