"""What a strategy does when the device runs out of memory: repeat the step with less, or explain the error."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_fastft.core.memory_error import DeviceMemoryError
from lightning_fastft.strategies.memory_errors import describe_peak, is_out_of_memory

if TYPE_CHECKING:
    from lightning.pytorch import Trainer
    from lightning.pytorch.strategies import Strategy
    from lightning.pytorch.utilities.types import STEP_OUTPUT

    from lightning_fastft.activations.checkpointing import OffloadCheckpointing

    _Base = Strategy
else:
    _Base = object

BACKWARD = "backward"
HALF_DONE = "Gradients may be incomplete; no weight was stepped."
NOTHING_TRAINED = "Nothing was trained."
_REMEDY = (
    "The model does not fit: raise vram_budget, use OffloadCheckpointing(weights='stream'), which loads it into host "
    "memory, or a quantised base (quantization='nf4')"
)
_STREAMED_REMEDY = (
    "Streamed weights are loaded into host memory, unless adapters are computed from them (DoRA, PiSSA, EVA) or a "
    "module of your own loads them onto the device: use other adapters, load with device_map='cpu', or raise "
    "vram_budget"
)
# A step is repeated with streamed weights, without a kept layer, and in tiles.
_MOST_REPEATS = 3


class StepDownMixin(_Base):
    """Repeat a step that ran out of memory under a leaner plan, on a single device; explain it everywhere else."""

    checkpointing: OffloadCheckpointing
    _fastft_trainer: Trainer | None

    def _run_or_step_down(self, run_step: Callable[[], STEP_OUTPUT]) -> STEP_OUTPUT:
        """Run the step; while its forward runs out of memory, reduce the memory use and run it again.

        ``SegmentStack.step_down`` has the reductions in their order. The batch is the same.
        """
        effect = "No weight was stepped."
        for _ in range(_MOST_REPEATS):
            try:
                return run_step()
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                if not self._can_step_down():
                    raise self._memory_error("forward", error, effect=effect) from error
                reason = _first_line(error)
            # Outside of the except block, so that the error and the activations in its frames are freed.
            if not self.checkpointing.step_down():
                raise self._memory_error("forward", reason, effect=f"{effect} No smaller plan fits.")
            rank_zero_warn(f"The forward ran out of memory and is repeated with less: {reason}")
        with self._explaining_memory("forward", effect=effect):
            return run_step()

    def _close_or_step_down(self, closure: Callable[[], Any]) -> Any:
        """Run forward and backward; while the backward runs out of memory, reduce the memory use and run both again.

        Only where the closure discards all gradients first: those of a failed backward are incomplete.
        """
        for _ in range(_MOST_REPEATS):
            try:
                return closure()
            except DeviceMemoryError as error:
                if error.where != BACKWARD or not self._discards_gradients() or not self._can_step_down():
                    raise
                reason = _first_line(error.__cause__ or error)
            if not self.checkpointing.step_down():
                raise self._memory_error(BACKWARD, reason, effect=f"{HALF_DONE} No smaller plan fits.")
            rank_zero_warn(f"The backward ran out of memory, and the step is repeated with less: {reason}")
        return closure()

    def _can_step_down(self) -> bool:
        # Ranks that wait for each other inside a step cannot repeat it alone.
        return isinstance(self, SingleDeviceStrategy) and self.checkpointing.can_step_down

    def _discards_gradients(self) -> bool:
        """Return whether each optimizer step has one micro-batch, and Lightning zeroes the gradients before it."""
        trainer, module = self._fastft_trainer, self.lightning_module
        if trainer is None or module is None or trainer.accumulate_grad_batches != 1:
            return False
        return not is_overridden("optimizer_zero_grad", module)

    @contextlib.contextmanager
    def _explaining_memory(self, where: str, *, effect: str | Callable[[], str]) -> Iterator[None]:
        """Convert a failed allocation into an error with a remedy."""
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise self._memory_error(where, error, effect=effect if isinstance(effect, str) else effect()) from error

    def _memory_error(self, where: str, reason: BaseException | str, *, effect: str) -> DeviceMemoryError:
        """Return the error, with the phase, its effect, the plan, the peak, the budget and the remedy."""
        trainer = self._fastft_trainer
        place = str(self.root_device)
        if trainer is not None:
            rank = f" on rank {trainer.global_rank}" if trainer.world_size > 1 else ""
            place = f"{place}{rank}, at optimizer step {trainer.global_step + 1}"
        plan = self.checkpointing.status().reason
        remedy = f"The batch was not changed: {self.checkpointing.remedy()}"
        if effect == NOTHING_TRAINED:
            remedy = _STREAMED_REMEDY if self.checkpointing.streams_from_host else _REMEDY
        return DeviceMemoryError(
            f"The {where} ran out of memory on {place}. {effect} Activations: {plan}. Budget: "
            f"{self.checkpointing.describe_budget()}; "
            f"{describe_peak(self.root_device)}. {remedy}. "
            f"({reason if isinstance(reason, str) else _first_line(reason)})",
            where=where,
        )


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0] or type(error).__name__
