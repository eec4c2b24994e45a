"""A mixin for Lightning strategies that installs packed training and owns the activation policy."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_fastft.activations.budgets import auto_vram_bytes, is_unified
from lightning_fastft.activations.checkpointing import OffloadCheckpointing
from lightning_fastft.checkpoint.io import VerifiedCheckpointIO
from lightning_fastft.checkpoint.last import with_last
from lightning_fastft.checkpoint.lightning_internals import skip_rate_finders
from lightning_fastft.checkpoint.places import prepare_places
from lightning_fastft.checkpoint.ranks import destroy_groups_at_exit, on_all_ranks
from lightning_fastft.checkpoint.resume import ExactResume
from lightning_fastft.checkpoint.settings import check_optimizer, check_scheduler, check_settings, values_of_settings
from lightning_fastft.checkpoint.stops import RunStopped
from lightning_fastft.checkpoint.wide_states import restore_wide_states
from lightning_fastft.core.checks import check_bool
from lightning_fastft.core.collection import collect_after_step, collect_between_steps
from lightning_fastft.core.errors import CheckpointNotSavedError, ResumeError, describe_mismatch
from lightning_fastft.core.status import Status, render_status_table
from lightning_fastft.strategies.even_batches import check_even_batches
from lightning_fastft.strategies.memory_errors import StepWitness
from lightning_fastft.strategies.monitors import check_loggers, check_monitors, share_monitored
from lightning_fastft.strategies.move_to_host import moving_within_memory
from lightning_fastft.strategies.packed_steps import PackedSteps, check_loaders, collect_statuses, environment_of
from lightning_fastft.strategies.patching import callbacks_of, patcher_of
from lightning_fastft.strategies.step_down import BACKWARD, HALF_DONE, NOTHING_TRAINED, StepDownMixin

if TYPE_CHECKING:
    from pathlib import Path

    from lightning.fabric.plugins import CheckpointIO
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.utilities.types import STEP_OUTPUT
    from torch.optim import Optimizer

    from lightning_fastft.core.patcher import ModelPatcher


class FastFTStrategyMixin(StepDownMixin):
    """Install packed training in ``setup``, check every packed step before its backward, undo all in ``teardown``.

    A strategy instance belongs to one Trainer (Lightning refuses a second one). It holds no device object before
    ``setup`` and can be pickled until then.

    Args:
        activations: Policy for activations between forward and backward; None is ``OffloadCheckpointing("auto")``.
        attention: Backend of the packed attention; "auto" chooses by device, head shape and longest document.
            "one_by_one" runs the documents of a pack one at a time with the model's own attention: exact for every
            family, and slow.
        exact_resume: Whether to add the callback ExactResume if the Trainer has none. It saves random states in
            checkpoints, and a checkpoint after a signal.
        **kwargs: Arguments of the parent strategy.

    Raises:
        OptionError: activations is not an OffloadCheckpointing, or attention names no backend.
    """

    def __init__(
        self,
        *,
        activations: OffloadCheckpointing | None = None,
        attention: str = "auto",
        exact_resume: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.exact_resume = check_bool("exact_resume", exact_resume)
        self.checkpointing = activations if activations is not None else OffloadCheckpointing("auto")
        self.packed_steps = PackedSteps(attention=attention, activations=self.checkpointing)
        self._fastft_trainer: Trainer | None = None
        self._patcher: ModelPatcher | None = None
        self._has_logged_backends = False
        self._collects_garbage = False
        self._even_batches: Status | None = None

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """Return the CheckpointIO: the user's, else ours; a wrapper without an inner one wraps ours."""
        # Ours needs POSIX; Windows keeps Lightning's.
        if os.name == "posix":
            if self._checkpoint_io is None:
                self._checkpoint_io = VerifiedCheckpointIO()
            elif isinstance(self._checkpoint_io, _WrappingCheckpointIO):
                self._checkpoint_io.checkpoint_io = VerifiedCheckpointIO()
        return super().checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        self._checkpoint_io = io

    def _configure_launcher(self) -> None:
        """Make ``ckpt_path="last"`` find the newest intact checkpoint, including those of stopped runs."""
        super()._configure_launcher()
        self._launcher = with_last(self._launcher)

    def connect(self, model: LightningModule) -> None:
        """Connect the module, and add ExactResume to its Trainer while callbacks can still be added."""
        super().connect(model)
        if self.exact_resume and model._trainer is not None and not _resumes_exactly(model._trainer):
            callbacks_of(model._trainer).append(ExactResume())

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        """Save; a failure on one rank raises on all ranks, so that no rank waits for another.

        Raises:
            CheckpointNotSavedError: The checkpoint was not written.
            DeviceMemoryError: Memory ran out; an earlier file at this path is unchanged.
        """
        save = super().save_checkpoint
        with self._explaining_memory("save", effect="The checkpoint was not written; those before it are whole."):
            on_all_ranks(lambda: save(checkpoint, filepath, storage_options), error=CheckpointNotSavedError)

    def finish_saves(self) -> None:
        """Wait until every checkpoint is written. No-op unless overridden: saves are synchronous."""

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the state of the model.

        Raises:
            DeviceMemoryError: Memory ran out.
        """
        with self._explaining_memory("save", effect="The checkpoint was not written; those before it are whole."):
            return super().lightning_module_state_dict()

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Load a checkpoint, and refuse settings that do not fit before a tensor is used.

        Raises:
            DamagedCheckpointError: The bytes have changed since they were written.
            UnsafeCheckpointError: The checkpoint holds more than tensors and plain types.
            ResumeError: Settings of this run and of the checkpoint do not fit.
        """
        # With ckpt_path="last" rank 0 has chosen the checkpoint.
        checkpoint = super().load_checkpoint(self.broadcast(checkpoint_path), weights_only)
        self._check_settings(checkpoint)
        return checkpoint

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the weights of a checkpoint.

        Raises:
            ResumeError: The weights belong to another model: other names or shapes.
        """
        try:
            super().load_model_state_dict(checkpoint, strict=strict)
        except RuntimeError as error:
            found = describe_mismatch(error)
            if not found:
                raise
            raise ResumeError(
                f"The checkpoint holds the weights of another model: {found}. Resume with the model and the adapters "
                "of that run, or start without ckpt_path."
            ) from error

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Restore the optimizers; moments that one holds on the host stay there.

        Raises:
            ResumeError: The state is that of another kind of optimizer or scheduler.
        """
        self._check_kinds(checkpoint)
        if not any(getattr(optimizer, "offload", 0.0) for optimizer in self.optimizers):
            super().load_optimizer_state_dict(checkpoint)
            if self.lightning_module is not None:
                restore_wide_states(self.optimizers, checkpoint, self.lightning_module)
            return
        # Lightning would move them to the device.
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"]):
            optimizer.load_state_dict(state)

    def setup_environment(self) -> None:
        """Join the other ranks, destroy the process groups in order at exit, and cap the device memory at its budget.

        Raises:
            OptionError: The process holds more device memory than the budget, or W&B has no login.
        """
        super().setup_environment()
        destroy_groups_at_exit()
        trainer = None if self.lightning_module is None else self.lightning_module._trainer
        if trainer is not None:
            check_loggers(trainer)
            # Before the model is built.
            self.checkpointing.cap(self.root_device, patcher_of(trainer))

    @property
    def weights_device(self) -> torch.device:
        """Where a model is built: on the host if its weights are streamed from there, else on the device."""
        return torch.device("cpu") if self.checkpointing.streams_from_host else self.root_device

    def stream_if_larger(self, model_bytes: Callable[[int], int]) -> None:
        """Stream the frozen weights of a model that is not built yet, if the policy may decide so and they alone are
        larger than the memory for the run. All ranks follow rank 0.

        Args:
            model_bytes: Takes the memory for the run, and returns the size of the weights, or 0 if they are smaller.
        """
        options, device = self.checkpointing.options, self.root_device
        trainer = None if self.lightning_module is None else self.lightning_module._trainer
        is_open = options.policy == options.weights == "auto"
        if trainer is None or not is_open or device.type != "cuda" or is_unified(device):
            return
        budget = options.vram_budget_bytes or auto_vram_bytes(device)
        num_bytes = model_bytes(budget)
        if self.broadcast(num_bytes > budget):
            self.checkpointing.stream(patcher_of(trainer))
            rank_zero_info(
                f"activations: the weights of the model ({num_bytes / 2**30:.1f} GiB) are larger than the memory of "
                f"the run ({budget / 2**30:.1f} GiB), so it is loaded on the host and frozen weights are streamed"
            )

    @contextlib.contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Build the model in this block, on ``weights_device``; explain an out-of-memory error.

        Raises:
            DeviceMemoryError: The message has the budget.
        """
        place = self.weights_device if self.checkpointing.streams_from_host else contextlib.nullcontext()
        with self._explaining_memory("load", effect=NOTHING_TRAINED), super().tensor_init_context(empty_init), place:
            yield

    def model_to_device(self) -> None:
        """Move the model to the device of this rank; frozen weights that are streamed go to pinned memory instead."""
        if self.checkpointing.streams_from_host:
            self.packed_steps.place(self.root_device)
        super().model_to_device()  # type: ignore[safe-super]

    def on_exception(self, exception: BaseException) -> None:
        """Keep the process groups after an error; a run that a signal stopped destroys them, on all ranks."""
        super().on_exception(exception)
        if not isinstance(exception, RunStopped):
            destroy_groups_at_exit(False)

    def setup(self, trainer: Trainer) -> None:
        """Install packed training on the built model, then set up the parent strategy."""
        self._fastft_trainer = trainer
        self._has_logged_backends, self._even_batches = False, None
        self._patcher = patcher_of(trainer)
        assert self.lightning_module is not None
        if trainer.state.fn == TrainerFn.FITTING:
            prepare_places(trainer, self._inner_checkpoint_io())
            skip_rate_finders(trainer, self._patcher)
        for callback in callbacks_of(trainer):
            if isinstance(callback, ExactResume):
                self._patcher.add_undo(functools.partial(callback.release_signals, trainer))
        self.packed_steps.install(self.lightning_module, self._patcher, environment_of(trainer))
        with self._explaining_memory("setup", effect=NOTHING_TRAINED):
            super().setup(trainer)
            if trainer.state.fn == TrainerFn.FITTING:
                self.packed_steps.check_documents()
            self.packed_steps.place(self.root_device)
            self.checkpointing.cap(self.root_device, self._patcher)

    def teardown(self) -> None:
        """Undo the remaining patches, then tear down the parent strategy."""
        if self._patcher is not None:
            self._patcher.undo()
        num_local_ranks = 1 if self._fastft_trainer is None else self._fastft_trainer.num_devices
        with moving_within_memory(self.lightning_module, num_local_ranks=num_local_ranks):
            super().teardown()

    def on_train_start(self) -> None:
        """Refuse ranks with different numbers of batches, and log the status table before the first training batch.

        Raises:
            DataError: The ranks have different numbers of batches.
            OptionError: EarlyStopping would find no metric at the end of the run, or a loader is not planned for it.
        """
        super().on_train_start()
        assert self._fastft_trainer is not None
        check_loaders(self._fastft_trainer)
        self._even_batches = check_even_batches(self._fastft_trainer)
        check_monitors(self._fastft_trainer)
        self.packed_steps.check_training_mode()
        assert self._patcher is not None
        share_monitored(self._fastft_trainer, self._patcher)
        self._collects_garbage = collect_between_steps(self._patcher)
        rank_zero_info("\n" + render_status_table(self.statuses()))

    def statuses(self) -> list[Status]:
        """Return the statuses of attention, loss head and activations, then of the module and the callbacks."""
        own = self.packed_steps.statuses()
        if self._fastft_trainer is None:
            return own
        found = [*collect_statuses(self._fastft_trainer, own), self._describe_checkpoints()]
        if not _resumes_exactly(self._fastft_trainer):
            removed, disabled = "ExactResume was removed from the callbacks", "disabled (exact_resume=False)"
            reason = removed if self.exact_resume else disabled
            found.append(Status("exact resume", "inactive", reason))
        if self._even_batches is not None and self._fastft_trainer.world_size > 1:
            found.append(self._even_batches)
        return found

    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        """Run the step; refuse it before the backward if no attention layer read the packed batch."""
        run_step = super().training_step
        output = self._run_or_step_down(lambda: self._judged_step(run_step, "training_step", *args, **kwargs))
        if not self._has_logged_backends and self.packed_steps.backends_used:
            self._has_logged_backends = True
            rank_zero_info("packed attention ran on: " + ", ".join(sorted(self.packed_steps.backends_used)))
        return output

    def validation_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        """Run the step, and refuse it if no attention layer read the packed batch."""
        return self._judged_step(super().validation_step, "validation_step", *args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        """Run the step, and refuse it if no attention layer read the packed batch."""
        return self._judged_step(super().test_step, "test_step", *args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step, and refuse it if no attention layer read the packed batch."""
        return self._judged_step(super().predict_step, "predict_step", *args, **kwargs)

    def backward(self, closure_loss: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Run the backward; explain an out-of-memory error.

        Raises:
            DeviceMemoryError: The message has the options for a restart.
        """
        with self._explaining_memory(BACKWARD, effect=HALF_DONE):
            return super().backward(closure_loss, *args, **kwargs)

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Run forward, backward and step; after an out-of-memory error of the step, report its changes.

        Raises:
            DeviceMemoryError: The message has the changes, and the options for a restart.
        """
        witness = StepWitness(optimizer)

        def run_closure() -> Any:
            loss = self._close_or_step_down(closure)
            witness.note()
            return loss

        with self._explaining_memory("optimizer step", effect=witness.describe):
            output = super().optimizer_step(optimizer, run_closure, model, **kwargs)
        if self._collects_garbage and self._fastft_trainer is not None:
            collect_after_step(self._fastft_trainer.global_step)
        return output

    def _check_settings(self, checkpoint: dict[str, Any]) -> None:
        # Without a module, or a Trainer, there is no run whose settings could differ.
        trainer = None if self.lightning_module is None else self.lightning_module._trainer
        if trainer is not None and trainer.state.fn == TrainerFn.FITTING:
            check_settings(checkpoint, trainer)
            # These strategies have the optimizers of this run by now, and load their states themselves.
            if self.restore_checkpoint_after_setup:
                self._check_kinds(checkpoint)

    def _check_kinds(self, checkpoint: Mapping[str, Any]) -> None:
        """Refuse states of other kinds of optimizers or schedulers than this run has."""
        settings, has_scheduler = values_of_settings(checkpoint, self.lightning_module), bool(self.lr_scheduler_configs)
        for optimizer, state in zip(self.optimizers, checkpoint.get("optimizer_states", [])):
            check_optimizer(optimizer, state, settings=settings, has_scheduler=has_scheduler)
        # Lightning restores schedulers last.
        for config, state in zip(self.lr_scheduler_configs, checkpoint.get("lr_schedulers", [])):
            check_scheduler(config.scheduler, state, settings=settings)

    def _inner_checkpoint_io(self) -> CheckpointIO:
        """Return the innermost CheckpointIO."""
        io = self.checkpoint_io
        return (io.checkpoint_io or io) if isinstance(io, _WrappingCheckpointIO) else io

    def _describe_checkpoints(self) -> Status:
        inner = self._inner_checkpoint_io()
        if isinstance(inner, VerifiedCheckpointIO):
            reason = "temporary file, SHA-256, sync, rename (URLs: a record last); verified before they are unpickled"
            return Status("checkpoints", "active", reason)
        return Status("checkpoints", "inactive", f"{type(inner).__name__} was given", "remove the CheckpointIO")

    def _judged_step(self, run_step: Callable[..., Any], name: str, *args: Any, **kwargs: Any) -> Any:
        batch = args[0] if args else next(iter(kwargs.values()), None)
        check_read = self.packed_steps.begin(batch)
        if name == "training_step":
            output = run_step(*args, **kwargs)
        else:
            with self._explaining_memory(name, effect="No weight was stepped."):
                output = run_step(*args, **kwargs)
        assert self.lightning_module is not None
        # A training step that returns nothing is skipped by Lightning, unless the module runs backward and step itself.
        if name != "training_step" or output is not None or not self.lightning_module.automatic_optimization:
            check_read(self.lightning_module, where=name)
        return output


def _resumes_exactly(trainer: Trainer) -> bool:
    return any(isinstance(callback, ExactResume) for callback in callbacks_of(trainer))
