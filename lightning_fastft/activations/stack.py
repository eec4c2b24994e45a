"""Run the decoder layers of a model under a policy: measure them, plan, and set up the engine for the plan."""

from __future__ import annotations

import functools
import gc
import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from lightning_fastft.activations.budgets import auto_host_bytes, auto_vram_bytes, check_not_unified, is_unified
from lightning_fastft.activations.engine import OffloadEngine
from lightning_fastft.activations.probe import (
    Memory,
    SavedBytesProbe,
    StepProbe,
    make_clock,
    measure_machine,
    scale_cost,
)
from lightning_fastft.activations.segments import KEEP, RECOMPUTE, Segment, is_random
from lightning_fastft.activations.slots import align
from lightning_fastft.activations.streams import CopyStreams, make_copy_streams
from lightning_fastft.core.errors import HostMemoryError, OptionError, UnsupportedModelError
from lightning_fastft.core.run_environment import RunEnvironment, no_bytes
from lightning_fastft.core.status import Status
from lightning_fastft.planner.picture import render_plan
from lightning_fastft.planner.plan import make_plan
from lightning_fastft.planner.step import Machine, Plan, SegmentPlan, StepCost

logger = logging.getLogger(__name__)

# Forwards before the plan: one counts saved bytes, one warms up (and finds the last value points), one is timed.
_FRESH, _COUNT_SAVED, _WARM_UP, _TIME_STEP, _PLANNED = range(5)
# Factor for a budget whose memory was not available.
NOTCH = 0.9
_MAX_NOTCHES = 5


class StackOptions(NamedTuple):
    """Options of a stack; the arguments of OffloadCheckpointing."""

    policy: str
    vram_budget_bytes: int | None
    host_budget_bytes: int | None
    buffers: int
    weights: str = "auto"
    is_serial: bool = False
    is_poisoned: bool = False


class StreamedWeights(NamedTuple):
    """Frozen weights that were moved to the host.

    Args:
        num_host_bytes: Their size on the host.
        num_slot_bytes: Size of their device slots.
        num_embedding_bytes: Size of the input embedding, if it moved too.
        statuses: Statuses for the user.
        enter_backward: Copies the first layer in for the backward; None if not needed.
    """

    num_host_bytes: int
    num_slot_bytes: int
    num_embedding_bytes: int = 0
    statuses: tuple[Status, ...] = ()
    enter_backward: Callable[[], None] | None = None


class MovableWeights(NamedTuple):
    """Functions that move the frozen weights of a model to the host.

    Args:
        stream: Moves the weights of the decoder layers and of the input embedding.
        embedding_bytes: Returns the size of the embedding that would move with them.
    """

    stream: Callable[[CopyStreams], StreamedWeights]
    embedding_bytes: Callable[[], int]


class SegmentStack:
    """Own the segments of one model, decide their plan, and keep the engine that it needs.

    Args:
        layers: Decoder layers, in order.
        options: Options of the policy.
        environment: Environment of the run.
        weights: Moves the frozen weights of the layers to the host; None if they cannot move.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        options: StackOptions,
        *,
        environment: RunEnvironment,
        weights: MovableWeights | None = None,
    ) -> None:
        self.options = options
        self.segments = [
            Segment(index, is_random=any(map(is_random, layer.modules())), has_router=_has_router(layer))
            for index, layer in enumerate(layers)
        ]
        self.engine: OffloadEngine | None = None
        self.plan: Plan | None = None
        self.cost: StepCost | None = None
        self.note = ""
        self.environment = environment
        self.stream_weights = None if weights is None else weights.stream
        self._embedding_bytes = no_bytes if weights is None else weights.embedding_bytes
        self.streamed: StreamedWeights | None = None
        self.make_copy_streams: Callable[[torch.device], CopyStreams] = lambda device: make_copy_streams(
            device, is_serial=options.is_serial
        )
        self._streams: CopyStreams | None = None
        self._weight_bytes = [_frozen_bytes(layer) for layer in layers]
        self.segments[0].on_forward = self.begin_forward
        for segment in self.segments:
            segment.awaits_plan = self._awaits_plan
            segment.vram_budget_bytes = options.vram_budget_bytes
        self._kinds = _kinds(layers)
        # Known once the model is on its device.
        self._is_always_kept = False
        # Ranks agree once, at the same forward. Later a rank plans alone, because a collective would hang.
        self._has_agreed = False
        self._phase = _FRESH
        self._device = torch.device("cpu")
        self._input_bytes = 0
        # Sizes of the hidden states: of the longest pack, and of the packs in which bytes and times were measured.
        self._most_bytes = self._counted_bytes = self._timed_bytes = 0
        self._saved: SavedBytesProbe | None = None
        self._step: StepProbe | None = None
        self._previous: Any = None

    def begin_forward(self, hidden: torch.Tensor) -> None:
        """Prepare a forward: grow the engine, advance the probe, or make the plan."""
        num_bytes = hidden.numel() * hidden.element_size()
        self.place(hidden.device)
        # Plan for the longest announced pack from the start, so that slightly longer packs need no new plan.
        most_tokens = self.environment.longest_pack
        announced = most_tokens * hidden.shape[-1] * hidden.element_size() if most_tokens else 0
        is_larger = max(num_bytes, announced) > self._most_bytes
        self._most_bytes = max(num_bytes, announced, self._most_bytes)
        self._input_bytes = align(self._most_bytes)
        if self.options.policy == "offload" and is_larger:
            self._offload_inputs(hidden.device)
        if self.options.policy == "auto" and not self._is_always_kept:
            self._advance(hidden.device, num_bytes=num_bytes, is_larger=is_larger)

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
        if self.options.weights == "stream" and self.streamed is None:
            self._stream(device)

    def follow(self, plan: Sequence[SegmentPlan], *, device: torch.device, cost: StepCost | None = None) -> None:
        """Apply a plan from the next forward on, with a new engine for its sizes.

        Args:
            plan: One entry per segment.
            device: Device of the segments.
            cost: Sizes of the values in the plan; None if only inputs are offloaded.

        Raises:
            HostMemoryError: Pinned memory cannot be allocated; every segment is then recomputed.
        """
        if len(plan) != len(self.segments):
            raise OptionError(f"The plan has {len(plan)} segments, the model has {len(self.segments)} decoder layers.")
        sizes = [
            _host_bytes(entry, index, cost=cost, input_bytes=self._input_bytes) for index, entry in enumerate(plan)
        ]
        self.close_engine()
        engine = None
        if any(sizes):
            engine = OffloadEngine(
                self._lanes_of(device),
                host_bytes=sum(sizes),
                slot_bytes=max(sizes),
                buffers=self.options.buffers,
                is_poisoned=self.options.is_poisoned,
            )
        self.engine = engine
        for segment, entry in zip(self.segments, plan):
            segment.follow(entry, engine)

    def close_engine(self) -> None:
        """Free pinned and staging memory; a second call does nothing."""
        engine, self.engine = self.engine, None
        for segment in self.segments:
            segment.follow(RECOMPUTE, None)
        if engine is not None:
            engine.close()

    def step_down(self) -> bool:
        """Use less memory after the device ran out of it; return whether that is possible.

        Plan again with a budget smaller by 10 %. Before the first plan, stream frozen weights and measure again.
        """
        if self.can_stream:
            gc.collect()
            self._observe(None)
            try:
                self._stream(self._device)
            except (HostMemoryError, OptionError, UnsupportedModelError) as error:
                self.stream_weights = None
                self.environment.report(
                    f"activations: the first steps do not fit, and frozen weights cannot be streamed: {error}"
                )
                return False
            self._phase = _FRESH
            self.environment.report(
                "activations: the first steps do not fit with all weights on the device, so frozen weights are "
                "streamed from the host"
            )
            return True
        if self.plan is None or self.cost is None or self.options.policy != "auto":
            return False
        lowered = int(self.plan.prediction.peak_bytes * NOTCH)
        device = self._device
        self.close_engine()
        gc.collect()
        try:
            self._make_plan(device, vram_budget=lowered)
        except OptionError:
            self.plan = None
            return False
        self.environment.report(f"The device ran out of memory: planned again for {lowered / 2**30:.1f} GiB.")
        return True

    @property
    def can_stream(self) -> bool:
        """Whether the first steps are still measured and frozen weights on the device could be streamed."""
        is_measuring = self.options.policy == "auto" and _FRESH < self._phase < _PLANNED
        is_allowed = self.options.weights == "auto" and self.stream_weights is not None and self.streamed is None
        return is_measuring and is_allowed and sum(self._weight_bytes) > 0 and not is_unified(self._device)

    def _awaits_plan(self) -> bool:
        return self.options.policy == "auto" and not self._is_always_kept and self._phase < _PLANNED

    def describe(self) -> str:
        """Return the current treatment in one line."""
        num_layers = len(self.segments)
        kept = sum(segment.plan.is_kept for segment in self.segments)
        inputs = sum(segment.plan.input_place == "host" for segment in self.segments)
        on_device = sum(place == "device" for segment in self.segments for place in segment.places.values())
        on_host = sum(place == "host" for segment in self.segments for place in segment.places.values())
        if self._is_always_kept:
            return f"on a CPU every activation is kept; {num_layers} layers"
        if self._awaits_plan():
            return f"the first steps recompute and are measured; {num_layers} layers"
        parts = [f"{kept} of {num_layers} layers kept"]
        if inputs or on_host:
            parts.append(f"{inputs} layer inputs and {on_host} values on the host")
        if on_device:
            parts.append(f"{on_device} values held")
        if self.plan is not None:
            found = self.plan.prediction
            parts.append(f"predicted {found.step_ms:.0f} ms, {found.peak_bytes / 2**30:.1f} GiB")
        return "; ".join(parts) + (f" ({self.note})" if self.note else "")

    def _offload_inputs(self, device: torch.device) -> None:
        """Offload every input except the last segment's, as far as host memory suffices."""
        check_not_unified(device)
        budget = max(0, self._host_budget() - self._held_bytes())
        most = len(self.segments) - 1
        num_hosted = min(most, budget // self._input_bytes)
        while True:
            plan = [
                RECOMPUTE._replace(input_place="host" if index < num_hosted else "device")
                for index in range(len(self.segments))
            ]
            try:
                self.follow(plan, device=device)
                break
            except HostMemoryError as error:
                if num_hosted == 0:
                    raise
                self.environment.report(
                    f"{error} Fewer layer inputs go to the host: {num_hosted // 2} instead of {num_hosted}."
                )
                num_hosted //= 2
        if num_hosted < most:
            self.note = f"host_budget has room for {num_hosted} of {most} inputs"
            self.environment.report(f"activations: {self.note}; the others stay on the device")

    def _advance(self, device: torch.device, *, num_bytes: int, is_larger: bool) -> None:
        """Advance the probe, or plan.

        A longer pack during the probe does not restart it, so that all ranks plan at the same forward; the measurements
        are scaled instead.
        """
        self._device = device
        if is_larger and self._phase == _PLANNED:
            self.environment.report(
                f"activations: packs grew to {self._input_bytes / 2**20:.1f} MiB of hidden states; measuring and "
                "planning again"
            )
            self.close_engine()
            self._observe(None)
            self.plan, self._phase = None, _FRESH
        if self._phase == _FRESH or (self._phase == _COUNT_SAVED and not self._is_counted()):
            # Count again if an interrupted forward counted nothing.
            self._phase = _COUNT_SAVED
            self._begin_count(device, num_bytes=num_bytes)
        elif self._phase == _COUNT_SAVED:
            # Warm up for the timed forward: compile kernels and fill the allocator.
            self._phase = _WARM_UP
            self._begin_warm_up(device)
        elif self._phase == _WARM_UP:
            self._phase = _TIME_STEP
            self._begin_timing(device, num_bytes=num_bytes)
        elif self._phase == _TIME_STEP:
            self._end_timing(device, num_bytes=num_bytes)

    def _begin_warm_up(self, device: torch.device) -> None:
        self._observe(None)
        for segment in self.segments:
            segment.plan = RECOMPUTE
        self._previous = make_clock(device).now()

    def _begin_timing(self, device: torch.device, *, num_bytes: int) -> None:
        self._timed_bytes = num_bytes
        self._step = StepProbe(make_clock(device), Memory(device), previous=self._previous)
        self._observe(self._step)

    def _end_timing(self, device: torch.device, *, num_bytes: int) -> None:
        assert self._step is not None
        self._step.step_ends()
        if not self._step.has_backward:
            # A forward without a complete backward is useless: measure this one.
            self._begin_timing(device, num_bytes=num_bytes)
            return
        self._observe(None)
        self._finish_probe(device)

    def _begin_count(self, device: torch.device, *, num_bytes: int) -> None:
        """Keep one segment of each kind for one forward: the last one, whose backward is first."""
        self._counted_bytes = num_bytes
        self._saved = SavedBytesProbe(Memory(device))
        last_of_kind = {kind: index for index, kind in enumerate(self._kinds)}
        for index in last_of_kind.values():
            self.segments[index].plan = KEEP
            self.segments[index].observer = self._saved

    def _is_counted(self) -> bool:
        assert self._saved is not None
        return len(self._saved.saved_bytes) == len(set(self._kinds))

    def _finish_probe(self, device: torch.device) -> None:
        assert self._step is not None
        assert self._saved is not None
        counted = {self._kinds[index]: num_bytes for index, num_bytes in self._saved.saved_bytes.items()}
        embedding_bytes, extra_bytes = self._embedding_bytes(), self.environment.missing_bytes()
        if self.streamed is not None:
            # Streamed weights count as resident here; the plan subtracts them.
            embedding_bytes = self.streamed.num_embedding_bytes
            extra_bytes += sum(self._weight_bytes) - self.streamed.num_slot_bytes + embedding_bytes
        cost = self._step.read(
            self.segments,
            input_bytes=align(self._timed_bytes),
            saved_bytes=lambda index: counted[self._kinds[index]] * self._timed_bytes // self._counted_bytes,
            extra_bytes=extra_bytes,
            weight_bytes=self._weight_bytes,
        )
        cost = cost._replace(embedding_bytes=embedding_bytes)
        self.cost = scale_cost(cost, self._most_bytes / self._timed_bytes, input_bytes=self._input_bytes)
        self._step = None
        self._phase = _PLANNED
        self._make_plan(device, vram_budget=self._vram_budget(device))
        assert self.plan is not None
        self.environment.report("\n" + render_plan(self.cost, self.plan))

    def _make_plan(self, device: torch.device, *, vram_budget: int) -> None:
        """Plan and apply; lower a budget, with a warning, if its memory is not available."""
        host_budget, machine = self._host_budget(), measure_machine(device)
        for attempt in range(_MAX_NOTCHES):
            plan = self._best_plan(vram_budget=vram_budget, host_budget=host_budget, machine=machine)
            if not self._has_agreed:
                self._has_agreed, plan = True, self.environment.agree(plan)
            # Discard the plan that this rank would have made alone.
            if self.streamed is None and any(segment.is_streamed for segment in plan.segments):
                plan = self._stream_for(plan, device, vram_budget=vram_budget, host_budget=host_budget, machine=machine)
            try:
                self.follow(plan.segments, device=device, cost=self.cost)
            except HostMemoryError as error:
                # Last attempt without host memory for activations, since pinning keeps failing; streamed weights stay.
                held = self._held_bytes()
                host_budget = held + (
                    max(0, plan.prediction.host_bytes - held) // 2 if attempt < _MAX_NOTCHES - 2 else 0
                )
                self.note = f"the host gave less pinned memory than planned: {host_budget / 2**30:.1f} GiB"
                self.environment.report(f"{error} Planning again with {host_budget / 2**30:.1f} GiB of pinned memory.")
            except torch.OutOfMemoryError:
                vram_budget = int(vram_budget * NOTCH)
                self.environment.report(
                    f"The device has less memory than planned for; planning again for {vram_budget / 2**30:.1f} GiB."
                )
            else:
                self.plan = plan
                return
        self.close_engine()
        raise OptionError(
            "No plan for the activations could be put into effect; give vram_budget and host_budget in GiB, or policy "
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
        if self.streamed is not None:
            return plan(self.cost, weights="stream")
        if self.options.weights == "resident" or self.stream_weights is None or machine.is_unified:
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
            self.stream_weights = None
            try:
                found = self._best_plan(vram_budget=vram_budget, host_budget=host_budget, machine=machine)
            except OptionError:
                raise error from None
            self.environment.report(f"activations: frozen weights stay on the device, where a plan fits too: {error}")
            return found
        assert self.streamed is not None
        self.environment.report(f"activations: {' '.join(plan.notes)}")
        if self.streamed.num_embedding_bytes == self.cost.embedding_bytes:
            return plan
        self.cost = self.cost._replace(embedding_bytes=self.streamed.num_embedding_bytes)
        return self._best_plan(vram_budget=vram_budget, host_budget=host_budget, machine=machine)

    def _stream(self, device: torch.device) -> None:
        if self.stream_weights is None:
            raise OptionError(
                "weights='stream' is for models of transformers; for other layers use "
                "lightning_fastft.activations.weights.WeightStreamer."
            )
        self.streamed = self.stream_weights(self._lanes_of(device))
        # If this runs inside the first layer's call, the hooks just added to it do not run for that call.
        self.segments[0].on_backward = self.streamed.enter_backward

    def _lanes_of(self, device: torch.device) -> CopyStreams:
        """Copy streams of the stack, shared by activations and weights."""
        if self._streams is None or self._streams.device != device:
            self._streams = self.make_copy_streams(device)
        return self._streams

    def _observe(self, observer: Any) -> None:
        for segment in self.segments:
            segment.observer = observer

    def _vram_budget(self, device: torch.device) -> int:
        """Device memory budget in bytes."""
        assert self.cost is not None
        if self.options.vram_budget_bytes is not None:
            return self.options.vram_budget_bytes
        return auto_vram_bytes(device)

    def _host_budget(self) -> int:
        """Pinned memory budget of this rank in bytes, with the part of its streamed weights."""
        if self.options.host_budget_bytes is not None:
            return self.options.host_budget_bytes
        return auto_host_bytes() // self.environment.num_local_ranks + self._held_bytes()

    def _held_bytes(self) -> int:
        """Pinned memory of streamed weights in bytes, which every plan needs."""
        if self.streamed is None:
            return 0
        # The plan counts whole layers, but a few small tensors of them stay on the device.
        return max(self.streamed.num_host_bytes, sum(self._weight_bytes)) + self.streamed.num_embedding_bytes


def _host_bytes(entry: SegmentPlan, index: int, *, cost: StepCost | None, input_bytes: int) -> int:
    """Return the bytes of a segment that its plan offloads."""
    num_bytes = input_bytes if entry.input_place == "host" else 0
    if cost is not None:
        sizes = {value.name: value.num_bytes for value in cost.segments[index].values}
        num_bytes += sum(sizes[name] for name, place in entry.values if place == "host")
    return num_bytes


def _kinds(layers: Sequence[nn.Module]) -> list[int]:
    """Number the layers by kind; layers with equal modules and parameters are one kind."""
    seen: dict[tuple[Any, ...], int] = {}
    found = []
    for layer in layers:
        structure = tuple((name, type(module).__name__) for name, module in layer.named_modules())
        shapes = tuple((name, tuple(parameter.shape)) for name, parameter in layer.named_parameters())
        found.append(seen.setdefault((structure, shapes), len(seen)))
    return found


def _frozen_bytes(layer: nn.Module) -> int:
    """Return the size of the weights that can be streamed: frozen and not sharded."""
    return sum(
        # NF4 numel() is the logical size; use held_bytes for memory.
        getattr(parameter, "held_bytes", parameter.numel() * parameter.element_size())
        for parameter in layer.parameters()
        if not parameter.requires_grad and not hasattr(parameter, "device_mesh")
    )


def _has_router(layer: nn.Module) -> bool:
    """Return whether a layer has a router: a module of experts, or one named router."""
    return any(
        "experts" in name.rpartition(".")[2].lower() or "router" in type(module).__name__.lower()
        for name, module in layer.named_modules()
    )
