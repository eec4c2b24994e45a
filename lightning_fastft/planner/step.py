"""What a training step costs, and what a plan does with its activations: plain data, sizes in bytes and times in ms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from lightning_fastft.core.checks import check_choice, check_int
from lightning_fastft.core.errors import OptionError

Place = Literal["device", "host"]


class ValueCost(NamedTuple):
    """One named intermediate of a segment, in the order it is computed.

    Args:
        name: Where it comes from: "self_attn.q_proj", "attention", "mlp.up_proj".
        num_bytes: Its size.
        rebuild_ms: Time to compute it again.
    """

    name: str
    num_bytes: int
    rebuild_ms: float


class SegmentCost(NamedTuple):
    """What one decoder layer costs.

    Args:
        input_bytes: Hidden states that enter the layer.
        saved_bytes: What autograd holds when the layer is kept: values included, the input not.
        forward_ms: Time of the forward.
        backward_ms: Time of the backward without any recompute.
        recompute_ms: Time of the forward in the backward with no value held; includes every rebuild_ms.
        values: What can be held instead of computed again.
        forward_peak_bytes: Transient of the forward, above what is resident when it starts; saved bytes not counted.
        backward_peak_bytes: Transient of the backward, above the input, the saved bytes and what earlier segments hold.
        weight_bytes: Frozen weights that could be streamed.
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


class StepCost(NamedTuple):
    """What a step costs: its segments in forward order, and what lies around them.

    Args:
        segments: Decoder layers.
        base_bytes: Resident all the time: weights (also those that could be streamed), optimizer state, gradients,
            embedding.
        head_peak_bytes: Transient of the final norm, the head and the loss.
        head_ms: Their time, forward and backward.
        other_ms: Embedding, optimizer and clipping.
        embedding_bytes: Of base_bytes, those of an input embedding that goes to the host together with streamed
            weights.
    """

    segments: tuple[SegmentCost, ...]
    base_bytes: int
    head_peak_bytes: int
    head_ms: float
    other_ms: float
    embedding_bytes: int = 0


class Machine(NamedTuple):
    """How fast bytes move between device and host.

    Args:
        name: For messages.
        d2h_bytes_per_s: Device to pinned host memory, while both directions are busy.
        h2d_bytes_per_s: Pinned host memory to device, while both directions are busy.
        is_unified: Host and device share their memory (integrated GPU), so nothing is gained by moving bytes.
    """

    name: str
    d2h_bytes_per_s: float
    h2d_bytes_per_s: float
    is_unified: bool = False


class SegmentPlan(NamedTuple):
    """What becomes of one segment's activations.

    Args:
        is_kept: Plain autograd: everything is held on the device, nothing is computed again.
        input_place: Where the input waits for the backward.
        values: Names and places of the values that are held; the others are rebuilt.
        is_streamed: The frozen weights come from the host for each use.
    """

    is_kept: bool
    input_place: Place
    values: tuple[tuple[str, Place], ...]
    is_streamed: bool = False


class Interval(NamedTuple):
    """Work of one lane: "compute", "d2h" or "h2d", from start to end of it, in ms since the step began."""

    lane: str
    label: str
    start_ms: float
    end_ms: float


class Prediction(NamedTuple):
    """What a step will cost.

    Args:
        peak_bytes: Most device memory of any moment.
        step_ms: Time of the step.
        exposed_ms: Time of it in which compute waits for a copy.
        host_bytes: Pinned host memory.
        staging_bytes: Largest host share of one segment: the size of a staging slot.
        memory: (moment, bytes) in the order of the step.
        lanes: What each lane does when.
    """

    peak_bytes: int
    step_ms: float
    exposed_ms: float
    host_bytes: int
    staging_bytes: int
    memory: tuple[tuple[str, int], ...]
    lanes: tuple[Interval, ...]


class Plan(NamedTuple):
    """What becomes of each segment's activations, what that will cost, and what the user should know about it.

    Args:
        segments: In forward order.
        prediction: What a step will cost.
        notes: Why the plan is not what was asked for, or not what it could be; empty when there is nothing to say.
    """

    segments: tuple[SegmentPlan, ...]
    prediction: Prediction
    notes: tuple[str, ...]


def uniform_plan(num_segments: int, kind: str) -> tuple[SegmentPlan, ...]:
    """Return the plan that treats every segment alike.

    Args:
        num_segments: Decoder layers.
        kind: "keep" holds everything; "recompute" holds the inputs on the device; "offload" holds them on the host, the
            last one excepted: its backward comes at once.

    Example:
        >>> [segment.input_place for segment in uniform_plan(3, "offload")]
        ['host', 'host', 'device']
    """
    check_int("num_segments", num_segments, low=1)
    check_choice("kind", kind, ("keep", "recompute", "offload"))
    last = SegmentPlan(kind == "keep", "device", ())
    other = SegmentPlan(is_kept=False, input_place="host", values=()) if kind == "offload" else last
    return (*[other] * (num_segments - 1), last)


def check_segments(cost: StepCost, segments: Sequence[SegmentPlan]) -> None:
    """Refuse a plan that does not fit the segments it is for."""
    if len(segments) != len(cost.segments) or not segments:
        raise OptionError(
            f"The plan has {len(segments)} segments and the step {len(cost.segments)}; they must agree, and be at "
            "least one."
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
