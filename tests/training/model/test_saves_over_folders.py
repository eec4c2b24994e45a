"""Files of a trained model that are written to a folder with earlier files."""

import os

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from lightning_fastft.core.errors import CheckpointNotSavedError, OptionError
from lightning_fastft.hf import companions, export
from lightning_fastft.training import reward
from tests.support.fine_tuners import CONFIG, LORA, tuner


def built(kind, *, shift=0.0):
    made = tuner(kind)
    made.configure_model()
    with torch.no_grad():
        made.model.get_input_embeddings().weight.add_(shift)
    return made


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize(("first", "second"), [("lora", "full"), ("full", "lora")])
def test_adapters_and_a_whole_model_are_not_mixed_in_a_folder(tmp_path, first, second):
    built(first).save_pretrained(str(tmp_path / "out"))
    before = contents(tmp_path / "out")
    with pytest.raises(OptionError, match=r"Save .* to another folder"):
        built(second).save_pretrained(str(tmp_path / "out"))
    assert contents(tmp_path / "out") == before


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_a_later_save_of_the_same_kind_replaces_the_earlier_one(tmp_path, kind):
    built(kind).save_pretrained(str(tmp_path))
    later = built(kind, shift=1.0)
    with torch.no_grad():
        for parameter in later.model.parameters():
            parameter.add_(1.0)
    later.save_pretrained(str(tmp_path))
    (file,) = tmp_path.glob("*.safetensors")
    held = [value.flatten() for value in load_file(file).values()]
    assert float(torch.cat(held).mean()) > 0.9


@pytest.mark.parametrize("is_sharded_first", [True, False])
def test_weights_of_a_save_in_other_shards_are_not_read(tmp_path, monkeypatch, is_sharded_first):
    save = PreTrainedModel.save_pretrained

    def save_in_shards(model, folder, **options):
        save(model, folder, max_shard_size="10KB", **options)

    def save_model(made, *, is_sharded):
        with monkeypatch.context() as patched:
            if is_sharded:
                patched.setattr(PreTrainedModel, "save_pretrained", save_in_shards)
            made.save_pretrained(str(tmp_path))

    save_model(built("full"), is_sharded=is_sharded_first)
    later = built("full", shift=1.0)
    save_model(later, is_sharded=not is_sharded_first)
    is_index = (tmp_path / "model.safetensors.index.json").exists()
    assert is_index is (not is_sharded_first)
    assert (tmp_path / "model.safetensors").exists() is is_sharded_first
    read = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto").state_dict()
    for name, value in later.model.state_dict().items():
        assert torch.equal(read[name], value), name


@pytest.mark.parametrize("error", [OSError("No space left"), SafetensorError("I/O error: No space left")])
def test_a_save_of_all_weights_that_fails_leaves_the_earlier_one(tmp_path, monkeypatch, error):
    built("full").save_pretrained(str(tmp_path / "out"))
    before = contents(tmp_path / "out")
    save = PreTrainedModel.save_pretrained

    def fail_late(model, folder, **options):
        save(model, folder, **options)
        raise error

    monkeypatch.setattr(PreTrainedModel, "save_pretrained", fail_late)
    with pytest.raises(CheckpointNotSavedError, match="No space left"):
        built("full", shift=1.0).save_pretrained(str(tmp_path / "out"))
    assert contents(tmp_path / "out") == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_a_save_that_ends_before_its_last_file_changes_nothing(tmp_path, kind, monkeypatch):
    """The tokenizer is the last one."""
    made = built(kind)
    made.save_pretrained(str(tmp_path / "out"))
    before = contents(tmp_path / "out")

    def fill(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(companions, "write_companions", fill)
    with pytest.raises(CheckpointNotSavedError, match="No space left"):
        built(kind, shift=1.0).save_pretrained(str(tmp_path / "out"))
    assert contents(tmp_path / "out") == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_reward_model_is_never_saved_without_its_head(tmp_path, monkeypatch):
    """PEFT would read the adapters with a new head."""
    made = reward.RewardTuner(CONFIG, init="random", dtype="float32", lora=LORA)
    made.configure_model()

    def fill(*_, **__):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(reward, "_add_head_to_adapters", fill)
    with pytest.raises(CheckpointNotSavedError, match="No space left"):
        made.save_pretrained(str(tmp_path / "out"))
    assert list(tmp_path.iterdir()) == []


def test_files_are_on_the_disk_before_they_get_their_names(tmp_path, monkeypatch):
    """Otherwise a power failure leaves empty files, and the old ones are gone."""
    synced = set()
    fsync, replace = os.fsync, os.replace

    def note(handle):
        synced.add(os.fstat(handle).st_ino)
        fsync(handle)

    def check(file, target):
        assert os.stat(file).st_ino in synced
        replace(file, target)

    monkeypatch.setattr(os, "fsync", note)
    monkeypatch.setattr(os, "replace", check)
    built("lora").save_pretrained(str(tmp_path / "out"))
    with export.writing(tmp_path / "new") as part:
        (part / "a").write_text("a")
        number = (part / "a").stat().st_ino
    assert number in synced
