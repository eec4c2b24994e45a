"""From data to a served model, by the commands themselves: init, fit, chat, eval, export and push on one tiny run."""

import io
import json
import os
import re
import stat
import sys
from importlib.metadata import version
from unittest.mock import create_autospec

import pytest
import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from lightning_fastft.cli import push
from lightning_fastft.cli.command import main
from lightning_fastft.cli.export import WITHOUT_GGUF
from lightning_fastft.cli.trained.opening import Request, open_trained
from lightning_fastft.hf.generation import answer_prompts, encode_prompt
from lightning_fastft.training.fine_tuner import FineTuner

QUESTION = "Ada has 3 lamps. Day 1: finds 2. How many lamps does Ada have now?"


@pytest.fixture(scope="module")
def run(tmp_path_factory, demo_files):
    """The folder of a run: what init wrote and fit trained."""
    folder = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(demo_files.model))
        model.save_pretrained("base")
        AutoTokenizer.from_pretrained(demo_files.model).save_pretrained("base")
        assert main(["init", "--model", "base", "--data", str(demo_files.train)]) == 0
        config = yaml.safe_load((folder / "config.yaml").read_text())
        assert config["trainer"]["callbacks"][-1]["init_args"]["dirpath"] == "runs/config"
        silent = ["--trainer.logger", "false", "--data.show_progress", "false", "--trainer.max_epochs", "2"]
        assert main(["fit", "--config", "config.yaml", "--model.learning_rate", "1e-2", *silent]) == 0
    return folder


@pytest.fixture
def here(run, monkeypatch):
    """The folder of the run, as the current one."""
    monkeypatch.chdir(run)
    monkeypatch.setenv("XDG_CACHE_HOME", str(run / "cache"))
    return run


@pytest.fixture
def say(monkeypatch, capsys):
    """Return a function that runs chat on lines of a pipe and returns what it wrote."""

    def run(lines, *words):
        monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
        capsys.readouterr()
        assert main(["chat", *words, "--max-new-tokens", "5", "--temperature", "0", "--device", "cpu"]) == 0
        return capsys.readouterr().out

    return run


CHECKPOINT = "runs/config/last.ckpt"


@pytest.mark.slow(seconds=6)
def test_base_of_another_folder_is_named(run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert main(["export", str(run / CHECKPOINT), "out"]) == 1
    assert "add --base FOLDER" in capsys.readouterr().err
    for name, end in (("./nothing", "Correct --base."), ("owner/nothing", "or give a local folder.")):
        assert main(["export", str(run / CHECKPOINT), "out", "--base", name]) == 1
        text = capsys.readouterr().err.strip()
        assert "OptionError: --base: " in text
        assert text.endswith(end)
    assert main(["export", str(run / CHECKPOINT), "out", "--base", str(run / "base")]) == 0


def test_chat_answers_each_line_with_the_adapters(here, say):
    module = open_trained(Request(here / CHECKPOINT, torch.device("cpu"))).module
    talk = [{"role": "user", "content": QUESTION}]
    [first] = module.generate([talk], max_new_tokens=5, do_sample=False)
    talk += [{"role": "assistant", "content": first}, {"role": "user", "content": "And now?"}]
    [second] = module.generate([talk], max_new_tokens=5, do_sample=False)
    assert say(f"{QUESTION}\n\nAnd now?\n/quit\nnever\n", CHECKPOINT) == f"{first}\n{second}\n"
    # The base alone says something else, so the adapters are there.
    assert say(f"{QUESTION}\n", "base") != f"{first}\n"
    begun = [{"role": "system", "content": "Be short."}, talk[0]]
    [short] = module.generate([begun], max_new_tokens=5, do_sample=False)
    assert say(f"{QUESTION}\n", CHECKPOINT, "--system", "Be short.") == f"{short}\n"


def test_reset_forgets_and_help_lists(here, say, monkeypatch):
    asked = []
    monkeypatch.setattr(FineTuner, "generate", lambda module, prompts, **options: asked.extend(prompts) or ["a"])
    text = say("one\n/reset\ntwo\n/help\n/exit\n/quit\n", CHECKPOINT, "--system", "Be short.")
    said = [[turn["content"] for turn in talk] for talk in asked]
    # A pipe may hold any text.
    assert said == [["Be short.", "one"], ["Be short.", "two"], ["Be short.", "two", "a", "/exit"]]
    assert "/reset" in text


def test_chat_in_a_terminal_ends_with_ctrl_d_on_a_line_of_its_own(here, monkeypatch, capsys):
    """In a pseudo-terminal, whose line discipline turns Ctrl-D into the end of the input."""
    monkeypatch.setattr(FineTuner, "generate", lambda module, prompts, **options: ["a"])
    ours, theirs = os.openpty()
    os.write(ours, b"hello\n/exit\n\x04")
    with open(theirs, encoding="utf-8") as terminal:
        monkeypatch.setattr(sys, "stdin", terminal)
        assert main(["chat", CHECKPOINT, "--device", "cpu"]) == 0
    os.close(ours)
    greeting, first, second, third = capsys.readouterr().out.split("> ")
    assert "/help lists the commands" in greeting
    assert greeting.startswith(f"{CHECKPOINT}: ")
    assert (first, third) == ("\n", "\n")
    assert "no command /exit" in second


def test_plain_chat_continues_each_line(here, say, answer):
    module = open_trained(Request(here / CHECKPOINT, torch.device("cpu"))).module
    [text] = module.generate([QUESTION], max_new_tokens=5, do_sample=False)
    assert say(f"{QUESTION}\n", CHECKPOINT, "--plain") == f"{text}\n"
    assert "--plain uses none" in answer(["chat", CHECKPOINT, "--plain", "--system", "x"])[1]


def test_an_answer_cannot_steer_the_terminal(here, say, monkeypatch):
    def generate(module, prompts, *, streamer, **options):
        streamer.on_finalized_text("a\x1b[2J\nb")
        return ["a"]

    monkeypatch.setattr(FineTuner, "generate", generate)
    assert say("hello\n", CHECKPOINT) == "a\\x1b[2J\nb\n"


def test_a_line_that_is_not_utf8_is_answered(here, monkeypatch):
    asked = []
    monkeypatch.setattr(FineTuner, "generate", lambda module, prompts, **options: asked.extend(prompts) or ["a"])
    lines = io.TextIOWrapper(io.BytesIO(b"caf\xe9\n"), encoding="utf-8", errors="surrogateescape")
    monkeypatch.setattr(sys, "stdin", lines)
    assert main(["chat", CHECKPOINT, "--device", "cpu"]) == 0
    assert asked == [[{"role": "user", "content": "caf\ufffd"}]]


def test_without_a_chat_template_a_line_is_continued(here, say, answer, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained("base")
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    AutoModelForCausalLM.from_pretrained("base").save_pretrained(tmp_path)
    module = open_trained(Request(tmp_path, torch.device("cpu"))).module
    [text] = module.generate(["one two"], max_new_tokens=5, do_sample=False)
    assert say("one two\n", str(tmp_path)) == f"{text}\n"
    assert "needs a chat template" in answer(["chat", str(tmp_path), "--system", "x"])[1]


@pytest.mark.slow(seconds=2)
def test_eval_is_the_validation_of_the_run(here, demo_files, capsys):
    words = ["eval", CHECKPOINT, "--data", str(demo_files.validation), "--max-tokens", "512", "--device", "cpu"]
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    config = ["--config", "config.yaml", "--ckpt_path", CHECKPOINT, "--data.test_paths", str(demo_files.validation)]
    assert main(["test", *config, "--trainer.logger", "false"]) == 0
    [loss] = [
        float(line.split("│")[2])
        for line in capsys.readouterr().out.splitlines()
        if line.startswith("│") and "loss" in line
    ]
    assert found["loss"] == pytest.approx(loss, abs=1e-5)
    assert found["examples"] == 4
    assert found["perplexity"] == pytest.approx(torch.tensor(found["loss"]).exp().item(), rel=1e-5)


def test_advice_of_eval_names_options_that_it_takes(here, answer, tmp_path, monkeypatch):
    rows = [{"prompt": QUESTION, "completion": "5"}] * 9
    data = tmp_path / "test.jsonl"

    def evaluate(rows, *words):
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return answer(["eval", CHECKPOINT, "--data", str(data), "--device", "cpu", *words])

    long = [*rows, {"prompt": QUESTION, "completion": "word " * 90}]
    short_pack = ["--max-tokens", "64"]
    status, text = evaluate(long, *short_pack)
    assert (status, "use --too-long truncate" in text, "Raise --max-tokens to" in text) == (1, True, True)
    assert evaluate(long, *short_pack, "--too-long", "truncate")[0] == 0
    status, text = evaluate([*rows, {"prompt": 1}])
    assert (status, "raise --max-reject-share" in text) == (1, True)
    assert evaluate([*rows, {"prompt": 1}], "--max-reject-share", "0.2")[0] == 0
    for option in ("--too-long", "--extra-columns"):
        status, text = evaluate(rows, option, "no")
        assert (status, f"{option} must be" in text) == (1, True)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    status, text = evaluate(rows)
    assert (status, "--cache-dir null" in text) == (1, True)
    assert evaluate(rows, "--cache-dir", "null")[0] == 0


def test_exact_match_counts_answers_that_are_equal_as_text(here, tmp_path, capsys, monkeypatch):
    rows = [
        {"messages": [{"role": "user", "content": f"Say {text}"}, {"role": "assistant", "content": text}]}
        for text in ("one", "two", "three")
    ]
    (tmp_path / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked = []

    def answer_prompts(model, *, tokenizer, prompts, max_new_tokens):
        asked.extend(map(tokenizer.decode, prompts))
        return ["two" if "two" in text else " one\n" if "one" in text else "3" for text in asked[-len(prompts) :]]

    monkeypatch.setattr("lightning_fastft.hf.generation.answer_prompts", answer_prompts)
    words = ["eval", CHECKPOINT, "--data", str(tmp_path / "test.jsonl"), "--exact-match", "--json", "--device", "cpu"]
    assert main([*words, "--batch-size", "2"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["answered"], found["exact_match"]) == (3, pytest.approx(2 / 3))
    assert "<|im_start|>user\nSay one<|im_end|>\n<|im_start|>assistant\n" in asked
    assert main([*words, "--limit", "1"]) == 0
    assert json.loads(capsys.readouterr().out)["answered"] == 1


def test_answers_are_those_of_generate(here):
    module = open_trained(Request(here / CHECKPOINT, torch.device("cpu"))).module
    ids = encode_prompt(module.tokenizer, [{"role": "user", "content": QUESTION}])
    short = ids[: len(ids) // 2]
    found = answer_prompts(module.model, tokenizer=module.tokenizer, prompts=[ids, short], max_new_tokens=5)
    texts = [[{"role": "user", "content": QUESTION}], module.tokenizer.decode(short)]
    assert found == [module.generate([text], max_new_tokens=5, do_sample=False)[0] for text in texts]


def test_tasks_go_to_lm_eval(here, monkeypatch, capsys, answer):
    monkeypatch.setattr("lightning_fastft.cli.eval.find_spec", lambda name: None)
    status, text = answer(["eval", CHECKPOINT, "--tasks", "arc_easy"])
    assert (status, "pip install 'lightning-fastft[eval]'" in text) == (1, True)
    asked = []

    class HFLM:
        def __init__(self, **options):
            asked.append(options)

    def simple_evaluate(*, model, tasks, limit):
        asked.append((type(model), tasks, limit))
        return {"results": {"arc_easy": {"alias": "arc_easy", "acc,none": 0.25}}}

    models = type(sys)("lm_eval.models.huggingface")
    models.HFLM = HFLM
    package = type(sys)("lm_eval")
    package.simple_evaluate = simple_evaluate
    for name, module in {"lm_eval": package, "lm_eval.models": models, models.__name__: models}.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr("lightning_fastft.cli.eval.find_spec", lambda name: object())
    assert main(["eval", CHECKPOINT, "--tasks", "arc_easy,piqa", "--limit", "2", "--device", "cpu"]) == 0
    assert "arc_easy acc,none: 0.2500" in capsys.readouterr().out
    assert asked[1] == (HFLM, ["arc_easy", "piqa"], 2)
    assert asked[0]["pretrained"].peft_config


def test_card_says_what_the_run_was(here, tmp_path, demo_files, capsys):
    assert main(["export", CHECKPOINT, str(tmp_path / "out")]) == 0
    card = (tmp_path / "out/README.md").read_text()
    _, head, body = card.split("---\n", 2)
    assert yaml.safe_load(head) == {
        "library_name": "peft",
        "pipeline_tag": "text-generation",
        "tags": ["lightning_fastft", "lora"],
    }
    assert "[More Information Needed]" not in card
    assert "LoRA adapters for the local model `base`" in body
    [trained] = re.findall(r"training \| train.jsonl \(40 rows\): (\d+) examples, [\d,]+ tokens", body)
    [held_out] = re.findall(r"validation \| held out of the training data: (\d+) examples", body)
    assert int(trained) + int(held_out) == 40
    assert "| learning_rate | 0.01 |" in body
    assert "| val_loss | " in body
    # Wheels of the registry have the CUDA version in torch.__version__ only.
    assert f"| torch | {version('torch')} |" in body
    assert "fastft fit --config config.yaml --model.learning_rate 1e-2" in body
    # No path of this machine.
    assert str(demo_files.train.parent) not in card
    assert str(here) not in card


def test_the_command_for_vllm_names_the_base_and_the_adapters(here, tmp_path, capsys):
    assert main(["export", CHECKPOINT, str(tmp_path / "a"), "--for", "vllm"]) == 0
    text = capsys.readouterr().out
    assert "vllm serve base --enable-lora" in text
    assert f"--lora-modules a={tmp_path}/a" in text


def test_gguf_is_made_by_llama_cpp_or_its_command_is_told(here, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert main(["export", CHECKPOINT, str(tmp_path / "a"), "--ollama"]) == WITHOUT_GGUF
    text = capsys.readouterr().out
    steps = [
        f"python llama.cpp/convert_hf_to_gguf.py {tmp_path}/a --outfile {tmp_path}/a/a-q8_0.gguf --outtype q8_0",
        f"ollama create a -f {tmp_path}/a/Modelfile",
    ]
    assert [line.strip() for line in text.splitlines() if line.startswith("  ")][-2:] == steps
    assert "FROM ./a-q8_0.gguf" in (tmp_path / "a/Modelfile").read_text()
    script = tmp_path / "convert_hf_to_gguf.py"
    script.write_text(
        "import json, pathlib, sys\n"
        "folder, _, out, _, kind = sys.argv[1:]\n"
        "assert (pathlib.Path(folder) / 'model.safetensors').is_file(), 'no weights'\n"
        "assert kind != 'f32', 'too large'\n"
        "pathlib.Path(out).write_text(kind)\n"
    )
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    words = ["--llama-cpp", str(tmp_path)]
    assert main(["export", CHECKPOINT, str(tmp_path / "b"), "--gguf", "bf16", *words]) == 0
    assert (tmp_path / "b/b-bf16.gguf").read_text() == "bf16"
    assert not (tmp_path / "b/Modelfile").exists()
    capsys.readouterr()
    assert main(["export", "base", str(tmp_path / "c"), "--gguf", "f32", *words]) == 1
    assert "too large" in capsys.readouterr().err


def test_push_shows_and_uploads_only_if_asked(here, tmp_path, capsys, monkeypatch, answer):
    import huggingface_hub

    api = create_autospec(huggingface_hub.HfApi, instance=True)
    api.create_repo.return_value = huggingface_hub.RepoUrl("https://huggingface.co/me/mine")
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: api)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: "hf_x")
    assert main(["push", CHECKPOINT, "me/mine"]) == 0
    text = capsys.readouterr().out
    assert "adapter_model.safetensors" in text
    assert "# mine" in text
    assert "Nothing was uploaded" in text
    assert api.mock_calls == []

    main(["export", CHECKPOINT, str(tmp_path / "out")])
    (tmp_path / "out/.hidden").touch()
    assert main(["push", str(tmp_path / "out"), "me/mine", "--yes", "--private"]) == 0
    api.create_repo.assert_called_once_with("me/mine", private=True, exist_ok=True)
    (repository, operations), _ = api.create_commit.call_args
    sent = {operation.path_in_repo: operation for operation in operations}
    assert repository == "me/mine"
    assert {"README.md", "adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= set(sent)
    assert ".hidden" not in sent
    assert b"| learning_rate | 0.01 |" in sent["README.md"].path_or_fileobj

    # A name without owner is one of the own account, which the hub answers with.
    assert main(["push", str(tmp_path / "out"), "mine", "--yes"]) == 0
    (repository, operations), _ = api.create_commit.call_args
    (card,) = [operation.path_or_fileobj for operation in operations if operation.path_in_repo == "README.md"]
    assert repository == "me/mine"
    assert b'PeftModel.from_pretrained(base, "me/mine")' in card

    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    assert "hf auth login" in answer(["push", str(tmp_path / "out"), "me/mine", "--yes"])[1]


@pytest.mark.parametrize(("words", "title"), [([], "# base, LoRA"), (["--merge"], "# base, LoRA merged")])
def test_card_of_an_exported_folder_is_titled_by_base_and_method(words, title, here, tmp_path, capsys):
    folder = tmp_path / "merged"
    assert main(["export", CHECKPOINT, str(folder), *words]) == 0
    assert title in (folder / "README.md").read_text().splitlines()
    capsys.readouterr()
    assert main(["push", str(folder), "me/mine"]) == 0
    assert title in capsys.readouterr().out.splitlines()
    (folder / "README.md").unlink()
    assert main(["push", str(folder), "me/mine"]) == 0
    text = capsys.readouterr().out
    assert "# mine" in text.splitlines()
    # The folder's name is not that of the base.
    assert "merged`" not in text


def test_push_fills_the_empty_card_of_peft(here, tmp_path, capsys):
    main(["export", CHECKPOINT, str(tmp_path / "out")])
    (tmp_path / "out/README.md").write_text("# Model Card for Model ID\n[More Information Needed]\n")
    capsys.readouterr()
    assert main(["push", str(tmp_path / "out"), "me/mine"]) == 0
    text = capsys.readouterr().out
    assert "Needed" not in text
    assert "r 16; lora_alpha 32" in text
    (tmp_path / "out/README.md").write_text("# Mine\n")
    assert main(["push", str(tmp_path / "out"), "me/mine", "--dry-run", "--yes"]) == 0
    assert "# Mine" in capsys.readouterr().out


def test_sizes_are_readable():
    assert push._size(2_000_000) == "1.9 MiB"
