"""The options of a Tuner: which values are allowed, and what a checkpoint keeps of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from lightning_fastft.core.checks import (
    check_choice,
    check_float,
    check_int,
    check_share,
    check_string,
    check_tokenizer,
)
from lightning_fastft.core.errors import OptionError
from lightning_fastft.training.optimization.schedules import SCHEDULES

if TYPE_CHECKING:
    from peft import LoraConfig

    from lightning_fastft.hf.loading.source import ModelSource

# Ten times the largest rate in use, and more steps than a run has: a larger number has a misplaced decimal point.
LARGEST_RATE, LARGEST_STEP = 1e3, 10**9


def check_model_options(
    model: object,
    *,
    tokenizer: object,
    quantization: str | None,
    lora: object,
    dtype: str,
    adapter_dtype: str,
    master_dtype: str,
    revision: object,
    adapter: str | None,
    frozen_adapters: Sequence[str] | None,
) -> None:
    """Check the options from which the model is built.

    Raises:
        OptionError: A value is not allowed, or two options do not fit.
    """
    from lightning_fastft.hf.dtypes import DTYPES

    check_choice("quantization", quantization, (None, "nf4"))
    check_choice("dtype", dtype, ("auto", *DTYPES))
    check_choice("adapter_dtype", adapter_dtype, ("float32", "bfloat16"))
    check_choice("master_dtype", master_dtype, ("auto", "float32", "bfloat16"))
    check_tokenizer(tokenizer)
    if revision is not None:
        check_string("revision", revision)  # type: ignore[arg-type]
    if quantization is not None and lora is None and adapter is None:
        raise OptionError(
            f"quantization={quantization!r} freezes the base, so nothing would be trained: give lora, for example "
            f"lora={{'r': 16}}."
        )
    if quantization is not None and isinstance(model, nn.Module):
        raise OptionError(
            "A model that is loaded already is used as it is: load it quantised yourself, or give its name to "
            "FineTuner."
        )
    has_adapters = hasattr(model, "peft_config")
    _check_folders(adapter, frozen_adapters, lora=lora, has_adapters=has_adapters)
    if lora is not None and has_adapters:
        raise OptionError("The model has PEFT adapters already: remove lora, or give the base model.")
    if master_dtype != "auto" and (lora is not None or adapter is not None or has_adapters):
        raise OptionError(
            f"master_dtype={master_dtype!r} is for full fine-tuning; the dtype of adapters is adapter_dtype."
        )


def _check_folders(
    adapter: str | None, frozen_adapters: Sequence[str] | None, *, lora: object, has_adapters: bool
) -> None:
    """Check the options that name folders of adapters."""
    if adapter is not None:
        check_string("adapter", adapter)
        if lora is not None:
            raise OptionError("adapter brings the configuration of its folder: remove lora, or remove adapter.")
    is_list = frozen_adapters is None or isinstance(frozen_adapters, (list, tuple))
    if not is_list or not all(isinstance(folder, str) for folder in frozen_adapters or ()):
        raise OptionError(f"frozen_adapters must be a list of folders, got {frozen_adapters!r}.")
    if frozen_adapters and lora is None and adapter is None:
        raise OptionError("frozen_adapters are not trained: give lora or adapter for the adapter that is.")
    if adapter is not None and has_adapters:
        raise OptionError("The model has PEFT adapters already: remove adapter, or give the base model.")


def check_optimizer_options(
    *,
    optimizer: object,
    learning_rate: float | None,
    weight_decay: float | None,
    scheduler: object,
    scheduler_interval: str,
    warmup_share: float,
    warmup_steps: int | None,
    min_learning_rate_share: float,
    loraplus_lr_ratio: float | None,
    has_adapters: bool,
) -> None:
    """Check the options of the optimizer and its schedule.

    Raises:
        OptionError: A value is not allowed.
    """
    if optimizer is not None and not callable(optimizer):
        raise OptionError(
            f"optimizer must be called with the parameters, got {optimizer!r} ({type(optimizer).__name__})."
        )
    if not callable(scheduler):
        check_choice("scheduler", scheduler, SCHEDULES)
    check_choice("scheduler_interval", scheduler_interval, ("step", "epoch"))
    check_share("warmup_share", warmup_share)
    check_share("min_learning_rate_share", min_learning_rate_share)
    if learning_rate is not None:
        check_float("learning_rate", learning_rate, low=0.0, high=LARGEST_RATE)
    if weight_decay is not None:
        check_float("weight_decay", weight_decay, low=0.0, high=LARGEST_RATE)
    if warmup_steps is not None:
        check_int("warmup_steps", warmup_steps, low=0, high=LARGEST_STEP)
    if loraplus_lr_ratio is not None:
        check_float("loraplus_lr_ratio", loraplus_lr_ratio, low=1.0, high=LARGEST_RATE)
        if not has_adapters:
            raise OptionError(
                "loraplus_lr_ratio is for adapters, and the whole model is trained: give lora, or remove it."
            )


def check_second_model(name: str, model: object) -> None:
    """Check that a reference or a teacher is a name, a folder or a model."""
    if isinstance(model, nn.Module):
        return
    if not isinstance(model, str):
        raise OptionError(f"{name} must be a name, a folder or a model, got {model!r} ({type(model).__name__}).")
    check_string(name, model)


def collect_hyperparameters(
    model: object, *, source: ModelSource | None, lora: LoraConfig | None, tokenizer: object, **options: Any
) -> dict[str, Any]:
    """Return the options of the model that a checkpoint keeps.

    They have plain types only, so that torch.load(weights_only=True) reads them: a model or a tokenizer that is an
    object is dropped.

    Args:
        model: As in ``Tuner``.
        source: Where the model is read from; None for a module.
        lora: The parsed LoRA configuration.
        tokenizer: As in ``Tuner``.
        **options: All other options.
    """
    from lightning_fastft.hf.lora import describe_lora, to_plain

    kept = {**options, "lora": None if lora is None else describe_lora(lora)}
    if source is not None:
        kept["model"] = to_plain(source.config.to_diff_dict() if hasattr(model, "to_diff_dict") else model)
    if isinstance(tokenizer, str):
        kept["tokenizer"] = tokenizer
    return kept


def collect_optimizer_hyperparameters(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of the optimizer that a checkpoint keeps: all but a scheduler that is a function."""
    return {name: value for name, value in options.items() if not callable(value)}
