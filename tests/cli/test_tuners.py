"""The commands with tuners other than FineTuner: names, help, reward functions, doctor, plan, data and export."""

import json

import pytest
import torch
import yaml
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from lightning_fastft import DistillationTuner, FineTuner, PolicyTuner, PreferenceTuner, RewardTuner
from lightning_fastft.cli import main
from lightning_fastft.cli.lightning_cli import FastFTCLI
from lightning_fastft.cli.words import CONFIG_FOLDER

TINY = ["--trainer.accelerator", "cpu", "--trainer.logger", "false"]
HELPFUL = '''
def shorter(prompts, completions, **columns):
    return [-float(len(text)) for text in completions]


def add(a: int, b: int) -> int:
    """Add.

    Args:
        a: One.
        b: Another.
    """
    return a + b
'''
CONFIGS = {
    "dpo_qwen3_8b": PreferenceTuner,
    "orpo_qwen3_8b": PreferenceTuner,
    "reward_qwen3_8b": RewardTuner,
    "distill_qwen3_0.6b_from_8b": DistillationTuner,
    "gkd_qwen3_0.6b_from_8b": DistillationTuner,
    "reward_process_qwen3_8b": RewardTuner,
    "grpo_qwen3_0.6b": PolicyTuner,
}


@pytest.fixture(scope="module")
def model(demo_files, tmp_path_factory):
    """A folder with a tiny model and its tokenizer."""
    path = str(tmp_path_factory.mktemp("tiny"))
    torch.manual_seed(0)
    tuner = FineTuner(str(demo_files.model), init="random", dtype="float32")
    tuner.configure_model()
    tuner.save_pretrained(path)
    return path


@pytest.fixture
def rows(folder):
    """Preference rows, prompts, and a module with a reward function, in the current folder."""
    numbers = range(40)
    pairs = [
        {"prompt": f"How many are {n} and 1?", "chosen": f"{n + 1}", "rejected": "I do not know."} for n in numbers
    ]
    for name, found in (("pairs", pairs), ("prompts", [{"prompt": pair["prompt"]} for pair in pairs])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found))
    (folder / "tuner_rewards.py").write_text(HELPFUL)
    return folder


def words_for(name, model):
    words = ["--config", name, "--model.model", model, *TINY]
    if name.startswith("grpo"):
        words += ["--allow-import", "tuner_rewards", "--data.rewards", "tuner_rewards.shorter"]
    return words


@pytest.mark.parametrize("owner", [PreferenceTuner, RewardTuner, DistillationTuner, PolicyTuner])
def test_a_tuner_is_found_by_its_name_and_helps_with_its_base(owner, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["fit", "--model.help", owner.__name__])
    text = " ".join(capsys.readouterr().out.split())
    assert stop.value.code == 0
    assert f"--model.help=lightning_fastft.{owner.__name__}" in text
    assert "--model.learning_rate LEARNING_RATE Peak learning rate" in text
    assert "--model.temperature" in text or "--model.loss" in text


def test_a_tuner_is_named_without_a_config(rows, model, capsys):
    words = ["--model", "PreferenceTuner", "--model.model", model, "--model.loss", "simpo", "--data.paths", "x.jsonl"]
    tuner = FastFTCLI([*words, *TINY], run=False).model
    assert type(tuner) is PreferenceTuner
    assert tuner.loss == "simpo"


@pytest.mark.parametrize(
    ("option", "value"),
    [("rewards", "tuner_rewards.shorter"), ("rewards", ["tuner_rewards.shorter"]), ("tools", ["tuner_rewards.add"])],
)
def test_a_function_in_a_config_needs_permission_on_the_command_line(option, value, rows, model, answer):
    content = yaml.safe_load((CONFIG_FOLDER / "grpo_qwen3_0.6b.yaml").read_text())
    content["data"]["init_args"][option] = value
    (rows / "own.yaml").write_text(yaml.safe_dump(content))
    words = ["fit", "--config", "own.yaml", "--model.model", model, *TINY, "--trainer.max_steps", "1"]
    status, text = answer(words)
    assert status == 2
    assert f"{value if isinstance(value, str) else value[0]!r}" in text
    assert "--allow-import tuner_rewards" in text


def test_lists_of_functions_are_saved_with_a_run(rows, model):
    words = [*words_for("grpo_qwen3_0.6b", model)[:-1], "tuner_rewards.shorter"]
    words[words.index("--data.rewards")] = "--data.rewards+"
    command = FastFTCLI([*words, "--data.tools+", "tuner_rewards.add"], run=False)
    saved = yaml.safe_load(command.parser.dump(command.config))["data"]["init_args"]
    assert saved["rewards"] == ["tuner_rewards.shorter"]
    assert saved["tools"] == ["tuner_rewards.add"]
    assert list(command.datamodule.tools) == ["add"]


def test_reward_that_is_not_there_answers_with_what_to_give(rows, model, answer):
    words = ["fit", "--config", "grpo_qwen3_0.6b", "--model.model", model, "--allow-import", "nowhere", *TINY]
    status, text = answer([*words, "--data.rewards", "nowhere.score"])
    assert status == 2
    assert text.splitlines()[0] == "error: data: rewards: No module named 'nowhere'"
    status, text = answer(words)
    assert status == 1
    assert "--allow-import my_rewards --data.rewards my_rewards.score" in text


def test_a_function_of_the_package_is_no_sampler(rows, model, answer):
    """The default of an option is allowed, not every function that a config could name in its place."""
    words = words_for("grpo_qwen3_0.6b", model)
    status, text = answer(["fit", *words, "--data.sampler", "lightning_fastft.collate"])
    assert status == 1
    assert "sampler: a config may name classes" in text


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_doctor_checks_a_tuner_by_a_step_of_its_own_loss(name, rows, model, capsys):
    assert main(["doctor", *words_for(name, model)]) == 0
    text = capsys.readouterr().out
    assert "packed attention" in text
    assert "on a CPU every activation is kept" in text
    assert ("frozen_model" in text) == name.startswith(("distill", "gkd"))


def test_doctor_reports_prompts_that_are_missing(rows, model, answer):
    status, text = answer(["doctor", *words_for("grpo_qwen3_0.6b", model), "--data.prompts", "nope.jsonl"])
    assert status == 1
    assert "nope.jsonl" in text


def test_plan_counts_the_model_of_a_tuner_and_refuses_a_second_one(demo_files, rows, capsys, answer):
    config = [str(demo_files.model / "config.json"), "--model.init", "random", "--gpu", "h100"]
    for name in ("dpo_qwen3_8b", "grpo_qwen3_0.6b"):
        assert main(["plan", *words_for(name, config[0]), *config[1:]]) == 0
        assert "LoRA r=16" in capsys.readouterr().out
    status, text = answer(["plan", *words_for("distill_qwen3_0.6b_from_8b", config[0]), *config[1:]])
    assert status == 1
    assert "a second one" in text


FOREIGN = {
    "preference": {"chosen": "b", "rejected": "c c"},
    "labelled": {"completion": "b", "label": True},
    "scored": {"completion": "b", "score": 0.5},
    "stepwise": {"completions": ["b", "c"], "labels": [True, False]},
    "rollouts": {"completions": ["b", "c"], "rewards": [0.0, 1.0]},
}


@pytest.mark.filterwarnings("ignore:The whole run has")
@pytest.mark.filterwarnings("ignore:GradientHealth checked nothing")
@pytest.mark.parametrize("format", FOREIGN)
def test_init_names_a_command_that_trains_rows_with_completions(format, folder, model, answer):
    row = {"prompt": "a", **FOREIGN[format]}
    # The loss of labelled rows contrasts two labels.
    others = [{**row, "label": False}] if format == "labelled" else []
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [row, *others] * 4))
    status, text = answer(["init", "--model", model, "--data", "rows.jsonl"])
    assert status == 1
    command = text[text.index("fastft fit") :].split()[1:]
    assert main([*command, *TINY, "--trainer.max_steps", "1", "--data.val_share", "0"]) == 0


def test_data_that_is_sampled_during_training_is_checked_by_doctor(rows, model, answer):
    status, text = answer(["data", *words_for("grpo_qwen3_0.6b", model), "--data.prompts", "prompts.jsonl"])
    assert status == 1
    assert "fastft doctor" in text


def fit(name, model, *words):
    words = [*words_for(name, model), *words, "--trainer.max_steps", "3", "--trainer.max_epochs", "-1"]
    words += ["--data.max_tokens", "256", "--trainer.callbacks+=ModelCheckpoint", "--trainer.callbacks.dirpath", "run"]
    if not name.startswith("grpo"):
        words += ["--data.cache_dir", "null", "--data.num_proc", "1", "--data.num_workers", "0"]
    return FastFTCLI(["fit", *words, "--trainer.callbacks.save_last", "true", "--model.learning_rate", "1e-2"])


POLICY = (
    "--data.num_completions", "2", "--data.prompts_per_round", "2", "--data.max_new_tokens", "3",
    "--data.sampling_options.top_p", "0.9", "--data.reward_weights", "[2]",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:GradientHealth checked nothing")
@pytest.mark.parametrize(("name", "more"), [("dpo_qwen3_8b", ()), ("grpo_qwen3_0.6b", POLICY)])
def test_adapters_of_a_tuner_are_exported(name, more, rows, model, answer, caplog):
    caplog.set_level("INFO")
    cli = fit(name, model, *more)
    assert "fastft chat run/last.ckpt" in caplog.text
    assert answer(["export", "run/last.ckpt", "exported"])[0] == 0
    ids = torch.arange(3, 15)[None]
    stock = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), "exported").eval()
    with torch.no_grad():
        expected, found = (found(input_ids=ids).logits for found in (cli.model.model.eval(), stock))
    torch.testing.assert_close(found, expected)
    card = (rows / "exported/README.md").read_text()
    assert "unknown" not in card
    assert "gamma" not in card
    if more:
        assert "--allow-import tuner_rewards" in card
        assert "| prompts | prompts.jsonl: 40 prompts |" in card
        assert "| advantage | normalised |" in card
        assert "2 per prompt of at most 3 tokens, temperature 1, top_p 0.9 |" in card


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:GradientHealth checked nothing")
def test_the_last_line_of_a_run_on_plain_text_names_a_plain_chat(rows, model, caplog):
    caplog.set_level("INFO")
    row = json.dumps({"prompt": "How many are 1 and 1?", "completion": " 2"})
    (rows / "plain.jsonl").write_text((row + "\n") * 80)
    fit("lora_qwen3_0.6b", model, "--data.paths", "plain.jsonl")
    assert "fastft chat run/last.ckpt --plain" in caplog.text


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:GradientHealth checked nothing")
def test_a_reward_model_is_refused_with_the_line_that_writes_it(rows, model, answer, caplog):
    caplog.set_level("INFO")
    cli = fit("reward_qwen3_8b", model)
    assert "Saved run/last.ckpt." in caplog.text
    assert "fastft chat" not in caplog.text
    status, text = answer(["export", "run/last.ckpt", "exported"])
    assert status == 1
    assert "RewardTuner.load_from_checkpoint('run/last.ckpt').save_pretrained(FOLDER)" in text
    RewardTuner.load_from_checkpoint("run/last.ckpt").save_pretrained("exported")
    base = AutoModelForSequenceClassification.from_pretrained(model, num_labels=1)
    stock = PeftModel.from_pretrained(base, "exported")
    head = stock.get_parameter("base_model.model.score.modules_to_save.default.weight")
    torch.testing.assert_close(head, dict(cli.model.model.named_parameters())["base_model.model.score.weight"])


@pytest.mark.parametrize("is_text", [True, False])
@pytest.mark.parametrize("is_sampled", [True, False])
def test_fit_names_chat_without_the_template_that_rollouts_or_a_stream_did_not_use(
    rows, model, caplog, is_text, is_sampled
):
    question, answer = "How many are 1 and 1?", "2"
    if not is_text:
        question, answer = (
            [{"role": role, "content": text}] for role, text in (("user", question), ("assistant", answer))
        )
    row = {"prompt": question} if is_sampled else {"prompt": question, "completion": answer}
    (rows / "data.jsonl").write_text((json.dumps(row) + "\n") * 40)
    if is_sampled:
        words = [*words_for("grpo_qwen3_0.6b", model), "--data.prompts", "data.jsonl"]
        words += ["--data.max_new_tokens", "2", "--data.num_completions", "2", "--trainer.callbacks", "null"]
    else:
        words = ["--model.model", model, *TINY, "--data.paths", "data.jsonl", "--data.streaming", "true"]
    words += ["--trainer.max_steps", "1", "--trainer.enable_progress_bar", "false"]
    with caplog.at_level("INFO"):
        assert main(["fit", *words]) == 0
    (told,) = [record.message for record in caplog.records if "fastft chat" in record.message]
    assert told.endswith(" --plain") == is_text
