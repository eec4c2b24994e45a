"""Restrict the imports of a config to an allowlist and to packages that the user names on the command line.

jsonargparse checks the list before a path is imported, and checks the resolved object again. In addition, a config may
name classes but not functions.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import yaml
from jsonargparse import Namespace, get_loader, set_loader, set_parsing_settings

from lightning_fastft.cli.words import ALLOW_IMPORT_OPTION
from lightning_fastft.cli.yaml_text import check_size
from lightning_fastft.core.errors import OptionError

_SCHEDULERS = (
    "get_scheduler",
    "get_constant_schedule",
    "get_constant_schedule_with_warmup",
    "get_cosine_schedule_with_warmup",
    "get_cosine_with_hard_restarts_schedule_with_warmup",
    "get_cosine_with_min_lr_schedule_with_warmup",
    "get_inverse_sqrt_schedule",
    "get_linear_schedule_with_warmup",
    "get_polynomial_decay_schedule_with_warmup",
    "get_wsd_schedule",
)
# The default of RolloutDataModule's sampler.
_SAMPLER_PATHS = tuple(f"lightning_fastft.training.{module}.sample_with_model" for module in ("samplers", "rollouts"))
_SCHEDULER_PATHS = tuple(f"transformers{module}.{name}" for module in ("", ".optimization") for name in _SCHEDULERS)
# Parts of each package that configs need. Loaders, launchers and the like are in other parts.
ALLOWED_PATHS = (
    *(
        f"{root}.{name}"
        for root in ("lightning", "lightning.pytorch")
        for name in ("Callback", "LightningModule", "LightningDataModule")
    ),
    "lightning.fabric.accelerators",
    "lightning.fabric.loggers",
    "lightning.fabric.plugins",
    "lightning.fabric.strategies",
    "lightning.pytorch.accelerators",
    "lightning.pytorch.callbacks",
    "lightning.pytorch.cli.ReduceLROnPlateau",
    "lightning.pytorch.core.datamodule.LightningDataModule",
    "lightning.pytorch.core.module.LightningModule",
    *(f"lightning.pytorch.demos.{name}" for name in ("boring_classes", "BoringModel", "BoringDataModule", "DemoModel")),
    "lightning.pytorch.loggers",
    "lightning.pytorch.plugins",
    "lightning.pytorch.profilers",
    "lightning.pytorch.strategies",
    "lightning_fastft",
    *(f"peft.{name}" for name in ("LoraConfig", "LoftQConfig", "tuners.lora.LoraConfig", "tuners.lora.config")),
    "torch.distributed.fsdp",
    "torch.nn",
    "torch.optim",
    "torchmetrics",
    *_SCHEDULER_PATHS,
)
# Parts that call functions named by a config, or load code, models or pickles. A longer path overrides a shorter one.
DENIED_PATHS = (
    "*",
    "lightning.pytorch.callbacks.LambdaCallback",
    "lightning.pytorch.callbacks.lambda_function",
    *(
        f"torchmetrics.{name}"
        for name in ("audio", "detection", "functional", "image", "multimodal", "utilities", "video")
    ),
    *(
        f"torchmetrics.text.{name}"
        for name in ("BERTScore", "InfoLM", "ROUGEScore", "SacreBLEUScore", "bert", "infolm", "rouge", "sacre_bleu")
    ),
    *(f"torchmetrics.wrappers.{name}" for name in ("FeatureShare", "feature_share")),
)


@contextmanager
def import_policy(allowed: Sequence[str] = ()) -> Iterator[None]:
    """Restrict the imports of a config while the block runs; paths in allowed are removed again afterwards.

    Those are named on the command line, in addition to ``ALLOWED_PATHS``.

    Raises:
        OptionError: A path can never be allowed.
    """
    # A package named by the user also allows its parts that are denied by default.
    opened = [path for path in DENIED_PATHS if is_within(path, allowed)]
    new = [path for path in allowed if path not in ALLOWED_PATHS and path not in opened] + opened
    try:
        set_parsing_settings(
            import_path_denylist=list(DENIED_PATHS),
            import_path_allowlist=[*ALLOWED_PATHS, *new],
            # A value of type Any stays data, and a config is a local file.
            instantiate_subclass_spec_in_any=False,
            config_read_mode_fsspec_enabled=False,
            config_read_mode_urls_enabled=False,
        )
    except ValueError as error:
        raise OptionError(f"{ALLOW_IMPORT_OPTION} {' '.join(new)}: {error}") from error
    load = get_loader("yaml")
    set_loader("yaml", _bounded(load), exceptions=(yaml.YAMLError,))
    try:
        yield
    finally:
        set_loader("yaml", load, exceptions=(yaml.YAMLError,))
        if new:
            set_parsing_settings(import_path_denylist=new)


def _bounded(load: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return a loader that rejects small texts that expand to huge values."""

    def load_bounded(text: str) -> Any:
        check_size(text)
        return load(text)

    return load_bounded


def check_named_functions(config: Any, allowed: Sequence[str] = ()) -> None:
    """Reject functions named by a parsed config, except schedulers, our sampler and paths under allowed.

    A class is created only if its type fits, but a function would be called with arguments of the config, and allowed
    packages have functions that load code. Call this before anything of the config is created.

    Raises:
        OptionError: A function is named; the message has its option.
    """
    for key, path in _named_paths(config):
        target = find_loaded(path)
        is_allowed = path in _SCHEDULER_PATHS + _SAMPLER_PATHS or is_within(path, allowed)
        if target is not None and not isinstance(target, type) and not is_allowed:
            raise OptionError(
                f"{key}: a config may name classes, and {path!r} is not a class. Allow your own functions with "
                f"{ALLOW_IMPORT_OPTION}."
            )


def is_within(path: str, packages: Sequence[str]) -> bool:
    """Return whether an import path is one of these packages, or below one of them.

    Example:
        >>> is_within("my_package.models", ["my_package"]), is_within("my_package_2", ["my_package"])
        (True, False)
    """
    return any(path == name or path.startswith(f"{name}.") for name in packages)


def _named_paths(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield the option and the import path of every object that a config names."""
    if isinstance(value, (Namespace, Mapping)):
        for name, item in vars(value).items() if isinstance(value, Namespace) else value.items():
            if name == "class_path" and isinstance(item, str):
                yield key, item
            else:
                yield from _named_paths(item, f"{key}.{name}".lstrip("."))
    elif isinstance(value, (list, tuple, set)):
        for item in value:
            yield from _named_paths(item, key)
    elif callable(value) and not isinstance(value, type):
        yield key, f"{getattr(value, '__module__', None)}.{getattr(value, '__qualname__', None)}"


def find_loaded(path: str) -> Any:
    """Return the object of an import path if it is imported already; nothing is imported here."""
    parts = path.split(".")
    for length in range(len(parts) - 1, 0, -1):
        found: Any = sys.modules.get(".".join(parts[:length]))
        if found is not None:
            for part in parts[length:]:
                found = getattr(found, part, None)
            return found
    return None
