"""Checkpoints of a sharded model: a folder with one file per rank, which a thread writes during training."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_fastft.activations.budgets import auto_host_bytes
from lightning_fastft.checkpoint.files import check_file
from lightning_fastft.checkpoint.io import VerifiedCheckpointIO, warn_of_options, warn_without_digest
from lightning_fastft.checkpoint.lightning_internals import RESUME_END, log_hyperparameters
from lightning_fastft.checkpoint.ranks import on_all_ranks
from lightning_fastft.core.checks import check_bool, local_path
from lightning_fastft.core.errors import CheckpointNotSavedError, DamagedCheckpointError
from lightning_fastft.strategies.expert_parallel import ExpertParallelMixin
from lightning_fastft.strategies.first_state import read_first_state

if TYPE_CHECKING:
    from pathlib import Path

    from lightning.pytorch import Trainer
    from torch.optim import Optimizer

    from lightning_fastft.checkpoint.folder_writer import FolderWriter


class FolderCheckpointStrategy(ExpertParallelMixin, ModelParallelStrategy):
    """Save and load a sharded model in folders.

    Args:
        save_distributed_checkpoint: As in ``FastFTFSDPStrategy``.
        async_save: As in ``FastFTFSDPStrategy``.
        **kwargs: Arguments of the parent strategies.
    """

    def __init__(self, *, save_distributed_checkpoint: bool, async_save: bool, **kwargs: Any) -> None:
        check_bool("save_distributed_checkpoint", save_distributed_checkpoint)
        super().__init__(save_distributed_checkpoint=save_distributed_checkpoint, **kwargs)
        self.async_save = check_bool("async_save", async_save)
        self._writer: FolderWriter | None = None
        # The Trainer whose hyperparameters are still to be logged.
        self._unlogged: Trainer | None = None

    def setup(self, trainer: Trainer) -> None:
        """Set up the parent strategies, and hold the hyperparameters back.

        Lightning logs them after this, and loads the checkpoint of a resumed run, which replaces some, after that.
        """
        super().setup(trainer)
        if trainer.enable_autolog_hparams:
            self._unlogged, trainer.enable_autolog_hparams = trainer, False

    def barrier(self, name: str | None = None) -> None:
        """Wait for the other ranks; after a checkpoint could be loaded, log the hyperparameters that were held back."""
        super().barrier(name)
        if name == RESUME_END and (trainer := self._release_hyperparameters()) is not None:
            log_hyperparameters(trainer)

    def _release_hyperparameters(self) -> Trainer | None:
        trainer, self._unlogged = self._unlogged, None
        if trainer is not None:
            trainer.enable_autolog_hparams = True
        return trainer

    def teardown(self) -> None:
        """Finish a checkpoint that is still being written, and tear down the parent strategies."""
        self._release_hyperparameters()
        try:
            self.finish_saves()
        finally:
            if self._writer is not None:
                self._writer.close()
                self._writer = None
            super().teardown()
            self.checkpoint_io.teardown()

    def on_train_end(self) -> None:
        """Wait for the last checkpoint.

        Raises:
            CheckpointNotSavedError: It was not written; on all ranks.
        """
        super().on_train_end()
        self.finish_saves()

    def on_exception(self, exception: BaseException) -> None:
        """Wait for a checkpoint that is being written, and report its error in addition to that of the run."""
        super().on_exception(exception)
        writer, self._writer = self._writer, None
        # Its process group is not destroyed, because other ranks may be gone.
        failure = None if writer is None else writer.finish()
        if failure is not None:
            rank_zero_warn(f"The last checkpoint was not saved: {failure}")

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the sharded state of the model; layers that an evaluation left gathered are sharded first."""
        self._reshard()
        return super().lightning_module_state_dict()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the sharded state of an optimizer, as Lightning does; a read before the first step changes nothing."""
        inner = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        return super().optimizer_state(inner) if inner.state else read_first_state(inner, super().optimizer_state)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        """Save one file, or a folder, which is renamed after all ranks have written and rank 0 has their digests.

        During ``fit`` a folder is written in the background, see async_save.

        Raises:
            CheckpointNotSavedError: This checkpoint or the one before it was not written; on all ranks.
        """
        io = self.checkpoint_io
        if not isinstance(io, VerifiedCheckpointIO) or storage_options is not None:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        given = self.broadcast(filepath)
        if not self._save_distributed_checkpoint:
            # Lightning would remove an earlier folder at this path before the file is written.
            on_all_ranks(
                lambda: io.save_checkpoint(checkpoint, given) if self.is_global_zero else None,
                error=CheckpointNotSavedError,
            )
            return
        from lightning_fastft.checkpoint.folders import save_folder

        place = local_path(given, use="saved to")
        on_all_ranks(lambda: io.prepare(place.parent) if self.is_global_zero else None, error=CheckpointNotSavedError)
        io.own(place.parent)
        if not (self.async_save and self._is_fitting()):
            self.finish_saves()
            save_folder(checkpoint, place)
            return
        if self._writer is None:
            from lightning_fastft.checkpoint.folder_writer import FolderWriter

            self._writer = FolderWriter(self.root_device, self._timeout)
        self._writer.save(checkpoint, place, host_bytes=auto_host_bytes() // self.num_processes)

    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Remove a checkpoint; one that is being replaced is kept until its successor is committed."""
        remove = functools.partial(super().remove_checkpoint, filepath)
        if self._writer is None:
            remove()
        else:
            self._writer.then(remove)

    def finish_saves(self) -> None:
        """Wait until the checkpoint that is being written is committed. All ranks must call this.

        Raises:
            CheckpointNotSavedError: It was not written; on all ranks.
        """
        failure = None if self._writer is None else self._writer.finish()
        if failure is not None:
            raise failure

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Load verified tensors into the shards of the model.

        Raises:
            DamagedCheckpointError: A file has changed since it was written; on all ranks.
            UnsafeCheckpointError: A file holds more than tensors and plain types.
            ResumeError: Settings of this run and of the checkpoint do not fit.
        """
        self.finish_saves()
        self._reshard()
        if not isinstance(self.checkpoint_io, VerifiedCheckpointIO):
            return super().load_checkpoint(checkpoint_path, weights_only)
        place = local_path(self.broadcast(checkpoint_path), use="loaded from")
        warn_of_options(weights_only)
        io = self.checkpoint_io
        on_all_ranks(lambda: io.prepare(place.parent) if self.is_global_zero else None, error=DamagedCheckpointError)
        assert self.lightning_module is not None
        assert self.model is not None
        options: dict[str, Any] = {
            "module": self.model,
            "optimizers": self.optimizers,
            "strict": self.lightning_module.strict_loading,
            "judge": self._check_settings,
        }
        if place.is_dir():
            from lightning_fastft.checkpoint.folders import load_folder

            return load_folder(place, **options)
        from lightning_fastft.checkpoint.whole_files import load_whole

        on_all_ranks(lambda: check_file(place) if self.is_global_zero else True, error=DamagedCheckpointError)
        warn_without_digest(place)
        return load_whole(place, **options)

    def _is_fitting(self) -> bool:
        """Return whether training steps follow, during which a save can run; after an error, other ranks may not take
        part.
        """
        trainer = self._fastft_trainer
        if trainer is None or trainer.interrupted or trainer.state.status != TrainerStatus.RUNNING:
            return False
        return trainer.state.fn == TrainerFn.FITTING

    def _reshard(self) -> None:
        from lightning_fastft.hf.sharding.state import reshard

        assert self.model is not None
        reshard(self.model)
