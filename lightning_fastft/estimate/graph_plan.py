"""Plan a metered step as a run plans it: layers run from CUDA graphs only if the plan allows it and memory suffices."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning_fastft.estimate.costs import MeteredStep, plan_on
from lightning_fastft.planner.prediction import predict
from lightning_fastft.planner.step import Plan, StepCost, gib

if TYPE_CHECKING:
    from lightning_fastft.estimate.machines import Gpu


def plan_step(
    step: MeteredStep, *, gpu: Gpu, vram_budget_bytes: int | None, host_budget_bytes: int, **options: Any
) -> tuple[StepCost, Plan]:
    """Return the costs of a step on a GPU and the plan that a run makes for it.

    A run plans without CUDA graphs. It records its layers afterwards, if the plan copies nothing to the host and
    streams no weights; with ``cuda_graphs="auto"`` also only if training is launch-bound and the budget has room for
    the recordings. Where layers run without graphs, costs and plan are those without, and a note has the reason.

    Args:
        step: From ``meter_step``.
        gpu: The GPU.
        vram_budget_bytes: As in ``plan_on``.
        host_budget_bytes: As in ``plan_on``.
        options: Policy and other options of ``plan_on``.

    Raises:
        OptionError: As ``plan_on``.

    Source:
        own
    """
    eager, graphed = step._replace(is_graphed=False).costs_on(gpu), step.costs_on(gpu)
    plan = plan_on(gpu, eager, vram_budget_bytes=vram_budget_bytes, host_budget_bytes=host_budget_bytes, **options)
    if graphed == eager:
        return eager, plan
    if _copies_to_host(plan):
        return eager, _with_note(plan, "the plan copies activations or weights to or from the host")
    prediction = predict(graphed, plan.segments, machine=gpu.machine)
    if step.is_graphed == "auto" and prediction.peak_bytes > (vram_budget_bytes or gpu.memory_bytes):
        return eager, _with_note(plan, f"with their recordings the peak would be {gib(prediction.peak_bytes)}")
    return graphed, plan._replace(prediction=prediction)


def _copies_to_host(plan: Plan) -> bool:
    """Return whether a plan copies activations to the host or streams weights; recorded layers do neither."""
    return any(
        segment.is_streamed or segment.input_place == "host" or "host" in dict(segment.values).values()
        for segment in plan.segments
    )


def _with_note(plan: Plan, reason: str) -> Plan:
    return plan._replace(notes=(*plan.notes, f"layers run without CUDA graphs: {reason}."))
