"""Every figure of README.md is one of the run that it cites, and rows with a log are those that the log gives."""

import csv
import json
import re
from pathlib import Path

import pytest

from benchmarks.results import append_rows
from benchmarks.ruler.logs import LOGS, read_logs, write_log
from docs import named_runs, numbers_page
from docs.entries import read_entries
from tests.support.comparison import records_of_a_run

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks/results.csv"
UNITS = {"ms": "ms", "GiB": "GiB", "tokens/s": "tokens/s", "%": "%"}
FIGURE = re.compile(r"(?<![\w.,])([\d,]*\d(?:\.\d+)?) (ms|GiB|tokens/s|%)(?!\w)")
CITATION = re.compile(r"\[run ([\w.-]+)\]\(docs/numbers\.md#runs-of-the-readme\)")


def find_runs(page, rows):
    """Return the rows of each run that the list on the page names."""
    part = page.partition("### Runs of the README")[2].partition("\n## ")[0]
    listed = re.findall(r"^\| ([\w.-]+) \| (\S+) \| ([^|]+) \| [^|]+ \| `([^`]+)`", part, flags=re.MULTILINE)
    return {
        name: [row for row in rows if (row["date"], row["device"], row["command"]) == (date, device, command)]
        for name, date, device, command in listed
    }


def is_figure_of(text, unit, rows):
    """Whether a figure is a value of the rows, or by how much two steps of one run differ."""
    digits = len(text.partition(".")[2])
    values = [float(row["value"]) for row in rows if row["unit"] == unit and row["value"]]
    if unit == "%":
        steps = [float(row["value"]) for row in rows if row["metric"] == "step"]
        values += [(first / second - 1) * 100 for first in steps for second in steps]
    return any(f"{value:,.{digits}f}" == text for value in values)


def find_unproved(readme, runs):
    """Return the figures of a README that are not of the run cited next in their paragraph, line of a table or item."""
    text = re.sub(r"^```.*?^```$", "", readme, flags=re.MULTILINE | re.DOTALL)
    unproved = []
    for block in re.split(r"\n\n|\n(?=[|-])", text):
        pieces = CITATION.split(" ".join(re.sub(r"`[^`]*`", "", block).split()))
        for piece, name in zip(pieces[::2], [*pieces[1::2], ""]):
            unproved += [
                f"{figure} {unit} ({name or 'no run'})"
                for figure, unit in FIGURE.findall(piece)
                if not is_figure_of(figure, UNITS[unit], runs.get(name, []))
            ]
    return unproved


@pytest.fixture(scope="module")
def readme():
    return (ROOT / "README.md").read_text()


@pytest.fixture(scope="module")
def runs():
    with RESULTS.open(newline="") as file:
        return find_runs((ROOT / "docs/numbers.md").read_text(), list(csv.DictReader(file)))


def test_every_figure_of_the_readme_is_of_the_run_that_it_cites(readme, runs):
    assert set(runs) == set(named_runs.NAMED_RUNS)
    assert len(FIGURE.findall(readme)) > 40
    assert find_unproved(readme, runs) == []


@pytest.mark.parametrize(
    ("sound", "planted", "unproved"),
    [
        ("828 ms, 50.8 GiB", "864 ms, 50.8 GiB", ["864 ms (14b)"]),
        ("[run 0.6b-launches](docs/numbers.md#runs-of-the-readme)", "", 4),
        ("[run 70b-fp8](", "[run 70b](", ["2,990 tokens/s (70b)"]),
        ("5.4 %", "14.3 %", ["14.3 % (14b-metadata)"]),
        ("**Long packs**: the", "**Long packs** take 12 ms: the", ["12 ms (no run)"]),
        ("8,847 tokens/s", "7,170 tokens/s", ["7,170 tokens/s (32b-full)"]),
    ],
    ids=["other run's figure", "no run", "wrong run", "percent", "bare", "older run"],
)
def test_a_figure_of_no_run_is_seen(sound, planted, unproved, readme, runs):
    assert sound in readme
    found = find_unproved(readme.replace(sound, planted), runs)
    assert (len(found) if isinstance(unproved, int) else found) == unproved


def test_the_headlines_of_the_readme_are_those_of_results(readme):
    part = readme.partition("<!-- headlines -->\n")[2].partition("<!-- end of headlines -->")[0]
    assert part == named_runs.write_readme_headlines(), "results.csv has changed: python docs/generate.py"


def test_a_line_compares_settings_whose_moments_have_the_same_width(monkeypatch, tmp_path):
    monkeypatch.setattr(named_runs, "NAMED_RUNS", {"small": named_runs.NamedRun("tiny", ("ours keep", "unsloth off"))})
    monkeypatch.setattr(named_runs, "README_LINES", (named_runs.Headline("Tiny", "small", "keep"),))
    monkeypatch.setattr(named_runs, "README_TEMPLATE", "{table}")
    monkeypatch.setattr(named_runs, "find_figures", lambda entries: {})
    fields = {"date": "2026-11-30", "benchmark": "compare", "workload": "tiny, packed, labels 100%", "command": "run"}
    # Unsloth's fastest setting has moments in 8 bits, ours in 32.
    times = {"ours keep, adamw_fused": 50, "unsloth off, adamw_fused": 100, "unsloth off, adamw_8bit": 60}
    times |= {"unsloth off A/A, adamw_fused": 75, "unsloth unsloth, adamw_fused": 200}
    with (tmp_path / "results.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, [*fields, "system", "device", "metric", "unit", "value", "n"])
        writer.writeheader()
        for system, ms in times.items():
            for metric, unit, value in (
                ("step", "ms", ms),
                ("tokens", "tokens/s", 1e5 / ms),
                ("peak allocated", "GiB", 9),
            ):
                own = {"system": system, "device": "H200", "metric": metric, "unit": unit, "value": value, "n": 30}
                writer.writerow({**fields, **own})
    line = named_runs.write_readme_headlines(tmp_path / "results.csv").splitlines()[-1]
    assert line.startswith("| Tiny | 32-bit | 50 ms, 9 GiB | 200 ms, 9 GiB | 75 ms, 9 GiB | 1.50 | [run small]")


def test_a_run_without_one_of_its_labels_is_not_named(monkeypatch):
    entries = read_entries()
    small = named_runs.NamedRun("qwen3-0.6b-lora", ("ours keep+graphs", "unsloth no-such-mode"))
    monkeypatch.setitem(named_runs.NAMED_RUNS, "0.6b", small)
    with pytest.raises(LookupError, match="no-such-mode"):
        named_runs.find_named_run(entries, "0.6b")


# Logs


def rows_without_a_result(folder, results):
    """Return the rows that the logs of a folder give and results.csv lacks."""
    with results.open(newline="") as file:
        stored = {tuple(row.items()) for row in csv.DictReader(file)}
    missing = []
    for log in read_logs(folder):
        scratch = results.with_name(f"{log.path.stem}.csv")
        scratch.unlink(missing_ok=True)
        append_rows(log.rows(), path=scratch)
        with scratch.open(newline="") as file:
            missing += [row for row in csv.DictReader(file) if tuple(row.items()) not in stored]
    return missing


def test_rows_with_a_log_are_those_that_the_log_gives(tmp_path):
    copy = tmp_path / "results.csv"
    copy.write_bytes(RESULTS.read_bytes())
    assert all(log.rows() for log in read_logs(LOGS))
    assert rows_without_a_result(LOGS, copy) == []


@pytest.fixture
def logged(tmp_path, monkeypatch):
    """Return a results file with the rows of a log, and the folder of the log."""
    with (tmp_path / "raw.jsonl").open("w") as file:
        for record in records_of_a_run():
            file.write(json.dumps(record) + "\n")
    monkeypatch.setattr(numbers_page, "LOGS", tmp_path)
    write_log(tmp_path, name="qwen3-14b-qlora", command="x y", gaps={}, num_passes=2)
    (log,) = read_logs(tmp_path)
    path = tmp_path / "results.csv"
    append_rows(log.rows(), path=path)
    return path, log


def test_the_page_names_the_log_behind_a_row(logged):
    path, log = logged
    entries = read_entries(path)
    assert f"1. `x y`; [{log.path.name}](../benchmarks/logs/{log.path.name})" in numbers_page.write_headlines(entries)
    # A row of another day is of another run.
    path.write_text(path.read_text().replace(log.about["date"], "2026-01-01"))
    assert ".jsonl.gz" not in numbers_page.write_headlines(read_entries(path))


def test_a_row_that_is_not_its_logs_is_seen(logged):
    path, log = logged
    assert rows_without_a_result(log.path.parent, path) == []
    path.write_text(path.read_text().replace(",step,151,", ",step,141,"))
    assert [row["value"] for row in rows_without_a_result(log.path.parent, path)] == ["151"]


def test_short_rows_and_the_extrapolated_column_are_named(logged):
    path, _ = logged
    page = " ".join(numbers_page.write_numbers().split())
    assert "rows with fewer than 200 are short" in page
    head, _, ours, *_ = numbers_page.write_headlines(read_entries(path)).splitlines()
    cells = dict(zip(head.split(" | "), ours.split(" | ")))
    # 30 steps were timed; of 200, 21 were measured from the first batch on.
    assert (cells["steps"], cells["200 steps, s (partly extrapolated)"]) == ("30", "26.9")
