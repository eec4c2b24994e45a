"""FiniteGuard: skip optimizer steps with a non-finite loss or gradient, count them, and name their packs."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_fastft.callbacks.optimizer_judge import stored_values
from lightning_fastft.core.async_reader import AsyncScalarReader
from lightning_fastft.core.checks import check_choice, check_int
from lightning_fastft.core.errors import NotTrainingError
from lightning_fastft.core.given_once import GivenOnce
from lightning_fastft.core.status import Status
from lightning_fastft.strategies.packed_steps import find_packed_batches
from lightning_fastft.strategies.patching import patcher_of
from lightning_fastft.training.datamodule import PackedDataModule
from lightning_fastft.training.optimizer import FusedAdamW

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer
    from torch.optim import Optimizer

# An occasional bad pack is a data problem; max_skips of them in this many steps means that training diverged.
WINDOW_STEPS = 100
MOST_EXAMPLES_SHOWN = 8
STATUS_NAME = "finite guard"
_FLAGS = ("loss", "gradients")


class _Micro(NamedTuple):
    """Origin of a micro-batch: its number in the epoch, and for each pack its index in the plan, or -1."""

    batch_idx: int
    plan_indices: tuple[int, ...]
    num_documents: int


class FiniteGuard(GivenOnce, Callback):
    """Skip an optimizer step whose loss or gradients contain NaN or infinity, and stop the run after too many skips.

    Each rank computes a flag on the device from the losses of all micro-batches of the step and from the squared norm
    of all gradients. A norm above 1.8e19 sets the flag too, because its square overflows the second moment; torch's
    Adam and AdamW keep the moments of fp16 weights in fp16, where an element above 256 overflows. The flag is reduced
    over all ranks and passed to the optimizer as ``found_inf``, so that weights, moments, low-precision copies and step
    counts keep their bits on every rank. ``FusedAdamW`` and torch's fused optimizers read it. The learning-rate
    schedule advances, as after any step. Gradients are dropped with the next window. A warning names the packs of each
    skipped step once its flag is on the host. The run stops when max_skips of the last 100 steps were skipped.

    With ``Trainer(precision="16-mixed")`` the callback is inactive, because the loss scaler skips such steps. Manual
    optimization is refused, and so are several optimizers in a loop of FastFTFabric.

    Args:
        max_skips: Number of skipped steps among the last 100 that stops the run, 1 to 100.
        check_every_n_steps: Number of steps between two reads of flags on the host. The run stops at most twice this
            many steps after the step that reaches max_skips; bad steps until then are skipped too.
        unsupported: What to do with an optimizer that does not read ``found_inf``, such as those of bitsandbytes.
            "refuse": do not guard the run, warn, and say so in the status table. "wait": read the flag on the host in
            every step and drop the gradients of a bad step.

    Raises:
        OptionError: A value is not allowed.
        NotTrainingError: From the training loop, on every rank at the same step: max_skips is reached.

    Cost:
        About twelve launches on scalars per step, one all-reduce of two numbers per rank, and no host sync: flags are
        read check_every_n_steps after they were copied. On several ranks the host syncs if the device is further behind
        than that, because all ranks must stop at the same step. ``FusedAdamW`` that clips by norm provides its norm;
        otherwise gradients are read once more. "wait": one host sync per step.

    Source:
        own; ``found_inf`` is the protocol of torch.amp.GradScaler.

    Example:
        >>> FiniteGuard(max_skips=3).status().state
        'inactive'
    """

    def __init__(
        self, *, max_skips: int = 5, check_every_n_steps: int = 10, unsupported: Literal["refuse", "wait"] = "refuse"
    ) -> None:
        self.max_skips = check_int("max_skips", max_skips, low=1, high=WINDOW_STEPS)
        self.check_every_n_steps = check_int("check_every_n_steps", check_every_n_steps, low=1)
        self.unsupported = check_choice("unsupported", unsupported, ("refuse", "wait"))
        self.num_steps = self.num_skipped = 0
        self._base = Status(STATUS_NAME, "inactive", "no training yet")
        self._reader = AsyncScalarReader()
        self._recent: deque[bool] = deque(maxlen=WINDOW_STEPS)
        self._trainer: Trainer | None = None
        # Micro-batches of the current accumulation window, and steps whose flags are not yet copied to the host: number
        # from 1 and micro-batches of each.
        self._micros: list[_Micro] = []
        self._losses: list[torch.Tensor] = []
        self._norms: list[torch.Tensor] = []
        self._flags: list[tuple[tuple[int, list[_Micro]], torch.Tensor]] = []

    def status(self) -> Status:
        """Return how steps are guarded, or why not, and the number of skips known to the host."""
        if self._base.state != "active":
            return self._base
        return self._base._replace(reason=f"{self._base.reason}; {self.num_skipped} of {self.num_steps} steps skipped")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Determine how the optimizer takes the flag, and start to guard it."""
        self._stop()
        patcher_of(trainer).add_undo(self._stop)
        self.num_steps = self.num_skipped = 0
        self._recent.clear()
        self._base = self._judge_run(trainer, pl_module)
        if self._base.state == "refused":
            rank_zero_warn(f"FiniteGuard guards nothing in this run: {self._base.reason}. Remedy: {self._base.remedy}.")
        if self._base.state != "active":
            return
        self._trainer = trainer
        optimizer = trainer.optimizers[0]
        if isinstance(optimizer, FusedAdamW):
            optimizer.attach_guard(self._flag_of)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Record the origin of a batch; host integers only."""
        if self._trainer is not None:
            packed = find_packed_batches(batch)
            self._micros.append(
                _Micro(
                    batch_idx,
                    tuple(found.index for found in packed),
                    sum(found.context.num_documents for found in packed),
                )
            )

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: torch.Tensor) -> None:
        """Keep the loss of a micro-batch on the device."""
        if self._trainer is not None:
            self._losses.append(loss.detach().reshape(()).float())

    def drop_window(self) -> None:
        """Forget the losses of micro-batches whose gradients were dropped without a step."""
        self._micros, self._losses, self._norms = [], [], []

    @torch.no_grad()
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Check the gradients before clipping, unless the optimizer provides the norm that it clips by."""
        if self._trainer is None:
            return
        inner: Any = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        if isinstance(inner, FusedAdamW):
            # Clipping by value turns infinity into a number.
            if trainer.gradient_clip_val and trainer.gradient_clip_algorithm == "value":
                self._norms.append(inner.gradient_norm())
            return
        grads = [
            parameter.grad
            for group in inner.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        if isinstance(inner, torch.optim.Adam):
            self._norms += _squares_in_fp16(grads, device=trainer.strategy.root_device)
        found_inf = self._flag_of(_norm_of(grads, device=trainer.strategy.root_device))
        if _takes_flag(inner):
            inner.found_inf = found_inf
        # The host sync of unsupported="wait": only the host can stop an optimizer that does not read the flag.
        elif bool(found_inf):
            inner.zero_grad(set_to_none=True)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        """Check earlier flags and copy the new ones to the host, every check_every_n_steps."""
        if self._trainer is not None and len(self._flags) >= self.check_every_n_steps:
            # All ranks must stop at the same step, so all must have the same flags.
            self._judge(self._reader.poll() if trainer.world_size == 1 else self._reader.wait())
            self._send()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check the remaining steps, with one host sync."""
        if self._trainer is None:
            return
        self._send()
        try:
            self._judge(self._reader.wait())
        finally:
            self._stop()

    def _judge_run(self, trainer: Trainer, pl_module: LightningModule) -> Status:
        """Return how this run is guarded, or why not."""
        # A loop under Fabric may train a plain module, and reports each step to this callback.
        if not getattr(pl_module, "automatic_optimization", True):
            return Status(
                STATUS_NAME,
                "refused",
                "manual optimization: the module's own code steps the optimizer",
                "use automatic optimization",
            )
        if trainer.scaler is not None:
            return Status(
                STATUS_NAME,
                "inactive",
                f"the loss scaler of precision={str(trainer.precision)!r} skips such steps itself",
            )
        if len(trainer.optimizers) > 1:
            # One optimizer would step where the other skips.
            return Status(
                STATUS_NAME,
                "refused",
                f"{len(trainer.optimizers)} optimizers, which do not skip a step together",
                "give all weights to one optimizer",
            )
        optimizer: Any = trainer.optimizers[0]
        name = type(optimizer).__name__
        if _takes_flag(optimizer):
            return Status(STATUS_NAME, "active", f"flag on the device, taken by {name}")
        if self.unsupported == "wait" and trainer.gradient_clip_val and trainer.gradient_clip_algorithm == "value":
            reason = f"a bad step drops the gradients of {name}, and torch cannot clip by value without gradients"
            return Status(STATUS_NAME, "refused", reason, f"gradient_clip_algorithm='norm', or {_remedy(optimizer)}")
        if self.unsupported == "wait":
            return Status(STATUS_NAME, "active", f"flag read by the host in every step, for {name}")
        return Status(
            STATUS_NAME,
            "refused",
            f"{name} takes no found_inf flag",
            f"FiniteGuard(unsupported='wait') costs a host sync per step, or {_remedy(optimizer)}",
        )

    @torch.no_grad()
    def _flag_of(self, norm: torch.Tensor) -> torch.Tensor:
        """Return found_inf of the step, the same on every rank, and keep the flags of all ranks.

        It has shape () and dtype fp32, on the device of the norm.
        """
        trainer = self._trainer
        assert trainer is not None
        # The second moment holds squares, which overflow before the gradients do.
        squares = torch.stack([norm, *self._norms]).square()
        losses = torch.stack(self._losses or [torch.zeros_like(norm)])
        is_finite_2 = torch.stack([torch.isfinite(numbers).all() for numbers in (losses, squares)])
        flag_R2 = torch.zeros(trainer.world_size, len(_FLAGS), device=norm.device)
        flag_R2[trainer.global_rank] = (~is_finite_2).float()
        if trainer.world_size > 1:
            torch.distributed.all_reduce(flag_R2, op=torch.distributed.ReduceOp.MAX)
        self._flags.append(((trainer.global_step + 1, self._micros), flag_R2))
        self._micros, self._losses, self._norms = [], [], []
        return flag_R2.amax()

    def _send(self) -> None:
        """Start to copy the gathered flags to the host."""
        if self._flags:
            steps, flags = zip(*self._flags)
            self._reader.push(steps, torch.stack(flags))
            self._flags = []

    def _judge(self, arrived: Sequence[tuple[Sequence[tuple[int, list[_Micro]]], torch.Tensor]]) -> None:
        """Count the steps whose flags are on the host; warn about skipped ones, or stop the run."""
        for steps, flag_NR2 in arrived:
            # Already on the host: no sync.
            for (step, micros), flag_R2 in zip(steps, flag_NR2.tolist()):
                is_bad = any(any(flags) for flags in flag_R2)
                self.num_steps += 1
                self.num_skipped += is_bad
                self._recent.append(is_bad)
                if is_bad:
                    self._tell(step, micros, flag_R2)

    def _tell(self, step: int, micros: list[_Micro], flag_R2: list[list[float]]) -> None:
        """Warn about a skipped step, or raise if it reaches max_skips; called on every rank for the same step."""
        trainer = self._trainer
        assert trainer is not None
        # Gradients are already averaged over ranks, so the loss identifies the bad rank better.
        kind = 0 if any(flags[0] for flags in flag_R2) else 1
        bad_ranks = [rank for rank, flags in enumerate(flag_R2) if flags[kind]]
        described: list[Any] = [_describe(micros, trainer)]
        if trainer.world_size > 1:
            described = [None] * trainer.world_size
            torch.distributed.all_gather_object(described, _describe(micros, trainer))
        packs = "; ".join(f"rank {rank}: {described[rank]}" for rank in bad_ranks)
        message = f"Optimizer step {step} was skipped: {_FLAGS[kind]} not finite (NaN or infinity). Its data: {packs}."
        num_recent = sum(self._recent)
        if num_recent < self.max_skips:
            rank_zero_warn(f"FiniteGuard: {message}")
            return
        raise NotTrainingError(
            f"{num_recent} of the last {len(self._recent)} optimizer steps were skipped (max_skips={self.max_skips}). "
            f"{message} Weights and optimizer are as before the first of them. Check these examples, the learning "
            "rate and gradient clipping."
        )

    def _stop(self) -> None:
        """Release the optimizer, the tensors on the device, and the trainer."""
        optimizer: Any
        for optimizer in () if self._trainer is None else self._trainer.optimizers:
            if isinstance(optimizer, FusedAdamW):
                optimizer.detach_guard()
            elif _takes_flag(optimizer):
                vars(optimizer).pop("found_inf", None)
        self._trainer = None
        self._reader.clear()
        self._micros, self._losses, self._norms, self._flags = [], [], [], []


def _takes_flag(optimizer: Any) -> bool:
    """Return whether a step with found_inf changes nothing, as with our optimizers and torch's fused ones."""
    if isinstance(optimizer, FusedAdamW):
        return True
    groups = getattr(optimizer, "param_groups", ())
    has_protocol = getattr(optimizer, "_step_supports_amp_scaling", False) and all(
        group.get("fused") for group in groups
    )
    # torch's fused SGD allocates its first momentum without filling it, and a skipped step leaves it unfilled (2.13).
    return has_protocol and not any(group.get("momentum") for group in groups)


def _remedy(optimizer: Any) -> str:
    if type(optimizer) in (torch.optim.AdamW, torch.optim.Adam):
        return f"use {type(optimizer).__name__}(fused=True)"
    return "use lightning_fastft.optim.FusedAdamW or torch.optim.AdamW(fused=True)"


def _norm_of(grads: Sequence[torch.Tensor], *, device: torch.device) -> torch.Tensor:
    """Return the L2 norm of this rank's part of all gradients, shape (), fp32, without a host sync."""
    held = _held_values(grads)
    if not held:
        return torch.zeros((), device=device)
    # In a low-precision dtype the squares overflow before the gradients do.
    dtype = torch.float64 if any(grad.dtype is torch.float64 for grad in held) else torch.float32
    norms = torch._foreach_norm(held, 2, dtype=dtype)
    return torch.linalg.vector_norm(torch.stack([norm.to(device, non_blocking=True) for norm in norms])).float()


def _squares_in_fp16(grads: Sequence[torch.Tensor], *, device: torch.device) -> list[torch.Tensor]:
    """Return the square of the largest fp16 gradient, infinite if fp16 overflows; an empty list without fp16 gradients.

    torch's Adam keeps the moments of fp16 weights in fp16. Shape (), fp32.
    """
    narrow = _held_values([grad for grad in grads if grad.dtype is torch.float16])
    if not narrow:
        return []
    largest = torch._foreach_norm(narrow, float("inf"))
    return [torch.stack([each.to(device, non_blocking=True) for each in largest]).amax().square().float()]


def _held_values(grads: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the values of gradients that this rank stores, without empty ones."""
    return [values for values in map(stored_values, grads) if values.numel()]


def _describe(micros: list[_Micro], trainer: Trainer) -> str:
    """Name the packs of one step on this rank, with their examples if a PackedDataModule planned them."""
    return ", ".join(_describe_micro(micro, trainer) for micro in micros) or "no batch"


def _describe_micro(micro: _Micro, trainer: Trainer) -> str:
    data = getattr(trainer, "datamodule", None)
    parts = []
    for index in micro.plan_indices:
        if not isinstance(data, PackedDataModule) or index < 0:
            continue
        source, numbers = data.find_examples(index)
        shown = ", ".join(map(str, numbers[:MOST_EXAMPLES_SHOWN]))
        more = f" and {len(numbers) - MOST_EXAMPLES_SHOWN} more" if len(numbers) > MOST_EXAMPLES_SHOWN else ""
        examples = f" of the plan with examples {shown}{more}" if numbers else ""
        parts.append(f"micro-batch {index}{examples} of {source}")
    if parts:
        return ", ".join(parts)
    documents = f" ({micro.num_documents} documents)" if micro.num_documents else ""
    return f"batch {micro.batch_idx} of its epoch{documents}"
