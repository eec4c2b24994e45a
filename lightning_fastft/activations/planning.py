"""Choose the plan of a stack of segments for its budgets, and apply it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

from lightning_fastft.activations.budgets import auto_host_bytes, is_unified
from lightning_fastft.activations.engine import OffloadEngine
from lightning_fastft.activations.execution import PlanExecutor
from lightning_fastft.activations.frozen_weights import FrozenWeights, StreamedWeights
from lightning_fastft.activations.probe import measure_machine
from lightning_fastft.activations.segments import Segment
from lightning_fastft.activations.slots import align
from lightning_fastft.core.errors import HostMemoryError, OptionError, UnsupportedModelError
from lightning_fastft.core.run_environment import RunEnvironment
from lightning_fastft.planner.plan import make_plan
from lightning_fastft.planner.prediction import num_head_parts
from lightning_fastft.planner.step import Machine, Plan, SegmentPlan, StepCost

# Factor by which a budget is reduced if its memory was not available.
NOTCH = 0.9
_MAX_NOTCHES = 5


class StackOptions(NamedTuple):
    """Options of OffloadCheckpointing for one stack."""

    policy: str
    vram_budget_bytes: int | None
    host_budget_bytes: int | None
    buffers: int
    weights: str = "auto"
    mlp_tiles: int = 1
    may_tile: bool = False


class PlannedStack:
    """The segments of one model, and the plan that they follow.

    ``_make_plan`` chooses the fastest plan for the measured costs, and moves frozen weights to the host if the plan
    streams them. A budget whose memory is not available is lowered.

    Args:
        layers: Decoder layers, in order.
        options: Options of the policy.
        environment: Environment of the run.
        weights: The frozen weights of the layers; None if they cannot move to the host.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        options: StackOptions,
        *,
        environment: RunEnvironment,
        weights: FrozenWeights | None,
    ) -> None:
        self.options = options
        self.environment = environment
        self.weights = FrozenWeights(layers) if weights is None else weights
        self.segments = [
            Segment(index, list(layer.modules()), has_router=_has_router(layer)) for index, layer in enumerate(layers)
        ]
        self.executor = PlanExecutor(self.segments, buffers=options.buffers)
        self.plan: Plan | None = None
        self.cost: StepCost | None = None
        self.note = ""
        # Ranks agree once, at the same forward. Later a rank plans alone, because a collective would hang; ranks that
        # plan together see the same packs, so they plan at the same forward every time.
        self._has_agreed = False
        self._device = torch.device("cpu")
        # Size of the hidden states of the longest pack.
        self._longest_bytes = 0

    @property
    def engine(self) -> OffloadEngine | None:
        """The offload engine of the present plan; None if nothing is offloaded."""
        return self.executor.engine

    def follow(self, plan: Sequence[SegmentPlan], *, device: torch.device, cost: StepCost | None = None) -> None:
        """Apply a plan from the next forward on, for the longest pack seen; arguments as in ``PlanExecutor.apply``."""
        self.executor.apply(plan, device=device, input_bytes=align(self._longest_bytes), cost=cost)

    def _make_plan(self, device: torch.device, *, vram_budget: int) -> None:
        """Plan and apply; lower a budget, with a warning, if its memory is not available."""
        host_budget, machine = self._host_budget(), measure_machine(device)
        for attempt in range(_MAX_NOTCHES):
            plan = self._best_plan(vram_budget=vram_budget, host_budget=host_budget, machine=machine)
            # All ranks follow one plan; this rank discards its own.
            if not self._has_agreed or self.environment.plans_together:
                self._has_agreed, plan = True, self.environment.agree(plan)
            if self.weights.streamed is None and any(segment.is_streamed for segment in plan.segments):
                plan = self._stream_for(plan, device, vram_budget=vram_budget, host_budget=host_budget, machine=machine)
            try:
                self.follow(plan.segments, device=device, cost=self.cost)
            except HostMemoryError as error:
                self._check_alone(error)
                # Last attempt without host memory for activations, since pinning keeps failing; streamed weights stay.
                held = self.weights.host_bytes
                host_budget = held + (
                    max(0, plan.prediction.host_bytes - held) // 2 if attempt < _MAX_NOTCHES - 2 else 0
                )
                self.note = f"the host has less pinned memory than planned: {host_budget / 2**30:.1f} GiB"
                self.environment.report(f"{error} Planning again with {host_budget / 2**30:.1f} GiB of pinned memory.")
            except torch.OutOfMemoryError as error:
                self._check_alone(error)
                vram_budget = int(vram_budget * NOTCH)
                self.environment.report(
                    f"The device has less memory than planned for; planning again for {vram_budget / 2**30:.1f} GiB."
                )
            else:
                self.plan = plan
                return
        self.executor.close_engine()
        raise OptionError(
            "No plan for the activations could be applied. Set vram_budget and host_budget in GiB, or use policy "
            "'recompute'."
        )

    def _best_plan(self, *, vram_budget: int, host_budget: int, machine: Machine) -> Plan:
        """Return the fastest plan that fits; weights that are already streamed stay streamed."""
        assert self.cost is not None
        plan = functools.partial(
            make_plan,
            vram_budget_bytes=vram_budget,
            host_budget_bytes=host_budget,
            machine=machine,
            buffers=self.options.buffers,
        )
        if self.weights.streamed is not None:
            return plan(self.cost, weights="stream")
        if self.options.weights == "resident" or self.weights.move is None or machine.is_unified:
            return plan(self.cost, weights="resident")
        return plan(self.cost, weights="auto")

    def _stream_for(
        self, plan: Plan, device: torch.device, *, vram_budget: int, host_budget: int, machine: Machine
    ) -> Plan:
        """Move the frozen weights to the host for a plan.

        Returns:
            The plan, or a new one if the embedding must stay, or if the weights cannot move and a plan without
            streaming fits.
        """
        assert self.cost is not None
        try:
            self._stream(device)
        except (HostMemoryError, OptionError, UnsupportedModelError) as error:
            self._check_alone(error)
            self.weights.move = None
            try:
                found = self._best_plan(vram_budget=vram_budget, host_budget=host_budget, machine=machine)
            except OptionError:
                raise error from None
            self.environment.report(f"activations: frozen weights stay on the device, because a plan fits: {error}")
            return found
        self.environment.report(f"activations: {' '.join(plan.notes)}")
        if self.weights.ends == self.cost.ends:
            return plan
        self.cost = self.cost._replace(ends=self.weights.ends)
        return self._best_plan(vram_budget=vram_budget, host_budget=host_budget, machine=machine)

    def _stream(self, device: torch.device) -> None:
        streamed = self.weights.stream(self.executor.streams_of(device))
        # If this runs inside the first layer's call, the hooks just added to it do not run for that call.
        self.segments[0].on_backward = streamed.enter_backward
        # A head copies the parts that were not prefetched.
        num_parts = num_head_parts(len(self.segments))
        if num_parts and streamed.prefetch_head is not None:
            for segment in self.segments[-num_parts:]:
                segment.on_forward = functools.partial(_prefetch_head, self.segments[-1], streamed, num_parts)

    def _check_alone(self, error: Exception) -> None:
        """Raise if this rank may not change the plan that it cannot apply."""
        if self.environment.plans_together:
            raise OptionError(
                f"This rank cannot apply the activation plan of its group, which exchanges data in each layer: {error} "
                "Set OffloadCheckpointing(vram_budget=..., host_budget=...) to fewer GiB, or use policy 'recompute'."
            ) from error

    @property
    def _streaming(self) -> tuple[bool, ...]:
        """Allowed values of whether a plan streams the frozen weights."""
        if self.weights.streamed is not None:
            return (True,)
        is_allowed = self.options.weights == "auto" and self.weights.can_move and not is_unified(self._device)
        return (False, True) if is_allowed else (False,)

    def _host_budget(self) -> int:
        """Return the pinned memory budget of this rank in bytes, including its streamed weights."""
        if self.options.host_budget_bytes is not None:
            return self.options.host_budget_bytes
        return auto_host_bytes() // self.environment.num_local_ranks + self.weights.host_bytes


def _prefetch_head(last: Segment, streamed: StreamedWeights, num_parts: int, hidden: torch.Tensor) -> None:
    """Start the copy of a part of the output layer in the forward of one of the last segments, and free all parts in
    the backward if no head took them.
    """
    assert streamed.prefetch_head is not None
    streamed.prefetch_head(num_parts)
    last.on_backward = streamed.drop_head


def _has_router(layer: nn.Module) -> bool:
    """Return whether a layer has a router: a module of experts, or one named router."""
    return any(
        "experts" in name.rpartition(".")[2].lower() or "router" in type(module).__name__.lower()
        for name, module in layer.named_modules()
    )
