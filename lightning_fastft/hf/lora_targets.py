"""Linear layers that LoRA adapts by default, and suggestions for unknown layer names."""

from __future__ import annotations

import copy
import difflib
import re
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import nn

from lightning_fastft.core.errors import OptionError
from lightning_fastft.hf.families import find_decoder, is_on_interface
from lightning_fastft.hf.mixers import is_mixer, mixer_family

if TYPE_CHECKING:
    from peft import LoraConfig, PeftModel
    from transformers import PreTrainedModel

ALL_LINEAR = "all-linear"
NUM_NEAREST = 3
MOST_SHOWN = 12
# A parameter of an adapter; the group is the name of the adapter.
OWNED_BY_ADAPTER = re.compile(r"\.(?:lora_\w+|modules_to_save|trainable_tokens_\w+)\.([^.]+)")
_PREFIX = "base_model.model."
# Modules that choose experts or keys; a choice passes no gradient, or only a weak one.
_CHOOSER_NAME = re.compile(r"router|gate|gating|\w*expert_gate")
_CHOOSER_TYPE = re.compile(r"Router|TopK|Gating|Indexer")
_MAMBA_TYPE = re.compile(r"Mamba\w*Mixer|MambaLayer")


def find_default_targets(model: PreTrainedModel) -> tuple[list[str], dict[str, int]]:
    """Return the linear layers that LoRA adapts by default: one rule for dense models, mixtures and hybrids.

    Every linear layer of the text part is adapted: projections of attention and of recurrent mixers, and dense and
    shared feed-forward layers. The rule skips the output layer; vision and audio towers; routers, gates of shared
    experts and indexers, which choose experts or keys; routed experts; and all projections of a Mamba mixer except the
    first, because Mamba kernels read their weights directly. It also skips layers that PEFT cannot adapt by name: in
    families whose checkpoints store experts one by one, PEFT treats ``gate_proj``, ``up_proj`` and ``down_proj`` as
    parts of expert stacks, even in dense and shared layers, or does not find an adapter again when it loads it.

    Returns:
        names: Full names of the adapted linear layers.
        skipped: Number of skipped linear layers, by reason.

    Cost:
        Host work on names.

    Source:
        All linear layers: QLoRA, arXiv 2305.14314, section 4. The exceptions are own.
    """
    wanted: list[str] = []
    skipped: dict[str, int] = {}
    head = model.get_output_embeddings()
    for name, module, reason in _judge_linears(model):
        if module is head:
            continue
        if reason:
            skipped[reason] = skipped.get(reason, 0) + 1
        else:
            wanted.append(name)
    barred = _barred_by_peft(model, wanted)
    if barred:
        skipped["barred by PEFT"] = len(barred)
    return [name for name in wanted if name not in barred], skipped


def _judge_linears(model: PreTrainedModel) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield each linear layer with its name and the reason it is skipped; an empty reason for an adapted layer."""
    from transformers.pytorch_utils import Conv1D

    text = {id(module) for module in find_decoder(model).modules()}
    family = mixer_family(model)
    is_mamba = family is not None and family.kind in ("Mamba", "Mamba-2")

    def visit(module: nn.Module, name: str, reason: str) -> Iterator[tuple[str, nn.Module, str]]:
        if isinstance(module, (nn.Linear, Conv1D)):
            yield name, module, reason or ("" if id(module) in text else "outside the text part")
        has_experts = any(map(_holds_experts, module.named_children()))
        for child_name, child in module.named_children():
            why = reason
            if _holds_experts((child_name, child)):
                why = why or "routed experts"
            elif _CHOOSER_TYPE.search(type(child).__name__) or (has_experts and _CHOOSER_NAME.fullmatch(child_name)):
                why = why or "routers, gates of shared experts, indexers"
            elif child_name != "in_proj" and (
                (is_mamba and family is not None and is_mixer(module, family))
                or _MAMBA_TYPE.search(type(module).__name__)
            ):
                why = why or "projections that Mamba kernels read"
            yield from visit(child, f"{name}.{child_name}" if name else child_name, why)

    yield from visit(model, "", "")


def _holds_experts(named_child: tuple[str, nn.Module]) -> bool:
    """Return whether a child holds routed experts."""
    name, child = named_child
    return name == "experts" or is_on_interface(child)


def _barred_by_peft(model: PreTrainedModel, names: list[str]) -> set[str]:
    """Return the layers that PEFT would treat as parts of expert stacks, or would not find when it loads an adapter."""
    leaves = {name.rpartition(".")[2] for name in names}
    taken = {leaf for leaf in leaves if not _stays_a_module(model, leaf)}
    barred = {name for name in names if name.rpartition(".")[2] in taken}
    lost = find_lost_names(model, [f"{_PREFIX}{name}.lora_A.weight" for name in names if name not in barred])
    return barred | {name.removeprefix(_PREFIX).removesuffix(".lora_A.weight") for name in lost}


def _stays_a_module(model: PreTrainedModel, target: str) -> bool:
    """Return whether PEFT adapts the modules of this name, instead of stacks of experts."""
    from peft import LoraConfig

    try:
        from peft.utils.transformers_weight_conversion import (
            convert_peft_config_for_transformers,
            get_model_conversion_mapping,
        )
    except ImportError:
        # Older releases of PEFT convert nothing.
        return True
    lora = LoraConfig(target_modules=[target])
    try:
        convert_peft_config_for_transformers(lora, model=model, conversions=get_model_conversion_mapping(model))
    except ValueError:
        # This is a part of a stack without the other parts.
        return False
    return target in (lora.target_modules or ())


def find_lost_names(model: nn.Module, names: Collection[str], *, lora: LoraConfig | None = None) -> set[str]:
    """Return names of adapter tensors that PEFT would not find when it loads them.

    PEFT renames the tensors by the rules that transformers has for old checkpoints of a family; a rule may match new
    names too.

    Cost:
        Host work on names; no tensor is copied.
    """
    from peft import LoraConfig

    try:
        from peft.utils.transformers_weight_conversion import (
            convert_peft_adapter_state_dict_for_transformers as convert,
        )
    except ImportError:
        return set()
    held = {name: torch.empty(1, 1, device="meta") for name in names}
    read = convert(model=model, peft_config=lora or LoraConfig(), adapter_state_dict=held, adapter_name="default")
    return set(held) - {name.replace(".default.", ".").removesuffix(".default") for name in read}


def shorten(names: Collection[str], *, others: Collection[str]) -> list[str]:
    """Return the shortest suffixes of dotted names that match all names and none of the others.

    Example:
        >>> shorten(["a.0.q", "a.1.q", "b.gate"], others=["a.0", "c.gate"])
        ['b.gate', 'q']
    """
    taken = {end for name in others for end in _ends(name)}
    return sorted({next((end for end in _ends(name) if end not in taken), name) for name in names})


def _ends(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[-length:]) for length in range(1, len(parts) + 1)]


def refuse_unknown_targets(model: nn.Module, lora: LoraConfig) -> None:
    """Raise on names of modules and parameters that the model does not have; PEFT skips them if another name matches.

    Raises:
        OptionError: A name is unknown; the message has the nearest names of the model.
    """
    modules = {end for name, _ in model.named_modules() for end in _ends(name)}
    parameters = {end for name, _ in model.named_parameters() for end in _ends(name)}
    given = lora.target_modules if isinstance(lora.target_modules, (list, set, tuple)) else ()
    unknown = [target for target in given if target not in modules and _stays_a_module(model, target)]
    if isinstance(lora.target_modules, str) and re.fullmatch(r"[\w.-]+", lora.target_modules):
        # A string is a pattern for whole names; a plain word without a match is probably a typo.
        target = lora.target_modules
        matched = target == ALL_LINEAR or any(re.fullmatch(target, name) for name, _ in model.named_modules())
        unknown = [] if matched else [target]
        modules = modules | {ALL_LINEAR}
    wrong = [("target_modules", target, modules) for target in unknown]
    wrong += [
        ("target_parameters", target, parameters) for target in lora.target_parameters or () if target not in parameters
    ]
    if not wrong:
        return
    told = [
        f"{field} has {target!r}"
        + ((field == "target_modules" and _describe_stack(model, target)) or _describe_nearest(target, known))
        for field, target, known in wrong
    ]
    raise OptionError(
        f"lora does not match {type(model).__name__}, which has no layers of these names: {'; '.join(told)}."
    )


def _refuse_routers(model: nn.Module, lora: LoraConfig) -> None:
    """Raise on targets that are routers derived from ``nn.Linear``: PEFT cannot add to the tuple that they return.

    Raises:
        OptionError: A target is such a router.
    """
    from peft.tuners.tuners_utils import check_target_module_exists

    for name, module in model.named_modules():
        if _is_linear_router(module) and check_target_module_exists(lora, name):
            raise OptionError(
                f"lora.target_modules has the router {name!r} ({type(module).__name__}), which returns a tuple, and "
                f"LoRA adds to a tensor. Remove {name.rpartition('.')[2]!r} from target_modules."
            )


def _is_linear_router(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) and "Router" in type(module).__name__


def _refuse_unused_names(model: nn.Module, lora: LoraConfig) -> None:
    """Raise on plain names of modules to exclude or save, ranks and alphas that no module has; PEFT ignores them.

    Raises:
        OptionError: A name is unknown, or target_modules is a text with commas.
    """
    if isinstance(lora.target_modules, str) and re.fullmatch(r"[\w.-]+(\s*,\s*[\w.-]+)+", lora.target_modules):
        raise OptionError(
            f"lora.target_modules must be a list or one pattern, got {lora.target_modules!r}. Write "
            f"[{', '.join(part.strip() for part in lora.target_modules.split(','))}]."
        )
    modules = {end for name, _ in model.named_modules() for end in _ends(name)}
    adapted = modules | {end for name in lora.target_parameters or () for end in _ends(name)}
    given = {"modules_to_save": modules, "rank_pattern": adapted, "alpha_pattern": adapted, "exclude_modules": modules}
    if isinstance(lora.exclude_modules, str):
        _refuse_word(model, lora.exclude_modules)
        del given["exclude_modules"]
    for field, name in [(key, name) for key in given for name in getattr(lora, key) or ()]:
        # Patterns are left to PEFT. A model may have fewer layers than the one that a full name is meant for.
        last = name.rpartition(".")[2]
        known = given[field]
        if re.fullmatch(r"[\w.-]+", name) and last not in known and not any(end.endswith(last) for end in known):
            raise OptionError(
                f"lora.{field} has {name!r}, which {type(model).__name__} does not have"
                f"{_describe_nearest(last, known)}."
            )


def _refuse_word(model: nn.Module, pattern: str) -> None:
    """Raise on a plain word as a pattern for whole names that matches none, so that it excludes nothing."""
    if re.fullmatch(r"[\w.-]+", pattern) and not any(re.fullmatch(pattern, name) for name, _ in model.named_modules()):
        raise OptionError(
            f"lora.exclude_modules is {pattern!r}, a pattern that must match the whole name of a module, and no module "
            f"of {type(model).__name__} has that name. Write a list, [{pattern}], to exclude modules by the end of "
            "their names."
        )


def _describe_stack(model: nn.Module, target: str) -> str:
    """Return how to name a stack of expert weights, if a target is one; "" for others."""
    found = (name for name, value in model.named_parameters() if name.endswith(f".{target}") and value.ndim == 3)
    stack = ".".join(next(found, "").split(".")[-3:])
    return f", whose weights are a stack of experts; name it in target_parameters: [{stack}]" if stack else ""


def _describe_nearest(target: str, known: Collection[str]) -> str:
    """Return the known names closest to a target."""
    depth = target.count(".")
    ends = {name: name.rpartition(".")[2] for name in known if name.count(".") <= depth}
    alike = sorted(name for name, end in ends.items() if end and not end.isdigit())
    near = difflib.get_close_matches(target, alike, n=NUM_NEAREST, cutoff=0.5)
    near = near or [name for name in alike if name.startswith(target)][:NUM_NEAREST]
    return f" (nearest: {', '.join(near)})" if near else f" (there are {', '.join(alike[:8])}, ...)"


def describe_adapters(
    model: PeftModel, lora: LoraConfig, *, skipped: Mapping[str, int] | None, initialisation: object = True
) -> str:
    """Return a line with the number of trained weights, the adapted layers, modules that are trained whole, and layers
    that the default rule skipped.

    The initialisation is the one that was asked for: EVA and LoftQ leave plain LoRA in PEFT's configuration.
    """
    count, total = model.get_nb_trainable_parameters()
    targets = lora.target_modules
    named = [targets] if isinstance(targets, str) else sorted(targets or ())
    named += sorted(lora.target_parameters or ())
    if len(named) > MOST_SHOWN:
        # EVA names every layer.
        named = sorted({name.rpartition(".")[2] for name in named})
    shown = f"{', '.join(named[:MOST_SHOWN])}{', ...' if len(named) > MOST_SHOWN else ''}"
    whole = ", ".join(_trained_whole(model, lora))
    frozen = len(model.peft_config) - 1
    without = ", ".join(f"{number} {reason}" for reason, number in (skipped or {}).items())
    variants = [name for name, is_on in (("rsLoRA", lora.use_rslora), ("DoRA", lora.use_dora)) if is_on]
    named_one = (name for name in (lora.init_lora_weights, initialisation) if isinstance(name, str))
    variants += [*named_one][:1]
    return (
        f"{count:,} trained weights ({count / max(1, total):.2%}), r = {lora.r} on {shown}"
        f"{f'; whole: {whole}' if whole else ''}{'; ' if variants else ''}{', '.join(variants)}"
        f"{f'; without: {without}' if without else ''}{f'; other adapters: {frozen}' if frozen else ''}"
    )


def _trained_whole(model: PeftModel, lora: LoraConfig) -> list[str]:
    """Return the names of modules whose own weights are trained, such as a reward head."""
    trained = (name.rpartition(".") for name, parameter in model.named_parameters() if parameter.requires_grad)
    beside = {
        module.rpartition(".")[2]
        for module, _, kind in trained
        if kind == "weight" and OWNED_BY_ADAPTER.search(f"{module}.{kind}") is None
    }
    return sorted(beside.union(lora.modules_to_save or ()))


def copy_with_targets(model: PreTrainedModel, lora: LoraConfig) -> tuple[LoraConfig, dict[str, int] | None]:
    """Return a copy of a configuration with explicit targets, and what the default rule skipped if it ran.

    "all-linear" is PEFT's own choice, except for layers outside the text part, routers that extend a linear layer and
    projections that PEFT rejects. On some mixtures it adapts all routed experts and the router.

    Raises:
        OptionError: A name matches no layer, or the default rule finds none.
    """
    lora = copy.deepcopy(lora)
    _refuse_unused_names(model, lora)
    if lora.target_modules == ALL_LINEAR and lora.exclude_modules is None:
        lora.exclude_modules = _excluded_from_all_linear(model) or None
    if lora.target_modules is not None or lora.target_parameters:
        refuse_unknown_targets(model, lora)
        _refuse_routers(model, lora)
        return lora, None
    names, skipped = find_default_targets(model)
    if not names:
        raise OptionError(
            f"lora names no target_modules, and {type(model).__name__} has no linear layer that LoRA adapts by "
            f"default (skipped: {skipped}). Name target_modules."
        )
    wanted = set(names)
    lora.target_modules = set(shorten(names, others=[name for name, _ in model.named_modules() if name not in wanted]))
    return lora, skipped


def _excluded_from_all_linear(model: PreTrainedModel) -> list[str]:
    """Return the layers that "all-linear" must skip: PEFT would reject them, or nothing would train them."""
    head = model.get_output_embeddings()
    return [
        name
        for name, module, reason in _judge_linears(model)
        if module is not head
        and (
            reason == "outside the text part"
            or _is_linear_router(module)
            or (reason.startswith("projections") and name.endswith(".out_proj"))
        )
    ]
