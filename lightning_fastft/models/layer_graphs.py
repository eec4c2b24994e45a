"""CUDA graphs of decoder layers: forward and backward of a layer are recorded once and launched as one, so that no model waits for the host.

A recorded layer reads and writes memory that stays where it is: hidden states, their gradient, angles, document offsets and the gradients of what is
trained. Its graph is as good for any pack of as many tokens whose documents fit what it was recorded for. That memory is written through ``.data``:
what autograd saved of it in a recording is meant to change.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from peft.tuners.tuners_utils import BaseTunerLayer

from lightning_fastft.errors import SwapError
from lightning_fastft.kernels.sizes import next_power_of_2
from lightning_fastft.models.attention import DeferredMask
from lightning_fastft.models.values import SEGMENT_ATTRIBUTE
from lightning_fastft.offload.segments import is_random
from lightning_fastft.packing.context import BatchContext
from lightning_fastft.status import Status

if TYPE_CHECKING:
    from torch import nn

    from lightning_fastft.models.swap import SwapLedger
    from lightning_fastft.offload.step import SegmentPlan

STATUS_NAME = "layer graphs"
# A plain attribute of instances, so no state_dict has it.
GRAPH_ATTRIBUTE = "fastft_layer_graph"
# Backends whose kernels read nothing of a batch but offsets on the device and a bound on the length of a document.
_BACKENDS = frozenset({"varlen"})
# Documents of a pack are rounded up to a multiple of this.
_DOCUMENT_BUCKET = 16
# Micro-batches of as many tokens before the first recording: kernels are compiled, buffers and narrow copies are made.
_NUM_WARMUP = 2
# Tokens, documents and longest document, rounded up: packs of one length come in a few kinds.
_MOST_KINDS = 16
# Packs of each length need memory for the hidden states of every layer.
_MOST_LENGTHS = 2
# From here on packs are said to be of many lengths.
_MANY_LENGTHS = 5
# A layer whose weights moved as often has them moved all the time.
_MOST_RECORDINGS = 4
# Keywords that hold what belongs to the loss and not to a layer.
_FOREIGN_KEYWORDS = frozenset({"num_items_in_batch"})
_OUTPUT_FLAGS = ("output_attentions", "output_hidden_states", "output_router_logits")
_RECORDING = "transformers.utils.output_capturing"


class Recorder(Protocol):
    """Makes work on the device repeatable."""

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """Return what does that work again, in the same memory; the work itself need not be done."""


class CudaRecorder:
    """Record work as CUDA graphs that share one pool of memory, so they must run in the order in which they were recorded.

    Args:
        device: Where the work runs.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # What steps left in the allocator's cache cannot be used by graphs, and cannot be given back while one is recorded.
        torch.cuda.empty_cache()
        self._pool: Any = None
        self._graphs: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()
        self._stream = torch.cuda.Stream(device)

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """Return a launch of what work queues; nothing runs yet."""
        graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self._device)
        generator = torch.cuda.default_generators[self._device.index]
        before = generator.clone_state()
        self._stream.wait_stream(current)
        if not self._graphs:
            # A pool ends with the last of its graphs.
            self._pool = torch.cuda.graph_pool_handle()
        with torch.cuda.stream(self._stream):
            is_done = False
            try:
                # Kernels may be compiled and loaded on the way, and other threads pin memory meanwhile.
                graph.capture_begin(pool=self._pool, capture_error_mode="relaxed")
                work()
                is_done = True
            finally:
                if not is_done:
                    # What went wrong first is what the user has to read.
                    with contextlib.suppress(RuntimeError):
                        graph.capture_end()
                    # A recording that fails never ends for the generator, which would draw nothing outside of it.
                    generator.graphsafe_set_state(before)
            graph.capture_end()
        current.wait_stream(self._stream)
        self._graphs.add(graph)
        return graph.replay


class LayerGraphs:
    """Run the fused decoder layers of one model from recorded graphs where that is exact, else layer by layer as ever.

    A micro-batch runs as ever when it is one of the first two of as many tokens, or when the backward of an earlier one is still to come; when its
    layers are under a plan that copies to the host or is still being measured; and for the reasons that ``status`` names. It needs memory of its own
    then, beside that of the graphs. Gradients of what is trained are written to buffers. Alone, ``Parameter.grad`` refers to them; in a process group
    autograd accumulates what they hold, so that DistributedDataParallel finds every gradient when its layer is done, and sends it beside the layers
    that follow. A layer whose parameters have hooks of somebody else is not recorded.

    Args:
        layers: Fused decoder layers, in order.
        memory_of: Returns memory that layers share and that may be exchanged for more later, such as that of dense copies of packed weights; graphs
            go on with what they were recorded with, so it is held for them.
        recorder: Makes work repeatable; None for CUDA graphs.
        backends: Attention backends that may be recorded.

    Cost:
        Memory: one tensor of hidden states per layer beside what the plan holds, the gradients of what is trained, and the pool, which stays
        reserved between steps. Host: two launches per layer and micro-batch. No host synchronisation.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        *,
        memory_of: Callable[[nn.Module], list[torch.Tensor]],
        recorder: Recorder | None = None,
        backends: frozenset[str] = _BACKENDS,
    ) -> None:
        self._layers = list(layers)
        uses = Counter(parameter for layer in self._layers for parameter in set(layer.parameters()))
        # Weights of several layers: autograd adds what each of them hands over only when the last one has.
        self.shared = {parameter for parameter, num_layers in uses.items() if num_layers > 1}
        self._memory_of = memory_of
        self._recorder = recorder
        self.backends = backends
        self._graphs = [_LayerGraph(self, layer, index) for index, layer in enumerate(self._layers)]
        self._kinds: dict[Hashable, _Kind] = {}
        self._shapes: Counter[torch.Size] = Counter()
        self._context: BatchContext | None = None
        self._kind: _Kind | None = None
        # Runs whose backward is still to come; one that nobody holds any more has none.
        self.open_runs: weakref.WeakSet[_Run] = weakref.WeakSet()
        self._buffers: dict[Hashable, torch.Tensor] = {}
        self._grads: dict[torch.Tensor, torch.Tensor] = {}
        self.reasons: Counter[str] = Counter()
        self.num_replays = 0
        self._last_status: Status | None = None

    def install(self, ledger: SwapLedger) -> None:
        """Have the layers ask for their graphs, until the ledger is undone."""
        for graph in self._graphs:
            ledger.set_attribute(graph.layer, GRAPH_ATTRIBUTE, graph)
        ledger.add_undo(self.close)

    def close(self) -> None:
        """Drop the graphs and their memory; gradients stay where parameters refer to them."""
        self._last_status = self.status()
        self._context = self._kind = None
        for kept in (self._kinds, self._buffers, self._grads):
            kept.clear()
        self.open_runs.clear()

    def status(self) -> Status:
        """Return what is recorded, and why layers run otherwise."""
        num_recorded = sum(len(kind.recordings) for kind in self._kinds.values())
        if num_recorded:
            noun = "kind of pack" if len(self._kinds) == 1 else "kinds of pack"
            return Status(STATUS_NAME, "active", f"{num_recorded} recordings of {len(self._layers)} layers, {len(self._kinds)} {noun}")
        if self._last_status is not None:
            return self._last_status
        if self.reasons:
            return Status(STATUS_NAME, "inactive", self.reasons.most_common(1)[0][0])
        return Status(STATUS_NAME, "active", f"{len(self._layers)} layers, recorded after the first steps")

    def has_recordings(self, index: int) -> bool:
        """Whether a layer was recorded for some kind of pack."""
        return any(index in kind.recordings for kind in self._kinds.values())

    def kind_of(self, context: BatchContext, hidden: torch.Tensor) -> _Kind | None:
        """Return the recordings that fit a micro-batch, with its offsets in place; None where it runs as ever."""
        if context is self._context:
            return self._kind
        self._context, self._kind = context, None
        self._shapes[hidden.shape] += 1
        num_documents = -(-context.num_documents // _DOCUMENT_BUCKET) * _DOCUMENT_BUCKET
        max_length = min(next_power_of_2(context.max_length), context.num_tokens)
        key = (hidden.shape, hidden.dtype, hidden.device, num_documents, max_length, context.attention_backend)
        if self._shapes[hidden.shape] <= _NUM_WARMUP or self.open_runs:
            if len(self._shapes) >= _MANY_LENGTHS:
                self.reasons["packs of many lengths; PackedDataModule(pad_to_max=True) gives them one"] += 1
            return None
        kind = self._kinds.get(key)
        if kind is None:
            reason = self._obstacle_of_kind(hidden.shape)
            if reason:
                self.reasons[reason] += 1
                return None
            kind = self._kinds[key] = _Kind(context.recordable(num_documents=num_documents, max_length=max_length), hidden.shape)
        else:
            kind.context.load(context)
        self._kind = kind
        return kind

    def _obstacle_of_kind(self, shape: torch.Size) -> str:
        """Return why no further kind of pack is recorded; empty where one is."""
        if len(self._kinds) == _MOST_KINDS:
            return f"more than {_MOST_KINDS} kinds of pack"
        shapes = {kind.shape for kind in self._kinds.values()}
        return f"packs of more than {_MOST_LENGTHS} lengths" if shape not in shapes and len(shapes) == _MOST_LENGTHS else ""

    def buffer(self, name: Hashable, like: torch.Tensor) -> torch.Tensor:
        """Return memory that stays where it is, one for each name, shape and dtype."""
        key = (name, like.shape, like.dtype)
        if key not in self._buffers:
            self._buffers[key] = torch.empty_like(like, memory_format=torch.contiguous_format, requires_grad=False)
        return self._buffers[key]

    def gradient_of(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the memory that recorded backwards write the gradient of a parameter to."""
        if parameter not in self._grads:
            self._grads[parameter] = torch.empty_like(parameter, requires_grad=False)
        return self._grads[parameter]

    def record(self, work: Callable[[], None], *, recording: _Recording, what: str) -> Callable[[], None]:
        """Record work of a layer on the device.

        Raises:
            SwapError: It cannot be recorded.
        """
        if self._recorder is None:
            self._recorder = CudaRecorder(torch.device("cuda", torch.cuda.current_device()))
        try:
            again = self._recorder.record(work)
            recording.held += self._memory_of(recording.layer)
            return again
        except RuntimeError as error:
            # The gradients of an earlier step's graph end in nodes that belong to the stream that is never recorded.
            is_held = "legacy stream" in str(error)
            advice = (
                "Something holds the loss of an earlier step with its graph: keep loss.detach()"
                if is_held
                else "Leave cuda_graphs out of FusedKernels"
            )
            raise SwapError(f"{what} could not be recorded as a CUDA graph. {advice}. ({error})") from error

    def obstacle(self, layer: Any, hidden: torch.Tensor, context: object) -> str:  # noqa: ANN401 - a decoder layer
        """Return why a call has to run as ever, as far as a look at it shows; empty where it need not."""
        if not isinstance(context, BatchContext):
            return "batches are not packed"
        if self._recorder is None and not hidden.is_cuda:
            return f"CUDA graphs do not exist on {hidden.device.type}"
        if torch.is_autocast_enabled(hidden.device.type):
            return "autocast"
        segment = vars(layer.self_attn).get(SEGMENT_ATTRIBUTE)
        if segment is not None and segment.engine is not None:
            return "the plan copies activations to the host"
        if segment is not None and (segment.awaits_plan() or segment.observer is not None or segment.on_backward is not None):
            return "the plan is still being made"
        return ""

    def lasting_obstacle(self, layer: Any, kwargs: dict[str, Any]) -> str:  # noqa: ANN401 - a decoder layer
        """Return what keeps a layer from being recorded; empty where nothing does."""
        config = layer.self_attn.config
        asked = [flag for flag in _OUTPUT_FLAGS if kwargs.get(flag) or getattr(config, flag, False)]
        if asked:
            return f"{asked[0]} is asked for"
        if any(is_random(module) for module in layer.modules()):
            return "layers drop out in training"
        hooked = next((type(module).__name__ for module in layer.modules() if _has_hooks(module)), "")
        if hooked:
            return f"{hooked} has hooks"
        for module in layer.modules():
            # Under FullyShardedDataParallel (the first one) weights are parts of one, given to the modules anew in each forward.
            if any(torch.is_tensor(value) and value.requires_grad for value in vars(module).values()):
                return "weights are held in pieces"
        for parameter in layer.parameters():
            if parameter.requires_grad and (parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None)):
                return "a parameter has hooks"
            if hasattr(parameter, "device_mesh"):
                return "weights are held in pieces"
        return ""


class _Kind:
    """What is recorded for packs of one kind."""

    def __init__(self, context: BatchContext, shape: torch.Size) -> None:
        self.context = context
        self.shape = shape
        self.recordings: dict[int, _Recording] = {}
        self.num_recordings: Counter[int] = Counter()
        # What layers were given beside hidden states and the context: memory of ours, and whose content it holds.
        self.inputs: list[_Input] = []

    def input_for(self, tensor: torch.Tensor) -> _Input:
        """Return memory that holds this tensor for every layer that is given it."""
        for found in self.inputs:
            if found.source is tensor:
                return found
        self.inputs.append(_Input(tensor))
        return self.inputs[-1]


class _Input:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.memory = tensor.detach().clone()
        self.source, self._version = tensor, tensor._version

    def load(self, tensor: torch.Tensor) -> None:
        # The layers of a micro-batch are given the same tensors: the first one copies.
        if self.source is not tensor or self._version != tensor._version:
            self.memory.data.copy_(tensor)
            self.source, self._version = tensor, tensor._version


class _Recording:
    """One layer under one kind of pack."""

    def __init__(self, graphs: LayerGraphs, layer: nn.Module, index: int, hidden: torch.Tensor) -> None:
        self.layer = layer
        self.held: list[torch.Tensor] = []
        self._places = [(owner._parameters, name) for owner in layer.modules() for name in owner._parameters]
        self.parameters = list(layer.parameters())
        self._found = [held[name] for held, name in self._places]
        self.trained: list[torch.Tensor] = [parameter for parameter in self.parameters if parameter.requires_grad]
        self.adapters = [module for module in layer.modules() if isinstance(module, BaseTunerLayer)]
        self.out = graphs.buffer(("out", index), hidden)
        self.d_hidden = graphs.buffer("gradient", hidden)
        before = graphs.buffer(("out", index - 1), hidden) if index else None
        # What the layer before leaves behind is read where it lies.
        memory = before if before is not None and before.data_ptr() == hidden.data_ptr() else graphs.buffer(("in", index), hidden)
        if memory is not before:
            memory.copy_(hidden.detach())
        self.hidden = memory.detach().requires_grad_(hidden.requires_grad)
        self.inputs: list[tuple[str, tuple[_Input, ...]]] = []
        self.constants: dict[str, Any] = {}
        self.plan: SegmentPlan | None = _plan_of(layer)
        self.state = self._read_state()
        self.backends: dict[str, int] = {}
        self.graph_out: torch.Tensor | None = None
        self.open_run: weakref.ref[_Run] | None = None
        self.forward: Callable[[], None] | None = None
        self.backward: Callable[[], None] | None = None
        # Trained parameters with the memory of their gradients; when the backward is recorded, those that the layer has no gradient for are left out.
        self.gradients = [(parameter, graphs.gradient_of(parameter)) for parameter in self.trained]

    @property
    def is_in_use(self) -> bool:
        """Whether the backward of a forward is still to come."""
        run = None if self.open_run is None else self.open_run()
        return run is not None and not run.is_over

    def own_inputs(self, kind: _Kind, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the keywords of a call with tensors of ours in the place of those that were given."""
        options: dict[str, Any] = {}
        for name, value in kwargs.items():
            if name == "context":
                options[name] = kind.context
            elif torch.is_tensor(value) or (isinstance(value, tuple) and value and all(map(torch.is_tensor, value))):
                pieces = tuple(kind.input_for(piece) for piece in (value if isinstance(value, tuple) else (value,)))
                self.inputs.append((name, pieces))
                memory = tuple(piece.memory for piece in pieces)
                options[name] = memory if isinstance(value, tuple) else memory[0]
            else:
                options[name] = value
                if name not in _FOREIGN_KEYWORDS:
                    self.constants[name] = value
        return options

    def load(self, kwargs: dict[str, Any]) -> str:
        """Put what a call is given in its place; return the name of what is not as it was when the layer was recorded."""
        for name, value in self.constants.items():
            given = kwargs.get(name)
            if given is not value and given != value and not isinstance(value, DeferredMask):
                return name
        for name, pieces in self.inputs:
            given = kwargs[name]
            for piece, tensor in zip(pieces, given if isinstance(given, tuple) else (given,)):
                piece.load(tensor)
        return ""

    def record_forward(self, graphs: LayerGraphs, run: Callable[..., Any], kind: _Kind, rest: tuple[Any, ...]) -> list[str]:
        """Record the layer's forward; return the attention backends that cannot be recorded, after which the recording is of no use."""
        context = kind.context
        before = dict(context.backends_used)

        def forward() -> None:
            with torch.enable_grad():
                self.graph_out = run(self.hidden, *rest)
            with torch.no_grad():
                self.out.data.copy_(self.graph_out)

        self.forward = graphs.record(forward, recording=self, what="The forward of a layer")
        counts = {name: count - before.get(name, 0) for name, count in context.backends_used.items()}
        self.backends = {name: count for name, count in counts.items() if count}
        return sorted(self.backends.keys() - graphs.backends)

    def is_current(self, layer: nn.Module) -> bool:
        """Whether weights are those that were recorded and lie where they lay, adapters are as they were and the plan is the same."""
        are_same = all(held.get(name) is parameter for (held, name), parameter in zip(self._places, self._found))
        return are_same and self.plan is _plan_of(layer) and self.state == self._read_state()

    def _read_state(self) -> list[Any]:
        state: list[Any] = [(parameter.data_ptr(), parameter.requires_grad) for parameter in self.parameters]
        for adapter in self.adapters:
            scaling = getattr(adapter, "scaling", {})
            state.append((adapter.disable_adapters, tuple(adapter.active_adapters), tuple(adapter.merged_adapters), tuple(scaling.values())))
        return state


class _LayerGraph:
    """One layer and its recordings; what the layer asks when it is called."""

    def __init__(self, graphs: LayerGraphs, layer: nn.Module, index: int) -> None:
        self.layer, self._graphs, self._index = layer, graphs, index

    def __reduce__(self) -> tuple[Any, ...]:
        """A copied or pickled layer has no graphs."""
        return type(None), ()

    @property
    def has_recordings(self) -> bool:
        """Whether the layer was recorded for some kind of pack."""
        return self._graphs.has_recordings(self._index)

    def call(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - the layer's own
        """Run the layer, from its graph where there is one for this call."""
        if not torch.is_grad_enabled() or not self.layer.training or not args or torch.compiler.is_compiling():
            return run(*args, **kwargs)
        recording = self._find(run, args, kwargs)
        if recording is None:
            return run(*args, **kwargs)
        hidden, context = args[0], kwargs["context"]
        for backend, count in recording.backends.items():
            for _ in range(count):
                context.note_read(backend)
        self._graphs.num_replays += 1
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return _RankReplay.apply(hidden, _Run(self._graphs, recording), *recording.trained)
        anchor = None if hidden.requires_grad else recording.trained[0]
        return _Replay.apply(hidden, anchor, _Run(self._graphs, recording))

    def _find(self, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Recording | None:
        """Return the recording that serves a call, its inputs in place; None where the layer runs as ever."""
        graphs, hidden, context = self._graphs, args[0], kwargs.get("context")
        reason = graphs.obstacle(self.layer, hidden, context)
        if reason:
            graphs.reasons[reason] += 1
            return None
        kind = graphs.kind_of(context, hidden)  # type: ignore[arg-type]
        if kind is None:
            return None
        recording = kind.recordings.get(self._index)
        if recording is None or not recording.is_current(self.layer):
            return self._record(kind, run, args, kwargs)
        if recording.is_in_use:
            # The same batch once more before its backward.
            return None
        changed = recording.load(kwargs)
        if changed:
            graphs.reasons[f"{changed} changes from call to call"] += 1
        return None if changed else recording

    def _record(self, kind: _Kind, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Recording | None:
        graphs, index = self._graphs, self._index
        recording = _Recording(graphs, self.layer, index, args[0])
        kind.num_recordings[index] += 1
        reason = graphs.lasting_obstacle(self.layer, kwargs)
        if not reason and kind.num_recordings[index] > _MOST_RECORDINGS:
            reason = "weights, adapters or plans change from step to step"
        if not reason and not recording.hidden.requires_grad and not recording.trained:
            reason = "nothing is trained up to a layer"
        if not reason:
            foreign = recording.record_forward(graphs, functools.partial(run, **recording.own_inputs(kind, kwargs)), kind, args[1:])
            reason = f"attention by {', '.join(foreign)}, which is not recorded" if foreign else ""
        if reason:
            graphs.reasons[reason] += 1
            return None
        kind.recordings[index] = recording
        return recording


class _Run:
    """One forward of a recorded layer, and its backward."""

    def __init__(self, graphs: LayerGraphs, recording: _Recording) -> None:
        self._graphs, self._recording = graphs, recording
        self.is_over = False

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        recording = self._recording
        self._graphs.open_runs.add(self)
        recording.open_run = weakref.ref(self)
        if hidden.data_ptr() != recording.hidden.data_ptr():
            recording.hidden.data.copy_(hidden)
        assert recording.forward is not None
        recording.forward()
        return recording.out.detach()

    def backward(self, d_out: torch.Tensor) -> torch.Tensor | None:
        """Return the gradient of the hidden states; those of what is trained lie in the memory of the recording."""
        if self.is_over:
            raise SwapError("A second backward through recorded layers: what the first one needed is gone. Leave cuda_graphs out of FusedKernels.")
        self.is_over = True
        recording = self._recording
        self._graphs.open_runs.discard(self)
        if d_out.data_ptr() != recording.d_hidden.data_ptr():
            recording.d_hidden.copy_(d_out)
        # A gradient of an earlier micro-batch may lie where this one will be written.
        for parameter, gradient in recording.gradients:
            if parameter.grad is not None and parameter.grad.data_ptr() == gradient.data_ptr():
                parameter.grad = parameter.grad.clone()
        if recording.backward is None:
            self._record_backward()
        assert recording.backward is not None
        recording.backward()
        return recording.d_hidden.detach() if recording.hidden.requires_grad else None

    def accumulate(self) -> None:
        """Let parameters refer to their gradients, added to what they have."""
        held, added = [], []
        for parameter, gradient in self._recording.gradients:
            if parameter.grad is None:
                parameter.grad = gradient
            else:
                held.append(parameter.grad)
                added.append(gradient)
        if held:
            torch._foreach_add_(held, added)

    def gradients(self) -> list[torch.Tensor | None]:
        """Return the gradients of what is trained, in its order; None where the layer has none."""
        shared = self._graphs.shared
        found = {parameter: gradient.clone() if parameter in shared else gradient.detach() for parameter, gradient in self._recording.gradients}
        return [found.get(parameter) for parameter in self._recording.trained]

    def _record_backward(self) -> None:
        recording = self._recording
        # What has a gradient shows in the first run of the work, which is the recording.
        found: list[tuple[torch.Tensor, torch.Tensor]] = []

        def backward() -> None:
            assert recording.graph_out is not None
            own = [(recording.hidden, recording.d_hidden)] if recording.hidden.requires_grad else []
            wanted = [*own, *recording.gradients]
            computed = torch.autograd.grad(recording.graph_out, [tensor for tensor, _ in wanted], grad_outputs=recording.d_hidden, allow_unused=True)
            recording.graph_out = None
            pairs = [(tensor, memory, gradient) for (tensor, memory), gradient in zip(wanted, computed) if gradient is not None]
            found[:] = [(tensor, memory) for tensor, memory, _ in pairs if tensor is not recording.hidden]
            with torch.no_grad():
                torch._foreach_copy_([memory for _, memory, _ in pairs], [gradient for _, _, gradient in pairs])

        recording.backward = self._graphs.record(backward, recording=recording, what="The backward of a layer")
        recording.gradients = found


class _Replay(torch.autograd.Function):
    """A recorded layer; saves nothing, because what its backward needs lies in the memory of the graphs."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, anchor: torch.Tensor | None, run: _Run) -> torch.Tensor:  # noqa: ANN401 - autograd's context
        ctx.run = run
        return run.forward(hidden)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # noqa: ANN401
        d_hidden = ctx.run.backward(grads[0])
        ctx.run.accumulate()
        return d_hidden, None, None


class _RankReplay(torch.autograd.Function):
    """A recorded layer whose gradients autograd accumulates, so that whoever waits for them is told."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, run: _Run, *trained: torch.Tensor) -> torch.Tensor:  # noqa: ANN401 - autograd's context
        ctx.run = run
        return run.forward(hidden)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # noqa: ANN401
        d_hidden = ctx.run.backward(grads[0])
        return d_hidden, None, *ctx.run.gradients()


def _plan_of(layer: Any) -> SegmentPlan | None:  # noqa: ANN401 - a decoder layer
    segment = vars(layer.self_attn).get(SEGMENT_ATTRIBUTE)
    return None if segment is None else segment.plan


def _has_hooks(module: nn.Module) -> bool:
    """Whether somebody's code runs around a module; transformers' own watch of outputs does nothing unless they are asked for."""
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    is_watched = any(getattr(hook, "__module__", "") != _RECORDING for hook in hooks)
    return bool(is_watched or module._backward_hooks or module._backward_pre_hooks)
