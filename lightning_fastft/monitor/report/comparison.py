"""Compare run reports: one page and one table of several runs, from the JSON files that RunReport wrote."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from markupsafe import Markup

from lightning_fastft.core.errors import OptionError, printable
from lightning_fastft.monitor.report.charts import Chart, Points, make_charts
from lightning_fastft.monitor.report.content import SCHEMA, SCHEMA_VERSION
from lightning_fastft.monitor.report.drawing import NUM_COLOURS, draw_chart
from lightning_fastft.monitor.report.style import STYLE, make_environment

TITLE = "Comparison of runs"
REPORT_FILE = "run_report.json"
# Lines in one chart: each colour once plain and once dashed.
MOST_RUNS = 2 * NUM_COLOURS

_BODY = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{{ title }}</title><style>{{ style }}</style></head>
<body><main>
<h1>{{ title }}</h1>
<p class="soft">{{ labels | join(", ") }}</p>
<div class="cards">
<section class="wide"><div class="scroll"><table><tr><th></th>{% for label in labels %}<th class="number words">{{
  label }}</th>{% endfor %}</tr>
{% for row in rows %}<tr><td>{{ row.name }}</td>{% for value in row.values %}
<td class="number{% if row.form == "" %} words{% endif %}{% if loop.index0 in row.best %} best{% endif %}">{%
  if row.form == "" %}{{ value }}{% elif value is none %}&ndash;{% else %}{{ value | number(row.form) }}{% endif
  %}</td>{% endfor %}</tr>
{% endfor %}</table></div>
<p class="soft">The better values are bold. Losses can be compared where runs have the same data and tokenizer.</p>
</section>
{% for chart in charts %}<section{% if loop.first and charts | length is odd %} class="wide"{% endif %}><h2>{{
  chart.title }}</h2>
{{ draw_chart(chart.lines, name=chart.title, form=chart.form) }}</section>{% endfor %}
{% if differences or commands %}<section class="wide"><h2>What differs</h2>{% if differences %}<div class="scroll">
<table><tr><th>option</th>{% for label in labels %}<th class="words">{{ label }}</th>{% endfor %}</tr>
{% for name, values in differences %}<tr><td>{{ name }}</td>{% for value in values %}<td class="words">{% if value is
  none %}&ndash;{% else %}<code>{{ value }}</code>{% endif %}</td>{% endfor %}</tr>
{% endfor %}</table></div>{% endif %}
{% for label, command in commands %}<h3>{{ label }}</h3><pre class="answer">{{ command }}</pre>{% endfor
  %}</section>{% endif %}
</div>
<p class="soft">From the JSON files of the runs' reports. This page loads nothing from anywhere.</p>
</main></body></html>
"""


class Row(NamedTuple):
    """A figure of every run; an empty form is text, and best has the places of the best values."""

    name: str
    values: list[Any]
    form: str = ""
    best: frozenset[int] = frozenset()


def read_reports(paths: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return the reports of runs by short labels: the ends of their paths that differ.

    A path is a JSON or HTML file, or a folder with one ``run_report.json`` in it or below it.

    Raises:
        OptionError: There are fewer than two or more than 12 paths, a run is named twice, a path has no report or
            several, or a file is not a report of this version.
    """
    if not 2 <= len(paths) <= MOST_RUNS:
        raise OptionError(f"fastft report compares 2 to {MOST_RUNS} runs, got {len(paths)}: name their folders.")
    files = [_find_report(Path(path).expanduser()) for path in paths]
    if len({file.resolve() for file in files}) < len(files):
        raise OptionError(f"A run is named twice: {', '.join(map(str, files))}.")
    return dict(zip(_shorten(paths), map(_read_report, files)))


def compare(reports: Mapping[str, Mapping[str, Any]]) -> list[Row]:
    """Return the figures of runs side by side."""
    heads = [report["head"] for report in reports.values()]
    rows = [
        Row("model", [head["name"] for head in heads]),
        Row("trained", [head["method"] for head in heads]),
        Row("device", [f"{head['num_ranks']} x {head['device']}" for head in heads]),
        Row("state", [report["outcome"]["state"] for report in reports.values()]),
        Row("optimizer steps", [head["num_steps"] for head in heads], ",d"),
        Row("seconds", [head["seconds"] for head in heads], ",.0f"),
        _rank("tokens/s", [head["tokens_per_s"] for head in heads], ",.0f", max),
        _rank("peak memory, GiB", [head["peak_memory_gib"] for head in heads], ",.2f", min),
        _rank("training loss, last steps", [head["final_loss"] for head in heads], ".4g", min),
    ]
    metrics = [
        {metric["name"]: metric for metric in (report["validation"] or {"metrics": ()})["metrics"]}
        for report in reports.values()
    ]
    for name in dict.fromkeys(name for found in metrics for name in found):
        choose = max if "accuracy" in name else min if "loss" in name or "perplexity" in name else None
        points = [found[name]["points"] if name in found else [] for found in metrics]
        rows.append(_rank(f"{name}, last", [one[-1][2] if one else None for one in points], ".4g", choose))
        if choose is not None:
            best = [choose((point[2] for point in one), default=None) for one in points]
            rows.append(_rank(f"{name}, best", best, ".4g", choose))
    return rows


def render_comparison(reports: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the page that compares runs: a table, charts with a line for each run, and the options that differ.

    Returns:
        A self-contained HTML page without scripts, links or network addresses.
    """
    environment = make_environment()
    commands = [(label, report["command"]) for label, report in reports.items()]
    environment.globals.update(draw_chart=draw_chart)
    return environment.from_string(_BODY).render(
        title=TITLE,
        labels=list(reports),
        rows=compare(reports),
        charts=_merge_charts({label: make_charts(report) for label, report in reports.items()}),
        differences=_find_differences(list(reports.values())),
        commands=commands if len({command for _, command in commands}) > 1 else [],
        style=Markup(STYLE),  # noqa: S704 - a constant of this package
    )


def render_table(reports: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the figures of runs as aligned text."""
    lines = [["", *reports]]
    for row in compare(reports):
        shown = ["-" if value is None else format(value, row.form) if row.form else str(value) for value in row.values]
        lines.append([row.name, *map(printable, shown)])
    widths = [max(map(len, column)) for column in zip(*lines)]
    return "\n".join(
        "  ".join(
            [line[0].ljust(widths[0]), *(text.rjust(width) for text, width in zip(line[1:], widths[1:]))]
        ).rstrip()
        for line in lines
    )


def _find_report(path: Path) -> Path:
    """Return the JSON file of a run's report."""
    if path.is_dir():
        own = path / REPORT_FILE
        found = [own] if own.is_file() else sorted(path.rglob(REPORT_FILE))
        if len(found) == 1:
            return found[0]
        if found:
            raise OptionError(f"{path} has {len(found)} reports; name one of them: {', '.join(map(str, found[:8]))}.")
        raise OptionError(
            f"{path} has no {REPORT_FILE}: the callback RunReport writes it at the end of a run. If it was given "
            "another path, name that file."
        )
    file = path.with_suffix(".json")
    if path.suffix not in (".json", ".html") or not file.is_file():
        raise OptionError(f"{path} is neither a folder nor the file of a run report.")
    return file


def _read_report(file: Path) -> dict[str, Any]:
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise OptionError(f"{file} is not a run report: {error}.") from error
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        raise OptionError(f"{file} is not a run report of this package.")
    if data.get("schema_version") != SCHEMA_VERSION:
        raise OptionError(
            f"{file} has version {data.get('schema_version')!r} of the report, and this package reads {SCHEMA_VERSION}."
        )
    return data


def _shorten(paths: Sequence[str]) -> list[str]:
    """Return paths without the folders that all of them share.

    Example:
        >>> _shorten(["runs/a", "runs/b/version_0"])
        ['a', 'b/version_0']
    """
    parts = [Path(path).parts for path in paths]
    num_shared = 0
    while all(len(one) > num_shared + 1 for one in parts) and len({one[num_shared] for one in parts}) == 1:
        num_shared += 1
    return ["/".join(one[num_shared:]) for one in parts]


def _rank(name: str, values: list[Any], form: str, choose: Callable[..., Any] | None) -> Row:
    """Return a row that marks its best values, if they differ where they are shown."""
    shown = ["" if value is None else format(value, form) for value in values]
    known = [value for value in values if value is not None]
    if choose is None or len(set(shown) - {""}) < 2:
        return Row(name, values, form)
    best = format(choose(known), form)
    return Row(name, values, form, frozenset(place for place, text in enumerate(shown) if text == best))


def _merge_charts(charts: Mapping[str, Sequence[Chart]]) -> list[Chart]:
    """Return charts with a line for each run; a chart with several lines of a run becomes one for each of them."""
    merged: dict[str, Chart] = {}
    by_run = {label: {chart.title: chart for chart in own} for label, own in charts.items()}
    for title in dict.fromkeys(title for own in by_run.values() for title in own):
        has_many = any(len(own[title].lines) > 1 for own in by_run.values() if title in own)
        for label, own in by_run.items():
            lines: Sequence[tuple[str, Points]] = own[title].lines if title in own else ()
            for name, points in lines:
                key = f"{title}: {name}" if has_many else title
                merged.setdefault(key, Chart(key, [], own[title].form)).lines.append((label, points))
    return list(merged.values())


def _find_differences(reports: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[Any]]]:
    """Return options and versions that are not the same in all runs; None where a run has no such option."""
    flat = [
        {
            f"{group}.{name}": value
            for group, values in {**report["options"], "versions": report["versions"]}.items()
            for name, value in _flatten(values)
        }
        for report in reports
    ]
    names = dict.fromkeys(name for found in flat for name in found)
    rows = [(name, [found.get(name) for found in flat]) for name in names]
    return [(name, values) for name, values in rows if any(value != values[0] for value in values)]


def _flatten(options: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield options by dotted names, such as lora.r."""
    for name, value in options.items():
        if isinstance(value, Mapping):
            yield from ((f"{name}.{inner}", part) for inner, part in _flatten(value))
        else:
            yield name, value
