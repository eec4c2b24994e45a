"""Predict step time and memory of a training run on many GPUs, by strategy, from the cost of a step on one GPU.

Gathers and reductions run while layers compute. The exchanges of tokens (context and expert parallelism) do not,
because the next operator waits for them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from lightning_fastft.estimate.clusters import Cluster, Rings
from lightning_fastft.estimate.model_size import SCALE_BYTES, LayerSize, ModelSize
from lightning_fastft.planner.step import EndBytes, Prediction, SegmentPlan, StepCost

# Measured on two H200s (benchmarks/results.csv, multi_gpu). DDP of LoRA exchanges almost nothing, and its step is
# 983 ms where one GPU takes 953: every step waits for the slowest rank.
RANK_WAIT = 1.031
# FSDP2 of the same run gathers 30.3 GB a step, and its step takes 53 ms more than that of DDP (1,028 ms): copies into
# and out of the messages, and the kernels of NCCL, slow down compute.
HANDLED_BYTES_PER_S = 30.3e9 / 53e-3
# FSDP2 gathers the next layer while one computes. A forward also has the buffer that the layer is copied out of; with
# gpt-oss-120b on four H100 this copy found no memory.
_FORWARD_LAYERS, _BACKWARD_LAYERS = 3, 2
# Gradients are reduced in fp32.
_REDUCED_BYTES = 4
# Communication that costs this share of a step makes it link-bound.
_BOUND_SHARE = 0.15

Kind = Literal["ddp", "fsdp2", "hybrid", "expert"]


class Layout(NamedTuple):
    """How the work is distributed.

    Args:
        kind: "ddp" holds the model on every GPU, "fsdp2" shards it over all, "hybrid" over those of a node, and
            "expert" shards it over ``size`` GPUs, whose experts are never gathered.
        size: GPUs of an expert-parallel group.
        context: GPUs that share each pack.
        is_resident: Whether the layers of "fsdp2" stay gathered on every GPU, next to its shard: frozen weights for the
            whole run, trained ones from a forward to its backward.
    """

    kind: Kind
    size: int = 1
    context: int = 1
    is_resident: bool = False

    @property
    def name(self) -> str:
        """Short name for tables."""
        name = {"ddp": "DDP", "fsdp2": "FSDP2", "hybrid": "hybrid sharding", "expert": "expert parallel"}[self.kind]
        name += f" {self.size}" if self.kind == "expert" else ""
        name += ", kept gathered" if self.is_resident else ""
        return name + (f", context parallel {self.context}" if self.context > 1 else "")


class Traffic(NamedTuple):
    """What one GPU exchanges in one micro-batch.

    Args:
        forward_ms: Link time of gathers, which overlap with the forward.
        backward_ms: Link time of gathers and reductions, which overlap with the backward.
        handled_ms: Time by which gathers and reductions delay compute.
        exposed_ms: Time of token exchanges and of the all-reduce of replicated adapters, which do not overlap with
            compute.
        bound: The link that is busy longest.
    """

    forward_ms: float = 0.0
    backward_ms: float = 0.0
    handled_ms: float = 0.0
    exposed_ms: float = 0.0
    bound: str = ""


class Forecast(NamedTuple):
    """Step of a layout on a cluster.

    Args:
        step_ms: Time of an optimizer step.
        added_ms: Part of step_ms that communication and the wait for the slowest rank add.
        bound: The link that is busy longest.
    """

    step_ms: float
    added_ms: float
    bound: str

    @property
    def is_link_bound(self) -> bool:
        """Whether added_ms is more than 15 % of the step."""
        return self.added_ms > _BOUND_SHARE * self.step_ms


def possible_layouts(cluster: Cluster, model: ModelSize) -> Iterator[Layout]:
    """Yield the layouts that the sizes allow; groups that exchange tokens stay inside a node."""
    yield Layout("ddp")
    yield Layout("fsdp2")
    yield Layout("fsdp2", is_resident=True)
    if cluster.num_nodes > 1 and cluster.gpus_per_node > 1:
        yield Layout("hybrid")
    sizes = [size for size in range(cluster.gpus_per_node, 1, -1) if cluster.gpus_per_node % size == 0]
    experts = next((size for size in sizes if model.num_experts and model.num_experts % size == 0), 1)
    if experts > 1:
        yield Layout("expert", size=experts)
    kinds: tuple[Kind, ...] = ("ddp", "fsdp2")
    for context in reversed(sizes):
        if model.num_heads % context == 0:
            yield from (Layout(kind, context=context) for kind in kinds)


def num_shards(layout: Layout, cluster: Cluster) -> int:
    """Return the number of GPUs over which one copy of the dense weights is sharded."""
    shards = {"fsdp2": cluster.num_gpus, "hybrid": cluster.gpus_per_node, "expert": layout.size}
    return shards.get(layout.kind, 1)


def keeps_fp8(layout: Layout, cluster: Cluster, model: ModelSize) -> bool:
    """Return whether frozen weights compute in fp8 in a layout as on one GPU: sharded ones only if gathered in e4m3."""
    return model.gathers_fp8 or num_shards(layout, cluster) == 1


def resident_bytes(layout: Layout, cluster: Cluster, model: ModelSize, *, num_tokens: int) -> int:
    """Return the device memory that one GPU needs throughout: shards, gathered layers, optimizer state, messages.

    Args:
        layout: How the work is distributed.
        cluster: GPUs and links.
        model: Sizes of the model.
        num_tokens: Tokens of a GPU's micro-batch.
    """
    shards = num_shards(layout, cluster)
    num_trained = sum(part.num_trained for part in model.parts)
    state = num_trained * model.state_itemsize
    if shards == 1:
        held = sum(part.frozen_bytes + part.fp8_copy_bytes for part in model.parts) + state
        # Buckets of the first reduction, before gradients become views of them.
        held += num_trained * model.trained_itemsize if cluster.num_gpus > 1 else 0
        return int(held) + model.shared_bytes
    layers = [_sharded_part(part, layout, model) for part in model.layers]
    root = _sharded_part(model.root, layout, model)
    held = sum(model.sharded_bytes(part) for part in model.parts) / shards
    # The all-reduce of replicated adapters copies their gradients.
    held += state + num_trained * _REDUCED_BYTES if model.replicates_adapters else state / shards
    if layout.is_resident:
        held += sum(map(model.gathered_bytes, layers))
    # Every rank has the scales of the whole weights, and a buffer for the concatenated weights of one product.
    held += sum(layer.num_fp8_columns for layer in model.layers) * SCALE_BYTES
    held += max(layer.max_fp8 for layer in model.layers)
    layer = max(layers, key=model.gathered_bytes)
    # The tensors outside of the layers stay gathered during the step, and so do their gradients in the backward.
    root_bytes = model.gathered_bytes(root) + root.num_trained * model.trained_itemsize
    gathered = 0.0 if layout.is_resident else model.gathered_bytes(layer)
    gradients = layer.num_trained * (model.trained_itemsize + _REDUCED_BYTES)
    layer_bytes = max(_FORWARD_LAYERS * gathered, _BACKWARD_LAYERS * gathered + gradients)
    # Inputs of all ranks that share the experts, and outputs before they are reduced.
    tokens = 2 * num_tokens * model.width * model.itemsize * layout.size if layout.size > 1 else 0
    return int(held + root_bytes + layer_bytes + tokens) + model.shared_bytes


def _sharded_part(part: LayerSize, layout: Layout, model: ModelSize) -> LayerSize:
    """Return what is gathered and reduced of a part: not replicated adapters, and not the experts that ranks own."""
    if layout.kind != "ddp" and model.replicates_adapters:
        part = part._replace(num_trained=0)
    if layout.kind != "expert":
        return part
    return part._replace(
        frozen_bytes=part.frozen_bytes - part.expert_bytes,
        num_trained=part.num_trained - part.num_expert_trained,
        expert_bytes=0.0,
        num_expert_trained=0,
    )


def rank_cost(cost: StepCost, layout: Layout, cluster: Cluster, model: ModelSize, *, num_tokens: int) -> StepCost:
    """Return the cost of a step for one GPU of the layout, without communication.

    Args:
        cost: Cost of a step on one GPU for the GPU's own number of tokens.
        layout: How the work is distributed.
        cluster: GPUs and links.
        model: Sizes of the model.
        num_tokens: Tokens of a GPU's micro-batch.
    """
    shards = num_shards(layout, cluster)
    return cost._replace(
        base_bytes=resident_bytes(layout, cluster, model, num_tokens=num_tokens),
        other_ms=cost.other_ms / (1 if model.replicates_adapters else shards),
        # The planner streams whole frozen weights, and shards are not whole.
        segments=tuple(segment._replace(weight_bytes=0) for segment in cost.segments) if shards > 1 else cost.segments,
        ends=EndBytes() if shards > 1 else cost.ends,
    )


def scale_times(cost: StepCost, factor: float) -> StepCost:
    """Return a cost with every time multiplied by a factor, to match a measured step on one GPU."""
    segments = tuple(
        segment._replace(
            forward_ms=segment.forward_ms * factor,
            backward_ms=segment.backward_ms * factor,
            recompute_ms=segment.recompute_ms * factor,
            values=tuple(value._replace(rebuild_ms=value.rebuild_ms * factor) for value in segment.values),
        )
        for segment in cost.segments
    )
    return cost._replace(segments=segments, head_ms=cost.head_ms * factor, other_ms=cost.other_ms * factor)


def exchange(
    layout: Layout,
    cluster: Cluster,
    model: ModelSize,
    *,
    num_tokens: int,
    recomputed: Sequence[bool],
    is_last: bool = True,
) -> Traffic:
    """Return what a GPU exchanges in one micro-batch.

    Args:
        layout: How the work is distributed.
        cluster: GPUs and links.
        model: Sizes of the model.
        num_tokens: Tokens of a GPU's micro-batch.
        recomputed: Whether each layer is recomputed in the backward, with its exchanges.
        is_last: Whether gradients are reduced, as in the last micro-batch of a window.
    """
    ring = Rings(cluster)
    forward = backward = handled = 0.0
    shards = num_shards(layout, cluster)
    if shards > 1:
        for part in model.parts:
            is_layer = part is not model.root
            gathered = _sharded_part(part, layout, model)
            num_bytes = model.gathered_bytes(gathered, is_resident=layout.is_resident and is_layer)
            forward += ring.neighbours_ms(num_bytes, shards)
            # The tensors outside of the layers stay gathered.
            is_gathered_again = is_layer and not layout.is_resident
            backward += ring.neighbours_ms(num_bytes, shards) if is_gathered_again else 0.0
            handled += num_bytes * (2 if is_gathered_again else 1)
    for part in model.parts if is_last else ():
        num_bytes = _sharded_part(part, layout, model).num_trained * (
            _REDUCED_BYTES if shards > 1 else model.trained_itemsize
        )
        handled += num_bytes
        if layout.kind == "expert":
            expert_bytes = part.num_expert_trained * model.trained_itemsize
            backward += ring.groups_ms(expert_bytes / layout.size, layout.size, times=2)
        if shards > 1:
            backward += ring.neighbours_ms(num_bytes, shards)
            backward += ring.groups_ms(num_bytes / shards, shards, times=2)
        else:
            backward += ring.neighbours_ms(num_bytes, cluster.num_gpus, times=2)
    exposed = 0.0
    if is_last and shards > 1 and model.replicates_adapters:
        # One all-reduce at the end of the backward.
        num_bytes = sum(part.num_trained for part in model.parts) * _REDUCED_BYTES
        exposed += ring.neighbours_ms(num_bytes, cluster.num_gpus, times=2)
    exposed += sum(
        _exchange_tokens(ring, layout, model, num_tokens=num_tokens, num_passes=3 if is_recomputed else 2)
        for is_recomputed in recomputed
    )
    bound = max(ring.link_ms, key=lambda link: ring.link_ms[link])
    return Traffic(forward, backward, handled / HANDLED_BYTES_PER_S * 1e3, exposed, bound)


def _exchange_tokens(ring: Rings, layout: Layout, model: ModelSize, *, num_tokens: int, num_passes: int) -> float:
    """Return the milliseconds of a layer's token exchanges, in each of its forward and backward passes."""
    time_ms = 0.0
    if layout.context > 1:
        columns = model.attention_columns + model.output_columns
        time_ms += ring.all_to_all_ms(num_tokens * columns * model.itemsize, layout.context, times=num_passes)
    if layout.size > 1:
        # An all-gather of the inputs and a reduce-scatter of the outputs, of all ranks of the group.
        num_bytes = layout.size * num_tokens * model.width * model.itemsize
        time_ms += ring.neighbours_ms(num_bytes, layout.size, times=2 * num_passes)
    return time_ms


def forecast(
    layout: Layout,
    cluster: Cluster,
    model: ModelSize,
    *,
    cost: StepCost,
    segments: Sequence[SegmentPlan],
    prediction: Prediction,
    num_tokens: int,
    num_micro: int = 1,
) -> Forecast:
    """Return the time of an optimizer step, communication included.

    Compute and links run at the same time, so the slower of the two counts, in the forward and in the backward.

    Args:
        layout: How the work is distributed.
        cluster: GPUs and links.
        model: Sizes of the model.
        cost: What ``rank_cost`` returned.
        segments: Plan of each layer.
        prediction: Prediction of that plan for that cost.
        num_tokens: Tokens of a GPU's micro-batch.
        num_micro: Micro-batches of an optimizer step.
    """
    forward_ms = sum(segment.forward_ms for segment in cost.segments)
    backward_ms = prediction.step_ms - cost.other_ms - forward_ms
    alone_ms = total_ms = cost.other_ms
    for number in range(num_micro):
        traffic = exchange(
            layout,
            cluster,
            model,
            num_tokens=num_tokens,
            recomputed=[not segment.is_kept for segment in segments],
            is_last=number == num_micro - 1,
        )
        alone_ms += forward_ms + backward_ms
        slowdown = 1 + traffic.handled_ms / (forward_ms + backward_ms)
        total_ms += max(forward_ms * slowdown, traffic.forward_ms) + max(backward_ms * slowdown, traffic.backward_ms)
        total_ms += traffic.exposed_ms
    total_ms *= RANK_WAIT if cluster.num_gpus > 1 else 1.0
    return Forecast(total_ms, total_ms - alone_ms, traffic.bound)
