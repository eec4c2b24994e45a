"""Return docs/numbers.md: tables of benchmarks/results.csv, and the prose around them with figures of its rows.

`python docs/generate.py` writes the page. No figure is written by hand: the prose refers to figures as {name}
(FIGURES).
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.published_table import read_rows as read_published
from benchmarks.published_table import render as render_published
from benchmarks.ruler.rows import ROWS

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
    ("predicted step", "ms"): "predicted ms",
    ("predicted peak", "GiB"): "predicted GiB",
}
# Headlines that scripts other than compare.py measure.
OTHER_HEADLINES = ("dpo qwen3-8b-lora", "grpo qwen3-8b-lora", "qwen3-vl-8b")
HEADLINES = (*(row.workload for row in ROWS.values() if row.workload != "tiny"), *OTHER_HEADLINES)
HEADLINE_BENCHMARKS = ("compare", "train_step", "moe", "tuners", "images")
PEERS = ("unsloth", "trl")
BITS = {"adamw_8bit": "8-bit", "adamw_fused_8bit": "8-bit", "adamw_fused": "32-bit"}
TEMPLATE = """\
<!-- Written by `python docs/generate.py`; edit docs/numbers_page.py, not this file. -->
# Numbers, with the commands that measured them

Every figure on this page is in [benchmarks/results.csv](../benchmarks/results.csv) or computed from its rows.
[benchmarks/README.md](../benchmarks/README.md) describes how systems get equal inputs, how gradients are checked, and
what is timed. Models have their real shapes and random weights. torchtune and Axolotl were not run.

## Headlines
For each workload, the table has the newest run that measured ours with another system. Rows marked \\* are the newest
rows of the other systems' other settings, from earlier runs on the same GPU. Settings are named as in
[benchmarks/README.md](../benchmarks/README.md#one-command): `keep`, `recompute` and `auto` are policies for
activations, `unsloth` is Unsloth's default, and `off` is Unsloth without checkpointing. CUDA graphs use reserved
memory, so rows with `graphs` show it as allocated. Host syncs with a + were counted from the arrival of a batch to
the end of its backward, without the optimizer. *Device memory* is the memory in use that nvidia-smi
reports; older rows lack it. The number in the last column refers to the commands below the table. `python -m
benchmarks.compare --row NAME` measures all systems of a workload in one run.

{headlines}

### Relative to other systems, in the same run
Tokens (or examples) per second of our fastest setting, divided by those of the other system's fastest: first among
settings with moments of the same width, then among all. A base in fp8 is an approximation and is excluded.

{ratios}

### Where ours is slower, or needs more memory
Without CUDA graphs, Python launches the kernels of a small model one by one: Qwen3-0.6B takes {eager_ms} ms and
{eager_gib} GiB with activations recomputed, Unsloth's default {unsloth_small_ms} ms and {unsloth_small_gib} GiB.
With CUDA graphs, ours takes {graph_ms} ms and {graph_gib} GiB. With all activations kept, Qwen3-14B needs
{keep_gib} GiB; Unsloth's default needs {unsloth_gib} GiB, and a budget brings ours to {budget_gib} GiB.
With every weight of Qwen3-8B trained, ours needs {full_gib} GiB, Unsloth {unsloth_full_gib}.

## The front of time against memory
Budgets of GPU memory (`auto=GIB`), offload and recompute against the two settings of Unsloth, newest rows. The last
figure compares the step with the straight line between Unsloth's two points at the same allocated memory (its
default, where ours needs less). *Predicted* is the planner's prediction before the run followed the plan. Gradients are
bit-equal under every plan. `python -m benchmarks.offload plot benchmarks/results.csv` draws the front.

{front}

## Published figures and ours
Ablations of the three optimisations that this package started from: metadata of a pack built once, two staging
buffers for offload, and routing by one count. A gain compares steps/s with one of them on and off. Rows of different
GPUs are never compared. `python -m benchmarks.published table` prints the same table;
[benchmarks/README.md](../benchmarks/README.md#published-figures) says how the runs get equal inputs.

{published}
## Several GPUs
`strategy="fastft_ddp"` and `strategy="fastft_fsdp"`; memory is the maximum over ranks. *Times one GPU*
compares tokens per second with the newest row of one GPU of the same kind on the same workload. In older
rows, marked as repeated, every step trained the same packs. `fastft plan` predicts these rows; `python -m
benchmarks.cluster_model` prints its errors.

{gpus}

## All other rows
[benchmarks/results.csv](../benchmarks/results.csv) has a row for each figure: {num_rows} of {num_commands} commands,
with versions, spread and number of steps. [benchmarks/README.md](../benchmarks/README.md) lists the scripts: single
layers of experts, row kernels, packing, masked attention, small cards, training curves, faults. `python -m
benchmarks.roofline` relates the newest steps to the limits of the GPU.
"""


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


class Commands:
    """Number the commands of a table, for the list below it."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def cite(self, command: str) -> str:
        """Return the number of a command."""
        return f"[{self._numbers.setdefault(command, len(self._numbers) + 1)}]"

    def render(self) -> str:
        """Return the list."""
        return "\n".join(f"{number}. `{command}`" for command, number in self._numbers.items())


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
                entry.order = order if measure == "ms" else entry.order
    return sorted((entry for entry in entries.values() if "ms" in entry.figures), key=lambda entry: entry.order)


def newest(entries: Iterable[Entry], key: Callable[[Entry], object]) -> list[Entry]:
    """Return the last entry of each key, in the order in which the keys appeared."""
    return list({key(entry): entry for entry in entries}.values())


def find_headline(entries: Sequence[Entry], workload: str) -> tuple[list[Entry], list[Entry]]:
    """Return the newest run that measured ours with another system, and the other systems' other rows on that GPU.

    A run with Unsloth or TRL comes before one with plain transformers only.
    """
    own = [e for e in entries if e.benchmark in HEADLINE_BENCHMARKS and _name(e) == workload]
    runs: dict[tuple[str, str, str], list[Entry]] = {}
    for entry in own:
        runs.setdefault(entry.run, []).append(entry)
    for others in (PEERS, ("plain",)):
        joint = [run for run in runs.values() if {"ours"} <= {e.system for e in run} and _of(run, others)]
        if joint:
            run = max(joint, key=lambda found: max(e.order for e in found))
            labels = {entry.label for entry in run}
            rest = newest((e for e in own if e.system != "ours" and e.device == run[0].device), lambda e: e.label)
            return run, [entry for entry in rest if entry.label not in labels]
    return [], []


def write_headlines(entries: Sequence[Entry]) -> str:
    """Return the table of headlines and the list of its commands."""
    commands = Commands()
    lines = _head(
        "workload", "system", "setting", "optimizer", "ms", "per second", "allocated GiB", "reserved GiB",
        "device memory GiB", "host syncs", "device", "date", "command",
    )  # fmt: skip
    for workload in HEADLINES:
        run, earlier = find_headline(entries, workload)
        for entry in (*sorted(run, key=lambda e: (e.system != "ours", e.figures["ms"])), *earlier):
            mark = r" \*" if entry in earlier else ""
            unit = "tokens" if "tokens" in entry.figures else "examples"
            lines.append(
                _line(
                    workload, entry.system + mark, f"`{entry.setting}`", BITS.get(entry.optimizer, ""),
                    format_figure(entry.figures["ms"]), f"{format_figure(entry.rate)} {unit}",
                    _figure(entry, "allocated"), _figure(entry, "reserved"), _figure(entry, "device memory"),
                    _host_syncs(entry), short_device(entry.device), entry.date, commands.cite(entry.command),
                )
            )  # fmt: skip
    return "\n".join([*lines, "", commands.render()])


def _host_syncs(entry: Entry) -> str:
    """Return the host syncs of a whole step, or those to the end of the backward, marked."""
    partial = _figure(entry, "host syncs to the backward")
    return _figure(entry, "host syncs") or (f"{partial}+" if partial else "")


def write_ratios(entries: Sequence[Entry]) -> str:
    """Return how ours compares with each other system in the runs of the headlines."""
    lines = _head("workload", "other system", "8-bit moments", "32-bit moments", "best of each", "allocated GiB")
    for workload in HEADLINES:
        run = [e for e in find_headline(entries, workload)[0] if "A/A" not in e.label and "fp8" not in e.label]
        for other in dict.fromkeys(entry.system for entry in run if entry.system != "ours"):
            cells = [_best_pair(run, other, bits) for bits in ("8-bit", "32-bit", None)]
            ratios = [f"{pair[0].rate / pair[1].rate:.2f}" if pair else "" for pair in cells]
            memory = " against ".join(_figure(entry, "allocated") for entry in cells[-1])
            lines.append(_line(workload, other, *ratios, memory))
    return "\n".join(lines)


def _best_pair(run: Sequence[Entry], other: str, bits: str | None) -> list[Entry]:
    """Return our fastest entry and the other system's, among those with moments of that width; empty if one has
    none.
    """
    found = [[e for e in run if e.system == name and bits in (None, BITS.get(e.optimizer))] for name in ("ours", other)]
    return [max(own, key=lambda e: e.rate) for own in found] if all(found) else []


def write_front(entries: Sequence[Entry]) -> str:
    """Return time and memory of every plan of the newest runs, relative to Unsloth's two settings."""
    commands = Commands()
    lines = _head(
        "workload", "system", "setting", "ms", "tokens/s", "allocated GiB", "reserved GiB", "predicted ms",
        "predicted GiB", "against Unsloth's line", "device", "date", "command",
    )  # fmt: skip
    own = [entry for entry in entries if entry.benchmark == "offload front"]
    for workload in dict.fromkeys(entry.workload for entry in own):
        points = [entry for entry in own if entry.workload == workload]
        points = newest([e for e in points if e.date == points[-1].date], lambda e: e.label)
        line = [e for e in points if e.system == "unsloth"]
        for entry in sorted(points, key=lambda e: e.figures["allocated"]):
            relative = f"{entry.figures['ms'] / _line_at(line, entry) - 1:+.1%}" if entry not in line and line else ""
            lines.append(
                _line(
                    _title(entry), entry.system, f"`{entry.setting}`", format_figure(entry.figures["ms"]),
                    _figure(entry, "tokens"), _figure(entry, "allocated"), _figure(entry, "reserved"),
                    _figure(entry, "predicted ms"), _figure(entry, "predicted GiB"), relative,
                    short_device(entry.device), entry.date, commands.cite(entry.command),
                )
            )  # fmt: skip
    return "\n".join([*lines, "", commands.render()])


def _line_at(line: Sequence[Entry], entry: Entry) -> float:
    """Return the time of Unsloth's straight line at the memory of an entry, ms; constant beyond its ends."""
    low, high = (pick(line, key=lambda e: e.figures["allocated"]) for pick in (min, max))
    span = high.figures["allocated"] - low.figures["allocated"]
    share = (entry.figures["allocated"] - low.figures["allocated"]) / span if span else 0.0
    return low.figures["ms"] + min(max(share, 0.0), 1.0) * (high.figures["ms"] - low.figures["ms"])


def write_gpus(entries: Sequence[Entry]) -> str:
    """Return the newest row of every workload and form of parallelism, on each kind of GPU."""
    commands = Commands()
    lines = _head(
        "workload", "parallelism", "GPUs", "ms", "tokens/s", "times one GPU", "allocated GiB", "reserved GiB",
        "packs", "date", "command",
    )  # fmt: skip
    own = [e for e in entries if e.benchmark == "multi_gpu" and "accumulation" not in e.label]
    own = newest(own, lambda e: (e.workload, e.label, e.device))
    ones = {(e.workload, _card(e)): e for e in own if e.label == "ours one GPU"}
    for entry in sorted(own, key=lambda e: ("per GPU" in e.workload, e.workload, _card(e), len(e.device))):
        # One GPU of these rows trains adapters.
        name = "" if "full" in entry.label else entry.workload.replace("+resident", "")
        one = ones.get((name, _card(entry)))
        lines.append(
            _line(
                entry.workload, entry.label.removeprefix("ours "), short_device(entry.device),
                format_figure(entry.figures["ms"]), _figure(entry, "tokens"),
                "" if one in (None, entry) else f"{entry.rate / one.rate:.2f}",
                _figure(entry, "allocated"), _figure(entry, "reserved"),
                "repeated" if "per GPU" in entry.workload else "new", entry.date, commands.cite(entry.command),
            )
        )  # fmt: skip
    return "\n".join([*lines, "", commands.render()])


def find_figures(entries: Sequence[Entry], path: Path = RESULTS) -> dict[str, str]:
    """Return the figures that prose names, each from the newest row of its system."""
    small, large, full = "qwen3-0.6b-lora", "qwen3-14b-qlora", "qwen3-8b-full"
    cells = {
        "eager": (small, "ours recompute+fused, adamw_fused_8bit"),
        "graph": (small, "ours keep+graphs, adamw_fused_8bit"),
        "unsloth_small": (small, "unsloth unsloth, adamw_8bit"),
        "keep": (large, "ours keep+fused, adamw_fused"),
        "budget": (large, "ours auto=12.0:24+fused, adamw_8bit"),
        "unsloth": (large, "unsloth unsloth, adamw_8bit"),
        "full": (full, "ours keep+fused, adamw_fused_8bit"),
        "unsloth_full": (full, "unsloth off, adamw_8bit"),
    }
    found = {}
    for name, (workload, label) in cells.items():
        *_, entry = [
            e for e in entries if e.label == label and e.benchmark in HEADLINE_BENCHMARKS and _name(e) == workload
        ]
        found[f"{name}_ms"], found[f"{name}_gib"] = _figure(entry, "ms"), _figure(entry, "allocated")
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    found["num_rows"] = f"{len(rows):,}"
    found["num_commands"] = f"{len({row['command'] for row in rows}):,}"
    return found


def write_numbers(path: Path = RESULTS) -> str:
    """Return the page."""
    entries = read_entries(path)
    return TEMPLATE.format(
        headlines=write_headlines(entries),
        ratios=write_ratios(entries),
        front=write_front(entries),
        published=render_published(read_published([path])) + "\n",
        gpus=write_gpus(entries),
        **find_figures(entries, path),
    )


def short_device(name: str) -> str:
    """Return the short name of a device.

    Example:
        >>> short_device("2 x NVIDIA H100 80GB HBM3")
        '2 x H100'
    """
    return name.replace("NVIDIA ", "").removeprefix("1 x ").removesuffix(" 80GB HBM3")


def format_figure(value: float) -> str:
    """Return a figure with its significant digits.

    Example:
        >>> format_figure(2293.28), format_figure(14.94), format_figure(0.48822), format_figure(0.0)
        ('2,293', '14.9', '0.488', '0')
    """
    if value == int(value):
        return f"{value:,.0f}"
    return f"{value:,.0f}" if value >= 200 else f"{value:.1f}" if value >= 10 else f"{value:.3g}"


def _name(entry: Entry) -> str:
    """Return the workload of the ruler; rows with fewer labels have none."""
    name, _, rest = entry.workload.partition(",")
    return name if "labels" not in rest or "labels 100%" in rest else ""


def _title(entry: Entry) -> str:
    return entry.workload.replace(", packed", "").replace(", labels 100%", "")


def _of(run: Iterable[Entry], systems: Sequence[str]) -> bool:
    return any(entry.system in systems for entry in run)


def _card(entry: Entry) -> str:
    """Return the kind of GPU, without their number."""
    return short_device(entry.device).rpartition(" x ")[2]


def _figure(entry: Entry, measure: str) -> str:
    return format_figure(entry.figures[measure]) if measure in entry.figures else ""


def _head(*columns: str) -> list[str]:
    return [_line(*columns), "|---" * len(columns) + "|"]


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"
