"""Costs for tests of the planner."""

import itertools
import random

from lightning_fastft.planner.step import Machine, SegmentCost, SegmentPlan, StepCost, ValueCost

MB, GB = 10**6, 10**9
H200 = Machine("NVIDIA H200", d2h_bytes_per_s=45.6e9, h2d_bytes_per_s=45.6e9)
UNIFIED = Machine("DGX Spark", d2h_bytes_per_s=0, h2d_bytes_per_s=0, is_unified=True)


def qwen3_14b(*, num_layers=40, weight_bytes=170 * MB):
    """Qwen3-14B under QLoRA at 8,192 tokens."""
    values = (
        ValueCost("self_attn.q_proj", 84 * MB, 0.62),
        ValueCost("self_attn.k_proj", 17 * MB, 0.13),
        ValueCost("self_attn.v_proj", 17 * MB, 0.13),
        ValueCost("attention", 85 * MB, 0.4),
        ValueCost("self_attn.o_proj", 84 * MB, 0.62),
        ValueCost("mlp.gate_proj", 285 * MB, 2.05),
        ValueCost("mlp.up_proj", 285 * MB, 2.05),
    )
    segment = SegmentCost(
        input_bytes=84 * MB,
        saved_bytes=1480 * MB,
        forward_ms=9.0,
        backward_ms=15.5,
        recompute_ms=9.0,
        values=values,
        forward_peak_bytes=900 * MB,
        backward_peak_bytes=900 * MB,
        weight_bytes=weight_bytes,
    )
    return StepCost((segment,) * num_layers, base_bytes=13 * GB, head_peak_bytes=GB, head_ms=40.0, other_ms=10.0)


def fused_qwen3_14b():
    """The same with fused layers, which join q, k and v, and gate and up, in one value each."""
    cost = qwen3_14b()
    _, _, _, attention, o_proj, _, _ = cost.segments[0].values
    values = ValueCost("self_attn.qkv", 118 * MB, 0.88), attention, o_proj, ValueCost("mlp.gate_up", 570 * MB, 4.1)
    return cost._replace(segments=tuple(segment._replace(values=values) for segment in cost.segments))


def plain_step(
    num_segments,
    *,
    input_bytes=100,
    saved_bytes=1000,
    forward_ms=10.0,
    backward_ms=20.0,
    values=(),
    weight_bytes=0,
    **around,
):
    """Equal segments with round numbers; recompute takes what the forward takes, and there are no transients."""
    segment = SegmentCost(
        input_bytes, saved_bytes, forward_ms, backward_ms, forward_ms, tuple(values), 0, 0, weight_bytes
    )
    return StepCost(
        (segment,) * num_segments, **{"base_bytes": 0, "head_peak_bytes": 0, "head_ms": 0.0, "other_ms": 0.0, **around}
    )


def random_step(rng, *, num_segments, num_values, is_uniform=False):
    """A step whose numbers agree with each other: values are part of what is saved, their times part of the
    recompute.
    """
    segments = [_random_segment(rng, num_values) for _ in range(num_segments)]
    if is_uniform:
        segments = segments[:1] * num_segments
    return StepCost(tuple(segments), rng.randrange(2000), rng.randrange(500), rng.uniform(0, 20), rng.uniform(0, 5))


def random_plan(rng, cost):
    """Any plan that fits the segments."""
    return tuple(rng.choice(list(all_segment_plans(segment))) for segment in cost.segments)


def all_segment_plans(segment):
    yield SegmentPlan(True, "device", ())
    for place in ("device", "host"):
        for places in itertools.product((None, "device", "host"), repeat=len(segment.values)):
            yield SegmentPlan(
                False, place, tuple((value.name, found) for value, found in zip(segment.values, places) if found)
            )


def all_plans(cost):
    return itertools.product(*(list(all_segment_plans(segment)) for segment in cost.segments))


def _random_segment(rng, num_values):
    values = tuple(
        ValueCost(f"value {number}", rng.randint(20, 400), rng.uniform(0.1, 3)) for number in range(num_values)
    )
    forward_ms = sum(value.rebuild_ms for value in values) + rng.uniform(0.1, 3)
    saved = sum(value.num_bytes for value in values) + rng.randint(0, 500)
    peaks = rng.randint(0, 300), rng.randint(0, 300)
    return SegmentCost(
        rng.randint(20, 100),
        saved,
        forward_ms,
        forward_ms * rng.uniform(1.5, 2.2),
        forward_ms,
        values,
        *peaks,
        rng.randint(50, 200),
    )


def make_rng(seed):
    return random.Random(seed)
