"""The pages in a real browser: they fit a phone, load nothing, and show a value under the pointer."""

import json
import re

import pytest

from lightning_fastft.monitor.report.comparison import render_comparison
from lightning_fastft.monitor.report.page import render_page
from lightning_fastft.monitor.run_report import RunReport
from tests.support.browser import find_browser, open_browser
from tests.support.training_parts import PlainModule, packed_loader, quiet_trainer, tiny_llama

pytestmark = pytest.mark.skipif(find_browser() is None, reason="no Chromium is installed")
WIDTHS = (390, 1200)


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """A browser, the page of a run with long words in it, and a page that compares it with another."""
    folder = tmp_path_factory.mktemp("browser")
    report = RunReport(folder / "run.html", profile_step=None)
    trainer = quiet_trainer(folder, strategy="fastft", callbacks=[report], max_steps=4, val_check_interval=1)
    trainer.fit(PlainModule(tiny_llama()), packed_loader(4), packed_loader(1, seed=50))
    data = json.loads(report.json_path.read_text())
    long_word = "x" * 300
    answers = [{"step": 4, "text": long_word}, {"step": 2, "text": "an answer " * 50}]
    data["samples"] = {"max_new_tokens": 9, "num_left": 0, "prompts": [{"prompt": long_word, "answers": answers}]}
    data["head"]["name"] = f"models/{long_word}"
    other = json.loads(json.dumps(data))
    other["options"]["trainer"]["precision"] = long_word
    (folder / "run.html").write_text(render_page(data))
    (folder / "two.html").write_text(render_comparison({"one": data, long_word: other}))
    with open_browser(folder / "profile") as browser:
        yield browser, folder, data


@pytest.mark.covering
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["run.html", "two.html"])
def test_page_fits_its_width_and_no_card_is_empty(pages, name, width):
    browser, folder, _ = pages
    browser.open(folder / name, width=width)
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    empty = "[...document.querySelectorAll('section')].filter(card => card.innerText.trim().split('\\n').length < 2)"
    assert browser.evaluate(f"{empty}.length") == 0
    beyond = """[...document.querySelectorAll("section, .tile, .verdict, h1, h2, h3, .chart, pre.answer")]
        .filter(box => box.getBoundingClientRect().right > innerWidth).length"""
    assert browser.evaluate(beyond) == 0
    # Two cards in a row are as wide as one wide card: the grid has no hole.
    holes = """(() => { const rows = {};
        for (const card of document.querySelectorAll(".cards > section")) {
          const box = card.getBoundingClientRect(); rows[box.top] = Math.max(rows[box.top] || 0, box.right); }
        return new Set(Object.values(rows).map(Math.round)).size; })()"""
    assert browser.evaluate(holes) == 1


@pytest.mark.parametrize("name", ["run.html", "two.html"])
def test_page_asks_for_nothing_and_breaks_no_rule_of_its_own(pages, name):
    browser, folder, _ = pages
    browser.open(folder / name, width=WIDTHS[1])
    assert browser.evaluate("performance.getEntriesByType('resource').length") == 0
    assert [message for message in browser.messages if message["method"] == "Log.entryAdded"] == []


def test_dark_and_light_differ(pages):
    browser, folder, _ = pages
    colours = set()
    for scheme in ("light", "dark"):
        browser.open(folder / "run.html", width=WIDTHS[1], scheme=scheme)
        style = browser.evaluate("(s => [s.color, s.backgroundColor])(getComputedStyle(document.body))")
        colours.add(tuple(style))
        (text, page) = [sum(map(int, re.findall(r"\d+", colour)[:3])) for colour in style]
        assert (text < page) == (scheme == "light")
    assert len(colours) == 2


@pytest.mark.parametrize("width", WIDTHS)
def test_pointer_on_a_chart_shows_the_value_inside_the_window(pages, width):
    browser, folder, data = pages
    browser.open(folder / "run.html", width=width)
    points = data["curves"]["loss"]["points"]
    browser.evaluate("document.querySelector('.plot').scrollIntoView({block: 'center'})")
    x, y, wide, tall = browser.evaluate(
        "(b => [b.x, b.y, b.width, b.height])(document.querySelector('.plot').getBoundingClientRect())"
    )
    # The validations end one step after the last training step.
    for step, _, value in points:
        # Not on the line of the axis, which is part of the plot's box.
        browser.hover(x + 2 + (wide - 4) * step / len(points), y + tall / 2)
        shown = browser.evaluate("getComputedStyle(document.querySelector('.band:hover'), '::after').content")
        assert f"training, step {step}: {value:.4g}" in shown
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
