"""Every file that the pages on architecture and contributing name is there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PLACES = (ROOT, ROOT / "lightning_fastft")


def named_paths(text):
    """Paths in backticks: with a slash, and no pattern, option or placeholder in them."""
    quoted = re.findall(r"`([\w./-]+/[\w./-]*)`", text)
    return [path for path in quoted if not re.search(r"NAME|[*<>]|^\.\.", path)]


@pytest.mark.parametrize("page", ["docs/architecture.md", "CONTRIBUTING.md"])
def test_every_path_is_there(page):
    paths = named_paths((ROOT / page).read_text())
    assert len(paths) > 5
    assert [path for path in paths if not any((place / path).exists() for place in PLACES)] == []


def test_a_path_that_is_not_there_is_seen():
    assert named_paths("read `hf/nowhere.py`, `kernels/*/op.py` and `--data.paths`") == ["hf/nowhere.py"]


def test_every_room_is_in_the_drawing():
    drawing = (ROOT / "docs/architecture.md").read_text().split("```")[1]
    rooms = {path.parent.name for path in (ROOT / "lightning_fastft").glob("*/__init__.py")} - {"demo"}
    assert {room for room in rooms if room not in drawing} == set()
