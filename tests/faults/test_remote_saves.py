"""A kill at any point of an upload: the checkpoint before loads, the torn one never, the next save removes it."""

import os
import shutil
import signal
import sys
import tempfile

import pytest
import torch

from lightning_fastft.checkpoint import remote
from lightning_fastft.checkpoint.files import RECORD
from lightning_fastft.checkpoint.io import VerifiedCheckpointIO
from tests.checkpoint.faulty_files import FaultyFiles, fail_at, kill, register
from tests.faults.saves import fork

# Begin, half and end of the file, then of the record, then both sides of each removal of the save before.
NUM_STEPS = {"first": 6, "second": 10}


@pytest.fixture(autouse=True)
def store(tmp_path, monkeypatch):
    (tmp_path / "staging").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "staging"))
    register()
    FaultyFiles.reset()
    yield tmp_path / "store"
    FaultyFiles.reset()


def save(url, number, io=None):
    (io or VerifiedCheckpointIO()).save_checkpoint({"number": number, "weight": torch.full((500,), float(number))}, url)


def load(url):
    content = VerifiedCheckpointIO().load_checkpoint(url)
    assert torch.equal(content["weight"], torch.full((500,), float(content["number"])))
    return content["number"]


def run_killed_at(step, action):
    """Do something in a child that is killed at a step; return whether it was."""

    def act(write):
        sys.stderr.flush()
        FaultyFiles.reset()
        FaultyFiles.fault = staticmethod(fail_at(step, kill))
        action()

    child, read = fork(act)
    os.close(read)
    status = os.waitpid(child, 0)[1]
    assert os.WIFEXITED(status) or os.WTERMSIG(status) == signal.SIGKILL
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


@pytest.mark.parametrize("step", range(NUM_STEPS["second"] + 1))
def test_kill_in_a_save_over_another_keeps_one_of_the_two(store, tmp_path, step):
    url = f"faulty://{store}/last.ckpt"
    save(url, 1)
    is_killed = run_killed_at(step, lambda: save(url, 2))
    assert is_killed == (step < NUM_STEPS["second"])
    # From the last byte of the record on the new one counts.
    assert load(url) == (1 if step < 5 else 2)
    assert list(remote.list_committed(f"faulty://{store}")) == [url]
    save(url, 3)
    assert load(url) == 3
    assert len(list((store / "last.ckpt").iterdir())) == 1
    # A killed process cannot remove its local copy, whose name says what it is.
    left = list((tmp_path / "staging").iterdir())
    assert len(left) == is_killed
    assert all(folder.name.startswith("fastft-checkpoint-") for folder in left)


@pytest.mark.parametrize("step", range(NUM_STEPS["first"] + 1))
def test_kill_in_a_first_save_leaves_the_older_checkpoint_the_newest(store, step):
    older, newer = (f"faulty://{store}/{name}.ckpt" for name in ("step=1", "step=2"))
    save(older, 1)
    is_killed = run_killed_at(step, lambda: save(newer, 2))
    assert is_killed == (step < NUM_STEPS["first"])
    times = remote.list_committed(f"faulty://{store}")
    newest = max((url for url in times if remote.find_damage(url) is None), key=times.__getitem__)
    assert newest == (older if step < 5 else newer)
    assert load(older) == 1


@pytest.mark.parametrize("step", range(5))
def test_kill_in_a_removal_leaves_a_whole_checkpoint_or_none(store, step):
    url = f"faulty://{store}/last.ckpt"
    io = VerifiedCheckpointIO()
    save(url, 1, io)
    assert run_killed_at(step, lambda: io.remove_checkpoint(url)) == (step < 4)
    assert (url in remote.list_committed(f"faulty://{store}")) == (step == 0)
    if step == 0:
        assert load(url) == 1
    io.remove_checkpoint(url)
    assert not (store / "last.ckpt").exists()


def test_kill_leaves_no_record_of_a_file_that_is_not_whole(store):
    """The order itself: at every step at which a record can be read, its file is there in full."""
    url = f"faulty://{store}/last.ckpt"
    for step in range(NUM_STEPS["first"]):
        run_killed_at(step, lambda: save(url, 1))
        if any((folder / RECORD).exists() for folder in (store / "last.ckpt").iterdir()):
            (folder,) = (store / "last.ckpt").iterdir()
            assert torch.load(folder / remote.DATA, weights_only=True)["number"] == 1
        shutil.rmtree(store)
