"""Archives that would take more memory than they have bytes are refused before anything of them is read."""

import zipfile

import pytest
import torch

from lightning_fastft.checkpoint.files import check_file, load_file, save_file
from lightning_fastft.core.errors import DamagedCheckpointError, UnsafeCheckpointError

_MIB = 2**20


def rewrite(source, target, change=lambda name, content: content, *, compression=zipfile.ZIP_STORED):
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w", compression) as new:
        for record in old.infolist():
            new.writestr(record.filename, change(record.filename, old.read(record)))


def pickle_of(text):
    return lambda name, content: text if name.endswith("data.pkl") else content


@pytest.fixture
def plain(tmp_path):
    torch.save(
        {"weight": torch.zeros(_MIB), "kept": bytearray(b"abc"), "empty": bytearray(), "again": bytearray(b"abc")},
        tmp_path / "plain.ckpt",
    )
    return tmp_path / "plain.ckpt"


def test_what_torch_writes_passes(plain, tmp_path):
    assert not check_file(plain)
    loaded = load_file(plain)
    assert [bytes(loaded[name]) for name in ("kept", "empty", "again")] == [b"abc", b"", b"abc"]
    save_file({"a": bytearray(5)}, tmp_path / "own.ckpt")
    assert load_file(tmp_path / "own.ckpt") == {"a": bytearray(5)}


@pytest.mark.parametrize("use", [check_file, load_file])
def test_compressed_records_are_refused(plain, tmp_path, use):
    rewrite(plain, tmp_path / "bomb.ckpt", compression=zipfile.ZIP_DEFLATED)
    assert (tmp_path / "bomb.ckpt").stat().st_size < _MIB
    with pytest.raises(UnsafeCheckpointError, match="compressed"):
        use(tmp_path / "bomb.ckpt")


def test_records_that_overlap_are_refused(plain, tmp_path):
    """Entries of the directory that share their bytes with another one: the directory alone grows."""
    rewrite(plain, tmp_path / "bomb.ckpt")
    with zipfile.ZipFile(tmp_path / "bomb.ckpt", "a") as archive:
        largest = max(archive.infolist(), key=lambda record: record.file_size)
        archive.filelist += [largest] * 100
        archive._didModify = True
    with pytest.raises(UnsafeCheckpointError, match="overlap"):
        load_file(tmp_path / "bomb.ckpt")


@pytest.mark.parametrize(
    "text",
    [
        b"\x80\x02cbuiltins\nbytearray\n\x8a\x05" + (10**11).to_bytes(5, "little") + b"\x85R.",
        # The length stands in front of the class, and the class comes from the memo.
        b"\x80\x02\x8a\x05"
        + (10**11).to_bytes(5, "little")
        + b"\x85q\x00cbuiltins\nbytearray\nq\x01X\x01\x00\x00\x00aX\x06\x00\x00\x00latin1\x86Rh\x01h\x00R.",
    ],
    ids=["plain", "memo"],
)
def test_pickle_that_asks_for_a_buffer_is_refused(plain, tmp_path, text):
    rewrite(plain, tmp_path / "bomb.ckpt", pickle_of(text))
    with pytest.raises(UnsafeCheckpointError, match="buffer"):
        load_file(tmp_path / "bomb.ckpt")


def test_end_of_an_archive_without_an_archive_is_damage(tmp_path):
    (tmp_path / "a.ckpt").write_bytes(
        b"no archive" + b"PK\x05\x06" + bytes(6) + b"\x01\x00\x01\x00" + b"\x2e\x00\x00\x00" + bytes(4) + bytes(2)
    )
    with pytest.raises(DamagedCheckpointError):
        load_file(tmp_path / "a.ckpt")
