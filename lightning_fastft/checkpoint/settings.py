"""The settings of a run in its checkpoints: which of them may differ when it is resumed, and which are reported."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_fastft.core.errors import ResumeError

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer
    from torch.optim import Optimizer

STATE = "fastft_resume"
# The shapes of trained tensors depend on these settings, so they cannot change.
_FIXED = ("lora.r",)
# Settings that add groups to the optimizer if they are given.
_GROUPING = ("loraplus_lr_ratio",)
# Settings whose values come from the checkpoint and not from this run.
_RESTORED = (
    "learning_rate", "loraplus_lr_ratio", "weight_decay", "seed_everything",
    # Common names in modules of a user.
    "lr", "betas", "momentum",
)  # fmt: skip
# Settings from which learning rates of groups follow.
_RATE_SETTINGS = ("learning_rate", "loraplus_lr_ratio", "lr")
# Names in the states of all schedulers; versions of torch differ in them.
_NAMES_OF_ALL_SCHEDULERS = {
    "base_lrs", "last_epoch", "verbose", "_step_count", "_get_lr_called_within_step", "_last_lr", "_is_initial",
}  # fmt: skip
# Options of optimizers that a schedule changes, and options that only change the speed.
_RATES = {"lr", "initial_lr"}
_SPEED_OPTIONS = {"foreach", "fused", "capturable", "differentiable"}
_PLAIN_TYPES = (int, float, str, tuple, list, dict, type(None))
_NOT_GIVEN = object()
_TRAINER_SETTINGS = (
    "accumulate_grad_batches",
    "gradient_clip_val",
    "gradient_clip_algorithm",
    "max_steps",
    "max_epochs",
    "precision",
)


def collect_settings(trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
    """Return the settings of Trainer and module by dotted name, as plain types."""
    found = {name: getattr(trainer, name) for name in _TRAINER_SETTINGS}
    hparams = dict(getattr(pl_module, "hparams", {}))
    # Lightning makes some names members of enumerations, which no checkpoint of plain types can hold.
    return {
        name: str.__str__(value) if isinstance(value, str) else value
        for name, value in (found | flatten(hparams)).items()
        if isinstance(value, (int, float, str, list, tuple, type(None)))
    }


def flatten(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the leaves of nested mappings by dotted name; skip names that begin with an underscore.

    Example:
        >>> flatten({"lora": {"r": 4}, "_x": 1})
        {'lora.r': 4}
    """
    found: dict[str, Any] = {}
    for name, value in nested.items():
        if str(name).startswith("_"):
            continue
        if isinstance(value, Mapping):
            found.update(flatten(value, f"{prefix}{name}."))
        else:
            found[f"{prefix}{name}"] = value
    return found


def describe_differences(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """Return a line per setting that differs, with both values and the one that is used."""
    lines = []
    groups = _groups(saved) & _groups(current)
    for name in sorted(saved.keys() | current.keys()):
        # Other names may belong to another version of the package.
        if (name in saved and name in current) or name.rpartition(".")[0] in groups:
            before, now = saved.get(name, _NOT_GIVEN), current.get(name, _NOT_GIVEN)
            if _plain(before) != _plain(now):
                effect = "the checkpoint's is used" if name in _RESTORED else "this run's is used"
                lines.append(f"{name} was {_show(before)} and is {_show(now)} ({effect})")
    return lines


def values_of_settings(checkpoint: Mapping[str, Any], module: Any) -> dict[str, tuple[Any, Any]]:
    """Return the value in a checkpoint and the value of this run for each setting of a module that both have."""
    saved, current = checkpoint.get(STATE, {}).get("settings", {}), flatten(dict(getattr(module, "hparams", {})))
    return {name: (saved[name], current[name]) for name in saved.keys() & current.keys()}


def check_optimizer(
    optimizer: Optimizer,
    saved: Mapping[str, Any],
    *,
    settings: Mapping[str, tuple[Any, Any]],
    has_scheduler: bool = True,
) -> None:
    """Check that a saved state is not that of another kind of optimizer, by the options of its first group; warn of
    options and learning rates with another value, which torch replaces by those of the state.

    Args:
        optimizer: The optimizer of this run.
        saved: State of an optimizer in the checkpoint.
        settings: From ``values_of_settings``. ExactResume warns of those that differ, so that an option with the same
            two values, or a rate, is not reported again.
        has_scheduler: Whether a scheduler has learning rates, which ``check_scheduler`` compares.

    Raises:
        ResumeError: Each has numbers among its options that the other has not, or they have different numbers of
            parameter groups.
    """
    own, found = _numbers(optimizer.defaults), _numbers(saved["param_groups"][0])
    if own - found and found - own:
        raise ResumeError(
            f"The checkpoint holds the state of an optimizer with the options {', '.join(sorted(found))}, and "
            f"{type(optimizer).__name__} has {', '.join(sorted(own))}. Resume with the optimizer of that run, or start "
            "a new run from its weights without ckpt_path."
        )
    num_own, num_saved = len(optimizer.param_groups), len(saved["param_groups"])
    if num_own != num_saved:
        raise ResumeError(
            f"The optimizer of the checkpoint has {num_saved} parameter groups, and {type(optimizer).__name__} of this "
            f"run has {num_own}. Resume with the optimizer of that run, or start a new run from its weights without "
            "ckpt_path."
        )
    lines = _describe_options(optimizer, saved["param_groups"], settings=settings)
    if not has_scheduler and not _has_other_rates(settings):
        lines += _describe_rates(optimizer, saved["param_groups"])
    _warn_of_options(optimizer, lines)


def check_scheduler(scheduler: Any, saved: Mapping[str, Any], *, settings: Mapping[str, tuple[Any, Any]]) -> None:
    """Check that a saved state is not that of another kind of learning-rate scheduler, by its names; warn of options
    and initial learning rates with another value, which torch replaces by those of the state.

    Args:
        scheduler: The scheduler of this run.
        saved: Its state in the checkpoint.
        settings: As in ``check_optimizer``.

    Raises:
        ResumeError: Each has names that the other has not.
    """
    own, found = (set(state) - _NAMES_OF_ALL_SCHEDULERS for state in (scheduler.state_dict(), saved))
    if own - found and found - own:
        raise ResumeError(
            f"The checkpoint holds the state of a scheduler with {_list_names(found)}, and {type(scheduler).__name__} "
            f"has {_list_names(own)}. Resume with the scheduler of that run, or start a new run from its weights "
            "without ckpt_path."
        )
    lines = _describe_scheduler_options(scheduler, saved)
    if not _has_other_rates(settings):
        lines += _describe_initial_rates(scheduler, saved)
    _warn_of_options(scheduler, lines)
    # Of SequentialLR and ChainedScheduler.
    for inner, state in zip(getattr(scheduler, "_schedulers", ()), saved.get("_schedulers", ())):
        check_scheduler(inner, state, settings=settings)


def _list_names(names: set[str]) -> str:
    return ", ".join(sorted(name.lstrip("_") for name in names))


def check_settings(checkpoint: Mapping[str, Any], trainer: Trainer) -> None:
    """Check that the settings of this run fit the tensors of a checkpoint, before any tensor is loaded.

    Raises:
        ResumeError: A setting differs; the message has its name and both values.
    """
    saved = checkpoint.get(STATE, {}).get("settings", {})
    current = collect_settings(trainer, trainer.lightning_module)
    wrong = [
        f"{name} was {saved[name]!r} and is {current.get(name)!r}"
        for name in (*_FIXED, *_GROUPING)
        if name in saved
        and current.get(name) != saved[name]
        and (name in _FIXED or None in (current.get(name), saved[name]))
    ]
    if wrong:
        raise ResumeError(
            f"The checkpoint does not fit this run: {'; '.join(wrong)}. Resume with the values of the checkpoint, or "
            "start a new run without it."
        )


def _groups(settings: Mapping[str, Any]) -> set[str]:
    """Return the names of mappings that settings have leaves of."""
    return {name.rpartition(".")[0] for name in settings if "." in name}


def _show(value: Any) -> str:
    return "not given" if value is _NOT_GIVEN else repr(value)


def _numbers(options: Mapping[str, Any]) -> set[str]:
    """Return the names of options that are numbers, or tuples of these; versions of torch differ in flags."""
    names = {name for name, value in options.items() if isinstance(value, (int, float, tuple))}
    return {name for name in names if not isinstance(options[name], bool)} - _RATES


def _has_other_rates(settings: Mapping[str, tuple[Any, Any]]) -> bool:
    """Return whether a setting that determines learning rates differs, of which ExactResume warns."""
    return any(settings[name][0] != settings[name][1] for name in _RATE_SETTINGS if name in settings)


def _warn_of_options(owner: object, lines: Iterable[str]) -> None:
    for line in dict.fromkeys(lines):
        rank_zero_warn(f"Resumed with another option of {type(owner).__name__} than that of the checkpoint: {line}")


def _describe_options(
    optimizer: Optimizer, saved: Sequence[Mapping[str, Any]], *, settings: Mapping[str, tuple[Any, Any]]
) -> list[str]:
    """Return a line per option of a group whose values differ and change the arithmetic."""
    names = optimizer.defaults.keys() - _RATES - _SPEED_OPTIONS
    arguments = inspect.signature(type(optimizer)).parameters
    if not any(argument.kind is argument.VAR_KEYWORD for argument in arguments.values()):
        # Schedule-free optimizers count their steps in their groups.
        names &= arguments.keys()
    if "base_momentum" in saved[0]:
        # OneCycleLR and CyclicLR change the momentum in each step.
        names -= {"momentum", "betas"}
    return [
        _say_restored(name, group[name], own[name])
        for own, group in zip(optimizer.param_groups, saved)
        for name in sorted(names & group.keys())
        if isinstance(own[name], (int, float, tuple))
        and isinstance(group[name], (int, float, tuple, list))
        and _plain(own[name]) != _plain(group[name])
        and not _is_reported(settings.get(name), (group[name], own[name]))
    ]


def _is_reported(setting: tuple[Any, Any] | None, values: tuple[Any, Any]) -> bool:
    """Return whether the line of a setting already reports two values of an option.

    Args:
        setting: The setting in the checkpoint and in this run; None in place of one is the optimizer's own value.
        values: The option in the checkpoint and in this run.
    """
    if setting is None or setting[0] == setting[1]:
        return False
    return all(given is None or given == value for given, value in zip(setting, values))


def _describe_rates(optimizer: Optimizer, saved: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a line per group whose learning rate differs."""
    return [
        _say_restored("lr", group["lr"], own["lr"])
        for own, group in zip(optimizer.param_groups, saved)
        # LearningRateFinder adds a scheduler for its trial, and restores the checkpoint that it began with.
        if "initial_lr" not in own and isinstance(own["lr"], (int, float)) and _plain(group["lr"]) != own["lr"]
    ]


def _describe_scheduler_options(scheduler: Any, saved: Mapping[str, Any]) -> list[str]:
    """Return a line per argument of the class of a scheduler whose values in both states differ."""
    own = scheduler.state_dict()
    # Where a metric comes from is not part of a schedule, and its progress is not an option.
    arguments = inspect.signature(type(scheduler)).parameters.keys() - {
        "last_epoch",
        "monitor",
        "lr_lambda",
        "schedulers",
    }
    # PyTorch keeps some as _milestones or max_lrs.
    names = {kept for name in arguments for kept in (name, f"_{name}", f"{name}s") if kept in own and kept in saved}
    return [
        _say_restored(name.lstrip("_"), saved[name], own[name])
        for name in sorted(names)
        if isinstance(own[name], _PLAIN_TYPES) and _plain(saved[name]) != _plain(own[name])
    ]


def _describe_initial_rates(scheduler: Any, saved: Mapping[str, Any]) -> list[str]:
    """Return a line per group whose initial learning rate differs; groups of unfrozen layers come later."""
    return [
        _say_restored("lr", before, now)
        for before, now in zip(saved.get("base_lrs", ()), getattr(scheduler, "base_lrs", ()))
        if isinstance(now, (int, float)) and before != now
    ]


def _say_restored(name: str, before: Any, now: Any) -> str:
    return f"{name} was {_plain(before)!r} and is {_plain(now)!r} (the checkpoint's is used)."


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
