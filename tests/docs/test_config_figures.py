"""Speed and memory in the head of a shipped config are those of one row of the page or file that it cites."""

import csv
import re
from collections import defaultdict
from pathlib import Path

import pytest

from lightning_fastft.cli.words import CONFIG_FOLDER, config_names

ROOT = Path(__file__).parents[2]
PAIR = re.compile(r"([\d,]+) tokens/s at ([\d.]+) GiB")
NUMBER = re.compile(r"(?<![\w.,-])[\d,]*\d(?:\.\d+)?(?![\w-])")
PAGE, RESULTS = "docs/numbers.md", "benchmarks/results.csv"


def head_of(name):
    lines = (CONFIG_FOLDER / f"{name}.yaml").read_text().splitlines()
    return " ".join(line.lstrip("# ") for line in lines if line.startswith("#"))


def rows_of(source):
    """Return (date, numbers) of each row of the page, or of each measured setting of the results."""
    if source == PAGE:
        lines = [line for line in (ROOT / PAGE).read_text().splitlines() if line.startswith("|")]
        dated = [(re.search(r"\d{4}-\d\d-\d\d", line), line) for line in lines]
        return [(date[0], {float(n.replace(",", "")) for n in NUMBER.findall(line)}) for date, line in dated if date]
    settings = defaultdict(set)
    with (ROOT / RESULTS).open(newline="") as file:
        for row in csv.DictReader(file):
            if row["unit"] in ("tokens/s", "GiB") and row["value"]:
                settings[row["date"], row["workload"], row["system"], row["command"]].add(float(row["value"]))
    return [(key[0], values) for key, values in settings.items()]


def find_unproved(head):
    """Return the figures in the head of a config that no row of its source and date has."""
    (source,) = [source for source in (PAGE, RESULTS) if source in head]
    date = re.search(r"one H200, (\d{4}-\d\d-\d\d)", head)[1]
    rows = [numbers for day, numbers in rows_of(source) if day == date]

    def has(numbers, text):
        digits = len(text.partition(".")[2])
        return any(f"{number:,.{digits}f}" == text for number in numbers)

    pairs = PAIR.findall(head)
    assert len(pairs) == head.count("tokens/s") > 0, "write N tokens/s at N GiB"
    return [pair for pair in pairs if not any(all(has(numbers, text) for text in pair) for numbers in rows)]


@pytest.mark.parametrize("name", [name for name in config_names() if PAGE in head_of(name) or RESULTS in head_of(name)])
def test_figures_of_a_config_are_in_the_source_that_it_cites(name):
    assert find_unproved(head_of(name)) == []
