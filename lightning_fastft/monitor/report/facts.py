"""Describe a run: model, method, options, versions and command, as plain values without secrets."""

from __future__ import annotations

import inspect
import math
import platform
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_fastft.core.extras import version_of

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer
    from torch import nn

REMOVED = "[removed]"
_PACKAGES = (
    "lightning_fastft",
    "torch",
    "lightning",
    "transformers",
    "peft",
    "bitsandbytes",
    "triton",
    "datasets",
    "torchmetrics",
)
_TRAINER_OPTIONS = (
    "max_steps",
    "max_epochs",
    "accumulate_grad_batches",
    "gradient_clip_val",
    "precision",
    "num_devices",
    "num_nodes",
    "world_size",
)
# Last parts of option names, and patterns of texts, that mark secrets; "max_tokens" and "tokenizer" are not secrets.
_PRIVATE_NAMES = r"token|secret|password|passwd|api[_-]?key|access[_-]?key|private[_-]?key|credentials?|auth"
_SECRET_NAME = re.compile(rf"(?:^|[._-])(?:{_PRIVATE_NAMES})$", re.IGNORECASE)
# An entry of a mapping in YAML or JSON: the name and the value.
_SECRET_ENTRY = re.compile(
    rf"""((?:^|[\s{{,._'"-])(?:{_PRIVATE_NAMES})['"]?\s*:\s*)("[^"]*"|'[^']*'|[^\s,}}\]]+)""", re.IGNORECASE
)
_SECRET_TEXT = re.compile(
    r"\b(?:hf_\w{8,}|sk-[\w-]{8,}|gh[pousr]_\w{8,}|github_pat_\w{8,}|xox[abprs]-[\w-]+|AKIA[0-9A-Z]{12,}|AIza[\w-]{20,})"
    r"|(?<=://)[^/\s:@]+:[^/\s@]+(?=@)"
)


def describe_model(pl_module: LightningModule) -> dict[str, Any]:
    """Return name, kind, size and training method of the model in a LightningModule."""
    # Imported on first use: callbacks must be importable without transformers.
    from lightning_fastft.hf.families import decoder_layers, find_causal_models

    found = find_causal_models(pl_module)
    facts: dict[str, Any] = {"module": type(pl_module).__name__, "name": type(pl_module).__name__, "num_layers": None}
    if found:
        model = found[0][1]
        facts["name"] = str(getattr(model.config, "_name_or_path", "") or type(model).__name__)
        facts["module"] = f"{type(model).__name__} in {type(pl_module).__name__}"
        facts["num_layers"] = len(decoder_layers(model))
    # A FineTuner knows the name of its model; the configuration of a model with random weights has none.
    name = getattr(getattr(pl_module, "source", None), "name", None)
    if isinstance(name, str):
        facts["name"] = name
    parameters = list(pl_module.parameters())
    facts["num_trained"] = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    facts["num_elements"] = sum(parameter.numel() for parameter in parameters)
    facts["method"] = _describe_method(pl_module, num_trained=facts["num_trained"], num_elements=facts["num_elements"])
    return facts


def _describe_method(pl_module: nn.Module, *, num_trained: int, num_elements: int) -> str:
    adapters = next(
        (found for module in pl_module.modules() if isinstance(found := getattr(module, "peft_config", None), dict)), {}
    )
    rank = next((config.r for config in adapters.values() if hasattr(config, "r")), None)
    is_nf4 = any(type(parameter).__name__ == "Params4bit" for parameter in pl_module.parameters())
    quantization = getattr(pl_module, "quantization", None) or ("nf4" if is_nf4 else None)
    base = f" on a base in {str(quantization).upper()}" if quantization else ""
    if rank is not None:
        return f"LoRA r={rank}{base}"
    if adapters:
        return f"adapters ({', '.join(type(config).__name__ for config in adapters.values())}){base}"
    return "every weight" if num_trained == num_elements else f"some weights{base}"


def describe_options(trainer: Trainer, pl_module: LightningModule) -> dict[str, dict[str, Any]]:
    """Return the options of trainer, strategy, module and data that are plain values."""
    options = {"trainer": {name: plain(getattr(trainer, name, None)) for name in _TRAINER_OPTIONS}}
    options["trainer"]["strategy"] = type(trainer.strategy).__name__
    for title, owner in (("module", pl_module), ("data", getattr(trainer, "datamodule", None))):
        if owner is not None:
            options[title] = {
                **_own_options(owner),
                **{str(name): plain(value) for name, value in getattr(owner, "hparams", {}).items()},
            }
    return {title: values for title, values in options.items() if values}


def _own_options(owner: object) -> dict[str, Any]:
    """Return the arguments of a constructor that the object stores under their names, as plain values."""
    found = {}
    for name in inspect.signature(type(owner).__init__).parameters:
        value = vars(owner).get(name)
        if isinstance(value, (str, int, float, bool)) or (
            isinstance(value, (list, tuple)) and all(isinstance(part, (str, int, float)) for part in value)
        ):
            found[name] = plain(value)
    return found


def describe_checkpoints(trainer: Trainer) -> dict[str, str]:
    """Return the paths of the last and the best checkpoint of a Trainer's ModelCheckpoints, if any."""
    found: dict[str, str] = {}
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint):
            best = callback.best_model_path
            # Without a monitored value the "best" checkpoint is the newest.
            paths = {
                "last": callback.last_model_path or ("" if callback.monitor else best),
                "best": best if callback.monitor else "",
            }
            found = {**{kind: path for kind, path in paths.items() if path}, **found}
    return found


def describe_versions() -> dict[str, str]:
    """Return versions of Python, the packages that matter and CUDA."""
    found = {"python": platform.python_version(), "system": f"{platform.system()} {platform.machine()}"}
    found |= {package: version_of(package) or "not installed" for package in _PACKAGES}
    if torch.version.cuda is not None:
        found["cuda"] = torch.version.cuda
    return found


def describe_command(words: Sequence[str] | None = None) -> str:
    """Return a command line, by default that of this process, without secrets.

    They are found by the names of options and of entries in YAML, and by patterns.

    Example:
        >>> describe_command(["train.py", "--hf_token=abc", "--api-key", "xyz", "--max_tokens=9"])
        "train.py '--hf_token=[removed]' --api-key '[removed]' --max_tokens=9"
    """
    shown: list[str] = []
    is_secret = False
    for word in _own_words() if words is None else words:
        name, equals, _ = word.partition("=")
        if is_secret and not word.startswith("-"):
            shown.append(REMOVED)
        else:
            has_secret = equals and _SECRET_NAME.search(name)
            shown.append(f"{name}={REMOVED}" if has_secret else _SECRET_ENTRY.sub(rf"\1{REMOVED}", word))
        is_secret = word.startswith("-") and not equals and bool(_SECRET_NAME.search(word))
    return without_secrets(shlex.join(shown))


def _own_words() -> list[str]:
    """Return the words of this process; Python has the path of a module in place of ``python -m NAME``."""
    module = getattr(sys.modules["__main__"], "__spec__", None)
    if module is None or sys.argv[:1] != [module.origin]:
        return sys.argv
    return ["python", "-m", module.name.removesuffix(".__main__"), *sys.argv[1:]]


def without_secrets(value: Any, name: str = "") -> Any:
    """Return plain values with secrets replaced (found by keys and patterns), and NaN and infinity as None.

    Example:
        >>> without_secrets({"api_key": "x", "max_tokens": 9, "loss": float("nan"), "note": "Bearer hf_abcdefghijk"})
        {'api_key': '[removed]', 'max_tokens': 9, 'loss': None, 'note': 'Bearer [removed]'}
    """
    if isinstance(value, Mapping):
        return {str(key): without_secrets(part, str(key)) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_secrets(part, name) for part in value]
    if value is not None and not isinstance(value, bool) and _SECRET_NAME.search(name):
        return REMOVED
    if isinstance(value, str):
        return _SECRET_TEXT.sub(REMOVED, value)
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def plain(value: Any) -> Any:
    """Return a value as JSON types; anything else as text of at most 200 characters."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(part) for key, part in value.items()}
    if isinstance(value, (list, tuple, set)):
        return [plain(part) for part in value]
    text = str(value)
    return text if len(text) <= 200 else text[:200] + "..."
