"""docs/which_gpu.md: what the planner says, and measured cells as they are in results.csv."""

import importlib.util
from pathlib import Path

import pytest

from lightning_fastft.estimate.machines import find_gpu

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def table():
    spec = importlib.util.spec_from_file_location("docs_gpu_table", ROOT / "docs" / "gpu_table.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def cells(table):
    """Cells of the page by model, method and GPU."""
    found = {}
    for method, part in zip(table.METHODS, table.PAGE.read_text().split("\n## ")[1:]):
        assert part.startswith(table.TITLES[method])
        for line in part.splitlines():
            name, *row = [cell.strip() for cell in line.strip("|").split("|")]
            if name in table.MODELS:
                found.update({(name, method, card): cell for card, cell in zip(table.CARDS, row)})
    return found


def test_page_has_every_model_method_and_card(table, cells):
    assert table.PAGE.read_text().startswith(table.write_head())
    assert len(cells) == len(table.MODELS) * len(table.METHODS) * len(table.CARDS)
    assert not [cell for cell in cells.values() if not cell or "not planned" in cell]


@pytest.mark.slow(seconds=2)
@pytest.mark.parametrize(
    "place", [("Qwen3-0.6B", "lora", "RTX 4070"), ("Qwen3-14B", "qlora", "H200"), ("Mixtral-8x7B", "full", "H100")]
)
def test_cells_are_those_of_the_planner(place, table, cells):
    model, method, card = place
    again = "the planner has changed: python docs/gpu_table.py"
    assert cells[place] == table.describe_cell(model, method, find_gpu(card)), again


def test_measured_cells_are_in_bold(table, cells):
    assert {place for place, cell in cells.items() if cell.startswith("**")} == set(table.MEASURED)


def test_the_run_with_the_most_steps_is_taken(table, tmp_path, monkeypatch):
    (tmp_path / "benchmarks").mkdir()
    rows = [
        ("ours fast", 20, 9822),
        ("ours shipped", 200, 9666),
        ("ours shipped A/A", 200, 9700),
        ("unsloth off", 400, 1),
    ]
    lines = [f"2026-11-28,compare,w,{system},tokens,{value},{steps},NVIDIA H200" for system, steps, value in rows]
    head = "date,benchmark,workload,system,metric,value,n,device"
    (tmp_path / "benchmarks" / "results.csv").write_text("\n".join([head, *lines]))
    monkeypatch.setattr(table, "DOCS", tmp_path / "docs")
    assert table.read_measured(table.Measured("w"), find_gpu("H200")) == 9666
