"""A source is named without being loaded, and an impossible one is refused."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import ClassVar

import huggingface_hub
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoConfig, PreTrainedTokenizerFast

from lightning_fastft.core.errors import MissingDependencyError, OptionError
from lightning_fastft.hf.loading.source import ModelSource, load_given_tokenizer
from lightning_fastft.training.datamodule import PackedDataModule
from lightning_fastft.training.fine_tuner import FineTuner
from tests.hf.loading.test_model import CONFIG, random_model
from tests.support.tiny_models import build_tiny


def test_sources_are_a_folder_a_file_a_dictionary_or_a_configuration(tmp_path):
    random_model().save_pretrained(tmp_path)
    random = {"init": "random"}
    sources = [
        ModelSource(str(tmp_path)),
        ModelSource(str(tmp_path), **random),
        ModelSource(str(tmp_path / "config.json"), **random),
        ModelSource(CONFIG, **random),
        ModelSource(AutoConfig.from_pretrained(tmp_path), **random),
    ]
    assert {source.vocab_size for source in sources} == {97}
    assert sources[2].load_tokenizer() is None
    assert sources[3].load_tokenizer() is None


@pytest.mark.parametrize("init", ["pretrained", "random"])
def test_a_folder_of_adapters_alone_is_refused_with_their_option(tmp_path, init):
    """Commands read the configuration of --base as for random weights."""
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    with pytest.raises(OptionError, match=r"holds PEFT adapters, not a model\. .*FineTuner\(adapter=\.\.\.\)"):
        _ = ModelSource(str(tmp_path), init=init).config


@pytest.mark.parametrize("family", ["qwen3", "llama", "gpt_oss"])
def test_folder_without_a_tokenizer_has_none(family, tmp_path):
    # transformers would make one without a vocabulary for the first two, and fail for the third.
    build_tiny(family).save_pretrained(tmp_path)
    assert ModelSource(str(tmp_path)).load_tokenizer() is None
    words = Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path)
    assert ModelSource(str(tmp_path)).load_tokenizer()("b")["input_ids"] == [1]


def test_an_option_that_names_no_tokenizer_is_refused(tmp_path):
    build_tiny("qwen3").save_pretrained(tmp_path)
    for name, said in (
        (tmp_path, "has no files of a tokenizer"),
        (tmp_path / "config.json", "has no files of a tokenizer"),
        (tmp_path / "nothing", "There is no folder or file .*Correct tokenizer"),
    ):
        data = PackedDataModule([{"text": "a b"}], tokenizer=str(name))
        data.trainer = SimpleNamespace(lightning_module=SimpleNamespace(tokenizer="that of the model"))
        for owner in (data, FineTuner(CONFIG, init="random", tokenizer=str(name))):
            with pytest.raises(OptionError, match=said):
                _ = owner.tokenizer


def test_impossible_sources_are_refused():
    with pytest.raises(OptionError, match="init='random'"):
        ModelSource(CONFIG)
    with pytest.raises(OptionError, match="init='random'"):
        ModelSource("somewhere/config.json")
    with pytest.raises(OptionError, match="'pretrained', 'random'"):
        ModelSource(CONFIG, init="zeros")
    with pytest.raises(OptionError, match="model_type"):
        _ = ModelSource({"vocab_size": 3}, init="random").config


class Hub(BaseHTTPRequestHandler):
    """Has the configuration of org/model."""

    asked: ClassVar[list[str]] = []

    def do_HEAD(self):
        self.asked.append(self.path)
        is_there = self.path == "/org/model/resolve/main/config.json"
        body = json.dumps(CONFIG).encode() if is_there else b""
        self.send_response(200 if is_there else 404)
        for key, value in {"ETag": '"1"', "X-Repo-Commit": "0" * 40, "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        if not is_there:
            self.send_header("X-Error-Code", "RepoNotFound")
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    do_GET = do_HEAD

    def log_message(self, *args):
        pass


def connect_hub(monkeypatch, port):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    template = f"http://127.0.0.1:{port}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A hub with an empty cache, asked from a folder that has folders of the owners' names."""
    Hub.asked.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    connect_hub(monkeypatch, server.server_port)
    monkeypatch.chdir(tmp_path)
    for name in ("org", "runs"):
        (tmp_path / name).mkdir()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_hub_id_is_read_where_a_folder_has_the_name_of_its_owner(hub, monkeypatch):
    assert ModelSource("org/model", init="random").config.vocab_size == CONFIG["vocab_size"]
    Hub.asked.clear()
    with pytest.raises(OptionError, match="not a local folder and is not a valid model identifier"):
        _ = ModelSource("runs/nothing").config
    assert any("runs/nothing" in path for path in Hub.asked)
    # What the cache has needs no hub.
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert ModelSource("org/model", init="random").config.vocab_size == CONFIG["vocab_size"]


def test_a_hub_that_cannot_be_reached_is_asked_once_for_a_name_below_a_folder(monkeypatch, tmp_path):
    (tmp_path / "runs").mkdir()
    monkeypatch.chdir(tmp_path)
    connect_hub(monkeypatch, 9)
    monkeypatch.setattr(huggingface_hub.utils._http.time, "sleep", lambda seconds: pytest.fail("asked again"))
    for read in (lambda: ModelSource("runs/nothing").config, ModelSource("runs/nothing").load_tokenizer):
        with pytest.raises(
            OptionError, match=r"no folder or file 'runs/nothing' .* and the hub cannot .* Correct model"
        ):
            read()


@pytest.mark.parametrize("name", ["./nothing", "nothing/", "runs/nothing/", "a/b/c"])
def test_paths_to_nothing_are_not_asked_of_the_hub(name):
    with pytest.raises(OptionError, match="There is no folder or file"):
        _ = ModelSource(name).config
    with pytest.raises(OptionError, match=r"There is no folder or file .*Correct model"):
        ModelSource(name).load_tokenizer()


def test_a_file_of_a_configuration_is_not_asked_of_the_hub():
    with pytest.raises(OptionError, match=r"no folder or file 'nothing\.json'"):
        _ = ModelSource("nothing.json", init="random").config


def test_configuration_given_is_not_changed():
    config = AutoConfig.for_model(**CONFIG)
    before = config.to_dict()
    random_model(config, dtype=torch.bfloat16)
    assert config.to_dict() == before


def test_a_configuration_that_cannot_be_read_is_an_answer(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "empty").mkdir()
    for name in (str(tmp_path / "empty"), "nobody/nothing"):
        with pytest.raises(OptionError, match=r"cannot be read: .* give a local folder"):
            _ = ModelSource(name).config


BPE = {"vocab.json": '{"a": 0}', "merges.txt": "#version: 0.2"}
OWN_CODE = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}


@pytest.mark.parametrize(
    ("files", "advice"),
    [
        (BPE, "Give a hub id or a folder with tokenizer.json"),
        ({"tokenizer.json": "{}", "tokenizer_config.json": json.dumps(OWN_CODE)}, "Load the tokenizer yourself"),
        ({"tokenizer.json": "{}", "tokenizer_config.json": "{bad"}, "Fetch its files again"),
    ],
    ids=["no tokenizer.json", "code of its own", "damaged"],
)
def test_a_tokenizer_that_cannot_be_read_names_its_folder(tmp_path, files, advice):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(OptionError, match=f"tokenizer of '{tmp_path}' cannot be read: .*{advice}"):
        load_given_tokenizer(str(tmp_path))


def test_missing_package_of_a_processor_is_named_in_one_sentence(tmp_path, monkeypatch):
    text = (
        "\nSomeProcessor requires the Torchvision library but it was not found. Check out the\ninstallation page: x\n"
    )

    def refuse(*_, **__):
        raise ImportError(text)

    monkeypatch.setattr("transformers.AutoProcessor.from_pretrained", refuse)
    random_model().save_pretrained(tmp_path)
    with pytest.raises(MissingDependencyError) as error:
        ModelSource(str(tmp_path)).load_processor()
    assert "but it was not found. Install what images need" in str(error.value)
