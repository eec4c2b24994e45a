"""The planner: against every plan of tiny steps, along the front of a real one, and what it says when something
does not fit.
"""

import functools

import pytest

from lightning_fastft.core.errors import OptionError
from lightning_fastft.planner.plan import make_plan, plan_policy
from lightning_fastft.planner.prediction import StepModel, predict
from lightning_fastft.planner.step import EndBytes, Machine, uniform_plan
from tests.planner.planning import GB, H200, MB, UNIFIED, all_plans, fused_qwen3_14b, make_rng, qwen3_14b, random_step

MUCH = 10**15


def ends(cost, machine):
    """Predictions of recompute-all and keep-all."""
    return (predict(cost, uniform_plan(len(cost.segments), kind), machine=machine) for kind in ("recompute", "keep"))


def budgets_between(cost, machine, count):
    recompute, keep = ends(cost, machine)
    return [
        recompute.peak_bytes + (keep.peak_bytes - recompute.peak_bytes) * step // count for step in range(count + 1)
    ]


def plan_for(cost, vram, *, host=MUCH, machine=H200, **options):
    return make_plan(cost, vram_budget_bytes=vram, host_budget_bytes=host, machine=machine, **options)


def gaps_to_the_best(seed):
    """Plan a tiny step within several budgets; yield by how much each plan is slower than the best of all plans,
    and the dearest value's time.
    """
    rng = make_rng(seed)
    cost = random_step(rng, num_segments=rng.choice([1, 2, 3]), num_values=rng.choice([1, 2]))
    rate = rng.choice([5e3, 3e4, 1e5, 1e6])
    machine = Machine("any", rate, rate)
    model = StepModel(cost, machine=machine)
    outcomes = [(outcome.peak_bytes, outcome) for outcome in map(model.run, all_plans(cost))]
    low, high = min(peak for peak, _ in outcomes), max(peak for peak, _ in outcomes)
    dearest_ms = max(value.rebuild_ms for segment in cost.segments for value in segment.values)
    for share in (0.1, 0.3, 0.5, 0.8):
        vram, host = int(low + share * (high - low)), rng.choice([0, 300, MUCH])
        fitting = [outcome.step_ms for peak, outcome in outcomes if peak <= vram and outcome.host_bytes <= host]
        if not fitting:
            with pytest.raises(OptionError, match="No plan fits"):
                plan_for(cost, vram, host=host, machine=machine, weights="resident")
            continue
        prediction = plan_for(cost, vram, host=host, machine=machine, weights="resident").prediction
        assert prediction.peak_bytes <= vram
        assert prediction.host_bytes <= host
        yield prediction.step_ms - min(fitting), dearest_ms


@pytest.mark.parametrize("seed", range(30))
def test_no_plan_of_a_tiny_step_is_better_by_more_than_one_value(seed):
    for gap_ms, dearest_ms in gaps_to_the_best(seed):
        assert -1e-6 <= gap_ms <= dearest_ms


@pytest.mark.slow
def test_nearly_every_plan_of_a_tiny_step_is_the_best_one():
    gaps = [gap_ms for seed in range(100, 140) for gap_ms, _ in gaps_to_the_best(seed)]
    assert sum(gap_ms > 1e-6 for gap_ms in gaps) <= 0.03 * len(gaps)


@pytest.mark.fault
def test_between_the_ends_of_a_real_model_every_plan_lies_below_the_straight_line():
    cost = qwen3_14b()
    recompute, keep = ends(cost, H200)
    num_steps = 6
    for step, vram in enumerate(budgets_between(cost, H200, num_steps)):
        prediction = plan_for(cost, vram).prediction
        line_ms = recompute.step_ms + (keep.step_ms - recompute.step_ms) * step / num_steps
        assert prediction.peak_bytes <= vram
        assert prediction.step_ms <= line_ms + 1e-6
        assert prediction.exposed_ms < 0.01 * prediction.step_ms


def test_at_the_memory_of_recompute_all_a_real_model_is_five_per_cent_faster():
    cost = qwen3_14b()
    recompute, _ = ends(cost, H200)
    assert plan_for(cost, recompute.peak_bytes).prediction.step_ms < 0.95 * recompute.step_ms


def test_copies_to_the_host_take_most_of_the_forward_where_one_value_is_larger_than_a_layer_can_copy():
    cost = fused_qwen3_14b()
    recompute, _ = ends(cost, H200)
    prediction = plan_for(cost, recompute.peak_bytes).prediction
    copy_ms = sum(interval.end_ms - interval.start_ms for interval in prediction.streams if interval.stream == "d2h")
    forward_ms = sum(segment.forward_ms for segment in cost.segments)
    assert copy_ms > 0.85 * forward_ms
    assert prediction.exposed_ms < 0.01 * prediction.step_ms


def test_the_recompute_hides_copies_too():
    """The backward alone is too short for the weights and for all that a forward can copy out."""
    cost = fused_qwen3_14b()
    segments = tuple(segment._replace(backward_ms=11.0, recompute_ms=6.5) for segment in cost.segments)
    prediction = plan_for(cost._replace(segments=segments), 11 * GB, weights="stream").prediction
    copy_ms = sum(interval.end_ms - interval.start_ms for interval in prediction.streams if interval.stream == "d2h")
    assert copy_ms > 0.85 * sum(segment.forward_ms for segment in segments)
    assert prediction.exposed_ms < 0.01 * prediction.step_ms


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [1, 2, 3, *(pytest.param(case, marks=pytest.mark.fault) for case in ("qwen3-14b", 4, 5, 6))]
)
def test_more_budget_is_never_slower(case):
    if case == "qwen3-14b":
        cost, machine = qwen3_14b(), H200
    else:
        rng = make_rng(case)
        cost = random_step(
            rng, num_segments=rng.choice([6, 12, 24]), num_values=rng.choice([2, 5]), is_uniform=case % 2 == 0
        )
        machine = Machine("any", rate := rng.choice([3e4, 1e5, 1e6]), rate)
    times = [plan_for(cost, vram, machine=machine).prediction.step_ms for vram in budgets_between(cost, machine, 6)]
    fastest = float("inf")
    for time_ms in times:
        assert time_ms <= fastest * 1.005
        fastest = min(fastest, time_ms)


def test_a_budget_that_holds_everything_keeps_everything():
    cost = qwen3_14b()
    _, keep = ends(cost, H200)
    assert plan_for(cost, keep.peak_bytes).segments == uniform_plan(40, "keep")
    assert plan_for(cost, keep.peak_bytes - 1).segments != uniform_plan(40, "keep")


def test_what_is_dearest_per_byte_is_held_first():
    cost = qwen3_14b()
    recompute, _ = ends(cost, H200)
    segments = plan_for(cost, recompute.peak_bytes + 2 * GB, host=0).segments
    names = [name for plan in segments[:-1] for name, _ in plan.values]
    # Attention takes 4.7 ms a GB, every linear layer more than 7.
    assert names
    assert "attention" not in names


def test_the_budget_is_used_to_the_last_value():
    cost = qwen3_14b()
    recompute, _ = ends(cost, H200)
    plan = plan_for(cost, recompute.peak_bytes + 8 * GB, host=0)
    assert plan.prediction.peak_bytes > recompute.peak_bytes + 8 * GB - 100 * MB


def test_at_the_least_peak_there_is_a_plan():
    cost = qwen3_14b()
    everything = [plan._replace(input_place="host") for plan in uniform_plan(40, "recompute")]
    least = predict(cost, everything, machine=H200)
    assert least.peak_bytes < predict(cost, uniform_plan(40, "offload"), machine=H200).peak_bytes
    plan = plan_for(cost, least.peak_bytes, weights="resident")
    assert plan.prediction.peak_bytes <= least.peak_bytes


@pytest.mark.parametrize("seed", range(20, 30))
def test_where_all_inputs_fit_the_host_there_is_a_plan(seed):
    cost = random_step(make_rng(seed), num_segments=3, num_values=2)
    machine = Machine("any", 1e5, 1e5)
    vram = predict(
        cost, [plan._replace(input_place="host") for plan in uniform_plan(3, "recompute")], machine=machine
    ).peak_bytes
    assert plan_for(cost, vram, machine=machine, weights="resident").prediction.peak_bytes <= vram


def test_no_host_budget_means_no_host():
    cost = qwen3_14b()
    recompute, _ = ends(cost, H200)
    plan = plan_for(cost, recompute.peak_bytes + 8 * GB, host=0)
    assert plan.prediction.host_bytes == 0
    assert any("host budget of 0.00 GiB limits the plan" in note for note in plan.notes)


@pytest.mark.slow
def test_a_small_host_budget_is_used_and_said_to_be_small():
    cost = qwen3_14b()
    recompute, _ = ends(cost, H200)
    none, small, large = (
        plan_for(cost, recompute.peak_bytes, host=host, weights="resident") for host in (0, 6 * GB, MUCH)
    )
    assert 5 * GB < small.prediction.host_bytes <= 6 * GB
    assert large.prediction.step_ms < small.prediction.step_ms < none.prediction.step_ms
    assert large.notes == ()
    assert len(small.notes) == 1
    assert f"instead of {small.prediction.step_ms:.0f}" in small.notes[0]


def test_unified_memory_moves_nothing_and_says_why():
    cost = qwen3_14b()
    recompute, _ = ends(cost, UNIFIED)
    plan = plan_for(cost, recompute.peak_bytes + 8 * GB, machine=UNIFIED)
    assert plan.prediction.host_bytes == 0
    assert plan.prediction.step_ms < recompute.step_ms
    assert "unified memory" in plan.notes[0]
    with pytest.raises(OptionError, match="unified memory"):
        plan_for(cost, recompute.peak_bytes, machine=UNIFIED, weights="stream")


@pytest.mark.slow
def test_weights_are_streamed_where_nothing_else_fits_or_where_it_makes_the_step_faster():
    cost, slow = qwen3_14b(), Machine("a slow bus", 12e9, 12e9)
    plans = {weights: plan_for(cost, 16 * GB, weights=weights) for weights in ("auto", "resident", "stream")}
    assert all(plan.is_streamed for plan in plans["auto"].segments)
    assert plans["auto"].segments == plans["stream"].segments
    assert plans["auto"].prediction.step_ms * 1.03 < plans["resident"].prediction.step_ms
    assert f"would take {plans['resident'].prediction.step_ms:.0f} ms" in plans["auto"].notes[0]
    # Nothing to gain, a bus that is too slow, a host without the room.
    for options in ({"vram": 90 * GB}, {"vram": 16 * GB, "machine": slow}, {"vram": 16 * GB, "host": 6 * GB}):
        assert not any(plan.is_streamed for plan in plan_for(cost, **options).segments)
    small = plan_for(cost, 10 * GB)
    assert all(plan.is_streamed for plan in small.segments)
    assert "streamed" in small.notes[0]
    assert small.prediction.peak_bytes <= 10 * GB
    with pytest.raises(OptionError, match='weights="stream"'):
        plan_for(cost, 10 * GB, weights="resident")
    assert all(plan.is_streamed for plan in plan_for(cost, 40 * GB, weights="stream").segments)


def test_shorter_packs_are_no_advice_where_the_weights_alone_do_not_fit():
    cost = qwen3_14b(weight_bytes=0)
    with pytest.raises(OptionError, match=r"of it for weights, .* Use a larger VRAM budget\.") as caught:
        plan_for(cost, cost.base_bytes - GB)
    assert "max_tokens" not in str(caught.value)
    with pytest.raises(OptionError, match=r"Use a smaller max_tokens, or a larger VRAM budget\.$"):
        plan_for(cost, cost.base_bytes + 1)


@pytest.mark.slow
def test_what_cannot_fit_names_the_budget_the_least_peak_and_the_ways_out():
    cost = qwen3_14b()
    with pytest.raises(
        OptionError,
        match=r"VRAM budget of 3\.73 GiB: the lowest possible peak is 8\.\d+ GiB with streamed weights.*smaller max_tokens",
    ):
        plan_for(cost, 4 * GB)
    with pytest.raises(OptionError, match="a host budget of"):
        plan_for(cost, 16 * GB, host=GB)
    with pytest.raises(OptionError, match="raise host_budget"):
        plan_for(cost, 40 * GB, host=GB, weights="stream")
    with pytest.raises(OptionError, match="full fine-tuning"):
        plan_for(qwen3_14b(weight_bytes=0), 40 * GB, weights="stream")


def test_streamed_weights_and_the_ends_of_the_model_need_host_memory():
    cost = qwen3_14b()._replace(ends=EndBytes(embedding=GB, head=GB))
    num_bytes = sum(segment.weight_bytes for segment in cost.segments)
    options = {"vram_budget_bytes": 40 * GB, "machine": H200, "weights": "stream"}
    for plan in (make_plan, functools.partial(plan_policy, policy="recompute")):
        with pytest.raises(OptionError, match="raise host_budget"):
            plan(cost, host_budget_bytes=num_bytes + GB, **options)
        assert plan(cost, host_budget_bytes=MUCH, **options).segments[0].is_streamed


@pytest.mark.parametrize("weights", ["resident", "stream"])
def test_the_policy_offload_leaves_inputs_without_room_on_the_host_on_the_device(weights):
    cost, held_bytes = qwen3_14b(), 0
    if weights == "stream":
        held_bytes = sum(segment.weight_bytes for segment in cost.segments)
    host_bytes = held_bytes + 4 * cost.segments[0].input_bytes - 1
    options = {"vram_budget_bytes": MUCH, "machine": H200, "weights": weights}
    plan = plan_policy(cost, "offload", host_budget_bytes=host_bytes, **options)
    assert [segment.input_place for segment in plan.segments] == ["host"] * 3 + ["device"] * (len(cost.segments) - 3)
    assert plan.prediction.host_bytes <= host_bytes
    assert "room for 3 of " in plan.notes[0]
    assert not plan_policy(cost, "offload", host_budget_bytes=MUCH, **options).notes


def test_a_plan_for_64_layers_runs_at_most_1500_steps(monkeypatch):
    """Each is a simulation of one to two milliseconds, which is all that takes long."""
    cost = random_step(make_rng(0), num_segments=64, num_values=10)
    machine = Machine("any", 1e5, 1e5)
    vram = budgets_between(cost, machine, 2)[1]
    own, num_runs = StepModel.simulate, 0

    def run(*arguments, **options):
        nonlocal num_runs
        num_runs += 1
        return own(*arguments, **options)

    monkeypatch.setattr(StepModel, "simulate", run)
    plan_for(cost, vram, machine=machine)
    assert 0 < num_runs <= 1500


def test_the_same_question_gets_the_same_answer():
    cost = random_step(make_rng(3), num_segments=12, num_values=4)
    machine = Machine("any", 1e5, 1e5)
    vram = budgets_between(cost, machine, 2)[1]
    assert plan_for(cost, vram, machine=machine) == plan_for(cost, vram, machine=machine)
