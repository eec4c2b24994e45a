"""The lane for Lightning's own tests, on a small folder of tests in their place."""

import pytest

from tests.lightning_suite.__main__ import main
from tests.lightning_suite.compare import compare, read_differences
from tests.lightning_suite.running import Result

SUITE = """
import os, time
import pytest
from lightning.pytorch import Trainer

def strategy(name="auto"):
    return type(Trainer(accelerator="cpu", devices=1, strategy=name, logger=False).strategy).__name__

def test_default(): assert strategy() == "SingleDeviceStrategy"
def test_is_ours(): assert strategy() == "FastFTStrategy"
def test_named(): assert strategy("ddp") == "DDPStrategy"
def test_fails(): assert False
def test_dies():
    if strategy() == "FastFTStrategy": os._exit(3)
def test_hangs():
    if strategy() == "FastFTStrategy": time.sleep(600)
def test_last(): pass
@pytest.mark.flaky(reruns=3)
def test_flaky(): assert False
@pytest.mark.parametrize("name", [None, "ddp_spawn"])
def test_processes(name): assert name is None
@pytest.mark.skip(reason="no GPU")
def test_skipped(): pass
"""
LINES = (
    "test_suite.py::test_default  # the class is named",
    "test_suite.py::test_d*s  # it dies",
    "test_suite.py::test_last  # it passes",
)


@pytest.fixture
def suite(tmp_path):
    folder = tmp_path / "tests" / "tests_pytorch"
    folder.mkdir(parents=True)
    (folder / "__init__.py").touch()
    (folder / "test_suite.py").write_text(SUITE)
    return tmp_path


def write_list(tmp_path, *lines):
    path = tmp_path / "differences.txt"
    path.write_text("\n".join(("# a comment", "[internals]", *lines)))
    return path


@pytest.mark.fault
def test_the_lane_sees_what_fails_hangs_or_dies_only_with_ours(suite, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("tests.lightning_suite.__main__.DIFFERENCES", write_list(tmp_path, *LINES))
    code = main(["--tests", str(suite), "--seconds", "60", "--out", str(tmp_path / "out")])
    text = capsys.readouterr().out
    assert "4 passed with our strategy, 1 skipped, 1 failed in both, 2 listed differences, 1 others" in text
    assert "failed in both: tests_pytorch/test_suite.py::test_fails" in text
    assert "FAILED ONLY WITH OURS: tests_pytorch/test_suite.py::test_hangs" in text
    assert "STALE in differences.txt, it passes or is gone: test_suite.py::test_last" in text
    assert code == 1


def test_a_run_with_all_differences_listed_is_clean(tmp_path):
    listed = read_differences(write_list(tmp_path, "test_a.py::test_1  # why"))
    ours = {
        "tests_pytorch/test_a.py::test_1": Result("failed", "E  no"),
        "tests_pytorch/test_a.py::test_2": Result("failed"),
    }
    plain = {"tests_pytorch/test_a.py::test_1": Result("passed"), "tests_pytorch/test_a.py::test_2": Result("failed")}
    assert compare(ours, plain, listed, is_whole=True).is_clean
    assert not compare(ours, plain, [], is_whole=True).is_clean
    assert not compare(
        ours | {"tests_pytorch/test_a.py::test_1": Result("passed")}, plain, listed, is_whole=True
    ).is_clean


def test_a_line_that_names_no_test_is_stale_only_when_all_tests_ran(tmp_path):
    listed = read_differences(write_list(tmp_path, "test_gone.py::test_[1]  # it was there"))
    ours = {"tests_pytorch/test_a.py::test_a": Result("passed")}
    assert compare(ours, {}, listed, is_whole=True).stale == listed
    assert compare(ours, {}, listed, is_whole=False).is_clean


def test_only_the_star_is_special_in_a_pattern(tmp_path):
    (line,) = read_differences(write_list(tmp_path, "test_a.py::test_a[x-*]  # why"))
    assert line.fits("tests_pytorch/test_a.py::test_a[x-1]")
    assert not line.fits("tests_pytorch/test_a.py::test_ax")


def test_a_line_without_a_reason_is_refused(tmp_path):
    with pytest.raises(ValueError, match="reason"):
        read_differences(write_list(tmp_path, "test_a.py::test_a"))
