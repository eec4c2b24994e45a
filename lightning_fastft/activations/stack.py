"""Plan how the decoder layers of a model use memory, from a measurement, and plan again when memory runs out."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from lightning_fastft.activations.budgets import auto_vram_bytes, check_not_unified, is_unified
from lightning_fastft.activations.frozen_weights import FrozenWeights, GatheredWeights
from lightning_fastft.activations.measurement import Measurement
from lightning_fastft.activations.planning import NOTCH, PlannedStack, StackOptions
from lightning_fastft.activations.segments import KEEP, RECOMPUTE
from lightning_fastft.activations.slots import align
from lightning_fastft.activations.tiles import AUTO_TILES, dense_blocks, install_tiles
from lightning_fastft.activations.vram_budget import (
    PLANNED_SHARE,
    BudgetWatch,
    FirstPlan,
    HeadSizes,
    budget_for,
    check_feasible,
    choose_first_plan,
    least_peak_bytes,
    predict_cost,
)
from lightning_fastft.core.errors import HostMemoryError, OptionError, UnsupportedModelError
from lightning_fastft.core.patcher import ModelPatcher
from lightning_fastft.core.phases import phase
from lightning_fastft.core.run_environment import RunEnvironment
from lightning_fastft.planner.picture import render_plan
from lightning_fastft.planner.plan import note_host_room
from lightning_fastft.planner.step import StepCost, uniform_plan


class SegmentStack(PlannedStack):
    """Own the segments of one model and decide their plan.

    A ``Measurement`` measures a step, the planner chooses a plan for the budgets, and a ``PlanExecutor`` applies it.
    Longer packs start a new measurement. A device that runs out of memory gets a plan for a smaller budget.

    Args:
        layers: Decoder layers, in order.
        options: Options of the policy.
        environment: Environment of the run.
        patcher: Undoes what is added to the layers later: tiles of feed-forward blocks.
        weights: The frozen weights of the layers; None if they cannot move to the host.
        gathered: Sharded weights, which may stay gathered in memory that the first plan leaves; None without
            any.
        head: Sizes outside of the layers, for the memory of the first steps.
        name: Name of the model's status.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        options: StackOptions,
        *,
        environment: RunEnvironment,
        patcher: ModelPatcher,
        weights: FrozenWeights | None = None,
        gathered: GatheredWeights | None = None,
        head: HeadSizes,
        name: str = "",
    ) -> None:
        super().__init__(layers, options, environment=environment, weights=weights)
        self.name = name
        self.num_tiles, self._patcher = options.mlp_tiles, patcher
        has_budget = options.vram_budget_bytes is not None
        self.measurement = Measurement(
            layers, self.segments, measures_gap=has_budget, find_streams=lambda: self.executor.streams
        )
        self._layers, self._head = layers, head
        self._gathered = gathered
        # Their description for the user, once it is decided.
        self.describe_gathered: Callable[[], str] = str
        # Trained weights that stay gathered from a forward to its backward.
        self.trained_bytes = 0
        # Predicted from shapes, until a step is measured.
        self._predicted: StepCost | None = None
        self.watch = BudgetWatch(options.vram_budget_bytes) if options.vram_budget_bytes is not None else None
        self.segments[0].on_forward = self.begin_forward
        for segment in self.segments:
            segment.awaits_plan = self._awaits_plan
            segment.vram_budget_bytes = options.vram_budget_bytes
        # Known once the model is on its device.
        self._is_always_kept = False

    def begin_forward(self, hidden: torch.Tensor) -> None:
        """Prepare a forward: offload the inputs of longer packs, measure, or plan."""
        num_bytes = hidden.numel() * hidden.element_size()
        self.place(hidden.device)
        # Plan for the longest announced pack from the start, so that slightly longer packs need no new plan.
        announced_bytes = self.environment.longest_pack * hidden.shape[-1] * hidden.element_size()
        longest_bytes = max(num_bytes, announced_bytes, self._longest_bytes)
        is_longer, self._longest_bytes = longest_bytes > self._longest_bytes, longest_bytes
        if self.options.policy == "offload" and is_longer:
            self._offload_inputs(hidden.device)
        if self.options.policy == "auto" and not self._is_always_kept:
            self._measure(hidden, num_bytes=num_bytes, is_longer=is_longer)

    def place(self, device: torch.device) -> None:
        """Store the device of the model, and move frozen weights to the host once if requested.

        Raises:
            OptionError: The weights of these layers cannot be streamed, or none is frozen.
            HostMemoryError: They do not fit in host memory.
        """
        is_always_kept = (
            self.options.policy == "auto" and self.options.vram_budget_bytes is None and device.type == "cpu"
        )
        if is_always_kept != self._is_always_kept:
            self._is_always_kept = is_always_kept
            for segment in self.segments:
                segment.plan = KEEP if is_always_kept else RECOMPUTE
        if self.options.weights == "stream" and self.weights.streamed is None:
            self._stream(device)

    def step_down(self) -> bool:
        """Reduce the memory use after the device ran out of memory; return whether that is possible.

        Plan again for 10 % less memory than the last plan. Before the first plan, stream frozen weights and measure
        again; if they have moved already or cannot move, measure without a kept layer; then run feed-forward blocks in
        tiles.
        """
        is_keeping = self.measurement.is_keeping
        if self.can_stream:
            self.measurement.restart()
            gc.collect()
            if self._stream_first(self._device):
                return True
        if is_keeping:
            self.measurement.stop_keeping()
            gc.collect()
            self.environment.report("activations: the first step does not fit with a kept layer; measuring without one")
            return True
        if self.can_tile:
            self.measurement.restart()
            gc.collect()
            self._tile()
            return True
        if self.plan is None or self.cost is None or self.options.policy != "auto":
            return False
        lowered = int(self.plan.prediction.peak_bytes * NOTCH)
        self.executor.close_engine()
        gc.collect()
        try:
            self._make_plan(self._device, vram_budget=lowered)
        except OptionError:
            self.plan = None
            return False
        self.environment.report(f"The device ran out of memory: planned again for {lowered / 2**30:.1f} GiB.")
        return True

    @property
    def can_stream(self) -> bool:
        """Whether the first steps are still measured and frozen weights on the device could be streamed."""
        is_measuring = self.options.policy == "auto" and self.measurement.is_running
        is_allowed = self.options.weights == "auto" and self.weights.can_move
        return is_measuring and is_allowed and not is_unified(self._device)

    @property
    def can_tile(self) -> bool:
        """Whether the first steps are still measured, before any plan, and tiles could be added."""
        return self.measurement.is_running and self._may_tile

    @property
    def least_bytes(self) -> int | None:
        """Budget for the leanest plan, with its margin and reserved but unallocated memory; None if unknown."""
        cost = self.cost or self._predicted
        if cost is None:
            return None
        peak_bytes = least_peak_bytes(
            cost, host_budget_bytes=self._host_budget(), buffers=self.options.buffers, streaming=self._streaming
        )
        return budget_for(peak_bytes) + self.measurement.gap_bytes

    def describe(self) -> str:
        """Return the current treatment in one line."""
        gathered = [text] if (text := self.describe_gathered()) else []
        num_layers = len(self.segments)
        if self._is_always_kept:
            return "; ".join(["on a CPU every activation is kept", f"{num_layers} layers", *gathered])
        if self._awaits_plan():
            return "; ".join(["the first steps recompute and are measured", f"{num_layers} layers", *gathered])
        parts = [*self.executor.describe(), *gathered]
        if self.num_tiles > self.options.mlp_tiles:
            parts.append(f"feed-forward blocks in {self.num_tiles} tiles, because nothing else fits")
        if self.plan is not None:
            found = self.plan.prediction
            parts.append(f"predicted {found.step_ms:.0f} ms, {found.peak_bytes / 2**30:.1f} GiB")
        return "; ".join(parts) + (f" ({self.note})" if self.note else "")

    def _awaits_plan(self) -> bool:
        return self.options.policy == "auto" and not self._is_always_kept and not self.measurement.is_done

    def _offload_inputs(self, device: torch.device) -> None:
        """Offload every input except the last segment's, as far as host memory suffices."""
        check_not_unified(device)
        budget = max(0, self._host_budget() - self.weights.host_bytes)
        most = len(self.segments) - 1
        num_hosted = min(most, budget // align(self._longest_bytes))
        while True:
            try:
                self.follow(uniform_plan(len(self.segments), "offload", num_hosted=num_hosted), device=device)
                break
            except HostMemoryError as error:
                if num_hosted == 0:
                    raise
                self.environment.report(
                    f"{error} Fewer layer inputs go to the host: {num_hosted // 2} instead of {num_hosted}."
                )
                num_hosted //= 2
        if num_hosted < most:
            self.note = note_host_room(num_hosted, most)
            self.environment.report(f"activations: {self.note}; the others stay on the device")

    def _begin_first_steps(self, hidden: torch.Tensor) -> None:
        """Choose the plan of the measured steps from shapes, so that they stay within the budget."""
        budget = self.options.vram_budget_bytes
        if budget is None or not self.measurement.meter(hidden.device).is_counted:
            return
        first = self._find_first_plan(hidden, vram_budget=budget)
        if first.is_streamed and self.weights.streamed is None and not self._stream_first(hidden.device):
            first = self._find_first_plan(hidden, vram_budget=budget)
        self.measurement.lean = first.segments
        self.follow(first.segments, device=hidden.device)
        self.environment.report(
            f"activations: the first steps recompute, {first.describe()}: predicted at most "
            f"{first.peak_bytes / 2**30:.1f} of {budget / 2**30:.1f} GiB"
        )

    def _find_first_plan(self, hidden: torch.Tensor, *, vram_budget: int) -> FirstPlan:
        """Return the plan of the measured steps, in tiles if nothing else is predicted to fit.

        Raises:
            OptionError: No step can keep the budget.
        """
        first, may_tile = None, self._may_tile
        try:
            first = self._predict_first(hidden, vram_budget=vram_budget, num_tiles=self.num_tiles)
        except OptionError:
            if not may_tile:
                raise
        if first is None or (may_tile and first.peak_bytes > vram_budget):
            untiled = self._predicted
            tiled = self._predict_first(hidden, vram_budget=vram_budget, num_tiles=AUTO_TILES)
            if first is None or tiled.peak_bytes <= vram_budget:
                self._tile()
                return tiled
            self._predicted = untiled
        return first

    def _predict_first(self, hidden: torch.Tensor, *, vram_budget: int, num_tiles: int) -> FirstPlan:
        """Predict the memory of a step from shapes, and return the best plan; raise if no step can keep the budget."""
        self._predicted = predict_cost(
            self._layers,
            hidden,
            longest_bytes=self._longest_bytes,
            base_bytes=self.measurement.meter(hidden.device).allocated() - hidden.nbytes + self._extra_bytes(),
            head=self._head,
            weight_bytes=self.weights.layer_bytes,
            ends=self.weights.ends,
            mlp_tiles=num_tiles,
        )
        limits: dict[str, Any] = {"vram_budget_bytes": vram_budget, "host_budget_bytes": self._host_budget()}
        limits |= {"buffers": self.options.buffers, "streaming": self._streaming}
        column_bytes = self._longest_bytes // hidden.shape[-1] // num_tiles
        check_feasible(self._predicted, self._layers, column_bytes=column_bytes, **limits)
        return choose_first_plan(self._predicted, counted=self.measurement.counted, **limits)

    @property
    def _may_tile(self) -> bool:
        """Whether tiles may be added: never once there was a plan, because recorded layers would run without them."""
        is_allowed = self.options.may_tile and self.num_tiles == 1 and self.cost is None
        return is_allowed and any(map(dense_blocks, self._layers))

    def _tile(self) -> None:
        """Run feed-forward blocks in tiles because the first steps do not fit otherwise."""
        self.num_tiles = AUTO_TILES
        install_tiles(self._layers, self.segments, self._patcher, num_tiles=AUTO_TILES)
        self.environment.report(
            f"activations: nothing else fits: feed-forward blocks in {AUTO_TILES} tiles; gradients differ by rounding"
        )

    def _extra_bytes(self) -> int:
        """Return the memory that is still to be allocated; streamed weights count as resident."""
        return self.environment.missing_bytes() + self.weights.absent_bytes + self.trained_bytes

    def _measure(self, hidden: torch.Tensor, *, num_bytes: int, is_longer: bool) -> None:
        """Advance the measurement, and plan when it is complete; measure again if packs grew after the plan."""
        device = self._device = hidden.device
        if is_longer and self.measurement.is_done:
            self.environment.report(
                f"activations: packs grew to {align(self._longest_bytes) / 2**20:.1f} MiB of hidden states; measuring "
                "and planning again"
            )
            self.executor.close_engine()
            self.measurement.restart()
            self.plan = None
        if not self.measurement.has_begun:
            self._begin_first_steps(hidden)
        if self.measurement.begin_forward(device, num_bytes=num_bytes):
            self._plan_measured_step(device)
        else:
            self._correct_plan(device)

    def _plan_measured_step(self, device: torch.device) -> None:
        # Streamed weights count as resident here; the plan subtracts them, and adds the staging slots.
        staging_bytes = sum(slot.num_bytes for slot in self.engine.slots) if self.engine is not None else 0
        cost = self.measurement.read(
            longest_bytes=self._longest_bytes,
            extra_bytes=self._extra_bytes() - staging_bytes,
            weight_bytes=self.weights.layer_bytes,
        )
        self.cost = cost._replace(ends=self.weights.ends)
        with phase("planning activations"):
            capacity = self._plan_within_budget(device)
        assert self.plan is not None
        if self._gathered is not None:
            self._keep_gathered(capacity)
        self.environment.report("\n" + render_plan(self.cost, self.plan))

    def _plan_within_budget(self, device: torch.device) -> int:
        """Plan for the budget minus reserved but unallocated memory; return the capacity.

        A plan that holds more tensors than the measured steps leaves more memory unallocated, hence the margin. A
        budget too small for it is planned without.
        """
        budget, gap = self.options.vram_budget_bytes, self.measurement.gap_bytes
        if budget is None:
            capacity = auto_vram_bytes(device)
            self._make_plan(device, vram_budget=capacity)
            return capacity
        for capacity in (int(PLANNED_SHARE * max(0, budget - gap)), max(0, budget - gap)):
            try:
                self._make_plan(device, vram_budget=capacity)
            except OptionError:
                continue
            return capacity
        self._make_plan(device, vram_budget=budget)
        self.environment.report(
            f"activations: no plan leaves room for the {gap / 2**30:.2f} GiB of reserved but unallocated memory; "
            "the allocator returns it to the device in each step, with a device sync"
        )
        return budget

    def _correct_plan(self, device: torch.device) -> None:
        """Plan for less if steps reach the budget."""
        # Ranks that plan together must all plan again, and one rank cannot know that another is at its limit.
        if self.watch is None or self.plan is None or self.environment.plans_together:
            return
        meter = self.measurement.meter(device)
        lowered = self.watch.lowered_bytes(self.plan.prediction.peak_bytes, meter)
        if lowered is None:
            return
        try:
            self._make_plan(device, vram_budget=lowered)
        except OptionError:
            self.watch.stop()
            return
        meter.free_cache()
        self.environment.report(f"activations: steps reached the budget; planned again for {lowered / 2**30:.1f} GiB")

    def _keep_gathered(self, vram_budget: int) -> None:
        """Keep weights gathered in memory that the first plan leaves; later plans measure frozen ones as resident."""
        assert self._gathered is not None
        assert self.plan is not None
        left = vram_budget - self.plan.prediction.peak_bytes
        num_kept = self._gathered.agree(self._gathered.num_within(left))
        self._gathered.keep(num_kept)
        self.trained_bytes = self._gathered.trained_bytes(num_kept)
        self.describe_gathered = functools.partial(str, self._gathered.describe(num_kept))
        self._gathered = None

    def _stream_first(self, device: torch.device) -> bool:
        """Move the frozen weights to the host before the first plan; return whether they moved."""
        try:
            self._stream(device)
        except (HostMemoryError, OptionError, UnsupportedModelError) as error:
            self.weights.move = None
            self.environment.report(
                f"activations: the first steps do not fit, and frozen weights cannot be streamed: {error}"
            )
            return False
        self.environment.report(
            "activations: the first steps do not fit with all weights on the device, so frozen weights are "
            "streamed from the host"
        )
        return True
