"""ExactResume: added by the strategies, switched off where asked, and settings that differ from those of a
checkpoint are said or refused.
"""

import os
import re
import signal
import threading
import time
import warnings
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_fastft.callbacks.packed_training import PackedTraining
from lightning_fastft.checkpoint.files import check_file
from lightning_fastft.checkpoint.folders import METADATA
from lightning_fastft.checkpoint.resume import ExactResume
from lightning_fastft.checkpoint.settings import STATE, describe_differences
from lightning_fastft.core.errors import ResumeError
from lightning_fastft.monitor.progress_bar import FastFTProgressBar
from lightning_fastft.strategies.single_device import FastFTStrategy
from lightning_fastft.training.fine_tuner import FineTuner
from tests.faults.saves import fork
from tests.support.token_weighting_worker import CONFIG
from tests.support.training_parts import (
    VOCAB_SIZE,
    PlainModule,
    SaveAtStep,
    packed_loader,
    quiet_data,
    quiet_trainer,
    tiny_llama,
)


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
    assert "SIGTERM and SIGUSR1 save and end the run" in status_of(trainer).reason


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


def test_a_run_that_names_its_clipping_resumes(tmp_path):
    path = tmp_path / "a.ckpt"
    options = {"max_steps": 2, "gradient_clip_val": 1.0, "gradient_clip_algorithm": "norm"}
    fit(tmp_path, callbacks=[SaveAtStep(1, path)], **options)
    assert fit(tmp_path, ckpt_path=path, **options).global_step == 2


def test_it_works_under_another_strategy(tmp_path):
    trainer = fit(tmp_path, PlainModule(tiny_llama()), strategy="auto", callbacks=[PackedTraining(), ExactResume()])
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    assert len(torch.load(tmp_path / "a.ckpt", weights_only=True)[STATE]["random"]) == 1


def test_signal_handlers_are_given_back(tmp_path):
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)}
    fit(tmp_path)
    assert {number: signal.getsignal(number) for number in before} == before


@pytest.mark.parametrize("limit_train_batches", [0, 2])
def test_no_thread_is_left_by_a_fit_that_trains_or_by_one_that_does_not(tmp_path, limit_train_batches):
    before = set(threading.enumerate())
    trainer = quiet_trainer(
        tmp_path,
        strategy=FastFTStrategy(),
        limit_train_batches=limit_train_batches,
        num_sanity_val_steps=1,
        max_epochs=1,
    )
    trainer.fit(PlainModule(tiny_llama()), packed_loader(2), packed_loader(1, seed=9))
    assert not [thread for thread in set(threading.enumerate()) - before if thread.name == "fastft-stop"]


@pytest.mark.parametrize("length", [{"max_epochs": 3, "max_steps": -1}, {"max_epochs": -1, "max_steps": 9}], ids=str)
def test_a_run_that_resumes_twice_trains_no_epoch_again(tmp_path, length):
    class SaveAfter(Callback):
        def __init__(self, num_batches, path):
            self.num_batches, self.path, self.num_seen = num_batches, path, 0

        def on_train_batch_end(self, trainer, *_):
            self.num_seen += 1
            if self.num_seen == self.num_batches:
                trainer.save_checkpoint(self.path)

    def run(num_batches=0, **options):
        module = tuner(lora=None)
        rows = [{"input_ids": [number, 2, 3, 4, 5, 6]} for number in range(7, 10)]
        data = quiet_data(rows, max_tokens=6)
        callbacks = [SaveAfter(num_batches, tmp_path / f"{num_batches}.ckpt")]
        trainer = quiet_trainer(tmp_path, strategy="fastft", callbacks=callbacks, **length)
        seed_everything(3, verbose=False)
        trainer.fit(module, data, **options)
        return trainer.global_step, torch.cat([each.detach().flatten() for each in module.parameters()])

    num_steps, whole = run()
    # The end of the first epoch, and the first step of the second one.
    run(3)
    run(1, ckpt_path=tmp_path / "3.ckpt")
    num_resumed, resumed = run(ckpt_path=tmp_path / "1.ckpt")
    assert num_resumed == num_steps == 9
    assert torch.equal(resumed, whole)


def test_settings_that_differ_are_said_with_both_values(tmp_path):
    seed_everything(7, verbose=False)
    fit(tmp_path, tuner()).save_checkpoint(tmp_path / "a.ckpt")
    seed_everything(7, verbose=False)
    with pytest.warns(UserWarning, match="another setting") as told:
        fit(
            tmp_path,
            tuner(learning_rate=1e-2, lora={"r": 4, "lora_dropout": 0.2}),
            max_steps=2,
            gradient_clip_val=0.5,
            ckpt_path=tmp_path / "a.ckpt",
        )
    said = sorted(
        str(warning.message).partition("checkpoint: ")[2]
        for warning in told
        if "another setting" in str(warning.message)
    )
    assert said == [
        "gradient_clip_val was None and is 0.5 (this run's is used).",
        "learning_rate was 0.001 and is 0.01 (the checkpoint's is used).",
        "lora.lora_dropout was 0.1 and is 0.2 (this run's is used).",
        "max_steps was 1 and is 2 (this run's is used).",
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


@pytest.mark.parametrize("strategy", ["fastft", "fastft_fsdp"])
def test_a_resumed_run_records_the_options_that_it_took_from_the_checkpoint(strategy, tmp_path):
    """Its next checkpoint and its loggers; a later fit of the same tuner has its own options again."""
    seed_everything(7, verbose=False)
    fit(tmp_path, tuner()).save_checkpoint(tmp_path / "a.ckpt")
    resumed, logger = tuner(learning_rate=1e-2, weight_decay=0.1), CSVLogger(tmp_path, version="resumed")
    seed_everything(7, verbose=False)
    with pytest.warns(UserWarning, match="learning_rate was"):
        fit(
            tmp_path, resumed, strategy=strategy, max_steps=2, ckpt_path=tmp_path / "a.ckpt", logger=logger
        ).save_checkpoint(tmp_path / "b.ckpt")
    saved = tmp_path / "b.ckpt"
    recorded = torch.load(saved / METADATA if saved.is_dir() else saved, weights_only=True)
    assert recorded["hyper_parameters"]["learning_rate"] == recorded[STATE]["settings"]["learning_rate"] == 1e-3
    assert recorded["hyper_parameters"]["weight_decay"] is None
    assert "learning_rate: 0.001\n" in (Path(logger.log_dir) / "hparams.yaml").read_text()
    logger = CSVLogger(tmp_path, version="again")
    again = fit(tmp_path, resumed, strategy=strategy, logger=logger)
    assert again.optimizers[0].param_groups[0]["initial_lr"] == resumed.hparams["learning_rate"] == 1e-2
    assert "learning_rate: 0.01\n" in (Path(logger.log_dir) / "hparams.yaml").read_text()
    assert again.enable_autolog_hparams


@pytest.mark.parametrize("lora", [{"r": 8}, None])
def test_settings_that_make_tensors_useless_are_refused(tmp_path, lora):
    seed_everything(7, verbose=False)
    fit(tmp_path, tuner()).save_checkpoint(tmp_path / "a.ckpt")
    with pytest.raises(ResumeError, match=r"lora\.r was 4 and is (8|None)"):
        fit(tmp_path, tuner(lora=lora), max_steps=2, ckpt_path=tmp_path / "a.ckpt")


@pytest.mark.parametrize(("ratio", "is_refused"), [(16.0, False), (None, True)])
def test_rates_of_lora_plus_are_those_of_the_checkpoint(tmp_path, ratio, is_refused):
    fit(tmp_path, tuner(loraplus_lr_ratio=4.0)).save_checkpoint(tmp_path / "a.ckpt")
    if is_refused:
        with pytest.raises(ResumeError, match=r"loraplus_lr_ratio was 4\.0 and is None"):
            fit(tmp_path, tuner(loraplus_lr_ratio=ratio), max_steps=2, ckpt_path=tmp_path / "a.ckpt")
        return
    with pytest.warns(UserWarning, match=r"loraplus_lr_ratio was 4\.0 and is 16\.0 \(the checkpoint's is used\)"):
        trainer = fit(tmp_path, tuner(loraplus_lr_ratio=ratio), max_steps=2, ckpt_path=tmp_path / "a.ckpt")
    slow, fast = (group["initial_lr"] for group in trainer.optimizers[0].param_groups)
    assert fast == 4 * slow


def test_evaluation_resumes_nothing_and_compares_nothing(tmp_path, recwarn):
    seed_everything(7, verbose=False)
    fit(tmp_path, tuner()).save_checkpoint(tmp_path / "a.ckpt")
    seed_everything(7, verbose=False)
    quiet_trainer(tmp_path, strategy="fastft").validate(
        tuner(learning_rate=1.0), packed_loader(1), ckpt_path=tmp_path / "a.ckpt", verbose=False
    )
    assert not [warning for warning in recwarn if "another setting" in str(warning.message)]


def test_equal_settings_are_not_said():
    assert describe_differences({"a": (1, 2), "gone": 1}, {"a": [1, 2], "new": 2}) == []


def test_fields_of_a_mapping_that_one_side_does_not_give_are_said():
    # Of lora, whose fields are those that were given.
    before, now = {"lora.r": 4, "lora.use_dora": True, "x.y": 1}, {"lora.r": 4, "lora.use_rslora": True, "z.y": 1}
    first, second = describe_differences(before, now)
    assert "lora.use_dora was True and is not given" in first
    assert "lora.use_rslora was not given and is True" in second


def momentum(parameters):
    return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)


@pytest.mark.parametrize(
    ("before", "now"),
    [(momentum, torch.optim.AdamW), (torch.optim.AdamW, momentum), (momentum, None), (None, torch.optim.RMSprop)],
)
def test_state_of_another_optimizer_is_refused(before, now, tmp_path):
    fit(tmp_path, tuner(optimizer=before), callbacks=[SaveAtStep(1, tmp_path / "a.ckpt")], max_steps=2)
    with pytest.raises(ResumeError, match="optimizer"):
        fit(tmp_path, tuner(optimizer=now), ckpt_path=tmp_path / "a.ckpt", max_steps=2)


def adamw(**options):
    return partial(torch.optim.AdamW, lr=1e-3, **options)


@pytest.mark.parametrize(
    ("before", "now", "lines"),
    [
        (momentum, torch.optim.SGD, ["SGD .*: momentum was 0.9 and is 0"]),
        (torch.optim.SGD, momentum, ["SGD .*: momentum was 0.* and is 0.9"]),
        (adamw(), adamw(betas=(0.8, 0.9), amsgrad=True), ["amsgrad was False and is True", r"betas was .*0\.999"]),
        (adamw(weight_decay=0.1), adamw(weight_decay=0.2), ["weight_decay was 0.1 and is 0.2"]),
        (adamw(), adamw(foreach=False), []),
        (None, None, []),
    ],
)
def test_other_options_of_an_optimizer_are_said_and_those_of_the_checkpoint_hold(tmp_path, before, now, lines):
    first = fit(tmp_path, tuner(optimizer=before), callbacks=[SaveAtStep(1, tmp_path / "a.ckpt")], max_steps=2)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        second = fit(tmp_path, tuner(optimizer=now), ckpt_path=tmp_path / "a.ckpt", max_steps=2)
    said = sorted(str(warning.message) for warning in found if "another option" in str(warning.message))
    assert len(said) == len(lines)
    for line, text in zip(lines, said):
        assert re.search(line, text)
        assert text.endswith("(the checkpoint's is used).")
    (before_group,), (now_group,) = ([*run.optimizers[0].param_groups] for run in (first, second))
    for name in ("momentum", "betas", "amsgrad", "weight_decay"):
        assert before_group.get(name) == now_group.get(name)


@pytest.mark.parametrize(
    ("before", "now"),
    [
        ({"weight_decay": 0.1}, {"weight_decay": 0.2}),
        ({"optimizer": adamw(weight_decay=0.1)}, {"optimizer": adamw(weight_decay=0.2)}),
        # None is the optimizer's own.
        ({}, {"weight_decay": 0.2}),
        ({"weight_decay": 0.1}, {}),
    ],
)
def test_another_weight_decay_is_reported_once(before, now, tmp_path):
    fit(tmp_path, tuner(**before), callbacks=[SaveAtStep(1, tmp_path / "a.ckpt")], max_steps=2)
    said = r"weight_decay was (0\.1|None) and is (0\.2|None) \(the checkpoint's is used\)"
    with pytest.warns(UserWarning, match=said) as found:
        fit(tmp_path, tuner(**now), ckpt_path=tmp_path / "a.ckpt", max_steps=2)
    assert sum("weight_decay" in str(warning.message) for warning in found) == 1


def one_cycle(optimizer):
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-3, total_steps=9)


def test_a_schedule_of_momentum_is_no_other_option(tmp_path):
    run = partial(tuner, optimizer=adamw(), scheduler=one_cycle)
    fit(tmp_path, run(), callbacks=[SaveAtStep(1, tmp_path / "a.ckpt")], max_steps=2)
    fit(tmp_path, run(), ckpt_path=tmp_path / "a.ckpt", max_steps=2)


@pytest.mark.parametrize(("before", "now"), [(None, adamw(weight_decay=0.0)), (adamw(weight_decay=0.0), None)])
def test_state_of_the_same_rule_is_resumed(before, now, tmp_path):
    fit(tmp_path, tuner(optimizer=before), callbacks=[SaveAtStep(1, tmp_path / "a.ckpt")], max_steps=2)
    trainer = fit(tmp_path, tuner(optimizer=now), ckpt_path=tmp_path / "a.ckpt", max_steps=2)
    assert {float(state["step"]) for state in trainer.optimizers[0].state.values()} == {2.0}


def steps_down(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 2)


def annealed(optimizer):
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 2)


def in_sequence(optimizer):
    return torch.optim.lr_scheduler.SequentialLR(optimizer, [steps_down(optimizer), annealed(optimizer)], [1])


@pytest.mark.parametrize(
    ("before", "now"),
    [
        (steps_down, "cosine"),
        ("cosine", steps_down),
        (steps_down, annealed),
        ("linear", in_sequence),
        (in_sequence, annealed),
    ],
)
def test_state_of_a_scheduler_of_another_class_is_refused(before, now, tmp_path):
    fit(tmp_path, tuner(scheduler=before), callbacks=[SaveAtStep(1, tmp_path / "a.ckpt")], max_steps=2)
    with pytest.raises(ResumeError, match="scheduler"):
        fit(tmp_path, tuner(scheduler=now), ckpt_path=tmp_path / "a.ckpt", max_steps=2)


@pytest.mark.parametrize("kind", [steps_down, in_sequence, torch.optim.lr_scheduler.ConstantLR])
def test_state_of_a_scheduler_of_the_same_class_is_resumed(kind, tmp_path):
    fit(tmp_path, tuner(scheduler=kind), callbacks=[SaveAtStep(1, tmp_path / "a.ckpt")], max_steps=2)
    trainer = fit(tmp_path, tuner(scheduler=kind), ckpt_path=tmp_path / "a.ckpt", max_steps=2)
    assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == 2


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


@pytest.fixture
def own_interrupts():
    """Python's own handler of interrupts, which a shell's background has ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupts(*after_s):
    """Ctrl-C in the first micro-batch, once for each of the pauses before it."""

    class Interrupts(Callback):
        def on_train_batch_start(self, *_):
            for pause_s in after_s:
                time.sleep(pause_s)
                os.kill(os.getpid(), signal.SIGINT)

    return Interrupts()


@pytest.mark.usefixtures("own_interrupts")
def test_first_interrupt_saves_at_the_next_step_and_says_what_a_second_does(tmp_path, capfd, caplog):
    caplog.set_level("INFO")
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(SystemExit) as ended:
        fit(tmp_path, accumulate_grad_batches=2, max_steps=2, callbacks=[interrupts(0.0)])
    assert ended.value.code == 130
    assert check_file(tmp_path / "stopped-step=1.ckpt")
    assert capfd.readouterr().err.count("A second Ctrl-C") == 1
    assert f"ckpt_path={tmp_path / 'stopped-step=1.ckpt'}" in caplog.text
    assert signal.getsignal(signal.SIGINT) == before


@pytest.mark.usefixtures("own_interrupts")
@pytest.mark.parametrize(("bars", "beginning"), [([], "SIGINT: "), ([FastFTProgressBar()], "\nSIGINT: ")])
def test_the_message_of_a_stopped_run_does_not_end_the_line_of_a_bar(tmp_path, caplog, bars, beginning):
    caplog.set_level("INFO")
    options = {"accelerator": "cpu", "devices": 1, "logger": False, "enable_model_summary": False, "max_steps": 2}
    trainer = Trainer(
        default_root_dir=tmp_path,
        strategy="fastft",
        callbacks=[interrupts(0.0), *bars],
        enable_progress_bar=bool(bars),
        **options,
    )
    with pytest.raises(SystemExit):
        trainer.fit(PlainModule(tiny_llama()), packed_loader(4))
    (message,) = (line for line in caplog.messages if "the run was saved" in line)
    assert message.startswith(beginning)


@pytest.mark.usefixtures("own_interrupts")
def test_second_interrupt_ends_at_once_and_saves_nothing(tmp_path):
    with pytest.raises(SystemExit) as ended:
        fit(tmp_path, callbacks=[interrupts(0.0, 0.6)])
    # Lightning's own end of an interrupted run.
    assert ended.value.code == 1
    assert not list(tmp_path.glob("*.ckpt"))


@pytest.mark.usefixtures("own_interrupts")
@pytest.mark.parametrize(
    "options", [{"strategy": FastFTStrategy(exact_resume=False)}, {"callbacks": [ExactResume(stop_signals=False)]}]
)
def test_interrupt_is_left_alone_where_signals_are(tmp_path, options):
    with pytest.raises(SystemExit) as ended:
        fit(tmp_path, **{**options, "callbacks": [*options.get("callbacks", ()), interrupts(0.0)]})
    assert ended.value.code == 1
    assert not list(tmp_path.glob("*.ckpt"))


@pytest.mark.filterwarnings("ignore:The adapters were trained on")
@pytest.mark.parametrize("kind", ["own module", "FineTuner", "adapters"])
def test_wider_model_is_refused_with_the_difference(tmp_path, kind):
    def make(width):
        if kind == "own module":
            return PlainModule(
                tiny_llama()
                if width == 32
                else LlamaForCausalLM(LlamaConfig(**{**tiny_llama().config.to_dict(), "hidden_size": width}))
            )
        config = {**CONFIG, "vocab_size": VOCAB_SIZE, "intermediate_size": 2 * width}
        return FineTuner(
            config,
            init="random",
            lora={"r": 4} if kind == "adapters" else None,
            dtype="float32",
            accept_other_base=True,
        )

    fit(tmp_path, make(32)).save_checkpoint(tmp_path / "a.ckpt")
    with pytest.raises(ResumeError, match=r"another model.*another shape"):
        fit(tmp_path, make(64), ckpt_path=tmp_path / "a.ckpt")


class SignalInValidation(Callback):
    """A real signal in a validation batch, and how many of them were begun and how many trainings ended."""

    def __init__(self, where="on_validation_batch_start", *, at=1):
        self.num_begun = 0
        self.where, self.at = where, at

    def on_validation_batch_start(self, trainer, *_):
        self.num_begun += 1
        if self.where == "on_validation_batch_start" and self.num_begun == self.at:
            os.kill(os.getpid(), signal.SIGTERM)

    def on_train_end(self, trainer, pl_module):
        if self.where == "on_train_end":
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize(("max_steps", "step"), [(4, 2), (2, 2)], ids=["a validation", "the last validation"])
def test_signal_in_a_validation_ends_it_between_two_batches(tmp_path, max_steps, step):
    stop = SignalInValidation(at=2)
    trainer = quiet_trainer(
        tmp_path, strategy="fastft", max_steps=max_steps, val_check_interval=2, num_sanity_val_steps=0, callbacks=[stop]
    )
    with pytest.raises(SystemExit) as ended:
        trainer.fit(PlainModule(tiny_llama()), packed_loader(4), packed_loader(9))
    assert ended.value.code == 143
    assert stop.num_begun == 2
    assert check_file(tmp_path / f"stopped-step={step}.ckpt")


def test_run_that_was_told_after_its_end_has_done_what_it_was_asked(tmp_path):
    trainer = fit(tmp_path, callbacks=[SignalInValidation("on_train_end")])
    assert trainer.state.finished
    assert not list(tmp_path.glob("stopped-*"))


class SignalBeforeTheHandlers(Callback):
    """Lightning's own handler notes it, which would end the run inside a window and with exit code 0."""

    def on_train_start(self, trainer, pl_module):
        assert isinstance(trainer.callbacks[-1], ExactResume)
        os.kill(os.getpid(), signal.SIGTERM)


def exit_code_of(folder, *callbacks, **options):
    """Return how a child process ends that fits with these callbacks."""
    child, read = fork(lambda write: fit(folder, callbacks=[*callbacks], **options))
    os.close(read)
    waiting = psutil.Process(child)
    try:
        return waiting.wait(timeout=120)
    finally:
        if waiting.is_running():
            waiting.kill()


@pytest.mark.parametrize("accumulate_grad_batches", [1, 2])
def test_signal_before_the_handlers_are_there_stops_at_the_first_step(tmp_path, accumulate_grad_batches):
    options = {"num_sanity_val_steps": 0, "max_steps": 3, "accumulate_grad_batches": accumulate_grad_batches}
    assert exit_code_of(tmp_path, SignalBeforeTheHandlers(), **options) == 143
    assert check_file(tmp_path / "stopped-step=1.ckpt")


class HangsAfterASignal(Callback):
    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        os.kill(os.getpid(), signal.SIGTERM)
        while True:
            time.sleep(60)


def test_a_run_that_hangs_after_a_signal_ends_with_its_code(tmp_path):
    assert exit_code_of(tmp_path, ExactResume(stop_timeout_s=1), HangsAfterASignal()) == 143


class StepsEveryThird(PlainModule):
    """Sums the gradients of three micro-batches before it steps."""

    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        self.manual_backward(self.model(**batch).loss / 3)
        if batch_idx == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        if batch_idx % 3 == 2:
            optimizer = self.optimizers()
            optimizer.step()
            optimizer.zero_grad()


def test_signal_inside_a_window_of_manual_optimization_waits_for_its_step(tmp_path):
    trainer = quiet_trainer(tmp_path, strategy="fastft", max_steps=5)
    module = StepsEveryThird(tiny_llama())
    with pytest.raises(SystemExit) as ended:
        trainer.fit(module, packed_loader(9))
    assert ended.value.code == 143
    state = torch.load(tmp_path / "stopped-step=1.ckpt", weights_only=True)
    assert state["loops"]["fit_loop"]["epoch_loop.batch_progress"]["current"]["processed"] == 3
