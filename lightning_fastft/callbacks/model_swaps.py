"""Base class of callbacks that swap modules of a model during a run."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from lightning.pytorch.callbacks import Callback

from lightning_fastft.core.errors import SwapError
from lightning_fastft.core.given_once import GivenOnce
from lightning_fastft.core.status import Status
from lightning_fastft.strategies.patching import patcher_of

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer
    from torch import nn

    from lightning_fastft.core.patcher import ModelPatcher


class ModelSwaps(GivenOnce, Callback):
    """Swap modules of every transformers model in the LightningModule during a run; subclasses choose the modules.

    A FineTuner swaps them while it builds its model, before the model is sharded and measured. In any other module they
    are swapped when the run starts, before sanity validation. The patcher of the run undoes the swaps.

    Raises:
        OptionError: In ``setup``: the Trainer has more than one callback of this class.
    """

    status_name = ""

    def __init__(self) -> None:
        self._patcher: ModelPatcher | None = None
        # Whether the swaps are in place.
        self.is_installed = False
        self._statuses: list[Status] = []

    def install(self, root: nn.Module, patcher: ModelPatcher) -> list[Status]:
        """Swap modules of root through the patcher, and return the statuses."""
        raise NotImplementedError

    def status(self) -> list[Status]:
        """Return the statuses for the table of the run, also after the run."""
        return self._statuses or [Status(self.status_name, "inactive", "not installed")]

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Register the swap with a FineTuner that builds its model later; refuse a second callback of this class."""
        super().setup(trainer, pl_module, stage)
        patcher = patcher_of(trainer)
        # Forgotten when the run ends.
        patcher.set_attribute(self, "_patcher", patcher)
        register: Any = getattr(pl_module, "register_transform", None)
        if callable(register):
            # A model that is already built is swapped when the run starts.
            with contextlib.suppress(SwapError):
                register(type(self).__name__, self._transform, stage="after_adapters")
        if stage == "fit":
            self.before_model(trainer, pl_module)

    def before_model(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Prepare a fit before a FineTuner builds its model; no-op unless overridden."""

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Install after configure_model; in a fit before sanity validation."""
        self._install(pl_module)

    on_validation_start = on_test_start = on_predict_start = on_fit_start

    def _transform(self, model: nn.Module) -> None:
        # A FineTuner may still have the transform of a run that ended before the model was built.
        if self._patcher is not None:
            self._install(model)

    def _install(self, root: nn.Module) -> None:
        if self.is_installed:
            return
        assert self._patcher is not None, "setup comes first"
        with self._patcher.stage():
            self._patcher.set_attribute(self, "is_installed", True)
            self._statuses = self.install(root, self._patcher)
