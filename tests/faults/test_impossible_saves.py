"""R3: a save that did not happen raises, and what stood there before stands there still."""

import os
import resource
import shutil
import signal
import stat
import tempfile
from pathlib import Path

import pytest
import torch

from lightning_fastft.checkpoint.files import load_file, save_file
from lightning_fastft.checkpoint.io import VerifiedCheckpointIO
from lightning_fastft.core.errors import CheckpointNotSavedError
from tests.faults.saves import fork

OLD, NEW = {"number": 1}, {"number": 2, "weight": torch.zeros(200_000)}
NOBODY = 65534


@pytest.fixture
def folder():
    """A folder that another user reaches, which pytest's own are not."""
    place = Path(tempfile.mkdtemp(dir="/tmp"))
    place.chmod(0o755)
    save_file(OLD, place / "a.ckpt")
    yield place
    place.chmod(0o755)
    shutil.rmtree(place, ignore_errors=True)


def read_only(folder):
    """Writing is not permitted: to root it always would be."""
    folder.chmod(0o555)
    if os.getuid() == 0:
        os.setuid(NOBODY)
    return folder / "a.ckpt", NEW


def no_room(folder):
    """The limit of bytes is met in the middle of the file, as with a full disk or a quota."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    return folder / "a.ckpt", NEW


class Vanish:
    """Takes its folder away while it is pickled: in the middle of the save."""

    def __init__(self, folder):
        self.folder = folder

    def __reduce__(self):
        shutil.rmtree(self.folder)
        return dict, ()


def vanished(folder):
    return folder / "deep" / "a.ckpt", {"x": Vanish(folder / "deep"), **NEW}


def file_in_the_way(folder):
    """There is a file where the folder should be."""
    return folder / "a.ckpt" / "b.ckpt", NEW


def no_inode(folder):
    """A file system that takes no new file."""
    return Path("/proc/self/a.ckpt"), NEW


def folder_in_the_way(folder):
    (folder / "taken.ckpt").mkdir()
    (folder / "taken.ckpt" / "x").write_text("x")
    return folder / "taken.ckpt", NEW


def no_handle(folder):
    """The process may open no more files."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))
    return folder / "a.ckpt", NEW


IMPOSSIBLE = [read_only, no_room, vanished, file_in_the_way, no_inode, folder_in_the_way, no_handle]


@pytest.mark.parametrize("make", IMPOSSIBLE, ids=lambda make: make.__name__)
def test_impossible_save_raises_and_the_old_file_is_intact(folder, make):
    def attempt(write):
        io = VerifiedCheckpointIO()
        path, content = make(folder)
        try:
            io.save_checkpoint(content, path)
        except CheckpointNotSavedError as error:
            os.write(write, str(error).encode())

    child, read = fork(attempt)
    message = os.read(read, 10_000).decode()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    os.close(read)
    folder.chmod(stat.S_IRWXU)
    assert "was not saved" in message
    assert "a.ckpt" in message or "b.ckpt" in message or "taken.ckpt" in message
    assert load_file(folder / "a.ckpt") == OLD
    assert {place.name for place in folder.iterdir()} <= {"a.ckpt", "taken.ckpt"}
    print(f"R3: {make.__name__} raises: {message[:120]}")
