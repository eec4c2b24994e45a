"""ckpt_path="last" takes the newest intact checkpoint of the run's folders, also one of a stopped run, and says
what it passed over.
"""

import os

import pytest
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO

from lightning_fastft.checkpoint.stops import RunStopped
from lightning_fastft.core.errors import DamagedCheckpointError
from tests.support.training_parts import PlainModule, packed_loader, quiet_trainer, tiny_llama
from tests.support.two_ranks import run_two_ranks

# The resumed runs are longer, and folders are not empty.
pytestmark = pytest.mark.filterwarnings("ignore:Resumed with another setting", "ignore::UserWarning:lightning.*")


def callback(folder, **options):
    options = {"save_last": True, "save_top_k": -1, "every_n_train_steps": 1, "filename": "{step}", **options}
    return ModelCheckpoint(folder / "runs", **options)


class Interrupt(Callback):
    """What a scheduler does at a step."""

    def on_train_batch_start(self, trainer, *_):
        if trainer.global_step == 2:
            os.kill(os.getpid(), 15)


def fit(folder, *, max_steps, ckpt_path=None, callbacks=None, **options):
    callbacks = [callback(folder)] if callbacks is None else callbacks
    options = {
        "strategy": "fastft",
        "enable_checkpointing": any(isinstance(entry, ModelCheckpoint) for entry in callbacks),
        **options,
    }
    trainer = quiet_trainer(folder, max_steps=max_steps, callbacks=callbacks, **options)
    trainer.fit(PlainModule(tiny_llama()), packed_loader(6), ckpt_path=ckpt_path)
    return trainer


def age(path, seconds):
    now = path.stat().st_mtime
    os.utime(path, (now - seconds, now - seconds))


def cut(path):
    path.write_bytes(path.read_bytes()[:-1000])


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def empty(path):
    path.write_bytes(b"")


@pytest.fixture
def saved(tmp_path):
    """last.ckpt of step 3, step=3.ckpt and older ones."""
    fit(tmp_path, max_steps=3)
    for number, name in enumerate(("last", "step=3", "step=2", "step=1")):
        age(tmp_path / "runs" / f"{name}.ckpt", 10 * number)
    return tmp_path


def resumed_from(trainer):
    return os.path.basename(trainer.ckpt_path)


def test_newest_is_taken_as_ever(saved, recwarn):
    assert resumed_from(fit(saved, max_steps=4, ckpt_path="last")) == "last.ckpt"
    assert not [entry for entry in recwarn if "damaged" in str(entry.message)]


@pytest.mark.parametrize("damage", [cut, flip, empty])
@pytest.mark.parametrize("num_damaged", [1, 2])
def test_damaged_newest_is_passed_over_and_said(saved, damage, num_damaged):
    for name in ("last", "step=3")[:num_damaged]:
        time = (saved / "runs" / f"{name}.ckpt").stat().st_mtime
        damage(saved / "runs" / f"{name}.ckpt")
        os.utime(saved / "runs" / f"{name}.ckpt", (time, time))
    with pytest.warns(UserWarning, match=r"last\.ckpt is damaged .* is used"):
        trainer = fit(saved, max_steps=4, ckpt_path="last")
    assert resumed_from(trainer) == ("step=3.ckpt", "step=2.ckpt")[num_damaged - 1]
    assert trainer.global_step == 4


def test_weights_alone_are_no_place_to_go_on_from(saved):
    trainer = fit(saved, max_steps=3, ckpt_path=str(saved / "runs" / "step=2.ckpt"), callbacks=[])
    trainer.save_checkpoint(saved / "runs" / "weights.ckpt", weights_only=True)
    flip(saved / "runs" / "last.ckpt")
    with pytest.warns(UserWarning, match=r"last\.ckpt is damaged"):
        assert resumed_from(fit(saved, max_steps=4, ckpt_path="last")) == "step=3.ckpt"


def test_where_none_is_intact_the_run_is_refused(saved):
    for place in (saved / "runs").iterdir():
        flip(place)
    with pytest.raises(DamagedCheckpointError, match="no intact checkpoint"):
        fit(saved, max_steps=4, ckpt_path="last")


def test_damaged_file_that_is_named_is_refused(saved):
    flip(saved / "runs" / "last.ckpt")
    with pytest.raises(DamagedCheckpointError, match="newest intact"):
        fit(saved, max_steps=4, ckpt_path=str(saved / "runs" / "last.ckpt"))


@pytest.mark.parametrize("has_model_checkpoint", [True, False])
def test_stopped_run_goes_on(tmp_path, has_model_checkpoint):
    callbacks = [callback(tmp_path, save_last=None)] if has_model_checkpoint else []
    with pytest.raises(RunStopped):
        fit(tmp_path, max_steps=5, callbacks=[*callbacks, Interrupt()])
    trainer = fit(tmp_path, max_steps=5, ckpt_path="last", callbacks=callbacks)
    assert resumed_from(trainer) == "stopped-step=3.ckpt"


def test_newer_last_goes_before_an_older_stop(tmp_path):
    with pytest.raises(RunStopped):
        fit(tmp_path, max_steps=5, callbacks=[callback(tmp_path), Interrupt()])
    age(tmp_path / "runs" / "stopped-step=3.ckpt", 100)
    assert resumed_from(fit(tmp_path, max_steps=5, ckpt_path="last")) == "last.ckpt"


def test_checkpoints_of_another_run_in_the_folder_of_the_trainer_are_not_taken(tmp_path):
    fit(tmp_path, max_steps=1, callbacks=[]).save_checkpoint(tmp_path / "stopped-step=1.ckpt")
    assert fit(tmp_path, max_steps=2, ckpt_path="last").ckpt_path is None


def test_without_any_the_run_begins(tmp_path):
    trainer = fit(tmp_path, max_steps=1, ckpt_path="last")
    assert trainer.ckpt_path is None
    assert trainer.global_step == 1


def test_files_of_another_program_are_taken_without_a_digest(tmp_path):
    fit(tmp_path, max_steps=2, plugins=[TorchCheckpointIO()])
    with pytest.warns(UserWarning, match="has no digest"):
        assert resumed_from(fit(tmp_path, max_steps=3, ckpt_path="last")) == "last.ckpt"


def test_evaluation_takes_it_too(saved):
    flip(saved / "runs" / "last.ckpt")
    trainer = quiet_trainer(saved, strategy="fastft", enable_checkpointing=True, callbacks=[callback(saved)])
    with pytest.warns(UserWarning, match="is used"):
        trainer.validate(PlainModule(tiny_llama()), packed_loader(1), ckpt_path="last", verbose=False)


@pytest.mark.slow
def test_ranks_take_the_choice_of_rank_zero(tmp_path):
    run_two_ranks("tests.checkpoint.last_worker", tmp_path)
    assert (tmp_path / "taken").read_text() == "step=3.ckpt"
    ends = [(tmp_path / f"rank{rank}").read_text() for rank in (0, 1)]
    assert ends[0] == ends[1]
    assert ends[0].startswith("4 ")
