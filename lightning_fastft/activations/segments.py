"""One decoder layer under a plan: what its forward leaves behind, where that lies, and how its second run finds it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import _StopRecomputationError, checkpoint

from lightning_fastft.activations.engine import Group, HostAllocation, OffloadEngine
from lightning_fastft.core.errors import SwapError
from lightning_fastft.planner.step import SegmentPlan

if TYPE_CHECKING:
    from torch import nn

Tensors = tuple[torch.Tensor, ...]
RECOMPUTE = SegmentPlan(is_kept=False, input_place="device", values=())
KEEP = SegmentPlan(is_kept=True, input_place="device", values=())
# Smaller tensors (random state of a kernel, offsets) are not worth a copy.
_LEAST_HOST_BYTES = 4096


class SegmentObserver:
    """Watch segments run; this one looks away, probes look at what they need."""

    def around_kept(self, segment: Segment) -> AbstractContextManager[None]:
        """Return what the forward of a kept segment runs in."""
        return nullcontext()

    def forward_begins(self, segment: Segment) -> None:
        """Called before the forward of a segment."""

    def forward_ends(self, segment: Segment) -> None:
        """Called after it."""

    def backward_awaited(self, segment: Segment) -> None:
        """Called after a forward whose output has a gradient to wait for."""

    def backward_begins(self, segment: Segment) -> None:
        """Called when the gradient of a segment's output is known."""

    def replay_begins(self, segment: Segment) -> None:
        """Called before the second run of a segment."""

    def replay_ends(self, segment: Segment) -> None:
        """Called after it, also when it ends early."""

    def value_begins(self, segment: Segment, name: str) -> None:
        """Called before a value is computed in the first run."""

    def value_ends(self, segment: Segment, name: str, tensors: Tensors) -> None:
        """Called after it."""


class Segment:
    """A decoder layer that runs under a plan.

    Modules inside the layer that can take a value instead of computing it find their segment in an attribute and ask
    ``session`` during a run.

    Args:
        index: Place among the layers of its model, from 0.
        is_random: The layer draws random numbers, which the second run must repeat.
        has_router: The layer chooses experts, which the second run must not choose again.
    """

    def __init__(self, index: int, *, is_random: bool = False, has_router: bool = False) -> None:
        self.index = index
        self.is_random = is_random
        self.has_router = has_router
        self.plan = RECOMPUTE
        self.places: dict[str, str] = {}
        self.engine: OffloadEngine | None = None
        self.observer: SegmentObserver | None = None
        self.session: Session | None = None
        # The value point whose own saved tensors end the second run; what it computes is never needed there.
        self.last_point: str | None = None
        # Called with the layer's input before a forward that records gradients begins.
        self.on_forward: Callable[[torch.Tensor], None] | None = None
        # Called once, when the gradient of the output of the forward that is under way, or of the next one, is known.
        self.on_backward: Callable[[], None] | None = None
        # Whether forwards are being measured for a plan that does not stand yet.
        self.awaits_plan: Callable[[], bool] = _never
        # What the device may hold in all, where somebody said so.
        self.vram_budget_bytes: int | None = None

    def __getstate__(self) -> dict[str, Any]:
        """A copied or pickled model recomputes: streams, pinned memory and probes stay with the original."""
        alone = Segment(self.index, is_random=self.is_random, has_router=self.has_router)
        return vars(alone)

    def inner_session(self) -> Session | None:
        """Return a session for a part of the layer that runs in a backward outside of the layer's own second run; else
        None.

        A checkpoint inside the layer does so, and its part has to save the tensors that it saved in the first run,
        under a session.
        """
        is_in_backward = torch._C._current_graph_task_id() != -1
        return InnerSession(self, engine=None, group=None) if is_in_backward and not self.plan.is_kept else None

    def follow(self, plan: SegmentPlan, engine: OffloadEngine | None) -> None:
        """Run under this plan from the next forward on."""
        self.plan, self.engine = plan, engine
        self.places = dict(plan.values)

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run the layer once, as its checkpointing function.

        Cost:
            As the plan says; without gradients, that of the layer alone.
        """
        if not torch.is_grad_enabled():
            return function(*args)
        if self.on_forward is not None:
            self.on_forward(_hidden_states(function, args))
        observer = self.observer
        if observer is not None:
            observer.forward_begins(self)
        # Also where nothing goes to the host: its backward is when the tensors of the segment before it are fetched.
        group = None if self.engine is None else self.engine.open_group()
        if self.plan.is_kept:
            with nullcontext() if observer is None else observer.around_kept(self):
                output = function(*args)
        else:
            session = Session(self, engine=self.engine, group=group)
            # Only what the layer is given passes these hooks: what it saves inside goes to the checkpoint's own. Where
            # nothing is to be sent there are none: the input of a checkpoint inside another one belongs to that one's
            # hooks.
            is_sent = self.plan.input_place == "host" and self.engine is not None
            with (
                torch.autograd.graph.saved_tensors_hooks(session.pack_input, session.unpack_input)
                if is_sent
                else nullcontext()
            ):
                output = checkpoint(
                    partial(session.run, function), *args, use_reentrant=False, preserve_rng_state=self.is_random
                )
        if observer is not None:
            observer.forward_ends(self)
        self._announce_backward(output)
        if group is not None or observer is not None:
            self._watch_backward(output, group=group, observer=observer)
        return output

    def _announce_backward(self, output: Any) -> None:
        """Call on_backward as soon as the gradient of one of the outputs is known."""
        announce, self.on_backward = self.on_backward, None
        if announce is None:
            return
        for tensor in output if isinstance(output, (tuple, list)) else (output,):
            if torch.is_tensor(tensor) and tensor.requires_grad:
                tensor.register_hook(lambda _: announce())

    def _watch_backward(self, output: Any, *, group: Group | None, observer: SegmentObserver | None) -> None:
        """Learn when the backward reaches the layer: when the gradient of its output is known."""
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
    """Return what code runs in that chooses no experts: ``session.unwatched()``, nothing outside a session."""
    return nullcontext() if session is None else session.unwatched()


def _hidden_states(function: Callable[..., Any], args: tuple[Any, ...]) -> torch.Tensor:
    """The first tensor that a layer is given, also where it is given by name."""
    given = (*args, *getattr(function, "keywords", {}).values())
    hidden = next((value for value in given if torch.is_tensor(value) and value.is_floating_point()), None)
    if hidden is None:
        raise SwapError(
            "A decoder layer was called without a tensor of hidden states; activation policies need layers that take "
            "and return them."
        )
    return hidden


class Session:
    """One forward of one segment, and its second run in the backward.

    Args:
        segment: The layer.
        engine: Who copies to the host; None where nothing goes there.
        group: The segment's host tensors in this forward.
    """

    def __init__(self, segment: Segment, *, engine: OffloadEngine | None, group: Group | None) -> None:
        self.segment = segment
        self.is_replay = False
        self._engine, self._group = engine, group
        self._held: dict[str, tuple[_Held, ...]] = {}
        self._counts: Counter[str] = Counter()
        self._num_runs = 0
        self._choice: _RememberedChoice | None = None

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run the layer with this session open; the first time records, later times replay."""
        self.is_replay = self._num_runs > 0
        self._num_runs += 1
        self._counts.clear()
        segment, observer = self.segment, self.segment.observer
        outer, segment.session = segment.session, self
        if self.is_replay and observer is not None:
            observer.replay_begins(segment)
        try:
            if segment.has_router:
                self._choice = _RememberedChoice(self)
                with self._choice:
                    return function(*args)
            return function(*args)
        finally:
            # The two refer to each other: held on, an interrupted step would keep its memory until garbage is
            # collected.
            self._choice = None
            segment.session = outer
            if self.is_replay and observer is not None:
                observer.replay_ends(segment)

    @contextmanager
    def unwatched(self) -> Iterator[None]:
        """Run what chooses no experts without being watched for it: every call of torch, each look at a shape
        among them, passes a watch.
        """
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
        """Return what compute returns, computed or remembered as the plan says.

        Called where no gradient is recorded, in the same order in every run of the layer.

        Args:
            name: Name of the value in the plan.
            compute: Computes it.
            is_always_held: Remember it on the device whatever the plan says (it is small, and must not differ).
        """
        key = self._key(name)
        if self.is_replay:
            held = self._held.pop(key, None)
            return compute() if held is None else tuple(item.get() for item in held)
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
        """Whether the second run is known to end with what this point saves, so that its output is needed by nobody."""
        return self.is_replay and self.segment.last_point == name

    def skip(self, name: str) -> None:
        """Pass over one call of a value that is not computed, so that the next call does not take what was held
        for this one.
        """
        self._held.pop(self._key(name), None)

    @contextmanager
    def watch_end(self, name: str) -> Iterator[None]:
        """Learn whether the second run ends while this point saves its tensors."""
        if not self.is_replay:
            yield
            return
        try:
            yield
        except _StopRecomputationError:
            self.segment.last_point = name
            raise
        if self.segment.last_point == name:
            self.segment.last_point = None

    def run_last(self, name: str, run: Callable[[], torch.Tensor], *, anew: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Run a point that may be the last to save something in the layer, and leave its output out where nobody needs
        it.

        Args:
            name: Name of the point.
            run: Computes; in a second run that is known to end here it may return anything of the right shape
                (``is_last``).
            anew: Computes in full; called without gradients where the second run went on after all, so that somebody
                may read the output.
        """
        is_unneeded = self.is_last(name)
        with self.watch_end(name):
            out = run()
        if is_unneeded:
            with torch.no_grad():
                out.data = anew()
        return out

    def pack_input(self, tensor: torch.Tensor) -> torch.Tensor | HostAllocation:
        """Send the layer's input to the host if the plan says so."""
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

    def _hold(self, tensor: torch.Tensor, *, name: str, place: str) -> _Held:
        tensor = tensor.detach()
        if (
            place == "host"
            and self._engine is not None
            and self._group is not None
            and tensor.numel() * tensor.element_size() >= _LEAST_HOST_BYTES
        ):
            allocation = self._engine.store(self._group, tensor)
            if allocation is not None:
                return _HeldOnHost(self._engine, allocation)
        return _HeldOnDevice(tensor, name=name)


class InnerSession(Session):
    """The second run of a checkpoint inside a layer: everything is computed."""

    def value(self, name: str, compute: Callable[[], Tensors], *, is_always_held: bool = False) -> Tensors:
        """Return what compute returns."""
        return compute()


class _Held(Protocol):
    def get(self) -> torch.Tensor:
        """Return the tensor."""


class _HeldOnDevice:
    """A tensor kept where it is, and the proof that nobody wrote to it since."""

    def __init__(self, tensor: torch.Tensor, *, name: str) -> None:
        self._tensor, self._name, self._version = tensor, name, tensor._version

    def get(self) -> torch.Tensor:
        if self._tensor._version != self._version:
            raise SwapError(
                f"{self._name} was kept for the backward and then written to in place by the model. Keep or recompute "
                "whole layers: "
                "OffloadCheckpointing('keep') or 'recompute'."
            )
        return self._tensor


class _HeldOnHost:
    """A tensor in pinned memory."""

    def __init__(self, engine: OffloadEngine, allocation: HostAllocation) -> None:
        self._engine, self._allocation = engine, allocation

    def get(self) -> torch.Tensor:
        return self._engine.load(self._allocation)


class _RememberedChoice(TorchFunctionMode):
    """Keep the indices of every top-k of a layer, so that its second run sends each token to the same experts."""

    def __init__(self, session: Session) -> None:
        super().__init__()
        self._session = session

    def is_innermost(self) -> bool:
        """Whether this watch is the first to see a call."""
        depth = torch._C._len_torch_function_stack()
        return depth > 0 and torch._C._get_function_stack_at(depth - 1) is self

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is not torch.topk and func is not torch.Tensor.topk:
            return func(*args, **kwargs)
        scores: torch.Tensor = args[0] if args else kwargs["input"]
        axis = args[2] if len(args) > 2 else kwargs.get("dim", -1)
        with torch.no_grad():
            (index,) = self._session.value(
                "choice of experts", lambda: (func(*args, **kwargs).indices,), is_always_held=True
            )
        values = _ChosenValues.apply(scores, index, axis) if scores.is_floating_point() else scores.gather(axis, index)
        return torch.return_types.topk((values, index))  # type: ignore[attr-defined]


class _ChosenValues(torch.autograd.Function):
    """The values of a top-k at indices that are known; forward and gradient have the bits of torch.topk's own.
    Saves the indices.
    """

    @staticmethod
    def forward(ctx: Any, scores: torch.Tensor, index: torch.Tensor, axis: int) -> torch.Tensor:
        ctx.save_for_backward(index)
        ctx.axis, ctx.shape = axis, scores.shape
        return scores.gather(axis, index)

    @staticmethod
    def backward(ctx: Any, d_values: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (index,) = ctx.saved_tensors
        # No index comes twice along the axis, so nothing is summed.
        return d_values.new_zeros(ctx.shape).scatter(ctx.axis, index, d_values), None, None


def is_random(module: nn.Module) -> bool:
    """Whether a module draws random numbers in training: dropout, or router noise, above 0."""
    from torch.nn.modules.dropout import _DropoutNd

    if isinstance(module, _DropoutNd) and module.p > 0:
        return True
    return any(
        isinstance(value, float) and value > 0 and ("drop" in name or "jitter" in name)
        for name, value in vars(module).items()
    )
