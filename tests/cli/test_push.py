"""fastft push: what is refused before and after the hub is asked, with a hub that answers from here."""

import json
import tempfile
from unittest.mock import create_autospec

import huggingface_hub
import pytest
from huggingface_hub.hf_api import ModelInfo

from lightning_fastft.cli import main
from lightning_fastft.cli.trained import writing as cli_writing
from lightning_fastft.hf.export import writing

ADAPTERS = ("adapter_config.json", "adapter_model.safetensors")


@pytest.fixture
def adapters(tmp_path):
    """A folder of adapters, as far as push reads it."""
    folder = tmp_path / "my adapters ü"
    folder.mkdir()
    (folder / ADAPTERS[0]).write_text(json.dumps({"base_model_name_or_path": "me/base", "r": 4}))
    (folder / ADAPTERS[1]).write_bytes(b"weights")
    return folder


@pytest.fixture
def hub(monkeypatch):
    """The hub's client, which finds a repository without files."""
    api = create_autospec(huggingface_hub.HfApi, instance=True)
    api.create_repo.return_value = huggingface_hub.RepoUrl("https://huggingface.co/me/mine")
    api.model_info.return_value = ModelInfo(id="me/mine", private=True, siblings=[])
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: api)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: "hf_x")
    return api


def repository_of(*names, private=False):
    return ModelInfo(id="me/mine", private=private, siblings=[{"rfilename": name} for name in names])


def test_private_never_uploads_to_a_public_repository(adapters, hub, answer):
    hub.model_info.return_value = repository_of()
    status, text = answer(["push", str(adapters), "me/mine", "--yes", "--private"])
    assert status == 1
    assert "is public" in text
    hub.create_commit.assert_not_called()
    hub.model_info.return_value = repository_of(private=True)
    assert main(["push", str(adapters), "me/mine", "--yes", "--private"]) == 0


@pytest.mark.parametrize(
    "other", ["model.safetensors", "model.safetensors.index.json", "model-00001-of-00002.safetensors"]
)
def test_files_of_another_model_are_not_mixed_with_the_new_ones(other, adapters, hub, answer):
    hub.model_info.return_value = repository_of(".gitattributes", "README.md", "config.json", other)
    status, text = answer(["push", str(adapters), "me/mine", "--yes"])
    assert status == 1
    assert other in text
    hub.create_commit.assert_not_called()
    # The same model again, with files beside it that nothing loads.
    hub.model_info.return_value = repository_of(*ADAPTERS, "eval.json", "old/model.safetensors", "model-q8_0.gguf")
    assert main(["push", str(adapters), "me/mine", "--yes"]) == 0


def test_adapters_on_the_hub_would_be_loaded_in_place_of_a_whole_model(tmp_path, hub, answer):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    hub.model_info.return_value = repository_of(*ADAPTERS)
    assert "adapter_config.json" in answer(["push", str(tmp_path), "me/mine", "--yes"])[1]
    hub.create_commit.assert_not_called()


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("Error while uploading 'adapter_model.safetensors' to the Hub."),
        ValueError("Invalid metadata in README.md."),
        ConnectionResetError("Connection reset by peer"),
    ],
)
def test_an_upload_that_fails_halfway_says_what_the_repository_has(error, adapters, hub, answer):
    hub.create_commit.side_effect = error
    status, text = answer(["push", str(adapters), "me/mine", "--yes"])
    assert status == 1
    assert str(error) in text
    assert "all files or none" in text


def test_a_hub_out_of_reach_is_an_error_in_words(adapters, answer, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: "hf_x")
    status, text = answer(["push", str(adapters), "me/mine", "--yes"])
    assert status == 1
    assert text.startswith("error: FastFTError: The upload to me/mine failed:")


@pytest.mark.parametrize(
    "words", [["--base", "me/base"], ["--tokenizer", "x"], ["--device", "cpu"], ["--accept-other-base"]]
)
def test_options_without_effect_on_a_folder_are_refused(words, adapters, answer):
    status, text = answer(["push", str(adapters), "me/mine", *words])
    assert status == 1
    assert f"{words[0]} would have no effect" in text


def test_a_missing_login_is_told_before_a_checkpoint_is_read(tmp_path, monkeypatch, answer):
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    (tmp_path / "last.ckpt").write_bytes(b"no checkpoint")
    assert "hf auth login" in answer(["push", str(tmp_path / "last.ckpt"), "me/mine", "--yes"])[1]


def test_a_folder_without_weights_is_refused(adapters, answer):
    (adapters / ADAPTERS[1]).unlink()
    assert "has no weights" in answer(["push", str(adapters), "me/mine"])[1]
    (adapters / ADAPTERS[1]).symlink_to("nowhere")
    assert "has no weights" in answer(["push", str(adapters), "me/mine"])[1]


def test_a_missing_shard_is_named(tmp_path, answer):
    shards = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict(zip("ab", shards))}))
    (tmp_path / shards[0]).touch()
    assert f"lacks {shards[1]}" in answer(["push", str(tmp_path), "me/mine"])[1]
    (tmp_path / shards[1]).touch()
    assert main(["push", str(tmp_path), "me/mine"]) == 0


def test_a_gguf_file_that_only_the_modelfile_has_is_named(adapters, capsys):
    (adapters / "Modelfile").write_text('# FROM ./other.gguf\nFROM ./my-f16.gguf\nTEMPLATE """FROM x.gguf here"""\n')
    assert main(["push", str(adapters), "me/mine"]) == 0
    assert "Modelfile names my-f16.gguf, which " in capsys.readouterr().out
    (adapters / "my-f16.gguf").write_bytes(b"weights")
    assert main(["push", str(adapters), "me/mine"]) == 0
    assert "Modelfile names" not in capsys.readouterr().out


def test_a_card_in_another_encoding_is_refused(adapters, answer):
    (adapters / "README.md").write_bytes("# Modèle".encode("latin-1"))
    assert "is not UTF-8" in answer(["push", str(adapters), "me/mine"])[1]


def test_a_sharded_checkpoint_is_exported_first(tmp_path, answer):
    # The folder of a run of fastft_fsdp. An empty meta.pt is a damaged one.
    (tmp_path / "meta.pt").touch()
    status, text = answer(["push", str(tmp_path), "me/mine"])
    assert status == 1
    assert "not the folder of a model" not in text
    assert "is damaged" in text


@pytest.mark.parametrize(
    ("words", "change"),
    [
        (["--dry-run", "--yes"], "Remove --dry-run"),
        (["--dry-run"], "Give --yes in place of --dry-run"),
        ([], "Add --yes"),
    ],
)
def test_nothing_is_uploaded_in_a_dry_run(words, change, adapters, hub, capsys):
    assert main(["push", str(adapters), "me/mine", *words]) == 0
    assert f"{change} to upload" in capsys.readouterr().out
    assert hub.mock_calls == []


@pytest.mark.parametrize("content", ["{", "[]"])
@pytest.mark.parametrize("command", [["push"], ["chat"]])
def test_a_damaged_configuration_is_named(command, content, adapters, answer):
    (adapters / "README.md").write_text("# Mine")
    (adapters / ADAPTERS[0]).write_text(content)
    status, text = answer([*command, str(adapters), *(["me/mine"] if command == ["push"] else [])])
    assert status == 1
    assert f"{ADAPTERS[0]} " in text
    assert "JSON" in text


def test_a_full_temporary_folder_is_named_with_the_variable_that_moves_it(tmp_path, monkeypatch, answer):
    def fill(request, folder, *, title):
        with writing(folder):
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(cli_writing, "write_trained", fill)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "last.ckpt").write_bytes(b"not read")
    status, text = answer(["push", str(tmp_path / "last.ckpt"), "me/mine"])
    assert status == 1
    assert f"failed in {tmp_path}: [Errno 28] No space left" in text
    assert "TMPDIR" in text
    assert [path.name for path in tmp_path.iterdir()] == ["last.ckpt"]
