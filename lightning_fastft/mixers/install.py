"""Run every recurrent mixer of a model on each document of a pack separately.

Axes: T tokens of the pack, D model width.
"""

from __future__ import annotations

import ast
import functools
import inspect
import os
import textwrap
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from lightning_fastft.core.errors import BackendError, ShapeError, UnsupportedModelError
from lightning_fastft.core.patcher import ModelPatcher
from lightning_fastft.core.status import Status
from lightning_fastft.hf.caches import has_cache
from lightning_fastft.hf.families import decoder_layers, find_decoder
from lightning_fastft.hf.mixers import MixerFamily, find_mixers, is_mixer, mixer_family
from lightning_fastft.mixers.kernels import check_calls, find_kernels, run_on_kernels, without_kernels
from lightning_fastft.packing.context import BatchContext

STATUS_NAME = "mixers"
# Names under which the context counts its readers.
BY_DOCUMENT, ON_KERNELS = "mixers by document", "mixers on fla"
# Triton reads this when it compiles a tl.dot without an explicit precision.
_FP32_PRODUCTS = "TRITON_F32_DEFAULT"
# Keywords that describe document borders, which the context replaces.
_BORDERS = ("seq_idx", "cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens")


# torch.compile cannot trace the copies of forwards that without_kernels makes.
@torch.compiler.disable
def run_mixer(mixer: Any, family: MixerFamily, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Run a mixer on each document of a packed batch separately; without a context it runs unchanged.

    On a CPU its own forward runs once per document, in plain PyTorch even if kernels are installed. On a GPU it runs
    once, on kernels that take document borders.

    Args:
        mixer: A module that takes hidden states of shape (1, T, D) and keywords, and returns the same shape.
        family: Description of the model's mixers.
        hidden_states: Shape (1, T, D) with a context.
        args: Positional arguments of the mixer; none with a context.
        kwargs: Keyword arguments of the mixer. The context is the keyword ``context`` or the attention mask; tensors of
            shape (1, T, ...) are split with the hidden states.

    Returns:
        The output of the mixer, in pack order.

    Raises:
        ShapeError: With a context, the hidden states are not one row of its tokens, or there is a cache.
        BackendError: With a context, a keyword describes document borders too.
        UnsupportedModelError: The pack is on a GPU, and there is no kernel for the mixer.

    Cost:
        On a CPU one call of the mixer per document, on a GPU one call for the pack; it adds no host sync.
    """
    context, kwargs = _take_context(kwargs)
    own_forward = type(mixer).forward
    is_on_gpu = hidden_states.is_cuda or hidden_states.is_meta
    if not is_on_gpu:
        own_forward = without_kernels(own_forward)
    if context is None:
        return own_forward(mixer, hidden_states, *args, **kwargs)
    _check_packable(mixer, hidden_states, args, kwargs, context=context)
    if is_on_gpu:
        functions = find_kernels(family, is_meta=hidden_states.is_meta)
        context.note_read(ON_KERNELS)
        return run_on_kernels(mixer, functions, hidden_states, context=context, **kwargs)
    context.note_read(BY_DOCUMENT)
    outputs, begin = [], 0
    for length in context.lengths:
        of_document = functools.partial(_slice, begin=begin, length=length, num_tokens=context.num_tokens)
        output = own_forward(mixer, of_document(hidden_states), **{name: of_document(x) for name, x in kwargs.items()})
        # The mixer of Falcon-H1 in transformers 5.17 may drop the axis of a single token.
        outputs.append(output.reshape(1, length, -1))
        begin += length
    return torch.cat(outputs, dim=1)


def install_mixers(model: PreTrainedModel, patcher: ModelPatcher) -> list[Status]:
    """Make every mixer of a model run on each document of a packed batch separately.

    Returns:
        Status "mixers" for a model with mixers, else an empty list.

    Raises:
        UnsupportedModelError: The forward of a mixer was replaced on the instance, or the model is on a GPU and there
            is no kernel for its mixers.

    Cost:
        Host work once per run.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = dict(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
        >>> install_mixers(LlamaForCausalLM(LlamaConfig(**sizes)), ModelPatcher())
        []
    """
    family = mixer_family(model)
    decoder: nn.Module = find_decoder(model)
    mixers = [mixer for layer in decoder_layers(model) for mixer in find_mixers(layer, family)]
    if family is None:
        return []
    if mixers:
        weights = [*mixers[0].parameters()]
        is_meta = any(weight.is_meta for weight in weights)
        is_on_gpu = is_meta or any(weight.is_cuda for weight in weights)
        functions = find_kernels(family, is_meta=is_meta) if is_on_gpu else {}
        for kind in {type(mixer) for mixer in mixers}:
            check_calls(kind, functions)
        # Read the dtype of the largest weight: vectors and adapters may have a wider one.
        if functions and max(mixers[0].parameters(), key=torch.Tensor.numel).dtype is torch.float32:
            _multiply_in_fp32(patcher)
    # transformers builds the mask of mixers for the whole family, even for a model without mixers.
    patcher.add_undo(decoder.register_forward_pre_hook(_hide_mask, with_kwargs=True).remove)
    if not mixers:
        return []
    for mixer in mixers:
        own_forward = vars(mixer).get("forward")
        if getattr(own_forward, "func", None) is run_mixer:
            continue
        if own_forward is not None:
            raise UnsupportedModelError(
                f"The forward of {type(mixer).__name__} was replaced on the instance, so it may mix the documents of a "
                "pack. Undo the replacement before training."
            )
        patcher.set_attribute(mixer, "forward", functools.partial(run_mixer, mixer, family))
    for layer in _silent_layers(decoder, family):
        patcher.add_undo(layer.register_forward_pre_hook(_pass_context_as_mask, with_kwargs=True).remove)
    return [Status(STATUS_NAME, "active", f"{family.kind}, {len(mixers)} {family.class_name}, per document")]


def _multiply_in_fp32(patcher: ModelPatcher) -> None:
    """Multiply fp32 in fp32 precision in Triton's kernels; fla-core leaves it at the default, TF32."""
    before = os.environ.get(_FP32_PRODUCTS)

    def restore() -> None:
        os.environ.pop(_FP32_PRODUCTS, None)
        if before is not None:
            os.environ[_FP32_PRODUCTS] = before

    # TF32x3: three TF32 products per fp32 product.
    os.environ[_FP32_PRODUCTS] = "tf32x3"
    patcher.add_undo(restore)


def _take_context(kwargs: dict[str, Any]) -> tuple[BatchContext | None, dict[str, Any]]:
    """Return the context from the keywords of a mixer, and the other keywords."""
    given = (kwargs.get("context"), kwargs.get("attention_mask"))
    context = next((value for value in given if isinstance(value, BatchContext)), None)
    return context, {name: value for name, value in kwargs.items() if not isinstance(value, BatchContext)}


def _check_packable(
    mixer: nn.Module,
    hidden_states: torch.Tensor,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    context: BatchContext,
) -> None:
    """Raise on a call whose result would differ from separate documents."""
    name = type(mixer).__name__
    if hidden_states.ndim != 3 or hidden_states.shape[:2] != (1, context.num_tokens):
        raise ShapeError(
            f"{name} got hidden states {tuple(hidden_states.shape)} for a pack of {context.num_tokens} tokens: a "
            "packed batch is one row."
        )
    if args or has_cache(kwargs):
        raise ShapeError(f"{name} got a cache with a packed batch; set use_cache=False.")
    borders = [key for key in _BORDERS if kwargs.get(key) is not None]
    if borders:
        raise BackendError(
            f"{name} got {', '.join(borders)} with a batch context, which already has the document borders."
        )


def _slice(value: Any, *, begin: int, length: int, num_tokens: int) -> Any:
    """Return the tokens of one document if a value has a token axis, else the value."""
    if isinstance(value, tuple):
        return tuple(_slice(part, begin=begin, length=length, num_tokens=num_tokens) for part in value)
    if isinstance(value, torch.Tensor) and value.shape[:2] == (1, num_tokens):
        return value.narrow(1, begin, length)
    return value


def _hide_mask(decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Add an axis to the 2-D mask of a packed batch in a forward pre-hook of the decoder.

    For its mixers transformers reads the values of a 2-D mask, which is a host sync.
    """
    mask = kwargs.get("attention_mask")
    if not isinstance(kwargs.get("context"), BatchContext) or not isinstance(mask, torch.Tensor) or mask.ndim != 2:
        return None
    return args, {**kwargs, "attention_mask": mask[:, None]}


def _silent_layers(decoder: nn.Module, family: MixerFamily) -> list[nn.Module]:
    """Return the modules that hold a mixer and do not pass their keywords to it."""
    return [
        parent
        for parent in decoder.modules()
        for name, child in parent.named_children()
        if is_mixer(child, family) and not any(_passes_keywords(kind, name) for kind in type(parent).__mro__)
    ]


def _passes_keywords(kind: type[Any], name: str) -> bool:
    """Return whether a class has a forward of its own that calls ``self.<name>(..., **keywords)``."""
    forward = vars(kind).get("forward")
    if forward is None:
        return False
    tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(forward))))
    return any(
        isinstance(call, ast.Call)
        and ast.unparse(call.func) == f"self.{name}"
        and any(keyword.arg is None for keyword in call.keywords)
        for call in ast.walk(tree)
    )


def _pass_context_as_mask(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Pass the context as the attention mask, in a forward pre-hook of a layer that drops keywords.

    Unlike hooks, arguments also reach the mixer when checkpointing recomputes the layer.
    """
    context = kwargs.get("context")
    return (args, {**kwargs, "attention_mask": context}) if isinstance(context, BatchContext) else None
