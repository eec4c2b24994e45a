"""FastFTCLI: LightningCLI with the package's defaults, an import allowlist for configs, and short errors."""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn, get_args

from jsonargparse import Namespace
from lightning.fabric.utilities.enums import LightningEnum
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI
from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.utilities.exceptions import MisconfigurationException

import lightning_fastft
from lightning_fastft.checkpoint.remote import is_remote
from lightning_fastft.cli.answers import explain_refusal
from lightning_fastft.cli.command_record import CommandRecord
from lightning_fastft.cli.imports import check_named_functions, import_policy
from lightning_fastft.cli.outputs import SaveConfig, check_outputs
from lightning_fastft.cli.run_length import RunLength, check_has_end
from lightning_fastft.cli.trainer import FastFTTrainer
from lightning_fastft.cli.words import (
    DEFAULT_CLASSES,
    TRAINER_COMMANDS,
    TRAINER_DEFAULTS,
    check_checkpoint,
    find_configs,
    take_allowed_imports,
)
from lightning_fastft.core.collection import paused_collection
from lightning_fastft.core.errors import MissingDependencyError, OptionError, printable
from lightning_fastft.core.extras import find_extra, pip_line
from lightning_fastft.core.files import find_write_obstacle
from lightning_fastft.strategies.registry import register_strategies
from lightning_fastft.training.datamodule import PackedDataModule
from lightning_fastft.training.distillation import DistillationTuner
from lightning_fastft.training.fine_tuner import FineTuner
from lightning_fastft.training.policy import PolicyTuner
from lightning_fastft.training.preference import PreferenceTuner
from lightning_fastft.training.reward import RewardTuner
from lightning_fastft.training.rollouts import RolloutDataModule

_CALLBACK_OPTIONS = ("--trainer.callbacks", "--trainer.callbacks+")
# Classes that a command line may name without their module: the parser finds names of imported classes only.
SHORT_NAMES: tuple[type, ...] = (
    FineTuner,
    PreferenceTuner,
    RewardTuner,
    DistillationTuner,
    PolicyTuner,
    PackedDataModule,
    RolloutDataModule,
)


class FastFTArgumentParser(LightningArgumentParser):
    """Accept options only by their full names, and report errors in a few lines instead of the usage of 200 options.

    Args:
        *args: As Lightning's parser.
        **kwargs: As Lightning's parser.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # Abbreviations would hide misspelt names.
        super().__init__(*args, **{"allow_abbrev": False, "prog": "fastft", **kwargs})

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Write the reason and a hint to standard error and exit with status 2."""
        if not self.exit_on_error:
            super().error(message, ex)
        parser = getattr(ex, "subcommand_parser", None) or self
        options = [action.dest for action in parser._actions if action.dest]
        # Commands such as `data` and `plan` are not subcommands of the parser; they take the options of fit.
        program = parser.prog.replace(" [options]", "")
        program = program if program.split()[-1] in TRAINER_COMMANDS else f"{program} fit"
        answer = explain_refusal(message, options=options, program=program)
        sys.stderr.write(printable(answer, keeps_lines=True))
        sys.exit(2)


class FastFTCLI(LightningCLI):
    """LightningCLI for FineTuner and PackedDataModule, or any module and data module that the import policy allows.

    Differences from LightningCLI: there is no automatic optimizer, because the model is not built yet. A checkpoint
    restores weights and state but no settings, and is a local file read with ``weights_only=True``.
    ``trainer.log_every_n_steps`` depends on the length of the run.

    Args:
        args: Words of the command line without the program name; may include ``--allow-import`` and names of shipped
            configs.
        run: Whether args begin with a subcommand to run; otherwise only trainer, model and datamodule are created.
        callbacks: Callbacks to add to those of the config.

    Raises:
        OptionError: A config names a forbidden path, or a class rejects a value.
    """

    def __init__(self, args: Sequence[str], *, run: bool = True, callbacks: Sequence[Callback] = ()) -> None:
        # The package leaves it to us in the process of the command.
        register_strategies()
        words, self.allowed_imports = take_allowed_imports(args)
        if self.allowed_imports and "" not in sys.path:
            # Console scripts do not search the current folder. Append it, so that it shadows no installed module.
            sys.path.append("")
        self.words = words
        with import_policy(self.allowed_imports):
            super().__init__(
                LightningModule,
                LightningDataModule,
                subclass_mode_model=True,
                subclass_mode_data=True,
                auto_configure_optimizers=False,
                save_config_callback=SaveConfig,
                save_config_kwargs={"overwrite": True},
                trainer_class=FastFTTrainer,
                trainer_defaults={
                    **TRAINER_DEFAULTS,
                    "callbacks": [*callbacks, RunLength(), CommandRecord(args)] if run else list(callbacks),
                },
                seed_everything_default=1,
                parser_class=FastFTArgumentParser,
                args=_name_callbacks(find_configs(words)),
                run=run,
            )

    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]
        """Return the given subcommand, or all, and the arguments of the Trainer's methods that are not options.

        A parser is built for each.
        """
        kept = {name: skipped | {"weights_only"} for name, skipped in LightningCLI.subcommands().items()}
        given = self.words[:1]
        return {name: kept[name] for name in (given if given and given[0] in TRAINER_COMMANDS else TRAINER_COMMANDS)}

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Set FineTuner and PackedDataModule as default classes; read no file for an option that takes names."""
        parser.set_defaults({key: {"class_path": path} for key, path in DEFAULT_CLASSES.items()})
        for action in parser._actions:
            if str in get_args(getattr(action, "_typehint", None)):
                # The parser would read a file that has the name, such as a script called fastft, as the value.
                action._enable_path = False  # type: ignore[attr-defined]

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parse the given arguments, never sys.argv."""
        with paused_collection():
            self.config = parser.parse_args(list(args or []))
        _use_plain_texts(self.config)

    def _parse_ckpt_path(self) -> None:
        """Check that ckpt_path exists. Lightning's method would also override the command line by its settings."""
        check_checkpoint((self.config.get(self.config.get("subcommand") or "") or {}).get("ckpt_path"))

    def instantiate_classes(self) -> None:
        """Create model, data module and trainer; turn their errors into short messages."""
        check_named_functions(self.config, self.allowed_imports)
        check_outputs(self.config.get(self.subcommand) or self.config, words=self.words, allowed=self.allowed_imports)
        try:
            with paused_collection():
                super().instantiate_classes()
        except (ValueError, MisconfigurationException) as error:
            if "Does not validate" in str(error):
                # The parser validates some values only now.
                self._parser(self.subcommand).error(str(error))
            raise OptionError(f"{error}{_suggest(str(error))}") from error
        except TypeError as error:
            # Lightning's accelerators raise it for a number of devices, timedelta for a unit that it does not know.
            if "invalid keyword argument" in str(error):
                raise OptionError(
                    f"trainer.max_time or val_check_interval: {error}. The units are days, hours, minutes and seconds: "
                    "--trainer.max_time.hours 8"
                ) from error
            if "devices" not in str(error):
                raise
            raise OptionError(f"trainer.devices: {error}") from error
        except ModuleNotFoundError as error:
            # Lightning's loggers name the package in different ways.
            extra = find_extra(error.name or "") or ("wandb" if "wandb" in str(error) else "")
            if "Requirement '" in str(error):
                # Of an accelerator that this machine does not have, as tpu.
                raise MissingDependencyError(str(error)) from error
            if not extra:
                raise
            raise MissingDependencyError(f"{error!s:.100}. Install it with: {pip_line(extra)}") from error
        if self.subcommand:
            _check_folders(self.trainer, command=self.subcommand)

    def _run_subcommand(self, subcommand: str) -> None:
        """Run the Trainer; turn Lightning's errors about its use into short messages."""
        try:
            super()._run_subcommand(subcommand)
        except MisconfigurationException as error:
            raise OptionError(str(error)) from error
        except ValueError as error:
            if "`val_check_interval`" not in str(error):
                raise
            raise OptionError(f"trainer.val_check_interval:{error}") from error

    def _set_seed(self) -> None:
        """Seed everything; turn numpy's error into a short message."""
        try:
            super()._set_seed()
        except ValueError as error:
            raise OptionError(f"seed_everything: {error}. Give a whole number of at least 0.") from error

    def before_fit(self) -> None:
        """Refuse a run without an end, after everything that is wrong in the config."""
        check_has_end(self.config.fit.trainer)

    def _prepare_subcommand_kwargs(self, subcommand: str) -> dict[str, Any]:
        """Load checkpoints as tensors and plain types only, whatever the environment sets."""
        return {**super()._prepare_subcommand_kwargs(subcommand), "weights_only": True}


def _use_plain_texts(config: Any) -> None:
    """Replace Lightning's enums in a config by their texts: ``Timer`` has one as a default, which YAML cannot hold."""
    if isinstance(config, list):
        for entry in config:
            _use_plain_texts(entry)
    elif isinstance(config, Namespace):
        for name, value in vars(config).items():
            if isinstance(value, LightningEnum):
                setattr(config, name, value.value)
            _use_plain_texts(value)


def _name_callbacks(words: Sequence[str]) -> list[str]:
    """Return the words with the full names of our callbacks: the parser finds short names of imported classes only.

    Example:
        >>> _name_callbacks(["--trainer.callbacks+=FusedKernels", "--trainer.callbacks", "RunReport"])
        ['--trainer.callbacks+=lightning_fastft.FusedKernels', '--trainer.callbacks', 'lightning_fastft.RunReport']
    """
    found: list[str] = []
    for word in words:
        option, equals, name = word.rpartition("=")
        is_value = bool(found) and found[-1] in _CALLBACK_OPTIONS and not equals
        if name in lightning_fastft.__all__ and (option in _CALLBACK_OPTIONS or is_value):
            word = f"{option}{equals}lightning_fastft.{name}"
        found.append(word)
    return found


def _check_folders(trainer: Trainer, *, command: str) -> None:
    """Reject a folder of the run or of a logger that cannot be written to, before the data is tokenised."""
    # What a fit writes without a logger is in the Trainer's folder: rejected rows, reports, checkpoints of a signal.
    root = trainer.default_root_dir
    folders = {"--trainer.default_root_dir FOLDER": root} if command == "fit" else {}
    for logger in trainer.loggers:
        folder = logger.save_dir or "."
        # Lightning's own logger writes to the Trainer's folder.
        is_root = Path(folder).absolute() == Path(root).absolute()
        folders["--trainer.default_root_dir FOLDER" if is_root else f"save_dir of {type(logger).__name__}"] = folder
    for option, folder in folders.items():
        obstacle = "" if is_remote(folder) or not trainer.is_global_zero else find_write_obstacle(Path(folder))
        if obstacle:
            raise OptionError(f"The run cannot write to {folder}: {obstacle}. Give another folder: {option}.")


def _suggest(message: str) -> str:
    """Return what to change after an error of Lightning, as a sentence; "" where it says that itself."""
    if re.search(r"No supported gpu backend|`CUDAAccelerator` can not run", message):
        return (
            " torch sees no GPU: look at nvidia-smi and at torch.version.cuda (None is a build for CPUs). To train on "
            "the CPU: --trainer.accelerator cpu"
        )
    if "`Trainer(devices=" in message:
        return " Give a number of devices, at least 1: --trainer.devices 1"
    found = re.search(r"`strategy='([^']+)'`", message)
    # The name may be the path of a class.
    given = found[1].rpartition(".")[2] if found else ""
    near = difflib.get_close_matches(given, StrategyRegistry.available_strategies(), n=1)
    return f" Did you mean {near[0]}?" if near else ""
