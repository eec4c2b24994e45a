"""Costs of a training step and plans for its activations, as plain data: sizes in bytes, times in ms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from lightning_fastft.core.checks import check_choice, check_int
from lightning_fastft.core.errors import OptionError

Place = Literal["device", "host"]


class ValueCost(NamedTuple):
    """One named intermediate of a segment, in the order it is computed.

    Args:
        name: Its origin, such as "self_attn.q_proj", "attention" or "mlp.up_proj".
        num_bytes: Its size.
        rebuild_ms: Time to recompute it.
    """

    name: str
    num_bytes: int
    rebuild_ms: float


class SegmentCost(NamedTuple):
    """Costs of one decoder layer.

    Args:
        input_bytes: Size of the hidden states that enter the layer.
        saved_bytes: Size of the tensors that autograd saves if the layer is kept, with values, without the input.
        forward_ms: Time of the forward.
        backward_ms: Time of the backward without any recompute.
        recompute_ms: Time of the recompute in the backward if no value is held; includes every rebuild_ms.
        values: Intermediates that can be held instead of recomputed.
        forward_peak_bytes: Transient memory of the forward, without saved bytes.
        backward_peak_bytes: Transient memory of the backward, with the gradient of the output, without input, saved
            bytes and earlier segments.
        weight_bytes: Size of the frozen weights that can be streamed.
    """

    input_bytes: int
    saved_bytes: int
    forward_ms: float
    backward_ms: float
    recompute_ms: float
    values: tuple[ValueCost, ...]
    forward_peak_bytes: int
    backward_peak_bytes: int
    weight_bytes: int


class EndBytes(NamedTuple):
    """Sizes of what moves to the host with streamed weights at the two ends of a model, each 0 if it stays.

    Args:
        embedding: The input embedding.
        head: The output layer, which is on the device while the head runs.
    """

    embedding: int = 0
    head: int = 0

    @property
    def total(self) -> int:
        """Return the size of both."""
        return self.embedding + self.head


class StepCost(NamedTuple):
    """Costs of a step: its segments in forward order, and the work around them.

    Args:
        segments: Decoder layers.
        base_bytes: Memory in use all the time: weights (with those that can be streamed), optimizer state, gradients,
            embedding.
        head_peak_bytes: Transient memory of the final norm, the head and the loss, with the output of the last segment.
        head_ms: Time of norm, head and loss, forward and backward.
        other_ms: Time of embedding, optimizer and clipping.
        ends: Parts of base_bytes that move to the host if weights are streamed.
        shared_bytes: Part of base_bytes that is neither weights nor their state, where it is known: angles and masks of
            a pack, weight buffers, graphs.
        update_peak_bytes: Transient memory of the optimizer's step, where it is known.
    """

    segments: tuple[SegmentCost, ...]
    base_bytes: int
    head_peak_bytes: int
    head_ms: float
    other_ms: float
    ends: EndBytes = EndBytes()
    shared_bytes: int = 0
    update_peak_bytes: int = 0

    @property
    def layers_ms(self) -> float:
        """Forward and backward of all segments, without recompute."""
        return sum(segment.forward_ms + segment.backward_ms for segment in self.segments)

    @property
    def least_ms(self) -> float:
        """A step without recompute and without waits for copies."""
        return self.head_ms + self.other_ms + self.layers_ms


class Machine(NamedTuple):
    """Copy speed between device and host.

    Args:
        name: Name in messages.
        d2h_bytes_per_s: Device to pinned host memory, while both directions are busy.
        h2d_bytes_per_s: Pinned host memory to device, while both directions are busy.
        is_unified: Whether host and device share memory (integrated GPU), so that offload saves nothing.
    """

    name: str
    d2h_bytes_per_s: float
    h2d_bytes_per_s: float
    is_unified: bool = False


class SegmentPlan(NamedTuple):
    """Plan for the activations of one segment.

    Args:
        is_kept: Whether autograd saves everything on the device and nothing is recomputed.
        input_place: Where the input is stored until the backward.
        values: Names and places of the stored values; the others are recomputed.
        is_streamed: Whether frozen weights are copied from the host for each use.
    """

    is_kept: bool
    input_place: Place
    values: tuple[tuple[str, Place], ...]
    is_streamed: bool = False


class Interval(NamedTuple):
    """Work on one stream ("compute", "d2h" or "h2d"), with start and end in ms since the step began."""

    stream: str
    label: str
    start_ms: float
    end_ms: float


class Prediction(NamedTuple):
    """Predicted cost of a step.

    Args:
        peak_bytes: Peak device memory.
        step_ms: Time of the step.
        exposed_ms: Time in which compute waits for a copy.
        host_bytes: Pinned host memory.
        staging_bytes: Size of a staging slot: the largest host share of one segment.
        memory: (moment, bytes) in the order of the step; empty for a plan that was only compared.
        streams: Work of each stream over time; as memory.
    """

    peak_bytes: int
    step_ms: float
    exposed_ms: float
    host_bytes: int
    staging_bytes: int
    memory: tuple[tuple[str, int], ...] = ()
    streams: tuple[Interval, ...] = ()


class Plan(NamedTuple):
    """Plan for all activations, with its predicted cost and notes for the user.

    Args:
        segments: In forward order.
        prediction: Predicted cost of a step.
        notes: Why the plan differs from the request or from a better one; may be empty.
    """

    segments: tuple[SegmentPlan, ...]
    prediction: Prediction
    notes: tuple[str, ...] = ()


def uniform_plan(num_segments: int, kind: str, *, num_hosted: int | None = None) -> tuple[SegmentPlan, ...]:
    """Return a plan with the same treatment for every segment.

    Args:
        num_segments: Number of decoder layers.
        kind: "keep" stores everything; "recompute" stores the inputs on the device; "offload" stores them on the host,
            except the last one, whose backward follows at once.
        num_hosted: Number of inputs that the host has room for, which are the first ones; None for all.

    Example:
        >>> [segment.input_place for segment in uniform_plan(3, "offload")]
        ['host', 'host', 'device']
    """
    check_int("num_segments", num_segments, low=1)
    check_choice("kind", kind, ("keep", "recompute", "offload"))
    segment = SegmentPlan(kind == "keep", "device", ())
    most = num_segments - 1 if kind == "offload" else 0
    num_hosted = most if num_hosted is None else min(most, num_hosted)
    return (*[segment._replace(input_place="host")] * num_hosted, *[segment] * (num_segments - num_hosted))


def check_segments(cost: StepCost, segments: Sequence[SegmentPlan]) -> None:
    """Refuse a plan that does not fit its segments."""
    if len(segments) != len(cost.segments) or not segments:
        raise OptionError(
            f"The plan has {len(segments)} segments and the step has {len(cost.segments)}; both must have the same "
            "number, at least one."
        )
    for number, (segment, plan) in enumerate(zip(cost.segments, segments)):
        unknown = {name for name, _ in plan.values} - {value.name for value in segment.values}
        if unknown:
            there = ", ".join(value.name for value in segment.values) or "none"
            raise OptionError(f"Segment {number} has no value named {', '.join(sorted(unknown))}; it has {there}.")
        if plan.is_kept and (plan.values or plan.input_place == "host"):
            raise OptionError(
                f"Segment {number} is kept, so its input stays on the device and it names no values; got {plan}."
            )


def gib(num_bytes: int) -> str:
    """Return a size as text.

    Example:
        >>> gib(3 * 2**29)
        '1.50 GiB'
    """
    return f"{num_bytes / 2**30:.2f} GiB"
