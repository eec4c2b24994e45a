"""HostWaitDetector: find every host sync of a training step, with a fix for each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_fastft.core.checks import check_choice, check_int
from lightning_fastft.core.errors import FastFTError, OptionError, count
from lightning_fastft.core.given_once import GivenOnce
from lightning_fastft.core.status import Status
from lightning_fastft.monitor.report.waits import HOST_READERS, HostWait, WaitRecorder, order_waits
from lightning_fastft.strategies.patching import patcher_of

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

# The first steps set up optimizer state, kernels and plans, so their host syncs are not typical.
DEFAULT_STEPS = (4, 5)


class HostWaitError(FastFTError, RuntimeError):
    """Raised by HostWaitDetector(on_wait="raise") at the first host sync inside a watched training step."""


class HostWaitDetector(GivenOnce, Callback):
    """Watch some training steps and list their host syncs: frequency, line of code, and a fix.

    It works with any LightningModule, strategy and model. A step is watched from its ``on_train_batch_start`` to the
    next: forward, backward, optimizer, other callbacks, logging, checkpoints, and moving the next batch to the device.
    Validation and the time between epochs are excluded. Each host sync is reported with the innermost line of the
    user's code and the line of the library that it called.

    On a GPU real host syncs are recorded (by the dispatcher, torch.cuda.set_sync_debug_mode and explicit synchronize
    calls). On a CPU those that the same code would have on a GPU are recorded, except most copies to the device; reads
    of tensors that never leave the host count too, except in the data loader. Each rank watches itself; rank 0 prints.

    Args:
        steps: Optimizer steps to watch, counted from 0 in this fit; all micro-batches of a step are watched. A
            batch with several steps by manual optimization counts as one.
        on_wait: "report" prints the table; "warn" prints it as a warning if there are host syncs; "raise" raises an
            error from the call of the first host sync.

    Raises:
        HostWaitError: From the training loop, with on_wait="raise".
        OptionError: steps is empty or contains a value other than an integer of at least 0.

    Cost:
        Watched steps: some microseconds per operation, and torch.compile regions run eagerly. Other steps: nothing.

    Example:
        >>> HostWaitDetector(steps=[2], on_wait="raise").status().reason
        'step 2 is still to come'
    """

    def __init__(
        self, *, steps: Sequence[int] = DEFAULT_STEPS, on_wait: Literal["report", "warn", "raise"] = "report"
    ) -> None:
        if isinstance(steps, (str, bytes, int)) or not steps:
            raise OptionError(f"steps must list at least one optimizer step, for example [4, 5], got {steps!r}.")
        self.steps = sorted({check_int("steps", step, low=0) for step in steps})
        self.on_wait = check_choice("on_wait", on_wait, ("report", "warn", "raise"))
        self.waits: Counter[HostWait] = Counter()
        self.num_watched = 0
        # Whether it prints nothing, because a report shows its result.
        self.is_silent = False
        self._reset()

    def _reset(self) -> None:
        self._recorder: WaitRecorder | None = None
        self._step = self._last_global_step = 0
        self._is_counted = self._is_told = False

    @property
    def is_watching(self) -> bool:
        """Whether a watched step is running."""
        return self._recorder is not None and self._recorder.is_on

    def status(self) -> Status:
        """Return the number of host syncs found so far."""
        if not self.num_watched:
            listed = ", ".join(map(str, self.steps))
            reason = f"step {listed} is still to come" if len(self.steps) == 1 else f"steps {listed} are still to come"
            return Status("host syncs", "inactive", reason)
        found = sum(self.waits.values())
        places, steps = count(len(self.waits), "place"), count(self.num_watched, "watched step")
        reason = f"{found / self.num_watched:g} a step, {places}, over {steps}"
        return Status("host syncs", "active", reason, "see the table of host syncs" if found else "")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Reset the counters and create the recorder."""
        self.close()
        self._reset()
        self.waits, self.num_watched = Counter(), 0
        self._last_global_step = trainer.global_step
        # A new recorder for each fit and device, so that runs do not affect each other.
        on_wait = _refuse if self.on_wait == "raise" else None
        patcher_of(trainer).add_undo(self.close)
        self._recorder = WaitRecorder(trainer.strategy.root_device, on_wait=on_wait, host_only=HOST_READERS)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Stop watching the previous step; start to watch this one if it is in ``steps``."""
        if self._recorder is None:
            return
        self.pause()
        if trainer.global_step != self._last_global_step:
            self._last_global_step = trainer.global_step
            self._step += 1
            self._is_counted = False
        if self._step > self.steps[-1]:
            self._recorder = None
            self._tell()
        elif self._step in self.steps:
            self.num_watched += not self._is_counted
            self._is_counted = True
            self._recorder.start()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Exclude the time between epochs, and the validation."""
        self.pause()

    on_validation_start = on_train_epoch_end

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print the result if it was not printed yet; warn if the run ended before a step was watched."""
        self.close()
        if self.num_watched:
            self._tell()
        else:
            num_steps = self._step + (trainer.global_step != self._last_global_step)
            rank_zero_warn(
                f"HostWaitDetector watched nothing: the run had {num_steps} optimizer steps, and steps={self.steps} "
                "are counted from 0."
            )

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Print the result so far."""
        if self.num_watched and not isinstance(exception, HostWaitError):
            self._tell()

    def close(self) -> None:
        """Stop watching for this fit; a second call has no effect."""
        self.pause()
        self._recorder = None

    def pause(self) -> None:
        """Stop watching until the next watched micro-batch."""
        if self._recorder is not None:
            self._recorder.stop()
            self.waits = self._recorder.count

    def _tell(self) -> None:
        if self._is_told or self.is_silent:
            return
        self._is_told = True
        text = render_waits(self.waits, num_steps=self.num_watched)
        if self.on_wait == "report":
            rank_zero_info(text)
        elif self.waits:
            rank_zero_warn(text)


def render_waits(waits: Mapping[HostWait, int], *, num_steps: int) -> str:
    """Return the host syncs as text, most frequent first: count per step, line, call and fix.

    Example:
        >>> render_waits({}, num_steps=2)
        'Host syncs: none in 2 watched steps.'
    """
    if not waits:
        return f"Host syncs: none in {count(num_steps, 'watched step')}."
    lines = [f"Host syncs: {sum(waits.values()) / num_steps:g} a step, over {count(num_steps, 'watched step')}."]
    for wait, num_found in order_waits(waits.items()):
        lines.append(f"{num_found / num_steps:>6g} a step  {wait.place} in {wait.place.function}: {wait.place.text}")
        lines.append(
            f"{'':>14} {wait.call}" + (f", called in {wait.library} in {wait.library.function}" if wait.library else "")
        )
        lines.append(f"{'':>14} -> {wait.remedy}")
    return "\n".join(lines)


def _refuse(wait: HostWait) -> None:
    raise HostWaitError(
        f"The host waits for the device in {wait.place} in {wait.place.function}: {wait.place.text} ({wait.call}). "
        f"Fix: {wait.remedy}. To list all host syncs instead, use HostWaitDetector(on_wait='report')."
    )
