"""The published figures of the three optimisations and of the articles about them, with our rows of results.csv."""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.offload import PUBLISHED as PUBLISHED_BUFFERS
from benchmarks.packed_metadata import PUBLISHED as PUBLISHED_METADATA
from benchmarks.packed_metadata import PUBLISHED_BUILD_MS
from benchmarks.ruler.workloads import WORKLOADS

Row = dict[str, str]

ARTICLE = "https://www.unsloth.ai/blog/nvidia-collab"
METADATA_SOURCE = f"{ARTICLE}; unslothai/unsloth#4243"
BUFFERS_SOURCE = f"{ARTICLE}; unslothai/unsloth-zoo#534"
ROUTING_SOURCE = f"{ARTICLE}; unslothai/unsloth-zoo#535"
# The title and first part of the article have the speed and the compared systems; the copy ends before its figures of
# memory.
TRADITIONAL_SOURCE = (
    "https://www.bedda.tech/blog/2026-05-07-llm-training-optimization-unsloth-vs-traditional-nvidia-training-2x-speed-gains-deep-dive-100115 "
    "(2x read there; the passage with the figures in GB could not be read)"
)
# TRL's page says 80 %; its page of release 0.21 said 70 %.
LESS_MEMORY_SOURCE = "https://huggingface.co/docs/trl/unsloth_integration"
# Published: (L-1)*m and the observed difference (ms), for the models in packed_metadata.PUBLISHED.
PUBLISHED_FORMULA_MS = {"llama-3.2-1b-lora": (205.5, 199), "qwen3-0.6b-lora": (369.9, 319)}
PUBLISHED_SAVED_MS = (207, 279)
PUBLISHED_ROUTING = {"forward": 23, "backward": 13}
PUBLISHED_ROUTING_STEP = (10, 15)
PUBLISHED_TOGETHER = 25
PUBLISHED_TOGETHER_FIRST = 15
PUBLISHED_SPEED = 2
PUBLISHED_MEMORY_GB = ((24, 32), (16, 20))
PUBLISHED_LESS_MEMORY = 80
DENSE, MIXTURE = "qwen3-0.6b-lora", "qwen3-30b-a3b-12l-lora"
NOT_MEASURED = "not measured"
GB_PER_GIB = 2**30 / 1e9
# Per cent: a gain below the first counts as none for any spread; with a spread above the second a small gain is
# unknown.
NEAR_ZERO, STEADY = 0.5, 2.0


class Found(NamedTuple):
    """Our figure in words, and the rows that it was computed from."""

    text: str
    rows: tuple[Row, ...]


class Figure(NamedTuple):
    """One published figure.

    Args:
        topic: The optimisation.
        claim: The published figure.
        source: Its source.
        find: Computes our figure from the rows; returns None if a row is missing.
        command: The command that measures ours.
    """

    topic: str
    claim: str
    source: str
    find: Callable[[Rows], Found | None]
    command: str


class Rows:
    """Rows of results files that were measured on a GPU, of which the last one counts.

    Args:
        rows: Rows, oldest first.
    """

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = [row for row in rows if row["device"] not in ("", "cpu")]

    def last(self, benchmark: str, workload: str, system: str, metric: str, *, of_run: Row | None = None) -> Row | None:
        """Return the last row with these columns and a workload with this prefix; of the same run as another row, if
        given.
        """
        for row in reversed(self._rows):
            is_wanted = (row["benchmark"], row["system"], row["metric"]) == (benchmark, system, metric) and row[
                "workload"
            ].startswith(workload)
            if is_wanted and (
                of_run is None or all(row[name] == of_run[name] for name in ("command", "device", "workload"))
            ):
                return row
        return None

    def all(self, benchmark: str, workload: str, systems: Sequence[str], metric: str) -> tuple[Row, ...] | None:
        """Return the last row of every system, of one run if the first one's has them all; None if one is missing."""
        first = self.last(benchmark, workload, systems[0], metric)
        if first is None:
            return None
        selected = [first]
        for system in systems[1:]:
            row = self.last(benchmark, workload, system, metric, of_run=first) or self.last(
                benchmark, first["workload"], system, metric
            )
            if row is None or row["device"] != first["device"]:
                return None
            selected.append(row)
        return tuple(selected)


def read_rows(paths: Sequence[Path]) -> Rows:
    """Return the rows of results files, one after the other."""
    rows: list[Row] = []
    for path in paths:
        with path.open(newline="", encoding="utf-8") as file:
            rows += csv.DictReader(file)
    return Rows(rows)


def _value(row: Row) -> float:
    return float(row["value"])


def judge_gain(gain: float, spread: float) -> str:
    """Describe whether a gain is significant.

    Args:
        gain: Gain in per cent.
        spread: Difference of two rounds of one combination, in per cent.

    Example:
        >>> judge_gain(0.2, 0.4)
        'near 0: two rounds of one combination differ by up to 0.4 %'
    """
    if abs(gain) > max(spread, NEAR_ZERO):
        return f"more than two rounds of one combination differ by (up to {spread:.1f} %)"
    verdict = "near 0" if max(abs(gain), spread) <= STEADY else "not decided"
    return f"{verdict}: two rounds of one combination differ by up to {spread:.1f} %"


def _gain(off: Row, on: Row) -> str:
    return f"{(_value(off) / _value(on) - 1) * 100:+.1f} %"


# Packed metadata


def _build_time(rows: Rows) -> Found | None:
    systems = ("dense, loop over documents", "dense, transformers", "dense, ours")
    builds = rows.all("packed_metadata", "8192 tokens", systems, "one build")
    if builds is None:
        return None
    loop, library, own = (f"{_value(row):.2f}" for row in builds)
    return Found(
        f"{loop} ms by such a loop, {library} by transformers' functions, {own} by ours ({builds[0]['workload']})",
        builds,
    )


def _metadata_gain(workload: str) -> Callable[[Rows], Found | None]:
    def find(rows: Rows) -> Found | None:
        parts: list[str] = []
        used: list[Row] = []
        for arm in ("sdpa/every-layer-loop", "varlen/every-layer"):
            backend = arm.partition("/")[0]
            gained = []
            for part in ("forward", "backward", "step"):
                pair = rows.all("packed_metadata", f"{workload},", (arm, f"{backend}/once"), part)
                if pair is None:
                    return None
                used += pair
                gained.append(f"{part} {_gain(*pair)}")
            saved = _value(used[-2]) - _value(used[-1])
            parts.append(
                f"{'dense mask by the loop' if backend == 'sdpa' else 'varlen offsets, as our steps use them'}: "
                f"{', '.join(gained)}"
            )
            parts[-1] += f" ({saved:.1f} ms a step)"
        # A build by the same loop on the same machine.
        build = rows.last("packed_metadata", "8192 tokens", "dense, loop over documents", "one build")
        if build is not None and build["device"] == used[0]["device"]:
            num_layers = int(WORKLOADS[workload].model_config["num_hidden_layers"])
            parts.append(
                f"(L-1)*m = {num_layers - 1} * {_value(build):.2f} = {(num_layers - 1) * _value(build):.1f} ms"
            )
            used.append(build)
        return Found("; ".join(parts), tuple(used))

    return find


def _metadata_claim(workload: str) -> str:
    gained = ", ".join(f"{part} +{value} %" for part, value in PUBLISHED_METADATA[workload].items())
    formula = PUBLISHED_FORMULA_MS.get(workload)
    return f"{workload.rpartition('-')[0]}: {gained}" + (
        f"; (L-1)*m = {formula[0]} ms, about {formula[1]} observed" if formula else ""
    )


# Staging buffers


def _buffers_gain(workload: str) -> Callable[[Rows], Found | None]:
    def find(rows: Rows) -> Found | None:
        steps = rows.all("offload buffers", f"{workload},", ("ours offload1", "ours offload"), "step")
        peaks = rows.all("offload buffers", f"{workload},", ("ours offload1", "ours offload"), "peak allocated")
        if steps is None or peaks is None:
            return None
        extra = (_value(peaks[1]) - _value(peaks[0])) * GB_PER_GIB
        return Found(f"{_gain(*steps)} steps/s, {extra:+.2f} GB ({steps[0]['workload']})", (*steps, *peaks))

    return find


def _buffers_formula(rows: Rows) -> Found | None:
    parts: list[str] = []
    used: list[Row] = []
    for workload in ("qwen3-8b-qlora", "qwen3-14b-qlora"):
        steps = rows.all("offload buffers", f"{workload},", ("ours offload1", "ours offload"), "step")
        waited = rows.all("offload buffers", f"{workload},", ("ours offload1", "ours offload"), "exposed copies")
        if steps is None or waited is None:
            continue
        parts.append(
            f"{steps[0]['workload']}: {_value(steps[0]) - _value(steps[1]):.1f} ms saved; compute waited "
            f"{_value(waited[0]):.1f} ms for copies with "
            f"one buffer, {_value(waited[1]):.1f} with two"
        )
        used += [*steps, *waited]
    for workload in (DENSE, MIXTURE):
        num_layers = int(WORKLOADS[workload].model_config["num_hidden_layers"])
        routing = "bincount" if WORKLOADS[workload].num_experts else "dense"
        modes = tuple(f"once+{buffers}+{routing}+varlen" for buffers in ("one", "two"))
        steps = rows.all("published combinations", f"{workload},", modes, "step")
        copied = rows.last("published combinations", f"{workload},", modes[0], "copy of a layer's input")
        backward = rows.last("published combinations", f"{workload},", modes[1], "backward of a layer")
        if steps is None or copied is None or backward is None:
            continue
        formula = (num_layers - 1) * min(_value(copied), _value(backward))
        parts.append(
            f"{steps[0]['workload']}: (L-1)*min(c, g) = {formula:.1f} ms, {_value(steps[0]) - _value(steps[1]):.1f} "
            "measured"
        )
        used += [*steps, copied, backward]
    return Found("; ".join(parts), tuple(used)) if parts else None


# Experts


def _layer_gain(rows: Rows) -> Found | None:
    parts: list[str] = []
    used: list[Row] = []
    for system, title in (("published", "the published loop"), ("ours", "ours")):
        gained = []
        for part in ("forward", "backward"):
            pair = rows.all("moe_layer", "gpt-oss-20b, 8192 tokens, balanced, frozen", ("eager", system), part)
            if pair is None:
                return None
            gained.append(f"{part} {_gain(*pair)}")
            used += pair
        parts.append(f"{title}: {', '.join(gained)}")
    return Found("a layer alone, against transformers' eager form: " + "; ".join(parts), tuple(used))


def _routing_step(rows: Rows) -> Found | None:
    modes = tuple(f"once+two+{routing}+varlen" for routing in ("loop", "bincount"))
    pair = rows.all("published combinations", f"{MIXTURE},", modes, "step")
    if pair is None:
        return None
    text, used = f"ours against transformers' loop: {_gain(*pair)} steps/s", [*pair]
    for routing, title in (("published", "the published loop"), ("grouped", "transformers' grouped products")):
        other = rows.all("published combinations", f"{MIXTURE},", (modes[0], f"once+two+{routing}+varlen"), "step")
        if other is not None:
            text += f"; {title}: {_gain(*other)}"
            used += other
    return Found(f"{text} ({pair[0]['workload']})", tuple(used))


def _layer_waits(rows: Rows) -> Found | None:
    parts: list[str] = []
    used: list[Row] = []
    for shape in ("qwen3-30b-a3b", "gpt-oss-20b"):
        sentences = []
        for system in ("eager", "published", "ours"):
            counts = [
                rows.last("published waits", f"a layer of {shape},", system, f"host waits, {part}")
                for part in ("forward", "backward")
            ]
            if None not in counts:
                used += [row for row in counts if row is not None]
                sentences.append(f"{system} {' / '.join(row['value'] for row in counts if row is not None)}")
        if sentences:
            parts.append(f"{shape}, forward / backward: {', '.join(sentences)}")
    return Found("; ".join(parts), tuple(used)) if parts else None


def _mask_waits(rows: Rows) -> Found | None:
    kinds = ("dense, loop over documents", "varlen, transformers", "dense, ours", "varlen, ours")
    selected = rows.all("published waits", "", kinds, "host waits, one build")
    return (
        None
        if selected is None
        else Found(", ".join(f"{kind}: {row['value']}" for kind, row in zip(kinds, selected)), selected)
    )


# All of it


def _together(workload: str) -> Callable[[Rows], Found | None]:
    def find(rows: Rows) -> Found | None:
        off, on = ("loop", "bincount") if WORKLOADS[workload].num_experts else ("dense", "dense")
        parts: list[str] = []
        used: list[Row] = []
        for attention in ("varlen", "sdpa"):
            modes = (f"every+one+{off}+{attention}", f"once+two+{on}+{attention}")
            pair = rows.all("published combinations", f"{workload},", modes, "step")
            if pair is None:
                continue
            used += pair
            spreads = rows.all("published combinations", f"{workload},", modes, "difference of two rounds")
            text = f"{attention}: {_gain(*pair)} steps/s ({_value(pair[0]):.1f} -> {_value(pair[1]):.1f} ms)"
            if spreads is not None:
                used += spreads
                gain = (_value(pair[0]) / _value(pair[1]) - 1) * 100
                text += f", {judge_gain(gain, max(_value(row) for row in spreads))}"
            parts.append(text)
        return Found("; ".join(parts), tuple(used)) if parts else None

    return find


def _traditional(*, is_memory: bool) -> Callable[[Rows], Found | None]:
    def find(rows: Rows) -> Found | None:
        parts: list[str] = []
        used: list[Row] = []
        for mode in ("recompute+fused", "recompute+fused@full", "auto=18.6:8+fused@full", "keep+fused@full"):
            systems = ("plain padded+recompute, adamw_fused", f"ours {mode}, adamw_fused")
            rates = rows.all("published traditional", "llama-7b-lora,", systems, "tokens")
            peaks = rows.all("published traditional", "llama-7b-lora,", systems, "peak allocated")
            if rates is None or peaks is None:
                continue
            used += [*rates, *peaks]
            before, after = (_value(row) * GB_PER_GIB for row in peaks)
            share = (
                f"{after / before - 1:+.0%} memory"
                if is_memory
                else f"{_value(rates[1]) / _value(rates[0]):.2f}x the real tokens/s"
            )
            parts.append(f"{mode}: {share}, {before:.1f} -> {after:.1f} GB")
        return Found("; ".join(parts), tuple(used)) if parts else None

    return find


def figures() -> list[Figure]:
    """Return every published figure, in the order of the table."""
    metadata = "python -m benchmarks.packed_metadata --workload {} --root /dev/shm/fastft --out runs/metadata"
    combinations = "python -m benchmarks.published combinations --workload {} --out runs/published"
    buffers = "python -m benchmarks.offload buffers --out runs/offload --cells {}@16384"
    traditional = "python -m benchmarks.published traditional --out runs/published"
    waits = "python -m benchmarks.published waits --out runs/published"
    (low, high), (less_low, less_high) = PUBLISHED_MEMORY_GB
    routing = ", ".join(f"{part} +{value} %" for part, value in PUBLISHED_ROUTING.items())
    return [
        Figure(
            "metadata once",
            f"m = {PUBLISHED_BUILD_MS} ms to build the dense mask of a pack (Blackwell)",
            METADATA_SOURCE,
            _build_time,
            metadata.format("qwen3-14b-qlora"),
        ),
        *(
            Figure("metadata once", _metadata_claim(name), METADATA_SOURCE, _metadata_gain(name), metadata.format(name))
            for name in ("llama-3.2-1b-lora", "qwen3-0.6b-lora", "qwen3-14b-qlora")
        ),
        Figure(
            "metadata once",
            "(L-1)*s: a device query of s in every layer, then one a step",
            METADATA_SOURCE,
            _mask_waits,
            waits,
        ),
        *(
            Figure(
                "two staging buffers",
                f"{name.split('-')[1].upper()}: +{gain:.2f} % steps/s, +{extra:.2f} GB (B200)",
                BUFFERS_SOURCE,
                _buffers_gain(name),
                buffers.format(name),
            )
            for name, (gain, extra) in PUBLISHED_BUFFERS.items()
        ),
        Figure(
            "two staging buffers",
            f"(L-1)*min(c, g): {PUBLISHED_SAVED_MS[0]} to {PUBLISHED_SAVED_MS[1]} ms saved a step, 8B to 14B (B200)",
            BUFFERS_SOURCE,
            _buffers_formula,
            combinations.format(DENSE),
        ),
        Figure("routing by one count", f"gpt-oss-20b: {routing}", ROUTING_SOURCE, _layer_gain, waits),
        Figure(
            "routing by one count",
            f"{PUBLISHED_ROUTING_STEP[0]} to {PUBLISHED_ROUTING_STEP[1]} % end to end",
            ROUTING_SOURCE,
            _routing_step,
            combinations.format(MIXTURE),
        ),
        Figure(
            "routing by one count",
            "dynamic device queries of an MoE layer: E, then 1",
            ROUTING_SOURCE,
            _layer_waits,
            waits,
        ),
        *(
            Figure(
                "all three",
                f"about {PUBLISHED_TOGETHER} % faster (about {PUBLISHED_TOGETHER_FIRST} % in the page's first "
                f"version); {name}",
                ARTICLE,
                _together(name),
                combinations.format(name),
            )
            for name in (DENSE, MIXTURE)
        ),
        Figure(
            "beside a traditional loop",
            f"7B: {PUBLISHED_SPEED}x the speed, {low}-{high} GB down to {less_low}-{less_high} GB",
            TRADITIONAL_SOURCE,
            _traditional(is_memory=False),
            traditional,
        ),
        Figure(
            "beside a traditional loop",
            f"up to {PUBLISHED_LESS_MEMORY} % less memory",
            LESS_MEMORY_SOURCE,
            _traditional(is_memory=True),
            traditional,
        ),
    ]


def render(rows: Rows) -> str:
    """Return the table in Markdown, and the commands of the rows below it."""
    commands: dict[str, int] = {}
    lines = ["| optimisation | published | source | ours | GPU, date | command |", "|---|---|---|---|---|---|"]
    for figure in figures():
        result = figure.find(rows)
        used = [] if result is None else result.rows
        devices = ", ".join(dict.fromkeys(f"{row['device']}, {row['date']}" for row in used))
        own_commands = dict.fromkeys(row["command"] for row in used) if result is not None else {figure.command: None}
        numbers = ", ".join(f"[{commands.setdefault(command, len(commands) + 1)}]" for command in own_commands)
        ours = NOT_MEASURED if result is None else result.text
        cells = (figure.topic, figure.claim, figure.source, ours, devices, numbers)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    lines += ["", "Commands of the rows, or, if nothing is measured, of the measurement:", ""]
    lines += [f"{number}. `{command}`" for command, number in commands.items()]
    return "\n".join(lines)
