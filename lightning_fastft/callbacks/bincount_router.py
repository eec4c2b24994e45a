"""BincountRouter: the experts of mixture models on one stable sort, one count and grouped products, under any strategy."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from lightning.pytorch.callbacks import Callback

from lightning_fastft.errors import SwapError
from lightning_fastft.status import Status

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from torch import nn

    from lightning_fastft.models.swap import SwapLedger

_NAME = "BincountRouter"


class BincountRouter(Callback):
    """Route tokens to experts by one stable sort and one count, without a host wait, in every transformers model inside the LightningModule.

    Gather, grouped products, gate and weighted sum replace the experts function of transformers; routers, parameters and state-dict keys stay. Works
    in training and evaluation, with adapters on the experts or without, for FineTuner and for any LightningModule. Everything is taken back at the
    end and after an exception. A dense model is left alone, and the table says so.

    Raises:
        UnsupportedModelError: A model has MoE layers and none can be served, or its experts are sharded (FSDP2); raised when the model stands.

    Example:
        >>> BincountRouter().status()
        [Status(name='expert router', state='inactive', reason='not installed', remedy='')]
    """

    def __init__(self) -> None:
        self._ledger: SwapLedger | None = None
        self._statuses: list[Status] = []
        self._is_running = False

    @property
    def is_installed(self) -> bool:
        """Whether the swaps are in place."""
        return self._ledger is not None

    def status(self) -> list[Status]:
        """Return what is active, for the table of the run; after the run, what was."""
        return self._statuses or [Status("expert router", "inactive", "not installed")]

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Ask a FineTuner to swap while it builds its model, before it is sharded and before strategies measure it."""
        self._is_running = True
        register: Any = getattr(pl_module, "register_transform", None)
        if callable(register):
            # A model that stands already is swapped when the run starts.
            with contextlib.suppress(SwapError):
                register(_NAME, self._transform, stage="after_adapters")

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Install before sanity validation, after configure_model."""
        self._start(pl_module)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Install for ``trainer.validate``."""
        self._start(pl_module)

    def on_test_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Install for ``trainer.test``."""
        self._start(pl_module)

    def on_predict_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Install for ``trainer.predict``."""
        self._start(pl_module)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Take every swap back."""
        self._undo()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Take every swap back; Lightning calls no teardown of callbacks after an exception."""
        self._undo()

    def _transform(self, model: nn.Module) -> None:
        # A FineTuner keeps the transform of a run that ended before its model was built.
        if self._is_running:
            self._install(model)

    def _start(self, pl_module: pl.LightningModule) -> None:
        from lightning_fastft.models.moe import check_unsharded

        self._install(pl_module)
        # Experts that were whole when a FineTuner built its model may have been cut since.
        check_unsharded(pl_module)

    def _install(self, root: nn.Module) -> None:
        # Imported on first use: callbacks must be importable without transformers.
        from lightning_fastft.models.moe import install_bincount_router
        from lightning_fastft.models.swap import SwapLedger

        if self._ledger is not None:
            return
        self._ledger = SwapLedger()
        is_done = False
        try:
            self._statuses = install_bincount_router(root, self._ledger)
            is_done = True
        finally:
            if not is_done:
                self._undo()

    def _undo(self) -> None:
        ledger, self._ledger, self._is_running = self._ledger, None, False
        if ledger is not None:
            ledger.undo()
