"""Entry: all figures of one system in one run, read from benchmarks/results.csv, and how tables show them."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks.ruler.pairs import NUM_WHOLE_STEPS

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results.csv"
# Metrics of results.csv that the tables show, by their columns.
MEASURES = {
    ("step", "ms"): "ms",
    ("tokens", "tokens/s"): "tokens",
    ("examples", "examples/s"): "examples",
    ("peak allocated", "GiB"): "allocated",
    ("peak allocated, largest rank", "GiB"): "allocated",
    ("peak reserved", "GiB"): "reserved",
    ("peak reserved, largest rank", "GiB"): "reserved",
    ("device memory", "GiB"): "device memory",
    ("host waits", "per step"): "host syncs to the backward",
    ("host waits, whole step", "per step"): "host syncs",
    (f"whole run of {NUM_WHOLE_STEPS} steps", "s"): "whole run",
    ("predicted step", "ms"): "predicted ms",
    ("predicted peak", "GiB"): "predicted GiB",
}
# In the label of a setting that was measured once more.
CONTROL = " A/A"
BITS = {"adamw_8bit": "8-bit", "adamw_fused_8bit": "8-bit", "adamw_fused": "32-bit"}


@dataclass
class Entry:
    """All figures of one system in one run."""

    benchmark: str
    workload: str
    label: str
    date: str
    command: str
    device: str
    order: int
    figures: dict[str, float] = field(default_factory=dict)
    num_steps: str = ""

    @property
    def system(self) -> str:
        """Name of the system: ours, unsloth, trl or plain."""
        return re.split(r"[ :]", self.label, maxsplit=1)[0]

    @property
    def setting(self) -> str:
        """The mode, without the optimizer."""
        return re.split(r"[ :]", self.label, maxsplit=1)[1].partition(", adamw")[0]

    @property
    def optimizer(self) -> str:
        """Name of the optimizer, as in the ruler; empty if the row has none."""
        _, mark, name = self.label.partition(", adamw")
        return f"adamw{name}" if mark else ""

    @property
    def run(self) -> tuple[str, str, str]:
        """Key of a run, equal for its rows."""
        return (self.date, self.command, self.device)

    @property
    def rate(self) -> float:
        """Tokens per second, or examples if the row has no tokens."""
        return self.figures.get("tokens", self.figures.get("examples", 0.0))


def read_entries(path: Path = RESULTS) -> list[Entry]:
    """Return the measured steps of a results file, oldest first; a run that repeats a system keeps its last figures."""
    entries: dict[tuple[str, ...], Entry] = {}
    with path.open(encoding="utf-8", newline="") as file:
        for order, row in enumerate(csv.DictReader(file)):
            measure = MEASURES.get((row["metric"], row["unit"]))
            if measure and row["value"]:
                names = ("benchmark", "workload", "system", "date", "command", "device")
                key = tuple(row[name] for name in names)
                entry = entries.setdefault(key, Entry(*key, order=order))
                entry.figures[measure] = float(row["value"])
                entry.num_steps = row["n"] if measure == "ms" else entry.num_steps
                entry.order = order if measure == "ms" else entry.order
    return sorted((entry for entry in entries.values() if "ms" in entry.figures), key=lambda entry: entry.order)


def newest(entries: Iterable[Entry], key: Callable[[Entry], object]) -> list[Entry]:
    """Return the last entry of each key, in the order in which the keys appeared."""
    return list({key(entry): entry for entry in entries}.values())


def fastest(entries: Iterable[Entry]) -> Entry:
    """Return the entry with the most tokens, or examples, per second."""
    return max(entries, key=lambda entry: entry.rate)


def faster_of_repeats(run: Iterable[Entry]) -> list[Entry]:
    """Return one entry per setting of a run: the faster one if it was measured twice (A/A)."""
    found: dict[str, Entry] = {}
    for entry in run:
        label = entry.label.replace(CONTROL, "")
        found[label] = fastest([replace(entry, label=label), *([found[label]] if label in found else [])])
    return list(found.values())


def best_pair(run: Sequence[Entry], other: str, bits: str | None) -> list[Entry]:
    """Return our fastest entry and the other system's, among those with moments of that width; empty if one has
    none.
    """
    found = [[e for e in run if e.system == name and bits in (None, BITS.get(e.optimizer))] for name in ("ours", other)]
    return [max(own, key=lambda e: e.rate) for own in found] if all(found) else []


def workload_name(entry: Entry) -> str:
    """Return the workload of the ruler; rows with fewer labels have none."""
    name, _, rest = entry.workload.partition(",")
    return name if "labels" not in rest or "labels 100%" in rest else ""


def short_label(entry: Entry) -> str:
    """Return system and setting, without the optimizer."""
    return entry.label.partition(", adamw")[0]


def short_device(name: str) -> str:
    """Return the short name of a device.

    Example:
        >>> short_device("2 x NVIDIA H100 80GB HBM3")
        '2 x H100'
    """
    return name.replace("NVIDIA ", "").removeprefix("1 x ").removesuffix(" 80GB HBM3")


def figure(entry: Entry, measure: str) -> str:
    """Return a figure as tables show it; empty if it was not measured."""
    return format_figure(entry.figures[measure]) if measure in entry.figures else ""


def format_figure(value: float) -> str:
    """Return a figure with its significant digits.

    Example:
        >>> format_figure(2293.28), format_figure(14.94), format_figure(0.48822), format_figure(0.0)
        ('2,293', '14.9', '0.488', '0')
    """
    if value == int(value):
        return f"{value:,.0f}"
    return f"{value:,.0f}" if value >= 200 else f"{value:.1f}" if value >= 10 else f"{value:.3g}"


def table_head(*columns: str) -> list[str]:
    """Return the first two lines of a table in Markdown."""
    return [table_row(*columns), "|---" * len(columns) + "|"]


def table_row(*cells: str) -> str:
    """Return a line of a table in Markdown."""
    return f"| {' | '.join(cells)} |"
