"""The table of ``fastft plan --gpus``: predicted speed and memory of every strategy on a cluster."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from lightning_fastft.core.errors import OptionError
from lightning_fastft.estimate.clusters import Cluster
from lightning_fastft.estimate.costs import model_costs, plan_on
from lightning_fastft.estimate.layouts import (
    Forecast,
    Layout,
    forecast,
    keeps_fp8,
    num_shards,
    possible_layouts,
    rank_cost,
    scale_times,
)
from lightning_fastft.estimate.meta_model import Swaps, build_on_meta
from lightning_fastft.estimate.model_size import ModelSize, measure_model
from lightning_fastft.hf.loading.source import ModelSource
from lightning_fastft.hf.sharding.units import AdapterPlacement
from lightning_fastft.planner.plan import check_streaming
from lightning_fastft.planner.prediction import predict
from lightning_fastft.planner.step import Plan, StepCost, uniform_plan

_GIB = 2**30


class LayoutPlan(NamedTuple):
    """A layout with its prediction.

    Args:
        layout: How the work is distributed.
        num_tokens: Tokens of an optimizer step over all GPUs.
        peak_bytes: Peak memory of a GPU; if nothing fits, the smallest peak that was found.
        forecast: Predicted step; None if nothing fits.
        gathers_fp8: Whether frozen weights are gathered in e4m3.
    """

    layout: Layout
    num_tokens: int
    peak_bytes: int
    forecast: Forecast | None
    gathers_fp8: bool = False

    @property
    def name(self) -> str:
        """Name of the layout, and the dtype in which frozen weights are gathered if it is not that of the model."""
        return self.layout.name + (", gathered in e4m3" if self.gathers_fp8 else "")

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of all GPUs; 0 if nothing fits."""
        return 0.0 if self.forecast is None else self.num_tokens / self.forecast.step_ms * 1e3


def plan_layouts(
    cluster: Cluster,
    *,
    source: ModelSource,
    options: dict[str, Any],
    num_tokens: int,
    num_micro: int,
    planning: Mapping[str, Any],
    step_ms: float | None,
    adapters: AdapterPlacement,
) -> list[LayoutPlan]:
    """Return the prediction of every layout that a cluster allows.

    options are those of ``model_costs``, planning those of ``plan_on``. step_ms is the measured time of one pack on one
    GPU, which scales the estimated times of compute. adapters is the option of ``FastFTFSDPStrategy``.

    Raises:
        OptionError: step_ms is given and the run does not fit one GPU.

    Cost:
        Some seconds for each number of tokens per GPU.
    """
    swaps: Swaps = options["swaps"]

    @functools.cache
    def measure(rank_tokens: int, *, is_fp8: bool) -> tuple[StepCost, ModelSize]:
        model = build_on_meta(source, dtype=options["dtype"])
        own = {**options, "swaps": swaps._replace(is_fp8=is_fp8)}
        cost = model_costs(model, num_tokens=rank_tokens, machine=cluster.gpu, **own)
        return cost, measure_model(model, cost, is_fp8=is_fp8, adapters=adapters)

    def make_plan(cost: StepCost) -> Plan | None:
        try:
            return plan_on(cluster.gpu, cost, **planning)
        except OptionError:
            return None

    whole, one = measure(num_tokens, is_fp8=swaps.is_fp8)
    weights = planning.get("weights", "auto")
    if weights == "stream":
        check_streaming(whole, cluster.gpu.machine, planning["host_budget_bytes"])
    factor = 1.0 if step_ms is None else step_ms / _predict_step_ms(make_plan(whole))
    found = []
    for layout in _layouts_with(weights, cluster, one):
        rank_tokens = -(-num_tokens // layout.context)
        cost, size = measure(rank_tokens, is_fp8=swaps.is_fp8 and keeps_fp8(layout, cluster, one))
        cost = rank_cost(scale_times(cost, factor), layout, cluster, size, num_tokens=rank_tokens)
        gathers_fp8 = size.gathers_fp8 and num_shards(layout, cluster) > 1
        total = num_tokens * (cluster.num_gpus // layout.context) * num_micro
        plan = make_plan(cost)
        if plan is None:
            leanest = uniform_plan(len(cost.segments), "recompute")
            leanest = tuple(segment._replace(is_streamed=weights == "stream") for segment in leanest)
            least = predict(cost, leanest, machine=cluster.gpu.machine)
            found.append(LayoutPlan(layout, total, least.peak_bytes, None, gathers_fp8))
            continue
        step = forecast(
            layout,
            cluster,
            size,
            cost=cost,
            segments=plan.segments,
            prediction=plan.prediction,
            num_tokens=rank_tokens,
            num_micro=num_micro,
        )
        found.append(LayoutPlan(layout, total, plan.prediction.peak_bytes, step, gathers_fp8))
    return found


def _layouts_with(weights: str, cluster: Cluster, model: ModelSize) -> list[Layout]:
    """Return the layouts of a run with the option ``weights`` of ``OffloadCheckpointing``."""
    layouts = list(possible_layouts(cluster, model))
    if weights == "stream":
        # A run refuses to stream sharded weights.
        return [layout for layout in layouts if num_shards(layout, cluster) == 1]
    if weights == "resident":
        layouts = [layout._replace(is_resident=num_shards(layout, cluster) > 1) for layout in layouts]
    return list(dict.fromkeys(layouts))


def _predict_step_ms(plan: Plan | None) -> float:
    """Return the time of a pack on one GPU; refuse None, the plan of a run that does not fit there."""
    if plan is None:
        raise OptionError(
            "--step-ms is the time of a pack on one GPU, where this run does not fit. Remove it, or give a model that "
            "fits."
        )
    return plan.prediction.step_ms


def render_layouts(cluster: Cluster, plans: Sequence[LayoutPlan]) -> str:
    """Return the table, with the fastest layout marked and the reason of each."""
    best = max(plans, key=lambda plan: plan.tokens_per_s)
    width = max(len(plan.name) for plan in plans)
    links = f"{cluster.node_link} {cluster.node_bytes_per_s / 1e9:,.0f} GB/s per GPU"
    if cluster.num_nodes > 1:
        links += f", {cluster.network} {cluster.network_bytes_per_s / 1e9:,.1f} GB/s per node"
    lines = [
        f"{cluster.num_gpus} x {cluster.gpu.name}, {cluster.gpus_per_node} per node: {links} (published, each way)",
        "",
        f"  {'strategy':<{width}}  {'tokens/s':>11}  {'step':>10}  {'tokens/step':>12}  {'per GPU':>9}  why",
    ]
    for plan in plans:
        step = "-" if plan.forecast is None else f"{plan.forecast.step_ms:,.0f} ms"
        speed = "-" if plan.forecast is None else f"{plan.tokens_per_s:,.0f}"
        lines.append(
            f"{'*' if plan is best and speed != '-' else ' '} {plan.name:<{width}}  {speed:>11}  {step:>10}  "
            f"{plan.num_tokens:>12,}  {plan.peak_bytes / _GIB:>5.1f} GiB  {_reason(plan, best)}"
        )
    if best.forecast is None:
        lines += ["", "Nothing fits: use more GPUs, a smaller max_tokens, or quantization: nf4."]
    return "\n".join(lines)


def _reason(plan: LayoutPlan, best: LayoutPlan) -> str:
    if plan.forecast is None:
        return "does not fit"
    added = f"{plan.forecast.added_ms / plan.forecast.step_ms:.0%} of the step is communication"
    bound = (
        f"link-bound by {plan.forecast.bound}: {added}" if plan.forecast.is_link_bound else f"compute-bound: {added}"
    )
    return f"fastest; {bound}" if plan is best else bound
