"""Checkpoint files and folders that are there in full or not at all, and whose damage is found before anything of them
is unpickled.

A file is written beside its place, hashed while it is written, synced and renamed. Its SHA-256 stands in the comment of
its zip archive, so that it is still a plain file of ``torch.save``; a folder of several ranks has a commit record,
written last, with the SHA-256 of every file in it.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import pickle
import re
import shutil
import stat
import uuid
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch

from lightning_fastft.checkpoint.archives import check_sizes
from lightning_fastft.checkpoint.signing import describe_forgery, sign
from lightning_fastft.core.errors import CheckpointNotSavedError, DamagedCheckpointError, UnsafeCheckpointError
from lightning_fastft.core.files import sync_file

log = logging.getLogger(__name__)

RECORD = "commit.json"
# ".<name>.<random>.part" is being written, ".<name>.<random>.old" is the folder that the new one of its name is about
# to replace.
_LEFTOVER = re.compile(r"\.(?P<name>.+)\.[0-9a-f]{8}\.(?P<kind>part|old)")
_CHUNK_BYTES = 1 << 20
# Lustre and NFS answer so where they are mounted without locks.
_HAS_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)
# The last record of a zip archive: signature, 16 bytes, and two bytes that give the length of the comment behind it.
_END_SIGNATURE = b"PK\x05\x06"
_END_BYTES = 22
# Text only, so that a digest never looks like another end record. torch.load reads archives with comments up to 64 KiB,
# any size of archive.
_COMMENT = re.compile(rb"lightning_fastft sha256 ([0-9a-f]{64}) bytes (\d{20})(?: hmac-sha256 ([0-9a-f]{64}))?")
_COMMENT_BYTES = len(b"lightning_fastft sha256  bytes ") + 64 + 20
_SIGNED_BYTES = _COMMENT_BYTES + len(b" hmac-sha256 ") + 64


class Digest(NamedTuple):
    """SHA-256 (hexadecimal) and number of the bytes that it covers."""

    sha256: str
    num_bytes: int


def save_file(content: object, path: Path) -> None:
    """Write content as ``torch.save`` does, so that path holds all of it or what it held before.

    Args:
        content: Tensors and plain types; anything else could not be loaded again.
        path: A local file; its folder is made.

    Raises:
        CheckpointNotSavedError: Anything went wrong; what stood at path stands there still, and nothing is left beside
            it.

    Cost:
        One pass over the bytes with SHA-256 (about 1.2 GB/s on one core), one sync of file and folder.

    Source:
        reliability: a kill in the middle of a save, 30 trials each: 6 of 30 files torn by a copy from another file
            system, 0 of 30 this way.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "a.ckpt"
        >>> save_file({"step": 3}, path)
        >>> torch.load(path, weights_only=True)
        {'step': 3}
    """
    with saving(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with part_beside(path) as part:
            with part.open("r+b") as file:
                digest = _write_archive(content, file)
                sync_file(file)
            with part.open("rb") as file:
                if read_comment(file) != digest:
                    raise OSError(f"the file reads back otherwise than it was written (expected {_describe(digest)})")
            part.replace(path)
        sync_folder(path.parent)


def load_file(path: Path, *, map_location: Any = "cpu", origin: str = "") -> Any:
    """Return the content of a checkpoint file, judged byte by byte before it is unpickled, and unpickled to tensors and plain types only.

    Args:
        path: A file of ``save_file`` or of ``torch.save``; the latter has no digest to judge by.
        map_location: As torch.load's.
        origin: The URL that the file was downloaded from, for messages.

    Raises:
        DamagedCheckpointError: Bytes differ from those that were written; the message names the newest intact
            checkpoint of the folder.
        UnsafeCheckpointError: It is not signed with the key of the environment, holds other objects than tensors and
            plain types, or would take more memory than it has bytes.

    Cost:
        Reads the file twice, the first time with SHA-256.
    """
    with path.open("rb") as file:
        with _told_damage(path, origin):
            _judge_file(file)
            _judge_sizes(file, origin or path)
        file.seek(0)
        try:
            return torch.load(file, map_location=map_location, weights_only=True)
        except pickle.UnpicklingError as error:
            reason = str(error).partition("\n")[0]
            raise UnsafeCheckpointError(
                f"{origin or path} holds more than tensors and plain types and is not loaded: {reason}. "
                "Keep only such content in hyperparameters and state, or, if you trust its classes, name them in "
                "torch.serialization.add_safe_globals."
            ) from error


def check_file(path: Path) -> bool:
    """Return whether a file has a digest, which it then matches; False for a file of ``torch.save``, which has none.

    Raises:
        DamagedCheckpointError: Bytes differ from those that were written, or the end of the file is missing.
    """
    with path.open("rb") as file, _told_damage(path):
        has_digest = _judge_file(file)
        _judge_sizes(file, path)
        return has_digest


def read_comment(file: IO[bytes]) -> Digest | None:
    """Return the digest in the comment of a zip archive of ours, without judging it; None where there is none."""
    seal = _read_seal(file)
    return None if seal is None else seal.digest


def hash_file(path: Path) -> Digest:
    """Return the digest of all bytes of a file."""
    with path.open("rb") as file:
        return _hash_to(file, path.stat().st_size)


# Folders.


def commit_folder(folder: Path, digests: Mapping[str, Digest] | None = None) -> None:
    """Write the commit record of a folder: from here on it is a checkpoint.

    Args:
        folder: A folder with the files of all ranks.
        digests: By file name, from the rank that wrote the file; None hashes what is there, which makes a folder of
            another program a checkpoint.

    Raises:
        CheckpointNotSavedError: The folder holds other files than were reported, or cannot be written to.
    """
    with saving(folder):
        present = {file.name for file in folder.iterdir() if file.name != RECORD}
        digests = {name: hash_file(folder / name) for name in present} if digests is None else digests
        if present != set(digests):
            raise OSError(f"the ranks reported {sorted(digests)} and the folder holds {sorted(present)}")
        listed = {name: list(digests[name]) for name in sorted(digests)}
        with (folder / RECORD).open("w") as file:
            sha256 = _hash_listing(listed)
            json.dump({"files": listed, "sha256": sha256, "hmac_sha256": sign(sha256)}, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        sync_folder(folder)


def read_record(folder: Path, *, origin: str = "") -> dict[str, Digest]:
    """Return the digests of a folder by file name.

    Args:
        folder: A folder of ``commit_folder``.
        origin: The URL that the record was downloaded from, for messages.

    Raises:
        DamagedCheckpointError: There is no commit record, or it is damaged.
    """
    with _told_damage(folder, origin):
        return _read_record(folder)


def check_folder(folder: Path, *, share: tuple[int, int] = (0, 1), origin: str = "") -> None:
    """Judge the files of a folder by its commit record.

    Args:
        folder: A folder of ``commit_folder``.
        share: (rank, number of ranks): judge every so-manieth file only, so that together the ranks judge all.
        origin: The URL that the folder was downloaded from, for messages.

    Raises:
        DamagedCheckpointError: The record or a file is missing or damaged.
    """
    with _told_damage(folder, origin):
        _judge_folder(folder, share)


def newest_intact(folder: Path, *, but: Path | None = None) -> Path | None:
    """Return the youngest checkpoint of a folder that has digests and matches them; None where there is none.

    Args:
        folder: Where to look; not in folders below it, unless they are checkpoints themselves.
        but: A checkpoint to leave out.

    Cost:
        Reads every damaged checkpoint that is younger, and the intact one.
    """
    places = [
        place
        for place in folder.iterdir()
        if not place.name.startswith(".") and not place.is_symlink() and place != but
    ]
    for place in sorted(places, key=lambda place: place.stat().st_mtime_ns, reverse=True):
        if find_damage(place, needs_digest=True) is None:
            return place
    return None


# Writing beside.


@contextmanager
def part_beside(path: Path, *, is_folder: bool = False) -> Iterator[Path]:
    """Make a new file or folder beside path and yield it; what is left of it at the end is taken away.

    It is locked as long as this process lives, so that a sweep, by whatever process, tells it from what a dead one left
    behind.
    """
    part, lock = _make_part(path, is_folder=is_folder)
    try:
        yield part
    finally:
        _take_away(part)
        os.close(lock)


def replace_folder(part: Path, path: Path) -> None:
    """Put a committed folder in the place of path, whose old content goes only when the new one stands there.

    Raises:
        OSError: There is a folder at path that is no checkpoint.
    """
    old = None
    if path.is_dir() and not path.is_symlink() and not _is_checkpoint_folder(path):
        raise OSError(f"there is a folder {path} that is no checkpoint, and it is not replaced: give another name")
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.is_dir():
        # A kill between the two renames leaves no folder of this name; sweep gives the old one its name back.
        old = _new_name(path, "old")
        path.rename(old)
    part.rename(path)
    sync_folder(path.parent)
    if old is not None:
        shutil.rmtree(old)


def find_damage(place: Path, *, needs_digest: bool = False) -> str | None:
    """Return what is wrong with a checkpoint; None where it is intact.

    Args:
        place: A file or a folder.
        needs_digest: Whether a checkpoint without a digest, in which damage cannot be noticed, counts as damaged.
    """
    try:
        has_digest = _is_intact(place)
    except (_DamageError, OSError) as damage:
        return str(damage)
    return "it has no digest" if needs_digest and not has_digest else None


def is_own(path: Path) -> bool:
    """Return whether this package wrote what is at path: a file with a digest, or a folder with a commit record and
    nothing that is not in it.

    The digests are not compared with the bytes. A link counts as what it points to, or as ours where that is gone.
    """
    if path.is_symlink() and not path.exists():
        return True
    try:
        if path.is_dir():
            return {place.name for place in path.iterdir()} == {RECORD, *_read_record(path)}
        with path.open("rb") as file:
            return read_comment(file) is not None
    except (_DamageError, OSError):
        return False


def remove(path: Path) -> None:
    """Take a checkpoint away; a kill in the middle leaves nothing that could be taken for one.

    The caller has judged the path with ``is_own``. Of a link only the link goes.
    """
    if path.is_dir() and not path.is_symlink():
        part = _new_name(path, "part")
        path.rename(part)
        shutil.rmtree(part)
    else:
        path.unlink(missing_ok=True)


def sweep(folder: Path) -> None:
    """Take away what saves of dead processes left in a folder, and give a folder its name back whose replacement
    never came.
    """
    if not folder.is_dir():
        return
    for place in sorted(folder.iterdir()):
        found = _LEFTOVER.fullmatch(place.name)
        if found is None or place.is_symlink():
            continue
        target = place.with_name(found["name"])
        if found["kind"] == "old" and not target.exists():
            log.warning("%s is given back its name: the save that was to replace it did not end.", target)
            place.rename(target)
        elif not _is_held(place):
            log.info("%s was left behind by a save that did not end, and is taken away.", place)
            with suppress(PermissionError):
                # In a folder of several users it may be another's.
                _take_away(place)


@contextmanager
def saving(path: Path | str) -> Iterator[None]:
    """Say which checkpoint was not written."""
    try:
        yield
    except CheckpointNotSavedError:
        raise
    except OSError as error:
        raise CheckpointNotSavedError(
            f"The checkpoint {path} was not saved: {error}. What stood there before is untouched. Give a folder that "
            "can be written to and has room."
        ) from error


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        # Some file systems have no sync of folders; their names are as lasting as they get.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(handle)


class _DamageError(Exception):
    """What is wrong with a checkpoint, without its name and without advice."""


class _ForgeryError(_DamageError):
    """A checkpoint should be signed and is not, or was signed with another key."""


@contextmanager
def _told_damage(path: Path, origin: str = "") -> Iterator[None]:
    """Say which checkpoint is damaged, and which one beside it is not; of a downloaded one, its origin."""
    try:
        yield
    except _ForgeryError as forgery:
        advice = "Unset the variable, or load it where it was signed."
        raise UnsafeCheckpointError(f"{origin or path} is not loaded: {forgery}. {advice}") from forgery
    except _DamageError as damage:
        if origin:
            advice = 'ckpt_path="last" finds the newest intact checkpoint of the run.'
            raise DamagedCheckpointError(f"{origin} is damaged and was not loaded: {damage}. {advice}") from damage
        intact = newest_intact(path.parent, but=path)
        advice = (
            f"The newest intact checkpoint beside it is {intact}."
            if intact
            else f"There is no intact checkpoint in {path.parent.resolve()}."
        )
        raise DamagedCheckpointError(f"{path} is damaged and was not loaded: {damage}. {advice}") from damage


def _is_intact(place: Path) -> bool:
    """Whether a place is a checkpoint with digests that match; raises what is wrong with it."""
    if place.is_dir():
        if (place / RECORD).is_file():
            _judge_folder(place, (0, 1))
            return True
        return False
    with place.open("rb") as file:
        return _judge_file(file)


def _is_checkpoint_folder(folder: Path) -> bool:
    """Whether a folder is empty, was committed (also where it is damaged by now), or is one of Lightning's for
    sharded models.
    """
    names = {place.name for place in folder.iterdir()}
    return not names or RECORD in names or {".metadata", "meta.pt"} <= names


def _read_record(folder: Path) -> dict[str, Digest]:
    try:
        record = json.loads((folder / RECORD).read_bytes())
        listed = record["files"]
        is_whole = record["sha256"] == _hash_listing(listed)
        digests = {name: Digest(str(sha256), int(num_bytes)) for name, (sha256, num_bytes) in listed.items()}
    except FileNotFoundError:
        raise _DamageError(
            f"it has no {RECORD}, which is written last: its save did not end, or another program wrote it (then "
            "lightning_fastft.checkpoint.files.commit_folder takes its files as they are)"
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _DamageError(f"its {RECORD} cannot be read ({error})") from error
    if not is_whole or any(name != Path(name).name for name in digests):
        raise _DamageError(f"its {RECORD} was changed after it was written")
    return digests


def _judge_folder(folder: Path, share: tuple[int, int]) -> None:
    digests = _read_record(folder)
    _judge_signature(*_read_signature(folder))
    for name in sorted(digests)[share[0] :: share[1]]:
        expected = digests[name]
        found = hash_file(folder / name) if (folder / name).is_file() else None
        if found != expected:
            raise _DamageError(f"{name} should be {_describe(expected)} and is {_describe(found)}")


def _read_signature(folder: Path) -> tuple[str, str]:
    record = json.loads((folder / RECORD).read_bytes())
    return str(record["sha256"]), str(record.get("hmac_sha256", ""))


def _describe(digest: Digest | None) -> str:
    return "missing" if digest is None else f"{digest.num_bytes} bytes with SHA-256 {digest.sha256}"


def _judge_file(file: IO[bytes]) -> bool:
    """Whether an open file has a digest, which it then matches; raises what is wrong with it."""
    seal = _read_seal(file)
    if seal is None:
        tail = _read_tail(file, _END_BYTES)
        if tail.startswith(_END_SIGNATURE) and tail.endswith(b"\0\0"):
            _judge_signature("", "")
            return False
        raise _DamageError("its end is neither that of a checkpoint with a digest nor that of a file of torch.save")
    expected = seal.digest
    num_bytes = os.fstat(file.fileno()).st_size - seal.num_bytes
    if num_bytes != expected.num_bytes:
        raise _DamageError(f"expected {expected.num_bytes} bytes, found {num_bytes}")
    file.seek(0)
    found = _hash_to(file, num_bytes)
    if found != expected:
        raise _DamageError(f"expected SHA-256 {expected.sha256}, found {found.sha256}")
    _judge_signature(expected.sha256, seal.signature)
    return True


class _Seal(NamedTuple):
    """What the comment of an archive says."""

    digest: Digest
    signature: str
    num_bytes: int


def _read_seal(file: IO[bytes]) -> _Seal | None:
    for num_bytes in (_COMMENT_BYTES, _SIGNED_BYTES):
        tail = _read_tail(file, _END_BYTES + num_bytes)
        found = _COMMENT.fullmatch(tail[_END_BYTES:])
        if (
            found is not None
            and tail.startswith(_END_SIGNATURE)
            and tail[_END_BYTES - 2 : _END_BYTES] == num_bytes.to_bytes(2, "little")
        ):
            return _Seal(Digest(found[1].decode(), int(found[2])), (found[3] or b"").decode(), num_bytes)
    return None


def _judge_signature(sha256: str, signature: str) -> None:
    forgery = describe_forgery(sha256, signature)
    if forgery:
        raise _ForgeryError(forgery)


def _judge_sizes(file: IO[bytes], path: Path | str) -> None:
    try:
        check_sizes(file, name=str(path))
    except zipfile.BadZipFile as error:
        raise _DamageError(f"it is no archive of torch.save ({error})") from error


def _read_tail(file: IO[bytes], num_bytes: int) -> bytes:
    file.seek(max(0, os.fstat(file.fileno()).st_size - num_bytes))
    return file.read(num_bytes)


def _hash_to(file: IO[bytes], num_bytes: int) -> Digest:
    """Hash the next bytes of a file."""
    digest, num_left = hashlib.sha256(), num_bytes
    while num_left and (chunk := file.read(min(_CHUNK_BYTES, num_left))):
        digest.update(chunk)
        num_left -= len(chunk)
    return Digest(digest.hexdigest(), num_bytes - num_left)


def _hash_listing(listed: Mapping[str, Iterable[Any]]) -> str:
    return hashlib.sha256(json.dumps(listed, sort_keys=True).encode()).hexdigest()


class _HashingWriter:
    """What torch.save writes to: hashes on the way, and holds back the last bytes, in which the length of the
    comment must be noted.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._digest, self._end, self._num_bytes = file, hashlib.sha256(), b"", 0
        self._failure: OSError | None = None

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        if len(view) >= _END_BYTES:
            self._put(self._end)
            self._put(view[:-_END_BYTES])
            self._end = bytes(view[-_END_BYTES:])
        else:
            joined = self._end + bytes(view)
            self._put(joined[:-_END_BYTES])
            self._end = joined[-_END_BYTES:]
        return len(view)

    def flush(self) -> None:
        """Nothing is held back that could be written."""

    def finish(self) -> Digest:
        """Write the end of the archive with the digest as its comment.

        Raises:
            OSError: A write failed, now or before.
        """
        # Kept until here: an exception inside torch's writer makes it write on while it is unwound.
        assert self._failure is not None or (self._end.startswith(_END_SIGNATURE) and self._end.endswith(b"\0\0")), (
            "torch.save ends a zip archive"
        )
        is_signed = bool(sign(""))
        self._put(self._end[:-2] + (_SIGNED_BYTES if is_signed else _COMMENT_BYTES).to_bytes(2, "little"))
        digest = Digest(self._digest.hexdigest(), self._num_bytes)
        signature = f" hmac-sha256 {sign(digest.sha256)}" if is_signed else ""
        self._put(f"lightning_fastft sha256 {digest.sha256} bytes {digest.num_bytes:020d}{signature}".encode())
        if self._failure is not None:
            raise self._failure
        return digest

    def _put(self, data: Any) -> None:
        if self._failure is not None:
            return
        try:
            self._file.write(data)
        except OSError as error:
            self._failure = error
            return
        self._digest.update(data)
        self._num_bytes += len(data)


def _write_archive(content: object, file: IO[bytes]) -> Digest:
    writer = _HashingWriter(file)
    torch.save(content, writer)  # type: ignore[arg-type]
    return writer.finish()


def _new_name(path: Path, kind: str) -> Path:
    return path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.{kind}")


def _make_part(path: Path, *, is_folder: bool) -> tuple[Path, int]:
    # Not there on Windows, where the strategies leave checkpoints to Lightning; the package is imported there all the
    # same.
    import fcntl

    while True:
        part = _new_name(path, "part")
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
            # What a kill leaves behind there is then never swept: without locks nobody knows whose it is.
            if error.errno not in _HAS_NO_LOCKS:
                os.close(lock)
                _take_away(part)
                raise
        # A sweep may have taken it away between the two calls.
        if os.fstat(lock).st_nlink > 0 and part.exists():
            return part, lock
        os.close(lock)


def _is_held(place: Path) -> bool:
    """Whether a living process is still writing there."""
    import fcntl

    try:
        lock = os.open(place, os.O_RDONLY)
    except OSError:
        # Gone by now, or another user's.
        return True
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(lock)
    return False


def _take_away(place: Path) -> None:
    if place.is_dir():
        shutil.rmtree(place, ignore_errors=True)
    else:
        place.unlink(missing_ok=True)
