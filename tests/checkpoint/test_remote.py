"""Checkpoints at URLs: committed by a record that is uploaded last, checked on load, removed only if ours."""

import functools
import http.server
import json
import os
import shutil
import tempfile
import threading

import fsspec
import pytest
import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO

from lightning_fastft.checkpoint import remote
from lightning_fastft.checkpoint.files import RECORD
from lightning_fastft.checkpoint.io import VerifiedCheckpointIO
from lightning_fastft.checkpoint.signing import KEY_VARIABLE
from lightning_fastft.core.errors import CheckpointNotSavedError, DamagedCheckpointError, UnsafeCheckpointError
from tests.checkpoint.faulty_files import FaultyFiles, at, register
from tests.checkpoint.test_files import Runs

DATA = remote.DATA


@pytest.fixture(autouse=True)
def staging(tmp_path, monkeypatch):
    """The temporary folder, which is empty again after every test."""
    folder = tmp_path / "staging"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    assert list(folder.iterdir()) == []


@pytest.fixture
def store(tmp_path):
    """A folder, and its URL without faults."""
    register()
    FaultyFiles.reset()
    yield tmp_path / "store"
    FaultyFiles.reset()


def url_of(place):
    return f"faulty://{place}"


def content(number):
    return {"number": number, "weight": torch.full((500,), float(number))}


def save(url, number=1, io=None):
    (io or VerifiedCheckpointIO()).save_checkpoint(content(number), url)


def load(url):
    loaded = VerifiedCheckpointIO().load_checkpoint(url)
    assert torch.equal(loaded["weight"], torch.full((500,), float(loaded["number"])))
    return loaded["number"]


def saves_of(place):
    return sorted(entry.name for entry in place.iterdir())


@pytest.fixture(params=["memory", "faulty"])
def url(request, store):
    """The URL of a checkpoint, in memory and in a folder."""
    files = fsspec.filesystem("memory")
    yield f"memory://bucket-{store.parent.name}/runs/a.ckpt" if request.param == "memory" else url_of(store / "a.ckpt")
    if request.param == "memory" and files.exists(f"/bucket-{store.parent.name}"):
        files.rm(f"/bucket-{store.parent.name}", recursive=True)


def test_saved_checkpoint_loads_again_and_the_newest_save_counts(url):
    files, place = fsspec.core.url_to_fs(url)
    for number in (1, 2, 3):
        save(url, number)
        assert load(url) == number
        assert files.exists(url)
        assert len(files.ls(place)) == 1
    assert list(remote.list_committed(os.path.dirname(url))) == [url]


def test_removed_checkpoint_leaves_nothing(url):
    io = VerifiedCheckpointIO()
    save(url, io=io)
    io.remove_checkpoint(url)
    io.remove_checkpoint(url)
    files, place = fsspec.core.url_to_fs(url)
    assert not files.exists(place)
    with pytest.raises(FileNotFoundError, match="not found"):
        load(url)


def test_record_is_uploaded_after_the_file_and_removed_before_it(store):
    save(url_of(store / "a.ckpt"))
    save(url_of(store / "a.ckpt"), 2)
    written = [step for step in FaultyFiles.steps if step.startswith(("end", "remove "))]
    assert written == [f"end {DATA}", f"end {RECORD}"] * 2 + [f"remove {RECORD}", f"remove {DATA}"]


def test_file_of_a_save_is_a_plain_file_of_torch(store):
    save(url_of(store / "a.ckpt"), 4)
    (name,) = saves_of(store / "a.ckpt")
    assert torch.load(store / "a.ckpt" / name / DATA, weights_only=True)["number"] == 4


FAULTS = {
    "file not begun": (f"begin {DATA}", "raise"),
    "file torn": (f"begin {DATA}", "half"),
    "file truncated": (f"begin {DATA}", "truncate"),
    "file dropped": (f"begin {DATA}", "drop"),
    "record not begun": (f"begin {RECORD}", "raise"),
    "record torn": (f"begin {RECORD}", "half"),
    "record truncated": (f"begin {RECORD}", "truncate"),
    "record changed": (f"begin {RECORD}", "flip"),
    "record dropped": (f"begin {RECORD}", "drop"),
    "record's answer lost": (f"end {RECORD}", "raise"),
}


def plant(name, word, error=OSError):
    def fault(steps):
        if steps[-1] == name and word == "raise":
            raise error("no network")
        return word if steps[-1] == name else None

    FaultyFiles.fault = staticmethod(fault)


@pytest.mark.parametrize("fault", FAULTS)
def test_upload_that_fails_raises_and_leaves_the_checkpoint_before(store, fault):
    url = url_of(store / "a.ckpt")
    save(url)
    before = saves_of(store / "a.ckpt")
    plant(*FAULTS[fault])
    with pytest.raises(CheckpointNotSavedError, match=r"a\.ckpt was not saved.*untouched"):
        save(url, 2)
    FaultyFiles.reset()
    assert load(url) == 1
    assert saves_of(store / "a.ckpt") == before


@pytest.mark.parametrize("fault", FAULTS)
def test_upload_that_fails_leaves_no_checkpoint_where_none_was(store, fault):
    plant(*FAULTS[fault])
    with pytest.raises(CheckpointNotSavedError):
        save(url_of(store / "a.ckpt"))
    FaultyFiles.reset()
    assert remote.list_committed(url_of(store)) == {}
    with pytest.raises((FileNotFoundError, DamagedCheckpointError)):
        load(url_of(store / "a.ckpt"))


def test_store_that_is_gone_while_it_is_cleaned_up_leaves_the_checkpoint_before(store):
    url = url_of(store / "a.ckpt")
    save(url)

    def gone(steps):
        if steps[-1].startswith(("half", "remove")):
            raise ConnectionError("no network")

    FaultyFiles.fault = staticmethod(gone)
    with pytest.raises(CheckpointNotSavedError, match="no network"):
        save(url, 2)
    FaultyFiles.reset()
    assert len(saves_of(store / "a.ckpt")) == 2
    assert load(url) == 1
    save(url, 3)
    assert load(url) == 3
    assert len(saves_of(store / "a.ckpt")) == 1


def test_earlier_save_that_cannot_be_removed_is_a_warning(store):
    url = url_of(store / "a.ckpt")
    save(url)
    plant(f"remove {RECORD}", "raise", PermissionError)
    io = VerifiedCheckpointIO()
    with pytest.warns(UserWarning, match="earlier save"):
        save(url, 2, io)
    with pytest.warns(UserWarning, match="not removed: PermissionError"):
        io.remove_checkpoint(url)
    FaultyFiles.reset()
    assert load(url) == 2


def test_local_copy_that_cannot_be_written_is_an_error_that_names_the_folder(store, staging, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(staging / "missing"))
    with pytest.raises(CheckpointNotSavedError, match="missing"):
        save(url_of(store / "a.ckpt"))
    assert not store.exists()


def damage_file(place):
    data = bytearray((place / DATA).read_bytes())
    data[len(data) // 2] ^= 1
    (place / DATA).write_bytes(data)


def cut_file(place):
    (place / DATA).write_bytes((place / DATA).read_bytes()[:-10])


def lose_file(place):
    (place / DATA).unlink()


def lose_record(place):
    (place / RECORD).unlink()


def cut_record(place):
    (place / RECORD).write_bytes((place / RECORD).read_bytes()[:-10])


def damage_record(place):
    record = json.loads((place / RECORD).read_text())
    record["files"][DATA][1] += 1
    (place / RECORD).write_text(json.dumps(record))


@pytest.mark.parametrize("damage", [damage_file, cut_file, lose_file, lose_record, cut_record, damage_record])
def test_damage_in_the_store_is_refused(store, damage):
    url = url_of(store / "a.ckpt")
    save(url)
    damage(store / "a.ckpt" / saves_of(store / "a.ckpt")[0])
    with pytest.raises(DamagedCheckpointError, match=r"faulty:.*a\.ckpt is damaged"):
        load(url)
    assert remote.find_damage(url)


@pytest.mark.covering
@pytest.mark.parametrize("name", [DATA, RECORD])
@pytest.mark.parametrize("word", ["flip", "cut"])
def test_damage_on_the_way_is_refused(store, name, word):
    url = url_of(store / "a.ckpt")
    save(url)
    FaultyFiles.fault = staticmethod(at(f"get {name}", word))
    FaultyFiles.steps = []
    with pytest.raises(DamagedCheckpointError, match="is damaged"):
        load(url)
    assert load(url) == 1


@pytest.mark.parametrize("name", [DATA, RECORD])
def test_checkpoint_that_a_running_job_replaces_during_a_load_is_the_new_one(store, name):
    url = url_of(store / "a.ckpt")
    save(url)
    is_first = at(f"get {name}", "first")
    FaultyFiles.fault = staticmethod(lambda steps: save(url, 2) if is_first(steps) else None)
    assert load(url) == 2


@pytest.mark.parametrize("damage", [lose_record, cut_record, damage_record])
def test_save_without_a_valid_record_is_passed_over_for_the_one_before(store, damage):
    url = url_of(store / "a.ckpt")
    save(url)
    shutil.copytree(store / "a.ckpt", store / "copy")
    save(url, 2)
    damage(store / "a.ckpt" / saves_of(store / "a.ckpt")[0])
    shutil.copytree(store / "copy", store / "a.ckpt", dirs_exist_ok=True)
    assert load(url) == 1


def test_save_is_newer_than_one_by_a_clock_that_is_ahead(store, monkeypatch):
    url = url_of(store / "a.ckpt")
    with monkeypatch.context() as patch:
        patch.setattr(remote.time, "time_ns", lambda: 2 * 10**18)
        save(url)
    plant(f"remove {RECORD}", "raise")
    with pytest.warns(UserWarning, match="earlier save"):
        save(url, 2)
    FaultyFiles.reset()
    assert load(url) == 2


@pytest.mark.parametrize(
    ("written", "present", "is_taken"),
    [("key", "key", True), ("key", "", True), ("key", "other", False), ("", "key", False)],
)
def test_key_of_writer_and_reader_decide(url, monkeypatch, written, present, is_taken):
    monkeypatch.setenv(KEY_VARIABLE, written)
    save(url)
    monkeypatch.setenv(KEY_VARIABLE, present)
    if is_taken:
        assert load(url) == 1
    else:
        with pytest.raises(UnsafeCheckpointError, match=KEY_VARIABLE):
            load(url)


def test_content_that_could_run_code_is_refused(store, tmp_path):
    url = url_of(store / "a.ckpt")
    with pytest.warns(UserWarning, match="holds objects of"):
        VerifiedCheckpointIO().save_checkpoint({"x": Runs(tmp_path / "ran")}, url)
    with (
        pytest.warns(UserWarning, match="ignored"),
        pytest.raises(UnsafeCheckpointError, match=r"faulty:.* holds more than tensors and plain types"),
    ):
        VerifiedCheckpointIO().load_checkpoint(url, weights_only=False)
    assert not (tmp_path / "ran").exists()


def test_object_of_another_program_is_loaded_as_its_local_file_and_never_replaced(store):
    store.mkdir()
    url = url_of(store / "a.ckpt")
    TorchCheckpointIO().save_checkpoint(content(1), url)
    with pytest.warns(UserWarning, match="has no digest"):
        assert load(url) == 1
    with pytest.raises(CheckpointNotSavedError, match="another program"):
        save(url, 2)
    VerifiedCheckpointIO().save_checkpoint(content(3), store / "b.ckpt")
    assert load(url_of(store / "b.ckpt")) == 3
    cut = (store / "b.ckpt").read_bytes()[:-10]
    (store / "b.ckpt").write_bytes(cut)
    with pytest.raises(DamagedCheckpointError, match=r"faulty:.*b\.ckpt"):
        load(url_of(store / "b.ckpt"))


def add_letter(place):
    (place / "letter.txt").write_text("mine")


def add_to_a_save(place):
    (place / saves_of(place)[0] / "letter.txt").write_text("mine")


def replace_by_folder(place):
    shutil.rmtree(place)
    place.mkdir()
    (place / "photos").mkdir()


@pytest.mark.parametrize("change", [add_letter, add_to_a_save, replace_by_folder])
def test_what_this_package_did_not_write_is_not_removed(store, change):
    io = VerifiedCheckpointIO()
    save(url_of(store / "a.ckpt"), io=io)
    change(store / "a.ckpt")
    before = sorted(store.rglob("*"))
    with pytest.warns(UserWarning, match="not removed: this package"):
        io.remove_checkpoint(url_of(store / "a.ckpt"))
    assert sorted(store.rglob("*")) == before


@pytest.mark.parametrize("path", ["{store}/other/a.ckpt", "{store}/runs/../other/a.ckpt", "{store}/runs-2/a.ckpt"])
def test_checkpoint_outside_of_the_folders_of_the_run_is_not_removed(store, path):
    for name in ("other", "runs-2"):
        save(url_of(store / name / "a.ckpt"))
    io = VerifiedCheckpointIO()
    save(url_of(store / "runs" / "a.ckpt"), io=io)
    with pytest.warns(UserWarning, match="not removed: it is outside"):
        io.remove_checkpoint(url_of(path.format(store=store)))
    assert [load(url_of(store / name / "a.ckpt")) for name in ("other", "runs-2")] == [1, 1]


def test_names_with_characters_of_patterns_remove_themselves_only(store):
    io = VerifiedCheckpointIO()
    for name in ("run[1]", "run1", "run*"):
        save(url_of(store / name / "a.ckpt"), io=io)
    io.remove_checkpoint(url_of(store / "run[1]" / "a.ckpt"))
    io.remove_checkpoint(url_of(store / "run*" / "a.ckpt"))
    assert [(store / name / "a.ckpt").exists() for name in ("run[1]", "run1", "run*")] == [False, True, False]


def test_folder_is_probed_without_leaving_anything(store):
    remote.check_writable(url_of(store))
    assert list(store.iterdir()) == []


def test_driver_that_is_not_there_is_named():
    with pytest.raises(CheckpointNotSavedError, match="nosuchstore"):
        remote.check_writable("nosuchstore://bucket/runs")
    with pytest.raises(CheckpointNotSavedError, match="nosuchstore"):
        save("nosuchstore://bucket/runs/a.ckpt")


def test_store_that_does_not_answer_is_not_taken_for_an_empty_one(store, monkeypatch):
    save(url_of(store / "a.ckpt"))

    def gone(*args, **kwargs):
        raise ConnectionError("no network")

    monkeypatch.setattr(FaultyFiles, "ls", gone)
    with pytest.raises(ConnectionError):
        remote.list_committed(url_of(store))
    with pytest.raises(ConnectionError):
        load(url_of(store / "a.ckpt"))


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args):
        """Nothing is said."""


def test_checkpoint_of_a_web_server_is_loaded_and_nothing_is_saved_there(store):
    VerifiedCheckpointIO().save_checkpoint(content(1), store / "a.ckpt")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=store)) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        root = f"http://127.0.0.1:{server.server_port}"
        try:
            assert load(f"{root}/a.ckpt") == 1
            with pytest.raises(FileNotFoundError):
                load(f"{root}/b.ckpt")
            with pytest.raises(CheckpointNotSavedError):
                save(f"{root}/b.ckpt")
            with pytest.raises(CheckpointNotSavedError):
                remote.check_writable(root)
        finally:
            server.shutdown()
            thread.join()
    assert saves_of(store) == ["a.ckpt"]
