"""``~`` is the home folder, also where no shell has expanded it: ``--out=~/a``, or a path of a config."""

import json

import pytest

from lightning_fastft.cli import main
from lightning_fastft.cli.bench import run_bench
from lightning_fastft.cli.export import _parse_args as parse_export
from lightning_fastft.core.checks import local_path
from lightning_fastft.core.errors import OptionError
from lightning_fastft.hf.loading.source import ModelSource
from lightning_fastft.training.datamodule import PackedDataModule
from tests.support.fine_tuners import word_tokenizer
from tests.support.sizes import sizes

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
