"""CUDA graphs of decoder layers: record the forward and backward of each layer once, then launch each as one graph.

A recorded layer reads and writes static memory: hidden states, their gradient, rotary angles, document offsets and the
gradients of trained parameters. Its graph serves every pack that its bucket holds (``buckets``). Static memory is
written through ``.data``, because tensors that autograd saved in a recording must change with it.
"""

from __future__ import annotations

import functools
import logging
import time
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from lightning_fastft.activations.values import find_segment
from lightning_fastft.core.autocast import is_autocast_on
from lightning_fastft.core.errors import SwapError, count
from lightning_fastft.core.phases import log_phase
from lightning_fastft.core.status import Status
from lightning_fastft.fused.decoder import GRAPH_ATTRIBUTE
from lightning_fastft.graphs.buckets import PackBucket, PackBuckets
from lightning_fastft.graphs.cuda_recorder import CudaRecorder
from lightning_fastft.graphs.launch_bound import LaunchBoundProbe
from lightning_fastft.graphs.recordings import Recording, recording_obstacle
from lightning_fastft.graphs.runs import RankReplay, Replay, Run
from lightning_fastft.kernels.attention.op import CUDNN_MIN_DOCUMENT_LENGTH
from lightning_fastft.mixers.install import ON_KERNELS
from lightning_fastft.packing.context import BatchContext

if TYPE_CHECKING:
    from torch import nn

    from lightning_fastft.core.patcher import ModelPatcher

logger = logging.getLogger(__name__)

STATUS_NAME = "layer graphs"
# Backends whose kernels read only offsets and chunks on the device and a bound on the document length.
_BACKENDS = frozenset({"tiled", "varlen", ON_KERNELS})
# Micro-batches before the first recording; they compile kernels and allocate buffers.
_NUM_WARMUP = 2
# A layer recorded more often than this has weights that keep moving.
_MOST_RECORDINGS = 4
# Memory of recordings relative to the transient memory of a step, if all activations are kept and if all are
# recomputed, without the hidden states of all layers. Measured: 1.1 and 1.6 to 2 (results.csv: keep+graphs,
# recompute+graphs).
_ROOM_KEPT, _ROOM_RECOMPUTED = 1.25, 2.0
# What CUDA, torch since 2.13 and torch 2.15 say if the autograd graph of an earlier step accumulates on a stream that
# is not captured.
_HELD_GRAPH = ("legacy stream", "stale reference to the default stream", "across the capture boundary")


class LayerGraphs:
    """Run the fused decoder layers of a model from recorded graphs where that is exact, and eagerly elsewhere.

    A micro-batch runs eagerly if it is one of the first two, if an earlier one waits for its backward, if
    its plan copies to the host or is still measured, and for the reasons that ``status`` returns. Eager micro-batches
    need memory in addition to that of the graphs. Gradients of trained parameters are written to buffers. In a single
    process ``Parameter.grad`` refers to these buffers. In a process group autograd accumulates them, so that
    DistributedDataParallel receives each gradient when its layer is done and overlaps the all-reduce. A layer whose
    parameters have other hooks is not recorded.

    Args:
        layers: Fused decoder layers, in order.
        memory_of: Returns memory that layers share and may replace later, such as dense copies of NF4 weights. The
            graphs keep a reference to the memory that they were recorded with.
        recorder: Records work; None for CUDA graphs.
        backends: Backends of attention and mixers that may be recorded.
        chunk_size: Tokens of the chunks of documents that mixers read; None if all layers have attention.
        pace: Probe that must find training launch-bound before layers are recorded; memory must suffice too. If
            recording fails, layers run eagerly from then on. None: always record, and raise if that fails.

    Cost:
        Memory in addition to the plan: one tensor of hidden states per layer, the gradients of trained parameters, and
        the pool, which stays reserved between steps. All buckets share the memory of the largest one. Host: two
        launches per layer and micro-batch. No host sync.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        *,
        memory_of: Callable[[nn.Module], list[torch.Tensor]],
        recorder: CudaRecorder | None = None,
        backends: frozenset[str] = _BACKENDS,
        chunk_size: int | None = None,
        pace: LaunchBoundProbe | None = None,
    ) -> None:
        self._layers = list(layers)
        # Mixers have no configuration; all layers share that of the model.
        attention: Any = next((layer.self_attn for layer in layers if "self_attn" in layer._modules), None)
        self.config = getattr(attention, "config", None)
        self._chunk_size = chunk_size
        uses = Counter(parameter for layer in self._layers for parameter in set(layer.parameters()))
        # Weights shared by layers: autograd adds their gradients only after the last of these layers.
        self.shared = {parameter for parameter, num_layers in uses.items() if num_layers > 1}
        self._memory_of = memory_of
        self._recorder = recorder
        self.backends = backends
        self._pace = pace
        self._is_watched, self._refusal = False, ""
        self._graphs = [_LayerGraph(self, layer, index) for index, layer in enumerate(self._layers)]
        # By what buckets do not bound: dtype, device and width of the hidden states, and the choice of attention.
        self._groups: defaultdict[Hashable, PackBuckets] = defaultdict(PackBuckets)
        self._num_batches = 0
        self._context: BatchContext | None = None
        self._bucket: PackBucket | None = None
        # Runs that wait for their backward; a run that is no longer referenced will have no backward.
        self.open_runs: weakref.WeakSet[Run] = weakref.WeakSet()
        self._buffers: dict[Hashable, torch.Tensor] = {}
        self._grads: dict[torch.Tensor, torch.Tensor] = {}
        self.reasons: Counter[str] = Counter()
        self.num_recordings = self.num_replays = 0
        self.recording_seconds = self._logged_seconds = 0.0
        self._last_status: Status | None = None

    def install(self, patcher: ModelPatcher) -> None:
        """Attach the graphs to their layers until the patcher undoes it."""
        for graph in self._graphs:
            patcher.set_attribute(graph.layer, GRAPH_ATTRIBUTE, graph)
        patcher.add_undo(self.close)

    def close(self) -> None:
        """Free the graphs and their memory; gradients that parameters refer to stay."""
        self._last_status = self.status()
        self._context = None
        self._drop()
        self.open_runs.clear()

    def _drop(self) -> None:
        """Free recordings and their memory; a run that waits for its backward keeps its own."""
        self._bucket = None
        for kept in (self._groups, self._buffers, self._grads):
            kept.clear()

    def status(self) -> Status:
        """Return what is recorded, or why layers run eagerly."""
        num_recorded = sum(len(bucket.recordings) for bucket in self.pack_buckets)
        if self._refusal:
            return Status(STATUS_NAME, "inactive", self._refusal)
        if num_recorded:
            seen = "" if self._pace is None else f"; before, {self._pace.describe()}"
            return Status(
                STATUS_NAME,
                "active",
                f"{num_recorded} recordings of {len(self._layers)} layers, "
                f"{count(len(self.pack_buckets), 'pack bucket')}{seen}",
            )
        if self._last_status is not None:
            return self._last_status
        if self.reasons:
            return Status(STATUS_NAME, "inactive", self.reasons.most_common(1)[0][0])
        device = next(self._layers[0].parameters()).device.type
        if self._recorder is None and device != "cuda":
            return Status(STATUS_NAME, "inactive", f"CUDA graphs do not exist on {device}")
        condition = "" if self._pace is None else " if training is launch-bound"
        return Status(STATUS_NAME, "active", f"{len(self._layers)} layers, recorded after the first steps{condition}")

    @property
    def pack_buckets(self) -> list[PackBucket]:
        """The buckets that packs run from."""
        return [bucket for buckets in self._groups.values() for bucket in buckets.buckets]

    def bucket_of(self, context: BatchContext, hidden: torch.Tensor) -> PackBucket | None:
        """Return the recordings that fit a micro-batch, with its offsets loaded; None if it runs eagerly."""
        if context is self._context:
            return self._bucket
        self._context, self._bucket, self._is_watched = context, None, False
        if self._logged_seconds < self.recording_seconds:
            log_phase("recording CUDA graphs", self.recording_seconds - self._logged_seconds)
            self._logged_seconds = self.recording_seconds
        obstacle = context.causal_obstacle
        if not obstacle and hidden.shape[:2] != (1, context.num_tokens):
            obstacle = "hidden states are not one row of tokens"
        if obstacle:
            self.reasons[obstacle] += 1
            return None
        # Attention of long documents may run on cuDNN, which is not recorded.
        is_long = context.sum_squared_lengths >= CUDNN_MIN_DOCUMENT_LENGTH * context.num_tokens
        key = (hidden.dtype, hidden.device, hidden.shape[2:], context.attention_backend, is_long)
        buckets = self._groups[key]
        buckets.note(context)
        self._num_batches += 1
        if self._num_batches <= _NUM_WARMUP or self.open_runs:
            return None
        if self._pace is not None and self._pace.begin_batch():
            self._is_watched = True
            return None
        bucket = buckets.find(context)
        if bucket is None:
            reason = self._obstacle_of_pace(hidden, buckets, num_tokens=buckets.next_size(context).num_tokens)
            if reason:
                self.reasons[reason] += 1
                return None
            bucket = buckets.add(context, chunk_size=self._chunk_size)
        else:
            bucket.context.load(context)
        self._bucket = bucket
        return bucket

    def _obstacle_of_pace(self, hidden: torch.Tensor, buckets: PackBuckets, *, num_tokens: int) -> str:
        """Return why the probe or the memory for num_tokens forbids recording, decided once, or ""."""
        if self._pace is None or self.num_recordings:
            return ""
        if not self._pace.is_launch_bound:
            self._refusal = self._pace.describe()
        else:
            self._refusal = self._missing_memory(hidden, num_tokens=num_tokens, num_measured=buckets.longest_pack)
        return self._refusal

    def _missing_memory(self, hidden: torch.Tensor, *, num_tokens: int, num_measured: int) -> str:
        """Return the memory that recordings need, as text, if it is not free; "" if it is."""
        if not hidden.is_cuda:
            return ""
        segments = [find_segment(layer) for layer in self._layers]
        kept_share = sum(segment is None or segment.plan.is_kept for segment in segments) / len(segments)
        allocated = torch.cuda.memory_allocated(hidden.device)
        work = (torch.cuda.max_memory_allocated(hidden.device) - allocated) * num_tokens / num_measured
        hidden_states = len(self._layers) * num_tokens * hidden.shape[2:].numel() * hidden.element_size()
        needed = work * (_ROOM_KEPT * kept_share + _ROOM_RECOMPUTED * (1 - kept_share)) + hidden_states
        free = torch.cuda.mem_get_info(hidden.device)[0] + torch.cuda.memory_reserved(hidden.device) - allocated
        budgets = [segment.vram_budget_bytes for segment in segments if segment is not None]
        free = min([free, *(budget - allocated for budget in budgets if budget is not None)])
        if needed <= free:
            return ""
        return f"recordings may take {needed / 2**30:.1f} GiB, and {max(0, free) / 2**30:.1f} GiB are free"

    def layer_ran(self, context: object) -> None:
        """Call after a layer ran eagerly."""
        if self._is_watched and context is self._context:
            assert self._pace is not None
            self._pace.layer_queued()

    @property
    def has_given_up(self) -> bool:
        """Whether recording has stopped for good."""
        return bool(self._refusal)

    def give_up(self, error: SwapError) -> None:
        """Run eagerly from now on, if the probe decides about recording.

        Raises:
            SwapError: There is no probe, so recording was requested.
        """
        if self._pace is None:
            raise error
        logger.warning("layer graphs: %s Layers run eagerly.", error)
        self._refusal = str(error)
        self._drop()

    def buffer(self, name: Hashable, like: torch.Tensor, *, num_tokens: int) -> torch.Tensor:
        """Return the first num_tokens rows of the static buffer of a name, width and dtype."""
        key = (name, like.shape[2:], like.dtype)
        if key not in self._buffers or self._buffers[key].shape[1] < num_tokens:
            self._buffers[key] = like.detach().new_empty((1, num_tokens, *like.shape[2:]))
        return self._buffers[key][:, :num_tokens]

    def gradient_of(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the buffer for the gradient of a parameter in recorded backwards."""
        if parameter not in self._grads:
            self._grads[parameter] = torch.empty_like(parameter, requires_grad=False)
        return self._grads[parameter]

    def record(self, work: Callable[[], None], *, recording: Recording, what: str) -> Callable[[], None]:
        """Record device work of a layer.

        Raises:
            SwapError: It cannot be recorded.
        """
        if self._recorder is None:
            self._recorder = CudaRecorder(torch.device("cuda", torch.cuda.current_device()))
        begin = time.perf_counter()
        try:
            again = self._recorder.record(work)
            self.recording_seconds += time.perf_counter() - begin
            recording.held += self._memory_of(recording.layer)
            return again
        except RuntimeError as error:
            is_held = any(words in str(error) for words in _HELD_GRAPH)
            advice = (
                "The loss of an earlier step is still referenced with its autograd graph: keep loss.detach()"
                if is_held
                else "Use FusedKernels(cuda_graphs=False)"
            )
            raise SwapError(f"{what} could not be recorded as a CUDA graph. {advice}. ({error})") from error

    def obstacle(self, layer: Any, hidden: torch.Tensor, context: object) -> str:
        """Return why a call must run eagerly because of its arguments, or ""."""
        if not isinstance(context, BatchContext):
            return "batches are not packed"
        if self._refusal:
            return self._refusal
        if self._recorder is None and not hidden.is_cuda:
            return f"CUDA graphs do not exist on {hidden.device.type}"
        if is_autocast_on(hidden.device.type):
            return "autocast"
        segment = find_segment(layer)
        if segment is not None and segment.engine is not None:
            return "the plan copies activations to the host"
        if segment is not None and (
            segment.awaits_plan() or segment.observer is not None or segment.on_backward is not None
        ):
            return "the first steps are still measured for the plan"
        return ""


class _LayerGraph:
    """A layer and its recordings; the layer calls it in its forward."""

    def __init__(self, graphs: LayerGraphs, layer: nn.Module, index: int) -> None:
        self.layer, self._graphs, self._index = layer, graphs, index

    def __reduce__(self) -> tuple[Any, ...]:
        """Drop the graphs from a copied or pickled layer."""
        return type(None), ()

    @property
    def has_recordings(self) -> bool:
        """Whether the layer has a recording."""
        return any(self._index in bucket.recordings for bucket in self._graphs.pack_buckets)

    def call(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the layer from its graph if one fits this call, else eagerly."""
        if not torch.is_grad_enabled() or not self.layer.training or not args or torch.compiler.is_compiling():
            return run(*args, **kwargs)
        recording = self._find(run, args, kwargs)
        if recording is None:
            out = run(*args, **kwargs)
            self._graphs.layer_ran(kwargs.get("context"))
            return out
        hidden, context = args[0], kwargs["context"]
        context.reads.update(recording.backends)
        self._graphs.num_replays += 1
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return RankReplay.apply(hidden, Run(self._graphs, recording), *recording.trained)
        anchor = None if hidden.requires_grad else recording.trained[0]
        return Replay.apply(hidden, anchor, Run(self._graphs, recording))

    def _find(self, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Recording | None:
        """Return the recording for a call, with its inputs loaded; None if the layer runs eagerly."""
        graphs, hidden, context = self._graphs, args[0], kwargs.get("context")
        reason = graphs.obstacle(self.layer, hidden, context)
        if reason:
            graphs.reasons[reason] += 1
            return None
        bucket = graphs.bucket_of(context, hidden)  # type: ignore[arg-type]
        if bucket is None:
            return None
        recording = bucket.recordings.get(self._index)
        if recording is not None and recording.is_in_use:
            # A second forward of the batch before its backward, whose memory a new recording would overwrite.
            return None
        if recording is None or not recording.is_current(self.layer, hidden):
            return self._record(bucket, run, args, kwargs)
        changed = recording.load(kwargs)
        if changed:
            graphs.reasons[f"{changed} changes from call to call"] += 1
        return None if changed else recording

    def _record(
        self, bucket: PackBucket, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Recording | None:
        graphs, index = self._graphs, self._index
        recording = Recording(graphs, self.layer, index, args[0], num_tokens=bucket.size.num_tokens)
        graphs.num_recordings += 1
        bucket.num_recordings[index] += 1
        reason = recording_obstacle(self.layer, kwargs, config=graphs.config)
        if not reason and bucket.num_recordings[index] > _MOST_RECORDINGS:
            reason = "weights, adapters or plans change from step to step"
        if not reason and not recording.hidden.requires_grad and not recording.trained:
            reason = "no parameter is trained up to a layer"
        if not reason:
            try:
                foreign = recording.record_forward(
                    graphs, functools.partial(run, **recording.own_inputs(bucket, kwargs)), bucket, args[1:]
                )
            except SwapError as error:
                graphs.give_up(error)
                return None
            reason = f"attention by {', '.join(foreign)} cannot be recorded" if foreign else ""
        if reason:
            graphs.reasons[reason] += 1
            return None
        bucket.recordings[index] = recording
        return recording
