"""The step on paper: figures that can be worked out by hand, and rules that hold for every plan."""

from itertools import pairwise

import pytest

from lightning_fastft.core.errors import OptionError
from lightning_fastft.planner.prediction import predict
from lightning_fastft.planner.step import EndBytes, Machine, SegmentPlan, ValueCost, uniform_plan
from tests.planner.planning import H200, make_rng, plain_step, qwen3_14b, random_plan, random_step

# 10 bytes a millisecond each way.
SLOW = Machine("slow", 10_000, 10_000)
VALUES = (ValueCost("a", 40, 2.0), ValueCost("b", 60, 3.0))


def test_keep_recompute_and_offload_take_the_time_and_memory_worked_out_by_hand():
    cost = plain_step(3, input_bytes=100, saved_bytes=1000, base_bytes=5000, head_ms=4.0, other_ms=1.0)
    keep, recompute, offload = (
        predict(cost, uniform_plan(3, kind), machine=H200) for kind in ("keep", "recompute", "offload")
    )
    assert keep.step_ms == pytest.approx(3 * 30 + 5)
    assert keep.peak_bytes == 5000 + 3 * 1100
    assert recompute.step_ms == pytest.approx(3 * 40 + 5)
    assert recompute.peak_bytes == 5000 + 3 * 100 + 1000
    assert offload.step_ms == pytest.approx(3 * 40 + 5, abs=1e-4)
    # Two slots, the input of the last segment, and what its backward rebuilds.
    assert offload.peak_bytes == 5000 + 2 * 100 + 100 + 1000
    assert (offload.host_bytes, offload.staging_bytes) == (200, 100)
    assert [label for label, _ in offload.memory] == [
        *(f"forward {i}" for i in range(3)),
        "head",
        *(f"backward {i}" for i in (2, 1, 0)),
    ]


def test_transient_memory_of_the_optimizer_is_a_moment_without_activations():
    cost = plain_step(3, input_bytes=100, saved_bytes=1000, base_bytes=5000)
    plans = [uniform_plan(3, kind) for kind in ("keep", "recompute")]
    updated = cost._replace(update_peak_bytes=2000)
    keep, recompute = (predict(updated, plan, machine=H200) for plan in plans)
    assert keep.peak_bytes == predict(cost, plans[0], machine=H200).peak_bytes == 5000 + 3 * 1100
    assert recompute.peak_bytes == 5000 + 2000
    assert recompute.memory[-1] == ("other", 7000)


def test_a_held_value_saves_its_time_and_costs_its_bytes():
    cost = plain_step(2, values=VALUES)
    recompute = predict(cost, uniform_plan(2, "recompute"), machine=H200)
    held = predict(
        cost, (SegmentPlan(False, "device", (("a", "device"),)), SegmentPlan(False, "device", ())), machine=H200
    )
    assert held.step_ms == pytest.approx(recompute.step_ms - 2.0)
    assert held.peak_bytes == recompute.peak_bytes + 40


def test_of_the_peak_the_segment_in_its_own_backward_counts_what_it_holds_once():
    cost = plain_step(2, values=VALUES)
    recompute = predict(cost, uniform_plan(2, "recompute"), machine=H200)
    held = predict(
        cost,
        (SegmentPlan(False, "device", ()), SegmentPlan(False, "device", (("a", "device"), ("b", "device")))),
        machine=H200,
    )
    assert held.peak_bytes == recompute.peak_bytes
    assert held.step_ms == pytest.approx(recompute.step_ms - 5.0)


def test_a_value_is_copied_from_the_moment_when_the_forward_has_computed_it():
    cost = plain_step(2, values=VALUES, forward_ms=10.0)
    plan = (SegmentPlan(False, "device", (("a", "host"), ("b", "host"))), SegmentPlan(False, "device", ()))
    copies = [copy for copy in predict(cost, plan, machine=H200).streams if copy.stream == "d2h"]
    # "a" takes 2 of the 5 ms in which both are computed.
    assert [(copy.label, round(copy.start_ms, 6)) for copy in copies] == [("a 0", 4.0), ("b 0", 10.0)]


def test_copies_that_hide_under_compute_expose_nothing():
    prediction = predict(qwen3_14b(), uniform_plan(40, "offload"), machine=H200)
    assert prediction.exposed_ms == 0
    assert prediction.step_ms == pytest.approx(
        predict(qwen3_14b(), uniform_plan(40, "recompute"), machine=H200).step_ms
    )


@pytest.mark.parametrize("input_bytes", [50, 150, 295])
def test_one_buffer_costs_the_copy_of_every_segment_but_the_last(input_bytes):
    """With two the copy hides under the backward of the segment after it; 30 ms of compute and up to 29.5 of copy."""
    cost = plain_step(6, input_bytes=input_bytes, forward_ms=30.0, backward_ms=0.0)
    double, serial = (predict(cost, uniform_plan(6, "offload"), machine=SLOW, buffers=buffers) for buffers in (2, 1))
    assert double.exposed_ms == pytest.approx(0.0)
    assert serial.step_ms - double.step_ms == pytest.approx(5 * input_bytes / 10)


def test_where_copies_take_longer_than_compute_two_buffers_still_hide_all_the_compute():
    cost = plain_step(6, input_bytes=800, forward_ms=60.0, backward_ms=0.0)
    double, serial = (predict(cost, uniform_plan(6, "offload"), machine=SLOW, buffers=buffers) for buffers in (2, 1))
    assert serial.step_ms - double.step_ms == pytest.approx(5 * 60)


def test_a_forward_that_outruns_its_copies_waits_for_the_oldest():
    cost = plain_step(4, input_bytes=200, forward_ms=5.0, backward_ms=100.0)
    prediction = predict(cost, uniform_plan(4, "offload"), machine=SLOW)
    # Three copies of 20 ms follow each other; three forwards pass under them, and the rest is waited for in the forward
    # or at its end.
    assert prediction.exposed_ms == pytest.approx(3 * 20 - 4 * 5)


def test_no_more_than_one_segment_is_on_its_way_out():
    """All copies would hide under the kept segments that follow; but the second input may leave only when the
    first has arrived.
    """
    cost = plain_step(15, input_bytes=200, forward_ms=5.0)
    plan = (*[SegmentPlan(False, "host", ())] * 3, *[SegmentPlan(True, "device", ())] * 12)
    assert predict(cost, plan, machine=SLOW).exposed_ms == pytest.approx(2 * (20 - 5))


def test_tensors_from_the_host_lie_in_their_slot_and_nowhere_else():
    cost = plain_step(2, values=VALUES)
    plan = (SegmentPlan(False, "host", (("b", "host"),)), SegmentPlan(False, "device", ()))
    memory = dict(predict(cost, plan, machine=H200).memory)
    # Two slots of input and b; what is rebuilt around them.
    assert memory["backward 0"] == 2 * 160 + 1000 - 60
    assert memory["backward 1"] == 2 * 160 + 1000 + 100


def test_the_model_holds_the_embeddings_until_its_last_layer_has_run():
    cost = plain_step(3)
    memory = dict(predict(cost, uniform_plan(3, "offload"), machine=H200).memory)
    # Two slots and the source of a copy; the embeddings; the input of the last segment.
    assert [memory[f"forward {number}"] for number in range(3)] == [300, 400, 500]
    assert memory["head"] == 2 * 100 + 100 + 100


def test_a_value_may_arrive_as_late_as_its_place_in_the_recompute():
    """The copy takes 6 ms and starts with the backward of its segment; b is needed from the third millisecond on."""
    cost = plain_step(2, input_bytes=0, forward_ms=5.0, values=VALUES, head_ms=10.0)
    plan = (SegmentPlan(False, "device", (("b", "host"),)), SegmentPlan(True, "device", ()))
    serial = predict(cost, plan, machine=SLOW, buffers=1)
    assert serial.exposed_ms == pytest.approx(60 / 10 - 2.0)


def streamed_steps(num_segments, *, head=0, **cost):
    """A step whose weights are streamed, with an output layer of this size on the host."""
    cost = plain_step(num_segments, weight_bytes=100, base_bytes=1000, **cost)._replace(ends=EndBytes(head=head))
    plans = uniform_plan(num_segments, "recompute")
    return predict(cost, [plan._replace(is_streamed=True) for plan in plans], machine=SLOW)


def test_a_streamed_output_layer_arrives_in_the_forwards_of_the_last_segments():
    """A forward hides the weights of the next segment, 10 ms, and 2 ms of the output layer, or 12 ms without these."""
    whole = streamed_steps(12, forward_ms=12.0, head=160)
    copies = [interval for interval in whole.streams if interval.label == "head"]
    assert [copy.end_ms - copy.start_ms for copy in copies] == [pytest.approx(2.0)] * 8
    assert [copy.start_ms for copy in copies] == [pytest.approx(12.0 * number) for number in range(4, 12)]
    assert whole.exposed_ms == streamed_steps(12, forward_ms=12.0).exposed_ms
    # It is on the device from its first part to the end of the head, and the base, which counts it, lacks it otherwise.
    without = streamed_steps(12, forward_ms=12.0)
    more = [num_bytes - other for (_, num_bytes), (_, other) in zip(whole.memory, without.memory, strict=True)]
    assert more == [-160] * 4 + [0] * 9 + [-160] * (len(more) - 13)


def test_a_single_segment_leaves_a_streamed_output_layer_to_the_head():
    alone = streamed_steps(1, forward_ms=12.0, head=160)
    (copy,) = [interval for interval in alone.streams if interval.label == "head"]
    assert (copy.start_ms, copy.end_ms) == (pytest.approx(12.0), pytest.approx(28.0))
    assert alone.exposed_ms == pytest.approx(16.0)


def test_streamed_weights_take_three_slots_and_stay_there_at_both_turns():
    cost = plain_step(6, weight_bytes=100, base_bytes=1000)
    resident = uniform_plan(6, "recompute")
    streamed = predict(cost, [plan._replace(is_streamed=True) for plan in resident], machine=SLOW)
    assert predict(cost, resident, machine=SLOW).peak_bytes - streamed.peak_bytes == 300
    assert streamed.host_bytes == 600
    below = predict(
        cost._replace(ends=EndBytes(70)), [plan._replace(is_streamed=True) for plan in resident], machine=SLOW
    )
    assert (streamed.peak_bytes - below.peak_bytes, below.host_bytes - streamed.host_bytes) == (70, 70)
    assert (
        predict(cost._replace(ends=EndBytes(70)), resident, machine=SLOW).peak_bytes
        == predict(cost, resident, machine=SLOW).peak_bytes
    )
    copies = [interval.label for interval in streamed.streams if interval.stream == "h2d"]
    assert copies == ["weights 3", "weights 4", "weights 5", "weights 2", "weights 1", "weights 0"]
    assert streamed.exposed_ms == pytest.approx(0.0)


def test_activations_wait_behind_the_weights_in_their_lane():
    cost = plain_step(6, input_bytes=250, weight_bytes=300)
    offload = predict(cost, [plan._replace(is_streamed=True) for plan in uniform_plan(6, "offload")], machine=SLOW)
    copies = [interval for interval in offload.streams if interval.stream == "h2d"]
    assert [copy.label for copy in copies][-2:] == ["weights 0", "input 0"]
    assert all(second.start_ms >= first.end_ms for first, second in pairwise(copies))
    assert offload.exposed_ms > 0


@pytest.mark.parametrize("seed", range(20))
def test_lanes_never_do_two_things_at_once_and_compute_is_busy_unless_it_waits(seed):
    rng = make_rng(seed)
    cost = random_step(rng, num_segments=5, num_values=3)
    prediction = predict(cost, random_plan(rng, cost), machine=Machine("any", 2e4, 3e4), buffers=rng.choice([1, 2, 3]))
    for lane in ("compute", "d2h", "h2d"):
        intervals = [interval for interval in prediction.streams if interval.stream == lane]
        assert all(second.start_ms >= first.end_ms - 1e-9 for first, second in pairwise(intervals))
    busy_ms = sum(
        interval.end_ms - interval.start_ms for interval in prediction.streams if interval.stream == "compute"
    )
    assert busy_ms + prediction.exposed_ms == pytest.approx(prediction.step_ms)
    assert prediction.peak_bytes == max(num_bytes for _, num_bytes in prediction.memory)


@pytest.mark.parametrize("seed", range(20))
def test_no_plan_is_faster_than_keep_and_more_buffers_never_wait_longer(seed):
    rng = make_rng(seed)
    cost = random_step(rng, num_segments=5, num_values=2)
    plan, machine = random_plan(rng, cost), Machine("any", 3e4, 3e4)
    times = [predict(cost, plan, machine=machine, buffers=buffers).step_ms for buffers in (1, 2, 3)]
    assert times == sorted(times, reverse=True)
    assert predict(cost, uniform_plan(5, "keep"), machine=machine).step_ms <= times[-1] + 1e-9


@pytest.mark.parametrize(
    ("plan", "match"),
    [
        (uniform_plan(3, "keep"), "3 segments and the step has 2"),
        ((SegmentPlan(False, "device", (("c", "host"),)),) * 2, "no value named c; it has a, b"),
        ((SegmentPlan(True, "host", ()),) * 2, "is kept"),
        ((SegmentPlan(True, "device", (("a", "host"),)),) * 2, "is kept"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused(plan, match):
    with pytest.raises(OptionError, match=match):
        predict(plain_step(2, values=VALUES), plan, machine=H200)


def test_zero_buffers_and_a_dead_link_are_refused():
    with pytest.raises(OptionError, match="buffers"):
        predict(plain_step(2), uniform_plan(2, "keep"), machine=H200, buffers=0)
    with pytest.raises(OptionError, match="more than 0 bytes"):
        predict(plain_step(2), uniform_plan(2, "keep"), machine=Machine("dead", 0, 1e9))
