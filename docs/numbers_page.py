"""Return docs/numbers.md: tables of benchmarks/results.csv, and prose with figures of its rows.

`python docs/generate.py` writes the page. No figure is written by hand: the prose refers to figures as {name}.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from benchmarks.published_table import read_rows as read_published
from benchmarks.published_table import render as render_published
from benchmarks.ruler.logs import LOGS, read_logs
from benchmarks.ruler.pairs import NUM_WHOLE_STEPS
from benchmarks.ruler.rows import NUM_ROW_STEPS, ROWS
from benchmarks.ruler.systems import CHECKED_AGAINST, CONFLICTS
from docs.entries import (
    BITS,
    CONTROL,
    RESULTS,
    Entry,
    best_pair,
    faster_of_repeats,
    fastest,
    figure,
    format_figure,
    newest,
    read_entries,
    short_device,
    short_label,
    table_head,
    table_row,
    workload_name,
)
from docs.named_runs import NAMED_RUNS, find_figures, find_named_run

# Headlines that scripts other than compare.py measure.
OTHER_HEADLINES = ("dpo qwen3-8b-lora", "grpo qwen3-8b-lora", "qwen3-vl-8b")
HEADLINES = (*(row.workload for row in ROWS.values() if row.workload != "tiny"), *OTHER_HEADLINES)
HEADLINE_BENCHMARKS = ("compare", "train_step", "moe", "tuners", "images")
PEERS = ("unsloth", "trl")
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
settings with moments of the same width, then among all. If a setting was repeated, its faster time counts. A base in
fp8 is an approximation and is excluded.

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

### Further settings
- **Four systems**: Qwen3-14B QLoRA, packed, without checkpointing (run `14b-plain`): ours takes {four_ours_ms} ms and
  {four_ours_gib} GiB, Unsloth {four_unsloth_ms} ms and {four_unsloth_gib} GiB, TRL with Liger {four_trl_ms} ms and
  {four_trl_gib} GiB, and a plain loop of transformers and PEFT with Liger {four_plain_ms} ms and {four_plain_gib} GiB.
  TRL with checkpointing takes {trl_recompute_ms} ms and {trl_recompute_gib} GiB (run `14b-trl`).
- **Budgets**: Qwen3-8B QLoRA takes {small_budget_ms} ms and {small_budget_gib} GiB under `vram_budget=7.9`, Unsloth's
  default {unsloth_8b_ms} ms and {unsloth_8b_gib} GiB (run `8b-budget`); with `bitsandbytes.optim.AdamW8bit` in both,
  {small_budget_bnb_ms} and {unsloth_8b_bnb_ms} ms (run `8b-budget-bitsandbytes`). Qwen3-14B QLoRA in packs of `16384`
  tokens takes {long_budget_ms} ms and {long_budget_gib} GiB under `vram_budget=13.7`, Unsloth's default
  {unsloth_16k_ms} ms and {unsloth_16k_gib} GiB (run `14b-16k`); with that optimizer in both, {long_budget_bnb_ms} and
  {unsloth_16k_bnb_ms} ms (run `14b-16k-bitsandbytes`).
- **Products in fp8**, which are approximate: Qwen3-14B QLoRA takes {frozen_fp8_ms} ms and {frozen_fp8_gib} GiB, and
  {frozen_bf16_ms} ms without them (run `14b-fp8`). Qwen3-8B LoRA takes {lora_fp8_ms} ms and {lora_fp8_gib} GiB from
  CUDA graphs, Unsloth with `load_in_fp8=True` {unsloth_fp8_ms} ms and {unsloth_fp8_gib} GiB (run `8b-lora-fp8`). Every
  weight of Qwen3-8B, recomputed, on an H100: {full_fp8_ms} ms and {full_fp8_gib} GiB, against {full_bf16_ms} ms and
  {full_bf16_gib} GiB in bf16 (run `8b-fp8`). Kept, on an H200: {full_fp8_kept_ms} ms and {full_fp8_kept_gib} GiB (run
  `8b-fp8-kept`).
- **Experts, recomputed**: twelve layers of Qwen3-30B-A3B take {experts_recomputed_ms} ms and
  {experts_recomputed_gib} GiB from CUDA graphs (run `30b-a3b-recomputed`).
- **Padded batches**: twelve layers of gpt-oss-20b (run `gpt-oss`): ours packs and trains {gpt_oss_tokens} tokens/s in
  {gpt_oss_gib} GiB.
  Unsloth gets documents sorted by length and padded: without checkpointing, sixteen in a batch,
  {unsloth_gpt_oss_tokens} tokens/s in {unsloth_gpt_oss_gib} GiB; by default, `64` in a batch,
  {unsloth_gpt_oss_default_tokens} tokens/s in {unsloth_gpt_oss_default_gib} GiB.
- **One long document**: `llama-3.1-8b-lora-32k-one-document` takes {long_ms} ms and {long_gib} GiB, Unsloth without
  checkpointing {unsloth_long_ms} ms and {unsloth_long_gib} GiB (run `32k-one-document`).
  `qwen3-14b-10l-qlora-128k-one-document` takes {longest_ms} ms and {longest_gib} GiB under `vram_budget=33`, Unsloth's
  default {unsloth_longest_ms} ms and {unsloth_longest_gib} GiB (run `14b-128k`). In run `128k`, layer inputs in host
  memory and feed-forward blocks in tiles were set by hand.

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
compares tokens per second with the newest row of one GPU of the same kind on the same workload. That row may be of
older code, so a ratio can exceed the number of GPUs. `fastft plan` predicts these rows;
`python -m benchmarks.cluster_model` prints its errors.

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
    Aim("Qwen3-30B-A3B LoRA, 48 layers", "300 ms", "30b-a3b-48-layers", "ours shipped", "ms", _CLOCK),
    Aim(
        "gpt-oss-20b LoRA, 12 layers", "60,000 tokens/s", "gpt-oss", "ours keep+fused", "tokens",
        "Half of the step is products of experts, whose last tiles are partly empty: an expert gets few rows.",
    ),
)  # fmt: skip


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


def find_headline(entries: Sequence[Entry], workload: str) -> tuple[list[Entry], list[Entry]]:
    """Return the newest run that measured ours beside the fastest known settings of other systems on that GPU, else the
    newest that measured ours beside any; and the other systems' other rows on that GPU.

    A run with Unsloth or TRL comes before one with plain transformers only.
    """
    own = [e for e in entries if e.benchmark in HEADLINE_BENCHMARKS and workload_name(e) == workload]
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
    lines = table_head(
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
                table_row(
                    workload, entry.system + mark, f"`{entry.setting}`", BITS.get(entry.optimizer, ""),
                    format_figure(entry.figures["ms"]), figure(repeated, "ms") if repeated else "", entry.num_steps,
                    f"{format_figure(entry.rate)} {unit}",
                    figure(entry, "allocated"), figure(entry, "reserved"), figure(entry, "device memory"),
                    _host_syncs(entry), figure(entry, "whole run"), short_device(entry.device), entry.date,
                    commands.cite(entry),
                )
            )  # fmt: skip
    return "\n".join([*lines, "", commands.render()])


def _host_syncs(entry: Entry) -> str:
    """Return the host syncs of a whole step, or those to the end of the backward, marked."""
    partial = figure(entry, "host syncs to the backward")
    return figure(entry, "host syncs") or (f"{partial}+" if partial else "")


def write_ratios(entries: Sequence[Entry]) -> str:
    """Return how ours compares with each other system in the runs of the headlines."""
    lines = table_head("workload", "other system", "8-bit moments", "32-bit moments", "best of each", "allocated GiB")
    for workload in HEADLINES:
        run = [e for e in faster_of_repeats(find_headline(entries, workload)[0]) if "fp8" not in e.label]
        for other in dict.fromkeys(entry.system for entry in run if entry.system != "ours"):
            cells = [best_pair(run, other, bits) for bits in ("8-bit", "32-bit", None)]
            ratios = [f"{pair[0].rate / pair[1].rate:.2f}" if pair else "" for pair in cells]
            memory = " against ".join(figure(entry, "allocated") for entry in cells[-1])
            lines.append(table_row(workload, other, *ratios, memory))
    return "\n".join(lines)


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
    lines = table_head("system", "setting", "first start, s", "later starts, s", "validation loss", "exact match")
    points = read_quality(folder)
    before = next(point for point in points if point.step == 0)
    for system in dict.fromkeys(point.system for point in points):
        ends = list({point.seed: point for point in points if point.system == system}.values())
        later = [point.seconds for point in ends if point.seed > 0]
        losses, exact = [point.loss for point in ends], [point.exact for point in ends]
        lines.append(
            table_row(
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
    lines = table_head(
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
                table_row(
                    _title(entry), entry.system, f"`{entry.setting}`", format_figure(entry.figures["ms"]),
                    figure(entry, "tokens"), figure(entry, "allocated"), figure(entry, "reserved"),
                    figure(entry, "predicted ms"), figure(entry, "predicted GiB"), relative,
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
    lines = table_head(
        "workload", "setting", "ms", "tokens/s", "allocated GiB", "reserved GiB", "GPU", "date", "command"
    )
    own = [e for e in entries if e.benchmark == "full_one_gpu"]
    own += [e for e in entries if e.benchmark == "offload small-cards" and e.label.startswith("ours auto=")]
    for entry in sorted(newest(own, lambda e: (e.workload, e.label, e.device)), key=lambda e: (e.workload, e.rate)):
        lines.append(
            table_row(
                entry.workload, entry.label.removeprefix("ours "), format_figure(entry.figures["ms"]),
                figure(entry, "tokens"), figure(entry, "allocated"), figure(entry, "reserved"),
                short_device(entry.device), entry.date, commands.cite(entry),
            )
        )  # fmt: skip
    return "\n".join([*lines, "", commands.render()])


def write_first_steps(rows: Iterable[dict[str, str]]) -> str:
    """Return the times of starts in the newest run of each workload, ours beside Unsloth's, from all rows."""
    own = [row for row in rows if row["benchmark"] == "first_step"]
    lines = table_head(
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
            lines.append(table_row(name, caches, *seconds, *ratios))
    listed = [f"- {name}, {short_device(run[1])}, {run[0]}: `{run[2]}`" for name, run in runs.items()]
    return "\n".join([*lines, "", *listed])


def write_gpus(entries: Sequence[Entry]) -> str:
    """Return the newest row of every workload and form of parallelism, on each kind of GPU."""
    commands = Commands()
    lines = table_head(
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
            table_row(
                entry.workload, entry.label.removeprefix("ours "), short_device(entry.device),
                format_figure(entry.figures["ms"]), figure(entry, "tokens"),
                "" if one in (None, entry) else f"{entry.rate / one.rate:.2f}",
                figure(entry, "allocated"), figure(entry, "reserved"),
                entry.date, commands.cite(entry),
            )
        )  # fmt: skip
    return "\n".join([*lines, "", commands.render()])


def write_named_runs(entries: Sequence[Entry]) -> str:
    """Return the list of the runs that the README cites."""
    logs = find_logs()
    lines = table_head("run", "date", "device", "steps", "command")
    for name in NAMED_RUNS:
        entry, *rest = find_named_run(entries, name)
        steps = sorted({int(e.num_steps) for e in (entry, *rest)})
        log = f"; {_log_link(logs[entry.run])}" if entry.run in logs else ""
        shown = " to ".join(map(str, dict.fromkeys((steps[0], steps[-1]))))
        lines.append(table_row(name, entry.date, entry.device, shown, f"`{entry.command}`{log}"))
    return "\n".join(lines)


def write_aims(entries: Sequence[Entry]) -> str:
    """Return the aims that were missed, with the figures of their runs."""
    lines = table_head("one GPU", "aim", "measured", "why", "run")
    for title, aim, run, label, measure, reason in AIMS:
        entry = next(e for e in find_named_run(entries, run) if label in ("", short_label(e)))
        lines.append(table_row(title, aim, figure(entry, measure), reason, run))
    return "\n".join(lines)


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
    lines = table_head("system", "version looked at", "requires, or error")
    return "\n".join([*lines, *(table_row(f"`{name}`", found.version, found.why) for name, found in CONFLICTS.items())])


def _title(entry: Entry) -> str:
    return entry.workload.replace(", packed", "").replace(", labels 100%", "")


def _of(run: Iterable[Entry], systems: Sequence[str]) -> bool:
    return any(entry.system in systems for entry in run)


def _card(entry: Entry) -> str:
    """Return the kind of GPU, without their number."""
    return short_device(entry.device).rpartition(" x ")[2]
