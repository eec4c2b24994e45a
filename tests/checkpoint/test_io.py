"""VerifiedCheckpointIO: installed by the strategies, plain types only, local places only, and the user's own one is kept."""

import os
from pathlib import Path

import pytest
import torch
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO

from lightning_fastft.checkpoint.files import check_file, part_beside
from lightning_fastft.checkpoint.io import VerifiedCheckpointIO
from lightning_fastft.errors import DamagedCheckpointError, OptionError, UnsafeCheckpointError
from lightning_fastft.strategies.single_device import FastFTStrategy
from tests.checkpoint.test_files import Runs
from tests.training_parts import PlainModule, packed_loader, quiet_trainer, tiny_llama

URLS = ["http://example.com/a.ckpt", "s3://bucket/a.ckpt", Path("s3://bucket/a.ckpt"), "hf://a/b"]


def fit(folder, **options):
    trainer = quiet_trainer(folder, **{"strategy": "fastft", "max_steps": 1, **options})
    trainer.fit(PlainModule(tiny_llama()), packed_loader(2))
    return trainer


def status_of(trainer, name="checkpoints"):
    return next(status for status in trainer.strategy.statuses() if status.name == name)


def test_strategy_installs_it_and_says_so(tmp_path):
    trainer = fit(tmp_path)
    assert isinstance(trainer.strategy.checkpoint_io, VerifiedCheckpointIO)
    assert status_of(trainer).state == "active"
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    assert check_file(tmp_path / "a.ckpt")


@pytest.mark.parametrize("place", ["plugins", "strategy"])
def test_the_users_own_one_is_kept_and_said(tmp_path, place):
    own = TorchCheckpointIO()
    options = {"plugins": [own]} if place == "plugins" else {"strategy": FastFTStrategy(checkpoint_io=own)}
    trainer = fit(tmp_path, **options)
    assert trainer.strategy.checkpoint_io is own
    assert status_of(trainer).state == "inactive"
    assert "TorchCheckpointIO was given" in status_of(trainer).reason


def test_asynchronous_saves_go_through_it(tmp_path):
    trainer = fit(tmp_path, plugins=[AsyncCheckpointIO()])
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    trainer.strategy.checkpoint_io.teardown()
    assert check_file(tmp_path / "a.ckpt")
    assert status_of(trainer).state == "active"


@pytest.mark.parametrize("path", URLS, ids=str)
def test_urls_are_refused_with_the_reason(path):
    io = VerifiedCheckpointIO()
    for use in (lambda: io.load_checkpoint(path), lambda: io.save_checkpoint({}, path)):
        with pytest.raises(UnsafeCheckpointError, match="local or mounted folders only"):
            use()


def test_file_url_is_a_local_file(tmp_path):
    io = VerifiedCheckpointIO()
    io.save_checkpoint({"a": 1}, f"file://{tmp_path}/a.ckpt")
    assert io.load_checkpoint(tmp_path / "a.ckpt") == {"a": 1}


def test_storage_options_are_refused(tmp_path):
    with pytest.raises(OptionError, match="storage_options"):
        VerifiedCheckpointIO().save_checkpoint({}, tmp_path / "a.ckpt", storage_options={"x": 1})


def test_folder_and_missing_file_are_named(tmp_path):
    io = VerifiedCheckpointIO()
    with pytest.raises(OptionError, match="fastft_fsdp"):
        io.load_checkpoint(tmp_path)
    with pytest.raises(FileNotFoundError, match="not found"):
        io.load_checkpoint(tmp_path / "a.ckpt")


@pytest.mark.parametrize("switch", ["argument", "environment"])
def test_switches_that_would_let_code_run_have_no_effect_and_are_said(tmp_path, switch, monkeypatch):
    torch.save({"x": Runs(tmp_path / "ran")}, tmp_path / "a.ckpt")
    if switch == "environment":
        monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    with pytest.warns(UserWarning, match="ignored"), pytest.raises(UnsafeCheckpointError, match="more than tensors and plain types"):
        VerifiedCheckpointIO().load_checkpoint(tmp_path / "a.ckpt", weights_only=False if switch == "argument" else None)
    assert not (tmp_path / "ran").exists()


def test_file_without_digest_is_loaded_and_said(tmp_path):
    TorchCheckpointIO().save_checkpoint({"a": 1}, tmp_path / "a.ckpt")
    with pytest.warns(UserWarning, match="carries no digest"):
        assert VerifiedCheckpointIO().load_checkpoint(tmp_path / "a.ckpt") == {"a": 1}


def test_content_that_could_not_be_resumed_is_said_when_it_is_saved(tmp_path):
    io = VerifiedCheckpointIO()
    with pytest.warns(UserWarning, match=r"holds objects of .*tests\.checkpoint\.test_io\.fit.*cannot be resumed"):
        io.save_checkpoint({"factory": fit}, tmp_path / "a.ckpt")


def test_damaged_checkpoint_stops_a_fit_before_anything_is_loaded(tmp_path):
    trainer = fit(tmp_path)
    for name in ("a.ckpt", "b.ckpt"):
        trainer.save_checkpoint(tmp_path / name)
    data = bytearray((tmp_path / "b.ckpt").read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / "b.ckpt").write_bytes(data)
    with pytest.raises(DamagedCheckpointError, match=r"b\.ckpt is damaged.*beside it is .*a\.ckpt"):
        quiet_trainer(tmp_path, strategy="fastft").fit(PlainModule(tiny_llama()), packed_loader(2), ckpt_path=tmp_path / "b.ckpt")


@pytest.mark.parametrize("use", ["save", "load"])
def test_first_use_of_a_folder_sweeps_it(tmp_path, use):
    VerifiedCheckpointIO().save_checkpoint({"a": 1}, tmp_path / "a.ckpt")
    (tmp_path / ".a.ckpt.0123abcd.part").write_text("left by a dead process")
    io = VerifiedCheckpointIO()
    with part_beside(tmp_path / "b.ckpt") as mine:
        io.save_checkpoint({"a": 1}, tmp_path / "a.ckpt") if use == "save" else io.load_checkpoint(tmp_path / "a.ckpt")
        assert sorted(os.listdir(tmp_path)) == sorted(["a.ckpt", mine.name])


def test_remove_of_what_is_not_there_does_nothing(tmp_path):
    io = VerifiedCheckpointIO()
    io.save_checkpoint({}, tmp_path / "a.ckpt")
    io.remove_checkpoint(tmp_path / "a.ckpt")
    io.remove_checkpoint(tmp_path / "a.ckpt")
    assert os.listdir(tmp_path) == []
