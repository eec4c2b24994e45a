"""Return docs/numbers.md and the headlines of README.md: tables of benchmarks/results.csv, and prose with figures of
its rows.

`python docs/generate.py` writes both. No figure is written by hand: the prose refers to figures as {name}. The README
cites runs by the names of NAMED_RUNS.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from benchmarks.published_table import read_rows as read_published
from benchmarks.published_table import render as render_published
from benchmarks.ruler.logs import LOGS, read_logs
from benchmarks.ruler.pairs import NUM_WHOLE_STEPS
from benchmarks.ruler.rows import NUM_ROW_STEPS, ROWS
from benchmarks.ruler.systems import CHECKED_AGAINST, CONFLICTS

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
# Headlines that scripts other than compare.py measure.
OTHER_HEADLINES = ("dpo qwen3-8b-lora", "grpo qwen3-8b-lora", "qwen3-vl-8b")
HEADLINES = (*(row.workload for row in ROWS.values() if row.workload != "tiny"), *OTHER_HEADLINES)
HEADLINE_BENCHMARKS = ("compare", "train_step", "moe", "tuners", "images")
PEERS = ("unsloth", "trl")
# In the label of a setting that was measured once more.
CONTROL = " A/A"
BITS = {"adamw_8bit": "8-bit", "adamw_fused_8bit": "8-bit", "adamw_fused": "32-bit"}
TEMPLATE = """\
<!-- Written by `python docs/generate.py`; edit docs/numbers_page.py, not this file. -->
# Numbers, with the commands that measured them

Every figure on this page is in [benchmarks/results.csv](../benchmarks/results.csv) or computed from its rows.
[benchmarks/README.md](../benchmarks/README.md) describes how systems get equal inputs, how gradients are checked, and
what is timed. Models have their real shapes and random weights.

## Headlines
For each workload, the table has the newest run that measured ours beside the fastest known setting of each other system
in it, or beside any if no run has that. Rows marked \\* are the newest rows of the other systems' other settings, on
the same GPU. Settings are named as in [benchmarks/README.md](../benchmarks/README.md#one-command): `keep`, `recompute`
and `auto` are policies for activations, `unsloth` is Unsloth's default, and `off` is Unsloth without checkpointing.

- *Repeated* is the time of the same setting, measured once more in the run (A/A).
- *Steps* is the number of timed steps; rows with fewer than {num_row_steps} are short.
- CUDA graphs use reserved memory, so rows with `graphs` show it as allocated. *Device memory* is the memory in use that
  nvidia-smi reports; older rows lack it.
- Host syncs with a + were counted from the arrival of a batch to the end of its backward, without the optimizer. The
  8-bit optimizer of bitsandbytes waits once per tensor: in rows of TRL, and in ours of `benchmarks.train_step` with
  8-bit moments.
- *{num_whole_steps} steps, s (partly extrapolated)* is the time of a run of {num_whole_steps} steps from its first
  batch: the first steps, with recordings, plans and compilation, and the timed ones are measured; the mean of the timed
  steps counts for those that are left.
- The number in the last column refers to the commands below the table, with the raw log where there is one; a test
  computes the rows of a log again. `python -m benchmarks.compare --row NAME` measures all systems of a workload in one
  run. A run may have been several calls, one after the other on one card; its command then names what all of them
  measured.

{headlines}

### Relative to other systems, in the same run
Tokens (or examples) per second of our fastest setting, divided by those of the other system's fastest: first among
settings with moments of the same width, then among all. A base in fp8 is an approximation and is excluded.

{ratios}

### Where ours is slower, or needs more memory
Without CUDA graphs, Python launches the kernels of a small model one by one: Qwen3-0.6B takes {eager_ms} ms and
{eager_gib} GiB with activations recomputed, Unsloth's default {unsloth_small_ms} ms and {unsloth_small_gib} GiB.
Unsloth keeps the inputs of its layers in host memory there; if ours does, it takes {offload_ms} ms and {offload_gib}
GiB.
With CUDA graphs, ours takes {graph_ms} ms and {graph_gib} GiB. With all activations kept, Qwen3-14B needs
{keep_gib} GiB; Unsloth's default needs {unsloth_gib} GiB, and a budget brings ours to {budget_gib} GiB.
With every weight of Qwen3-8B trained, ours needs {full_gib} GiB, Unsloth {unsloth_full_gib}. With 8-bit moments, ours
takes {full_8_bit_ms} ms, Unsloth {unsloth_full_8_bit_ms}, and nearly all of that gain is `FusedAdamW`: with
`bitsandbytes.optim.AdamW8bit` in both, ours takes {bitsandbytes_full_ms} ms, Unsloth {unsloth_bitsandbytes_full_ms}.

### Aims that were missed
Aims were set before the work, on an H200.

{aims}

[Half of Unsloth's time to the first step](#time-to-the-first-step) was reached for some starts only. The longest
documents were measured with a part of each model's layers: a comparison of whole models takes longer than the GPUs
were at hand. On an H100, fewer workloads were measured beside Unsloth than on an H200.

### Systems without a row
Each row of a workload has all systems in one environment: Python {machine[python]}, torch {machine[torch]},
transformers {machine[transformers]}. The newest releases of these systems do not install, or are not
imported, there. What each requires, as pip reads it from the wheel, or its error:

{not_installable}

### Runs of the README
The README and this page cite these runs by name. Every figure that the README gives with a unit is one of the named
run, which a test checks.

{named_runs}

## Step time against memory
Budgets of GPU memory (`auto=GIB`), offload and recompute against the two settings of Unsloth, newest rows. The last
figure compares the step with the straight line between Unsloth's two points at the same allocated memory (its
default, where ours needs less). *Predicted* is the planner's prediction before the run followed the plan. Gradients are
bit-equal under every plan.

{front}

## Large models on one GPU
The caching allocator was capped at the budget in the second column, from loading on, so a step above it would have
failed. Losses equal those of a recomputed run without a cap, except in rows whose command has `--without-reference`:
they were not compared. Rows in which every weight is trained had no cap.

{one_gpu}

## Time to the first step
Seconds from the start of the process to the end of the first step, and to the first of the steps whose time is steady,
with the model on disk and GSM8K to be tokenised. *Cold* starts find no compiled kernels. Ours reads the model while it
tokenises and compiles. About half of ours are imports of torch, transformers and Lightning.

{first_steps}

## Quality over wall time
A small Qwen3 is trained from scratch on half of GSM8K's training rows. Each system then fine-tunes it
with LoRA on the other half for one epoch, from the same adapters, with the same packs and optimizer, for three seeds.
Plain transformers + PEFT evaluates copies of the adapters on the test set. *Exact match* is the share of rows whose
final number is predicted token by token, given the worked solution: a model of this size solves no problem alone. The
first start of a system compiles; later ones find its caches. The other cards of the host were at work.

![Validation loss and exact match over wall time, by four systems](pictures/quality.svg)

{quality}

## Published figures and ours
Ablations of the three optimisations that this package started from: metadata of a pack built once, two staging
buffers for offload, and routing by one count. A gain compares steps/s with one of them on and off. Rows of different
GPUs are never compared. `python -m benchmarks.published table` prints the same table;
[benchmarks/README.md](../benchmarks/README.md#published-figures) says how the runs get equal inputs.

{published}
## Several GPUs
`strategy="fastft_ddp"` and `strategy="fastft_fsdp"`; memory is the maximum over ranks. *Times one GPU*
compares tokens per second with the newest row of one GPU of the same kind on the same workload. `fastft plan`
predicts these rows; `python -m benchmarks.cluster_model` prints its errors.

{gpus}

## All other rows
[benchmarks/results.csv](../benchmarks/results.csv) has a row for each figure: {num_rows} of {num_commands} commands,
with versions, spread and number of steps. [benchmarks/README.md](../benchmarks/README.md) lists the scripts: single
layers of experts, row kernels, packing, masked attention, small cards, training curves, faults.
"""


# Curves of `python -m benchmarks.quality`, a file for each run; the newest is shown.
QUALITY_CURVES = "quality-*.csv"
SYSTEM_NAMES = {
    "ours": "lightning_fastft",
    "unsloth": "Unsloth",
    "trl": "TRL, packed, Liger",
    "plain": "transformers + PEFT",
}


# Of a start, in `python -m benchmarks.first_step`.
_START_PARTS = ("imports", "loaded", "first step", "steady")


class QualityPoint(NamedTuple):
    """One evaluation of a copy of the adapters.

    Args:
        system: Of the ruler.
        mode: Its setting.
        seed: Of adapters and order; 0 is the first start.
        step: Optimizer steps before the copy.
        seconds: Of training before the copy, with compilation.
        loss: Mean of the answers' tokens on the test set.
        exact: Share of rows whose final number is predicted.
    """

    system: str
    mode: str
    seed: int
    step: int
    seconds: float
    loss: float
    exact: float


class NamedRun(NamedTuple):
    """A run that the README cites: the newest one that has all of its labels.

    Args:
        workload: First word of the rows' workload.
        labels: Systems of its rows, with or without the optimizer.
    """

    workload: str
    labels: tuple[str, ...]


class Headline(NamedTuple):
    """A line of the README's table.

    Args:
        title: What is trained.
        run: A name in NAMED_RUNS.
        setting: Ours.
    """

    title: str
    run: str
    setting: str


class Aim(NamedTuple):
    """A figure that was aimed for and missed.

    Args:
        title: What is trained.
        aim: With its unit.
        run: A name in NAMED_RUNS.
        label: Of the row in it.
        measure: In MEASURES.
        reason: Why it was missed.
    """

    title: str
    aim: str
    run: str
    label: str
    measure: str
    reason: str


_CLOCK = "In CUDA graphs, kernels follow each other without a gap, and the GPU lowers its clock."
AIMS = (
    Aim("Qwen3-30B-A3B LoRA, 12 layers", "85 ms", "30b-a3b", "ours shipped", "ms", _CLOCK),
    Aim("Qwen3-30B-A3B LoRA, 48 layers", "300 ms", "30b-a3b-48-layers", "ours auto+graphs=auto", "ms", _CLOCK),
    Aim(
        "gpt-oss-20b LoRA, 12 layers", "60,000 tokens/s", "gpt-oss", "ours keep+fused", "tokens",
        "Half of the step are products of experts. An expert gets 512 rows on average, in 4.5 tiles of 128 rows.",
    ),
    Aim(
        "Qwen3-32B, every weight", "135 GiB reserved", "32b-one-gpu", "", "reserved",
        "Weights and gradients alone take 122 GiB; the caching allocator keeps what a step frees.",
    ),
)  # fmt: skip
_BUDGET = "auto=12.0:24+fused"
NAMED_RUNS = {
    "14b": NamedRun(
        "qwen3-14b-qlora",
        ("ours keep+fused", f"ours {_BUDGET}", "ours recompute+fused", "unsloth off", "unsloth unsloth"),
    ),
    "14b-kept": NamedRun("qwen3-14b-qlora", ("ours shipped", "unsloth off")),
    "14b-fp8": NamedRun("qwen3-14b-qlora", ("ours keep+fused+fp8", "ours keep+fused", "unsloth off")),
    "14b-budget": NamedRun("qwen3-14b-qlora", ("ours auto=12.2:64+fused", "unsloth unsloth")),
    "14b-16k": NamedRun("qwen3-14b-qlora-16k", ("ours auto=13.7:64+fused", "unsloth unsloth")),
    "14b-16k-bitsandbytes": NamedRun(
        "qwen3-14b-qlora-16k", ("ours auto=13.7:64+fused, adamw_8bit", "unsloth unsloth")
    ),
    "14b-128k": NamedRun("qwen3-14b-10l-qlora-128k-one-document", ("ours auto=33:64+fused", "unsloth unsloth")),
    "14b-metadata": NamedRun("qwen3-14b-qlora", ("varlen/once", "varlen/every-layer", "sdpa/every-layer-loop")),
    "0.6b": NamedRun("qwen3-0.6b-lora", ("ours keep+graphs", "unsloth off", "unsloth unsloth")),
    "0.6b-launches": NamedRun(
        "qwen3-0.6b-lora", ("ours recompute+fused", "ours offload:24+fused", "unsloth unsloth")
    ),
    "0.6b-metadata": NamedRun("qwen3-0.6b-lora", ("varlen/once", "varlen/every-layer", "sdpa/every-layer-loop")),
    "30b-a3b": NamedRun("qwen3-30b-a3b-12l-lora", ("ours shipped", "unsloth off")),
    "30b-a3b-recomputed": NamedRun("qwen3-30b-a3b-12l-lora", ("ours recompute+graphs", "unsloth off")),
    "8b-budget": NamedRun("qwen3-8b-qlora", ("ours auto=7.9:64+fused", "unsloth unsloth")),
    "8b-budget-bitsandbytes": NamedRun("qwen3-8b-qlora", ("ours auto=8:64+fused, adamw_8bit", "unsloth unsloth")),
    "8b-full": NamedRun("qwen3-8b-full", ("ours keep+fused, adamw_fused", "unsloth off")),
    "8b-full-8-bit": NamedRun("qwen3-8b-full", ("ours keep+fused, adamw_fused_8bit", "unsloth off")),
    "8b-full-bitsandbytes": NamedRun("qwen3-8b-full", ("ours keep+fused, adamw_8bit", "unsloth off")),
    "8b-fp8-kept": NamedRun("qwen3-8b-full", ("ours keep+fused+fp8",)),
    "8b-fp8": NamedRun("qwen3-8b-full", ("ours recompute+fused+fp8", "ours recompute+fused")),
    "32k": NamedRun("llama-3.1-8b-lora-32k", ("ours keep+fused", "unsloth off")),
    "32k-one-document": NamedRun("llama-3.1-8b-lora-32k-one-document", ("ours keep+fused", "unsloth off")),
    "128k": NamedRun("llama-3.1-8b-lora-128k-one-document", ("ours offload:40+fused+tiles8", "unsloth unsloth")),
    "30b-a3b-48-layers": NamedRun("qwen3-30b-a3b-lora", ("ours auto+graphs=auto",)),
    "gpt-oss": NamedRun("gpt-oss-20b-12l-lora", ("ours keep+fused", "unsloth unsloth+padded64")),
    "32b-full": NamedRun("qwen3-32b-qlora", ("ours full fsdp x4",)),
    "32b-one-gpu": NamedRun(
        "qwen3-32b",
        ("ours recompute+fused, moments in 8 bits, 100 % of the moments on the host, stochastic rounding",),
    ),
    "70b": NamedRun("llama-3.3-70b-qlora", ("ours auto=130:16+fused",)),
    "70b-fp8": NamedRun("llama-3.3-70b-qlora", ("ours auto=130:16+fused+fp8",)),
}
README_LINES = (
    Headline("Qwen3-14B QLoRA", "14b-kept", "shipped"),
    Headline("the same with `vram_budget=12`", "14b", _BUDGET),
    Headline("Qwen3-30B-A3B LoRA, 12 layers", "30b-a3b", "shipped"),
    Headline("Qwen3-0.6B LoRA", "0.6b", "keep+graphs"),
    Headline("Llama-3.1-8B LoRA, 32,768 tokens", "32k", "keep+fused"),
    Headline("the same, one document of 131,072 tokens", "128k", "offload:40+fused+tiles8"),
    Headline("Qwen3-8B, every weight trained", "8b-full", "keep+fused"),
)
README_TEMPLATE = """\
{table}

Each line is one run on one GPU, named in the last column: median time of a step, peak memory, and the width of the
optimizer's moments. *Equal moments* and *best* are our tokens per second divided by those of Unsloth's fastest setting
in that run: with moments of equal width, and with the best setting of each. Empty cells were not measured in it.

Where ours loses: memory. With all activations kept, Qwen3-14B takes {keep_gib} GiB, Unsloth's default {unsloth_gib} GiB
({cite[14b]}). Qwen3-0.6B, recomputed and without CUDA graphs, takes {eager_gib} GiB and {eager_ms} ms, Unsloth's
default {unsloth_small_gib} GiB and {unsloth_small_ms} ms ({cite[0.6b-launches]}). With every weight of Qwen3-8B
trained, ours takes {full_gib} GiB, Unsloth {unsloth_full_gib} GiB ({cite[8b-full]}). With 8-bit moments, ours takes
{full_8_bit_ms} ms and {full_8_bit_gib} GiB, Unsloth {unsloth_full_8_bit_ms} ms and {unsloth_full_8_bit_gib} GiB
({cite[8b-full-8-bit]}). Nearly all of that gain is `FusedAdamW`: with `bitsandbytes.optim.AdamW8bit` in both, ours
takes {bitsandbytes_full_ms} ms, Unsloth {unsloth_bitsandbytes_full_ms} ms ({cite[8b-full-bitsandbytes]}).
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


class Commands:
    """Number the commands of a table, for the list below it, which names the logs of their runs."""

    def __init__(self) -> None:
        self._runs: dict[str, set[tuple[str, str, str]]] = {}

    def cite(self, entry: Entry) -> str:
        """Return the number of an entry's command."""
        self._runs.setdefault(entry.command, set()).add(entry.run)
        return f"[{list(self._runs).index(entry.command) + 1}]"

    def render(self) -> str:
        """Return the list."""
        logs = find_logs()
        lines = []
        for number, (command, runs) in enumerate(self._runs.items(), start=1):
            links = "".join(f"; {_log_link(logs[run])}" for run in sorted(runs) if run in logs)
            lines.append(f"{number}. `{command}`{links}")
        return "\n".join(lines)


def find_logs() -> dict[tuple[str, str, str], str]:
    """Return the names of the logs in benchmarks/logs, by the key of their runs."""
    return {
        (row["date"], row["command"], row["device"]): log.path.name for log in read_logs(LOGS) for row in log.rows()[:1]
    }


def _log_link(name: str) -> str:
    return f"[{name}](../benchmarks/logs/{name})"


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


def find_headline(entries: Sequence[Entry], workload: str) -> tuple[list[Entry], list[Entry]]:
    """Return the newest run that measured ours beside the fastest known settings of other systems on that GPU, else the
    newest that measured ours beside any; and the other systems' other rows on that GPU.

    A run with Unsloth or TRL comes before one with plain transformers only.
    """
    own = [e for e in entries if e.benchmark in HEADLINE_BENCHMARKS and _name(e) == workload]
    runs: dict[tuple[str, str, str], list[Entry]] = {}
    for entry in own:
        runs.setdefault(entry.run, []).append(entry)
    for others in (PEERS, ("plain",)):
        joint = [run for run in runs.values() if {"ours"} <= {e.system for e in run} and _of(run, others)]
        if joint:
            known = [entry for entry in own if entry.system != "ours" and CONTROL not in entry.label]
            run = max(
                joint,
                key=lambda found: (_has_fastest(found, known), _has_own_optimizer(found), max(e.order for e in found)),
            )
            labels = {entry.label for entry in run}
            rest = newest((entry for entry in known if entry.device == run[0].device), lambda e: e.label)
            return run, [entry for entry in rest if entry.label not in labels]
    return [], []


def _has_fastest(run: Sequence[Entry], known: Sequence[Entry]) -> bool:
    """Return whether a run has the fastest setting of each other system in it that is known on its GPU."""
    for system in {entry.system for entry in run if entry in known}:
        rows = [entry for entry in known if entry.system == system and entry.device == run[0].device]
        if fastest(rows).setting not in {entry.setting for entry in run if entry.system == system}:
            return False
    return True


def _has_own_optimizer(run: Sequence[Entry]) -> bool:
    """Return whether a run measured ours with `FusedAdamW`, not only with the optimizer of bitsandbytes."""
    return any(entry.system == "ours" and entry.optimizer.startswith("adamw_fused") for entry in run)


def write_headlines(entries: Sequence[Entry]) -> str:
    """Return the table of headlines and the list of its commands."""
    commands = Commands()
    lines = _head(
        "workload", "system", "setting", "optimizer", "ms", "repeated, ms", "steps", "per second", "allocated GiB",
        "reserved GiB", "device memory GiB", "host syncs", f"{NUM_WHOLE_STEPS} steps, s (partly extrapolated)",
        "device", "date", "command",
    )  # fmt: skip
    for workload in HEADLINES:
        run, earlier = find_headline(entries, workload)
        again = {entry.label.replace(CONTROL, ""): entry for entry in run if CONTROL in entry.label}
        first = [entry for entry in run if CONTROL not in entry.label]
        for entry in (*sorted(first, key=lambda e: (e.system != "ours", e.figures["ms"])), *earlier):
            mark = r" \*" if entry in earlier else ""
            repeated = again.get(entry.label)
            unit = "tokens" if "tokens" in entry.figures else "examples"
            lines.append(
                _line(
                    workload, entry.system + mark, f"`{entry.setting}`", BITS.get(entry.optimizer, ""),
                    format_figure(entry.figures["ms"]), _figure(repeated, "ms") if repeated else "", entry.num_steps,
                    f"{format_figure(entry.rate)} {unit}",
                    _figure(entry, "allocated"), _figure(entry, "reserved"), _figure(entry, "device memory"),
                    _host_syncs(entry), _figure(entry, "whole run"), short_device(entry.device), entry.date,
                    commands.cite(entry),
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
        run = [e for e in find_headline(entries, workload)[0] if CONTROL not in e.label and "fp8" not in e.label]
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


def find_quality(folder: Path = LOGS) -> Path:
    """Return the curves of the newest run of benchmarks.quality."""
    return max(folder.glob(QUALITY_CURVES), key=lambda path: path.stem[-10:])


def read_quality(folder: Path = LOGS) -> list[QualityPoint]:
    """Return the points of the newest run of benchmarks.quality."""
    with find_quality(folder).open(encoding="utf-8", newline="") as file:
        return [
            QualityPoint(
                row["system"], row["mode"], *map(int, (row["seed"], row["step"])),
                *map(float, (row["seconds"], row["loss"], row["exact"])),
            )
            for row in csv.DictReader(file)
        ]  # fmt: skip


def write_quality(folder: Path = LOGS) -> str:
    """Return the ends of the curves: seconds of the first and of later starts, loss and exact match over the seeds."""
    lines = _head("system", "setting", "first start, s", "later starts, s", "validation loss", "exact match")
    points = read_quality(folder)
    before = next(point for point in points if point.step == 0)
    for system in dict.fromkeys(point.system for point in points):
        ends = list({point.seed: point for point in points if point.system == system}.values())
        later = [point.seconds for point in ends if point.seed > 0]
        losses, exact = [point.loss for point in ends], [point.exact for point in ends]
        lines.append(
            _line(
                SYSTEM_NAMES[system],
                f"`{ends[0].mode}`",
                format_figure(ends[0].seconds),
                f"{min(later):.1f} to {max(later):.1f}",
                f"{fmean(losses):.4f} ({min(losses):.4f} to {max(losses):.4f})",
                f"{fmean(exact):.1%} ({min(exact):.1%} to {max(exact):.1%})",
            )
        )
    lines += ["", f"Before the fine-tuning: loss {before.loss:.4f}, exact match {before.exact:.1%}."]
    lines.append(f"`python -m benchmarks.quality` wrote {_log_link(find_quality(folder).name)}.")
    firsts = {point.system: point.seconds for point in points if point.seed == 0}
    faster = [SYSTEM_NAMES[system] for system, seconds in firsts.items() if seconds < firsts["ours"]]
    if faster:
        lines.append(f"In a first start of so short a run, compilation makes ours slower than {' and '.join(faster)}.")
    return "\n".join(lines)


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
                    short_device(entry.device), entry.date, commands.cite(entry),
                )
            )  # fmt: skip
    return "\n".join([*lines, "", commands.render()])


def _line_at(line: Sequence[Entry], entry: Entry) -> float:
    """Return the time of Unsloth's straight line at the memory of an entry, ms; constant beyond its ends."""
    low, high = (pick(line, key=lambda e: e.figures["allocated"]) for pick in (min, max))
    span = high.figures["allocated"] - low.figures["allocated"]
    share = (entry.figures["allocated"] - low.figures["allocated"]) / span if span else 0.0
    return low.figures["ms"] + min(max(share, 0.0), 1.0) * (high.figures["ms"] - low.figures["ms"])


def write_one_gpu(entries: Sequence[Entry]) -> str:
    """Return the newest rows of models within a budget of memory, and of all weights of a large model, on one GPU."""
    commands = Commands()
    lines = _head("workload", "setting", "ms", "tokens/s", "allocated GiB", "reserved GiB", "GPU", "date", "command")
    own = [e for e in entries if e.benchmark == "full_one_gpu"]
    own += [e for e in entries if e.benchmark == "offload small-cards" and e.label.startswith("ours auto=")]
    for entry in sorted(newest(own, lambda e: (e.workload, e.label, e.device)), key=lambda e: (e.workload, e.rate)):
        lines.append(
            _line(
                entry.workload, entry.label.removeprefix("ours "), format_figure(entry.figures["ms"]),
                _figure(entry, "tokens"), _figure(entry, "allocated"), _figure(entry, "reserved"),
                short_device(entry.device), entry.date, commands.cite(entry),
            )
        )  # fmt: skip
    return "\n".join([*lines, "", commands.render()])


def write_first_steps(rows: Iterable[dict[str, str]]) -> str:
    """Return the times of starts in the newest run of each workload, ours beside Unsloth's, from all rows."""
    own = [row for row in rows if row["benchmark"] == "first_step"]
    lines = _head(
        "workload", "caches", "imports", "model loaded", "first step", "steady", "Unsloth, first step", "steady",
        "ours / Unsloth, first step", "steady",
    )  # fmt: skip
    runs = {row["workload"]: (row["date"], row["device"], row["command"]) for row in own}
    for name, run in runs.items():
        found = {
            (row["system"], row["metric"]): float(row["value"])
            for row in own
            if (row["date"], row["device"], row["command"]) == run
        }
        for caches in ("cold", "warm"):
            ours, unsloth = (
                [found[f"{system}, {caches} caches", f"time to {part}"] for part in _START_PARTS]
                for system in ("ours", "unsloth")
            )
            seconds = [f"{value:.1f}" for value in (*ours, *unsloth[-2:])]
            ratios = [f"{one / other:.2f}" for one, other in zip(ours[-2:], unsloth[-2:])]
            lines.append(_line(name, caches, *seconds, *ratios))
    listed = [f"- {name}, {short_device(run[1])}, {run[0]}: `{run[2]}`" for name, run in runs.items()]
    return "\n".join([*lines, "", *listed])


def write_gpus(entries: Sequence[Entry]) -> str:
    """Return the newest row of every workload and form of parallelism, on each kind of GPU."""
    commands = Commands()
    lines = _head(
        "workload", "parallelism", "GPUs", "ms", "tokens/s", "times one GPU", "allocated GiB", "reserved GiB",
        "date", "command",
    )  # fmt: skip
    # Rows of tokens per GPU repeated their packs.
    own = [e for e in entries if e.benchmark == "multi_gpu" and "per GPU" not in e.workload]
    own = [e for e in own if "accumulation" not in e.label]
    own = newest(own, lambda e: (e.workload, e.label, e.device))
    ones = {(e.workload, _card(e)): e for e in own if e.label == "ours one GPU"}
    for entry in sorted(own, key=lambda e: (e.workload, _card(e), len(e.device))):
        # One GPU of these rows trains adapters.
        name = "" if "full" in entry.label else entry.workload.replace("+resident", "")
        one = ones.get((name, _card(entry)))
        lines.append(
            _line(
                entry.workload, entry.label.removeprefix("ours "), short_device(entry.device),
                format_figure(entry.figures["ms"]), _figure(entry, "tokens"),
                "" if one in (None, entry) else f"{entry.rate / one.rate:.2f}",
                _figure(entry, "allocated"), _figure(entry, "reserved"),
                entry.date, commands.cite(entry),
            )
        )  # fmt: skip
    return "\n".join([*lines, "", commands.render()])


def find_named_run(entries: Sequence[Entry], name: str) -> list[Entry]:
    """Return the entries of a run that the README cites, of its workload.

    Raises:
        LookupError: No run has all of its labels.
    """
    wanted = NAMED_RUNS[name]
    runs: dict[tuple[str, str, str], list[Entry]] = {}
    for entry in entries:
        if _name(entry) == wanted.workload:
            runs.setdefault(entry.run, []).append(entry)
    for run in sorted(runs.values(), key=lambda found: max(e.order for e in found), reverse=True):
        if {*wanted.labels} <= {label for entry in run for label in (entry.label, _short_label(entry))}:
            return run
    raise LookupError(f"no run of {wanted.workload} has {', '.join(wanted.labels)}")


def _short_label(entry: Entry) -> str:
    return entry.label.partition(", adamw")[0]


def write_named_runs(entries: Sequence[Entry]) -> str:
    """Return the list of the runs that the README cites."""
    logs = find_logs()
    lines = _head("run", "date", "device", "steps", "command")
    for name in NAMED_RUNS:
        entry, *rest = find_named_run(entries, name)
        steps = sorted({int(e.num_steps) for e in (entry, *rest)})
        log = f"; {_log_link(logs[entry.run])}" if entry.run in logs else ""
        shown = " to ".join(map(str, dict.fromkeys((steps[0], steps[-1]))))
        lines.append(_line(name, entry.date, entry.device, shown, f"`{entry.command}`{log}"))
    return "\n".join(lines)


def find_figures(entries: Sequence[Entry]) -> dict[str, str]:
    """Return the figures that prose names, each pair compared in one run."""
    cells = {
        "eager": ("0.6b-launches", "ours recompute+fused"),
        "unsloth_small": ("0.6b-launches", "unsloth unsloth"),
        "offload": ("0.6b-launches", "ours offload:24+fused"),
        "graph": ("0.6b", "ours keep+graphs"),
        "keep": ("14b", "ours keep+fused"),
        "budget": ("14b", f"ours {_BUDGET}"),
        "unsloth": ("14b", "unsloth unsloth"),
        "full": ("8b-full", "ours keep+fused"),
        "unsloth_full": ("8b-full", "unsloth off"),
        "full_8_bit": ("8b-full-8-bit", "ours keep+fused"),
        "unsloth_full_8_bit": ("8b-full-8-bit", "unsloth off"),
        "bitsandbytes_full": ("8b-full-bitsandbytes", "ours keep+fused"),
        "unsloth_bitsandbytes_full": ("8b-full-bitsandbytes", "unsloth off"),
    }
    found = {}
    for name, (run, label) in cells.items():
        entry = fastest([e for e in find_named_run(entries, run) if _short_label(e) == label])
        found[f"{name}_ms"], found[f"{name}_gib"] = _figure(entry, "ms"), _figure(entry, "allocated")
    return found


def write_aims(entries: Sequence[Entry]) -> str:
    """Return the aims that were missed, with the figures of their runs."""
    lines = _head("one GPU", "aim", "measured", "why", "run")
    for title, aim, run, label, measure, reason in AIMS:
        entry = next(e for e in find_named_run(entries, run) if label in ("", _short_label(e)))
        lines.append(_line(title, aim, _figure(entry, measure), reason, run))
    return "\n".join(lines)


def fastest(entries: Iterable[Entry]) -> Entry:
    """Return the entry with the most tokens, or examples, per second."""
    return max(entries, key=lambda entry: entry.rate)


def write_readme_headlines(path: Path = RESULTS) -> str:
    """Return the headlines of README.md: every line is of one run."""
    entries = read_entries(path)
    lines = _head(
        "one GPU", "ours", "Unsloth, default", "Unsloth, fastest", "equal moments", "best", "run"
    )  # fmt: skip
    for title, name, setting in README_LINES:
        run = [e for e in find_named_run(entries, name) if CONTROL not in e.label]
        ours = [e for e in run if _short_label(e) == f"ours {setting}"]
        others = [e for e in run if e.system == "unsloth"]
        default = [e for e in others if e.setting == "unsloth"]
        if setting == _BUDGET:
            # Only the default needs as little memory.
            others = default
        pairs = [_best_pair([*ours, *others], "unsloth", bits) for bits in ("8-bit", "32-bit", None)]
        ratios = [f"{pair[0].rate / pair[1].rate:.2f}" if pair else "" for pair in pairs]
        equal = ", ".join(f"{ratio} ({bits})" for ratio, bits in zip(ratios, ("8-bit", "32-bit")) if ratio)
        cells = [_cell(found) for found in (ours, default, others)]
        lines.append(_line(title, *cells, equal, ratios[-1], cite_run(name)))
    cite = {name: cite_run(name) for name in NAMED_RUNS}
    return README_TEMPLATE.format(table="\n".join(lines), cite=cite, **find_figures(entries))


def _cell(entries: Sequence[Entry]) -> str:
    """Return time, memory and width of moments of the fastest entry."""
    if not entries:
        return ""
    entry = fastest(entries)
    width = f" ({BITS[entry.optimizer]})" if entry.optimizer in BITS else ""
    return f"{_figure(entry, 'ms')} ms, {_figure(entry, 'allocated')} GiB{width}"


def cite_run(name: str) -> str:
    """Return a link to the list of runs.

    Example:
        >>> cite_run("14b")
        '[run 14b](docs/numbers.md#runs-of-the-readme)'
    """
    return f"[run {name}](docs/numbers.md#runs-of-the-readme)"


def write_numbers(path: Path = RESULTS) -> str:
    """Return docs/numbers.md."""
    entries = read_entries(path)
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    return TEMPLATE.format(
        num_rows=f"{len(rows):,}",
        num_commands=f"{len({row['command'] for row in rows}):,}",
        num_row_steps=NUM_ROW_STEPS,
        num_whole_steps=NUM_WHOLE_STEPS,
        not_installable=write_not_installable(),
        machine=CHECKED_AGAINST,
        named_runs=write_named_runs(entries),
        headlines=write_headlines(entries),
        ratios=write_ratios(entries),
        aims=write_aims(entries),
        front=write_front(entries),
        quality=write_quality(),
        published=render_published(read_published([path])) + "\n",
        one_gpu=write_one_gpu(entries),
        first_steps=write_first_steps(rows),
        gpus=write_gpus(entries),
        **find_figures(entries),
    )


def write_not_installable() -> str:
    """Return the systems that pip does not install here, with the reason."""
    lines = _head("system", "version looked at", "requires, or error")
    return "\n".join([*lines, *(_line(f"`{name}`", found.version, found.why) for name, found in CONFLICTS.items())])


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
