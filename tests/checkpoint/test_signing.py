"""With a key in the environment checkpoints are signed, and those that are not, or with another key, are refused."""

import json

import pytest
import torch

from lightning_fastft.checkpoint.files import RECORD, check_folder, commit_folder, load_file, newest_intact, save_file
from lightning_fastft.checkpoint.signing import KEY_VARIABLE
from lightning_fastft.core.errors import DamagedCheckpointError, UnsafeCheckpointError


def write(place):
    if place.suffix == ".ckpt":
        save_file({"a": 1}, place)
    else:
        place.mkdir()
        (place / "piece").write_bytes(b"x" * 100)
        commit_folder(place)


def read(place):
    return load_file(place) if place.suffix == ".ckpt" else check_folder(place)


@pytest.mark.parametrize("name", ["a.ckpt", "folder"])
@pytest.mark.parametrize(
    ("written", "present", "is_taken"),
    [
        ("key", "key", True), ("key", "", True), ("", "", True),
        ("key", "other", False), ("", "key", False),
    ],
)  # fmt: skip
def test_key_of_writer_and_reader_decide(tmp_path, monkeypatch, name, written, present, is_taken):
    monkeypatch.setenv(KEY_VARIABLE, written)
    write(tmp_path / name)
    monkeypatch.setenv(KEY_VARIABLE, present)
    if is_taken:
        read(tmp_path / name)
        assert newest_intact(tmp_path) == tmp_path / name
    else:
        with pytest.raises(UnsafeCheckpointError, match=KEY_VARIABLE):
            read(tmp_path / name)
        assert newest_intact(tmp_path) is None


def test_signed_file_is_a_plain_file_of_torch(tmp_path, monkeypatch):
    monkeypatch.setenv(KEY_VARIABLE, "correct horse")
    save_file({"a": torch.arange(3)}, tmp_path / "a.ckpt")
    assert torch.load(tmp_path / "a.ckpt", weights_only=True)["a"].tolist() == [0, 1, 2]
    assert b"correct horse" not in (tmp_path / "a.ckpt").read_bytes()


def test_file_of_another_program_is_refused_where_there_is_a_key(tmp_path, monkeypatch):
    torch.save({"a": 1}, tmp_path / "a.ckpt")
    monkeypatch.setenv(KEY_VARIABLE, "key")
    with pytest.raises(UnsafeCheckpointError, match="not signed"):
        load_file(tmp_path / "a.ckpt")


def test_damage_of_a_signed_file_is_damage(tmp_path, monkeypatch):
    monkeypatch.setenv(KEY_VARIABLE, "key")
    save_file({"a": torch.arange(3000)}, tmp_path / "a.ckpt")
    content = bytearray((tmp_path / "a.ckpt").read_bytes())
    content[1000] ^= 1
    (tmp_path / "a.ckpt").write_bytes(content)
    with pytest.raises(DamagedCheckpointError):
        load_file(tmp_path / "a.ckpt")


def test_signature_of_another_checkpoint_does_not_fit(tmp_path, monkeypatch):
    monkeypatch.setenv(KEY_VARIABLE, "key")
    save_file({"a": 1}, tmp_path / "a.ckpt")
    monkeypatch.setenv(KEY_VARIABLE, "attacker")
    save_file({"a": 2}, tmp_path / "b.ckpt")
    monkeypatch.setenv(KEY_VARIABLE, "key")
    forged = (tmp_path / "b.ckpt").read_bytes()[:-64] + (tmp_path / "a.ckpt").read_bytes()[-64:]
    (tmp_path / "b.ckpt").write_bytes(forged)
    with pytest.raises(UnsafeCheckpointError, match="signature"):
        load_file(tmp_path / "b.ckpt")


def test_record_of_an_older_version_is_read(tmp_path):
    write(tmp_path / "folder")
    record = json.loads((tmp_path / "folder" / RECORD).read_text())
    del record["hmac_sha256"]
    (tmp_path / "folder" / RECORD).write_text(json.dumps(record))
    read(tmp_path / "folder")
