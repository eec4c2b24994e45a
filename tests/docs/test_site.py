"""The pages as a site: every link and anchor leads somewhere, and the pictures are those that their script draws."""

import importlib.util
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def pictures():
    spec = importlib.util.spec_from_file_location("pictures", ROOT / "docs/pictures.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def build(source, place):
    """Return the exit status of a strict build, and what it printed."""
    program = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", source, "--site-dir", place]
    done = subprocess.run(list(map(str, program)), cwd=ROOT, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def test_pictures_are_those_that_the_script_draws(pictures):
    stored = {path.stem: path.read_text() for path in pictures.FOLDER.glob("*.svg")}
    assert stored == {name: draw().render() for name, draw in pictures.PICTURES.items()}, "python docs/pictures.py"


def bars_of(drawing):
    """Return the labels of the bars and the figures beside them, group by group."""
    words = re.findall(r"<text[^>]*>([^<]*)</text>", drawing.render())
    return {label: figure for label, figure in pairwise(words) if re.fullmatch(r"[\d,]+", figure)}


def test_the_chart_shows_one_run_and_follows_results(pictures, monkeypatch, tmp_path):
    labels = {label for label, *_ in pictures.BARS}
    assert {*bars_of(pictures.draw_chart())} == labels
    results = tmp_path / "results.csv"
    lines = pictures.RESULTS.read_text().splitlines(keepends=True)
    (run,) = [line for line in lines if ",69.1796," in line]
    # Another system, in the same run and in another: only the first has a bar.
    trl = run.replace('"ours keep+graphs, adamw_fused_8bit"', '"trl recompute, adamw_8bit"').replace("69.1796", "400.4")
    assert "trl recompute" in trl
    plain = trl.replace("trl recompute", "plain recompute").replace("2026-11-22", "2026-11-23")
    tokens = [line.replace(",step,", ",tokens,").replace(",ms,", ",tokens/s,") for line in (trl, plain)]
    results.write_text("".join([*lines, trl, plain, *tokens]).replace(",138.168,", ",137.168,"))
    monkeypatch.setattr(pictures, "RESULTS", results)
    bars = bars_of(pictures.draw_chart())
    assert {*bars} == labels
    assert (bars["Unsloth, fastest"], bars["TRL, packed, fastest"]) == ("137", "400")
    assert bars["transformers + PEFT, fastest"] != "400"


def test_every_picture_is_on_a_page(pictures):
    pages = "".join(path.read_text() for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")))
    assert [name for name in pictures.PICTURES if f"pictures/{name}.svg" not in pages] == []


def test_the_site_builds_and_all_its_links_lead_somewhere(tmp_path):
    pytest.importorskip("material", reason="needs mkdocs-material")
    status, printed = build(ROOT / "mkdocs.yml", tmp_path / "site")
    assert status == 0, printed
    index = (tmp_path / "site/index.html").read_text()
    assert '<a href="guide.html">Guide</a>' in index
    assert not re.search(r"<a [^>]*>[\w./]*\.md</a>", index + (tmp_path / "site/numbers.html").read_text())
    assert (tmp_path / "site/pictures/chart.svg").is_file()
    tutorial = (tmp_path / "site/notebooks/quick_start.html").read_text()
    assert "FineTuner" in tutorial
    assert 'href="notebooks/quick_start.html"' in (tmp_path / "site/notebooks.html").read_text()
    assert (tmp_path / "site/search/search_index.json").is_file()
    for page in (tmp_path / "site").rglob("*.html"):
        # A list without a blank line before it becomes text.
        text = re.sub(r"<pre.*?</pre>", "", page.read_text(), flags=re.DOTALL)
        assert re.findall(r"^(?:- |1\. ).*", text, flags=re.MULTILINE) == [], page.name
        targets = re.findall(r' (?:href|src)="?(?!\w+:|//|#|/)([^"#?> ]+)', page.read_text())
        assert [target for target in targets if page.name != "404.html" and not (page.parent / target).exists()] == []


def test_a_link_to_nowhere_ends_the_build(tmp_path):
    pytest.importorskip("material", reason="needs mkdocs-material")
    (tmp_path / "pages").mkdir()
    (tmp_path / "pages/index.md").write_text("# Page\n[nowhere](guide.md#no-such-section)\n")
    (tmp_path / "pages/guide.md").write_text("# Guide\n")
    config = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[0]
    config = config.replace("docs_dir: docs", f"docs_dir: {tmp_path}/pages").replace("hooks: [docs/site.py]", "")
    (tmp_path / "mkdocs.yml").write_text(config)
    status, printed = build(tmp_path / "mkdocs.yml", tmp_path / "site")
    assert status != 0
    assert "no-such-section" in printed
