"""docs/support.md and docs/options.md are what the package says of itself, and the figures of docs/numbers.md are
measured ones.
"""

import csv
import importlib.util
import re
from pathlib import Path

import pytest

import lightning_fastft
from lightning_fastft.hf.families import FAMILIES

ROOT = Path(__file__).parents[2]
AGAIN = "the package has changed: python docs/generate.py"


@pytest.fixture(scope="module")
def generate():
    spec = importlib.util.spec_from_file_location("docs_generate", ROOT / "docs" / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_table_of_families_is_what_the_judges_say(generate):
    text = generate.write_support()
    assert (ROOT / "docs/support.md").read_text() == text, AGAIN
    rows = {
        line.split("|")[1].strip(): [cell.strip() for cell in line.split("|")[2:-1]]
        for line in text.splitlines()
        if line.count("|") == 7
    }
    assert all(rows[family][0] == "tested" for family in FAMILIES)
    assert rows["gpt_oss"][1:] == ["varlen, flex, reference", "yes", "yes", "linear layers and experts"]
    assert rows["llama"][2:] == ["yes", "dense", "linear layers"]
    assert rows["minimax"][:2] == ["refused", "-"]


def test_page_of_options_is_what_signatures_say(generate):
    text = generate.write_options()
    assert (ROOT / "docs/options.md").read_text() == text, AGAIN
    assert set(re.findall(r"^## (\w+)$", text, flags=re.MULTILINE)) == {*lightning_fastft.__all__, "Commands"}


def test_every_option_of_a_public_class_is_described(generate):
    """A parameter that its docstring leaves out would be missing from the page."""
    import inspect

    missing = []
    for name in lightning_fastft.__all__:
        value = getattr(lightning_fastft, name)
        if not inspect.isclass(value) or issubclass(value, Exception) or value.__init__ is object.__init__:
            continue
        meanings = generate.read_meanings(value)
        parameters = list(inspect.signature(value.__init__).parameters.values())[1:]
        named = [option.name for option in parameters if option.kind not in (option.VAR_KEYWORD, option.VAR_POSITIONAL)]
        missing += [f"{name}.{option}" for option in named if option not in meanings]
    assert missing == []


@pytest.fixture(scope="module")
def measured(generate):
    """Figures of results.csv as the page writes them. Rows are only appended, so a figure of an older row stays true."""
    found = set()
    with (ROOT / "benchmarks/results.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            measure = generate.MEASURES.get((row["metric"], row["unit"]))
            figure = generate.format_figure(float(row["value"])) if measure else ""
            system = (row["system"], generate.short_device(row["device"]))
            found.add((f"{row['benchmark']}: {row['workload']}", system, measure, figure))
    return found


def read_figures(page):
    """Yield the figures of the results in a page, with the title of their table, their system and device, and column."""
    title, columns = "", []
    for line in page.partition("<!-- results -->")[2].splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if line.startswith("### "):
            title = line.removeprefix("### ")
        elif cells and cells[0] == "system":
            columns = cells
        elif cells and not cells[0].startswith("-"):
            # Device, date and number of steps end a row.
            for column, figure in zip(columns[1:-3], cells[1:-3]):
                if figure:
                    yield title, (cells[0].replace(r"\|", "|"), cells[-3]), column, figure


def test_figures_of_the_page_are_rows_of_results(measured):
    figures = set(read_figures((ROOT / "docs/numbers.md").read_text()))
    assert figures - measured == set()
    assert len(figures) > 100


def test_a_wrong_figure_is_seen(measured):
    page = (ROOT / "docs/numbers.md").read_text()
    title, system, column, figure = next(read_figures(page))
    head, mark, results = page.partition("<!-- results -->")
    planted = head + mark + results.replace(f" {figure} ", f" {figure}9 ", 1)
    assert (title, system, column, f"{figure}9") in set(read_figures(planted)) - measured


def test_published_figures_stand_beside_the_stored_rows(generate):
    part = (
        (ROOT / "docs/numbers.md")
        .read_text()
        .partition("<!-- published -->\n")[2]
        .partition("<!-- end of published -->")[0]
    )
    assert part == generate.write_published(), (
        "results.csv or benchmarks/published_table.py has changed: python docs/generate.py"
    )
    # A table that ends where its heading ends would pass for one without rows.
    assert part.count("\n| ") > 10


def test_a_part_of_a_page_is_replaced_and_nothing_around_it(generate):
    page = "before <!-- x -->\nold\n<!-- end of x -->\nafter <!-- y -->\nold"
    assert (
        generate.replace_part(page, "x", "new\n") == "before <!-- x -->\nnew\n<!-- end of x -->\nafter <!-- y -->\nold"
    )
    assert (
        generate.replace_part(page, "y", "new\n")
        == "before <!-- x -->\nold\n<!-- end of x -->\nafter <!-- y -->\nnew\n"
    )
    with pytest.raises(ValueError, match="no mark 'z'"):
        generate.replace_part(page, "z", "new")


def test_figures_have_three_digits_or_more(generate):
    assert generate.format_figure(2293.28) == "2,293"
    assert generate.format_figure(14.94) == "14.9"
    assert generate.format_figure(0.99983) == "0.9998"
