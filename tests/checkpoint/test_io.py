"""VerifiedCheckpointIO: installed by the strategies, plain types only, local places only, and the user's own one
is kept.
"""

import os
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO

from lightning_fastft.checkpoint.atomic import part_beside
from lightning_fastft.checkpoint.files import check_file, commit_folder
from lightning_fastft.checkpoint.io import VerifiedCheckpointIO
from lightning_fastft.core.checks import local_path
from lightning_fastft.core.errors import (
    CheckpointNotSavedError,
    DamagedCheckpointError,
    OptionError,
    UnsafeCheckpointError,
)
from lightning_fastft.strategies.single_device import FastFTStrategy
from tests.checkpoint.test_files import Runs
from tests.support.training_parts import PlainModule, packed_loader, quiet_trainer, tiny_llama

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
def test_urls_are_refused_where_a_local_path_is_needed(path):
    with pytest.raises(UnsafeCheckpointError, match="local or mounted folders only"):
        local_path(path, use="saved to")


def test_path_that_has_lost_a_slash_of_a_url_is_refused():
    io, path = VerifiedCheckpointIO(), Path("s3://bucket/a.ckpt")
    for use in (lambda: io.load_checkpoint(path), lambda: io.save_checkpoint({}, path)):
        with pytest.raises(UnsafeCheckpointError, match="Path loses a slash"):
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


def test_error_names_the_class_that_is_not_loaded(tmp_path):
    torch.save({"x": fit}, tmp_path / "a.ckpt")
    with pytest.raises(UnsafeCheckpointError, match=r"not loaded: .*tests\.checkpoint\.test_io\.fit") as told:
        VerifiedCheckpointIO().load_checkpoint(tmp_path / "a.ckpt")
    assert str(told.value).isprintable()
    assert "weights_only" not in str(told.value)


@pytest.mark.parametrize("switch", ["argument", "environment"])
def test_switches_that_would_let_code_run_have_no_effect_and_are_said(tmp_path, switch, monkeypatch):
    torch.save({"x": Runs(tmp_path / "ran")}, tmp_path / "a.ckpt")
    if switch == "environment":
        monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    with (
        pytest.warns(UserWarning, match="ignored"),
        pytest.raises(UnsafeCheckpointError, match="more than tensors and plain types"),
    ):
        VerifiedCheckpointIO().load_checkpoint(
            tmp_path / "a.ckpt", weights_only=False if switch == "argument" else None
        )
    assert not (tmp_path / "ran").exists()


def test_file_without_digest_is_loaded_and_said(tmp_path):
    TorchCheckpointIO().save_checkpoint({"a": 1}, tmp_path / "a.ckpt")
    with pytest.warns(UserWarning, match="has no digest"):
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
    with pytest.raises(
        DamagedCheckpointError, match=r"b\.ckpt is damaged.*newest intact checkpoint of its folder is .*a\.ckpt"
    ):
        quiet_trainer(tmp_path, strategy="fastft").fit(
            PlainModule(tiny_llama()), packed_loader(2), ckpt_path=tmp_path / "b.ckpt"
        )


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


def hostile_resume(folder, *, victims):
    """Fit, resume from a checkpoint whose ModelCheckpoint state names paths of somebody else, and let
    ModelCheckpoint remove its worst ones.
    """
    runs = folder / "runs"
    options = {
        "enable_checkpointing": True,
        "callbacks": [ModelCheckpoint(runs, monitor="train_loss", save_top_k=1, every_n_train_steps=1)],
    }
    trainer = fit(folder, **options)
    trainer.save_checkpoint(folder / "hostile.ckpt")
    content = torch.load(folder / "hostile.ckpt", weights_only=True)
    (_key, state), *_ = [(key, state) for key, state in content["callbacks"].items() if "ModelCheckpoint" in key]
    paths = [os.path.join(state["dirpath"], victim) for victim in victims]
    state.update(
        best_k_models={paths[0]: torch.tensor(1e9)},
        kth_best_model_path=paths[0],
        kth_value=torch.tensor(1e9),
        last_model_path=paths[-1],
    )
    torch.save(content, folder / "hostile.ckpt")
    callback = ModelCheckpoint(
        runs, monitor="train_loss", save_top_k=1, every_n_train_steps=1, save_last=True, enable_version_counter=False
    )
    again = quiet_trainer(folder, strategy="fastft", max_steps=3, enable_checkpointing=True, callbacks=[callback])
    again.fit(PlainModule(tiny_llama()), packed_loader(4), ckpt_path=folder / "hostile.ckpt")
    return callback


@pytest.mark.filterwarnings("ignore::UserWarning:lightning.*")
@pytest.mark.parametrize(
    "victim", ["../victim", "../victim/letter.txt", "notes", "letter.txt", "link/letter.txt", "foreign.ckpt"]
)
def test_paths_in_a_checkpoint_remove_nothing_but_checkpoints_of_the_run(tmp_path, victim):
    for folder in (tmp_path / "victim", tmp_path / "runs" / "notes"):
        folder.mkdir(parents=True)
        (folder / "letter.txt").write_text("dear")
    (tmp_path / "runs" / "letter.txt").write_text("dear")
    (tmp_path / "runs" / "link").symlink_to(tmp_path / "victim")
    torch.save({"by": "another program"}, tmp_path / "runs" / "foreign.ckpt")
    before = set(tmp_path.rglob("*"))
    with pytest.warns(UserWarning, match="is not removed"):
        hostile_resume(tmp_path, victims=[victim])
    assert before <= set(tmp_path.rglob("*"))


@pytest.mark.filterwarnings("ignore:Resumed with another setting", "ignore::UserWarning:lightning.*")
def test_checkpoint_below_a_folder_of_the_run_is_removed_after_a_resume(tmp_path):
    """A file name with a folder in it: the folder of the next save is another one."""

    def callback():
        return ModelCheckpoint(tmp_path / "runs", filename="{epoch}/a", every_n_epochs=1, enable_version_counter=False)

    options = {"strategy": "fastft", "enable_checkpointing": True, "max_steps": -1}
    quiet_trainer(tmp_path, max_epochs=1, callbacks=[callback()], **options).fit(
        PlainModule(tiny_llama()), packed_loader(2)
    )
    first = tmp_path / "runs" / "epoch=0" / "a.ckpt"
    (tmp_path / "start.ckpt").write_bytes(first.read_bytes())
    trainer = quiet_trainer(tmp_path, max_epochs=2, callbacks=[callback()], **options)
    trainer.fit(PlainModule(tiny_llama()), packed_loader(2), ckpt_path=tmp_path / "start.ckpt")
    assert [str(place.relative_to(tmp_path)) for place in tmp_path.rglob("a.ckpt")] == ["runs/epoch=1/a.ckpt"]


@pytest.mark.parametrize("kind", ["committed", "extra file"])
def test_folder_is_removed_if_it_holds_a_checkpoint_and_nothing_else(tmp_path, kind):
    io = VerifiedCheckpointIO()
    io.save_checkpoint({}, tmp_path / "a.ckpt")
    (tmp_path / "b.ckpt").mkdir()
    (tmp_path / "b.ckpt" / "piece").write_text("x")
    commit_folder(tmp_path / "b.ckpt")
    if kind == "extra file":
        (tmp_path / "b.ckpt" / "notes.txt").write_text("x")
        with pytest.warns(UserWarning, match="is not removed"):
            io.remove_checkpoint(tmp_path / "b.ckpt")
    else:
        io.remove_checkpoint(tmp_path / "b.ckpt")
    assert (tmp_path / "b.ckpt").exists() == (kind == "extra file")


@pytest.mark.parametrize("way", ["file in the way", "read-only"])
def test_folder_that_cannot_be_written_to_is_refused_before_the_first_step(tmp_path, way, monkeypatch):
    (tmp_path / "file").write_text("x")
    if way == "read-only":
        # The tests may run as root, who may write anywhere.
        monkeypatch.setattr(os, "access", lambda *_: False)
    folder = tmp_path / ("file/runs" if way == "file in the way" else "runs")
    module = PlainModule(tiny_llama())
    trainer = quiet_trainer(tmp_path, strategy="fastft", enable_checkpointing=True, callbacks=[ModelCheckpoint(folder)])
    with pytest.raises(CheckpointNotSavedError, match="dirpath"):
        trainer.fit(module, packed_loader(2))
    assert trainer.global_step == 0


def test_strategy_without_a_module_reads_a_checkpoint(tmp_path):
    fit(tmp_path).save_checkpoint(tmp_path / "a.ckpt")
    assert quiet_trainer(tmp_path, strategy="fastft").strategy.load_checkpoint(tmp_path / "a.ckpt")["global_step"] == 1


def test_what_another_process_wrote_is_removed_once_it_was_loaded(tmp_path):
    """As launchers that start processes hand the weights over."""
    VerifiedCheckpointIO().save_checkpoint({}, tmp_path / ".temp.ckpt")
    io = VerifiedCheckpointIO()
    io.load_checkpoint(tmp_path / ".temp.ckpt")
    io.remove_checkpoint(tmp_path / ".temp.ckpt")
    assert not list(tmp_path.iterdir())
