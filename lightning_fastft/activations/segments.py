"""Run one decoder layer under a plan: store tensors in its forward, and find them in its recompute."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.checkpoint import _StopRecomputationError, checkpoint

from lightning_fastft.activations.engine import Group, HostAllocation, OffloadEngine
from lightning_fastft.activations.recompute import recompute_in_backward
from lightning_fastft.activations.router_choice import RouterChoice
from lightning_fastft.activations.switches import State, Switches, is_random
from lightning_fastft.core.errors import SwapError
from lightning_fastft.planner.step import SegmentPlan

if TYPE_CHECKING:
    from torch import nn

Tensors = tuple[torch.Tensor, ...]
RECOMPUTE = SegmentPlan(is_kept=False, input_place="device", values=())
KEEP = SegmentPlan(is_kept=True, input_place="device", values=())
# Smaller tensors (random state of a kernel, offsets) stay on the device.
_LEAST_HOST_BYTES = 4096


class SegmentObserver:
    """No-op observer of segments; probes override the hooks they use."""

    def around_kept(self, segment: Segment) -> AbstractContextManager[None]:
        """Return the context manager around the forward of a kept segment."""
        return nullcontext()

    def forward_begins(self, segment: Segment) -> None:
        """Called before the forward of a segment, once its input is stored."""

    def forward_ends(self, segment: Segment) -> None:
        """Called after it."""

    def backward_awaited(self, segment: Segment) -> None:
        """Called after a forward whose output requires a gradient."""

    def backward_begins(self, segment: Segment) -> None:
        """Called when the gradient of a segment's output is known."""

    def recompute_begins(self, segment: Segment) -> None:
        """Called before the recompute of a segment."""

    def recompute_ends(self, segment: Segment) -> None:
        """Called after the recompute, also if it ends early."""

    def value_begins(self, segment: Segment, name: str) -> None:
        """Called before a value is computed in the forward."""

    def value_ends(self, segment: Segment, name: str, tensors: Tensors) -> None:
        """Called after it."""


class Segment:
    """A decoder layer that runs under a plan.

    Modules inside the layer whose values a plan may hold find the segment in an attribute and use its ``session``.

    Args:
        index: Index among the layers of its model, from 0.
        modules: The modules of the layer. If one draws random numbers, the recompute repeats them.
        has_router: Whether the layer has a router, whose top-k the recompute must reuse.
    """

    def __init__(self, index: int, modules: Sequence[nn.Module] = (), *, has_router: bool = False) -> None:
        self.index = index
        self.is_random = any(map(is_random, modules))
        self.has_router = has_router
        self.switches = Switches(modules)
        self.plan = RECOMPUTE
        self.places: dict[str, str] = {}
        self.engine: OffloadEngine | None = None
        self.observer: SegmentObserver | None = None
        self.session: Session | None = None
        # The value point that saves the last tensors of the layer; the recompute ends there without its output.
        self.last_point: str | None = None
        # Called with the layer's input before a forward that records gradients.
        self.on_forward: Callable[[torch.Tensor], None] | None = None
        # Called once, when the gradient of the output of the current or next forward is known.
        self.on_backward: Callable[[], None] | None = None
        # Returns whether the first steps are still measured for the plan.
        self.awaits_plan: Callable[[], bool] = _never
        # Device memory budget, if one was given.
        self.vram_budget_bytes: int | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Recompute in a copy or pickle; streams, pinned memory and probes stay with the original."""
        alone = Segment(self.index, has_router=self.has_router)
        return vars(alone) | {"is_random": self.is_random, "switches": self.switches}

    def inner_session(self) -> Session | None:
        """Return a session for a part of the layer that a checkpoint inside the layer recomputes, else None.

        That part runs outside of the layer's own recompute, and must save the same tensors as in the forward.
        """
        is_in_backward = torch._C._current_graph_task_id() != -1
        return InnerSession(self, engine=None, group=None) if is_in_backward and not self.plan.is_kept else None

    def follow(self, plan: SegmentPlan, engine: OffloadEngine | None) -> None:
        """Use this plan from the next forward on."""
        self.plan, self.engine = plan, engine
        self.places = dict(plan.values)

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run the layer once, as its checkpointing function.

        Cost:
            That of the plan; without gradients, that of the layer alone.
        """
        if not torch.is_grad_enabled():
            return function(*args)
        if self.on_forward is not None:
            self.on_forward(_hidden_states(function, args))
        observer = self.observer
        # Also without host tensors, because its backward starts the fetch for the previous segment.
        group = None if self.engine is None else self.engine.open_group()
        if self.plan.is_kept:
            if observer is not None:
                observer.forward_begins(self)
            with nullcontext() if observer is None else observer.around_kept(self):
                output = function(*args)
        else:
            session = Session(self, engine=self.engine, group=group)
            # Only the inputs of the layer pass through these hooks; tensors saved inside pass through the hooks of the
            # checkpoint. Without offload there are no hooks, because an enclosing checkpoint has its own for this
            # input.
            is_sent = self.plan.input_place == "host" and self.engine is not None
            with (
                torch.autograd.graph.saved_tensors_hooks(session.pack_input, session.unpack_input)
                if is_sent
                else nullcontext()
            ):
                output = self._checkpoint(partial(session.run, function), *args)
        if observer is not None:
            observer.forward_ends(self)
        self._announce_backward(output)
        if group is not None or observer is not None:
            self._watch_backward(output, group=group, observer=observer)
        return output

    def _checkpoint(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run a function, and again in the backward instead of keeping what it saves."""
        # torch's checkpoint repeats random numbers, and torch.compile can trace it.
        if self.is_random or torch.compiler.is_compiling():
            return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=self.is_random)
        return recompute_in_backward(function, *args)

    def _announce_backward(self, output: Any) -> None:
        """Call on_backward as soon as the gradient of one of the outputs is known."""
        announce, self.on_backward = self.on_backward, None
        if announce is None:
            return
        for tensor in output if isinstance(output, (tuple, list)) else (output,):
            if torch.is_tensor(tensor) and tensor.requires_grad:
                tensor.register_hook(lambda _: announce())

    def _watch_backward(self, output: Any, *, group: Group | None, observer: SegmentObserver | None) -> None:
        """Detect that the backward has reached the layer, by the gradient of its output."""
        tensor = output[0] if isinstance(output, (tuple, list)) else output
        if not torch.is_tensor(tensor) or not tensor.requires_grad:
            return
        engine = self.engine

        def reached(_: torch.Tensor) -> None:
            if engine is not None and group is not None:
                engine.enter_backward(group)
            if observer is not None:
                observer.backward_begins(self)

        if observer is not None:
            observer.backward_awaited(self)
        tensor.register_hook(reached)


def _never() -> bool:
    return False


def unwatched(session: Session | None) -> AbstractContextManager[None]:
    """Return a context manager that suspends top-k tracking; a no-op outside of a session."""
    return nullcontext() if session is None else session.unwatched()


def _hidden_states(function: Callable[..., Any], args: tuple[Any, ...]) -> torch.Tensor:
    """Return the first tensor argument of a layer, positional or by keyword."""
    given = (*args, *getattr(function, "keywords", {}).values())
    hidden = next((value for value in given if torch.is_tensor(value) and value.is_floating_point()), None)
    if hidden is None:
        raise SwapError(
            "A decoder layer was called without a tensor of hidden states; activation policies need layers that take "
            "and return them."
        )
    return hidden


class Session:
    """A forward of a segment, and its recompute in the backward."""

    def __init__(self, segment: Segment, *, engine: OffloadEngine | None, group: Group | None) -> None:
        self.segment = segment
        self.is_recompute = False
        self._engine, self._group = engine, group
        self._held: dict[str, tuple[Callable[[], torch.Tensor], ...]] = {}
        self._counts: Counter[str] = Counter()
        self._num_runs = 0
        self._choice: RouterChoice | None = None
        self._state: State = []

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run the layer in this session; the first run is the forward, later runs recompute it."""
        self.is_recompute = self._num_runs > 0
        self._num_runs += 1
        self._counts.clear()
        segment = self.segment
        if not self.is_recompute:
            self._state = segment.switches.read()
            return self._run_once(function, *args)
        with segment.switches.set_to(self._state):
            return self._run_once(function, *args)

    def _run_once(self, function: Callable[..., Any], *args: Any) -> Any:
        segment, observer = self.segment, self.segment.observer
        outer, segment.session = segment.session, self
        if observer is not None:
            (observer.recompute_begins if self.is_recompute else observer.forward_begins)(segment)
        try:
            if segment.has_router:
                self._choice = RouterChoice(self.value)
                with self._choice:
                    return function(*args)
            return function(*args)
        finally:
            # Break the reference cycle, so that an interrupted step frees its memory at once.
            self._choice = None
            segment.session = outer
            if self.is_recompute and observer is not None:
                observer.recompute_ends(segment)

    @contextmanager
    def unwatched(self) -> Iterator[None]:
        """Suspend top-k tracking, which intercepts every torch call, around code without a router."""
        choice = self._choice
        if choice is None or not choice.is_innermost():
            yield
            return
        choice.__exit__(None, None, None)
        try:
            yield
        finally:
            choice.__enter__()

    def value(self, name: str, compute: Callable[[], Tensors], *, is_always_held: bool = False) -> Tensors:
        """Return the value of compute, computed or stored as planned.

        Call it without gradients, in the same order in every run of the layer.

        Args:
            name: Name of the value in the plan.
            compute: Computes the value.
            is_always_held: Store it on the device under any plan, because it is small and must not differ.
        """
        key = self._key(name)
        if self.is_recompute:
            held = self._held.pop(key, None)
            return compute() if held is None else tuple(read() for read in held)
        observer = self.segment.observer
        if observer is not None and not is_always_held:
            observer.value_begins(self.segment, name)
        tensors = compute()
        if observer is not None and not is_always_held:
            observer.value_ends(self.segment, name, tensors)
        place = "device" if is_always_held else self.segment.places.get(name)
        if place is not None:
            self._held[key] = tuple(self._hold(tensor, name=name, place=place) for tensor in tensors)
        return tensors

    def is_last(self, name: str) -> bool:
        """Return whether the recompute ends when this point saves its tensors, so that its output is not needed."""
        return self.is_recompute and self.segment.last_point == name

    def skip(self, name: str) -> None:
        """Skip the stored value of a call that is not made, so that the next call gets its own value."""
        self._held.pop(self._key(name), None)

    @contextmanager
    def watch_end(self, name: str) -> Iterator[None]:
        """Detect whether the recompute ends while this point saves its tensors."""
        if not self.is_recompute:
            yield
            return
        try:
            yield
        except _StopRecomputationError:
            self.segment.last_point = name
            raise
        if self.segment.last_point == name:
            self.segment.last_point = None

    def run_last(self, name: str, run: Callable[[], torch.Tensor], *, full: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Run a point that may be the last to save tensors in the layer, and skip its output if it is not needed.

        Args:
            name: Name of the point.
            run: Computes the output; in a recompute that ends here (``is_last``) it may return any tensor of the same
                shape.
            full: Computes the full output, without gradients; called if the recompute continued, because the output
                may then be read.
        """
        is_unneeded = self.is_last(name)
        with self.watch_end(name):
            out = run()
        if is_unneeded:
            with torch.no_grad():
                out.data = full()
        return out

    def pack_input(self, tensor: torch.Tensor) -> torch.Tensor | HostAllocation:
        """Offload the input of the layer if planned."""
        if (
            self._engine is None
            or self._group is None
            or self.segment.plan.input_place != "host"
            or tensor.numel() == 0
        ):
            return tensor
        allocation = self._engine.store(self._group, tensor)
        return tensor if allocation is None else allocation

    def unpack_input(self, packed: torch.Tensor | HostAllocation) -> torch.Tensor:
        """Return the layer's input."""
        if not isinstance(packed, HostAllocation):
            return packed
        assert self._engine is not None
        return self._engine.load(packed)

    def _key(self, name: str) -> str:
        self._counts[name] += 1
        return f"{name}#{self._counts[name]}"

    def _hold(self, tensor: torch.Tensor, *, name: str, place: str) -> Callable[[], torch.Tensor]:
        """Store a tensor as planned; return a function that reads it."""
        tensor = tensor.detach()
        if (
            place == "host"
            and self._engine is not None
            and self._group is not None
            and tensor.nbytes >= _LEAST_HOST_BYTES
        ):
            allocation = self._engine.store(self._group, tensor)
            if allocation is not None:
                return partial(self._engine.load, allocation)
        return partial(_take_unwritten, tensor, name, tensor._version)


class InnerSession(Session):
    """The recompute of a checkpoint inside a layer, which computes everything."""

    def value(self, name: str, compute: Callable[[], Tensors], *, is_always_held: bool = False) -> Tensors:
        """Return the value of compute."""
        return compute()


def _take_unwritten(tensor: torch.Tensor, name: str, version: int) -> torch.Tensor:
    """Return a tensor that was kept on the device, unless it was written to since."""
    if tensor._version != version:
        raise SwapError(
            f"{name} was kept for the backward and then written to in place by the model. Keep or recompute whole "
            "layers: OffloadCheckpointing('keep') or 'recompute'."
        )
    return tensor
