"""Draw a bar chart of one comparison: tokens per second and peak device memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.ruler.pairs import control_of
from benchmarks.ruler.rows import is_default, width_of
from benchmarks.ruler.systems import system_of

_OURS, _PEERS, _MEMORY = "#1f6f8b", "#b9c0c6", "#e0a458"
_MARGIN = 1.18


def draw_comparison(
    rows: Sequence[Mapping[str, Any]], gaps: Mapping[str, str], *, device: str, title: str, path: Path
) -> None:
    """Draw every row, fastest on top, and write a PNG.

    Args:
        rows: Result of ``pairs.pool``; rows with a reason are named under the chart.
        gaps: Why a system or a setting was not run, by its name.
        device: "cuda" or "cpu".
        title: Title of the chart.
        path: File to write.
    """
    from matplotlib.figure import Figure

    timed = sorted((row for row in rows if not row["reason"]), key=lambda row: row["tokens_per_s"])
    figure = Figure(figsize=(9.0, 1.9 + 0.42 * max(1, len(timed))), layout="constrained")
    speed, memory = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
    places = range(len(timed))
    is_both = len({width_of(row) for row in timed}) > 1
    names = [
        f"{row['title']}{f', {width_of(row)}' if is_both else ''}{' *' if is_default(row, device=device) else ''}"
        for row in timed
    ]
    rates, peaks = [row["tokens_per_s"] for row in timed], [row["peak_gib"]["allocated"] for row in timed]
    speed.barh(places, rates, color=[_OURS if system_of(row) == "ours" else _PEERS for row in timed])
    memory.barh(places, peaks, color=_MEMORY)
    speed.set_yticks(places, names)
    for axes, values, form, label in (
        (speed, rates, ",.0f", "real tokens/s"),
        (memory, peaks, ".1f", "peak device memory, GiB"),
    ):
        axes.set_xlabel(label)
        axes.set_xlim(0, _MARGIN * max(values, default=0.0) or 1.0)
        axes.spines[["top", "right"]].set_visible(False)
        if any(values):
            for place, value in zip(places, values):
                axes.annotate(
                    f"{value:{form}}",
                    (value, place),
                    textcoords="offset points",
                    xytext=(4, 0),
                    va="center",
                    fontsize=8,
                )
    if timed and not any(peaks):
        memory.set_xticks([])
        memory.text(
            0.5,
            0.5,
            "no device memory on a CPU",
            transform=memory.transAxes,
            ha="center",
            va="center",
            fontsize=9,
            color="0.4",
        )
    control = control_of(rows)
    warning = (
        "on a CPU nothing is compared: the bars show that everything ran"
        if device == "cpu"
        else ""
        if control.passed
        else control.describe()
    )
    figure.suptitle(f"{title}\n{warning}" if warning else title, fontsize=10, color="firebrick" if warning else "black")
    absent = [row["title"] for row in rows if row["reason"]] + list(gaps)
    note = "* default setting" + (f"    not shown: {', '.join(absent)}" if absent else "")
    figure.supxlabel(note, fontsize=7, x=0.01, ha="left", wrap=True)
    figure.savefig(path, dpi=130)
