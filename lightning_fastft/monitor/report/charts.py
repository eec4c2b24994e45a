"""Charts of a run, from the data of its report: their lines and notes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from lightning_fastft.core.errors import inflect
from lightning_fastft.monitor.report.style import show_number

_LOSS, _VALIDATION_LOSS = "Loss", "val_loss"
_LOADER = "/dataloader_idx_"
# Between a metric and the name of its data set.
_NAME = "/"

Points = Sequence[Sequence[float]]


class Chart(NamedTuple):
    """A chart: its title, (label, points) of each line, the format of its values, figures above it, texts below it."""

    title: str
    lines: list[tuple[str, Points]]
    form: str = ".4g"
    figures: Sequence[tuple[str, float]] = ()
    notes: Sequence[str] = ()


def make_charts(data: Mapping[str, Any]) -> list[Chart]:
    """Return the charts of a run that have points: loss, speed, learning rates, validation metrics, logged values."""
    metrics = [] if data["validation"] is None else data["validation"]["metrics"]
    rates = [(rate["name"], rate["points"]) for rate in data["learning_rates"]]
    speed = data["curves"]["tokens_per_s"]
    of_rank_0 = ["Of rank 0."] if data["head"]["num_ranks"] > 1 else []
    charts = [
        _chart_loss(data, [metric for metric in metrics if _is_loss(metric["name"])]),
        Chart(
            "Tokens per second",
            [("", speed["points"])],
            ",.0f",
            _last(speed["points"]),
            [_describe_points(speed, "micro-batch"), *of_rank_0],
        ),
        Chart("Learning rate", rates, ".4g", _last(rates[0][1]) if len(rates) == 1 else ()),
        *(
            Chart(metric["name"], [("", metric["points"])], ".4g", _last(metric["points"]))
            for metric in metrics
            if not _is_loss(metric["name"])
        ),
        *(_chart_logged(values, data["head"], of_rank_0) for values in data["logged"]),
    ]
    drawn = [chart._replace(lines=[line for line in chart.lines if line[1]]) for chart in charts]
    return [chart for chart in drawn if chart.lines]


def _is_loss(name: str) -> bool:
    return name.partition(_NAME)[0] == _VALIDATION_LOSS


def _last(points: Points) -> list[tuple[str, float]]:
    return [("last", points[-1][2])] if points else []


def _chart_loss(data: Mapping[str, Any], validations: Sequence[Mapping[str, Any]]) -> Chart:
    """Return the chart of the training loss with the validation losses."""
    loss, num_ranks = data["curves"]["loss"], data["head"]["num_ranks"]
    notes = [_describe_points(loss, "optimizer step" if data["head"]["unit"] == "step" else "batch")]
    if loss["num_not_finite"]:
        notes.append(
            show_number(loss["num_not_finite"], "d")
            + " micro-batches had a loss that is not finite; their steps are not drawn."
        )
    if num_ranks > 1 and loss["why_alone"]:
        notes.append(
            f"Of rank {loss['ranks'][0]} alone, scaled by its share of the labels, as are the first and the last loss "
            f"above: {loss['why_alone']}."
        )
    elif num_ranks > 1:
        notes.append(f"The mean over all {len(loss['ranks'])} ranks, weighted by their labelled tokens as in training.")
    lines: list[tuple[str, Points]] = [("training", loss["points"])]
    figures = _last(loss["points"])
    for metric in validations:
        name = "validation" + metric["name"].removeprefix(_VALIDATION_LOSS).replace(_LOADER, " ").replace(_NAME, " ")
        lines.append((name, metric["points"]))
        figures += [(f"lowest {name}", min(point[2] for point in metric["points"]))] if metric["points"] else []
    return Chart(_LOSS, lines, ".4g", figures, notes)


def _chart_logged(values: Mapping[str, Any], head: Mapping[str, Any], of_rank_0: Sequence[str]) -> Chart:
    """Return the chart of a value that training logged."""
    ends = [(when, values[when]) for when in ("first", "final") if values[when] is not None]
    number = head["num_loss_steps"]
    note = "First and final are means over " + show_number(number, "d") + f" {inflect(number, head['unit'])}."
    return Chart(values["name"], [("", values["points"])], ".4g", ends, [note, *of_rank_0])


def _describe_points(curve: Mapping[str, Any], value: str) -> str:
    """Return a sentence about the points of a curve."""
    number = curve["values_per_point"]
    if number == 1:
        return f"Each point is one {value}."
    return (
        "Each point is the mean of "
        + show_number(number, "d")
        + f" consecutive {inflect(number, value)}; none is left out."
    )
