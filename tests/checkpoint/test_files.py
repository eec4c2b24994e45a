"""Checkpoint files and folders: plain files of torch.save with a digest, damage found before anything is
unpickled, no part left behind.
"""

import contextlib
import errno
import json
import os
import pickle
import struct
import zipfile
from pathlib import Path
from unittest import mock

import pytest
import torch

from lightning_fastft.checkpoint import digests
from lightning_fastft.checkpoint.atomic import part_beside, sweep
from lightning_fastft.checkpoint.digests import hash_file
from lightning_fastft.checkpoint.files import (
    RECORD,
    check_file,
    check_folder,
    commit_folder,
    load_file,
    newest_intact,
    remove,
    replace_folder,
    save_file,
)
from lightning_fastft.core.errors import (
    CheckpointNotSavedError,
    DamagedCheckpointError,
    OptionError,
    UnsafeCheckpointError,
)
from tests.faults.saves import fork

CONTENT = {"weight": torch.arange(3000.0), "step": 3, "names": ["a", None, 2.5, True]}


class Runs:
    """What a hostile file asks the unpickler to do."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def assert_is_content(loaded):
    assert torch.equal(loaded["weight"], CONTENT["weight"])
    assert {name: loaded[name] for name in ("step", "names")} == {name: CONTENT[name] for name in ("step", "names")}


@pytest.mark.parametrize("use_mmap", [False, True])
def test_saved_file_is_a_plain_file_of_torch_and_a_plain_archive(tmp_path, use_mmap):
    path = tmp_path / "new" / "a.ckpt"
    save_file(CONTENT, path)
    assert check_file(path)
    assert_is_content(torch.load(path, weights_only=True, mmap=use_mmap))
    assert_is_content(load_file(path))
    assert zipfile.ZipFile(path).comment.startswith(b"lightning_fastft sha256 ")
    assert zipfile.ZipFile(path).testzip() is None
    assert [place.name for place in path.parent.iterdir()] == ["a.ckpt"]


@pytest.mark.parametrize("num_bytes", [0, 1, 21, 22, 23, 5000])
def test_writer_holds_back_the_end_whatever_the_pieces(tmp_path, num_bytes):
    archive = os.urandom(num_bytes) + b"PK\x05\x06" + bytes(18)
    for size in (1, 5, 22, 40, 10_000):
        with (tmp_path / "x").open("w+b") as file:
            writer = digests._HashingWriter(file)
            assert sum(writer.write(archive[begin : begin + size]) for begin in range(0, len(archive), size)) == len(
                archive
            )
            digest = writer.finish()
        data = (tmp_path / "x").read_bytes()
        comment = data[len(archive) :]
        assert data[: len(archive)] == archive[:-2] + struct.pack("<H", len(comment))
        assert digest.num_bytes == len(archive)
        assert check_file(tmp_path / "x")


def test_write_that_failed_once_is_not_forgotten_when_later_ones_succeed():
    file = mock.Mock()
    file.write.side_effect = [None, OSError("no room"), None, None, None]
    writer = digests._HashingWriter(file)
    for _ in range(3):
        writer.write(bytes(1000))
    with pytest.raises(OSError, match="no room"):
        writer.finish()
    assert file.write.call_count == 2


def test_file_of_torch_loads_and_is_known_to_have_no_digest(tmp_path):
    torch.save(CONTENT, tmp_path / "a.pt")
    assert not check_file(tmp_path / "a.pt")
    assert_is_content(load_file(tmp_path / "a.pt"))


def test_damage_names_expected_found_and_the_newest_intact_one(tmp_path):
    paths = [tmp_path / f"step={step}.ckpt" for step in range(4)]
    for number, path in enumerate(paths):
        save_file(CONTENT, path)
        os.utime(path, (number, number))
    for path in paths[2:]:
        data = bytearray(path.read_bytes())
        data[5000] ^= 4
        path.write_bytes(data)
        os.utime(path, (10, 10))
    torch.save(CONTENT, tmp_path / "no digest.pt")
    (tmp_path / "notes.txt").write_text("x" * 500)
    assert newest_intact(tmp_path) == paths[1]
    with pytest.raises(DamagedCheckpointError) as caught:
        load_file(paths[3])
    message = str(caught.value)
    expected = digests.read_comment(paths[3].open("rb")).sha256
    assert str(paths[3]) in message
    assert f"expected SHA-256 {expected}, found" in message
    assert message.endswith(f"The newest intact checkpoint of its folder is {paths[1]}.")


@pytest.mark.parametrize("read", [load_file, check_file])
def test_file_of_another_user_is_refused_with_what_to_do(tmp_path, read):
    save_file(CONTENT, tmp_path / "a.ckpt")
    # The permissions of a file do not bind root, which may run the tests.
    refusal = PermissionError(errno.EACCES, "Permission denied")
    with mock.patch.object(Path, "open", side_effect=refusal), pytest.raises(OptionError, match="cannot be read"):
        read(tmp_path / "a.ckpt")


def test_damage_without_an_intact_one_says_so(tmp_path):
    (tmp_path / "a.ckpt").write_bytes(b"")
    with pytest.raises(DamagedCheckpointError, match="There is no intact checkpoint in"):
        load_file(tmp_path / "a.ckpt")
    assert newest_intact(tmp_path) is None


@pytest.mark.parametrize("content", ["seed_everything: 1\n", "{}", "x" * 5000], ids=["yaml", "short", "long"])
def test_file_of_another_kind_is_not_called_damaged(tmp_path, content):
    (tmp_path / "run.yaml").write_text(content)
    with pytest.raises(DamagedCheckpointError, match="not a checkpoint") as caught:
        load_file(tmp_path / "run.yaml")
    assert "damaged" not in str(caught.value)
    # A file whose blocks never reached the disk is.
    (tmp_path / "a.ckpt").write_bytes(bytes(5000))
    with pytest.raises(DamagedCheckpointError, match="damaged"):
        load_file(tmp_path / "a.ckpt")


@pytest.mark.parametrize("is_damaged", [False, True])
def test_nothing_runs_from_a_hostile_file(tmp_path, is_damaged):
    """A digest does not make a file harmless, and a damaged file is not unpickled at all."""
    save_file({"x": Runs(tmp_path / "ran")}, tmp_path / "a.ckpt")
    if is_damaged:
        (tmp_path / "a.ckpt").write_bytes((tmp_path / "a.ckpt").read_bytes() + b"x")
    with pytest.raises(DamagedCheckpointError if is_damaged else UnsafeCheckpointError):
        load_file(tmp_path / "a.ckpt")
    assert not (tmp_path / "ran").exists()


def test_content_that_cannot_be_pickled_raises_and_leaves_the_old_file(tmp_path):
    save_file(CONTENT, tmp_path / "a.ckpt")
    with pytest.raises((AttributeError, TypeError, pickle.PicklingError)):
        save_file({"x": lambda: None}, tmp_path / "a.ckpt")
    assert_is_content(load_file(tmp_path / "a.ckpt"))
    assert len(list(tmp_path.iterdir())) == 1


def make_folder(place, seed):
    place.mkdir()
    for number in range(2):
        (place / f"__{number}_0.distcp").write_bytes(bytes([seed, number]) * 600)
    commit_folder(place)


def test_folder_is_a_checkpoint_once_it_is_committed(tmp_path):
    place = tmp_path / "a.ckpt"
    make_folder(place, 1)
    check_folder(place)
    assert newest_intact(tmp_path) == place
    (place / RECORD).unlink()
    with pytest.raises(DamagedCheckpointError, match=r"has no commit\.json"):
        check_folder(place)
    assert newest_intact(tmp_path) is None


def test_commit_refuses_files_that_nobody_reported(tmp_path):
    make_folder(tmp_path / "a", 1)
    digests = {"__0_0.distcp": hash_file(tmp_path / "a" / "__0_0.distcp")}
    with pytest.raises(CheckpointNotSavedError, match="__1_0"):
        commit_folder(tmp_path / "a", digests)


def test_record_cannot_name_files_elsewhere(tmp_path):
    make_folder(tmp_path / "a", 1)
    record = json.loads((tmp_path / "a" / RECORD).read_text())
    record["files"]["../b"] = record["files"].pop("__0_0.distcp")
    record["sha256"] = digests.hash_listing(record["files"])
    (tmp_path / "a" / RECORD).write_text(json.dumps(record))
    with pytest.raises(DamagedCheckpointError, match="was changed"):
        check_folder(tmp_path / "a")


@pytest.mark.parametrize("share", [(0, 2), (1, 2)])
def test_ranks_together_judge_every_file(tmp_path, share):
    make_folder(tmp_path / "a", 1)
    (tmp_path / "a" / f"__{share[0]}_0.distcp").write_bytes(b"")
    with pytest.raises(DamagedCheckpointError, match=f"__{share[0]}_0"):
        check_folder(tmp_path / "a", share=share)
    check_folder(tmp_path / "a", share=(1 - share[0], 2))


@pytest.mark.parametrize("old", ["none", "file", "folder", "link"])
def test_folder_takes_the_place_of_what_was_there(tmp_path, old):
    place = tmp_path / "a.ckpt"
    {
        "none": lambda: None,
        "file": lambda: save_file(CONTENT, place),
        "folder": lambda: make_folder(place, 1),
        "link": lambda: place.symlink_to("nowhere"),
    }[old]()
    with part_beside(place, is_folder=True) as part:
        part.rmdir()
        make_folder(part, 2)
        replace_folder(part, place)
    check_folder(place)
    assert (place / "__0_0.distcp").read_bytes()[0] == 2
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.ckpt"]


def test_file_takes_the_place_of_a_folder(tmp_path):
    place = tmp_path / "a.ckpt"
    make_folder(place, 1)
    save_file(CONTENT, place)
    assert_is_content(load_file(place))
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.ckpt"]
    place.unlink()
    place.mkdir()
    save_file(CONTENT, place)
    place.unlink()
    place.mkdir()
    (place / "letter.txt").write_text("dear")
    with pytest.raises(CheckpointNotSavedError, match="not replaced"):
        save_file(CONTENT, place)
    assert (place / "letter.txt").exists()


@pytest.mark.parametrize("old", ["file", "folder"])
def test_a_kill_between_two_renames_loses_no_save(tmp_path, old, monkeypatch):
    place, part = tmp_path / "a.ckpt", tmp_path / ".a.ckpt.0123abcd.part"
    if old == "file":
        save_file(CONTENT, place)
    else:
        make_folder(place, 1)
    make_folder(part, 2)
    rename = Path.rename

    def end(self, target):
        if self == part:
            raise SystemExit
        return rename(self, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", end)
        with pytest.raises(SystemExit):
            replace_folder(part, place)
    sweep(tmp_path)
    if old == "file":
        assert_is_content(load_file(place))
    else:
        check_folder(place)
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.ckpt"]


def test_folder_of_somebody_else_is_not_replaced(tmp_path):
    place = tmp_path / "results"
    place.mkdir()
    (place / "letter.txt").write_text("dear")
    with part_beside(place, is_folder=True) as part, pytest.raises(OSError, match="not replaced"):
        replace_folder(part, place)
    assert (place / "letter.txt").exists()


def test_sweep_takes_what_dead_processes_left_and_nothing_else(tmp_path):
    child, read = fork(lambda write: hold_parts(tmp_path, write))
    is_alive = True
    try:
        assert os.read(read, 1) == b"x"
        with part_beside(tmp_path / "mine.ckpt") as mine:
            held = sorted(place.name for place in tmp_path.iterdir())
            assert len(held) == 3
            sweep(tmp_path)
            assert sorted(place.name for place in tmp_path.iterdir()) == held
            os.kill(child, 9)
            os.waitpid(child, 0)
            is_alive = False
            (tmp_path / ".hidden.part").write_text("somebody else's")
            sweep(tmp_path)
            assert sorted(place.name for place in tmp_path.iterdir()) == sorted([".hidden.part", mine.name])
    finally:
        if is_alive:
            os.kill(child, 9)
            os.waitpid(child, 0)


def hold_parts(folder, write):
    with part_beside(folder / "a.ckpt"), part_beside(folder / "b.ckpt", is_folder=True) as part:
        (part / "file").write_text("1")
        os.write(write, b"x")
        os.read(os.pipe()[0], 1)


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK])
def test_file_system_without_locks_is_written_to_and_never_swept(tmp_path, number):
    with mock.patch("fcntl.flock", side_effect=OSError(number, "no locks")), part_beside(tmp_path / "b.ckpt") as mine:
        save_file(CONTENT, tmp_path / "a.ckpt")
        sweep(tmp_path)
        assert mine.exists()
    with (
        mock.patch("fcntl.flock", side_effect=OSError(errno.EIO, "broken")),
        pytest.raises(CheckpointNotSavedError, match="broken"),
    ):
        save_file(CONTENT, tmp_path / "a.ckpt")
    assert_is_content(load_file(tmp_path / "a.ckpt"))
    assert os.listdir(tmp_path) == ["a.ckpt"]


def test_sweep_gives_a_folder_its_name_back(tmp_path):
    make_folder(tmp_path / ".a.ckpt.0123abcd.old", 1)
    make_folder(tmp_path / ".b.ckpt.0123abcd.old", 1)
    make_folder(tmp_path / "b.ckpt", 2)
    sweep(tmp_path)
    assert sorted(place.name for place in tmp_path.iterdir()) == ["a.ckpt", "b.ckpt"]
    assert (tmp_path / "b.ckpt" / "__0_0.distcp").read_bytes()[0] == 2
    check_folder(tmp_path / "a.ckpt")


def test_remove_takes_files_folders_and_links(tmp_path):
    save_file(CONTENT, tmp_path / "a.ckpt")
    make_folder(tmp_path / "b.ckpt", 1)
    (tmp_path / "c.ckpt").symlink_to("a.ckpt")
    for name in ("c.ckpt", "a.ckpt", "b.ckpt"):
        remove(tmp_path / name)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("bits", ["one of each byte", pytest.param("all", marks=pytest.mark.fault)])
def test_flipped_bits_of_a_commit_record_are_refused(tmp_path, bits):
    # Alone in its folder, which is searched for an intact one: that of tmp_path has those of other tests.
    folder = tmp_path / "a.ckpt"
    save_file({"x": torch.zeros(1)}, folder / "__0_0.distcp")
    commit_folder(folder)
    record = folder / "commit.json"
    whole = record.read_bytes()
    check_folder(folder)
    accepted = []
    for bit in range(8 * len(whole)) if bits == "all" else [8 * n + n % 8 for n in range(len(whole))]:
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        record.write_bytes(damaged)
        with contextlib.suppress(DamagedCheckpointError):
            check_folder(folder)
            accepted.append(bit)
    assert accepted == []
