"""What a command shows of its phases: a line each, on the first rank."""

import io
import logging
import sys

import pytest
import torch
from lightning.fabric.utilities.rank_zero import rank_zero_only

from lightning_fastft.cli import command
from lightning_fastft.cli.phases import shown_phases
from lightning_fastft.core.phases import LOGGER, log_phase, phase


class Screen(io.StringIO):
    def __init__(self, *, is_terminal):
        super().__init__()
        self.is_terminal = is_terminal

    def isatty(self):
        return self.is_terminal


def run_phases(monkeypatch, *, is_terminal, rank=0):
    """Return what is shown of a phase, of a longer one, and of a note."""
    screen = Screen(is_terminal=is_terminal)
    with monkeypatch.context() as patch, shown_phases():
        # In the test itself: pytest sets its own stream before each test.
        patch.setattr(sys, "stderr", screen)
        patch.setattr(rank_zero_only, "rank", rank)
        with phase("loading"):
            pass
        log_phase("planning", 1.25)
        LOGGER.info("a note")
    return screen.getvalue()


def test_file_gets_a_short_line_of_each_long_phase(monkeypatch):
    assert run_phases(monkeypatch, is_terminal=False) == "planning: 1.2 s\na note\n"


def test_terminal_shows_a_phase_from_its_beginning(monkeypatch):
    shown = run_phases(monkeypatch, is_terminal=True)
    assert shown.startswith("\r\x1b[Kloading ...\r")
    assert "planning: 1.2 s\n" in shown


@pytest.mark.parametrize("is_terminal", [True, False])
def test_other_ranks_show_nothing(is_terminal, monkeypatch):
    assert run_phases(monkeypatch, is_terminal=is_terminal, rank=1) == ""


def test_nothing_is_shown_outside_of_a_command(monkeypatch, capsys):
    run_phases(monkeypatch, is_terminal=False)
    with phase("loading"):
        log_phase("planning", 1.25)
    assert capsys.readouterr() == ("", "")
    assert LOGGER.handlers == []
    assert LOGGER.level == logging.NOTSET


def test_handler_of_the_user_tells_the_begin_of_a_phase_from_its_end(caplog):
    with caplog.at_level(logging.INFO, logger=LOGGER.name), phase("planning"):
        pass
    assert caplog.messages == ["planning ...", "planning: 0.0 s"]


class Cores:
    def count(self):
        return 1


@pytest.mark.parametrize(("variable", "expected"), [(None, 1), ("3", 3)])
def test_torch_gets_the_free_cores_unless_the_user_sets_threads(variable, expected, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS")
    if variable:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        command._use_free_cores(Cores())
        assert torch.get_num_threads() == expected
    finally:
        torch.set_num_threads(before)
