"""Notebooks run from top to bottom on a CPU, end in an assert, and are stored without outputs."""

import json
import time
from pathlib import Path

import matplotlib
import pytest

FOLDER = Path(__file__).parents[2] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
LONGEST_S = 60


def code_of(path):
    return ["".join(cell["source"]) for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path, tmp_path, monkeypatch):
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    monkeypatch.chdir(tmp_path)
    # Their own folders go with the test's.
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    begin, names = time.process_time(), {"__name__": "__main__"}
    for number, source in enumerate(code_of(path)):
        exec(compile(source, f"{path.name}, code cell {number}", "exec"), names)
    plt.close("all")
    assert time.process_time() - begin < LONGEST_S


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_stored_without_outputs_and_ends_in_an_assert(path):
    book = json.loads(path.read_text())
    cells = [cell for cell in book["cells"] if cell["cell_type"] == "code"]
    assert book["nbformat"] == 4
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells)
    assert code_of(path)[-1].splitlines()[-1].lstrip().startswith("assert ")
    assert len({cell["id"] for cell in book["cells"]}) == len(book["cells"])


def test_all_that_are_promised_are_there():
    promised = ["cloud_template", "coming_from_unsloth_trl_torchtune", "moe_routing", "offload_and_planner"]
    promised += ["packing_and_metadata", "policy", "preference", "quick_start", "your_own_lightning_module"]
    assert [path.stem for path in NOTEBOOKS] == promised
