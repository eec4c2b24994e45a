"""From the records of two processes of each case to one row: pooled samples, the A/A control, ratios, the table,
rows of results.csv.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks.ruler.clocks import median_clock_mhz
from benchmarks.ruler.measure import summarise_ms
from benchmarks.ruler.report import align, host_syncs_text, result_rows
from benchmarks.ruler.rows import is_default, width_of
from benchmarks.ruler.systems import SYSTEMS, system_of

# Medians of the same case, measured twice, may differ by this much.
MAX_CONTROL_DIFFERENCE = 0.02
CONTROL = "A/A"
# What a process says that is worth another try.
UNFINISHED = ("not started", "stopped after")
# What pool says of a half that left no record at all.
_NOT_RUN = "it was not run"
# Of both processes the larger figure counts.
_LARGER = ("host_waits", "host_waits_step", "device_memory_gib")
_KEY = ("workload", "system", "mode", "label_share", "optimizer", "repeat")
_HEADER = (
    "system mode (* default)",
    "optim",
    "ms",
    "mean",
    "first",
    "second",
    "p10",
    "p90",
    "n",
    "tok/s",
    "lab.tok/s",
    "GiB",
    "resv",
    "used",
    "pinned",
    "waits",
    "MHz",
    "min cos",
    "run, s",
)


class Control(NamedTuple):
    """What came of measuring one case twice.

    Args:
        title: The case; empty where there was none to repeat.
        difference: Of the two medians, as a share of the smaller one; None where one of them is missing.
    """

    title: str
    difference: float | None

    @property
    def passed(self) -> bool:
        """Whether rows may be written."""
        return self.difference is not None and self.difference <= MAX_CONTROL_DIFFERENCE

    def describe(self) -> str:
        """Return one line."""
        if self.difference is None:
            return (
                f"CONTROL MISSING: {self.title or 'no case'} was not measured twice from end to end, so no row is "
                "written"
            )
        found = f"{self.title} twice differs by {self.difference:.2%}, {MAX_CONTROL_DIFFERENCE:.0%} allowed"
        return f"A/A control passed: {found}" if self.passed else f"CONTROL FAILED: {found}; no row is written"


def pool(records: Sequence[Mapping[str, Any]], *, clocks: Sequence[tuple[float, float]] = ()) -> list[dict[str, Any]]:
    """Return one record for each case from those of its two processes, in the order of their first appearance.

    The samples of both are one sample; peaks and waits are the larger ones, the lowest cosine is the lower one. A case
    without two halves that have rows has a reason instead.

    Args:
        records: Of one comparison; of each half the last one counts.
        clocks: Samples of the SM clock.
    """
    halves: dict[tuple[Any, ...], dict[int, Mapping[str, Any]]] = {}
    for record in records:
        if record.get("half"):
            halves.setdefault(tuple(record[name] for name in _KEY), {})[record["half"]] = record
    return [_pooled(found.get(1), found.get(2), clocks) for found in halves.values()]


def _pooled(
    first: Mapping[str, Any] | None, second: Mapping[str, Any] | None, clocks: Sequence[tuple[float, float]]
) -> dict[str, Any]:
    given = first or second
    assert given is not None
    row = {**given, "reason": _reason(first, second)}
    if row["reason"] or first is None or second is None:
        row.pop("summary", None)
        return row
    pair = (first, second)
    samples = [*first["ms"], *second["ms"]]
    summary = summarise_ms(samples)
    row.update(
        ms=samples,
        summary=summary,
        half_medians=[statistics.median(half["ms"]) for half in pair],
        tokens_per_s=_per_step(pair, "num_tokens") / summary["median"] * 1e3,
        labelled_tokens_per_s=_per_step(pair, "num_labelled") / summary["median"] * 1e3,
        peak_gib={name: max(half["peak_gib"][name] for half in pair) for name in first["peak_gib"]},
        pinned_host_gib=max(half["pinned_host_gib"] for half in pair),
        **{name: max((half[name] for half in pair if half.get(name) is not None), default=None) for name in _LARGER},
        whole_run_s=max((half["whole_run_s"] for half in pair if "whole_run_s" in half), default=None),
        verdict=min((half["verdict"] for half in pair), key=lambda verdict: verdict["worst_cosine"][1]),
        clock_mhz=median_clock_mhz(clocks, [(half["timed_from"], half["timed_to"]) for half in pair]),
    )
    return row


def _reason(first: Mapping[str, Any] | None, second: Mapping[str, Any] | None) -> str:
    for name, half in (("first", first), ("second", second)):
        if half is None or half["reason"]:
            return f"{name} process: {_NOT_RUN if half is None else half['reason']}"
    assert first is not None
    assert second is not None
    different = sorted(
        name
        for name in {*first["versions"], *second["versions"]}
        if first["versions"].get(name) != second["versions"].get(name)
    )
    return f"its two processes ran under different versions of {', '.join(different)}" if different else ""


def _per_step(pair: Sequence[Mapping[str, Any]], name: str) -> float:
    return sum(half[name] for half in pair) / sum(len(half["ms"]) for half in pair)


def control_of(rows: Sequence[Mapping[str, Any]]) -> Control:
    """Return how far the two medians of the repeated case are apart; of several, ours decides."""
    repeated = [row for row in rows if row["repeat"]]
    ours = [row for row in repeated if row["system"] == "ours"] or repeated
    return _control(ours[0], rows) if ours else Control("", None)


def _control(repeated: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> Control:
    """Return how far the medians of a repeated case and of its first measurement are apart."""
    key = ("system", "mode", "optimizer")
    own = next((row for row in rows if not row["repeat"] and all(row[name] == repeated[name] for name in key)), None)
    title = f"{repeated['system']} {repeated['mode']}"
    if own is None or own["reason"] or repeated["reason"]:
        return Control(title, None)
    low, high = sorted(row["summary"]["median"] for row in (own, repeated))
    return Control(title, high / low - 1)


def find_unfinished(rows: Sequence[Mapping[str, Any]], settings: Sequence[tuple[str, ...]]) -> list[Mapping[str, Any]]:
    """Return what another run in the same folder would still measure: rows that ended early, then settings without a
    row, as system and mode.

    Args:
        rows: As pool returns them; the control is one of them.
        settings: Arm and mode of everything that was to be measured, and the width of the moments where both are.
    """
    present = {(row["system"], row["mode"], width_of(row)) for row in rows if not row["repeat"]}
    ended_early = [row for row in rows if row["reason"].partition(" process: ")[2].startswith((*UNFINISHED, _NOT_RUN))]
    return ended_early + [
        {"system": setting[0], "mode": setting[1], "repeat": ""}
        for setting in settings
        if not any(found[: len(setting)] == tuple(setting) for found in present)
    ]


def ratios(rows: Sequence[Mapping[str, Any]], *, settings: Sequence[tuple[str, ...]], device: str) -> list[str]:
    """Return ours against every peer in tokens/s, best against best and default against default, with memory beside;
    first with equal moments, where both widths were measured.

    The best of a system of which a setting is still to be measured is not known yet, and nothing is said of it. Nothing
    at all is said without an A/A control that passed, nor on a CPU, where ours keeps what others compute again.

    Args:
        rows: As pool returns them.
        settings: Arm and mode of everything that was to be measured.
        device: "cuda" or "cpu".
    """
    if device == "cpu" or not control_of(rows).passed:
        return []
    timed = [row for row in rows if not row["reason"] and not row["repeat"]]
    unfinished = {system_of(setting) for setting in find_unfinished(rows, settings) if not setting["repeat"]}
    lines = []
    widths = sorted({width_of(row) for row in timed}, reverse=True)
    for name, chosen in (
        *(
            (f"{width} moments", [row for row in timed if width_of(row) == width])
            for width in widths
            if len(widths) > 1
        ),
        ("best against best", timed),
        ("default against default", [row for row in timed if is_default(row, device=device)]),
    ):
        ours = [row for row in chosen if system_of(row) == "ours"]
        for system in SYSTEMS:
            peers = [row for row in chosen if system_of(row) == system]
            if system == "ours" or not ours or not peers:
                continue
            if not name.startswith("default") and {"ours", system} & unfinished:
                lines.append(
                    f"{name}, {system}: settings of {' and '.join(sorted({'ours', system} & unfinished))} are still to "
                    "be measured"
                )
                continue
            own, other = (max(found, key=lambda row: row["tokens_per_s"]) for found in (ours, peers))
            memory = f"{own['peak_gib']['allocated']:.1f} against {other['peak_gib']['allocated']:.1f} GiB"
            lines.append(
                f"{name}: {own['title']} {own['tokens_per_s'] / other['tokens_per_s']:.2f}x {other['title']} in "
                f"tokens/s; {memory}"
            )
    return lines


def comparison_table(
    rows: Sequence[Mapping[str, Any]], gaps: Mapping[str, str], *, settings: Sequence[tuple[str, ...]], device: str
) -> str:
    """Return the table: a line for every case that passed, fastest first, the reason of every other, the gaps, the
    control and the ratios.

    Args:
        rows: As pool returns them.
        gaps: Why a system or a setting was not run, by its name.
        settings: Arm and mode of everything that was to be measured.
        device: "cuda" or "cpu".
    """
    timed = sorted((row for row in rows if not row["reason"]), key=lambda row: -row["tokens_per_s"])
    lines = align([_HEADER, *(_line(row, device=device) for row in timed)])
    lines += [f"  no row: {row['title']}: {row['reason'][:400]}" for row in rows if row["reason"]]
    lines += [f"  not run: {name}: {reason}" for name, reason in gaps.items()]
    control = "on a CPU nothing is compared and no row is written" if device == "cpu" else control_of(rows).describe()
    others = [_control(row, rows) for row in rows if row["repeat"] and row["system"] != "ours" and device != "cpu"]
    lines += [
        f"  {found.title} twice differs by {found.difference:.2%}" for found in others if found.difference is not None
    ]
    return "\n".join(
        [*lines, f"  {control}", *(f"  {line}" for line in ratios(rows, settings=settings, device=device))]
    )


def _line(row: Mapping[str, Any], *, device: str) -> tuple[str, ...]:
    summary, peak, clock = row["summary"], row["peak_gib"], row["clock_mhz"]
    sizes_gib = (peak["allocated"], peak["reserved"], row["device_memory_gib"] or 0.0, row["pinned_host_gib"])
    return (
        f"{row['title']}{' *' if is_default(row, device=device) else ''}",
        width_of(row),
        f"{summary['median']:.1f}",
        f"{summary['mean']:.1f}",
        *(f"{median:.1f}" for median in row["half_medians"]),
        f"{summary['p10']:.1f}",
        f"{summary['p90']:.1f}",
        str(summary["n"]),
        f"{row['tokens_per_s']:.0f}",
        f"{row['labelled_tokens_per_s']:.0f}",
        *("-" if device == "cpu" else f"{size_gib:.1f}" for size_gib in sizes_gib),
        host_syncs_text(dict(row)),
        "-" if clock is None else f"{clock:.0f}",
        f"{row['verdict']['worst_cosine'][1]:.5f}",
        "-" if row["whole_run_s"] is None else f"{row['whole_run_s']:.1f}/{row['num_whole_steps']}",
    )


def comparison_rows(rows: Sequence[Mapping[str, Any]], *, command: str) -> list[dict[str, Any]]:
    """Return rows for results.csv; none where the A/A control did not pass."""
    control = control_of(rows)
    if not control.passed or control.difference is None:
        return []
    found: list[dict[str, Any]] = []
    for row in rows:
        own = [{**figure, "benchmark": "compare"} for figure in result_rows([dict(row)], command=command)]
        if not own:
            continue
        shared = {name: own[0][name] for name in ("benchmark", "workload", "system", "version", "command", "device")}
        num_first = (row["summary"]["n"] + 1) // 2
        figures = [
            ("step, first process", row["half_medians"][0], "ms", num_first),
            ("step, second process", row["half_medians"][1], "ms", row["summary"]["n"] - num_first),
            ("pinned host", row["pinned_host_gib"], "GiB", row["summary"]["n"]),
            ("SM clock", row["clock_mhz"], "MHz", row["summary"]["n"]),
            ("trained values", row["num_trained"], "1", row["summary"]["n"]),
        ]
        if row["repeat"] and (own_control := _control(row, rows)).difference is not None:
            figures.append(("A/A difference", own_control.difference * 100, "%", row["summary"]["n"]))
        own += [
            {**shared, "metric": metric, "value": value, "unit": unit, "n": n}
            for metric, value, unit, n in figures
            if value is not None
        ]
        found += own
    return found
