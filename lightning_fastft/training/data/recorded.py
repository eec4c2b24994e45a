"""RecordedDataModule: the base of our DataModules, whose options are hyperparameters for loggers and checkpoints."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from lightning.pytorch import LightningDataModule
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.parsing import AttributeDict

from lightning_fastft.core.errors import FastFTError, count
from lightning_fastft.packing.loader import ENDLESS, PackedLoader
from lightning_fastft.packing.reading.sources import is_dataset
from lightning_fastft.training.hyperparameters import to_logged


class RecordedDataModule(LightningDataModule):
    """Save the options of a constructor as hyperparameters, which loggers write with those of the LightningModule."""

    def __str__(self) -> str:
        """Return the number of packs of each loader of this rank; Lightning's own text reads packs to count them."""
        lines = []
        for name, split in (("Train", "train"), ("Validation", "val"), ("Test", "test"), ("Predict", "predict")):
            try:
                loader = getattr(self, f"{split}_dataloader")()
            except (FastFTError, MisconfigurationException):
                loader = None
            if isinstance(loader, dict):
                size = ", ".join(f"{key} {_show_length(part)}" for key, part in loader.items())
            else:
                size = _show_length(loader) if isinstance(loader, PackedLoader) else "None"
            lines.append(f"{{{name} dataloader: {size}}}")
        return "\n".join(lines)

    def record_options(self, given: Mapping[str, Any]) -> None:
        """Save options as hyperparameters, as plain types; skip those with an object, such as rows or a tokenizer.

        Args:
            given: The local variables of a constructor, whose arguments are the options.
        """
        options = {name: value for name, value in given.items() if name not in ("self", "__class__")}
        self.save_hyperparameters({name: _to_plain(value) for name, value in options.items() if _is_plain(value)})

    @property
    def hparams_initial(self) -> AttributeDict:
        """The hyperparameters as they were saved, in the form that loggers take; none while a Trainer evaluates.

        One run of MLflow refuses a second value, and a model that was trained can be tested on other data.
        An option whose name the LightningModule has saved with another value is named ``data/NAME``: Lightning refuses
        two values of one name.
        """
        trainer = self.trainer
        if trainer is not None and trainer.state.fn not in (None, TrainerFn.FITTING):
            return AttributeDict()
        module = None if trainer is None else trainer.lightning_module
        theirs: Mapping[str, Any] = {} if module is None else module.hparams_initial
        return AttributeDict(
            {
                f"data/{name}" if name in theirs and not _is_same(value, theirs[name]) else name: value
                for name, value in to_logged(super().hparams_initial).items()
            }
        )


def _is_plain(value: object) -> bool:
    """Return whether an option can be logged: a number, a text, a path, or lists and mappings of them."""
    if isinstance(value, Mapping):
        return not is_dataset(value) and all(map(_is_plain, (*value, *value.values())))
    if isinstance(value, (list, tuple)):
        # Mappings in a list are rows.
        return all(_is_plain(entry) and not isinstance(entry, Mapping) for entry in value)
    return value is None or isinstance(value, (bool, int, float, str, os.PathLike))


def _to_plain(value: Any) -> Any:
    """Return an option as types that torch.load(weights_only=True) and YAML read."""
    if isinstance(value, Mapping):
        return {_to_plain(name): _to_plain(entry) for name, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_to_plain(entry) for entry in value]
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _is_same(value: object, other: object) -> bool:
    """Return whether Lightning takes two values of one name as equal."""
    return type(value) is type(other) and bool(value == other)


def _show_length(loader: PackedLoader) -> str:
    return "endless" if len(loader) == ENDLESS else count(len(loader), "pack")
