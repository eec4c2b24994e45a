"""A budget of device memory on a fake allocator: the plan of the first steps, room for reserved but unallocated memory,
and new plans at the limit.
"""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from lightning_fastft.activations import measurement as measurement_module
from lightning_fastft.activations import planning as planning_module
from lightning_fastft.activations.budgets import SEGMENT_BYTES
from lightning_fastft.activations.probe import Meter
from lightning_fastft.activations.segments import RECOMPUTE
from lightning_fastft.activations.vram_budget import (
    SAVED_ATTRIBUTE,
    BudgetWatch,
    HeadSizes,
    budget_for,
    check_feasible,
    choose_first_plan,
    least_peak_bytes,
    predict_cost,
)
from lightning_fastft.core.errors import HostMemoryError, OptionError
from lightning_fastft.planner import plan as planner
from lightning_fastft.planner.step import EndBytes, uniform_plan
from tests.activations.test_stack import GIB, Attached, fast_machine  # noqa: F401
from tests.planner.plan_trials import assert_equal, assert_near
from tests.support.tiny_models import build_tiny

MIB = 2**20
T, D, F = 128, 32, 96
HEAD = HeadSizes(1000)


class Allocator(Meter):
    """An allocator whose counts a test sets."""

    base_bytes = gap_bytes = retries = 0
    freed = 0

    def __init__(self, device):
        super().__init__(device)
        self.is_counted = True

    def allocated(self):
        return self.base_bytes

    def start_peak(self):
        return self.base_bytes

    def peak(self):
        return self.base_bytes

    def reserved(self):
        return self.base_bytes + self.gap_bytes

    def num_retries(self):
        return Allocator.retries

    def free_cache(self):
        Allocator.freed += 1


@pytest.fixture(autouse=True)
def allocator(monkeypatch):
    for name in ("base_bytes", "gap_bytes", "retries", "freed"):
        monkeypatch.setattr(Allocator, name, 0)
    monkeypatch.setattr(measurement_module, "Meter", Allocator)
    return Allocator


def adapted(**sizes):
    """A model whose frozen weights can be streamed; 8 layers."""
    lora = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    return get_peft_model(build_tiny("llama", **({"num_hidden_layers": 8} | sizes)), lora).train()


def cost_of(*, base=10 * MIB, weights=2 * MIB, head=HEAD, mlp_tiles=1, saved=None):
    layers = [nn.ModuleDict({"mlp": nn.Sequential(nn.Linear(D, F), nn.Linear(F, D))}) for _ in range(6)]
    for layer in layers if saved else ():
        setattr(layer, SAVED_ATTRIBUTE, saved)
    return predict_cost(
        layers,
        torch.empty(1, T, D),
        longest_bytes=8 * T * D * 4,
        base_bytes=base,
        head=head,
        weight_bytes=[weights] * 6,
        ends=EndBytes(MIB),
        mlp_tiles=mlp_tiles,
    )


def choose(cost, budget, *, host=GIB, streaming=(False, True)):
    return choose_first_plan(
        cost, counted={5}, vram_budget_bytes=budget, host_budget_bytes=host, buffers=2, streaming=streaming
    )


def test_predicted_memory_is_that_of_the_shapes():
    cost = cost_of()
    gradients = 6 * (2 * D * F + D + F) * 4
    assert cost.base_bytes == 10 * MIB + gradients
    segment = cost.segments[0]
    assert segment.input_bytes == 8 * T * D * 4
    assert segment.saved_bytes == 3 * segment.backward_peak_bytes
    assert segment.backward_peak_bytes == 8 * T * (F + D + 4 * D) * 4
    assert cost.head_peak_bytes == 8 * T * D * 20 + 8 * T * 1000 * 4
    # One tile of the feed-forward block at a time.
    assert cost_of(mlp_tiles=4).segments[0].backward_peak_bytes == 8 * T * ((F + D) // 4 + 4 * D) * 4
    # No more than one chunk of logits.
    assert cost_of(head=HeadSizes(2000)).head_peak_bytes - cost.head_peak_bytes == 8 * T * 1000 * 4
    # Layers that save less say so.
    lean = cost_of(saved=1.5)
    assert lean.segments[0].saved_bytes == 1.5 * segment.backward_peak_bytes
    assert lean.segments[0].backward_peak_bytes == segment.backward_peak_bytes


def test_gradients_of_trained_weights_outside_of_the_layers_count_until_they_are_there():
    cost = cost_of()
    weight = nn.Parameter(torch.zeros(1000, D))
    trained = cost_of(head=HeadSizes(1000, (weight,), sum_bytes=3 * MIB))
    assert trained.base_bytes - cost.base_bytes == 1000 * D * 4
    assert trained.head_peak_bytes - cost.head_peak_bytes == 3 * MIB
    weight.grad = torch.zeros_like(weight)
    assert cost_of(head=HeadSizes(1000, (weight,))).base_bytes == cost.base_bytes


def test_stacks_of_experts_count_for_the_experts_of_a_token_and_adapters_do_not_count():
    layer, other = nn.Module(), nn.Module()
    layer.experts = nn.Parameter(torch.empty(64, F, D), requires_grad=False)
    other.lora_A = nn.Linear(D, 10**4)
    sizes = [
        predict_cost(
            [found], torch.empty(1, 1, D), longest_bytes=D * 4, base_bytes=0, head=HeadSizes(), weight_bytes=[0],
            ends=EndBytes(),
        ).segments[0].backward_peak_bytes
        for found in (layer, other)
    ]  # fmt: skip
    assert sizes == [(8 * F + 4 * D) * 4, 4 * D * 4]


def test_first_steps_take_the_first_plan_that_fits():
    cost = cost_of()
    ample = choose(cost, GIB)
    assert (ample.segments, ample.is_streamed) == (uniform_plan(6, "recompute"), False)
    hosted = choose(cost, ample.peak_bytes - 1)
    assert (hosted.segments, hosted.is_streamed) == (uniform_plan(6, "offload"), False)
    assert hosted.peak_bytes < ample.peak_bytes
    streamed = choose(cost, hosted.peak_bytes - 1)
    assert streamed.is_streamed
    # Layers, the embedding and the three slots.
    assert hosted.peak_bytes - choose(cost, 0).peak_bytes == (6 - 3) * 2 * MIB + MIB
    assert "the host and streamed weights" in choose(cost, 0).describe()


def test_first_steps_use_no_host_memory_beyond_its_budget():
    cost = cost_of()
    assert choose(cost, 0, host=0).segments == uniform_plan(6, "recompute")
    assert not choose(cost, 0, host=12 * MIB).is_streamed
    assert choose(cost, 0, streaming=(True,), host=0).is_streamed


def test_least_peak_is_that_of_the_leanest_plan_without_a_kept_layer():
    cost = cost_of()
    least = least_peak_bytes(cost, host_budget_bytes=GIB, buffers=2, streaming=(False, True))
    assert least < choose(cost, 0).peak_bytes
    assert least < least_peak_bytes(cost, host_budget_bytes=GIB, buffers=2, streaming=(False,))


def test_a_budget_below_what_any_backward_holds_is_refused_with_the_memory_of_the_leanest_plan():
    layers = [nn.ModuleDict({"up": nn.Linear(D, F), "down": nn.Linear(F, D)}) for _ in range(6)]
    # Weights that stay, of which a slot for each of three layers, one layer's input, and two staging slots for inputs.
    cost = cost_of(base=64 * MIB)
    input_bytes = cost.segments[0].input_bytes
    certain = cost.base_bytes - 6 * 2 * MIB - MIB + 3 * 2 * MIB + 3 * input_bytes + 8 * T * 4 * (F + D)
    options = {"column_bytes": 8 * T * 4, "host_budget_bytes": GIB, "buffers": 2, "streaming": (False, True)}
    check_feasible(cost, layers, vram_budget_bytes=certain, **options)
    least = least_peak_bytes(cost, host_budget_bytes=GIB, buffers=2, streaming=(False, True))
    assert least > certain
    with pytest.raises(OptionError, match=rf"vram_budget is 0\.\d\d GiB.* about {budget_for(least) / GIB:.2f} GiB"):
        check_feasible(cost, layers, vram_budget_bytes=certain - 1, **options)
    # Tiles save only a part of the outputs.
    check_feasible(cost, layers, vram_budget_bytes=certain - 1, **(options | {"column_bytes": 2 * T * 4}))


def test_an_infeasible_budget_is_refused_before_the_first_layer_runs(allocator):
    allocator.base_bytes = 10 * MIB
    attached = Attached(adapted(), vram_budget=1e-3, host_budget=1)
    ran = []
    attached.model.get_submodule("base_model.model.model.layers.0.mlp").register_forward_hook(lambda *_: ran.append(1))
    with pytest.raises(OptionError, match="leanest plan"):
        attached.step()
    assert not ran
    assert attached.stack.weights.streamed is None


@pytest.mark.parametrize("mlp_tiles", [1, "auto"])
def test_a_budget_that_only_tiles_can_keep(allocator, mlp_tiles):
    allocator.base_bytes = 10 * MIB
    model = build_tiny("llama", num_hidden_layers=2, intermediate_size=8192).train()
    attached = Attached(model, vram_budget=20 / 1024, host_budget=0, weights="resident", mlp_tiles=mlp_tiles)
    if mlp_tiles == 1:
        with pytest.raises(OptionError, match="leanest plan"):
            attached.step()
        return
    expected = attached.expected()
    assert_near(attached.step(), expected)
    assert attached.stack.num_tiles == 8


@pytest.mark.parametrize(
    ("share", "inner", "mlp_tiles", "num_tiles", "is_streamed"),
    [
        (0.9, 8192, "auto", 8, False),
        (0.9, 8192, 1, 1, True),
        (1.001, 8192, "auto", 1, True),
        (0.6, 64, "auto", 1, True),
    ],
)
def test_tiles_come_before_steps_that_are_not_predicted_to_fit(
    allocator, share, inner, mlp_tiles, num_tiles, is_streamed
):
    """share is the budget's, of the leanest plan without tiles, which streams weights. In tiles they need not move; a
    narrow block does not fit in tiles either.
    """
    allocator.base_bytes = 64 * MIB if inner == 8192 else 0
    wide = {"num_hidden_layers": 4, "intermediate_size": inner}
    probe = Attached(adapted(**wide), vram_budget=1, host_budget=1)
    probe.step()
    leanest = choose_first_plan(
        probe.stack._predicted,
        counted=set(),
        vram_budget_bytes=0,
        host_budget_bytes=GIB,
        buffers=2,
        streaming=(False, True),
    )
    assert leanest.is_streamed
    budget = share * leanest.peak_bytes / GIB
    attached = Attached(adapted(**wide), vram_budget=budget, host_budget=1, mlp_tiles=mlp_tiles)
    expected = attached.expected()
    assert_near(attached.step(), expected)
    assert attached.stack.num_tiles == num_tiles
    assert (attached.stack.weights.streamed is not None) == is_streamed
    assert (attached.stack._predicted == probe.stack._predicted) == (num_tiles == 1)


def test_a_watch_lowers_the_memory_of_plans_at_the_limit_and_ends():
    memory, watch = Allocator(torch.device("cpu")), BudgetWatch(100)
    Allocator.retries = 5
    assert watch.lowered_bytes(1000, memory) is None, "the first step frees what came before it"
    Allocator.retries = 6
    assert watch.lowered_bytes(1000, memory) == 950
    assert [watch.lowered_bytes(1000, memory) for _ in range(6)] == [None] * 6
    Allocator.retries = 7
    assert watch.lowered_bytes(1000, memory) is None, "later steps are not watched"


def test_reserved_memory_above_the_budget_is_at_the_limit_too_and_three_corrections_are_all():
    memory, watch = Allocator(torch.device("cpu")), BudgetWatch(100)
    Allocator.gap_bytes = 101
    found = [watch.lowered_bytes(1000, memory) for _ in range(10)]
    assert found == [None, 950, None, 950, None, 950, None, None, None, None]


def test_a_small_budget_streams_and_offloads_from_the_first_step_on():
    model = adapted()
    attached = Attached(model, vram_budget=1e-4, host_budget=1)
    expected = attached.expected()
    assert_equal(attached.step(), expected, what="the first step")
    assert attached.stack.weights.streamed is not None
    assert [segment.plan.input_place for segment in attached.stack.segments] == ["host"] * 7 + ["device"]
    assert any("inputs on the host and streamed weights: predicted at most" in text for text in attached.reports)
    assert_equal(attached.step(), expected, what="the second step")
    assert attached.stack.segments[-1].plan == RECOMPUTE


def test_an_ample_budget_recomputes_from_inputs_on_the_device():
    attached = Attached(vram_budget=1000)
    attached.step()
    assert attached.stack.engine is None
    assert any("inputs on the device: predicted" in text for text in attached.reports)
    assert "the leanest plan takes about" in attached.checkpointing.describe_budget()
    # Without a budget nothing is predicted.
    free = Attached()
    free.step()
    assert not free.reports
    assert "leanest" not in free.checkpointing.describe_budget()


def test_weights_that_cannot_be_streamed_leave_the_rest_of_the_plan(monkeypatch):
    attached = Attached(adapted(), vram_budget=1.2e-4, host_budget=1)

    def refuse(streams):
        raise HostMemoryError("planted")

    attached.stack.weights.move = refuse
    attached.step()
    assert attached.stack.weights.streamed is None
    assert attached.stack.engine is not None
    assert any("cannot be streamed: planted" in text for text in attached.reports)


def test_the_plan_leaves_what_the_allocator_reserves_beyond_what_is_allocated(allocator, monkeypatch):
    capacities = []

    def make_plan(cost, *, vram_budget_bytes, **options):
        capacities.append(vram_budget_bytes)
        return planner.make_plan(cost, vram_budget_bytes=vram_budget_bytes, **options)

    monkeypatch.setattr(planning_module, "make_plan", make_plan)
    allocator.base_bytes, allocator.gap_bytes = 100 * MIB, 200 * MIB
    attached = Attached(vram_budget=1, host_budget=0).until_planned()
    # The second forward frees memory that loading left in the cache.
    assert (capacities, allocator.freed) == ([int(0.95 * (GIB - 200 * MIB))], 1)
    capacities.clear()
    # The budget that is named for the leanest plan has room for its margin too.
    least = attached.stack.least_bytes
    Attached(vram_budget=least / GIB, host_budget=0).until_planned()
    assert capacities == [int(0.95 * (least - 200 * MIB))]
    capacities.clear()
    bare = int(0.95 * (least - SEGMENT_BYTES - 200 * MIB)) + 200 * MIB
    Attached(vram_budget=bare / GIB, host_budget=0).until_planned()
    assert capacities == [int(0.95 * (bare - 200 * MIB)), bare - 200 * MIB]
    capacities.clear()
    allocator.gap_bytes = 1000 * MIB
    attached = Attached(vram_budget=1, host_budget=0).until_planned()
    assert capacities == [int(0.95 * 24 * MIB), 24 * MIB, GIB]
    assert any("no plan leaves room for the 0.98 GiB" in text for text in attached.reports)


def test_a_plan_at_the_limit_is_made_again_with_the_same_gradients(allocator):
    attached = Attached(vram_budget=1, host_budget=1)
    expected = attached.expected()
    attached.until_planned()
    before = attached.stack.plan.prediction.peak_bytes
    for _ in range(3):
        allocator.retries += 1
        assert_equal(attached.step(), expected, what="at the limit")
    assert attached.stack.plan.prediction.peak_bytes <= 0.95 * before
    assert any("steps reached the budget; planned again" in text for text in attached.reports)


def test_ranks_that_plan_together_do_not_plan_again_alone(allocator):
    attached = Attached(vram_budget=1, host_budget=1)
    attached.knows(plans_together=True)
    plan = attached.until_planned().stack.plan
    for _ in range(3):
        allocator.retries += 1
        attached.step()
    assert attached.stack.plan is plan


def test_the_staging_slots_of_the_first_steps_are_no_part_of_the_plan(allocator):
    attached = Attached(adapted(), vram_budget=1e-4, host_budget=1)
    attached.step()
    staging = sum(slot.num_bytes for slot in attached.stack.engine.slots)
    assert staging > 0
    allocator.base_bytes = 10 * MIB
    with pytest.raises(Exception, match="No plan fits"):
        attached.until_planned()
    cost, absent = attached.stack.cost, attached.stack.weights.absent_bytes
    assert cost.base_bytes == 10 * MIB - cost.segments[0].input_bytes - staging + absent


def test_a_budget_without_a_cap_gives_the_old_advice():
    attached = Attached(vram_budget=1000).until_planned()
    assert attached.checkpointing.advice().endswith("vram_budget=0.0)")
