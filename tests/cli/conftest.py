"""Fixtures of the command line: the demo's files, and a folder of the test's own as the current one."""

import sys

import pytest

from lightning_fastft.cli import main
from lightning_fastft.demo.files import write_demo_files
from lightning_fastft.demo.generator import generate_rows


@pytest.fixture(scope="module")
def demo_files(tmp_path_factory):
    return write_demo_files(
        generate_rows(num_train=40, num_validation=4), tmp_path_factory.mktemp("demo"), vocab_size=320
    )


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return tmp_path


@pytest.fixture
def answer(capsys):
    """Return a function that runs the command and returns its exit status and what it wrote to standard error."""

    def run(words: list[str]) -> tuple[int, str]:
        try:
            status = main(words)
        except SystemExit as stop:
            status = stop.code
        return status, capsys.readouterr().err

    return run
