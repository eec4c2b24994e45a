"""The faults beside the default stack: two cheap ones for real, how rows become a table, and that the page shows
the rows that are stored.
"""

import importlib.util
import os
import signal
import sys
import threading
from pathlib import Path

import pytest

from benchmarks.faults import __main__ as command
from benchmarks.faults import child, ranks
from benchmarks.faults.table import (
    COLUMNS,
    GOOD,
    ROWS_PATH,
    STACKS,
    TITLES,
    append_rows,
    make_row,
    read_rows,
    render_table,
)

ROOT = Path(__file__).parents[2]
ORIGIN = {"date": "2026-01-02", "versions": "torch 0", "command": "python -m benchmarks.faults run"}


@pytest.fixture
def environment():
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


# Nine ranks that import torch.
@pytest.mark.fault
def test_a_job_hurt_at_full_load_resumes_on_fewer_ranks(tmp_path, capfd):
    sizes = ["--workload", "tiny-full", "--tokens", "256", "--device", "cpu"]
    assert ranks.main(["load", str(tmp_path / "load"), "--ranks", "2", "--resumed-on", "2", "1", *sizes]) == 0
    said = capfd.readouterr().out
    assert "kill, 2 ranks: named and ended in time; resumed on 2: from the newest checkpoint to the end" in said
    assert "stop, 2 ranks: named and ended in time; resumed on 1: from the newest checkpoint to the end" in said


@pytest.mark.fault
def test_two_faults_end_badly_in_the_default_stack_and_well_in_ours(tmp_path, environment, capsys):
    assert command.main(["run", "--quick", "--only", "R2", "R3", "--out", str(tmp_path)]) == 0
    rows = {(row["fault"], row["stack"]): row for row in read_rows(tmp_path / "faults.csv")}
    assert set(rows) == {(fault, stack) for fault in ("R2", "R3") for stack in STACKS}
    # Four fifths of the damages are flipped bits, of which the default stack notices few; what is cut off raises
    # everywhere.
    assert 30 <= int(rows["R2", "default"]["bad"]) <= 40
    assert rows["R2", "default"]["how"].endswith("loaded without a word, values differ")
    assert "returned without an error, nothing saved (read only)" in rows["R3", "default"]["how"]
    assert [(rows[fault, "ours"]["bad"], rows[fault, "ours"]["how"]) for fault in ("R2", "R3")] == [("0", "")] * 2
    assert [rows[fault, "ours"]["trials"] for fault in ("R2", "R3")] == ["50", "7"]
    printed = capsys.readouterr().out
    assert render_table(read_rows(tmp_path / "faults.csv")) in printed


@pytest.mark.fault
def test_a_bad_end_of_ours_is_seen(tmp_path, environment, monkeypatch, capsys):
    """Our loader without its digests is the default one."""
    monkeypatch.setattr("lightning_fastft.checkpoint.files._judge_file", lambda file: True)
    assert command.main(["run", "--quick", "--only", "R2", "--stacks", "ours", "--out", str(tmp_path)]) == 1
    (row,) = read_rows(tmp_path / "faults.csv")
    assert int(row["bad"]) >= 30


@pytest.mark.fault
@pytest.mark.parametrize("fault", [name for name in command.FAULTS if name not in ("R2", "R3")])
def test_every_other_fault_runs(tmp_path, environment, fault):
    assert command.main(["run", "--quick", "--only", fault, "--out", str(tmp_path)]) == 0
    assert [(row["stack"], int(row["trials"]) > 0) for row in read_rows(tmp_path / "faults.csv")] == [
        (stack, True) for stack in STACKS
    ]


def test_every_fault_has_a_title_and_trials():
    assert list(command.FAULTS) == list(TITLES)
    assert all(0 < fault.num_quick <= fault.num_trials for fault in command.FAULTS.values())


def test_rows_are_counted_by_how_they_ended():
    row = make_row("R1", "default", ["torn", GOOD, "lost", "torn"], seconds=3.7, **ORIGIN)
    assert row == {
        "fault": "R1",
        "stack": "default",
        "trials": "4",
        "bad": "3",
        "how": "2 torn; 1 lost",
        "seconds": "4",
        **ORIGIN,
    }


def test_rows_are_appended_and_never_edited(tmp_path):
    path = tmp_path / "deep" / "faults.csv"
    first, second = (make_row("R1", "ours", [end], seconds=1.0, **ORIGIN) for end in (GOOD, "torn, and lost"))
    append_rows([first], path=path)
    before = path.read_text()
    append_rows([second], path=path)
    assert path.read_text().startswith(before)
    assert read_rows(path) == [first, second]
    path.write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="has the columns a, b"):
        append_rows([first], path=path)


def test_the_table_has_the_newest_row_of_each_stack_in_the_order_of_the_promises():
    rows = [
        make_row("R2", "default", ["torn"], seconds=1.0, **ORIGIN),
        make_row("R1", "ours", ["torn"], seconds=1.0, **ORIGIN),
        make_row("R1", "ours", [GOOD, GOOD], seconds=1.0, **{**ORIGIN, "date": "2026-01-03"}),
    ]
    lines = render_table(rows).splitlines()[2:]
    assert lines[0] == f"| R1 | {TITLES['R1']} | not run |  | 0 of 2 | 2026-01-03 |"
    assert lines[1] == f"| R2 | {TITLES['R2']} | 1 of 1 | 1 torn | not run | 2026-01-02 |"
    assert len(lines) == 2


def test_a_child_answers_exits_dies_or_is_ended(tmp_path):
    assert child.run(tmp_path, lambda: ["x" * 100_000]) == child.End(0, ["x" * 100_000])
    assert child.run(tmp_path, lambda: sys.exit()) == child.End(0, None)
    assert child.run(tmp_path, lambda: sys.exit("no")) == child.End(1, None)
    assert child.run(tmp_path, lambda: sys.exit(143)) == child.End(143, None)
    assert child.run(tmp_path, lambda: 1 / 0) == child.End(1, None)
    assert child.run(tmp_path, lambda: os.kill(os.getpid(), signal.SIGKILL)) == child.End(-9, None)
    assert child.run(tmp_path, lambda: len(bytearray(2**40)), limit_bytes=2**38) == child.End(1, None)
    assert child.run(tmp_path, lambda: threading.Event().wait(), limit_s=0.3) == child.End(None, None)
    assert "ZeroDivisionError" in (tmp_path / child.LOG).read_text()


# The page.


@pytest.fixture(scope="module")
def generate():
    spec = importlib.util.spec_from_file_location("docs_generate", ROOT / "docs" / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_shows_the_rows_that_are_stored(generate):
    page = (ROOT / "docs" / "reliability.md").read_text()
    assert page.partition("<!-- faults -->\n")[2] == generate.write_faults(), (
        "faults.csv has changed: python docs/generate.py"
    )


def test_every_fault_was_run_in_both_stacks_and_ours_ended_well():
    newest = {(row["fault"], row["stack"]): row for row in read_rows(ROWS_PATH)}
    assert set(newest) == {(fault, stack) for fault in TITLES for stack in STACKS}
    assert [key for key, row in newest.items() if key[1] == "ours" and row["bad"] != "0"] == []
    for (fault, _), row in newest.items():
        assert tuple(row) == COLUMNS
        assert int(row["trials"]) >= int(row["bad"])
        assert "--quick" not in row["command"], fault
