"""GradientHealth: stop a run that does not train and name the tensors."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from lightning.fabric.strategies import DDPStrategy as FabricDDPStrategy
from lightning.fabric.strategies import SingleDeviceStrategy as FabricSingleDeviceStrategy
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_fastft.callbacks.optimizer_judge import FEWEST_STEPS_TO_JUDGE, OptimizerJudge
from lightning_fastft.core.checks import check_int, check_string
from lightning_fastft.core.errors import NotTrainingError, OptionError, list_names
from lightning_fastft.core.given_once import GivenOnce
from lightning_fastft.core.status import Status
from lightning_fastft.strategies.packed_steps import find_packed_batches
from lightning_fastft.strategies.patching import patcher_of

if TYPE_CHECKING:
    import torch
    from lightning.pytorch import LightningModule, Trainer
    from torch import nn

    from lightning_fastft.packing.collate import PackedBatch

# Strategies that hold every parameter whole.
WHOLE = (SingleDeviceStrategy, DDPStrategy, FabricSingleDeviceStrategy, FabricDDPStrategy)


class GradientHealth(GivenOnce, Callback):
    """Check in the first optimizer steps that every trainable tensor gets a finite, non-zero gradient and moves.

    A step counts if it can train: its learning rate is above 0, its accumulation window has a labelled token (for a
    ``PolicyTuner`` also a group of unequal rewards), and it was not skipped (by a training step that returned None or
    by the gradient scaler). A non-finite gradient in such a step stops the run at once, as does a gradient whose square
    overflows the optimizer moments. Gradients are read right after the optimizer step, so they are clipped unless the
    optimizer itself clips. A run whose learning rate stays 0 or that never meets a labelled token gets a warning after
    num_steps optimizer steps and fails at its end. Later steps cost nothing. Trained tensors of image towers are
    checked only in steps with images; a run with fewer than three such steps gets a warning.

    Under FSDP2 each rank reads its shards and ranks combine what they saw. Every step counts there, because a rank
    cannot know whether others have labelled tokens, and trained tensors of image towers are not checked.

    Args:
        num_steps: Number of steps to check, at least 3.
        allow_zero: Name patterns (``*`` and ``?``) of tensors that may have no gradient, such as experts that may
            receive no token.

    Raises:
        OptionError: A value is not allowed.
        NotTrainingError: From the training loop, with the names of the tensors and what to check.

    Cost:
        In checked steps, two passes over the trainable tensors and one over the optimizer state on the device, and
        under FSDP2 an all-reduce of three bytes per tensor. Results are copied to pinned memory and read one step
        late, without a host sync.

    Source:
        own.

    Example:
        >>> GradientHealth(allow_zero=["*.experts.*"]).status().state
        'inactive'
    """

    def __init__(self, *, num_steps: int = 20, allow_zero: Sequence[str] = ()) -> None:
        self.num_steps = check_int("num_steps", num_steps, low=FEWEST_STEPS_TO_JUDGE)
        patterns = (allow_zero,) if isinstance(allow_zero, str) else allow_zero
        if not isinstance(patterns, Sequence) or isinstance(patterns, (bytes, bytearray)):
            raise OptionError(f"allow_zero must list name patterns, got {allow_zero!r}.")
        self.allow_zero = tuple(check_string("allow_zero", pattern) for pattern in patterns)
        self._judges: list[OptimizerJudge] = []
        self._status = Status("gradient health", "inactive", "no training yet")

    def status(self) -> Status:
        """Return what is checked, or the result."""
        return self._status

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """List the trainable tensors and start to watch the optimizers."""
        self._stop_watching()
        patcher_of(trainer).add_undo(self._stop_watching)
        is_sharded = isinstance(trainer.strategy, ModelParallelStrategy)
        if not is_sharded and not isinstance(trainer.strategy, WHOLE):
            reason = f"{type(trainer.strategy).__name__} may shard its parameters in a form that this check cannot read"
            self._status = Status("gradient health", "refused", reason, "use one device, DDP or fastft_fsdp")
            return
        if is_sharded:
            from lightning_fastft.hf.sharding.state import reshard_trained

            # Under Lightning's own strategy the root still holds its weights whole after the sanity check.
            reshard_trained(pl_module)
        named = [
            (name, parameter)
            for name, parameter in pl_module.named_parameters()
            if parameter.requires_grad and parameter.numel() > 0
        ]
        self._check_trainable(pl_module, named, trainer.optimizers)
        in_tower = _find_tower(pl_module)
        parts = [[each for each in named if (id(each[1]) in in_tower) is is_tower] for is_tower in (False, True)]
        judges = [
            OptimizerJudge(
                optimizer,
                parts[is_tower],
                num_steps=self.num_steps,
                is_allowed=self.is_allowed,
                # A loop under Fabric may train a plain module.
                is_automatic=getattr(pl_module, "automatic_optimization", True),
                is_tower=is_tower,
                is_sharded=is_sharded,
            )
            for optimizer in trainer.optimizers
            # Ranks that share results must judge the same steps, and only some of them may have images.
            for is_tower in ((False,) if is_sharded else (False, True))
            if parts[is_tower] or not is_tower
        ]
        self._judges = judges
        num_unchecked = len(parts[True]) if is_sharded else 0
        note = f"; {num_unchecked} of image towers are not checked in shards" if num_unchecked else ""
        self._status = Status(
            "gradient health",
            "active",
            f"{len(named) - num_unchecked} tensors, checked in the first {self.num_steps} steps that can train{note}",
        )

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Count labelled tokens and images on the host; an unpacked batch counts as labelled and with images."""
        if self._judges:
            packed = find_packed_batches(batch)
            has_signal = getattr(pl_module, "has_signal", _has_labels)
            has_labels = any(has_signal(found) for found in packed) or not packed
            has_images = any(found.has_images for found in packed) or not packed
            for judge in self._judges:
                judge.has_labels |= has_labels and (has_images or not judge.is_tower)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: torch.Tensor) -> None:
        """Record that this optimizer step has a backward."""
        for judge in self._judges:
            judge.has_backward = True

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        """Read and check the results of earlier steps that have arrived."""
        for judge in self._judges:
            judge.judge()
        open_kinds = {judge.is_tower for judge in self._judges if not judge.is_done}
        done = [judge for judge in self._judges if judge.is_tower not in open_kinds]
        if not done:
            return
        waiting = [judge for judge in self._judges if judge.is_tower in open_kinds]
        for judge in done:
            judge.close()
        self._judges = waiting
        num_tensors = sum(len(judge.names) for judge in done)
        note = f"; {sum(len(judge.names) for judge in waiting)} of image towers wait for images" if waiting else ""
        self._status = Status(
            "gradient health", "active", f"{num_tensors} tensors moved within {self.num_steps} steps{note}"
        )
        rank_zero_info(f"GradientHealth: {self._status.reason}.")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check a run that ended before num_steps."""
        for judge in self._judges:
            judge.finish()
        self._stop_watching()

    def is_allowed(self, name: str) -> bool:
        """Return whether a tensor may have no gradient."""
        return any(fnmatchcase(name, pattern) for pattern in self.allow_zero)

    def _check_trainable(
        self, module: nn.Module, named: list[tuple[str, nn.Parameter]], optimizers: list[torch.optim.Optimizer]
    ) -> None:
        """Refuse a run in which some trainable tensor cannot move."""
        if not named:
            raise NotTrainingError(
                f"{type(module).__name__} has no trainable tensor: every parameter has requires_grad=False. Check that "
                "adapters were added after the base model was frozen, and that no precision plugin froze them."
            )
        owned = {
            id(parameter)
            for optimizer in optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        left = [
            (name, parameter.ndim)
            for name, parameter in named
            if id(parameter) not in owned and not self.is_allowed(name)
        ]
        orphans = [name for name, _ in left]
        if orphans and owned and all(num_dimensions < 2 for _, num_dimensions in left):
            # Muon optimizes only matrices.
            rank_zero_warn(
                f"GradientHealth: {len(orphans)} of {len(named)} trainable tensors are vectors that no optimizer has, "
                "and stay as they are: "
                f"{list_names(orphans)}. Give them to a second optimizer, or set requires_grad=False on them."
            )
        elif orphans:
            raise NotTrainingError(
                f"{len(orphans)} of {len(named)} trainable tensors are in no optimizer and can never move: "
                f"{list_names(orphans)}. Build the "
                "optimizer in configure_optimizers from the parameters of the finished model, or set "
                "requires_grad=False on them."
            )

    def _stop_watching(self) -> None:
        for judge in self._judges:
            judge.close()
        self._judges = []


def _has_labels(batch: PackedBatch) -> bool:
    return batch.context.whole.num_labelled > 0


def _find_tower(module: nn.Module) -> set[int]:
    """Return the identities of the parameters that get a gradient only from images."""
    if "transformers" not in sys.modules:
        return set()
    from lightning_fastft.hf.families import tower_parameters

    return {id(parameter) for parameter in tower_parameters(module)}
