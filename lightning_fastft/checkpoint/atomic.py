"""Write files and folders under a temporary name, and rename them when they are complete."""

from __future__ import annotations

import errno
import logging
import os
import re
import shutil
import stat
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lightning_fastft.core.errors import CheckpointNotSavedError

log = logging.getLogger(__name__)

# ".<name>.<random>.part" is being written; ".<name>.<random>.old" is a folder that is being replaced.
_LEFTOVER = re.compile(r"\.(?P<name>.+)\.[0-9a-f]{8}\.(?P<kind>part|old)")

# Errors of Lustre and NFS if they are mounted without locks.
_HAS_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)


@contextmanager
def part_beside(path: Path, *, is_folder: bool = False) -> Iterator[Path]:
    """Yield a new temporary file or folder next to path, and remove it at the end if it still exists.

    This process holds a lock on it, so that ``sweep`` in any process can distinguish it from leftovers of dead ones.
    """
    part, lock = _make_part(path, is_folder=is_folder)
    try:
        yield part
    finally:
        discard(part)
        os.close(lock)


def sweep(folder: Path, *, name: str = "") -> None:
    """Remove temporary files of dead processes from a folder, and restore folders that were not replaced.

    A name restricts it to leftovers of this file or folder.
    """
    if not folder.is_dir():
        return
    for place in sorted(folder.iterdir()):
        found = _LEFTOVER.fullmatch(place.name)
        if found is None or place.is_symlink() or name not in ("", found["name"]):
            continue
        target = place.with_name(found["name"])
        if found["kind"] == "old" and not target.exists():
            log.warning("%s is restored, because the save that should replace it did not finish.", target)
            place.rename(target)
        elif not _is_held(place):
            log.info("%s is removed: it is the leftover of an unfinished save.", place)
            remove_empty(target)
            with suppress(PermissionError):
                # In a shared folder it may belong to another user.
                discard(place)


@contextmanager
def saving(path: Path | str) -> Iterator[None]:
    """Turn an OSError into a CheckpointNotSavedError that names the checkpoint."""
    try:
        yield
    except CheckpointNotSavedError:
        raise
    except OSError as error:
        raise CheckpointNotSavedError(
            f"The checkpoint {path} was not saved: {error}. An earlier checkpoint there is untouched. Give a writable "
            "folder with enough space."
        ) from error


@contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """Yield a new temporary folder; if the block succeeds, its files replace those of the same names in folder.

    Raises:
        CheckpointNotSavedError: The files cannot be written; those that are there do not change.
    """
    with saving(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        sweep(folder.parent, name=folder.name)
        with part_beside(folder, is_folder=True) as part:
            yield part
            sync_tree(part)
            for file in sorted(path for path in part.rglob("*") if path.is_file()):
                target = folder / file.relative_to(part)
                target.parent.mkdir(parents=True, exist_ok=True)
                os.replace(file, target)
        sync_folder(folder)


def sync_folder(folder: Path) -> None:
    """Sync the names in a folder, or the content of a file, to the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        # Some file systems cannot sync folders.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(handle)


def sync_tree(folder: Path) -> None:
    """Sync the files of a folder to the disk, so that none is empty under its final name after a power failure."""
    for path in (*folder.rglob("*"), folder):
        sync_folder(path)


def new_name(path: Path, kind: str) -> Path:
    """Return a new temporary name next to path; kind is "part" or "old", see _LEFTOVER."""
    return path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.{kind}")


def _make_part(path: Path, *, is_folder: bool) -> tuple[Path, int]:
    # Imported here because Windows has no fcntl; the strategies use Lightning's CheckpointIO there.
    import fcntl

    while True:
        part = new_name(path, "part")
        if is_folder:
            part.mkdir()
        else:
            os.close(
                os.open(
                    part,
                    os.O_CREAT | os.O_EXCL | os.O_WRONLY,
                    stat.S_IRUSR | stat.S_IWUSR | stat.S_IRGRP | stat.S_IROTH,
                )
            )
        lock = os.open(part, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:
            # Without locks, leftovers of killed processes cannot be identified and are never swept.
            if error.errno not in _HAS_NO_LOCKS:
                os.close(lock)
                discard(part)
                raise
        # A sweep may have removed it between creation and lock.
        if os.fstat(lock).st_nlink > 0 and part.exists():
            return part, lock
        os.close(lock)


def _is_held(place: Path) -> bool:
    """Return whether a running process holds the lock of a temporary file."""
    import fcntl

    try:
        lock = os.open(place, os.O_RDONLY)
    except OSError:
        # It no longer exists, or belongs to another user.
        return True
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(lock)
    return False


def remove_empty(folder: Path) -> None:
    """Remove a folder if it is empty; it then only held the name of an unfinished save."""
    if folder.is_dir() and not folder.is_symlink():
        with suppress(OSError):
            folder.rmdir()


def discard(place: Path) -> None:
    """Remove a temporary file or folder."""
    if place.is_dir():
        shutil.rmtree(place, ignore_errors=True)
    else:
        place.unlink(missing_ok=True)
