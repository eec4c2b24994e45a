"""SegmentStack: the phases of "auto", budgets that force a plan, plans made again, memory that is refused, and
how ranks agree.
"""

import copy
import functools
from itertools import pairwise
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from lightning_fastft.activations import engine as engine_module
from lightning_fastft.activations import measurement as measurement_module
from lightning_fastft.activations import planning as planning_module
from lightning_fastft.activations.checkpointing import OffloadCheckpointing
from lightning_fastft.activations.segments import KEEP, RECOMPUTE
from lightning_fastft.activations.vram_budget import PLANNED_SHARE
from lightning_fastft.core.errors import HostMemoryError, OptionError, UnsupportedModelError
from lightning_fastft.core.patcher import ModelPatcher
from lightning_fastft.core.run_environment import RunEnvironment
from lightning_fastft.hf.families import decoder_layers
from lightning_fastft.patches import host_ends
from lightning_fastft.patches import packed as packed_module
from lightning_fastft.patches.packed import install_packed_training
from lightning_fastft.planner.prediction import predict
from lightning_fastft.planner.step import EndBytes, Machine
from tests.patches.test_value_points import adapted
from tests.planner.plan_trials import assert_equal, assert_near, kept_gradients, read_gradients
from tests.support.engine_use import describe_use
from tests.support.late_streams import LateStreams
from tests.support.packs import make_batch
from tests.support.tiny_models import build_tiny

LENGTHS = (40, 1, 25, 30)
SMALL, LARGE = (10, 12), (60, 41, 25, 30)
NUM_LAYERS = 4
GIB = 2**30
# So fast that every copy hides, so that the budgets alone decide.
FAST = Machine("a fast machine", 1e15, 1e15)


class Attached:
    """A tiny model under a policy; its reports, and what its ranks were asked."""

    def __init__(self, model=None, *, lengths=LENGTHS, agree=None, extra_bytes=0, policy="auto", **options):
        self.model = build_tiny("llama", num_hidden_layers=NUM_LAYERS).train() if model is None else model
        self.twin = copy.deepcopy(self.model)
        self.batch = make_batch(lengths)
        self.checkpointing = OffloadCheckpointing(policy, **options)
        self.reports, self.asked = [], []
        environment = RunEnvironment(
            report=self.reports.append,
            agree=lambda plan: self.asked.append(plan) or (plan if agree is None else agree(plan)),
            missing_bytes=lambda: extra_bytes,
        )
        self.patcher = ModelPatcher()
        install_packed_training(self.model, self.patcher, checkpointing=self.checkpointing, environment=environment)
        self.stack = self.checkpointing.stacks[-1]
        self.stack.executor.make_copy_streams = lambda device: LateStreams(seed=1)

    def knows(self, **facts):
        """Change what the run knows."""
        self.stack.environment = self.stack.environment._replace(**facts)

    @property
    def plans(self):
        return [segment.plan for segment in self.stack.segments]

    @property
    def reason(self):
        return self.checkpointing.status().reason

    def step(self, batch=None):
        self.model.zero_grad(set_to_none=True)
        self.model(**(self.batch if batch is None else batch)).loss.backward()
        return read_gradients(self.model)

    def expected(self, batch=None):
        """Gradients of the same model when everything is kept."""
        return kept_gradients(self.twin, [self.batch if batch is None else batch], 1)

    def until_planned(self):
        for _ in range(4):
            self.step()
        assert self.stack.plan is not None
        return self


@pytest.fixture(autouse=True)
def fast_machine(monkeypatch):
    monkeypatch.setattr(planning_module, "measure_machine", lambda device: FAST)


def peak_gib(cost, segment_plan):
    """Peak of the plan that treats every segment alike."""
    return predict(cost, [segment_plan] * len(cost.segments), machine=FAST).peak_bytes / GIB


@functools.cache
def bytes_of(kind):
    """Peak in GiB of the model that Attached builds by default, all kept or all recomputed."""
    cost = Attached(vram_budget=1000, host_budget=0).until_planned().stack.cost
    return peak_gib(cost, {"keep": KEEP, "recompute": RECOMPUTE}[kind])


def all_on_host(segment):
    return RECOMPUTE._replace(input_place="host", values=tuple((value.name, "host") for value in segment.values))


def test_three_measured_forwards_and_the_plan_at_the_fourth():
    attached = Attached(vram_budget=1000)
    expected = attached.expected()
    seen = []
    for _ in range(5):
        assert_equal(attached.step(), expected, what=f"step {len(seen)}")
        seen.append((sum(plan.is_kept for plan in attached.plans), attached.stack.plan is not None))
    # The first counts what one layer of the one kind holds when it is kept; the second runs as the third, which is
    # timed.
    assert seen == [(1, False), (0, False), (0, False), (NUM_LAYERS, True), (NUM_LAYERS, True)]
    assert all(segment.observer is None for segment in attached.stack.segments)
    (report,) = attached.reports
    assert "treatment of their activations" in report


def test_each_kind_of_layer_is_counted_once():
    model = build_tiny("gemma2", num_hidden_layers=4, layer_types=["sliding_attention", "full_attention"] * 2).train()
    model.model.layers[0].mlp.act_fn = nn.Sequential(nn.GELU(approximate="tanh"), nn.Dropout(0.0))
    attached = Attached(model, vram_budget=1000)
    attached.step()
    assert [plan.is_kept for plan in attached.plans] == [True, False, False, True]


def test_a_cpu_keeps_without_a_budget():
    attached = Attached()
    expected = attached.expected()
    assert_equal(attached.step(), expected, what="kept")
    assert attached.plans == [KEEP] * NUM_LAYERS
    assert attached.stack.plan is None
    assert attached.reason == f"auto: on a CPU every activation is kept; {NUM_LAYERS} layers"


def test_the_device_of_the_step_counts_not_the_one_of_the_installation():
    """A strategy installs before the model moves: a model that was built on a CPU is planned for on a GPU."""
    attached = Attached()
    hidden = torch.empty(1, 96, 32, device="meta")
    attached.stack.begin_forward(hidden)
    # One layer of the one kind is kept and counted.
    assert attached.plans == [RECOMPUTE] * (NUM_LAYERS - 1) + [KEEP]
    assert "measured" in attached.reason
    attached.checkpointing.place(torch.device("cpu"))
    assert "on a CPU every activation is kept" in attached.reason
    assert attached.plans == [KEEP] * NUM_LAYERS


def test_a_budget_between_the_ends_holds_values_and_stays_below():
    low, high = bytes_of("recompute"), bytes_of("keep")
    budget = (low + high) / 2
    attached = Attached(vram_budget=budget, host_budget=0)
    expected = attached.expected()
    attached.until_planned()
    assert attached.stack.plan.prediction.peak_bytes <= budget * GIB
    assert attached.stack.engine is None
    assert (
        0
        < sum(plan.is_kept for plan in attached.plans) + sum(bool(plan.values) for plan in attached.plans)
        < 2 * NUM_LAYERS
    )
    assert not all(plan.is_kept for plan in attached.plans)
    assert_equal(attached.step(), expected, what="planned")
    num_kept, num_held = sum(plan.is_kept for plan in attached.plans), sum(len(plan.values) for plan in attached.plans)
    assert f"{num_kept} of {NUM_LAYERS} layers kept" in attached.reason
    assert (f"{num_held} values held" in attached.reason) is (num_held > 0)


def test_the_least_budget_recomputes():
    attached = Attached(vram_budget=bytes_of("recompute"), host_budget=0).until_planned()
    # The last layer may be kept: its backward comes at once, so all of it is there at the peak in any case.
    assert attached.plans[:-1] == [RECOMPUTE] * (NUM_LAYERS - 1)
    assert "layers kept; predicted" in attached.reason


def test_the_host_takes_what_the_device_has_no_room_for():
    attached = Attached(vram_budget=0.95 * bytes_of("recompute"), host_budget=1)
    expected = attached.expected()
    attached.until_planned()
    assert any(plan.input_place == "host" for plan in attached.plans)
    assert_equal(attached.step(), expected, what="on the host")
    use = describe_use(attached.stack.engine)
    assert use["pinned_bytes"] == attached.stack.plan.prediction.host_bytes
    assert (use["num_kept"], use["num_unplanned"]) == (0, 0)
    assert "on the host" in attached.reason


def test_nothing_fits_and_the_message_says_what_would():
    attached = Attached(vram_budget=1e-5, host_budget=0, weights="resident")
    with pytest.raises(OptionError, match=r"lowest possible peak is .* GiB.*VRAM budget"):
        attached.until_planned()


def test_what_comes_later_is_counted():
    """Optimizer state that the first step will make leaves less for activations."""
    budget = bytes_of("keep") / PLANNED_SHARE + 1e-6
    assert Attached(vram_budget=budget, host_budget=0).until_planned().plans == [KEEP] * NUM_LAYERS
    later = Attached(vram_budget=budget, host_budget=0, extra_bytes=int(0.2 * budget * GIB)).until_planned()
    assert later.plans != [KEEP] * NUM_LAYERS


def test_larger_packs_are_planned_for_again_and_smaller_ones_are_not():
    attached = Attached(lengths=LENGTHS, vram_budget=1000).until_planned()
    plan, reports = attached.stack.plan, len(attached.reports)
    small, large = make_batch(SMALL), make_batch(LARGE)
    for batch in (small, attached.batch, small):
        expected = attached.expected(batch)
        assert_equal(attached.step(batch), expected, what="no larger")
    assert attached.stack.plan is plan
    assert len(attached.reports) == reports
    expected = attached.expected(large)
    for number in range(4):
        assert_equal(attached.step(large), expected, what=f"larger, step {number}")
    assert "packs grew" in attached.reports[reports]
    assert attached.stack.plan is not plan
    assert attached.stack.plan.prediction.peak_bytes > plan.prediction.peak_bytes


def test_packs_of_any_length_while_measuring_plan_for_the_longest():
    """Bytes of the longest pack, whichever was counted and timed; and the plan comes at the fourth forward on
    every rank.
    """
    orders = [
        (LARGE, SMALL, SMALL, SMALL),
        (SMALL, LARGE, SMALL, SMALL),
        (SMALL, SMALL, LARGE, SMALL),
        (SMALL, SMALL, SMALL, LARGE),
        (LARGE,) * 4,
    ]
    sizes = []
    for order in orders:
        attached = Attached(vram_budget=1000)
        for number, lengths in enumerate(order):
            assert attached.stack.plan is None, number
            attached.step(make_batch(lengths))
        costs = attached.stack.cost.segments
        assert len(attached.asked) == 1
        # What was sized from shorter packs holds the longest: nothing is left on the device for want of room.
        attached.stack.follow(
            [all_on_host(costs[0])] * NUM_LAYERS, device=torch.device("cpu"), cost=attached.stack.cost
        )
        assert_equal(attached.step(make_batch(LARGE)), attached.expected(make_batch(LARGE)), what=str(order))
        assert (
            describe_use(attached.stack.engine)["num_kept"],
            describe_use(attached.stack.engine)["num_unplanned"],
        ) == (0, 0)
        sizes.append(([value.num_bytes for value in costs[0].values], costs[0].input_bytes, costs[0].saved_bytes))
    values, inputs, saved = sizes[-1]
    for found_values, found_inputs, found_saved in sizes[:-1]:
        assert found_inputs == inputs
        # To the alignment of 512 bytes, which the shorter pack had as well.
        assert all(1 <= one / other <= 1.2 for one, other in zip(found_values, values))
        assert 0.8 <= found_saved / saved <= 1.2


@pytest.mark.parametrize("where", [1, 2, 3])
def test_a_forward_that_ends_in_an_exception_is_measured_again(where):
    attached = Attached(vram_budget=1000)
    expected = attached.expected()

    def fail(*_):
        raise RuntimeError("planted")

    for number in range(7):
        if number == where:
            handle = attached.model.model.layers[1].mlp.register_forward_hook(fail)
            with pytest.raises(RuntimeError, match="planted"):
                attached.step()
            handle.remove()
        else:
            assert_equal(attached.step(), expected, what=f"step {number}")
    assert attached.stack.plan is not None
    assert all(segment.saved_bytes > 0 and segment.recompute_ms > 0 for segment in attached.stack.cost.segments)


def test_a_backward_that_ends_in_an_exception_is_measured_again():
    attached = Attached(vram_budget=1000)
    attached.step()
    attached.step()

    def fail(*_):
        raise RuntimeError("planted")

    handle = attached.model.model.layers[2].mlp.register_full_backward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="planted"):
        attached.step()
    handle.remove()
    attached.step()
    assert attached.stack.plan is None
    attached.step()
    assert all(segment.recompute_ms > 0 for segment in attached.stack.cost.segments)


def test_ranks_that_plan_together_are_asked_for_every_plan():
    attached = Attached(lengths=SMALL, vram_budget=1000)
    attached.knows(plans_together=True)
    attached.until_planned()
    for _ in range(6):
        attached.step(make_batch(LARGE))
    assert attached.stack.plan is not None
    assert len(attached.asked) == 2


def test_a_rank_of_a_group_does_not_plan_alone():
    attached = Attached(vram_budget=1000)
    attached.knows(plans_together=True)
    with (
        mock.patch.object(attached.stack, "follow", side_effect=HostMemoryError("no pinned memory.")),
        pytest.raises(OptionError, match="exchanges data in each layer"),
    ):
        attached.until_planned()


def test_ranks_are_asked_once_and_their_plan_is_followed():
    def other_rank(plan):
        return plan._replace(segments=(RECOMPUTE,) * NUM_LAYERS)

    attached = Attached(vram_budget=1000, agree=other_rank).until_planned()
    assert attached.plans == [RECOMPUTE] * NUM_LAYERS
    assert len(attached.asked) == 1
    # What this rank has to do alone, it does alone: nobody else would answer.
    for _ in range(4):
        attached.step(make_batch(LARGE))
    assert attached.stack.plan is not None
    assert attached.stack.step_down()
    assert len(attached.asked) == 1


class Refuses:
    """A host that gives pinned memory up to a limit."""

    def __init__(self, monkeypatch, *, limit_bytes):
        self.limit_bytes, self.asked = limit_bytes, []
        slab = engine_module.PinnedSlab

        def make(num_bytes, *, device):
            self.asked.append(num_bytes)
            if num_bytes > self.limit_bytes:
                raise HostMemoryError(f"The host refuses {num_bytes} bytes.")
            return slab(num_bytes, device=device)

        monkeypatch.setattr(engine_module, "PinnedSlab", make)


@pytest.mark.parametrize("share", [0.3, 0.0])
def test_a_host_that_refuses_memory_shrinks_the_plan_and_is_reported(monkeypatch, share):
    everything = Attached(lengths=LENGTHS, vram_budget=1000, host_budget=1).until_planned()
    host_plan = [RECOMPUTE._replace(input_place="host")] * NUM_LAYERS
    input_bytes = everything.stack.cost.segments[0].input_bytes
    host = Refuses(monkeypatch, limit_bytes=int(share * NUM_LAYERS * input_bytes))
    attached = Attached(vram_budget=1.05 * bytes_of("recompute"), host_budget=1)
    expected = attached.expected()
    # Whatever the planner would choose, begin with all inputs on the host.
    attached.knows(
        agree=lambda plan: plan._replace(
            segments=tuple(host_plan), prediction=plan.prediction._replace(host_bytes=NUM_LAYERS * input_bytes)
        )
    )
    attached.until_planned()
    assert host.asked[0] == NUM_LAYERS * input_bytes
    assert sum(plan.input_place == "host" for plan in attached.plans) * input_bytes <= host.limit_bytes
    assert any("Planning again with" in report for report in attached.reports)
    assert "less pinned memory than planned" in attached.reason
    assert_equal(attached.step(), expected, what="shrunk")


def test_a_host_that_gives_nothing_is_planned_without_at_last(monkeypatch):
    """Half of what was refused, again and again, never comes to nothing."""
    make_plan = planning_module.make_plan

    def greedy(cost, *, host_budget_bytes, **options):
        plan = make_plan(cost, host_budget_bytes=host_budget_bytes, **options)
        if not host_budget_bytes:
            return plan
        segments = tuple(RECOMPUTE._replace(input_place="host") for _ in plan.segments)
        return plan._replace(segments=segments, prediction=plan.prediction._replace(host_bytes=host_budget_bytes))

    monkeypatch.setattr(planning_module, "make_plan", greedy)
    Refuses(monkeypatch, limit_bytes=0)
    attached = Attached(vram_budget=1000, host_budget=1)
    expected = attached.expected()
    attached.until_planned()
    assert attached.stack.engine is None
    assert_equal(attached.step(), expected, what="without the host")


def test_inputs_that_the_host_refuses_stay_on_the_device(monkeypatch):
    attached = Attached(policy="offload")
    expected = attached.expected()
    host = Refuses(monkeypatch, limit_bytes=96 * 32 * 4)
    assert_equal(attached.step(), expected, what="refused")
    assert [plan.input_place for plan in attached.plans] == ["host", "device", "device", "device"]
    assert len(host.asked) == 2
    assert "1 instead of 3" in attached.reports[0]
    assert "1 of 3 inputs" in attached.reason


def test_offload_of_larger_packs_takes_a_larger_slab():
    attached = Attached(policy="offload", lengths=SMALL)
    attached.step()
    before = attached.stack.engine.slab.num_bytes
    large = make_batch(LARGE)
    expected = attached.expected(large)
    assert_equal(attached.step(large), expected, what="larger")
    assert attached.stack.engine.slab.num_bytes > before
    assert describe_use(attached.stack.engine)["num_kept"] == 0


def test_stepping_down_needs_less_and_ends_at_the_least():
    attached = Attached(vram_budget=1.6 * bytes_of("recompute"), host_budget=0).until_planned()
    expected = attached.expected()
    peaks = [attached.stack.plan.prediction.peak_bytes]
    while attached.checkpointing.step_down():
        peaks.append(attached.stack.plan.prediction.peak_bytes)
        assert "ran out of memory" in attached.reports[-1]
        assert_equal(attached.step(), expected, what=f"after {len(peaks)} notches")
    assert len(peaks) > 2
    assert all(after <= 0.9 * before for before, after in pairwise(peaks))
    # What cannot go lower still trains, and says what is in effect.
    assert_equal(attached.step(), expected, what="at the least")
    assert attached.plans == [RECOMPUTE] * NUM_LAYERS
    assert "predicted" not in attached.reason


def test_stepping_down_is_for_plans():
    assert not Attached(policy="recompute").checkpointing.step_down()
    assert not Attached(vram_budget=1000).checkpointing.step_down()


def test_a_fixed_policy_with_streamed_weights_has_no_smaller_plan():
    attached = Attached(adapted(), policy="recompute", weights="stream")
    attached.step()
    assert attached.stack.weights.streamed is not None
    assert not attached.checkpointing.can_step_down
    assert "mlp_tiles=8" in attached.checkpointing.remedy()


def _no_host_memory(streams):
    raise HostMemoryError("planted")


@pytest.mark.parametrize("move", [None, _no_host_memory])
def test_a_first_step_that_does_not_fit_is_measured_without_a_kept_layer(move):
    attached = Attached(adapted(), vram_budget=1000)
    expected = attached.expected()
    attached.step()
    assert KEEP in attached.plans
    assert attached.stack.can_stream
    attached.stack.weights.move = move
    assert attached.checkpointing.can_step_down
    assert attached.checkpointing.step_down()
    for _ in range(3):
        assert_equal(attached.step(), expected, what="measured without a kept layer")
        assert KEEP not in attached.plans or attached.stack.plan is not None
    assert attached.stack.plan is not None
    assert_equal(attached.step(), expected, what="planned")


def test_a_first_step_that_fits_nothing_else_runs_in_tiles():
    attached = Attached(vram_budget=1000, weights="resident")
    expected, layers = attached.expected(), decoder_layers(attached.model)
    attached.step()
    assert attached.checkpointing.step_down()
    attached.step()
    assert attached.stack.num_tiles == 1, "first it measures without a kept layer"
    assert attached.checkpointing.can_step_down
    assert attached.checkpointing.step_down()
    assert all("forward" in vars(layer.mlp) for layer in layers)
    for _ in range(4):
        assert_near(attached.step(), expected)
    assert attached.stack.plan is not None
    assert "feed-forward blocks in 8 tiles, because nothing else fits" in attached.reason
    # Tiles are not made a second time.
    attached.checkpointing.step_down()
    assert sum("in 8 tiles" in text for text in attached.reports) == 1
    attached.patcher.undo()
    assert not any("forward" in vars(layer.mlp) for layer in layers)


@pytest.mark.parametrize("case", ["number given", "planned", "longer packs after a plan", "no dense block"])
def test_nothing_else_gets_tiles(case):
    model = build_tiny("mixtral").train() if case == "no dense block" else None
    tiles = {"mlp_tiles": 1} if case == "number given" else {}
    attached = Attached(model, vram_budget=1000, weights="resident", **tiles)
    for _ in range(4 if "plan" in case else 1):
        attached.step()
    # Measured again, beside layers that may have been recorded.
    batch = make_batch((*LENGTHS, 50)) if "longer" in case else attached.batch
    attached.step(batch)
    while attached.checkpointing.step_down():
        attached.step(batch)
    assert attached.stack.num_tiles == 1


def test_a_device_that_is_out_of_memory_lowers_the_plan(monkeypatch):
    attached = Attached(vram_budget=bytes_of("keep"), host_budget=0)
    follow, failures = attached.stack.follow, []

    def fails_once(*args, **options):
        if not failures:
            failures.append(True)
            raise torch.OutOfMemoryError("planted")
        follow(*args, **options)

    monkeypatch.setattr(attached.stack, "follow", fails_once)
    attached.until_planned()
    assert any("less memory than planned for" in report for report in attached.reports)
    assert attached.plans != [KEEP] * NUM_LAYERS


def test_two_models_have_a_stack_each():
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.other = build_tiny("llama").train(), build_tiny("qwen3", num_hidden_layers=3).train()

    pair, batch = Pair(), make_batch(LENGTHS)
    expected = [kept_gradients(model, [batch], 1) for model in (pair.one, pair.other)]
    checkpointing, patcher = OffloadCheckpointing("auto", vram_budget=1000), ModelPatcher()
    install_packed_training(pair, patcher, checkpointing=checkpointing)
    assert [len(stack.segments) for stack in checkpointing.stacks] == [2, 3]
    for _ in range(5):
        pair.zero_grad(set_to_none=True)
        losses = [pair.one(**batch).loss, pair.other(**batch).loss]
        for loss in losses:
            loss.backward()
        for model, wanted in zip((pair.one, pair.other), expected):
            assert_equal(read_gradients(model), wanted, what="two models")
    assert all(stack.plan is not None for stack in checkpointing.stacks)
    assert checkpointing.status().reason.count(" layers kept") == 2
    names = {"activations (one)": "2 of 2 layers kept", "activations (other)": "3 of 3 layers kept"}
    for name, kept in names.items():
        assert kept in checkpointing.status(name).reason
    patcher.undo()
    assert not checkpointing.stacks
    for name, kept in names.items():
        assert kept in checkpointing.status(name).reason


def test_undoing_closes_the_engine_and_remembers_what_ran():
    attached = Attached(policy="offload")
    attached.step()
    engine = attached.stack.engine
    reason = attached.reason
    attached.patcher.undo()
    assert (engine.slab.num_bytes, engine.slots) == (0, [])
    assert attached.stack.engine is None
    assert attached.checkpointing.stacks == []
    assert attached.reason == reason
    attached.patcher.undo()


def test_a_description_at_each_stage():
    attached = Attached(vram_budget=1000)
    assert attached.reason == f"auto: the first steps recompute and are measured; {NUM_LAYERS} layers"
    attached.until_planned()
    assert f"{NUM_LAYERS} of {NUM_LAYERS} layers kept; predicted" in attached.reason


def test_unified_memory_refuses_to_offload(monkeypatch):
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(is_integrated=True, name="a small box")
    )
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a small box")
    attached = Attached(policy="offload")
    hidden = SimpleNamespace(shape=(1000,), numel=lambda: 1000, element_size=lambda: 2, device=torch.device("cuda"))
    with pytest.raises(OptionError, match=r"a small box shares its memory with the host.*recompute"):
        attached.stack.begin_forward(hidden)


def test_unified_memory_is_planned_without_the_host(monkeypatch):
    monkeypatch.setattr(
        planning_module, "measure_machine", lambda device: Machine("a small box", 0.0, 0.0, is_unified=True)
    )
    attached = Attached(vram_budget=1.5 * bytes_of("recompute"), host_budget=1).until_planned()
    assert attached.stack.engine is None
    assert "unified memory" in attached.stack.plan.notes[0]


class WeightsCount(measurement_module.Meter):
    """A device on which nothing but the weights of one model counts."""

    num_bytes = 0

    def allocated(self):
        return self.num_bytes


def streaming(monkeypatch, **options):
    """A model of adapters, and the least peak with all of its weights on the device, in GiB."""
    model = get_peft_model(
        build_tiny("llama", num_hidden_layers=NUM_LAYERS),
        LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False),
    ).train()
    monkeypatch.setattr(
        WeightsCount, "num_bytes", sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    )
    monkeypatch.setattr(measurement_module, "Meter", WeightsCount)
    return Attached(model, **{"host_budget": 1, **options})


@pytest.fixture(scope="module")
def resident():
    """The costs that are measured with all weights on the device."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planning_module, "measure_machine", lambda device: FAST)
        return streaming(patch, vram_budget=1000).until_planned().stack.cost


@pytest.fixture
def least(resident):
    """The least peak with all weights on the device, in GiB."""
    return peak_gib(resident, RECOMPUTE._replace(input_place="host"))


def test_weights_are_streamed_when_no_resident_plan_fits(monkeypatch, least):
    attached = streaming(monkeypatch, vram_budget=0.95 * least)
    expected = attached.expected()
    pointer = attached.stack.weights.streamed
    attached.until_planned()
    assert pointer is None
    assert attached.stack.weights.streamed.num_host_bytes > 0
    assert any(
        "frozen weights are streamed: with resident weights the lowest peak" in report for report in attached.reports
    )
    names = [status.name for status in attached.checkpointing.memory_statuses()]
    assert names == ["frozen weights", "input embedding", "output layer"]
    assert_equal(attached.step(), expected, what="streamed")
    cost, segments = attached.stack.cost, attached.stack.plan.segments
    embedding = attached.model.get_input_embeddings().weight
    assert cost.ends.embedding == cost.ends.head == embedding.numel() * embedding.element_size()
    resident = predict(cost._replace(ends=EndBytes()), segments, machine=FAST)
    assert resident.peak_bytes - predict(cost, segments, machine=FAST).peak_bytes == cost.ends.total
    before = {name: value.clone() for name, value in attached.model.state_dict().items()}
    attached.patcher.undo()
    assert all(torch.equal(value, before[name]) for name, value in attached.model.state_dict().items())


def as_streamed(plan):
    """The plan of another rank, which has the same segments and streams."""
    segments = tuple(segment._replace(is_streamed=True) for segment in plan.segments)
    return plan._replace(segments=segments, notes=("frozen weights are streamed: there",))


def as_resident(plan):
    return plan._replace(segments=tuple(segment._replace(is_streamed=False) for segment in plan.segments), notes=())


@pytest.mark.parametrize("is_streamed", [True, False])
def test_weights_are_streamed_as_the_agreed_plan_wants_it(monkeypatch, least, is_streamed):
    attached = streaming(
        monkeypatch,
        vram_budget=1000 if is_streamed else 0.95 * least,
        agree=as_streamed if is_streamed else as_resident,
    )
    expected = attached.expected()
    attached.until_planned()
    assert attached.asked[0].segments[0].is_streamed is not is_streamed
    assert (attached.stack.weights.streamed is not None) is is_streamed
    assert_equal(attached.step(), expected, what="agreed")


def refuse(error):
    def stream(*_, **__):
        raise error("planted: not here")

    return stream


@pytest.mark.parametrize("error", [HostMemoryError, UnsupportedModelError, OptionError])
def test_weights_that_cannot_go_stay_where_a_plan_fits_too(monkeypatch, error):
    attached = streaming(monkeypatch, vram_budget=1000, agree=as_streamed)
    attached.stack.weights.move = refuse(error)
    expected = attached.expected()
    attached.until_planned()
    assert attached.stack.weights.streamed is None
    assert not any(segment.is_streamed for segment in attached.stack.plan.segments)
    assert any("stay on the device, because a plan fits: planted: not here" in report for report in attached.reports)
    assert_equal(attached.step(), expected, what="resident")


@pytest.mark.parametrize("error", [HostMemoryError, UnsupportedModelError])
def test_weights_that_cannot_go_and_do_not_fit_are_an_error(monkeypatch, least, error):
    attached = streaming(monkeypatch, vram_budget=0.95 * least)
    attached.stack.weights.move = refuse(error)
    with pytest.raises(error, match="planted"):
        attached.until_planned()


def test_weights_go_to_the_host_all_or_none(monkeypatch):
    attached = streaming(monkeypatch, vram_budget=1000)
    before = {name: value.clone() for name, value in attached.model.state_dict().items()}
    with (
        mock.patch.object(packed_module, "install_host_embedding", refuse(HostMemoryError)),
        pytest.raises(HostMemoryError),
    ):
        attached.stack._stream(torch.device("cpu"))
    assert attached.stack.weights.streamed is None
    assert all(torch.equal(value, before[name]) for name, value in attached.model.state_dict().items())
    assert all(parameter.untyped_storage().nbytes() > 0 for parameter in attached.model.parameters())
    attached.stack._stream(torch.device("cpu"))
    assert attached.stack.weights.streamed is not None


def test_a_host_that_refuses_keeps_the_weights_that_it_has(monkeypatch):
    attached = streaming(monkeypatch, vram_budget=1000, agree=as_streamed)
    real, budgets = attached.stack.follow, []

    def follow(segments, *, device, cost=None):
        budgets.append(attached.stack.weights.host_bytes)
        if len(budgets) < 3:
            raise HostMemoryError("planted: no more pinned memory")
        return real(segments, device=device, cost=cost)

    monkeypatch.setattr(attached.stack, "follow", follow)
    attached.until_planned()
    assert budgets[0] > 0
    assert all(segment.is_streamed for segment in attached.stack.plan.segments)


def test_longer_packs_are_planned_for_with_the_weights_on_the_host(monkeypatch, resident):
    num_bytes = sum(segment.weight_bytes for segment in resident.segments) + resident.ends.total
    attached = streaming(monkeypatch, vram_budget=1000, host_budget="auto", agree=as_streamed, lengths=SMALL)
    # Half of a host with room for a fifth more than the weights twice, and of what they leave of it.
    monkeypatch.setattr(
        planning_module, "auto_host_bytes", lambda: (int(2.2 * num_bytes) - attached.stack.weights.host_bytes) // 2
    )
    attached.until_planned()
    first = attached.stack.plan
    for _ in range(4):
        attached.step(make_batch(LARGE))
    assert attached.stack.plan is not first
    assert all(segment.is_streamed for segment in attached.stack.plan.segments)


def test_ranks_of_one_host_share_its_memory(monkeypatch):
    monkeypatch.setattr(planning_module, "auto_host_bytes", lambda: 80 * GIB)
    attached = streaming(monkeypatch, vram_budget=1000, host_budget="auto", weights="stream")
    attached.knows(num_local_ranks=8)
    assert attached.stack._host_budget() == 10 * GIB
    attached.checkpointing.place(torch.device("cpu"))
    embedding = attached.model.get_input_embeddings().weight
    num_bytes = attached.stack.weights.streamed.num_host_bytes
    # Each tensor begins at a border.
    assert num_bytes >= sum(attached.stack.weights.layer_bytes) > 0
    # The output layer has the size of the embedding.
    assert attached.stack._host_budget() == 10 * GIB + num_bytes + 2 * embedding.numel() * embedding.element_size()
    assert Attached(policy="auto", host_budget=24).stack._host_budget() == 24 * GIB


def test_the_output_layer_comes_in_parts_while_the_last_layers_run(monkeypatch):
    attached = streaming(monkeypatch, vram_budget=1000, weights="stream").until_planned()
    matrix = vars(attached.model.get_output_embeddings())[host_ends._MATRIX_ATTRIBUTE]
    happened, copied, copy_in = [], [], matrix._streams.copy_in

    def record(target, source, *, after):
        if source.untyped_storage().data_ptr() == matrix.weight_VD.untyped_storage().data_ptr():
            happened.append("copy")
            copied.append(len(source))
        return copy_in(target, source, after=after)

    monkeypatch.setattr(matrix._streams, "copy_in", record)
    for number, layer in enumerate(decoder_layers(attached.model)[1:], 1):
        layer.register_forward_hook(lambda *_, number=number: happened.append(number))
    expected = ["copy", 1, "copy", 2, "copy", 3]
    for _ in range(2):
        loss = attached.model(**attached.batch).loss
        assert happened == expected
        assert sum(copied) == len(matrix.weight_VD)
        assert max(copied) - min(copied) < len(copied)
        loss.backward()
        assert "copy" not in happened[len(expected) :]
        happened.clear()
        copied.clear()
    # A forward whose head does not run leaves no copy on the device.
    attached.model.get_decoder()(**attached.batch).last_hidden_state.sum().backward()
    assert happened[: len(expected)] == expected
    assert matrix._copy is None


def test_an_embedding_that_stays_is_planned_for(monkeypatch, resident, least):
    attached = streaming(monkeypatch, vram_budget=0.95 * least)
    attached.stack.weights.move = functools.partial(_stays, attached.stack.weights.move)
    attached.until_planned()
    assert resident.ends.embedding > 0
    assert attached.stack.cost.ends == EndBytes(0, resident.ends.head)
    assert attached.stack.plan.prediction == predict(attached.stack.cost, attached.stack.plan.segments, machine=FAST)


def _stays(stream, streams):
    """Weights that are streamed, and an embedding of which only this shows that it cannot go."""
    streamed = stream(streams)
    return streamed._replace(ends=streamed.ends._replace(embedding=0))


def test_weights_are_streamed_from_the_start_where_asked_count_as_if_resident(monkeypatch, resident):
    asked = streaming(monkeypatch, vram_budget=1000, weights="stream").until_planned().stack
    assert asked.cost.ends == resident.ends
    assert min(resident.ends) > 0
    slots = asked.weights.streamed.num_slot_bytes
    # The device of these tests never sees the bytes go: they are added a second time.
    assert asked.cost.base_bytes - resident.base_bytes == sum(asked.weights.layer_bytes) - slots + asked.cost.ends.total


def test_resident_weights_stay_where_they_are(monkeypatch):
    attached = streaming(monkeypatch, vram_budget=1e-6, weights="resident")
    with pytest.raises(OptionError, match=r'weights="stream"'):
        attached.until_planned()
    assert attached.stack.weights.streamed is None


def test_pieces_of_weights_cannot_be_streamed(monkeypatch):
    """Under FSDP2 the least budget is an error of the planner, which names what would do, not one of streaming."""
    attached = streaming(monkeypatch, vram_budget=1e-6)
    for parameter in attached.model.parameters():
        parameter.device_mesh = "a mesh"
    again = Attached(attached.model, policy="recompute")
    assert set(again.stack.weights.layer_bytes) == {0}


def test_weights_are_streamed_from_the_start_where_asked():
    attached = Attached(adapted(), policy="recompute", weights="stream")
    expected = attached.expected()
    attached.checkpointing.place(torch.device("cpu"))
    assert attached.stack.weights.streamed is not None
    assert_equal(attached.step(), expected, what="streamed")
    with pytest.raises(OptionError, match="policy 'keep'"):
        OffloadCheckpointing("keep", weights="stream")


def test_layers_of_nobody_cannot_be_streamed():
    checkpointing = OffloadCheckpointing("recompute", weights="stream")
    checkpointing.attach([nn.Linear(4, 4)], ModelPatcher())
    with pytest.raises(OptionError, match="WeightStreamer"):
        checkpointing.place(torch.device("cpu"))


def test_a_plan_of_another_model_is_refused():
    attached = Attached(policy="offload")
    with pytest.raises(OptionError, match=f"has 2 segments, the model has {NUM_LAYERS}"):
        attached.stack.follow([KEEP, KEEP], device=torch.device("cpu"))


def test_an_announced_pack_length_is_planned_for_from_the_start():
    attached = Attached(vram_budget=1000)
    attached.knows(longest_pack=300)
    attached.until_planned()
    assert attached.stack.cost.segments[0].input_bytes == 300 * 32 * 4
    reports = len(attached.reports)
    attached.stack.begin_forward(torch.empty(1, 299, 32))
    assert len(attached.reports) == reports
    attached.stack.begin_forward(torch.empty(1, 301, 32))
    assert "packs grew" in attached.reports[reports]
