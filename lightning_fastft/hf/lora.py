"""LoRA on a model: build PEFT's configuration from plain values, and add its adapters, equal on every rank."""

from __future__ import annotations

import contextlib
import difflib
import json
import re
import subprocess
import sys
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from lightning_fastft.core.checks import check_bool, check_float, check_int, check_share
from lightning_fastft.core.errors import OptionError
from lightning_fastft.hf.dtypes import seeded
from lightning_fastft.hf.lora_refusals import refuse_tokens_of_a_copy, refuse_unknown_parts, refuse_variants
from lightning_fastft.hf.lora_targets import ALL_LINEAR, OWNED_BY_ADAPTER, copy_with_targets

if TYPE_CHECKING:
    from peft import LoraConfig, PeftConfig, PeftModel
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper
    from torch import nn
    from transformers import PreTrainedModel

# Limits above the width of any layer; an adapter is scaled by alpha divided by rank.
LARGEST_RANK, LARGEST_ALPHA = 2**16, 2.0**20
# Limit of the iterations of an initialisation.
MOST_ROUNDS = 100
# A good pattern matches all names of a model within milliseconds; catastrophic backtracking can take years.
PATTERN_SECONDS, LONGEST_PATTERN = 10.0, 10_000
_QUANTIFIER = re.compile(r"[*+?{]")
# Runs in a process without site packages and the user's environment. A match holds the GIL, so no thread could stop it.
_MATCH = (
    "import json, re, sys; patterns, names = json.load(sys.stdin)\nfor pattern in patterns:\n for name in names: "
    "re.fullmatch(pattern, name)"
)
# Names of PEFT's fields in other libraries that are not spelled alike.
_NAMES_ELSEWHERE = {"rank": "r"}
_FLAGS = (
    "ensure_weight_tying",
    "fan_in_fan_out",
    "inference_mode",
    "lora_bias",
    "use_dora",
    "use_qalora",
    "use_rslora",
)
_INITIALISATIONS = ("gaussian", "eva", "olora", "pissa", "loftq", "orthogonal")

# Errors that PEFT raises for a configuration that does not match the model.
_REFUSALS = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, NotImplementedError, re.error)


def tuner_layers(root: nn.Module) -> list[BaseTunerLayer]:
    """Return the layers of PEFT's adapters inside root."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    return [module for module in root.modules() if isinstance(module, BaseTunerLayer)]


def switched_layers(root: nn.Module) -> list[BaseTunerLayer | AuxiliaryTrainingWrapper]:
    """Return the modules inside root that an adapter can be switched off in: its layers and copies of whole modules."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    return [module for module in root.modules() if isinstance(module, (BaseTunerLayer, AuxiliaryTrainingWrapper))]


def trained_adapters(model: PeftModel) -> list[str]:
    """Return the names of the adapters with trained weights; of all adapters if none has any."""
    found = (OWNED_BY_ADAPTER.search(name) for name, parameter in model.named_parameters() if parameter.requires_grad)
    trained = {match[1] for match in found if match is not None}
    names = list(model.peft_config)
    return [name for name in names if name in trained] or names


def change_outputs(model: PeftModel) -> bool:
    """Return whether trained LoRA adapters change the outputs of a model: some layer has no factor of zeros.

    Cost:
        One read of the adapters, and two host syncs for each adapted layer.
    """
    from peft.tuners.lora import LoraLayer

    trained = trained_adapters(model)
    pairs = [
        (first[name], second[name])
        for layer in model.modules()
        if isinstance(layer, LoraLayer)
        for first, second in ((layer.lora_A, layer.lora_B), (layer.lora_embedding_A, layer.lora_embedding_B))
        for name in trained
        if name in first
    ]
    return any(all(bool(getattr(factor, "weight", factor).any()) for factor in pair) for pair in pairs)


def add_adapters(model: PreTrainedModel, *, lora: LoraConfig, adapter_dtype: torch.dtype, seed: int = 0) -> PeftModel:
    """Return the model with LoRA adapters and a frozen base.

    Without ``target_modules`` and ``target_parameters`` one rule chooses the layers for every family
    (``find_default_targets``): projections of attention and recurrent mixers, dense and shared feed-forward layers.
    Routed experts are adapted only if ``target_parameters`` names their stacks. PEFT's own default is only the query
    and value projections. PEFT's configuration is copied, and its ``task_type`` set to CAUSAL_LM. The seeded
    initialisation is the same on every rank, device and strategy.

    Raises:
        OptionError: The configuration selects no layer of this model, or names a layer that the model does not have.

    Source:
        LoRA, arXiv 2106.09685.
    """
    from peft import TaskType, get_peft_model

    check_patterns(lora, [name for name, _ in model.named_modules()])
    lora, _ = copy_with_targets(model, lora)
    lora.task_type = TaskType.CAUSAL_LM
    # Initialise on the host, even if Lightning's strategies set another default device, so that adapters are the same
    # on every device and with every strategy.
    with seeded(seed, device=next(model.parameters()).device), torch.device("cpu"):
        try:
            with without_pattern_warning(model, lora):
                adapted = get_peft_model(model, lora, autocast_adapter_dtype=adapter_dtype == torch.float32)
        except _REFUSALS as error:
            near = difflib.get_close_matches(str(lora.init_lora_weights).lower(), _INITIALISATIONS, n=1)
            advice = f". Did you mean {near[0]}?" if near and "Unknown initialization" in str(error) else ""
            raise OptionError(f"lora does not match {type(model).__name__}: {error or repr(error)}{advice}") from error
    refuse_tokens_of_a_copy(adapted)
    cast_adapters(adapted, adapter_dtype)
    return adapted


@contextlib.contextmanager
def without_pattern_warning(model: nn.Module, lora: PeftConfig) -> Iterator[None]:
    """Suppress a false warning while PEFT builds adapters on a model.

    PEFT 0.21 compares the keys of rank_pattern and alpha_pattern with modules only, and warns that keys which name
    stacks of ``target_parameters`` were ignored, although the stacks get these ranks and alphas. A warning that lists
    any other key is shown.
    """
    stacks = tuple(getattr(lora, "target_parameters", None) or ())
    names = [*stacks, *(name for name, _ in model.named_parameters() if name.endswith(stacks))]
    patterns = {**getattr(lora, "rank_pattern", {}), **getattr(lora, "alpha_pattern", {})} if stacks else {}
    read = [key for key in patterns if any(re.match(rf"(.*\.)?({key})$", name) for name in names)]
    if not read:
        yield
        return
    key = "|".join(re.escape(repr(key)) for key in read)
    words = rf"The following \w+_pattern keys did not match any .*: \[({key})(, ({key}))*\]\.$"
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=words, category=RuntimeWarning)
        yield


def cast_adapters(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast the trained Parameters of every adapted layer."""
    from peft.tuners.lora import LoraLayer

    for layer in model.modules():
        if isinstance(layer, LoraLayer):
            for parameter in layer.parameters():
                if parameter.requires_grad:
                    parameter.data = parameter.data.to(dtype)


def parse_lora(lora: LoraConfig | Mapping[str, Any]) -> LoraConfig:
    """Return PEFT's configuration, given as an object or as a mapping of its fields.

    Raises:
        OptionError: A field is unknown to PEFT, or its value is rejected by PEFT or cannot be trained with.
    """
    from peft import LoraConfig

    if isinstance(lora, LoraConfig):
        return _check_fields(lora)
    if not isinstance(lora, Mapping):
        raise OptionError(
            f"lora must be PEFT's LoraConfig or a mapping of its fields, got {lora!r} ({type(lora).__name__})."
        )
    # PEFT checks these only when it builds a layer, or never.
    if "r" in lora:
        check_int("lora.r", lora["r"], low=1, high=LARGEST_RANK)
    if "lora_alpha" in lora:
        _check_alpha(lora["lora_alpha"])
    if "lora_dropout" in lora:
        check_share("lora.lora_dropout", lora["lora_dropout"])
    known = set(LoraConfig.__dataclass_fields__)
    unknown = sorted(set(lora) - known)
    if unknown:
        near = [
            _NAMES_ELSEWHERE.get(name) or next(iter(difflib.get_close_matches(name, known, n=1, cutoff=0.6)), "")
            for name in unknown
        ]
        advice = f"Did you mean {', '.join(filter(None, near))}?\n" if any(near) else ""
        raise OptionError(
            f"lora has the unknown fields {unknown}.\n{advice}"
            "The fields are those of PEFT's LoraConfig, mostly r, lora_alpha, lora_dropout and target_modules; see "
            "help(peft.LoraConfig)."
        )
    refuse_unknown_parts(lora)
    try:
        if lora.get("init_lora_weights") == "loftq":
            # PEFT asks for scipy here, which its LoftQ needs and ours does not.
            config = LoraConfig(**{**lora, "init_lora_weights": True, "loftq_config": {}})
            config.init_lora_weights, config.loftq_config = "loftq", dict(lora.get("loftq_config") or {})
            return _check_fields(config)
        return _check_fields(LoraConfig(**lora))
    except OptionError:
        raise
    except _REFUSALS as error:
        raise OptionError(f"lora={dict(lora)!r} is rejected by PEFT: {error}") from error


def _check_alpha(alpha: float) -> None:
    """Raise if lora_alpha is not a positive number; 0 would scale every adapter to nothing, and none would train."""
    if check_float("lora.lora_alpha", alpha, low=0.0, high=LARGEST_ALPHA) == 0:
        raise OptionError("lora.lora_alpha must be above 0, got 0: adapters scaled by 0 change nothing.")


def _check_fields(lora: LoraConfig) -> LoraConfig:
    """Return the configuration if its fields import no code, read no file and have bounded values; else raise."""
    if lora.megatron_config is not None or lora.megatron_core != "megatron.core" or lora.auto_mapping is not None:
        raise OptionError(
            "lora names code to import (megatron_config, megatron_core or auto_mapping), which is never imported. "
            "Remove the field; Megatron layers are not supported."
        )
    check_int("lora.r", lora.r, low=1, high=LARGEST_RANK)
    _check_alpha(lora.lora_alpha)
    _check_types(lora)
    for name, ranks in (("rank_pattern", lora.rank_pattern), ("alpha_pattern", lora.alpha_pattern)):
        if ranks is not None and not isinstance(ranks, Mapping):
            raise OptionError(f"lora.{name} must be a mapping of patterns, got {ranks!r}.")
        for value in (ranks or {}).values():
            check_float(f"lora.{name}", value, low=0.0, high=LARGEST_RANK if name == "rank_pattern" else LARGEST_ALPHA)
    if max(map(len, _own_patterns(lora)), default=0) > LONGEST_PATTERN:
        raise OptionError(f"lora has a pattern of more than {LONGEST_PATTERN} characters. Name the modules in a list.")
    rounds = re.fullmatch(r"pissa_niter_(\d{1,9})\d*", str(lora.init_lora_weights))
    if rounds is not None:
        check_int("lora.init_lora_weights=pissa_niter_N: N", int(rounds[1]), low=0, high=MOST_ROUNDS)
    parts = [
        getattr(lora, name, None) or {} for name in ("loftq_config", "corda_config", "lora_ga_config", "eva_config")
    ]
    for part in (part if isinstance(part, Mapping) else vars(part) for part in parts):
        check_int("lora.loftq_config.loftq_iter", part.get("loftq_iter", 1), low=1, high=MOST_ROUNDS)
        if part.get("cache_file") is not None or part.get("covariance_file") is not None:
            raise OptionError(
                "lora names a file (cache_file or covariance_file), which is neither read nor written. Remove the "
                "field."
            )
    refuse_variants(lora)
    return lora


def _check_types(lora: LoraConfig) -> None:
    """Raise on values that PEFT takes as true because they are not empty, names and ids that are not a list, and
    adapters that are not trained.
    """
    for name in _FLAGS:
        value = getattr(lora, name, None)
        if value is not None:
            check_bool(f"lora.{name}", value)
    if isinstance(lora.modules_to_save, str):
        names = lora.modules_to_save.replace(",", ", ")
        raise OptionError(f"lora.modules_to_save must be a list, got {lora.modules_to_save!r}. Write [{names}].")
    if lora.inference_mode:
        raise OptionError(
            "lora.inference_mode=True, which saved adapters have, freezes the adapters, so nothing would be trained. "
            "Set it to False; or give their folder as adapter to train them further."
        )
    indices = lora.trainable_token_indices or []
    for ids in indices.values() if isinstance(indices, Mapping) else [indices]:
        if not isinstance(ids, Sequence) or isinstance(ids, str):
            raise OptionError(f"lora.trainable_token_indices must be a list of token ids, got {ids!r}. Write [{ids}].")
        for token in ids:
            check_int("lora.trainable_token_indices", token, low=0)


def _own_patterns(lora: LoraConfig) -> list[str]:
    """Return the fields of a configuration that PEFT reads as regular expressions."""
    named = [pattern for pattern in (lora.target_modules, lora.exclude_modules) if isinstance(pattern, str)]
    keys = [*(lora.rank_pattern or {}), *(lora.alpha_pattern or {})]
    return [str(pattern) for pattern in (*named, *(lora.modules_to_save or []), *_as_list(lora.layers_pattern), *keys)]


def _as_list(patterns: list[str] | str | None) -> list[str]:
    return [patterns] if isinstance(patterns, str) else list(patterns or [])


def check_patterns(lora: LoraConfig, names: list[str]) -> None:
    """Raise on regular expressions of a configuration that are invalid, or too slow on the names of a model's modules.

    The patterns are target_modules, exclude_modules, modules_to_save, layers_pattern, and the keys of rank_pattern and
    alpha_pattern.

    Raises:
        OptionError: A pattern is invalid, too long, or does not terminate in time.

    Cost:
        None if no pattern has a quantifier; else about ten milliseconds in a separate process.
    """
    patterns = [
        *(
            pattern
            for pattern in (lora.target_modules, lora.exclude_modules)
            if isinstance(pattern, str) and pattern != ALL_LINEAR
        ),
        *(rf"(^|.*\.){name}($|\..*)" for name in lora.modules_to_save or []),
        *(rf"(?:^|.*?\.){pattern}\.(?P<idx>\d+)\..*" for pattern in _as_list(lora.layers_pattern)),
        *(rf"(.*\.)?({pattern})$" for pattern in (*(lora.rank_pattern or {}), *(lora.alpha_pattern or {}))),
    ]
    own = _own_patterns(lora)
    if not any(_QUANTIFIER.search(pattern) for pattern in own):
        return
    try:
        done = subprocess.run(  # noqa: S603 - this interpreter, with a text of this module
            [sys.executable, "-I", "-S", "-c", _MATCH],
            input=json.dumps([patterns, names]),
            capture_output=True,
            text=True,
            timeout=PATTERN_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise OptionError(
            f"A pattern of lora (such as target_modules) takes more than {PATTERN_SECONDS:.0f} s on the names of "
            "the model: "
            f"{[text for text in own if _QUANTIFIER.search(text)]!s:.200}. Nested repetitions do that. "
            "Name the modules in a list."
        ) from None
    if done.returncode:
        reason = next(iter(done.stderr.strip().splitlines()[-1:]), "the match failed")
        raise OptionError(
            f"A pattern of lora (such as target_modules) is not a regular expression: {reason}. Check {own!s:.200}."
        )


def describe_lora(lora: LoraConfig) -> dict[str, Any]:
    """Return the fields of a configuration that differ from PEFT's defaults, as plain types for a checkpoint."""
    from peft import LoraConfig

    default = LoraConfig().to_dict()
    changed = {
        key: to_plain(value)
        for key, value in lora.to_dict().items()
        if key != "peft_type" and value != default.get(key)
    }
    return {"r": lora.r, "lora_alpha": lora.lora_alpha, **changed}


def to_plain(value: Any) -> Any:
    """Return the value converted to dicts, lists, strings, numbers, booleans and None."""
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, (set, frozenset)):
        return [to_plain(item) for item in sorted(value)]
    if isinstance(value, Iterable):
        return [to_plain(item) for item in value]
    return str(value)


@contextlib.contextmanager
def adapters_off(model: nn.Module, *, kept: Collection[str] = ()) -> Iterator[None]:
    """Disable the adapters of a PEFT model inside a block, except those with the names kept that are active.

    Only the flags of the layers change; PEFT's own ``disable_adapter`` and ``set_adapter`` also write
    ``requires_grad`` of every adapter.

    Cost:
        One walk over the modules; no device work.
    """
    changed: list[tuple[Any, str, Any]] = []
    try:
        for layer in switched_layers(model):
            remaining = [name for name in layer.active_adapters if name in kept]
            name, value = ("_active_adapter", remaining) if remaining else ("_disable_adapters", True)
            changed.append((layer, name, getattr(layer, name)))
            setattr(layer, name, value)
        yield
    finally:
        for layer, name, value in changed:
            setattr(layer, name, value)
