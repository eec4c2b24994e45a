"""Render a plan as text: segments, predicted cost, memory over the step, and work of the streams over time."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from textwrap import wrap

from lightning_fastft.planner.step import Interval, Plan, Prediction, SegmentPlan, StepCost, gib

WIDTH = 100
# Columns and rows of the two pictures; the rest of WIDTH is for labels.
NUM_COLUMNS, NUM_ROWS = 84, 8
_NUMBERS_WIDTH = 28
_MIB = 2**20
_KINDS = {"forward": "f", "head": "h", "backward": "b", "other": "o"}
_WAIT = "."


def render_plan(cost: StepCost, plan: Plan) -> str:
    """Return a plan as plain text, at most 100 columns wide.

    Args:
        cost: Costs of the step.
        plan: The plan for it.
    """
    parts = ["\n".join(describe_plan(plan)), _describe_prediction(cost, plan.prediction)]
    parts += [f"note: {note}" for note in plan.notes]
    return "\n".join([*parts, "", _draw_memory(plan.prediction), "", _draw_streams(plan.prediction)])


def describe_plan(plan: Plan) -> list[str]:
    """Return a heading, and a line for all segments with the same treatment."""
    numbers: dict[SegmentPlan, list[int]] = {}
    for number, segment in enumerate(plan.segments):
        numbers.setdefault(segment, []).append(number)
    lines = [f"{'layers':<{_NUMBERS_WIDTH}}treatment of their activations"]
    for segment, found in numbers.items():
        first = f"{_ranges(found):<{_NUMBERS_WIDTH}}"
        lines += wrap(
            describe_segment(segment),
            WIDTH,
            initial_indent=first,
            subsequent_indent=" " * _NUMBERS_WIDTH,
            break_long_words=False,
        )
    return lines


def _ranges(numbers: list[int]) -> str:
    """Return numbers as ranges such as "0-3, 5", truncated with a count if there are many."""
    runs = [[number for _, number in run] for _, run in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])]
    texts = [f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs]
    text = ", ".join(texts)
    # Two columns separate the numbers from the text.
    if len(text) <= _NUMBERS_WIDTH - 2:
        return text
    end = f", ... ({len(numbers)} in all)"
    while len(", ".join(texts)) + len(end) > _NUMBERS_WIDTH - 2:
        texts.pop()
    return ", ".join(texts) + end


def describe_segment(plan: SegmentPlan) -> str:
    """Return the plan of a layer in words."""
    streamed = "; weights streamed" if plan.is_streamed else ""
    if plan.is_kept:
        return f"kept: nothing is recomputed{streamed}"
    parts = [f"input {plan.input_place}"]
    for place in ("host", "device"):
        names = [name for name, found in plan.values if found == place]
        if names:
            parts.append(f"{', '.join(names)} on the {place}")
    return "; ".join([*parts, "rest recomputed"]) + streamed


def _describe_prediction(cost: StepCost, prediction: Prediction) -> str:
    computed = prediction.step_ms - prediction.exposed_ms
    lines = [
        f"predicted peak    {gib(prediction.peak_bytes)}",
        f"predicted step    {prediction.step_ms:,.1f} ms, {max(0.0, computed - cost.least_ms):,.1f} of it recomputed",
        f"waits for copies  {prediction.exposed_ms:,.1f} ms",
        f"host memory       {gib(prediction.host_bytes)} pinned, staging slots of "
        f"{prediction.staging_bytes / _MIB:,.0f} MiB",
    ]
    return "\n".join(lines)


def _draw_memory(prediction: Prediction) -> str:
    """Return bars of device memory, forward then backward; a column shows the maximum of its moments."""
    moments = prediction.memory
    num_columns = min(NUM_COLUMNS, len(moments))
    columns = [
        moments[i * len(moments) // num_columns : (i + 1) * len(moments) // num_columns] for i in range(num_columns)
    ]
    heights = [
        round(max(num_bytes for _, num_bytes in column) * NUM_ROWS / max(1, prediction.peak_bytes))
        for column in columns
    ]
    rows = ["".join("#" if height >= row else " " for height in heights).rstrip() for row in range(NUM_ROWS, 0, -1)]
    marks = ["peak", *[""] * (NUM_ROWS - 1)]
    kinds = "".join(_kind_of(label for label, _ in column) for column in columns)
    update = "; o optimizer" if "o" in kinds else ""
    return "\n".join(
        [
            f"device memory over the step, full height {gib(prediction.peak_bytes)}",
            f"(f forward, h head, b backward, one layer after the other{update})",
            *(f"{mark:>9} |{row}".rstrip() for mark, row in zip(marks, rows)),
            f"{'':>9} +{kinds}",
        ]
    )


def _kind_of(labels: Iterable[str]) -> str:
    kinds = [_KINDS[label.split()[0]] for label in labels]
    return "h" if "h" in kinds else kinds[0]


def _draw_streams(prediction: Prediction) -> str:
    """Return the work of each stream in equal time slices of the step."""
    slice_ms = prediction.step_ms / NUM_COLUMNS
    streams: dict[str, list[Interval]] = {"compute": [], "d2h": [], "h2d": []}
    for interval in prediction.streams:
        streams[interval.stream].append(interval)
    lines = [
        f"streams over time, one character is {slice_ms:.2f} ms; d2h copies to the host, h2d back",
        "(compute: f h b as above, o optimizer and others, . waiting; copies: . none, - some, = half, # all)",
    ]
    for stream, intervals in streams.items():
        shares = _shares(intervals, slice_ms)
        text = "".join(
            _compute_mark(share) if stream == "compute" else _copy_mark(sum(share.values())) for share in shares
        )
        lines.append(f"{stream:>9} |{text}")
    return "\n".join(lines)


def _shares(intervals: list[Interval], slice_ms: float) -> list[dict[str, float]]:
    """Return for each slice the share of each kind of work."""
    shares: list[dict[str, float]] = [{} for _ in range(NUM_COLUMNS)]
    if slice_ms <= 0:
        return shares
    for interval in intervals:
        kind = interval.label.split()[0]
        first = min(NUM_COLUMNS - 1, int(interval.start_ms / slice_ms))
        last = min(NUM_COLUMNS - 1, int(interval.end_ms / slice_ms))
        for column in range(first, last + 1):
            inside = min(interval.end_ms, (column + 1) * slice_ms) - max(interval.start_ms, column * slice_ms)
            shares[column][kind] = shares[column].get(kind, 0.0) + max(0.0, inside) / slice_ms
    return shares


def _compute_mark(share: dict[str, float]) -> str:
    waited = 1.0 - sum(share.values())
    kind = max(share, key=lambda name: share[name], default="")
    return _WAIT if not kind or waited > share[kind] else _KINDS[kind]


def _copy_mark(share: float) -> str:
    # The shares of a fully busy stream may sum to slightly less than 1.
    if share > 0.99:
        return "#"
    return "=" if share >= 0.5 else "-" if share > 0.01 else _WAIT
