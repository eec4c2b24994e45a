"""``~`` is the home folder, also where no shell has expanded it: ``--out=~/a``, or a path of a config."""

import json

import pytest
import torch

from lightning_fastft import RunReport
from lightning_fastft.cli import main
from lightning_fastft.cli.bench import run_bench
from lightning_fastft.cli.export import _parse_args as parse_export
from lightning_fastft.core.checks import local_path
from lightning_fastft.core.errors import DataError, OptionError
from lightning_fastft.hf.loading.source import ModelSource, load_given_tokenizer
from lightning_fastft.packing.tokens.chat import read_template
from lightning_fastft.training.datamodule import PackedDataModule
from lightning_fastft.training.distillation import DistillationTuner
from lightning_fastft.training.fine_tuner import FineTuner
from tests.support.fine_tuners import word_tokenizer
from tests.support.sizes import sizes
from tests.support.training_parts import quiet_trainer

CONFIG = sizes(model_type="llama", vocab=256, width=32, inner=64, layers=1, heads=2, key_heads=2)


@pytest.fixture
def home(folder, monkeypatch):
    """The home folder, in the current one, with the configuration of a model and rows."""
    home = folder / "home"
    (home / "model").mkdir(parents=True)
    (home / "model/config.json").write_text(json.dumps(CONFIG))
    (home / "rows.jsonl").write_text('{"text": "a"}\n' * 20)
    monkeypatch.setenv("HOME", str(home))
    yield home
    assert not (folder / "~").exists()


def test_init_reads_and_writes_in_the_home_folder(home, capsys):
    words = ["--model=~/model", "--data=~/rows.jsonl", "--cache-dir=~/cache"]
    assert main(["init", *words, "--out=~/a.yaml"]) == 0
    assert (home / "a.yaml").is_file()
    assert "model: ~/model" in (home / "a.yaml").read_text()
    assert f"--config {home}/a.yaml" in capsys.readouterr().out


def test_a_model_of_the_home_folder_is_read(home):
    assert ModelSource("~/model").config.hidden_size == 32
    assert local_path("~/last.ckpt", use="read from") == home / "last.ckpt"


def test_export_writes_to_the_home_folder(home, monkeypatch):
    monkeypatch.setattr("lightning_fastft.cli.export.read_request", lambda *_, **__: None)
    (home / "convert_hf_to_gguf.py").touch()
    given = parse_export(["x.ckpt", "~/out", "--gguf", "f16", "--llama-cpp=~"])
    assert given.out == home / "out"
    assert given.llama_cpp == str(home)
    assert parse_export(["x.ckpt", "out"]).llama_cpp == ""


def test_bench_gives_its_folder_on(home, monkeypatch):
    calls = []

    def run(command, **_):
        calls.append(command)
        raise OptionError("not run")

    monkeypatch.setattr("subprocess.run", run)
    with pytest.raises(OptionError, match="not run"):
        run_bench(["--workload", "tiny", "--out=~/results"])
    assert calls[0][-2:] == ["--out", str(home / "results")]


def test_reports_are_read_and_written_in_the_home_folder(home, answer):
    (home / "x").touch()
    assert answer(["report", "~/x", "~/y", "--out=~/r.html"])[1].count("~") == 0


def test_cached_and_rejected_rows_are_in_the_home_folder(home):
    (home / "rows.jsonl").write_text('{"text": "a b"}\n' * 20 + '{"text": 3}\n')
    data = PackedDataModule(
        "~/rows.jsonl",
        tokenizer=word_tokenizer(),
        max_tokens=8,
        cache_dir="~/cache",
        rejected_path="~/out/bad.jsonl",
        max_reject_share=0.5,
    )
    data.setup("fit")
    assert (home / "out/bad.jsonl").is_file()
    assert list((home / "cache").iterdir())


def test_the_report_of_a_run_is_in_the_home_folder(home):
    assert RunReport("~/runs/a.html").json_path == home / "runs/a.json"


def test_a_tokenizer_and_a_chat_template_are_read_from_the_home_folder(home):
    word_tokenizer().save_pretrained(home / "tokens")
    (home / "chat.jinja").write_text("{{ messages }}")
    assert load_given_tokenizer("~/tokens").eos_token == "<eos>"
    assert read_template(word_tokenizer(), "~/chat.jinja") == "{{ messages }}"


def test_adapters_are_written_to_and_read_from_the_home_folder(home):
    options = {"init": "random", "dtype": "float32"}
    first = FineTuner("~/model", lora={"r": 2}, **options)
    first.configure_model()
    first.save_pretrained("~/adapters")
    assert (home / "adapters/adapter_config.json").is_file()
    FineTuner("~/model", adapter="~/adapters", accept_other_base=True, **options).configure_model()
    FineTuner(
        "~/model", lora={"r": 2}, frozen_adapters=["~/adapters"], accept_other_base=True, **options
    ).configure_model()


def test_a_teacher_is_read_from_and_stored_in_the_home_folder(home):
    teacher = FineTuner("~/model", init="random", dtype="float32")
    teacher.configure_model()
    teacher.save_pretrained("~/teacher")

    def train():
        student = DistillationTuner("~/model", init="random", dtype="float32", teacher="~/teacher", store="~/store")
        rows = [{"input_ids": list(range(3, 15))}] * 8
        data = PackedDataModule(rows, max_tokens=48, num_workers=0, cache_dir=None, num_proc=1)
        quiet_trainer(home / "run", max_steps=1, strategy="fastft").fit(student, data)

    train()
    assert list((home / "store").iterdir())
    # Another teacher in the same folder is not taken for the one of the store.
    with torch.no_grad():
        next(teacher.model.parameters()).add_(1)
    teacher.save_pretrained("~/teacher")
    with pytest.raises(DataError, match="teacher"):
        train()
