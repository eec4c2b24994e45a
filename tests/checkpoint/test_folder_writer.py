"""FolderWriter on one rank: a save holds the values of its call, saves run one at a time, and no error is lost."""

import os
import signal
import threading
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from lightning_fastft.checkpoint import folder_writer
from lightning_fastft.checkpoint.atomic import sweep
from lightning_fastft.checkpoint.files import check_folder, find_damage, load_file
from lightning_fastft.checkpoint.folder_writer import FolderWriter
from lightning_fastft.checkpoint.last import find_last
from lightning_fastft.core.errors import CheckpointNotSavedError
from tests.checkpoint.test_folders import Sharded, group  # noqa: F401
from tests.faults.saves import fork

PLENTY = 2**40


@pytest.fixture
def gate(monkeypatch):
    """An event that a writer waits for before it writes a folder."""
    opened = threading.Event()
    write = folder_writer.write_folder

    def gated(pieces, part, path, **options):
        assert opened.wait(60)
        write(pieces, part, path, **options)

    monkeypatch.setattr(folder_writer, "write_folder", gated)
    return opened


@pytest.fixture
def writer(group):  # noqa: F811
    made = FolderWriter(torch.device("cpu"), None)
    yield made
    made.finish()
    made.close()


def equal(one, two):
    return all(torch.equal(left, right) for left, right in zip(one, two, strict=True))


def test_save_holds_the_values_of_its_call_each_time(writer, group, gate):  # noqa: F811
    saved = Sharded(1)
    for name in ("a", "b"):
        gate.clear()
        before = saved.values()
        writer.save(saved.checkpoint(), group / name, host_bytes=PLENTY)
        saved.optimizer.step()
        gate.set()
        assert writer.finish() is None
        assert not equal(before, saved.values())
        other = Sharded(2)
        assert other.load(group / name)["epoch"] == 4
        assert equal(before, other.values())


def test_until_its_commit_a_save_has_a_name_and_replaces_nothing(writer, group, gate):  # noqa: F811
    old, new, removed = Sharded(1), Sharded(2), []
    gate.set()
    writer.save(old.checkpoint(), group / "last.ckpt", host_bytes=PLENTY)
    assert writer.finish() is None
    gate.clear()
    writer.save(new.checkpoint(), group / "last.ckpt", host_bytes=PLENTY)
    check_folder(group / "last.ckpt")
    threading.Timer(0.2, gate.set).start()
    # The next save waits for it.
    writer.save(new.checkpoint(), group / "next.ckpt", host_bytes=PLENTY)
    other = Sharded(3)
    other.load(group / "last.ckpt")
    assert equal(new.values(), other.values())
    writer.then(lambda: removed.append(find_damage(group / "next.ckpt", needs_digest=True)))
    assert writer.finish() is None
    assert removed == [None]
    writer.then(lambda: removed.append(True))
    assert removed == [None, True]


def test_error_is_raised_at_the_next_save_and_keeps_what_was_there(writer, group):  # noqa: F811
    saved, removed = Sharded(1), []
    broken = {**saved.checkpoint(), "optimizer_states": [{"x": lambda: None}]}
    writer.save(broken, group / "a.ckpt", host_bytes=PLENTY)
    writer.then(lambda: removed.append(True))
    with pytest.raises((CheckpointNotSavedError, AttributeError)):
        writer.save(saved.checkpoint(), group / "b.ckpt", host_bytes=PLENTY)
    assert (removed, list(group.iterdir())) == ([], [])
    assert writer.finish() is None


def test_without_room_a_save_is_synchronous_and_says_so(writer, group):  # noqa: F811
    with pytest.warns(UserWarning, match="async_save=False"):
        writer.save(Sharded(1).checkpoint(), group / "a.ckpt", host_bytes=7)
    check_folder(group / "a.ckpt")


@pytest.mark.parametrize("has_older", [True, False])
def test_killed_save_is_skipped_and_swept(tmp_path, has_older):
    folder = tmp_path / "saved"
    folder.mkdir()

    def save_until_killed(write):
        dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
        writer = FolderWriter(torch.device("cpu"), None)
        if has_older:
            writer.save(Sharded(1).checkpoint(), folder / "step=1.ckpt", host_bytes=PLENTY)
            writer.finish()
        folder_writer.write_folder = lambda *_, **__: threading.Event().wait()
        writer.save(Sharded(2).checkpoint(), folder / "step=2.ckpt", host_bytes=PLENTY)
        (folder / "last.ckpt").symlink_to("step=2.ckpt")
        os.write(write, b"x")
        threading.Event().wait()

    child, read = fork(save_until_killed)
    assert os.read(read, 1) == b"x"
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(read)
    trainer = SimpleNamespace(
        callbacks=[], checkpoint_callbacks=[], default_root_dir=folder, global_rank=0, state=SimpleNamespace(fn=None)
    )
    if has_older:
        with pytest.warns(UserWarning, match="step=1.ckpt"):
            assert find_last(trainer) == str(folder / "step=1.ckpt")
    else:
        assert find_last(trainer) is None
    sweep(folder)
    names = {place.name for place in folder.iterdir()}
    assert names == ({"last.ckpt", "step=1.ckpt"} if has_older else {"last.ckpt"})
    assert all(load_file(place / "meta.pt")["epoch"] == 4 for place in folder.glob("step=*"))
