"""Model families that packed attention supports, reasons against others, and functions that find parts of a model."""

from __future__ import annotations

import ast
import functools
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from types import MappingProxyType
from typing import Any, TypeGuard

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from lightning_fastft.core.errors import UnsupportedModelError
from lightning_fastft.hf.mixers import MIXERS, find_mixers, mixer_family
from lightning_fastft.hf.sharding.class_names import unsharded_class
from lightning_fastft.hf.trained_copies import find_copied_mixer

# What to do with a model that cannot be trained on packed documents.
ADVICE = (
    "Use attention='one_by_one' of FastFTStrategy, FastFTDDPStrategy or PackedTraining, which runs documents one at a "
    "time with the model's own attention. It does not work with sharded models (FSDP)."
)
_PLAIN = ("tiled", "varlen", "cudnn", "flex", "sdpa", "reference")
_WIDE_KEYS = ("varlen", "flex", "sdpa", "reference")
_SINKS = ("tiled", "varlen", "flex", "reference")
_SOFTCAPPED = ("flex", "reference")
# Flash kernels support heads of up to 256 columns. "auto" chooses per layer, so narrower layers still use them.
_VERY_WIDE_HEADS = ("flex", "sdpa", "reference")

# model_type of the text configuration -> backends that compute it exactly. Tests compare packed with one-by-one results
# for each.
FAMILIES = MappingProxyType(
    {
        "llama": _PLAIN,
        "mistral": _PLAIN,
        "qwen2": _PLAIN,
        "qwen3": _PLAIN,
        "phi3": _PLAIN,
        "gemma2": _SOFTCAPPED,
        "gemma3_text": _PLAIN,
        "gemma4_text": _VERY_WIDE_HEADS,
        "gpt_oss": _SINKS,
        "qwen3_moe": _PLAIN,
        "mixtral": _PLAIN,
        "olmoe": _PLAIN,
        "deepseek_v3": _WIDE_KEYS,
        "glm4_moe": _PLAIN,
        "mellum": _PLAIN,
        "granite": _PLAIN,
        "smollm3": _PLAIN,
        # Hybrids: attention and recurrent mixers (hf/mixers.py).
        "lfm2": _PLAIN,
        "lfm2_moe": _PLAIN,
        "lfm3": _PLAIN,
        "qwen3_next": _PLAIN,
        "qwen3_5_text": _PLAIN,
        "qwen3_5_moe_text": _PLAIN,
        "lara_mini": _PLAIN,
        "olmo_hybrid": _PLAIN,
        "kimi_linear": _WIDE_KEYS,
        "bailing_hybrid": _WIDE_KEYS,
        "nemotron_h": _PLAIN,
        "granitemoehybrid": _PLAIN,
        "falcon_h1": _PLAIN,
        "bamba": _PLAIN,
        "zamba2": _PLAIN,
        "jamba": _PLAIN,
    }
)

_REFUSED = MappingProxyType({"doge": "its attention makes a mask of its own from the values of each token"})
# For chunked attention the forward raises on a document longer than a chunk.
_KNOWN_LAYER_TYPES = frozenset({"full_attention", "sliding_attention", "chunked_attention", "moe", "mlp"})
# Layers with a mixer, supported if the table of mixers has the family.
_MIXER_LAYER_TYPES = frozenset({"linear_attention", "conv", "hybrid"})
# Layers with an indexer, which chooses all keys of a short document (patches/carriers.py).
_INDEXED_LAYER_TYPES = frozenset({"indexed_attention", "deepseek_sparse_attention"})
# KimiLinearAttention is the softmax attention of a hybrid.
_MIXER = re.compile(
    r"Mamba|DeltaNet|DeltaAttention|ShortConv|RecurrentBlock|Lightning|SSM|Rwkv|xLSTM|mLSTM|(?<!Kimi)LinearAttention"
)
_FOREIGN_KEYWORD = re.compile(
    r"attention_interface\((?:[^()]|\([^()]*\))*\b(indices|block_indices|position_bias|sinks)="
)


def find_causal_models(root: nn.Module) -> list[tuple[str, PreTrainedModel]]:
    """Return the outermost causal language models inside a module, with their dotted names.

    They may be inside LightningModules, adapters and wrappers; a model inside another model belongs to it. Encoders and
    encoder-decoders are skipped.

    Example:
        >>> find_causal_models(nn.Linear(2, 2))
        []
    """
    return [(name, model) for name, model in _find_models(root) if _is_causal(model)]


def find_compiled(root: nn.Module) -> str:
    """Return what torch.compile compiles together with a causal language model inside root; "" for nothing."""
    models = [model for _, model in find_causal_models(root)]
    # Not imported here: without it nothing is compiled.
    dynamo = sys.modules.get("torch._dynamo")
    for name, module in root.named_modules():
        # Lightning unwraps a compiled LightningModule, and keeps how it was compiled.
        is_compiled = (
            (dynamo is not None and isinstance(module, dynamo.OptimizedModule))
            or module._compiled_call_impl is not None
            or getattr(module, "_compiler_ctx", None) is not None
        )
        if is_compiled and any(part is model for model in models for part in module.modules()):
            return name or type(module).__name__
    return ""


def find_other_models(root: nn.Module) -> list[PreTrainedModel]:
    """Return the outermost transformers models inside a module that are not causal language models: classifiers,
    encoders, encoder-decoders.
    """
    return [model for _, model in _find_models(root) if not _is_causal(model)]


def _find_models(root: nn.Module) -> list[tuple[str, PreTrainedModel]]:
    """Return the outermost transformers models inside a module, with their dotted names."""
    found: list[tuple[str, PreTrainedModel]] = []

    def visit(module: nn.Module, name: str) -> None:
        if isinstance(module, PreTrainedModel):
            found.append((name, module))
            return
        for child_name, child in module.named_children():
            visit(child, f"{name}.{child_name}" if name else child_name)

    visit(root, "")
    return found


def _is_causal(model: PreTrainedModel) -> bool:
    return bool(model.can_generate()) and not getattr(model.config, "is_encoder_decoder", False)


def find_decoder(model: PreTrainedModel) -> nn.Module:
    """Return the module that holds the decoder layers of the text part.

    It is transformers' own answer. If that is the model itself, it is the submodule with the token embedding (llama4,
    mllama).
    """
    decoder: nn.Module = model.get_decoder()
    embedding = model.get_input_embeddings()
    if decoder is not model:
        return decoder
    inner = [
        child for child in decoder.children() if child is not embedding and any(p is embedding for p in child.modules())
    ]
    return inner[0] if len(inner) == 1 else decoder


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """Return the decoder layers of the text part, in order.

    Raises:
        UnsupportedModelError: No list of layers is found.
    """
    decoder = find_decoder(model)
    for name in ("layers", "h", "blocks"):
        layers = getattr(decoder, name, None)
        if isinstance(layers, nn.ModuleList) and len(layers):
            return list(layers)
    raise UnsupportedModelError(
        f"{type(model).__name__} ({model.config.model_type}): its decoder {type(decoder).__name__} has no list of "
        "layers."
    )


def tower_parameters(root: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of vision and audio towers and projectors of every causal language model inside root.

    Example:
        >>> tower_parameters(nn.Linear(2, 2))
        []
    """
    found = []
    for _, model in find_causal_models(root):
        if model.config.get_text_config(decoder=True) is not model.config:
            text = {id(part) for part in (*model.get_decoder().parameters(), *_head_parameters(model))}
            found += [parameter for parameter in model.parameters() if id(parameter) not in text]
    return found


def _head_parameters(model: PreTrainedModel) -> Iterator[nn.Parameter]:
    for module in (model.get_output_embeddings(), model.get_input_embeddings()):
        if module is not None:
            yield from module.parameters()


def is_on_interface(module: nn.Module) -> bool:
    """Return whether a module holds experts that transformers dispatches through its ExpertsInterface.

    Example:
        >>> is_on_interface(nn.Linear(2, 2))
        False
    """
    names = ("num_experts", "is_transposed", "is_concatenated", "has_bias", "has_gate", "config", "down_proj")
    return hasattr(type(module), "_apply_gate") and all(hasattr(module, name) for name in names)


def text_config_key(model: PreTrainedModel) -> str:
    """Return the attribute of a composite configuration that holds the text configuration; an empty string if the
    configuration is not composite.
    """
    text = model.config.get_text_config(decoder=True)
    if text is model.config:
        return ""
    for key in model.config.sub_configs:
        if getattr(model.config, key, None) is text:
            return key
    raise UnsupportedModelError(
        f"{type(model).__name__} ({model.config.model_type}): its text configuration is nested deeper than one level."
    )


def check_servable(model: PreTrainedModel) -> None:
    """Raise on a model whose packed documents would not be exact.

    Families outside FAMILIES pass if no obstacle is found. The forward raises on obstacles that only it can see (a
    layer's own mask, a window that the layer does not pass).

    Raises:
        UnsupportedModelError: The family cannot be packed, or PEFT's modules_to_save trains a copy of attention or of
            a recurrent mixer; the message has the reason.
    """
    reason = find_copied_mixer(find_decoder(model), mixer_family(model)) or _find_obstacle(model)
    if reason:
        raise UnsupportedModelError(
            f"{unsharded_class(model).__name__} ({model.config.model_type}) cannot be trained on packed documents: "
            f"{reason}. {ADVICE} Tested families: {', '.join(FAMILIES)}."
        )


def _find_obstacle(model: PreTrainedModel) -> str:
    """Return why a model cannot be packed; an empty string if no obstacle is found."""
    config = model.config.get_text_config(decoder=True)
    if config.model_type in _REFUSED:
        return _REFUSED[config.model_type]
    if getattr(config, "is_encoder_decoder", False) or getattr(config, "is_causal", True) is False:
        return "its attention is not causal"
    if getattr(config, "use_bidirectional_attention", None) in (True, "all"):
        return "use_bidirectional_attention is set in its configuration, so its attention is not causal"
    decoder = find_decoder(model)
    known = _KNOWN_LAYER_TYPES | (_MIXER_LAYER_TYPES if mixer_family(model) else frozenset())
    if find_indexers(decoder):
        known |= _INDEXED_LAYER_TYPES
    strange = sorted(set(getattr(config, "layer_types", None) or ()) - known)
    if strange:
        return (
            f"it has layers of type {', '.join(strange)}, which carry state from one document into the next or "
            "choose keys by themselves"
        )
    served = {id(part) for mixer in find_mixers(decoder, mixer_family(model)) for part in mixer.modules()}
    mixers = sorted(
        {
            type(module).__name__
            for module in _text_modules(decoder)
            if (_MIXER.search(type(module).__name__) or isinstance(module, nn.Conv1d))
            # Some layer classes have the name of the mixer inside them.
            and not any(id(part) in served for part in module.modules())
        }
    )
    if mixers:
        return f"{', '.join(mixers)} carries state from one document into the next"
    return _find_obstacle_in_source(decoder) or _find_own_loss(model)


def _text_modules(decoder: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules of a decoder, without models inside it such as vision and audio towers (phi4_multimodal)."""
    yield decoder
    for child in decoder.children():
        if not isinstance(child, PreTrainedModel):
            yield from _text_modules(child)


def _find_obstacle_in_source(decoder: nn.Module) -> str:
    """Return an obstacle in the source text of a model; like transformers, read there whether it uses the attention
    interface.
    """
    kinds = (unsharded_class(module) for module in _text_modules(decoder))
    for name in sorted({kind.__module__ for kind in kinds if "Attention" in kind.__name__}):
        try:
            source = inspect.getsource(sys.modules[name])
        except (KeyError, OSError, TypeError):
            return (
                f"the source text of {name} cannot be read, so it is unknown whether it uses transformers' "
                "attention interface"
            )
        if "ALL_ATTENTION_FUNCTIONS.get_interface(" not in source:
            return "its attention is not on transformers' attention interface"
        foreign = _FOREIGN_KEYWORD.search(source)
        if foreign and not (foreign.group(1) == "indices" and find_indexers(decoder)):
            return (
                f"its attention layers pass {foreign.group(1)}: they choose or weigh keys in a way that no backend "
                "here knows"
            )
    if "position_ids" not in inspect.signature(decoder.forward).parameters:
        return "it takes no position_ids, so documents after the first would get wrong positions"
    return ""


def find_indexers(decoder: nn.Module) -> list[nn.Module]:
    """Return the modules that choose keys for each query (sparse attention).

    In documents of at most ``index_topk`` tokens they choose all keys.

    Example:
        >>> find_indexers(nn.Linear(2, 2))
        []
    """
    return [
        module
        for name, module in decoder.named_modules()
        if name.rpartition(".")[2] == "indexer" and isinstance(getattr(module, "index_topk", None), int)
    ]


def _find_own_loss(model: PreTrainedModel) -> str:
    """Return where a model weighs or shifts labels by its own formula; an empty string if it does not.

    Such a formula ignores documents and accumulation windows.
    """
    names = _names_in(type(model).forward)
    if names & {"CrossEntropyLoss", "cross_entropy"} and "loss_function" not in names:
        return (
            "its forward computes a loss of its own instead of calling loss_function, so labels would be shifted or "
            "weighted otherwise"
        )
    return ""


# Cached, because all layers of a model share one forward, and a process may prepare many models.
@functools.cache
def drops_keywords(forward: object) -> bool:
    """Return whether the forward of decoder layers passes on no ``**keywords``, including the context; False if its
    source cannot be read.
    """
    tree = _parse(forward)
    return tree is not None and not any(
        keyword.arg is None for call in ast.walk(tree) if isinstance(call, ast.Call) for keyword in call.keywords
    )


@functools.cache
def _names_in(function: object) -> frozenset[str]:
    """Return the names and attributes in a function; none if its source cannot be read."""
    tree = _parse(function)
    nodes = () if tree is None else ast.walk(tree)
    return frozenset(getattr(node, "attr", None) or getattr(node, "id", None) or "" for node in nodes)


def _parse(function: object) -> ast.AST | None:
    """Return the syntax tree of a function without its decorators; None if its source cannot be read."""
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function))))  # type: ignore[arg-type]
    except (OSError, TypeError, SyntaxError):
        return None


def depends_on_length(rope_type: object) -> TypeGuard[str]:
    """Return whether the rotary angles of a type depend on the length of a row.

    Example:
        >>> [depends_on_length(kind) for kind in ("default", "longrope", "dynamic", None)]
        [False, True, True, False]
    """
    return isinstance(rope_type, str) and ("dynamic" in rope_type or rope_type == "longrope")


def length_scalings(config: object) -> Iterator[tuple[str, Any]]:
    """Yield the rotary types of a configuration that depend on length, and their parameters."""
    parameters = getattr(config, "rope_parameters", None) or {}
    for scaling in (parameters, *parameters.values()):
        rope_type = scaling.get("rope_type") if isinstance(scaling, dict) else None
        if depends_on_length(rope_type):
            yield rope_type, scaling


def find_sharing_obstacle(config: PretrainedConfig) -> str:
    """Return why completions cannot share a prompt in a pack of this model; "" if they can.

    Example:
        >>> from transformers import LlamaConfig
        >>> find_sharing_obstacle(LlamaConfig())
        ''
    """
    text = config.get_text_config(decoder=True)
    if text.model_type in MIXERS:
        return f"{text.model_type} has recurrent mixers, whose state belongs to one document"
    rope_type, _ = next(length_scalings(text), ("", None))
    return f"{text.model_type} scales positions by the length of a document ({rope_type})" if rope_type else ""
