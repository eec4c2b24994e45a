"""ExactResume: added by the strategies, switched off where asked, and settings that differ from those of a checkpoint are said or refused."""

import signal

import pytest
import torch
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import Callback

from lightning_fastft.checkpoint.resume import STATE, ExactResume, describe_differences
from lightning_fastft.errors import ResumeError
from lightning_fastft.module import FineTuner
from lightning_fastft.strategies.single_device import FastFTStrategy
from tests.token_weighting_worker import CONFIG
from tests.training_parts import VOCAB_SIZE, PlainModule, packed_loader, quiet_trainer, tiny_llama


def fit(folder, module=None, *, ckpt_path=None, num_batches=4, **options):
    trainer = quiet_trainer(folder, **{"strategy": "fastft", "max_steps": 1, **options})
    trainer.fit(module or PlainModule(tiny_llama()), packed_loader(num_batches), ckpt_path=ckpt_path)
    return trainer


def tuner(**options):
    options = {"lora": {"r": 4, "lora_dropout": 0.1}, "learning_rate": 1e-3, "dtype": "float32", **options}
    return FineTuner({**CONFIG, "vocab_size": VOCAB_SIZE}, init="random", **options)


def resumers(trainer):
    return [callback for callback in trainer.callbacks if isinstance(callback, ExactResume)]


def status_of(trainer):
    return next(status for status in trainer.strategy.statuses() if status.name == "exact resume")


def test_strategy_adds_it_once_and_says_so(tmp_path):
    trainer = fit(tmp_path)
    trainer.validate(trainer.lightning_module, packed_loader(1), verbose=False)
    assert len(resumers(trainer)) == 1
    assert status_of(trainer).state == "active"
    assert "SIGTERM and SIGUSR1 save at the next optimizer step" in status_of(trainer).reason


def test_the_users_own_one_is_kept(tmp_path):
    own = ExactResume(stop_signals=False)
    trainer = fit(tmp_path, callbacks=[own])
    assert resumers(trainer) == [own]
    assert "stop_signals=False" in status_of(trainer).reason


def test_it_is_switched_off_where_asked(tmp_path):
    trainer = fit(tmp_path, strategy=FastFTStrategy(exact_resume=False))
    assert resumers(trainer) == []
    assert status_of(trainer).state == "inactive"
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    assert STATE not in torch.load(tmp_path / "a.ckpt", weights_only=True)
    with pytest.warns(UserWarning, match="no random states"):
        fit(tmp_path, max_steps=2, ckpt_path=tmp_path / "a.ckpt", num_batches=1)


def test_it_works_under_another_strategy(tmp_path):
    trainer = fit(tmp_path, PlainModule(tiny_llama()), strategy="auto", callbacks=[ExactResume()])
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    assert len(torch.load(tmp_path / "a.ckpt", weights_only=True)[STATE]["random"]) == 1


def test_signal_handlers_are_given_back(tmp_path):
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    fit(tmp_path)
    assert {number: signal.getsignal(number) for number in before} == before


def test_settings_that_differ_are_said_with_both_values(tmp_path):
    seed_everything(7, verbose=False)
    fit(tmp_path, tuner()).save_checkpoint(tmp_path / "a.ckpt")
    seed_everything(7, verbose=False)
    with pytest.warns(UserWarning, match="another setting") as told:
        fit(
            tmp_path, tuner(learning_rate=1e-2, lora={"r": 4, "lora_dropout": 0.2}), max_steps=2, gradient_clip_val=0.5, ckpt_path=tmp_path / "a.ckpt"
        )
    said = sorted(str(warning.message).partition("checkpoint: ")[2] for warning in told if "another setting" in str(warning.message))
    assert said == [
        "gradient_clip_val was None and is 0.5 (this run's counts).",
        "learning_rate was 0.001 and is 0.01 (the checkpoint's goes on).",
        "lora.lora_dropout was 0.1 and is 0.2 (this run's counts).",
        "max_steps was 1 and is 2 (this run's counts).",
    ]


def test_learning_rate_of_the_checkpoint_is_the_one_that_goes_on(tmp_path):
    """What the warning says."""
    seed_everything(7, verbose=False)
    options = {"scheduler": "constant", "warmup_share": 0.0}
    fit(tmp_path, tuner(**options)).save_checkpoint(tmp_path / "a.ckpt")
    seed_everything(7, verbose=False)
    with pytest.warns(UserWarning, match="learning_rate was"):
        trainer = fit(tmp_path, tuner(learning_rate=1e-2, **options), max_steps=2, ckpt_path=tmp_path / "a.ckpt")
    assert {group["lr"] for group in trainer.optimizers[0].param_groups} == {1e-3}


@pytest.mark.parametrize("lora", [{"r": 8}, None])
def test_settings_that_make_tensors_useless_are_refused(tmp_path, lora):
    seed_everything(7, verbose=False)
    fit(tmp_path, tuner()).save_checkpoint(tmp_path / "a.ckpt")
    with pytest.raises(ResumeError, match=r"lora\.r was 4 and is (8|None)"):
        fit(tmp_path, tuner(lora=lora), max_steps=2, ckpt_path=tmp_path / "a.ckpt")


def test_evaluation_resumes_nothing_and_compares_nothing(tmp_path, recwarn):
    seed_everything(7, verbose=False)
    fit(tmp_path, tuner()).save_checkpoint(tmp_path / "a.ckpt")
    seed_everything(7, verbose=False)
    quiet_trainer(tmp_path, strategy="fastft").validate(tuner(learning_rate=1.0), packed_loader(1), ckpt_path=tmp_path / "a.ckpt", verbose=False)
    assert not [warning for warning in recwarn if "another setting" in str(warning.message)]


def test_equal_settings_are_not_said():
    assert describe_differences({"a": (1, 2), "gone": 1}, {"a": [1, 2], "new": 2}) == []


class SaveInWindow(Callback):
    def on_train_batch_end(self, trainer, *_):
        trainer.save_checkpoint(trainer.default_root_dir + "/window.ckpt")


def test_save_inside_a_window_of_data_that_cannot_go_back_is_warned_about_once(tmp_path):
    with pytest.warns(UserWarning, match="inside an accumulation window") as told:
        fit(tmp_path, accumulate_grad_batches=3, num_batches=6, max_steps=2, callbacks=[SaveInWindow()])
    assert sum("inside an accumulation window" in str(warning.message) for warning in told) == 1


def test_save_at_a_step_is_not_warned_about(tmp_path, recwarn):
    fit(tmp_path, num_batches=2, max_steps=2, callbacks=[SaveInWindow()])
    assert not [warning for warning in recwarn if "window" in str(warning.message)]
