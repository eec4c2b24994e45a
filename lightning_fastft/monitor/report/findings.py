"""Findings of a run as plain values for its report: memory plan, profiled step, host syncs and data rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning_fastft.monitor.report.step_profile import StepTrace, copy_use, merge, shares_over_time
from lightning_fastft.monitor.report.waits import order_waits
from lightning_fastft.planner.picture import describe_segment, render_plan

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

    from lightning_fastft.monitor.host_waits import HostWaitDetector
    from lightning_fastft.planner.step import Plan, StepCost
    from lightning_fastft.training.datamodule import PackedDataModule

# Number of time slices per stream, and of listed kernels or operators.
_NUM_SLICES = 200
_NUM_LONGEST = 10
_MOST_NAME = 200
# Packs of more documents have little empty room.
_MOST_PER_PACK = 9
_GIB = 2**30
_LANES = {"compute": "compute", "d2h": "copies to the host", "h2d": "copies to the device"}


def describe_plan(cost: StepCost, plan: Plan) -> dict[str, Any]:
    """Return a memory plan: predictions, treatment of each layer, memory over the step, and its chart as text."""
    found = plan.prediction
    layers = [
        {
            "is_kept": layer.is_kept,
            "input": layer.input_place,
            "values": dict(layer.values),
            "is_streamed": layer.is_streamed,
            "text": describe_segment(layer),
        }
        for layer in plan.segments
    ]
    return {
        "peak_gib": found.peak_bytes / _GIB,
        "step_ms": found.step_ms,
        "exposed_ms": found.exposed_ms,
        "host_gib": found.host_bytes / _GIB,
        "notes": list(plan.notes),
        "layers": layers,
        "memory": [list(moment) for moment in found.memory],
        "text": render_plan(cost, plan),
    }


def describe_profile(trace: StepTrace | None, *, step: int | None, is_cuda: bool, why_not: str) -> dict[str, Any]:
    """Return the profiled step: times, copies and their overlap, streams, and the longest kernels."""
    if trace is None or not trace.kernels:
        asked = (
            "No step was asked for: profile_step is None."
            if step is None
            else "The run ended before the step that was to be profiled."
        )
        return {"step": None, "why_not": why_not or asked}
    kernels, copies, names = trace
    begin, end = kernels[0].start, max(kernel.end for kernel in kernels)
    spans = {"compute": merge((kernel.start, kernel.end) for kernel in kernels)}
    for direction in ("d2h", "h2d") if is_cuda else ():
        spans[direction] = merge((copy.start, copy.end) for copy in copies if copy.direction == direction)
    return {
        "step": step,
        "has_copies": bool(copies),
        **copy_use(kernels, copies)._asdict(),
        "work": "kernel" if is_cuda else "operator",
        "longest": [
            {"name": name[:_MOST_NAME], "count": count, "ms": time_us / 1e3}
            for name, count, time_us in names[:_NUM_LONGEST]
        ],
        "lanes": [
            {
                "kind": kind,
                "name": _LANES[kind],
                "shares": shares_over_time(found, begin=begin, end=end, num_slices=_NUM_SLICES),
            }
            for kind, found in spans.items()
        ],
    }


def describe_waits(watched: HostWaitDetector | None, *, is_cuda: bool) -> dict[str, Any]:
    """Return the host syncs of the watched steps by line of code, or why no step was watched."""
    if watched is None or not watched.num_watched:
        why_not = (
            "No step was watched: profile_step is None."
            if watched is None
            else "The run ended before the step that was to be watched."
        )
        return {"num_steps": 0, "why_not": why_not}
    rows = [
        {
            "per_step": count / watched.num_watched,
            "call": wait.call,
            "place": f"{wait.place} in {wait.place.function}",
            "text": wait.place.text,
            "library": None if wait.library is None else f"{wait.library} in {wait.library.function}",
            "remedy": wait.remedy,
            "is_logging": wait.is_logging,
        }
        for wait, count in order_waits(watched.waits.items())
    ]
    per_step = sum(watched.waits.values()) / watched.num_watched
    return {"num_steps": watched.num_watched, "per_step": per_step, "is_prediction": not is_cuda, "rows": rows}


def find_max_tokens(trainer: Trainer) -> int | None:
    """Return the most tokens of a pack, if the data module is of this package."""
    data = _find_data(trainer)
    return None if data is None else data.max_tokens


def find_limit(trainer: Trainer) -> str:
    """Return why an epoch cannot have fewer packs.

    "tokens": fewer could not hold its tokens. "documents": no more documents of these lengths fit into one. "": it
    could, or it is not known.
    """
    data = _find_data(trainer)
    subset = None if data is None else data.subset("train")
    if data is None or subset is None or data.is_streamed:
        return ""
    length_N, num_packs = subset.length_N, len(data.plan.packs)
    if num_packs <= -(-int(length_N.sum()) // data.max_tokens):
        return "tokens"
    # At most k documents fit into a pack if each is longer than 1 / (k + 1) of it.
    least = max(-(-int((length_N * (k + 1) > data.max_tokens).sum()) // k) for k in range(1, _MOST_PER_PACK + 1))
    return "documents" if num_packs <= least else ""


def describe_rows(trainer: Trainer) -> list[str]:
    """Return the counts of training rows, if the data module is of this package."""
    data = _find_data(trainer)
    report = None if data is None else data.report("train")
    return [] if report is None else report.render().splitlines()


def _find_data(trainer: Trainer) -> PackedDataModule | None:
    from lightning_fastft.training.datamodule import PackedDataModule

    data = getattr(trainer, "datamodule", None)
    return data if isinstance(data, PackedDataModule) else None
