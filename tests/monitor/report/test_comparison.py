"""``fastft report``: the figures and curves of several runs on one page, from the files of their reports."""

import json
import re
import shutil

import pytest

from lightning_fastft import RunReport
from lightning_fastft.cli.command import main
from lightning_fastft.monitor.report.comparison import compare, read_reports, render_comparison
from tests.monitor.test_run_report import Page, numbers_in
from tests.support.training_parts import PlainModule, packed_loader, quiet_trainer, tiny_llama


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two runs of one model with different learning rates and lengths."""
    folder = tmp_path_factory.mktemp("runs")
    for name, lr, max_steps in (("a", 1e-2, 8), ("b", 1e-3, 4)):
        # The default place is below the folder of the run, as a logger makes it.
        report = RunReport(folder / name / "version_0" / "run_report.html", profile_step=None)
        trainer = quiet_trainer(
            folder, strategy="fastft", callbacks=[report], max_steps=max_steps, val_check_interval=2
        )
        trainer.fit(PlainModule(tiny_llama(), lr=lr), packed_loader(max_steps), packed_loader(1, seed=50))
    return folder


def test_page_and_table_have_the_figures_of_each_run(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["report", str(folder / "a"), str(folder / "b")]) == 0
    table = capsys.readouterr().out
    text = (tmp_path / "runs" / "comparison.html").read_text()
    page, data = (
        Page(text),
        [json.loads((folder / name / "version_0" / "run_report.json").read_text()) for name in "ab"],
    )
    assert set(page.figures) <= {number for one in data for number in numbers_in(one)}
    heads = {
        one["head"][name] for one in data for name in ("tokens_per_s", "peak_memory_gib", "final_loss", "num_steps")
    }
    assert heads <= set(page.figures)
    assert [line.split()[-2:] for line in table.splitlines() if line.startswith("optimizer steps")] == [["8", "4"]]
    assert f"{data[1]['head']['final_loss']:.4g}" in table
    assert not {"script", "link", "img", "iframe"} & set(page.tags)
    assert not re.search(r"https?:|//\w|url\(|@import", text)
    # A second comparison replaces the first.
    assert main(["report", str(folder / "b"), str(folder / "a")]) == 0


def test_each_chart_has_a_line_of_each_run(folder, tmp_path):
    assert main(["report", str(folder / "a"), str(folder / "b"), "--out", str(tmp_path / "x.html")]) == 0
    text = (tmp_path / "x.html").read_text()
    charts = {re.match("[^<]*", part)[0].strip(): part for part in text.split("<h2>")[1:]}
    assert {"Loss: training", "Loss: validation", "Tokens per second", "Learning rate"} <= charts.keys()
    for title in ("Loss: training", "Loss: validation", "Learning rate"):
        assert charts[title].count("<polyline") == 2, title
    assert 'data-tip="a, step 0: 0.01\nb, step 0: 0.001"' in charts["Learning rate"]


def test_only_what_differs_is_listed(folder, tmp_path):
    assert main(["report", str(folder / "a"), str(folder / "b"), "--out", str(tmp_path / "x.html")]) == 0
    differences = (tmp_path / "x.html").read_text().partition("What differs")[2]
    assert "trainer.max_steps" in differences
    assert "trainer.precision" not in differences
    assert "versions.torch" not in differences


def test_options_inside_an_option_are_compared_one_by_one(folder):
    reports = json.loads(json.dumps(read_reports([str(folder / "a"), str(folder / "b")])))
    for rank, report in zip((8, 16), reports.values()):
        report["options"]["module"] = {"lora": {"r": rank, "target_modules": ["q_proj"]}}
    differences = render_comparison(reports).partition("What differs")[2]
    assert re.search(r"module\.lora\.r<.*<code>8</code>.*<code>16</code>", differences)
    assert "target_modules" not in differences


def test_better_values_are_marked(folder):
    reports = read_reports([str(folder / "a"), str(folder / "b")])
    rows = {row.name: row for row in compare(reports)}
    losses = rows["training loss, last steps"]
    assert losses.best == {min((0, 1), key=lambda place: losses.values[place])}
    rates = rows["tokens/s"]
    assert rates.best == {max((0, 1), key=lambda place: rates.values[place])}
    points = [one["validation"]["metrics"][0]["points"] for one in reports.values()]
    assert [len(one) for one in points] == [4, 2]
    assert rows["val_loss, best"].values == [min(point[2] for point in one) for one in points]
    assert rows["val_loss, last"].values == [one[-1][2] for one in points]
    assert list(reports) == ["a", "b"]


def test_refuses_what_is_no_two_reports(folder, tmp_path, capsys):
    run, other = str(folder / "a"), tmp_path / "other"
    other.mkdir()
    (other / "run_report.json").write_text('{"schema": "lightning_fastft.run_report", "schema_version": 1}')
    (tmp_path / "not.json").write_text("{")
    (tmp_path / "empty").mkdir()
    shutil.copytree(folder / "a", tmp_path / "two" / "a")
    shutil.copytree(folder / "a", tmp_path / "two" / "b")
    for words, reason in (
        ([run], "2 to 12 runs"),
        ([run] * 13, "2 to 12 runs"),
        ([run, run], "named twice"),
        ([run, str(tmp_path / "nothing")], "neither a folder nor"),
        ([run, str(tmp_path / "two")], "has 2 reports"),
        ([run, str(tmp_path / "empty")], "name that file"),
        ([run, str(other)], "version 1"),
        ([run, str(tmp_path / "not.json")], "not a run report"),
        ([run, str(folder / "b"), "--out", "page.txt"], ".html"),
        ([run, str(folder / "b"), "--out", "/proc/runs/page.html"], "cannot be written"),
        ([run, str(folder / "b"), "--out", str(folder / "a" / "version_0" / "run_report.html")], "--out"),
    ):
        assert main(["report", *words]) == 1
        assert reason in capsys.readouterr().err, words
