"""The garbage collector rests while a command imports its modules and makes its objects, and only then."""

import gc

import pytest
from lightning.pytorch.cli import LightningCLI

import lightning_fastft.cli.command as command_module
from lightning_fastft.cli import main
from lightning_fastft.cli.lightning_cli import FastFTCLI
from lightning_fastft.core.collection import paused_collection


def test_nothing_is_collected_during_imports_and_collection_is_on_when_the_command_runs(monkeypatch):
    seen = []

    def run(words):
        seen.append(gc.isenabled())
        return 0

    def import_command(command):
        seen.append(gc.isenabled())
        return run

    monkeypatch.setattr(command_module, "_import_command", import_command)
    assert main(["convert"]) == 0
    assert seen == [False, True]


def test_collection_is_on_after_an_error_while_objects_are_made(monkeypatch):
    seen = []

    def fail(cli):
        seen.append(gc.isenabled())
        raise KeyError("planted")

    monkeypatch.setattr(LightningCLI, "instantiate_classes", fail)
    with pytest.raises(KeyError, match="planted"):
        FastFTCLI(["--model.model", "x", "--data.paths", "y"], run=False)
    assert seen == [False]
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off():
    gc.disable()
    try:
        with paused_collection():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
