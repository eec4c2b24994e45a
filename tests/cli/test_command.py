import errno
import json
import logging
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
import transformers
import yaml
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import CSVLogger

import lightning_fastft
import lightning_fastft.cli.command as command_module
from lightning_fastft import FineTuner, PackedDataModule
from lightning_fastft.checkpoint.files import check_file
from lightning_fastft.cli import doctor, main
from lightning_fastft.cli.answers import explain_missing_files
from lightning_fastft.cli.demo import LossCurve, describe_losses
from lightning_fastft.cli.doctor import shrink_config
from lightning_fastft.cli.lightning_cli import FastFTCLI
from lightning_fastft.cli.signatures import read_options
from lightning_fastft.cli.words import CONFIG_FOLDER, config_names, find_configs, take_option
from lightning_fastft.core.errors import OptionError
from tests.cli.hostile_configs import BORING


@pytest.mark.parametrize(
    ("words", "reason", "hint"),
    [
        (["--trainer.max_stps", "2"], "unrecognized arguments: --trainer.max_stps 2", "trainer.max_steps"),
        (
            ["--model.lerning_rate", "2"],
            "model: Option 'lerning_rate' is not accepted by lightning_fastft",
            "learning_rate",
        ),
        (["--trainer.max_steps", "many"], "trainer.max_steps: must be a whole number, got 'many'", ""),
        (["--trainer.max_steps", "5e2"], "trainer.max_steps: must be a whole number, got '500.0': write 500", ""),
        (
            ["--trainer.callbacks+=ModelCheckpoint", "--trainer.callbacks.dirpth", "x"],
            "trainer.callbacks: Option 'dirpth'",
            "dirpath",
        ),
        (["--config", "wrong.yaml"], "Subcommand 'fit' does not accept option 'trainer.max_stps'", "trainer.max_steps"),
        (["--data.class_path", "nowhere.Data"], "data: a config may not import 'nowhere.Data'", ""),
        # No abbreviations: they are misspelt names more often than not.
        (["--trainer.max_step", "2"], "unrecognized arguments: --trainer.max_step 2", "trainer.max_steps"),
        (["--model.lora.rank", "8"], "lora has the unknown fields ['rank']", "r"),
        (["--model.lora.alpha", "8"], "lora has the unknown fields ['alpha']", "lora_alpha"),
    ],
)
def test_wrong_argument_answers_with_the_reason_first(words, reason, hint, folder, answer):
    (folder / "wrong.yaml").write_text("trainer: {max_stps: 2}\n")
    status, text = answer(["fit", "--model.model", "x", "--data.paths", "y", *words])
    lines = text.splitlines()
    assert status == 2
    assert lines[0].startswith(f"error: {reason}")
    assert len(lines) <= 3
    assert not hint or f"did you mean {hint}?" in lines[1]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--model.quantization", "nf5"], "must be None or one of 'nf4', got 'nf5'"),
        (["--model.dtype", "bf16"], "must be one of 'auto', 'bfloat16', 'float16', 'float32', got 'bf16'"),
        (["--data.too_long", "drop"], "must be one of 'refuse', 'truncate', 'split', got 'drop'"),
    ],
)
def test_refused_choice_answers_with_the_value_and_the_choices(words, reason, folder, answer):
    status, text = answer(["fit", "--model.model", "x", "--data.paths", "y", *words])
    assert status == 2
    assert reason in text.splitlines()[0]
    assert "typing" not in text


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (
            ["--trainer.callbacks+=FusedKernels", "--trainer.callbacks.base_compute", "fp4"],
            "base_compute must be one of 'model_dtype', 'fp8', 'fp8_reference', got 'fp4'.",
        ),
        (
            ["--trainer.callbacks=GradientHealth", "--trainer.callbacks.num_steps", "1"],
            "num_steps must be at least 3, got 1.",
        ),
        (
            ["--trainer.strategy", "FastFTStrategy", "--trainer.strategy.attention", "sdpaa"],
            "attention must be one of 'auto', 'tiled', 'varlen', 'cudnn', 'flex', 'sdpa', 'reference', 'one_by_one', "
            "got 'sdpaa'.",
        ),
        (
            ["--model.optimizer", "torch.optim.AdamW", "--model.optimizer.weight_decay", "x"],
            "model.optimizer.weight_decay: must be a number, got 'x'",
        ),
        (
            ["--model.optimizer", "lightning_fastft.optim.FusedAdamW", "--model.optimizer.lr", "fast"],
            "model.optimizer.lr: must be a number, got 'fast'",
        ),
        (
            ["--trainer.strategy=FastFTFSDPStrategy", "--trainer.strategy.shard", "nodes"],
            "trainer.strategy.shard: must be a whole number or one of 'auto', 'node', got 'nodes'",
        ),
        (
            ["--config", "budget.yaml", "--trainer.strategy.activations.vram_budget", "14GB"],
            "trainer.strategy.activations.vram_budget: must be a number or 'auto', got '14GB'",
        ),
        (
            ["--model.optimizer", "lightning_fastft.optim.FusedAdamW", "--model.optimizer.optim_bits", "4"],
            "model.optimizer.optim_bits: must be one of 8, 32, got '4'",
        ),
        (
            ["--config", "strategy.yaml"],
            "trainer.strategy.activations.policy: must be one of 'auto', 'keep', 'offload', 'recompute', got 'autoo'",
        ),
        (
            ["--trainer.callbacks+=HostWaitDetector", "--trainer.callbacks.on_wait", "rise"],
            "trainer.callbacks.on_wait: must be one of 'report', 'warn', 'raise', got 'rise'",
        ),
        (
            ["--trainer.callbacks=HostWaitDetector", "--trainer.callbacks.on_wait", "rise"],
            "trainer.callbacks.on_wait: must be one of 'report', 'warn', 'raise', got 'rise'",
        ),
    ],
)
def test_value_that_a_class_refuses_answers_with_the_reason_of_the_class(words, reason, folder, answer):
    (folder / "y.jsonl").write_text('{"text": "one two"}\n')
    activations = {"class_path": "lightning_fastft.OffloadCheckpointing", "init_args": {"policy": "autoo"}}
    strategy = {"class_path": "lightning_fastft.FastFTStrategy", "init_args": {"activations": activations}}
    (folder / "strategy.yaml").write_text(yaml.safe_dump({"trainer": {"strategy": strategy}}))
    activations["init_args"] = {}
    (folder / "budget.yaml").write_text(yaml.safe_dump({"trainer": {"strategy": strategy}}))
    status, text = answer(["fit", "--model.model", "x", "--data.paths", "y.jsonl", "--trainer.max_steps", "1", *words])
    lines = [line for line in text.splitlines() if line.startswith(("error", "hint"))]
    assert status == 2
    assert lines == [f"error: {reason}", "hint: all options: fastft fit --help"]


@pytest.mark.parametrize("config", [[], ["--config", "qlora_qwen3_8b"]])
@pytest.mark.parametrize(("name", "owner"), [("fastft", "FastFTStrategy"), ("fastft_fsdp", "FastFTFSDPStrategy")])
def test_options_of_a_strategy_are_answered_with_its_class(config, name, owner, folder, answer):
    words = ["--trainer.strategy", name, "--trainer.strategy.activations", "OffloadCheckpointing"]
    status, text = answer(["fit", *config, "--model.model", "x", "--data.paths", "y", *words])
    assert status == 2
    assert f"the name {name!r} takes no options\nhint: name its class first: --trainer.strategy {owner}\n" in text


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["--model.optimizer", "AdamW"], "write one of torch.optim.AdamW"),
        (["--model.optimizer.class_path", "SGD"], "write one of torch.optim.SGD"),
        (["--model.optimizer", "adamw_8bit"], "lightning_fastft.optim.FusedAdamW --model.optimizer.optim_bits 8"),
        (["--model.optimizer", "adamw_torch"], "AdamW is the default"),
        (["--model.optimizer", "adamw"], "AdamW is the default"),
        (["--model.optimizer", "paged_adamw_32bit"], "FusedAdamW --model.optimizer.offload 1.0"),
        (["--model.optimizer", "adafactor"], "did you mean torch.optim.Adafactor?"),
        (["--model.optimizer", "lion_8bit"], "bitsandbytes.optim.Lion8bit --allow-import bitsandbytes"),
        (["--model.optimizer", "nadam"], "did you mean NAdam?"),
        (["--model.quantization", "4bit"], "did you mean nf4?"),
        (["--model.dtype", "bf16"], "did you mean bfloat16?"),
        (["--model.scheduler", "constant_with_warmup"], "did you mean constant --model.warmup_share 0.03?"),
        (["--model.loss", "dpo"], "--model PreferenceTuner"),
        (["--model.beta", "0.1"], "--model PreferenceTuner"),
        (["--model", "PreferenceTuner", "--model.model", "x", "--model.loss", "dpo"], "did you mean sigmoid?"),
        (["--model", "PreferenceTuner", "--model.model", "x", "--model.loss", "grpo"], "--model PolicyTuner"),
        (["--model", "PreferenceTuner", "--model.model", "x", "--model.loss_type", "ipo"], "did you mean loss?"),
        (["--model", "PreferenceTuner", "--model.model", "x", "--model.loss", "cispo"], "--model PolicyTuner"),
        (["--model", "PolicyTuner", "--model.model", "x", "--model.loss", "luspo"], "--model.ratio sequence"),
        (["--model", "PolicyTuner", "--model.model", "x", "--model.delta", "3.0"], "did you mean model.dual_clip?"),
        (["--model", "PolicyTuner", "--model.model", "x", "--model.epsilon_high", "0.3"], "model.clip_high?"),
        (["--mask_truncated_completions", "true"], "did you mean data.mask_truncated?"),
    ],
)
def test_values_of_other_tools_answer_with_what_to_write(words, hint, folder, answer):
    status, text = answer(["fit", "--model.model", "x", "--data.paths", "y", *words])
    reason, second, last = [line for line in text.splitlines() if not line.startswith("importing")]
    assert status == 2
    assert hint in second
    assert "dot import path" not in reason
    assert last == "hint: all options: fastft fit --help"


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("FastFTDDPStrategy", {"timeout": "1:30:00", "find_unused_parameters": True, "static_graph": True}, "y.jsonl"),
        ("FastFTDDPStrategy", {"timeot": "1:30:00"}, "'timeot' is not accepted"),
        ("FastFTFSDPStrategy", {"timeout": "1:30:00"}, "y.jsonl"),
    ],
)
def test_a_config_sets_options_that_a_strategy_has_from_lightning_and_torch(name, options, reason, folder, answer):
    strategy = {"class_path": f"lightning_fastft.{name}", "init_args": options}
    (folder / "own.yaml").write_text(yaml.safe_dump({"trainer": {"strategy": strategy, "accelerator": "cpu"}}))
    if reason != "y.jsonl":
        # The parser comes after the check of the data's files.
        (folder / "y.jsonl").write_text('{"text": "one two"}\n')
    words = ["--config", "own.yaml", "--model.model", "x", "--data.paths", "y.jsonl", "--trainer.max_steps", "1"]
    _, text = answer(["fit", *words])
    assert reason in text


@pytest.mark.parametrize("word", ["--trainer.strategy=fastft", ""])
def test_files_with_the_names_of_values_are_not_read(word, folder):
    (folder / "fastft").write_text("#!/bin/sh\nexec python -m lightning_fastft fit\n")
    (folder / "cpu").write_text("a note\n")
    (folder / "own.yaml").write_text("trainer: {strategy: fastft, accelerator: cpu, logger: false}\n")
    words = ["--config", "own.yaml", "--model.model", "x", "--data.paths", "y", *filter(None, [word])]
    cli = FastFTCLI(words, run=False)
    assert type(cli.trainer.strategy).__name__ == "FastFTStrategy"


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["fit", "--data.paths", "x"], "--model.model"),
        (["fit"], "--model.model"),
        (["validate", "--model.model", "x"], "--data.paths"),
        (["data", "--model.model", "x"], "--data.paths"),
    ],
)
def test_missing_option_answers_with_the_configs_that_have_it(words, name, folder, answer):
    status, text = answer(words)
    lines = text.splitlines()
    assert status == 2
    assert lines[0] == f"error: {name} is required and was not given"
    assert "--config NAME" in lines[1]
    assert lines[1].endswith(", ".join(config_names()))
    assert lines[2].endswith(" fit --help")


@pytest.mark.parametrize("words", [["fit", "--help"], ["validate", "-h"]])
def test_help_lists_the_options_of_model_data_and_trainer(words, capsys):
    assert main(words) == 0
    text = capsys.readouterr().out
    for owner, key in ((FineTuner, "model"), (PackedDataModule, "data")):
        for name in read_options(f"lightning_fastft.{owner.__name__}"):
            assert re.search(rf"^  --{key}\.{name}[ ,]", text, re.MULTILINE), f"{key}.{name}"
    assert "--trainer.max_epochs" in text


@pytest.mark.parametrize("command", ["fit", "validate"])
def test_checkpoint_that_is_not_there_is_refused_before_anything_is_made(command, folder, answer):
    status, text = answer([command, "--model.model", "x", "--data.paths", "y", "--ckpt_path", "runs/none.ckpt"])
    assert status == 1
    assert text.startswith("error: OptionError: ckpt_path: ")
    assert "runs/none.ckpt" in text
    assert str(folder) in text


@pytest.mark.parametrize("name", ["FusedKernels", "PackedTraining", "RunReport", "ExactResume", "FastFTProgressBar"])
def test_callback_beside_that_of_the_config_is_refused_before_data_is_read(name, folder, answer):
    (folder / "own.yaml").write_text(f"trainer: {{callbacks: [{{class_path: lightning_fastft.{name}}}]}}\n")
    (folder / "empty.jsonl").write_text("")
    words = [
        "--config",
        "own.yaml",
        "--model.model",
        "x",
        "--data.paths",
        "empty.jsonl",
        "--trainer.accelerator",
        "cpu",
        "--trainer.logger",
        "false",
    ]
    status, text = answer(["fit", *words, f"--trainer.callbacks+=lightning_fastft.{name}"])
    assert status == 1
    assert f"error: OptionError: {name} is given 2 times" in text
    assert "empty.jsonl" not in text


@pytest.mark.parametrize(
    "words",
    [
        ["--trainer.default_root_dir", "/proc/runs"],
        ["--trainer.default_root_dir", "/proc/runs", "--trainer.logger", "false"],
        ["--trainer.logger", "CSVLogger", "--trainer.logger.save_dir", "a_file/runs"],
    ],
)
def test_folder_that_cannot_be_written_is_refused_before_data_is_read(words, folder, answer):
    (folder / "a_file").touch()
    (folder / "y.jsonl").touch()
    status, text = answer(["fit", "--model.model", "x", "--data.paths", "y.jsonl", "--trainer.max_steps", "1", *words])
    assert status == 1
    assert "The run cannot write to" in text
    assert "Give another folder" in text


@pytest.mark.parametrize("command", ["fit", "validate"])
def test_folder_of_the_default_logger_is_changed_by_an_option(command, folder, answer, monkeypatch):
    (folder / "y.jsonl").touch()
    monkeypatch.setattr("lightning_fastft.cli.lightning_cli.find_write_obstacle", lambda place: f"{place} is full")
    status, text = answer([command, "--model.model", "x", "--data.paths", "y.jsonl"])
    assert status == 1
    assert "Give another folder: --trainer.default_root_dir FOLDER." in text


def test_demo_in_a_folder_that_cannot_be_written_to_is_refused(folder, answer):
    (folder / "runs").touch()
    status, text = answer(["demo"])
    assert status == 1
    assert f"The demo cannot write to runs/demo: {folder / 'runs'} is a file" in text


def test_demo_of_few_steps_says_what_its_loss_is_the_mean_of_and_why_it_fails():
    text, has_learned = describe_losses(torch.tensor([6.0, 5.0, 4.0]))
    assert text.startswith("Training loss: 6.000 at the first step, 5.000 over the last 3 of 3 steps.")
    assert "exit status is 1" in text
    assert not has_learned
    text, has_learned = describe_losses(torch.tensor([6.0] * 20 + [2.0] * 20))
    assert text == "Training loss: 6.000 at the first step, 2.000 over the last 20 of 40 steps."
    assert has_learned


def test_demo_sums_the_loss_of_a_step_over_its_micro_batches(tmp_path):
    class Counts(BoringModel):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx)["loss"] * 0 + batch_idx

    curve = LossCurve()
    trainer = pl.Trainer(
        default_root_dir=tmp_path,
        accelerator="cpu",
        max_epochs=1,
        limit_train_batches=6,
        limit_val_batches=0,
        accumulate_grad_batches=3,
        callbacks=[curve],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(Counts())
    assert [float(loss) for loss in curve.losses] == pytest.approx([1, 4])


def test_last_is_a_word_and_no_file(folder):
    tried = []

    class Tries(FastFTCLI):
        def instantiate_classes(self):
            tried.append(self.config.fit.ckpt_path)
            raise KeyError("far enough")

    with pytest.raises(KeyError, match="far enough"):
        Tries(["fit", "--model.model", "x", "--data.paths", "y", "--ckpt_path", "last"])
    assert tried == ["last"]


def test_refused_value_answers_with_the_reason(folder, answer):
    status, text = answer(["fit", "--model.model", "x", "--data.paths", "y", "--data.max_tokens", "-1"])
    assert status == 2
    assert text.startswith("error: max_tokens must be between 2 and 2147483647, got -1.")
    assert "Traceback" not in text


def test_fit_without_a_length_is_refused_before_the_model_is_read(folder, answer):
    (folder / "train.jsonl").write_text('{"prompt": "a", "completion": "b"}\n' * 4)
    words = ["--model.model", "empty", "--data.paths", "train.jsonl", "--trainer.accelerator", "cpu"]
    status, text = answer(["fit", *words, "--trainer.logger", "false"])
    assert status == 1
    assert "--trainer.max_epochs 1" in text


@pytest.mark.parametrize("command", ["fit", "data"])
def test_a_tokenizer_that_is_not_there_answers_with_what_to_do(command, folder, answer):
    (folder / "empty").mkdir()
    (folder / "empty/tokenizer_config.json").write_text("{}")
    (folder / "train.jsonl").write_text('{"prompt": "a", "completion": "b"}\n' * 4)
    words = [
        "--model.model",
        "empty",
        "--data.paths",
        "train.jsonl",
        "--data.cache_dir",
        "null",
        "--trainer.accelerator",
        "cpu",
    ]
    status, text = answer([command, *words, "--trainer.max_steps", "1", "--trainer.logger", "false"])
    assert status == 1
    assert "Traceback" not in text
    assert "error: OptionError: The tokenizer of 'empty' cannot be read: " in text
    assert "Give a hub id or a folder with tokenizer.json." in text


def test_files_that_transformers_cannot_read_for_an_own_module_answer_with_what_to_do(folder):
    (folder / "empty").mkdir()
    (folder / "empty/tokenizer_config.json").write_text("{}")
    with pytest.raises((OSError, ValueError)) as raised:
        transformers.AutoTokenizer.from_pretrained("empty")
    lines = explain_missing_files(raised.value).splitlines()
    assert lines[0].startswith("error: the model's files could not be read: ")
    assert lines[1].startswith("hint: 'empty' must be a name on huggingface.co or a folder")
    assert "runs/demo/trained" in lines[2]


def test_control_characters_in_the_name_of_a_model_do_not_reach_the_terminal(monkeypatch, capsys):
    def run(command, words):
        transformers.AutoConfig.from_pretrained("/nowhere\x1b[2J\u202e")

    monkeypatch.setattr(command_module, "_run", run)
    assert main(["fit"]) == 1
    text = capsys.readouterr().err
    assert r"/nowhere\x1b[2J\u202e" in text
    assert not {"\x1b", "\u202e"} & set(text)


def test_an_error_of_another_origin_keeps_its_traceback(monkeypatch):
    def run(command, words):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(command_module, "_run", run)
    with pytest.raises(OSError, match="Input/output error"):
        main(["fit"])


def test_an_interrupt_before_the_training_leaves_no_traceback(monkeypatch, capsys):
    def run(command, words):
        raise KeyboardInterrupt

    monkeypatch.setattr(command_module, "_run", run)
    assert main(["fit"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("is_ignored", [False, True])
def test_a_stopped_command_removes_its_unfinished_files(number, is_ignored, monkeypatch, capsys):
    ended = []

    def run(words):
        assert signal.getsignal(number) is not signal.SIG_DFL
        try:
            signal.raise_signal(number)
        finally:
            ended.append(words)
        return 0

    before = signal.signal(number, signal.SIG_IGN if is_ignored else signal.SIG_DFL)
    monkeypatch.setattr(command_module, "_import_command", lambda command: run)
    try:
        if is_ignored:
            # As nohup does.
            assert main(["export", "a", "b"]) == 0
        else:
            with pytest.raises(SystemExit) as stop:
                main(["export", "a", "b"])
            assert stop.value.code == 128 + number
            assert number.name in capsys.readouterr().err
            assert signal.getsignal(number) is signal.SIG_DFL
    finally:
        signal.signal(number, before)
    assert ended == [["a", "b"]]


def test_an_interrupt_that_lightning_answers_has_the_same_status(monkeypatch, capsys):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    def run(command, words):
        callback = pl.callbacks.LambdaCallback(setup=interrupt)
        trainer = pl.Trainer(
            max_steps=1, accelerator="cpu", logger=False, enable_checkpointing=False, callbacks=[callback]
        )
        trainer.fit(BoringModel())

    handler = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(command_module, "_run", run)
    try:
        assert main(["fit"]) == 130
    finally:
        # Lightning ignores further interrupts.
        signal.signal(signal.SIGINT, handler)
    assert capsys.readouterr().err.endswith("interrupted\n")


def test_help_names_every_command_and_config(capsys, answer):
    assert main([]) == 0
    text = capsys.readouterr().out
    for word in ("fit", "validate", "test", "data", "doctor", "plan", "export", "demo", "bench", *config_names()):
        assert word in text
    status, text = answer(["frobnicate"])
    assert status == 1
    assert "Unknown command 'frobnicate'" in text
    assert "Did you mean doctor?" in answer(["docter"])[1]
    assert "trainer.predict(tuner, data, ckpt_path=CHECKPOINT)" in answer(["predict", "--config", "demo"])[1]


@pytest.mark.parametrize(
    ("command", "option"),
    [
        ("data", "--out"),
        ("doctor", "fastft fit --help"),
        ("plan", "--host-gib"),
        ("export", "--accept-other-base"),
        ("demo", "runs/demo"),
        ("bench", "--workload"),
    ],
)
def test_help_of_a_command_has_its_own_options(command, option, capsys):
    assert main([command, "--help"]) == 0
    assert option in capsys.readouterr().out


def test_configs_are_found_by_name_and_by_path(folder):
    (folder / "demo.yaml").write_text("")
    assert find_configs(["--config", "demo.yaml", "--x", "demo"]) == ["--config", "demo.yaml", "--x", "demo"]
    assert find_configs(["-c", "demo", "--config=qlora_qwen3_8b"]) == [
        "-c",
        str(CONFIG_FOLDER / "demo.yaml"),
        f"--config={CONFIG_FOLDER / 'qlora_qwen3_8b.yaml'}",
    ]
    with pytest.raises(OptionError, match="Did you mean qlora_qwen3_8b"):
        find_configs(["--config", "qlora_qwen_8b"])


def test_own_options_are_taken_from_the_arguments():
    assert take_option(["--a", "--out=x", "b"], "--out", default="y") == ("x", ["--a", "b"])
    assert take_option(["--a"], "--out", default="y") == ("y", ["--a"])
    with pytest.raises(OptionError, match="needs a value"):
        take_option(["--out"], "--out", default="y")


def tiny_words(demo_files) -> list[str]:
    return [
        *(
            "--config",
            "demo",
            "--model.model",
            str(demo_files.model),
            "--data.paths",
            str(demo_files.train),
            "--data.val_paths",
            str(demo_files.validation),
        ),
        *(
            "--data.max_tokens",
            "1024",
            "--data.cache_dir",
            "null",
            "--data.show_progress",
            "false",
            "--data.num_proc",
            "1",
        ),
        *(
            "--trainer.max_steps",
            "3",
            "--trainer.accelerator",
            "cpu",
            "--trainer.logger",
            "false",
            "--trainer.enable_model_summary",
            "false",
        ),
    ]


def test_interval_of_logging_is_in_the_printed_config(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["fit", "--config", "qlora_qwen3_8b", "--print_config"])
    assert stop.value.code == 0
    trainer = yaml.safe_load(capsys.readouterr().out)["trainer"]
    assert trainer["log_every_n_steps"] == "auto"


@pytest.mark.slow
def test_fit_trains_and_saves_its_config(folder, demo_files):
    run = FastFTCLI(["fit", *tiny_words(demo_files), "--trainer.default_root_dir", "out"])
    assert run.trainer.global_step == 3
    assert type(run.trainer.strategy).__name__ == "FastFTStrategy"
    assert (folder / "out" / "config.yaml").is_file()
    assert main(["fit", *tiny_words(demo_files), "--trainer.default_root_dir", "out"]) == 0, (
        "a second run may overwrite the saved config"
    )


@pytest.mark.slow
def test_a_disk_that_fills_up_in_a_run_is_no_traceback_and_keeps_the_checkpoint(
    folder, demo_files, answer, monkeypatch
):
    saved, save = [], CSVLogger.save

    def fill(logger):
        saved.append(logger)
        if len(saved) > 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        save(logger)

    monkeypatch.setattr(CSVLogger, "save", fill)
    words = ["--trainer.logger", "CSVLogger", "--trainer.logger.save_dir", "logs", "--trainer.log_every_n_steps", "1"]
    words += ["--trainer.enable_checkpointing", "true", "--trainer.callbacks+=ModelCheckpoint"]
    words += ["--trainer.callbacks.dirpath", "kept", "--trainer.callbacks.every_n_train_steps", "1"]
    status, text = answer(["fit", *tiny_words(demo_files), *words])
    assert status == 1
    assert "error: a file could not be written: No space left on device" in text
    assert "--ckpt_path last" in text
    assert [check_file(file) for file in (folder / "kept").glob("*.ckpt")] == [True]


@pytest.mark.slow
def test_settings_of_a_checkpoint_do_not_override_the_command_line(folder, demo_files):
    first = FastFTCLI(["fit", *tiny_words(demo_files)])
    first.trainer.save_checkpoint("a.ckpt")
    second = FastFTCLI(["validate", *tiny_words(demo_files), "--model.warmup_share", "0.5", "--ckpt_path", "a.ckpt"])
    assert second.model.warmup_share == 0.5


@pytest.mark.slow
def test_data_describes_without_training(folder, demo_files, capsys):
    assert main(["data", *tiny_words(demo_files), "--out", "pictures"]) == 0
    text = capsys.readouterr().out
    assert "40 rows, 40 examples" in text
    assert "fill" in text
    assert "⟦" in text
    assert [path.name for path in (folder / "pictures").iterdir()] == ["data.html"]
    (folder / "pictures" / "data.html").write_text("mine")
    assert main(["data", *tiny_words(demo_files), "--out", "pictures"]) == 1
    assert "which no run wrote" in capsys.readouterr().err


@pytest.mark.slow
def test_data_describes_prompts_and_completions(folder, demo_files, capsys):
    pair = {"prompt": "What is two plus two?", "chosen": " It is four.", "rejected": " It is five."}
    (folder / "pairs.jsonl").write_text(f"{json.dumps(pair)}\n" * 4)
    words = [*tiny_words(demo_files), "--data.paths", "pairs.jsonl", "--data.val_paths", "null", "--out", "pictures"]
    words += ["--model", "PreferenceTuner", "--model.loss", "simpo"]
    assert main(["data", *words]) == 0
    text = capsys.readouterr().out
    assert "formats: preference 4" in text
    assert "8 completions: " in text
    assert "tokens with shared prompts" in text
    prompt, chosen, rejected = (text.index(f"\n{name} (") for name in ("prompt", "chosen", "rejected"))
    assert "What is two plus two?" in text[prompt:chosen]
    assert "⟦ It is four." in text[chosen:rejected]
    assert "⟦ It is five." in text[rejected:]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "path"), [([], "pictures/rejected.jsonl"), (["--data.rejected_path", "mine.jsonl"], "mine.jsonl")]
)
def test_data_writes_rejected_rows_beside_its_page(words, path, folder, demo_files, caplog):
    caplog.set_level(logging.INFO, logger="lightning.pytorch")
    rows = demo_files.train.read_text() + '{"messages": []}\n'
    (folder / "rows.jsonl").write_text(rows)
    words = [
        *tiny_words(demo_files),
        "--data.paths",
        "rows.jsonl",
        "--data.max_reject_share",
        "0.5",
        "--out",
        "pictures",
        *words,
    ]
    assert main(["data", *words]) == 0
    assert f"train data: 1 of 41 rows are rejected (empty messages 1); they are in {path}" in caplog.messages
    assert sorted(str(found.relative_to(folder)) for found in folder.rglob("*.jsonl")) == sorted(["rows.jsonl", path])
    assert len((folder / path).read_text().splitlines()) == 1


@pytest.mark.slow
def test_data_that_cannot_write_says_so_before_it_reads(folder, demo_files, answer):
    status, text = answer(["data", *tiny_words(demo_files), "--out", "/proc/data"])
    assert status == 1
    assert "--out: /proc/data/data.html cannot be written" in text


def test_doctor_of_several_ranks_answers_once(folder, demo_files, monkeypatch, capsys):
    monkeypatch.setattr("lightning.pytorch.Trainer.is_global_zero", False)
    assert main(["doctor", *tiny_words(demo_files)]) == 0
    assert capsys.readouterr().out == ""


def test_doctor_shows_what_is_active_without_the_data(folder, demo_files, capsys):
    words = [
        "--config",
        "lora_qwen3_0.6b",
        "--model.model",
        str(demo_files.model),
        "--model.dtype",
        "bfloat16",
        "--trainer.accelerator",
        "cpu",
    ]
    assert main(["doctor", *words]) == 0
    text = capsys.readouterr().out
    assert "packed attention" in text
    assert "ran: " in text
    assert re.search(r"low-precision adapters +active", text)
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--data.paths", "nope.jsonl"], "There is no file or folder nope.jsonl"),
        (["--data.paths=nope.jsonl"], "There is no file or folder nope.jsonl"),
        # A shipped config names it as an example; here it is asked for.
        (["--data.paths", "train.jsonl"], "There is no file or folder train.jsonl"),
        (["--data.paths", "[there.jsonl, nope.csv]"], "There is no file or folder nope.csv"),
        (["--data.val_paths", "./nope"], "There is no file or folder ./nope"),
        (["--data.paths", "empty.jsonl"], "empty.jsonl is empty"),
        (["--config", "own.yaml"], "There is no file or folder mine.jsonl"),
    ],
)
def test_doctor_refuses_data_that_is_not_there(words, reason, folder, answer, monkeypatch):
    (folder / "there.jsonl").write_text('{"text": "a"}\n')
    (folder / "empty.jsonl").write_text("")
    (folder / "own.yaml").write_text(
        "data: {class_path: lightning_fastft.PackedDataModule, init_args: {paths: mine.jsonl}}\n"
    )
    # Without it the hub would be asked for the model.
    monkeypatch.setattr(doctor, "_read_config", lambda *args: pytest.fail("the data was not judged"))
    status, text = answer(["doctor", "--config", "lora_qwen3_0.6b", *words])
    assert status == 1
    assert f"error: DataError: {reason}" in text
    assert "Traceback" not in text


@pytest.mark.parametrize("words", [[], ["--data.paths", "there.jsonl"], ["--data.paths", "owner/name"]])
def test_doctor_asks_for_no_data_beyond_what_is_named(words, folder, monkeypatch):
    (folder / "there.jsonl").write_text('{"text": "a"}\n')

    def stop(*args):
        raise KeyError("far enough")

    monkeypatch.setattr(doctor, "_read_config", stop)
    with pytest.raises(KeyError, match="far enough"):
        main(["doctor", "--config", "lora_qwen3_0.6b", *words])


def test_doctor_leaves_out_callbacks_that_need_a_logger(folder, demo_files, capsys):
    (folder / "train.jsonl").write_text('{"text": "a"}\n')
    model = ["--model.model", str(demo_files.model), "--model.init", "random"]
    words = [*model, "--data.paths", "train.jsonl", "--trainer.accelerator", "cpu", "--trainer.strategy", "fastft"]
    assert main(["doctor", *words, "--trainer.callbacks+=LearningRateMonitor"]) == 0
    assert "packed attention" in capsys.readouterr().out


def test_errors_of_lightning_about_its_use_are_short(folder, demo_files, answer):
    (folder / "train.jsonl").write_text(json.dumps({"input_ids": [1, 2, 3, 4]}) + "\n")
    model = ["--model.model", str(demo_files.model), "--model.init", "random", "--trainer.max_steps", "1"]
    words = [*model, "--data.paths", "train.jsonl", "--data.cache_dir", "null", "--trainer.accelerator", "cpu"]
    status, text = answer(["fit", *words, "--trainer.logger", "false", "--trainer.callbacks+=LearningRateMonitor"])
    assert status == 1
    assert "error: OptionError" in text
    assert "no logger" in text


def test_validation_after_more_batches_than_there_are_is_answered(folder, demo_files, answer):
    (folder / "train.jsonl").write_text(20 * (json.dumps({"input_ids": [1, 2, 3, 4]}) + "\n"))
    model = ["--model.model", str(demo_files.model), "--model.init", "random", "--trainer.max_steps", "1"]
    words = [*model, "--data.paths", "train.jsonl", "--data.cache_dir", "null", "--data.val_share", "0.5"]
    run = ["--trainer.accelerator", "cpu", "--trainer.logger", "false", "--trainer.enable_checkpointing", "false"]
    status, text = answer(["fit", *words, *run, "--trainer.val_check_interval", "1000"])
    assert status == 1
    assert "OptionError: trainer.val_check_interval" in text


def test_device_that_is_not_there_is_answered(folder, demo_files, answer, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    status, text = answer(["chat", str(demo_files.model), "--device", "cuda"])
    assert status == 1
    assert "torch sees no GPU" in text


def test_doctor_refuses_modules_that_it_cannot_shrink(folder, answer):
    (folder / "config.yaml").write_text(BORING)
    status, text = answer(["doctor", "--config", "config.yaml"])
    assert status == 1
    assert "FineTuner" in text


def test_miniature_keeps_every_kind_of_layer():
    config = {
        "num_hidden_layers": 12,
        "layer_types": ["sliding_attention"] * 5 + ["full_attention"] + ["sliding_attention"] * 6,
        "num_experts": 64,
    }
    small = shrink_config(config)
    assert small["num_hidden_layers"] == len(small["layer_types"]) == 6
    assert set(small["layer_types"]) == set(config["layer_types"])
    assert small["num_experts"] == 8
    assert shrink_config({"text_config": config, "vision_config": {}})["text_config"] == small


@pytest.mark.slow
def test_command_runs_as_a_process(folder):
    root = Path(lightning_fastft.__file__).parents[1]
    command = [sys.executable, "-m", "lightning_fastft", "fit", "--trainer.max_stps=2"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(root)})
    assert done.returncode == 2
    assert "did you mean trainer.max_steps?" in done.stderr


@pytest.mark.parametrize("words", [["--help"], ["push", "--help"], ["doctor"]])
def test_a_reader_that_ends_early_ends_the_command_in_silence(words, monkeypatch, capsys):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        assert main(words) == 128 + signal.SIGPIPE
    assert capsys.readouterr().err == ""


def test_another_broken_pipe_is_not_hidden(monkeypatch):
    def run(*_):
        raise BrokenPipeError

    reader, writer = os.pipe()
    monkeypatch.setattr("lightning_fastft.cli.command._run", run)
    with os.fdopen(writer, "w") as pipe, os.fdopen(reader):
        monkeypatch.setattr(sys, "stdout", pipe)
        with pytest.raises(BrokenPipeError):
            main(["report"])


def test_a_full_disk_is_an_error_in_words(monkeypatch, answer):
    full = Path("/dev/full").open("w")  # noqa: SIM115 - closing it fails
    monkeypatch.setattr(sys, "stdout", full)
    status, text = answer(["--help"])
    assert status == 1
    assert "No space left" in text
    with pytest.raises(OSError, match="No space left"):
        full.close()
