"""The options of a Tuner: which values are allowed, and what a checkpoint keeps of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from torch import nn

from lightning_fastft.core.checks import (
    check_bool,
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
    from transformers import PreTrainedTokenizerBase

    from lightning_fastft.hf.loading.source import ModelSource
    from lightning_fastft.training.tuner import Tuner

# Ten times the largest rate in use, and more steps than a run has: a larger number has a misplaced decimal point.
LARGEST_RATE, LARGEST_STEP = 1e3, 10**9
_DEFAULT_WARMUP_SHARE = 0.03
# Options of the model and of the optimizer that a checkpoint keeps as they are.
_KEPT_OF_OPTIMIZER = (
    "learning_rate", "weight_decay", "scheduler", "scheduler_interval", "warmup_share", "warmup_steps",
    "min_learning_rate_share", "loraplus_lr_ratio",
)  # fmt: skip
# Those whose values a resumed run takes from its checkpoint, as Lightning restores the optimizer.
_RESTORED = ("learning_rate", "weight_decay", "loraplus_lr_ratio")
_KEPT = ("quantization", "dtype", "adapter_dtype", "master_dtype", "revision", "frozen_adapters", "init")


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Options of ``Tuner`` from which the model is built."""

    tokenizer: str | PreTrainedTokenizerBase | Any
    quantization: Literal["nf4"] | None
    lora: dict[str, Any] | LoraConfig | None
    init: Literal["pretrained", "random"]
    dtype: Literal["auto", "bfloat16", "float16", "float32"]
    adapter_dtype: Literal["float32", "bfloat16"]
    master_dtype: Literal["auto", "float32", "bfloat16"]
    revision: str | None
    accept_other_base: bool
    adapter: str | None
    frozen_adapters: list[str] | None

    def check(self, model: object) -> None:
        """Check the options for a model.

        Raises:
            OptionError: A value is not allowed, or two options do not fit.
        """
        from lightning_fastft.hf.dtypes import DTYPES

        check_choice("quantization", self.quantization, (None, "nf4"))
        check_choice("dtype", self.dtype, ("auto", *DTYPES))
        check_choice("adapter_dtype", self.adapter_dtype, ("float32", "bfloat16"))
        check_choice("master_dtype", self.master_dtype, ("auto", "float32", "bfloat16"))
        check_tokenizer(self.tokenizer)
        check_bool("accept_other_base", self.accept_other_base)
        if self.revision is not None:
            check_string("revision", self.revision)
        if self.quantization is not None and self.lora is None and self.adapter is None:
            raise OptionError(
                f"quantization={self.quantization!r} freezes the base, so nothing would be trained: give lora, for "
                "example lora={'r': 16}."
            )
        if self.quantization is not None and isinstance(model, nn.Module):
            raise OptionError(
                "A model that is loaded already is used as it is: load it quantised yourself, or give its name to "
                "FineTuner."
            )
        has_adapters = hasattr(model, "peft_config")
        self._check_folders(has_adapters=has_adapters)
        if self.lora is not None and has_adapters:
            raise OptionError("The model has PEFT adapters already: remove lora, or give the base model.")
        if self.master_dtype != "auto" and (self.lora is not None or self.adapter is not None or has_adapters):
            raise OptionError(
                f"master_dtype={self.master_dtype!r} is for full fine-tuning; the dtype of adapters is adapter_dtype."
            )

    def _check_folders(self, *, has_adapters: bool) -> None:
        """Check the options that name folders of adapters."""
        if self.adapter is not None:
            check_string("adapter", self.adapter)
            if self.lora is not None:
                raise OptionError(
                    "adapter brings the configuration of its folder, and lora is given too. Remove lora (on the "
                    "command line: --model.lora null), or remove adapter."
                )
            if has_adapters:
                raise OptionError("The model has PEFT adapters already: remove adapter, or give the base model.")
        folders = () if self.frozen_adapters is None else self.frozen_adapters
        if not isinstance(folders, (list, tuple)) or not all(isinstance(folder, str) for folder in folders):
            raise OptionError(f"frozen_adapters must be a list of folders, got {self.frozen_adapters!r}.")
        if folders and self.lora is None and self.adapter is None:
            raise OptionError("frozen_adapters are not trained: give lora or adapter for the adapter that is.")

    def to_hyperparameters(
        self, model: object, *, source: ModelSource | None, lora: LoraConfig | None
    ) -> dict[str, Any]:
        """Return the options that a checkpoint keeps.

        They have plain types only, so that torch.load(weights_only=True) reads them: a model or a tokenizer that is an
        object is dropped.

        Args:
            model: As in ``Tuner``.
            source: Where the model is read from; None for a module.
            lora: The parsed LoRA configuration.
        """
        from lightning_fastft.hf.lora import describe_lora, to_plain

        kept = {name: getattr(self, name) for name in _KEPT}
        kept["lora"] = None if lora is None else describe_lora(lora)
        if source is not None:
            kept["model"] = to_plain(source.config.to_diff_dict() if hasattr(model, "to_diff_dict") else model)
        if isinstance(self.tokenizer, str):
            kept["tokenizer"] = self.tokenizer
        return kept


def check_optimizer_options(tuner: Tuner) -> None:
    """Check the options of the optimizer and its schedule.

    Raises:
        OptionError: A value is not allowed.
    """
    optimizer = tuner.optimizer_factory
    if optimizer is not None and not callable(optimizer):
        raise OptionError(
            f"optimizer must be called with the parameters, got {optimizer!r} ({type(optimizer).__name__})."
        )
    if not callable(tuner.scheduler):
        check_choice("scheduler", tuner.scheduler, SCHEDULES)
    check_choice("scheduler_interval", tuner.scheduler_interval, ("step", "epoch"))
    check_share("warmup_share", tuner.warmup_share)
    check_share("min_learning_rate_share", tuner.min_learning_rate_share)
    if tuner.learning_rate is not None:
        check_float("learning_rate", tuner.learning_rate, low=0.0, high=LARGEST_RATE)
    if tuner.weight_decay is not None:
        check_float("weight_decay", tuner.weight_decay, low=0.0, high=LARGEST_RATE)
    if tuner.warmup_steps is not None:
        check_int("warmup_steps", tuner.warmup_steps, low=0, high=LARGEST_STEP)
    has_share = tuner.warmup_share not in (0.0, _DEFAULT_WARMUP_SHARE)
    if callable(tuner.scheduler) and (tuner.warmup_steps or has_share or tuner.min_learning_rate_share):
        raise OptionError(
            "warmup_share, warmup_steps and min_learning_rate_share have no effect on a scheduler of your own, got "
            f"warmup_share={tuner.warmup_share}, warmup_steps={tuner.warmup_steps}, "
            f"min_learning_rate_share={tuner.min_learning_rate_share}. Remove them, or remove scheduler."
        )
    if tuner.loraplus_lr_ratio is not None:
        check_float("loraplus_lr_ratio", tuner.loraplus_lr_ratio, low=1.0, high=LARGEST_RATE)
        if not tuner.has_adapters:
            raise OptionError(
                "loraplus_lr_ratio is for adapters, and the whole model is trained: give lora, or remove it."
            )


def check_interval(tuner: Tuner) -> None:
    """Check, when the optimizer is made, that scheduler_interval has an effect.

    A tuner that is loaded from a checkpoint has it without the scheduler.

    Raises:
        OptionError: It has none.
    """
    if tuner.scheduler_interval != "step":
        raise OptionError(
            f"scheduler_interval={tuner.scheduler_interval!r} is for a scheduler of your own, and "
            f"scheduler={tuner.scheduler!r} moves in every optimizer step. Remove it, or give a scheduler such as "
            "torch.optim.lr_scheduler.StepLR."
        )


def check_second_model(name: str, model: object) -> None:
    """Check that a reference or a teacher is a name, a folder or a model.

    Raises:
        OptionError: It is something else, a folder of adapters or a checkpoint.
    """
    if isinstance(model, nn.Module):
        return
    if not isinstance(model, str):
        raise OptionError(f"{name} must be a name, a folder or a model, got {model!r} ({type(model).__name__}).")
    check_string(name, model)
    folder = Path(model).expanduser()
    is_adapters = (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file()
    if is_adapters or (folder.suffix == ".ckpt" and folder.exists()):
        kind = "a folder of PEFT adapters" if is_adapters else "a checkpoint"
        raise OptionError(
            f"{name}={model!r} is {kind}, not a model. Write the whole model and give its folder: fastft export "
            f"{model} FOLDER --merge"
        )


def collect_optimizer_hyperparameters(tuner: Tuner) -> dict[str, Any]:
    """Return the options of the optimizer that a checkpoint keeps: all but a scheduler that is a function."""
    options = {name: getattr(tuner, name) for name in _KEPT_OF_OPTIMIZER}
    return {name: value for name, value in options.items() if not callable(value)}


def collect_restored_hyperparameters(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of the optimizer in a checkpoint that replace those of the run that resumes it."""
    saved = checkpoint.get("hyper_parameters") or {}
    return {name: saved[name] for name in _RESTORED if name in saved}
