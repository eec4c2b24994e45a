"""FastFTFabric: packed training, fused layers, the planner and verified checkpoints in a user's own Fabric loop."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.fabric.wrappers import _unwrap_objects
from lightning.pytorch.callbacks import Callback
from typing_extensions import Self

from lightning_fastft.activations.checkpointing import OffloadCheckpointing
from lightning_fastft.callbacks.bincount_router import BincountRouter
from lightning_fastft.callbacks.finite_guard import FiniteGuard
from lightning_fastft.callbacks.fused_kernels import FusedKernels
from lightning_fastft.callbacks.gradient_health import GradientHealth
from lightning_fastft.checkpoint.io import VerifiedCheckpointIO
from lightning_fastft.checkpoint.ranks import destroy_groups_at_exit, on_all_ranks
from lightning_fastft.core.checks import check_int
from lightning_fastft.core.errors import CheckpointNotSavedError, OptionError
from lightning_fastft.core.status import Status
from lightning_fastft.fabric.loop_run import LoopRun, NotingLoader
from lightning_fastft.packing.loader import PackedLoader
from lightning_fastft.strategies.packed_steps import PackedSteps
from lightning_fastft.training.data.trainer_facts import LoopFacts
from lightning_fastft.training.datamodule import PackedDataModule
from lightning_fastft.training.optimizer import FusedAdamW

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType

    from torch import nn
    from torch.optim import Optimizer

# Callbacks whose hooks a Fabric loop can call; the others need a Trainer.
CALLBACKS = (FusedKernels, BincountRouter, FiniteGuard, GradientHealth)
# Number of arguments of Fabric.clip_gradients with error_if_nonfinite, behind module and optimizer.
_PLACE_OF_ERROR = 4


class FastFTFabric(Fabric):
    """Lightning Fabric whose ``setup`` installs packed training on the model, until ``close``.

    ``setup`` changes the model as ``strategy="fastft"`` and ``"fastft_ddp"`` do. Callbacks of this package work as
    under a Trainer, and losses and gradients are the same. ``backward`` refuses a packed batch that no attention layer
    read; ``save`` and ``load`` write and verify checkpoints as the strategies do. Use it in a ``with`` block, or call
    ``close``, which restores the model.

    Set dtypes on the model (``from_pretrained(..., dtype=torch.bfloat16)``); the precision of Fabric stays "32-true".
    fp32 adapters on a base of lower precision get low-precision copies, as in FineTuner.

    Args:
        attention: As in FastFTStrategy.
        activations: As in FastFTStrategy.
        callbacks: FusedKernels, BincountRouter, FiniteGuard, GradientHealth, and any objects with hooks of Fabric.
        plugins: As in Fabric; checkpoints are written by VerifiedCheckpointIO unless another CheckpointIO is given.
        **kwargs: Other arguments of Fabric. ``strategy`` is a single-device strategy or "ddp".

    Raises:
        OptionError: The strategy shards or splits the model, the precision changes dtypes, or a callback needs a
            Trainer.

    Example:
        >>> from lightning_fastft import FusedKernels
        >>> fabric = FastFTFabric(accelerator="cpu", devices=1, callbacks=[FusedKernels()])
        >>> fabric.statuses()
        []
    """

    def __init__(
        self,
        *,
        attention: str = "auto",
        activations: OffloadCheckpointing | None = None,
        callbacks: list[Any] | Any = None,
        plugins: Any = None,
        **kwargs: Any,
    ) -> None:
        listed = callbacks if isinstance(callbacks, list) else [] if callbacks is None else [callbacks]
        if str(strategy := kwargs.get("strategy")).startswith("fastft"):
            raise OptionError(
                f"strategy={strategy!r} is for a Trainer. FastFTFabric prepares the model itself: leave strategy out "
                "on one device, or use strategy='ddp'. For FSDP2 use Trainer(strategy='fastft_fsdp') with FineTuner."
            )
        super().__init__(callbacks=list(listed), plugins=plugins, **kwargs)
        check_fabric(self)
        given = plugins if isinstance(plugins, list) else [plugins]
        # Ours needs POSIX; Windows keeps Lightning's.
        if os.name == "posix" and not any(isinstance(plugin, CheckpointIO) for plugin in given):
            self.strategy.checkpoint_io = VerifiedCheckpointIO()
        self._fastft = LoopRun(
            self,
            PackedSteps(attention=attention, activations=activations or OffloadCheckpointing("auto")),
            [callback for callback in listed if isinstance(callback, CALLBACKS)],
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._fastft.end(error)

    def close(self) -> None:
        """End the run: check the remaining steps, and undo every change to the model. A second call does nothing.

        Raises:
            NotTrainingError: From a callback, about the last steps.
        """
        self._fastft.end(None)

    def statuses(self) -> list[Status]:
        """Return the statuses of the table that ``setup`` logs."""
        return self._fastft.statuses()

    def launch(self, function: Callable[..., Any] = lambda _: None, *args: Any, **kwargs: Any) -> Any:
        """Start the processes as Fabric does; process groups are destroyed in order at exit."""
        result = super().launch(function, *args, **kwargs)
        destroy_groups_at_exit()
        return result

    def setup(self, module: nn.Module, *optimizers: Optimizer, **kwargs: Any) -> Any:
        """Install packed training and the callbacks on the module, and set it up as Fabric does.

        Raises:
            UnsupportedModelError: A family cannot be trained exactly on packs; the module is unchanged.
            OptionError: Another module is set up, or an option does not fit the model.
        """
        return self._fastft.install(
            module, lambda: super(FastFTFabric, self).setup(module, *optimizers, **kwargs), list(optimizers)
        )

    def setup_module(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Set up a module as ``setup`` does, without an optimizer."""
        return self._fastft.install(module, lambda: super(FastFTFabric, self).setup_module(module, *args, **kwargs), [])

    def setup_optimizers(self, *optimizers: Optimizer) -> Any:
        """Set up the optimizers of a module that is already set up."""
        result = super().setup_optimizers(*optimizers)
        self._fastft.watch(list(optimizers))
        return result

    def setup_datamodule(self, data: PackedDataModule, *, accumulate: int = 1) -> Any:
        """Read, pack and plan the data of this rank, and return the loader of its training batches.

        Call it before ``setup``, so that the planner knows the longest pack, unless the data need the tokenizer of the
        module. Save ``data`` in the state of a checkpoint to resume at its position. Divide each loss by
        ``accumulate``.

        Args:
            data: The data; pass its validation loader to ``setup_dataloaders``.
            accumulate: Micro-batches per optimizer step, at least 1.

        Raises:
            DataError: There is nothing to train, or ranks read different data.
        """
        check_int("accumulate", accumulate, low=1)
        self._validate_launched()
        run = self._fastft
        run.datamodule = data
        data.loop = LoopFacts(self.world_size, self.global_rank, accumulate, self.strategy, run.lightning_module)
        if self.local_rank == 0:
            data.prepare_data()
        self.barrier()
        data.setup("fit")
        return NotingLoader(data.train_dataloader(), run, is_training=True)

    def setup_dataloaders(self, *dataloaders: Any, **kwargs: Any) -> Any:
        """Set up loaders of packed batches, of a PackedDataModule or of ``DataLoader(collate_fn=collate)``."""
        loaders = [
            NotingLoader(
                loader
                if isinstance(loader, PackedLoader)
                else super(FastFTFabric, self).setup_dataloaders(loader, **kwargs),
                self._fastft,
            )
            for loader in dataloaders
        ]
        return loaders[0] if len(loaders) == 1 else loaders

    def backward(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """Check the batch of a loss, then run the backward.

        Raises:
            ContextError: No attention layer read the packed batch, or the module was called without its DDP wrapper.
            OptionError: No module or no optimizer is set up.
        """
        self._fastft.before_backward(tensor)
        super().backward(tensor, *args, **kwargs)

    def clip_gradients(self, module: Any, optimizer: Any, *args: Any, **kwargs: Any) -> torch.Tensor | None:
        """Clip gradients as Fabric does. With a 2-norm, FusedAdamW clips in its next step, without a host sync.

        ``error_if_nonfinite`` then has no effect: use FiniteGuard, which skips such steps. If FiniteGuard is active, it
        is False for other optimizers too, unless it is given.
        """
        inner = _unwrap_objects(optimizer)
        max_norm, clip_val = kwargs.get("max_norm"), args[0] if args else kwargs.get("clip_val")
        is_2_norm = clip_val is None and not args and kwargs.get("norm_type", 2) == 2
        if isinstance(inner, FusedAdamW) and max_norm is not None and is_2_norm:
            return inner.clip_next(float(max_norm))
        # Clipping hides infinite gradients, so the callbacks check them first.
        self._fastft.before_step(inner, clip_val=clip_val)
        # FiniteGuard(unsupported="wait") drops those of a bad step, and torch cannot clip none by value.
        grads = [each.grad for group in inner.param_groups for each in group["params"] if each.grad is not None]
        if clip_val is not None and not grads:
            return None
        if self._fastft.skips_bad_steps() and len(args) < _PLACE_OF_ERROR:
            kwargs.setdefault("error_if_nonfinite", False)
        return super().clip_gradients(module, optimizer, *args, **kwargs)

    def save(
        self,
        path: str | Path,
        state: dict[str, Any],
        filter: dict[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        """Save a checkpoint atomically with its SHA-256; every rank calls it, and a failure on one raises on all.

        Raises:
            CheckpointNotSavedError: The checkpoint was not written; an earlier one at this path is unchanged.
        """
        if unknown := set(filter or ()) - set(state):
            raise OptionError(f"filter names {sorted(unknown)}, and the state has {sorted(state)}.")
        plain = _unwrap_objects(self._fastft.make_whole(state))
        on_all_ranks(
            lambda: self.strategy.save_checkpoint(path=path, state=plain, filter=filter), error=CheckpointNotSavedError
        )

    def load(self, path: str | Path, state: dict[str, Any] | None = None, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Verify and load a checkpoint; with ``strict=False``, warn of trained weights that it does not have, and of
        weights that the module does not have.

        Raises:
            DamagedCheckpointError: Its bytes have changed since they were written.
            UnsafeCheckpointError: It holds more than tensors and plain types.
        """
        with self._fastft.comparing_weights():
            remainder = super().load(path, state, *args, **kwargs)
        self._fastft.refresh()
        return remainder


def check_fabric(fabric: Fabric) -> None:
    """Refuse strategies, precisions and callbacks that are not supported here."""
    strategy = fabric.strategy
    if type(strategy) not in (SingleDeviceStrategy, DDPStrategy):
        raise OptionError(
            f"FastFTFabric trains a whole model on one device or on several with strategy='ddp'; "
            f"{type(strategy).__name__} is not supported. For FSDP2 use Trainer(strategy='fastft_fsdp') with FineTuner."
        )
    precision = strategy.precision.precision
    if precision != "32-true":
        raise OptionError(
            f"precision={precision!r} would change the dtypes of fused layers and adapters. Remove it, and load the "
            "model in its dtype: from_pretrained(..., dtype=torch.bfloat16)."
        )
    for callback in fabric._callbacks:
        if isinstance(callback, Callback) and not isinstance(callback, CALLBACKS):
            known = ", ".join(kind.__name__ for kind in CALLBACKS)
            raise OptionError(f"{type(callback).__name__} needs a Trainer. FastFTFabric takes {known}.")
