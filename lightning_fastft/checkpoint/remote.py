"""Checkpoints on fsspec file systems: staged in a local folder, uploaded, committed by a record that is uploaded last.

An object store has no rename, and some file systems show half of a file. So a save never overwrites an earlier save::

    s3://bucket/runs/last.ckpt/<save>/checkpoint.ckpt    the file of save_file, which torch.load reads
    s3://bucket/runs/last.ckpt/<save>/commit.json        the record of commit_folder, uploaded after the file

``<save>`` is the time of the save in nanoseconds and a random part. The newest save with a valid record is the
checkpoint. The save before is removed after the new record is uploaded. A killed upload leaves a save without a valid
record, which is never loaded. The next save to the same URL removes it, and so does the removal of the checkpoint.
"""

from __future__ import annotations

import re
import tempfile
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from fsspec import AbstractFileSystem
from fsspec.core import url_to_fs
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_fastft.checkpoint.atomic import saving
from lightning_fastft.checkpoint.files import RECORD, check_folder, commit_folder, read_record
from lightning_fastft.core.errors import CheckpointNotSavedError, DamagedCheckpointError, UnsafeCheckpointError

DATA = "checkpoint.ckpt"
_SAVE = re.compile(r"\d{20}-[0-9a-f]{8}")
# A killed process leaves its staging folder behind; docs/troubleshooting.md names it.
_STAGING = "fastft-checkpoint-"
# The key of _list_saves for an object at the URL itself.
_PLAIN = ""


def is_remote(path: str | Path) -> bool:
    """Return whether a path is a URL of anything but local files.

    Example:
        >>> is_remote("s3://bucket/runs"), is_remote("/tmp/runs")
        (True, False)
    """
    return "://" in str(path) and not str(path).startswith("file://")


@contextmanager
def uploading(url: str) -> Iterator[Path]:
    """Yield the local file to write a checkpoint to with ``save_file``; upload and commit it afterwards.

    Raises:
        CheckpointNotSavedError: The local copy or the upload failed. The save before is untouched.

    Cost:
        One copy of the checkpoint in the temporary folder (``TMPDIR``) during the save, one more pass with SHA-256, and
        the bytes over the network once.
    """
    with saving(url), _staging() as folder:
        try:
            yield folder / DATA
            commit_folder(folder)
        except CheckpointNotSavedError as error:
            raise CheckpointNotSavedError(
                f"The checkpoint {url} was not saved, because its local copy failed. Set TMPDIR to a folder with room "
                f"for one checkpoint, {tempfile.gettempdir()} is used now. {error}"
            ) from error
        _upload(folder, url)


@contextmanager
def downloaded(url: str) -> Iterator[Path]:
    """Download a checkpoint to a private temporary folder, check it against its record, and yield its local file.

    An object at the URL itself was written by another program or copied there. It has no record and is yielded
    unchecked; ``load_file`` checks it as a local file.

    Raises:
        FileNotFoundError: There is nothing at the URL.
        DamagedCheckpointError: No save was committed, or bytes differ from those that were written.
        UnsafeCheckpointError: It is not signed with the key of the environment.

    Cost:
        One copy of the checkpoint in the temporary folder (``TMPDIR``), one pass with SHA-256, and the bytes over the
        network once.
    """
    fs, place = _open(url)
    saves = _list_saves(fs, place)
    if not saves:
        raise FileNotFoundError(f"Checkpoint not found: {url}.")
    with _staging() as folder:
        if _PLAIN in saves:
            fs.get_file(place, str(folder / DATA))
        else:
            while not _fetch(fs, place, saves, folder=folder, url=url):
                saves = _list_saves(fs, place)
            check_folder(folder, origin=url)
        yield folder / DATA


def find_damage(url: str) -> str | None:
    """Return a description of the damage of a checkpoint; None if it is intact.

    Cost:
        That of ``downloaded``.
    """
    try:
        with downloaded(url):
            return None
    except (DamagedCheckpointError, UnsafeCheckpointError, FileNotFoundError) as damage:
        return str(damage)


def list_committed(folder: str) -> dict[str, int]:
    """Return the committed checkpoints of a folder by URL, with their times in nanoseconds by the clock of the writer.

    Cost:
        One listing of the folder and two of each checkpoint. No download.
    """
    fs, place = _open(folder)
    found: dict[str, int] = {}
    for name, is_folder in _list_names(fs, place).items():
        is_checkpoint = is_folder and name.endswith(".ckpt") and not name.startswith(".")
        committed = _committed(_list_saves(fs, f"{place}/{name}")) if is_checkpoint else []
        if committed:
            found[f"{folder.rstrip('/')}/{name}"] = _time_ns(committed[0])
    return found


def is_there(url: str) -> bool:
    """Return whether there is anything at a URL."""
    return bool(_list_saves(*_open(url)))


def is_own(url: str) -> bool:
    """Return whether this package wrote everything at a URL. Names are compared, not bytes."""
    saves = _list_saves(*_open(url))
    return bool(saves) and all(_SAVE.fullmatch(name) and files <= {DATA, RECORD} for name, files in saves.items())


def remove(url: str) -> None:
    """Remove a checkpoint, records first. The caller has checked ``is_own``.

    A failure is only a warning, because it must not end the run.
    """
    with _Attempt() as attempt:
        fs, place = _open(url)
        for name, files in sorted(_list_saves(fs, place).items()):
            _remove_save(fs, f"{place}/{name}", files)
        _remove_empty_folder(fs, place)
    if attempt.error is not None:
        rank_zero_warn(f"{url} is not removed: {_describe(attempt.error)}. Remove it by other means.")


def check_writable(folder: str) -> None:
    """Refuse a folder that takes no upload: write an object of a few bytes and remove it.

    Raises:
        CheckpointNotSavedError: The upload failed; the message has the error of the driver.
    """
    with _Attempt() as attempt:
        fs, place = _open(folder)
        probe = f"{place}/.fastft-{uuid.uuid4().hex[:8]}.probe"
        fs.makedirs(place, exist_ok=True)
        fs.pipe_file(probe, b"lightning_fastft")
    if attempt.error is not None:
        raise CheckpointNotSavedError(
            f"Checkpoints cannot be saved to {folder}: {_describe(attempt.error)}. Check the fsspec driver and its "
            "credentials, or give ModelCheckpoint(dirpath=...) another folder."
        ) from attempt.error
    with _Attempt() as attempt:
        fs.rm_file(probe)
    if attempt.error is not None:
        rank_zero_warn(f"Replaced checkpoints stay in {folder}: nothing can be removed ({_describe(attempt.error)}).")


def _upload(folder: Path, url: str) -> None:
    """Upload a committed folder as a new save, the record last, and remove the earlier saves."""
    target = ""
    with _Attempt() as attempt:
        fs, place = _open(url)
        before = _list_saves(fs, place)
        if _PLAIN in before:
            raise FileExistsError("another program wrote an object there, which is not replaced; use another name")
        target = f"{place}/{_new_name(before)}"
        fs.makedirs(target, exist_ok=True)
        for file in (folder / DATA, folder / RECORD):
            _put(fs, file, f"{target}/{file.name}")
    if attempt.error is not None:
        with _Attempt():
            # If the store does not answer, a save without a valid record remains.
            if target:
                _remove_save(fs, target, _list_names(fs, target))
        raise CheckpointNotSavedError(
            f"The checkpoint {url} was not saved: {_describe(attempt.error)}. The save before is untouched, and the "
            f"local copy in {folder} is removed."
        ) from attempt.error
    with _Attempt() as attempt:
        for old in sorted(old for old in before if _SAVE.fullmatch(old)):
            _remove_save(fs, f"{place}/{old}", before[old])
    if attempt.error is not None:
        rank_zero_warn(f"{url} is saved, but an earlier save of it is not removed: {_describe(attempt.error)}.")


def _put(fs: AbstractFileSystem, file: Path, target: str) -> None:
    """Upload a file and check the size of the object; read a record back."""
    fs.put_file(str(file), target)
    fs.invalidate_cache()
    expected, found = file.stat().st_size, fs.info(target).get("size")
    if found not in (None, expected):
        raise OSError(f"{target} has {found} bytes after an upload of {expected}")
    if file.name == RECORD and fs.cat_file(target) != file.read_bytes():
        raise OSError(f"{target} differs from the uploaded file")


def _fetch(fs: AbstractFileSystem, place: str, saves: Mapping[str, set[str]], *, folder: Path, url: str) -> bool:
    """Download the newest committed save to a folder; return False if a running job has replaced it meanwhile."""
    try:
        name = _fetch_record(fs, place, saves, folder=folder, url=url)
        if DATA in saves[name]:
            fs.get_file(f"{place}/{name}/{DATA}", str(folder / DATA))
    except FileNotFoundError:
        fs.invalidate_cache()
        if _committed(_list_saves(fs, place))[:1] == _committed(saves)[:1]:
            raise
        return False
    return True


def _fetch_record(fs: AbstractFileSystem, place: str, saves: Mapping[str, set[str]], *, folder: Path, url: str) -> str:
    """Download the newest valid record to a folder and return the name of its save."""
    reason = f"it has no {RECORD}, which is uploaded last: its save did not finish"
    for name in _committed(saves):
        fs.get_file(f"{place}/{name}/{RECORD}", str(folder / RECORD))
        try:
            if set(read_record(folder, origin=url)) == {DATA}:
                return name
            reason = f"its {RECORD} lists other files than {DATA}"
        except DamagedCheckpointError as damage:
            reason = str(damage.__cause__)
    advice = 'ckpt_path="last" finds the newest intact checkpoint of the run.'
    raise DamagedCheckpointError(f"{url} is damaged and was not loaded: {reason}. {advice}")


def _remove_save(fs: AbstractFileSystem, target: str, files: Iterable[str]) -> None:
    """Remove the objects of a save by name, the record first. No call here expands patterns, as ``fs.rm`` does."""
    for file in sorted(files, key=lambda file: file != RECORD):
        fs.rm_file(f"{target}/{file}")
    _remove_empty_folder(fs, target)


def _remove_empty_folder(fs: AbstractFileSystem, place: str) -> None:
    # In an object store an empty folder does not exist.
    fs.invalidate_cache()
    if fs.isdir(place):
        fs.rmdir(place)


def _open(url: str) -> tuple[AbstractFileSystem, str]:
    """Return the file system of a URL, without cached listings, and the path in it."""
    fs, place = url_to_fs(url)
    fs.invalidate_cache()
    return fs, place.rstrip("/")


def _list_saves(fs: AbstractFileSystem, place: str) -> dict[str, set[str]]:
    """Return the names in each folder of a place. A file has none; an object at the place itself has the key _PLAIN."""
    if "://" in place:
        # A web server has no folders.
        return {_PLAIN: set()} if fs.exists(place) else {}
    names = _list_names(fs, place)
    return {name: set(_list_names(fs, f"{place}/{name}")) if names[name] else set() for name in names}


def _list_names(fs: AbstractFileSystem, place: str) -> dict[str, bool]:
    """Return the names in a place and whether each is a folder. Unlike ``isdir`` and ``find``, hide no error."""
    try:
        entries = fs.ls(place, detail=True)
    except FileNotFoundError:
        return {}
    names: dict[str, bool] = {}
    for entry in entries:
        name, is_folder = entry["name"].rstrip("/").removeprefix(place).strip("/"), entry["type"] == "directory"
        # Some stores keep an object that represents the folder itself.
        if name != _PLAIN or not is_folder:
            names[name] = is_folder
    return names


def _committed(saves: Mapping[str, set[str]]) -> list[str]:
    """Return the saves that have a record, newest first."""
    return sorted((name for name, files in saves.items() if RECORD in files and _SAVE.fullmatch(name)), reverse=True)


def _new_name(saves: Mapping[str, set[str]]) -> str:
    """Return a name that sorts after all saves, even if the clock of their writer was ahead."""
    newest_ns = max((_time_ns(name) for name in saves if _SAVE.fullmatch(name)), default=0)
    return f"{max(time.time_ns(), newest_ns + 1):020d}-{uuid.uuid4().hex[:8]}"


def _time_ns(name: str) -> int:
    return int(name.partition("-")[0])


@contextmanager
def _staging() -> Iterator[Path]:
    """Make a temporary folder that no other user can read, and remove it afterwards."""
    with tempfile.TemporaryDirectory(prefix=_STAGING, ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


class _Attempt:
    """Catch the error of a storage driver. Drivers raise classes of their own, whose only common base is Exception."""

    def __init__(self) -> None:
        self.error: Exception | None = None

    def __enter__(self) -> _Attempt:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        if isinstance(error, Exception):
            self.error = error
            return True
        return False
