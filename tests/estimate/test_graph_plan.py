"""Plans of steps whose layers may run from CUDA graphs are those that a run makes."""

import pytest

from lightning_fastft.estimate.costs import meter_step, plan_on
from lightning_fastft.estimate.graph_plan import plan_step
from lightning_fastft.estimate.machines import find_gpu
from lightning_fastft.estimate.meta_model import Swaps
from lightning_fastft.planner.prediction import predict
from lightning_fastft.planner.step import uniform_plan
from tests.support.sizes import sizes

H200 = find_gpu("H200")
# The host is slower than the device in layers of this size.
CONFIG = sizes(model_type="llama", vocab=256, width=128, inner=512, layers=6, heads=4, key_heads=2)
HOST_BYTES = 2**30


@pytest.fixture(scope="module")
def step():
    """A launch-bound step of LoRA."""
    return meter_step(CONFIG, num_tokens=8192, mean_document_tokens=1024, lora=4, swaps=Swaps(is_graphed="auto"))


def ends(step):
    """Return the peaks of recomputing and keeping all, in bytes: without graphs and with them."""
    eager, graphed = step._replace(is_graphed=False).costs_on(H200), step.costs_on(H200)
    return [
        [predict(cost, uniform_plan(6, kind), machine=H200.machine).peak_bytes for kind in ("recompute", "keep")]
        for cost in (eager, graphed)
    ]


def plan(step, vram_bytes, *, host_bytes=HOST_BYTES):
    return plan_step(step, gpu=H200, vram_budget_bytes=vram_bytes, host_budget_bytes=host_bytes)


def test_a_plan_that_offloads_is_planned_without_graphs(step):
    (least, _), (least_graphed, _) = ends(step)
    budget = least
    assert budget < least_graphed, "graphs take memory"
    cost, found = plan(step, budget)
    eager = step._replace(is_graphed=False).costs_on(H200)
    expected = plan_on(H200, eager, vram_budget_bytes=budget, host_budget_bytes=HOST_BYTES)
    assert cost == eager
    assert found.segments == expected.segments
    assert found.prediction == expected.prediction
    assert any("without CUDA graphs" in note and "host" in note for note in found.notes)


def test_a_plan_with_room_for_recordings_runs_from_graphs(step):
    _, (_, most) = ends(step)
    cost, found = plan(step, 2 * most)
    assert cost == step.costs_on(H200)
    assert found.prediction.peak_bytes == most
    assert not found.notes


def test_auto_needs_room_for_recordings_and_true_does_not(step):
    (_, most), (_, most_graphed) = ends(step)
    budget = (most + most_graphed) // 2
    assert budget * 0.95 > most, "all activations fit without graphs"
    cost, found = plan(step, budget)
    assert cost != step.costs_on(H200)
    assert any("recordings" in note for note in found.notes)
    cost, found = plan(step._replace(is_graphed=True), budget)
    assert cost == step.costs_on(H200)
    assert found.prediction.peak_bytes == most_graphed


def test_without_graphs_nothing_is_noted(step):
    (least, _), _ = ends(step)
    _, found = plan(step._replace(is_graphed=False), least)
    assert not any("graphs" in note for note in found.notes)
