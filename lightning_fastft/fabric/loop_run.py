"""One run of a user's own loop, with the attributes of a Trainer that the callbacks of this package read."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
from lightning.fabric.strategies import DDPStrategy
from lightning.fabric.wrappers import _unwrap_compiled
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_fastft.callbacks.finite_guard import FiniteGuard
from lightning_fastft.core.errors import ContextError, NotTrainingError, OptionError, list_names
from lightning_fastft.core.status import Status, render_status_table
from lightning_fastft.fabric.handed import Handed, HandedBatches
from lightning_fastft.strategies.ddp import prepare_for_ddp
from lightning_fastft.strategies.packed_steps import PackedSteps, environment_of, find_packed_batches
from lightning_fastft.strategies.patching import patcher_of
from lightning_fastft.training.optimizer import FusedAdamW

if TYPE_CHECKING:
    from lightning.fabric import Fabric
    from lightning.pytorch import Trainer
    from lightning.pytorch.callbacks import Callback
    from torch import nn
    from torch.optim import Optimizer

    from lightning_fastft.core.patcher import ModelPatcher
    from lightning_fastft.training.datamodule import PackedDataModule


class LoopRun:
    """One run of a FastFTFabric, passed to the callbacks as their Trainer."""

    scaler = None
    precision = "32-true"

    def __init__(self, fabric: Fabric, packed_steps: PackedSteps, callbacks: list[Callback]) -> None:
        self.callbacks = callbacks
        self.datamodule: PackedDataModule | None = None
        self.lightning_module: Any = None
        self.optimizers: list[Optimizer] = []
        self.global_step = 0
        # Of the step that is being made.
        self.gradient_clip_val: float | None = None
        self.gradient_clip_algorithm: str | None = None
        self.fabric = fabric
        self._packed_steps = packed_steps
        self._given = tuple(callbacks)
        self._copies: Any = None
        self._handed = HandedBatches()
        self._batch_idx = 0
        self._has_backward = self._is_judged = False

    strategy = property(lambda self: self.fabric.strategy)
    world_size = property(lambda self: self.fabric.world_size)
    global_rank = property(lambda self: self.fabric.global_rank)
    num_devices = property(lambda self: getattr(self.fabric.strategy, "num_processes", 1))

    def statuses(self) -> list[Status]:
        """Return the statuses of packed training, of a FineTuner, and of the callbacks."""
        if self.lightning_module is None:
            return []
        found = self._packed_steps.statuses()
        found += getattr(self.lightning_module, "statuses", list)()
        if self._copies is not None:
            found.append(self._copies.status)
        for callback in self._given:
            status = cast("Any", callback).status()
            found += [status] if isinstance(status, Status) else status
        return found

    def install(self, module: nn.Module, set_up: Callable[[], Any], optimizers: list[Optimizer]) -> Any:
        """Change the module, have Fabric set it up, and start the callbacks; a failure undoes all."""
        if self.lightning_module is not None:
            raise OptionError(
                f"{type(self.lightning_module).__name__} is set up already, and one module is trained. Put several "
                "models into one nn.Module, or call fabric.close() before the next."
            )
        self.lightning_module = module = _unwrap_compiled(module)[0]
        try:
            patcher = self._patch(module)
            result = set_up()
            self._start(result[0] if isinstance(result, tuple) else result, patcher)
            if optimizers:
                self.watch(optimizers)
        except BaseException as error:
            self.end(error)
            raise
        rank_zero_info("\n" + render_status_table(self.statuses()))
        return result

    def _patch(self, module: nn.Module) -> ModelPatcher:
        self._call("setup", "fit")
        patcher = patcher_of(self._as_trainer())
        if isinstance(self.strategy, DDPStrategy):
            prepare_for_ddp(module, self.strategy._ddp_kwargs)
        self._packed_steps.install(module, patcher, environment_of(self._as_trainer()))
        # A FineTuner brings its own copies.
        self._copies = getattr(module, "low_precision_adapters", None) or _install_copies(module, patcher)
        return patcher

    def _start(self, wrapped: Any, patcher: ModelPatcher) -> None:
        """Start what needs the module on its device."""
        was_training = wrapped._forward_module.training

        def note_call(called: nn.Module, *_: Any) -> None:
            nonlocal was_training
            self._handed.begin_call(has_graph=torch.is_grad_enabled())
            if called.training is not was_training:
                # Loops swap averaged weights in for an evaluation, often through .data, which counts no version.
                was_training = called.training
                self.refresh()

        patcher.add_undo(wrapped._forward_module.register_forward_pre_hook(note_call).remove)
        if self.datamodule is not None and self.datamodule.loop is not None:
            self.datamodule.loop = self.datamodule.loop._replace(lightning_module=self.lightning_module)
        self._call("on_fit_start")
        self._packed_steps.check_documents()
        self._packed_steps.place(self.strategy.root_device)
        self.refresh()

    def watch(self, optimizers: list[Optimizer]) -> None:
        """Call the hooks of callbacks around the steps of optimizers."""
        if self.lightning_module is None:
            raise OptionError("fabric.setup(module) comes before fabric.setup_optimizers(optimizer).")
        if self.optimizers:
            raise OptionError("Optimizers are set up already: give all of them to one call of fabric.setup.")
        patcher = patcher_of(self._as_trainer())
        self.optimizers = optimizers
        for optimizer in optimizers:
            if isinstance(optimizer, FusedAdamW):
                patcher.add_undo(optimizer.release)
                if self._copies is not None:
                    optimizer.attach_copies(self._copies.pairs, on_written=self._copies.mark_written)
            patcher.add_undo(optimizer.register_step_pre_hook(self._begin_step).remove)
        self._call("on_train_start")
        # These hooks run after those of the callbacks.
        for optimizer in optimizers:
            patcher.add_undo(optimizer.register_step_post_hook(self._end_step).remove)

    def begin(self, batch: Any, *, awaits_backward: bool) -> Handed:
        """Record a batch that the loop receives, and may receive before it has trained earlier ones."""
        if self.lightning_module is None:
            raise ContextError(
                "No model is set up for the packed batches of this loader: call model, optimizer = "
                "fabric.setup(model, optimizer) before the loop."
            )
        self._packed_steps.begin(batch)
        return self._handed.add(batch, awaits_backward=awaits_backward)

    def finish_batch(self, entry: Handed) -> None:
        """Check a batch that had a forward and no backward, as in validation."""
        if self.lightning_module is not None:
            has_ended, was_called = self._handed.finish(entry)
            if has_ended and was_called:
                self._check([entry])

    def before_backward(self, loss: torch.Tensor) -> None:
        """Check the batch of a loss before its backward."""
        if self.lightning_module is None or not self.optimizers:
            raise OptionError(
                "fabric.backward comes before fabric.setup: call model, optimizer = fabric.setup(model, optimizer)."
            )
        trained = self._handed.take()
        if self.world_size > 1 and trained and not any(entry.has_graph for entry in trained):
            raise ContextError(
                f"{type(self.lightning_module).__name__} was called past DDP, so its gradients would differ between "
                "ranks: call the module that fabric.setup returned."
            )
        # Gradients that the loop dropped instead of stepping, for example after clipping, are not those of this window.
        self._is_judged = False
        if self._has_backward and not self._has_gradients():
            for callback in self._given:
                if isinstance(callback, FiniteGuard):
                    callback.drop_window()
        if not self._has_backward:
            self._packed_steps.check_training_mode()
        self._check(trained)
        for entry in trained:
            self._call("on_train_batch_start", entry.batch, self._batch_idx)
            self._batch_idx += 1
            if self.datamodule is not None and getattr(entry.batch, "index", -1) >= 0:
                self.datamodule.count_by_hand(entry.batch)
        self._call("on_before_backward", loss)
        self._has_backward = True

    def _check(self, entries: list[Handed]) -> None:
        """Refuse packed batches of which no attention layer read one."""
        packed = [found for entry in entries for found in find_packed_batches(entry.batch)]
        before = [reads for entry in entries for reads in entry.reads_before]
        self._packed_steps.check_read(packed, before, self.lightning_module, where="the loop")

    def before_step(self, optimizer: Optimizer, *, clip_val: float | None = None) -> None:
        """Let the callbacks check the gradients, once per step; they are clipped by value next if clip_val is given."""
        if not self._is_judged:
            self._is_judged = True
            if clip_val is not None:
                self.gradient_clip_val, self.gradient_clip_algorithm = clip_val, "value"
            self._call("on_before_optimizer_step", optimizer)
            self.gradient_clip_val = self.gradient_clip_algorithm = None

    def _has_gradients(self) -> bool:
        groups = (group for optimizer in self.optimizers for group in optimizer.param_groups)
        return any(each.grad is not None for group in groups for each in group["params"])

    def skips_bad_steps(self) -> bool:
        """Return whether a FiniteGuard is active."""
        return any(isinstance(each, FiniteGuard) and each.status().state == "active" for each in self._given)

    def _begin_step(self, optimizer: Optimizer, args: Any, kwargs: Mapping[str, Any]) -> None:
        if any(argument is not None for argument in (*args[1:], *kwargs.values())):
            raise OptionError("optimizer.step(closure) is not supported here: call fabric.backward, then step().")
        if not self._has_backward:
            raise NotTrainingError(
                f"{type(optimizer).__name__}.step() without fabric.backward(loss) since the last step: loss.backward() "
                "skips the checks of the batch. Call fabric.backward(loss)."
            )
        self.before_step(optimizer)

    def _end_step(self, optimizer: Optimizer, *_: Any) -> None:
        if self._copies is not None:
            self._copies.refresh(is_after_step=True)
        if optimizer is self.optimizers[-1]:
            self.global_step += 1
            self._has_backward = False
        self._is_judged = False
        self._call("on_train_batch_end", None, None, self._batch_idx)

    def make_whole(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return a state whose weights have no padding for adapters."""
        whole = dict(state)
        for key, value in state.items():
            module = _unwrap_compiled(value)[0]
            if self.lightning_module is not None and getattr(module, "module", module) is self.lightning_module:
                checkpoint = {"state_dict": value.state_dict()}
                self._call("on_save_checkpoint", checkpoint)
                whole[key] = checkpoint["state_dict"]
        return whole

    @contextlib.contextmanager
    def comparing_weights(self) -> Iterator[None]:
        """Warn of trained weights that a load in this block does not find, and of those that it does not use."""
        module, found = self.lightning_module, []
        if module is None:
            yield
            return
        handle = module.register_load_state_dict_post_hook(lambda _, keys: found.append(keys))
        try:
            yield
        finally:
            handle.remove()
        trained = {name for name, weight in module.named_parameters() if weight.requires_grad}
        for missing, unexpected in found:
            kinds = (
                (
                    [name for name in missing if name in trained],
                    "is without {} trained tensors of the module, unchanged",
                ),
                (unexpected, "has {} tensors that the module does not have, not loaded"),
            )
            for names, what in kinds:
                if names:
                    rank_zero_warn(
                        f"The checkpoint {what.format(len(names))}: {list_names(names)}. Build the model as in the run "
                        "of the checkpoint."
                    )

    def refresh(self) -> None:
        """Make low-precision copies of adapters equal to their masters."""
        if self._copies is not None:
            self._copies.refresh()

    def end(self, error: BaseException | None) -> None:
        """Check the last steps unless there was an error, then undo every change."""
        if self.lightning_module is None:
            return
        try:
            if error is None:
                self._call("on_train_end")
            else:
                self._call("on_exception", error)
        finally:
            # The first callback undoes the patches.
            self._call("teardown", "fit")
            self.callbacks[:] = self._given
            self.lightning_module = self._copies = None
            self._handed.clear()
            self.optimizers = []
            self._has_backward = self._is_judged = False

    def _call(self, hook: str, *args: Any) -> None:
        for callback in list(self.callbacks):
            getattr(callback, hook)(self._as_trainer(), self.lightning_module, *args)

    def _as_trainer(self) -> Trainer:
        return cast("Trainer", self)


class NotingLoader:
    """Yield the batches of a loader on the device, and record each in the run.

    Args:
        loader: The loader.
        run: The run.
        is_training: Whether its batches are trained, so that the loop may look ahead.
    """

    def __init__(self, loader: Any, run: LoopRun, *, is_training: bool = False) -> None:
        self._loader, self._run, self._is_training = loader, run, is_training

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        for batch in self._loader:
            moved = self._run.fabric.to_device(batch)
            entry = self._run.begin(moved, awaits_backward=self._is_training)
            yield moved
            self._run.finish_batch(entry)


def _install_copies(module: nn.Module, patcher: ModelPatcher) -> Any:
    """Create low-precision copies of fp32 adapters on a base of lower precision; None without a transformers model."""
    if "transformers.modeling_utils" not in sys.modules:
        return None
    from lightning_fastft.fused.low_precision_adapters import install_low_precision_adapters
    from lightning_fastft.hf.families import find_causal_models

    models = find_causal_models(module)
    if not models:
        return None
    return install_low_precision_adapters(module, patcher, compute_dtype=models[0][1].dtype)
