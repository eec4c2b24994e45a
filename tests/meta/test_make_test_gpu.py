"""`make test-gpu`: the card of each process, tests that have a card of their own, and an end that names every failure."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TESTS = """
import json, os
import pytest

def note(name):
    cards = os.environ["CUDA_VISIBLE_DEVICES"]
    with open(os.environ["NOTES"], "a") as file:
        file.write(json.dumps([name, cards, os.environ["PYTEST_XDIST_WORKER"]]) + "\\n")

@pytest.mark.gpu
@pytest.mark.parametrize("number", range(12))
def test_shared(number):
    note("shared")

@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.parametrize("number", range(6))
def test_alone(number):
    note("alone")
    assert number != int(os.environ["FAILS"])

@pytest.mark.multi_gpu
def test_ranks():
    note("ranks")

def test_without_a_card():
    note("no card")
"""


def run(folder, *, cards, fails=-1):
    """Run the command with these cards; return its exit code, its output, and processes by name of test and cards."""
    (folder / "test_cards.py").write_text(TESTS)
    values = {
        "PY": sys.executable,
        "GPU_WORKERS": 2,
        "GPU_LOGS": folder / "logs",
        "GPU_FILES": folder / "test_cards.py",
    }
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": cards, "NOTES": str(folder / "notes"), "FAILS": str(fails)}
    # Processes of tests of tests: what xdist and make tell their own.
    environment = {name: value for name, value in environment.items() if not name.startswith(("PYTEST_", "MAKE"))}
    # Other plugins take seconds to load.
    environment |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": "-p xdist.plugin"}
    command = ["make", "--no-print-directory", "test-gpu", *(f"{name}={value}" for name, value in values.items())]
    quiet = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
    done = subprocess.run(command, cwd=ROOT, env=environment, timeout=300, check=False, **quiet)
    notes = {tuple(json.loads(line)) for line in (folder / "notes").read_text().splitlines()}
    return done.returncode, done.stdout + done.stderr, Counter((name, cards) for name, cards, _ in notes)


@pytest.mark.slow(6)
def test_processes_take_the_cards_in_turn(tmp_path):
    code, said, num_processes = run(tmp_path, cards="3,1,GPU-7")
    assert code == 0, said
    assert num_processes == {
        **{("shared", card): 2 for card in ("3", "1", "GPU-7")},
        **{("alone", card): 1 for card in ("3", "1", "GPU-7")},
        ("ranks", "3,1"): 1,
    }


@pytest.mark.slow(6)
def test_one_card_serves_all_and_a_failure_ends_no_later_part(tmp_path):
    code, said, num_processes = run(tmp_path, cards="0", fails=4)
    assert num_processes == {("shared", "0"): 2, ("alone", "0"): 1, ("ranks", "0"): 1}
    assert code != 0
    shared, alone, ranks = (line for line in said.splitlines() if line.startswith(("shared:", "alone:", "ranks:")))
    assert "12 passed" in shared
    assert "1 failed, 5 passed" in alone
    assert "1 passed" in ranks
