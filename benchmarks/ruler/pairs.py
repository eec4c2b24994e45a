"""Combine the records of the processes of each case: pooled samples, the A/A control, ratios, the table, and rows of
results.csv.
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

# Largest difference between two medians of the same case.
MAX_CONTROL_DIFFERENCE = 0.02
CONTROL = "A/A"
# Reasons of a process after which its case is tried again.
UNFINISHED = ("not started", "stopped after")
# The reason that pool gives for a process without a record.
_NOT_RUN = "it was not run"
# Steps of a whole run, which includes its recordings, plans and compilation.
NUM_WHOLE_STEPS = 200
# Figures for which the largest of all processes counts.
_LARGER = ("host_waits", "host_waits_step", "device_memory_gib")
_KEY = ("workload", "system", "mode", "label_share", "optimizer", "repeat")
_HEADER = (
    "system mode (* default)",
    "optim",
    "ms",
    "mean",
    "of each process",
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
    f"{NUM_WHOLE_STEPS} steps, s",
)


class Control(NamedTuple):
    """The result of measuring one case more than once (A/A).

    Args:
        title: The case; empty if there was none to repeat.
        difference: Difference between the highest and the lowest median of its processes, as a share of the lowest;
            None if a process is missing.
        num_calls: Number of commands that measured the rows.
        reason: Why there is no difference.
    """

    title: str
    difference: float | None
    num_calls: int = 1
    reason: str = ""

    @property
    def passed(self) -> bool:
        """Whether rows may be written."""
        return self.difference is not None and self.difference <= MAX_CONTROL_DIFFERENCE

    def describe(self) -> str:
        """Return one line."""
        if self.difference is None:
            reason = self.reason or "it was not measured twice from end to end"
            return f"CONTROL MISSING: {self.title or 'no case'}: {reason}; no row is written"
        calls = f" over {self.num_calls} calls" if self.num_calls > 1 else ""
        text = f"{self.title} repeated{calls} differs by {self.difference:.2%}, {MAX_CONTROL_DIFFERENCE:.0%} allowed"
        return f"A/A control passed: {text}" if self.passed else f"CONTROL FAILED: {text}; no row is written"


def pool(
    records: Sequence[Mapping[str, Any]], *, clocks: Sequence[tuple[float, float]] = (), num_passes: int = 2
) -> list[dict[str, Any]]:
    """Return one record for each case from those of its processes, in the order of their first appearance.

    The samples of all processes are one sample; the largest peaks and host syncs and the lowest cosine count. A case of
    which a process has no row has a reason instead.

    Args:
        records: Records of one comparison; the last record of each process of a case counts.
        clocks: Samples of the SM clock.
        num_passes: Processes of a case; a repetition may have fewer.
    """
    parts: dict[tuple[Any, ...], dict[int, Mapping[str, Any]]] = {}
    for record in records:
        if record.get("half"):
            parts.setdefault(tuple(record[name] for name in _KEY), {})[record["half"]] = record
    return [_pooled(by_number, clocks, num_passes) for by_number in parts.values()]


def _pooled(
    by_number: Mapping[int, Mapping[str, Any]], clocks: Sequence[tuple[float, float]], num_passes: int
) -> dict[str, Any]:
    parts = [by_number[number] for number in sorted(by_number)]
    if parts[0]["repeat"]:
        # Every call repeats ours; repetitions that were cut short are ignored.
        parts = [part for part in parts if not part["reason"]] or parts
    row = {**parts[0], "reason": _reason(by_number, parts, num_passes)}
    if row["reason"]:
        row.pop("summary", None)
        return row
    samples = [value for part in parts for value in part["ms"]]
    summary = summarise_ms(samples)
    # The rate of batches with varying numbers of tokens is that of all steps together, as in a single case.
    step_ms = summary["median" if all(part.get("is_even", True) for part in parts) else "mean"]
    fresh = [part for part in parts if part.get("is_fresh") and "whole_run_s" in part]
    row.update(
        ms=samples,
        summary=summary,
        medians=[statistics.median(part["ms"]) for part in parts],
        calls=[part.get("call", 1) for part in parts],
        all_versions=[part["versions"] for part in parts],
        num_samples=[len(part["ms"]) for part in parts],
        tokens_per_s=_per_step(parts, "num_tokens") / step_ms * 1e3,
        labelled_tokens_per_s=_per_step(parts, "num_labelled") / step_ms * 1e3,
        peak_gib={name: max(part["peak_gib"][name] for part in parts) for name in parts[0]["peak_gib"]},
        pinned_host_gib=max(part["pinned_host_gib"] for part in parts),
        **{name: max((part[name] for part in parts if part.get(name) is not None), default=None) for name in _LARGER},
        whole_run_s=max((_whole_run_s(part) for part in fresh), default=None),
        num_whole_steps=NUM_WHOLE_STEPS,
        verdict=min((part["verdict"] for part in parts), key=lambda verdict: verdict["worst_cosine"][1]),
        clock_mhz=median_clock_mhz(clocks, [(part["timed_from"], part["timed_to"]) for part in parts]),
    )
    return row


def _whole_run_s(part: Mapping[str, Any]) -> float:
    """Return the time of NUM_WHOLE_STEPS steps: the measured time, plus the mean step time for each remaining step."""
    left = NUM_WHOLE_STEPS - part["num_whole_steps"]
    return float(part["whole_run_s"] + left * statistics.fmean(part["ms"]) / 1e3)


def _reason(by_number: Mapping[int, Mapping[str, Any]], parts: Sequence[Mapping[str, Any]], num_passes: int) -> str:
    numbers = range(1, 1 if parts[0]["repeat"] else num_passes + 1)
    for number in sorted({*numbers, *(part["half"] for part in parts)}):
        part = by_number.get(number)
        if part is None or part["reason"]:
            return f"process {number}: {_NOT_RUN if part is None else part['reason']}"
    if parts[0]["repeat"]:
        # The control names the differences between calls.
        return ""
    different = _differences([part["versions"] for part in parts])
    return f"its processes ran under different versions of {', '.join(different)}" if different else ""


def _differences(versions: Sequence[Mapping[str, str]]) -> list[str]:
    """Return the names of versions that are not equal in all records; the device is one of them."""
    names = {name for one in versions for name in one}
    return sorted(name for name in names if len({one.get(name) for one in versions}) > 1)


def _per_step(parts: Sequence[Mapping[str, Any]], name: str) -> float:
    return sum(part[name] for part in parts) / sum(len(part["ms"]) for part in parts)


def control_of(rows: Sequence[Mapping[str, Any]]) -> Control:
    """Return the difference between the medians of the repeated case, over every process; ours is taken if there are
    several cases. Rows of several calls are joined only if each call measured it.
    """
    repeated = [row for row in rows if row["repeat"]]
    ours = [row for row in repeated if row["system"] == "ours"] or repeated
    if not ours:
        return Control("", None)
    control, timed = _control(ours[0], rows), [row for row in rows if not row["reason"]]
    own = [row for row in timed if _is_same(row, ours[0])]
    calls = {call for row in timed for call in row["calls"]}
    unproved = sorted(calls - {call for row in own for call in row["calls"]})
    different = _differences([versions for row in own for versions in row["all_versions"]])
    devices = {row["versions"].get("device") for row in timed}
    reason = (
        f"call {unproved[0]} did not measure it"
        if unproved
        else f"calls ran under different versions of {', '.join(different)}"
        if different
        else f"rows are of {' and '.join(sorted(map(str, devices)))}"
        if len(devices) > 1
        else ""
    )
    return control._replace(num_calls=len(calls), reason=reason, difference=None if reason else control.difference)


def _is_same(row: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether two rows are of one case."""
    return all(row[name] == other[name] for name in ("system", "mode", "optimizer"))


def _control(repeated: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> Control:
    """Return the difference between the medians of a case, over all processes and repetitions."""
    own = [row for row in rows if _is_same(row, repeated) and not row["reason"]]
    medians = [median for row in own for median in row["medians"]]
    title = f"{repeated['system']} {repeated['mode']}"
    is_measured = not repeated["reason"] and any(not row["repeat"] for row in own)
    return Control(title, max(medians) / min(medians) - 1 if is_measured else None)


def find_unfinished(rows: Sequence[Mapping[str, Any]], settings: Sequence[tuple[str, ...]]) -> list[Mapping[str, Any]]:
    """Return the settings that another run in the same folder would still measure, as system and mode: rows that ended
    early, then settings without a row.

    Args:
        rows: Result of pool, with the control.
        settings: Arm and mode of every planned setting, and the width of the moments if both are measured.
    """
    present = {(row["system"], row["mode"], width_of(row)) for row in rows if not row["repeat"]}
    ended_early = [
        row
        for row in rows
        if row["reason"].startswith("process ") and row["reason"].partition(": ")[2].startswith((*UNFINISHED, _NOT_RUN))
    ]
    return ended_early + [
        {"system": setting[0], "mode": setting[1], "repeat": ""}
        for setting in settings
        if not any(row[: len(setting)] == tuple(setting) for row in present)
    ]


def ratios(rows: Sequence[Mapping[str, Any]], *, settings: Sequence[tuple[str, ...]], device: str) -> list[str]:
    """Return ours against every peer in tokens/s and memory, best against best and default against default; first with
    equal moments, if both widths were measured. A base in fp8 is an approximation and is compared with another one only.

    A system with a setting that is still to be measured has no best setting yet and gets no ratio. There are no ratios
    without a passed A/A control, and none on a CPU, where ours keeps the activations that others recompute.

    Args:
        rows: Result of pool.
        settings: Arm and mode of every planned setting.
        device: "cuda" or "cpu".
    """
    if device == "cpu" or not control_of(rows).passed:
        return []
    timed = [row for row in rows if not row["reason"] and not row["repeat"]]
    unfinished = {system_of(setting) for setting in find_unfinished(rows, settings) if not setting["repeat"]}
    lines = []
    exact, approximate = ([row for row in timed if ("fp8" in row["mode"]) == is_fp8] for is_fp8 in (False, True))
    widths = sorted({width_of(row) for row in exact}, reverse=True)
    for name, chosen in (
        *(
            (f"{width} moments", [row for row in exact if width_of(row) == width])
            for width in widths
            if len(widths) > 1
        ),
        ("best against best", exact),
        ("fp8 against fp8", approximate),
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
            own, other = (max(rows, key=lambda row: row["tokens_per_s"]) for rows in (ours, peers))
            memory = f"{own['peak_gib']['allocated']:.1f} against {other['peak_gib']['allocated']:.1f} GiB"
            lines.append(
                f"{name}: {own['title']} {own['tokens_per_s'] / other['tokens_per_s']:.2f}x {other['title']} in "
                f"tokens/s; {memory}"
            )
    return lines


def comparison_table(
    rows: Sequence[Mapping[str, Any]], gaps: Mapping[str, str], *, settings: Sequence[tuple[str, ...]], device: str
) -> str:
    """Return the table: a line for every case that passed, fastest first, the reason for every other case, the gaps,
    the control and the ratios.

    Args:
        rows: Result of pool.
        gaps: Why a system or a setting was not run, by its name.
        settings: Arm and mode of every planned setting.
        device: "cuda" or "cpu".
    """
    timed = sorted((row for row in rows if not row["reason"]), key=lambda row: -row["tokens_per_s"])
    lines = align([_HEADER, *(_line(row, device=device) for row in timed)])
    lines += [f"  no row: {row['title']}: {row['reason'][:400]}" for row in rows if row["reason"]]
    lines += [f"  not run: {name}: {reason}" for name, reason in gaps.items()]
    control = "on a CPU nothing is compared and no row is written" if device == "cpu" else control_of(rows).describe()
    others = [_control(row, rows) for row in rows if row["repeat"] and row["system"] != "ours" and device != "cpu"]
    lines += [
        f"  {other.title} repeated differs by {other.difference:.2%}"
        for other in others
        if other.difference is not None
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
        "/".join(f"{median:.1f}" for median in row["medians"]),
        f"{summary['p10']:.1f}",
        f"{summary['p90']:.1f}",
        str(summary["n"]),
        f"{row['tokens_per_s']:.0f}",
        f"{row['labelled_tokens_per_s']:.0f}",
        *("-" if device == "cpu" else f"{size_gib:.1f}" for size_gib in sizes_gib),
        host_syncs_text(dict(row)),
        "-" if clock is None else f"{clock:.0f}",
        f"{row['verdict']['worst_cosine'][1]:.5f}",
        "-" if row["whole_run_s"] is None else f"{row['whole_run_s']:.1f}",
    )


def comparison_rows(rows: Sequence[Mapping[str, Any]], *, command: str) -> list[dict[str, Any]]:
    """Return rows for results.csv; none if the A/A control did not pass."""
    control = control_of(rows)
    if not control.passed or control.difference is None:
        return []
    result: list[dict[str, Any]] = []
    for row in rows:
        own = [{**figure, "benchmark": "compare"} for figure in result_rows([dict(row)], command=command)]
        if not own:
            continue
        shared = {name: own[0][name] for name in ("benchmark", "workload", "system", "version", "command", "device")}
        processes = zip(row["medians"], row["num_samples"]) if len(row["medians"]) > 1 else ()
        calls = f", {control.num_calls} calls" if control.num_calls > 1 else ""
        figures = [
            *((f"step, process {number}", *pair[:1], "ms", pair[1]) for number, pair in enumerate(processes, start=1)),
            ("pinned host", row["pinned_host_gib"], "GiB", row["summary"]["n"]),
            ("SM clock", row["clock_mhz"], "MHz", row["summary"]["n"]),
            ("trained values", row["num_trained"], "1", row["summary"]["n"]),
        ]
        if row["repeat"] and (own_control := _control(row, rows)).difference is not None:
            own_calls = calls if row["system"] == "ours" else ""
            figures.append((f"A/A difference{own_calls}", own_control.difference * 100, "%", row["summary"]["n"]))
        own += [
            {**shared, "metric": metric, "value": value, "unit": unit, "n": n}
            for metric, value, unit, n in figures
            if value is not None
        ]
        result += own
    return result
