"""An option before a config that sets it has no effect: it is refused, and what keeps its effect is not."""

import pytest

from lightning_fastft.cli.mistakes import check_words
from lightning_fastft.core.errors import OptionError

FILES = {
    "run.yaml": """
model:
  class_path: lightning_fastft.FineTuner
  init_args:
    model: here
    learning_rate: 1.0e-3
    lora: {lora_alpha: 32}
    optimizer: {class_path: lightning_fastft.optim.FusedAdamW, init_args: {optim_bits: 8}}
data: {class_path: lightning_fastft.PackedDataModule, init_args: {paths: [a.jsonl], max_tokens: 512}}
trainer:
  max_steps: 2
  strategy: {class_path: lightning_fastft.FastFTStrategy}
  callbacks: [{class_path: lightning_fastft.FusedKernels}]
seed_everything: 3
""",
    "steps.yaml": "max_steps: 3\n",
    "mine.yaml": "trainer: {max_epochs: 4}\n",
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text("{}\n")
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("option", "kept"),
    [
        (["--trainer.max_steps", "5"], "2"),
        (["--trainer.max_steps=5"], "2"),
        (["--trainer.strategy", "fastft_ddp"], "FastFTStrategy"),
        (["--trainer.callbacks+=RunReport"], "FusedKernels"),
        (["--model.learning_rate", "2e-3"], "0.001"),
        (["--model.init_args.learning_rate", "2e-3"], "0.001"),
        (["--model.lora.r", "8"], "lora_alpha"),
        (["--model.optimizer.optim_bits", "32"], "8"),
        (["--model", "PreferenceTuner"], "FineTuner"),
        (["--data.paths", "b.jsonl"], "a.jsonl"),
        (["--seed_everything", "1"], "3"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
@pytest.mark.parametrize("config", [["--config", "run.yaml"], ["--config=run.yaml"], ["-c", "run.yaml"]], ids=" ".join)
def test_option_that_a_config_replaces_is_refused(option, kept, config, folder):
    with pytest.raises(OptionError) as refused:
        check_words("fit", [*option, *config])
    assert kept in str(refused.value)
    # The line to type.
    assert " ".join([*config, *option]) in str(refused.value)
    check_words("fit", [*config, *option])


@pytest.mark.parametrize(
    "words",
    [
        ["--trainer.max_epochs", "5", "--config", "run.yaml"],
        ["--model.weight_decay", "0.1", "--config", "run.yaml"],
        ["--model.optimizer.offload", "1.0", "--config", "run.yaml"],
        ["--trainer.callbacks+=RunReport", "--config", "mine.yaml"],
        # The same value.
        [
            "--trainer.max_steps",
            "2",
            "--model.learning_rate",
            "1e-3",
            "--data.paths",
            "a.jsonl",
            "--config",
            "run.yaml",
        ],
        ["--model", "FineTuner", "--trainer.strategy", "FastFTStrategy", "--config", "run.yaml"],
        ["--trainer.callbacks+=FusedKernels", "--config", "run.yaml"],
        # Given again, and configs on top of each other.
        ["--trainer.max_steps", "5", "--config", "run.yaml", "--trainer.max_steps", "5"],
        ["--config", "run.yaml", "--trainer", "steps.yaml"],
        ["--trainer", "steps.yaml", "--config", "run.yaml"],
    ],
    ids=" ".join,
)
def test_option_that_keeps_its_effect_is_accepted(words, folder):
    check_words("fit", words)


@pytest.mark.parametrize("command", ["data", "plan", "validate"])
def test_order_counts_for_every_command_with_a_config(command, folder):
    with pytest.raises(OptionError, match="max_tokens"):
        check_words(command, ["--data.max_tokens", "64", "--config", "run.yaml"])


def test_order_counts_for_allowed_packages_and_sections(folder):
    with pytest.raises(OptionError, match="max_steps"):
        check_words("fit", ["--allow-import", "mine", "--trainer.max_steps", "5", "--config", "run.yaml"])
    with pytest.raises(OptionError, match=r"steps\.yaml"):
        check_words("fit", ["--trainer.max_steps", "5", "--trainer", "steps.yaml"])


def test_option_between_two_configs_is_refused(folder):
    with pytest.raises(OptionError, match=r"max_epochs.*mine\.yaml|mine\.yaml.*max_epochs"):
        check_words("fit", ["--config", "run.yaml", "--trainer.max_epochs", "9", "--config", "mine.yaml"])
