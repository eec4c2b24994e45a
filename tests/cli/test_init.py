"""``fastft init``: the config that it writes is one that fit takes, and its numbers are those of the planner."""

import json
import re
import resource
import shlex

import numpy as np
import pytest
import yaml
from transformers import AutoTokenizer

from lightning_fastft.cli.command import main
from lightning_fastft.cli.lightning_cli import FastFTCLI
from lightning_fastft.cli.recipe.lengths import Lengths
from lightning_fastft.cli.recipe.plans import choose_pack_tokens, count_steps
from lightning_fastft.cli.recipe.text import describe_lengths
from lightning_fastft.training.datamodule import PackedDataModule
from tests.support.sizes import sizes

SHAPES = sizes(model_type="llama", vocab=32_000, width=1024, inner=4096, layers=4, heads=8, key_heads=2, positions=4096)
ROW = {"question": "How many eggs are in two dozens?", "answer": "There are 24 eggs. " * 20}
COLUMNS = ["--data.columns.prompt", "question", "--data.columns.completion=answer"]
WORDS = ["init", "--model", "model", "--data", "train.jsonl", *COLUMNS]


@pytest.fixture
def rows(folder, monkeypatch):
    """A model folder with a configuration alone, and data; the tokenised cache is in the folder too."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    (folder / "model").mkdir()
    (folder / "model/config.json").write_text(json.dumps(SHAPES))
    (folder / "train.jsonl").write_text((json.dumps(ROW) + "\n") * 300)
    return folder


def read(path="config.yaml"):
    with open(path) as file:
        return yaml.safe_load(file)


def test_config_for_a_named_gpu_from_shapes_alone(rows, capsys):
    assert main([*WORDS, "--gpu", "4090"]) == 0
    text, config = capsys.readouterr().out, read()
    data, model, trainer = config["data"]["init_args"], config["model"]["init_args"], config["trainer"]
    assert data["columns"] == {"prompt": "question", "completion": "answer"}
    assert data["max_tokens"] == 512
    # The tokenizer is not there.
    assert "assumed: 4 characters per token" in text
    assert data["too_long"] == "truncate"
    assert "no weights" in text
    assert model["lora"] == {"r": 16, "lora_alpha": 32}
    assert "quantization" not in model
    assert data["val_share"] * 300 == pytest.approx(16, abs=0.1)
    assert trainer["accumulate_grad_batches"] * 25 < 300
    head = (rows / "config.yaml").read_text()
    assert "planned for RTX 4090" in head
    assert "kept: nothing is recomputed" in head
    cli = FastFTCLI(["--config", "config.yaml"], run=False)
    assert cli.model.lora.r == 16
    assert cli.datamodule.max_tokens == 512


def test_plan_of_the_config_has_the_figures_of_init(rows, capsys):
    assert main([*WORDS, "--gpu", "4090", "--method", "qlora"]) == 0
    expected = re.search(r"([\d.]+) GiB of device memory \(([\d.]+) GiB of them", capsys.readouterr().out)
    (line,) = (line for line in (rows / "config.yaml").read_text().splitlines() if line.startswith("# Plan: "))
    assert main(shlex.split(line.removeprefix("# Plan: "))[1:]) == 0
    text = capsys.readouterr().out
    figures = [float(re.search(rf"{name} +([\d.]+) GiB", text)[1]) for name in ("predicted peak", "and optimizer:")]
    assert [round(figure, 1) for figure in figures] == [float(figure) for figure in expected.groups()]


def test_number_of_held_out_examples_is_that_of_the_run(rows, demo_files, capsys):
    assert main([*WORDS, "--gpu", "4090"]) == 0
    data = PackedDataModule(**read()["data"]["init_args"], tokenizer=str(demo_files.model), num_proc=1)
    data.prepare_data()
    data.setup("fit")
    assert f"# Held out for validation: {len(data.subset('val'))} examples.\n" in (rows / "config.yaml").read_text()


def test_methods_are_written_as_asked(rows, capsys):
    assert main([*WORDS, "--gpu", "4090", "--method", "full", "--out", "full.yaml"]) == 0
    model = read("full.yaml")["model"]["init_args"]
    assert (model["master_dtype"], model["dtype"]) == ("float32", "bfloat16")
    assert "lora" not in model
    assert main([*WORDS, "--gpu", "4090", "--method", "qlora", "--out", "full.yaml", "--overwrite"]) == 0
    assert read("full.yaml")["model"]["init_args"]["quantization"] == "nf4"


def test_qlora_is_chosen_where_the_base_does_not_fit_in_bf16(rows, capsys):
    large = {**SHAPES, "hidden_size": 16_384, "intermediate_size": 32_768, "num_hidden_layers": 8}
    large["num_attention_heads"] = 64
    (rows / "model/config.json").write_text(json.dumps(large))
    assert main([*WORDS, "--gpu", "4090"]) == 0
    assert read()["model"]["init_args"]["quantization"] == "nf4"
    assert main([*WORDS, "--gpu", "4090", "--method", "full", "--out", "full.yaml"]) == 1
    assert "Give --method qlora" in capsys.readouterr().err


def test_rows_of_plain_text_are_followed_by_a_plain_chat(rows, capsys):
    assert main(WORDS) == 0
    assert "fastft chat runs/config/last.ckpt --plain" in capsys.readouterr().out
    turns = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
    (rows / "both").mkdir()
    for name, row in (("chat", {"messages": turns}), ("text", {"prompt": "a", "completion": "b"})):
        (rows / f"both/{name}.jsonl").write_text((json.dumps(row) + "\n") * 20)
    for data in ("both/chat.jsonl", "both"):
        assert main([*WORDS[:3], "--data", data, "--out", "c.yaml", "--overwrite"]) == 0
        assert "fastft chat runs/c/last.ckpt\n" in capsys.readouterr().out


def test_without_a_gpu_nothing_is_planned(rows, capsys):
    assert main(WORDS) == 0
    assert "not planned" in capsys.readouterr().out
    assert "pad_to_max" not in read()["data"]["init_args"]


def test_a_full_disk_keeps_the_config_that_is_there(rows, answer):
    (rows / "config.yaml").write_text("mine")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, before[1]))
    try:
        status, text = answer([*WORDS, "--cache-dir", "null", "--overwrite"])
        new_status, _ = answer([*WORDS, "--cache-dir", "null", "--out", "new.yaml"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert (status, new_status) == (1, 1)
    assert "config.yaml cannot be written" in text
    assert (rows / "config.yaml").read_text() == "mine"
    assert [path.name for path in rows.iterdir() if path.suffix == ".yaml"] == ["config.yaml"]


def test_commands_that_follow_can_be_pasted_into_a_shell(rows, capsys):
    assert main([*WORDS, "--out", "my runs/first try.yaml"]) == 0
    train, chat = capsys.readouterr().out.splitlines()[-2:]
    assert shlex.split(train) == ["fastft", "fit", "--config", "my runs/first try.yaml"]
    assert shlex.split(chat)[:3] == ["fastft", "chat", "runs/first try/last.ckpt"]
    assert f"# Command: {train.strip()}\n" in (rows / "my runs/first try.yaml").read_text()


def test_a_file_is_replaced_only_if_asked_for(rows, answer):
    (rows / "config.yaml").write_text("mine")
    status, text = answer(WORDS)
    assert (status, (rows / "config.yaml").read_text()) == (1, "mine")
    assert "--overwrite" in text


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--model", "nobody/nothing"], "config.json is enough"),
        (["--model", "nothing/"], "there is nothing at nothing/"),
        (["--data", "pairs.jsonl"], "--config dpo_qwen3_8b --model.model " + WORDS[WORDS.index("--model") + 1]),
        (["--data", "labelled.jsonl"], "--data.paths labelled.jsonl --model.loss kto"),
        (["--gpu", "3090"], "RTX 4090"),
    ],
)
def test_mistakes_say_what_to_do(words, part, rows, answer, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (rows / "pairs.jsonl").write_text(json.dumps({"prompt": "a", "chosen": "b", "rejected": "c" * 9}) + "\n")
    (rows / "labelled.jsonl").write_text(json.dumps({"prompt": "a", "completion": "b", "label": True}) + "\n")
    status, text = answer([*WORDS[:5], *words])
    assert status == 1
    assert part in text


def test_advice_on_the_data_names_options_that_init_takes(rows, answer):
    lines = [ROW] * 300 + [{**ROW, "answer": 1}] * 10 + [{**ROW, "note": "x"}] * 10
    (rows / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    status, text = answer(WORDS)
    assert (status, "raise --max-reject-share" in text, "--extra-columns ignore" in text) == (1, True, True)
    status, text = answer([*WORDS, "--extra-columns", "ignored"])
    assert (status, "--extra-columns must be" in text) == (1, True)
    status, text = answer([*WORDS, "--max-reject-share", "2"])
    assert (status, "--max-reject-share must be" in text) == (1, True)
    assert main([*WORDS, "--max-reject-share", "0.1", "--extra-columns", "ignore"]) == 0
    data = read()["data"]["init_args"]
    assert (data["max_reject_share"], data["extra_columns"]) == (0.1, "ignore")
    assert data["columns"] == {"prompt": "question", "completion": "answer"}
    assert FastFTCLI(["--config", "config.yaml"], run=False).datamodule.max_tokens == 512


def test_a_cache_that_cannot_be_written_is_replaced_as_advised(rows, answer):
    (rows / "cache").write_text("a file")
    status, text = answer(WORDS)
    assert (status, "--cache-dir null" in text) == (1, True)
    assert main([*WORDS, "--cache-dir", "null"]) == 0
    assert read()["data"]["init_args"]["cache_dir"] is None


def test_chat_template_is_taken_as_advised(rows, demo_files, answer):
    tokenizer = AutoTokenizer.from_pretrained(demo_files.model)
    template, tokenizer.chat_template = tokenizer.chat_template, None
    tokenizer.save_pretrained("model")
    (rows / "chat.jinja").write_text(template)
    turns = [{"role": "user", "content": "Eggs?"}, {"role": "assistant", "content": "24"}]
    (rows / "train.jsonl").write_text((json.dumps({"messages": turns}) + "\n") * 30)
    words = WORDS[:5]
    status, text = answer(words)
    assert (status, "--chat-template" in text) == (1, True)
    assert main([*words, "--chat-template", "chat.jinja"]) == 0
    assert read()["data"]["init_args"]["chat_template"] == "chat.jinja"


def test_tokens_that_a_cut_drops_are_counted():
    lengths = Lengths(np.array([100, 4996]), 0, "")
    told = describe_lengths(lengths, count_steps(lengths.length_N, max_tokens=4096))
    assert "1 longer than a pack, cut: 17.7% of" in told


def test_packs_and_steps_follow_the_lengths():
    long_N = np.array([100] * 1000 + [9000])
    assert choose_pack_tokens(long_N, most=40_960) == 9216
    assert choose_pack_tokens(long_N, most=4096) == 4096
    assert count_steps(long_N, max_tokens=4096).num_cut == 1
    many = count_steps(np.full(100_000, 500), max_tokens=8192)
    assert (many.accumulate, many.val_share) == (4, 0.01)
    few = count_steps(np.full(5, 500), max_tokens=8192)
    assert (few.accumulate, few.val_share, few.num_packs) == (1, 0.0, 1)
