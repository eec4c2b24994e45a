"""RunRecord: what the run report measures during a run, on this rank."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from lightning_fastft.activations.budgets import peak_memory_bytes, peak_reserved_bytes
from lightning_fastft.monitor.host_waits import HostWaitDetector
from lightning_fastft.monitor.report.losses import StepLosses
from lightning_fastft.monitor.report.step_profile import StepTrace
from lightning_fastft.monitor.report.sums import Curve, PackSums
from lightning_fastft.monitor.report.timing import Batch, BatchTimes
from lightning_fastft.monitor.token_throughput import GIB
from lightning_fastft.strategies.packed_steps import find_packed_batches
from lightning_fastft.training.data.trainer_facts import find_ranks

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

    from lightning_fastft.planner.step import Plan, StepCost

# The first steps set up optimizer state, kernels and plans.
_NUM_WARMUP = 3


@dataclass(kw_only=True)
class RunRecord:
    """Collect the measurements of one run. ``content`` turns them into the report.

    Args:
        device: Device of this rank.
        first_step: Optimizer step at which this fit began.
        step: Optimizer steps of this fit so far.
        num_windows: Windows of micro-batches that ended with an optimizer step, or with several by hand.
        num_batches: Micro-batches of this fit so far.
        source: Checkpoint from which the run was resumed.
        losses: Loss of each optimizer step.
        values: Values that training logs besides the loss, by name.
        validations: Curve of each metric of the validations, by its name.
        last_validation: Optimizer step and values of the last validation.
        not_finite: Number of validations in which a metric was not finite, by name.
        learning_rates: Learning rate of each optimizer step, by the names of Lightning's LearningRateMonitor.
        packs: Fill of the packs.
        times: Times of the micro-batches.
        trace: The profiled step.
        profiled_step: Its number in this fit.
        why_no_trace: Why no step was profiled, if known.
        detector: Watches a step for host syncs.
        plans: Memory plans, and the costs that they are made from.
        ranks: Memory and speed of each rank; empty until they are gathered.
        why_alone: Why the losses are those of this rank alone; "" if they are those of all ranks.
        began_s: Monotonic time at which the run began.
        started: Date and time of the start, as text.
    """

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    first_step: int = 0
    step: int = 0
    num_windows: int = 0
    num_batches: int = 0
    source: str | None = None
    losses: StepLosses = field(default_factory=StepLosses)
    values: dict[str, StepLosses] = field(default_factory=dict)
    validations: dict[str, Curve] = field(default_factory=dict)
    last_validation: tuple[int, dict[str, float]] = (0, {})
    not_finite: Counter[str] = field(default_factory=Counter)
    learning_rates: dict[str, Curve] = field(default_factory=dict)
    packs: PackSums = field(default_factory=PackSums)
    times: BatchTimes = field(default_factory=lambda: BatchTimes(num_warmup=_NUM_WARMUP))
    trace: StepTrace | None = None
    profiled_step: int = 0
    why_no_trace: str = ""
    detector: HostWaitDetector | None = None
    plans: list[tuple[StepCost, Plan]] = field(default_factory=list)
    ranks: list[dict[str, Any]] = field(default_factory=list)
    why_alone: str = "the run ended before the other ranks could be asked"
    began_s: float = field(default_factory=time.monotonic)
    started: str = ""

    def add_batch(self, batch: Any) -> Batch:
        """Count the packs of a micro-batch, and return the micro-batch with what the host knows of it."""
        found = Batch(number=self.num_batches, step=self.step)
        contexts = [packed.context for packed in find_packed_batches(batch)]
        if contexts:
            counted = [self.packs.add(context) for context in contexts]
            found.num_tokens = sum(context.num_real_tokens for context in contexts)
            found.num_documents = sum(number for number, _ in counted)
            found.longest_document = max(longest for _, longest in counted)
        elif isinstance(batch, Mapping) and isinstance(ids := batch.get("input_ids"), torch.Tensor):
            found.num_tokens = ids.numel()
        return found

    def add_losses(self, arrived: list[tuple[Any, torch.Tensor]]) -> None:
        """Add losses and logged values whose copies to the host are complete."""
        for (step, num_micro_batches, has_window, is_last, names), values in arrived:
            # The values are in host memory, so this is not a host sync.
            loss, *others = map(float, values)
            # Losses of a planned window have their mean over a whole one, also where the window is shorter.
            divisor = num_micro_batches if has_window else None
            self.losses.add(step, loss * num_micro_batches, is_last=is_last, num_micro_batches=divisor)
            for name, value in zip(names, others):
                self.values.setdefault(name, StepLosses()).add(step, value, is_last=False)
            # Also of values that the last micro-batch did not log.
            for series in self.values.values() if is_last else ():
                series.end_step(step)

    def add_scalars(self, arrived: list[tuple[Any, torch.Tensor]]) -> None:
        """Add learning rates and values of validations whose copies to the host are complete."""
        for (add, step, name), value in arrived:
            add(step, name, float(value))

    def add_validation(self, step: int, name: str, value: float) -> None:
        """Add a value of the validation after an optimizer step; values that are not finite are not drawn."""
        others = self.last_validation[1] if step == self.last_validation[0] else {}
        self.last_validation = step, {**others, name: value}
        is_finite = math.isfinite(value)
        self.not_finite[name] += not is_finite
        self.validations.setdefault(name, Curve()).add(step, value if is_finite else 0.0, float(is_finite))

    def add_learning_rate(self, step: int, name: str, value: float) -> None:
        """Add the learning rate of an optimizer step."""
        self.learning_rates.setdefault(name, Curve()).add(step, value)

    def gather_ranks(self, trainer: Trainer) -> None:
        """Gather memory, speed, losses and packs of all ranks; every rank must call this.

        Cost:
            Two small gathers and host syncs.
        """
        # The array has the same size on every rank, whatever the number of recorded steps.
        own_V = np.concatenate(
            [
                [
                    peak_memory_bytes(self.device) / GIB,
                    peak_reserved_bytes(self.device) / GIB,
                    self.times.rate() or 0.0,
                ],
                packs_V := self.packs.to_array(),
                self.losses.to_array(),
            ]
        )
        all_RV, num_figures = own_V[None], 3 + len(packs_V)
        if trainer.world_size > 1:
            all_RV = self._gather(trainer, own_V)
            is_whole = self.losses.take_mean(all_RV[:, num_figures:])
            self.why_alone = "" if is_whole else "the ranks recorded different steps"
            packs_RV = all_RV[:, 3:num_figures]
            count_RL = self._gather(trainer, self.packs.count_lengths(int(packs_RV[:, -1].max())))
            # The ranks of context parallelism train parts of the same packs.
            self.packs.take_sums(packs_RV, count_RL, num_alike=trainer.world_size // find_ranks(trainer)[0])
        self.ranks = [
            {"rank": rank, "peak_memory_gib": peak, "reserved_memory_gib": reserved, "tokens_per_s": rate or None}
            for rank, (peak, reserved, rate) in enumerate(all_RV[:, :3].tolist())
        ]

    def _gather(self, trainer: Trainer, own_V: np.ndarray) -> np.ndarray:
        """Return the arrays of all ranks, which have the same size, in rows."""
        all_RV = trainer.strategy.all_gather(torch.from_numpy(own_V).to(self.device))
        return all_RV.reshape(-1, len(own_V)).cpu().numpy()
