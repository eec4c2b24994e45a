"""Compute SHA-256 digests, and store one in the comment of a ``torch.save`` archive."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch

from lightning_fastft.checkpoint.signing import sign

_CHUNK_BYTES = 1 << 20

# The last record of a zip archive: signature, 16 bytes, and the length of the comment in two bytes.
END_SIGNATURE = b"PK\x05\x06"

END_BYTES = 22

# The comment is text, so that it cannot contain another end record. torch.load reads archives with comments up to
# 64 KiB.
_COMMENT = re.compile(rb"lightning_fastft sha256 ([0-9a-f]{64}) bytes (\d{20})(?: hmac-sha256 ([0-9a-f]{64}))?")

_COMMENT_BYTES = len(b"lightning_fastft sha256  bytes ") + 64 + 20

_SIGNED_BYTES = _COMMENT_BYTES + len(b" hmac-sha256 ") + 64


class Digest(NamedTuple):
    """A SHA-256 (hexadecimal) and the number of hashed bytes."""

    sha256: str
    num_bytes: int


def read_comment(file: IO[bytes]) -> Digest | None:
    """Return the digest in the comment of a checkpoint file without verifying it; None if there is none."""
    seal = read_seal(file)
    return None if seal is None else seal[0]


def hash_file(path: Path) -> Digest:
    """Return the digest of all bytes of a file."""
    with path.open("rb") as file:
        return hash_to(file, path.stat().st_size)


def read_seal(file: IO[bytes]) -> tuple[Digest, str, int] | None:
    """Return the digest, the signature and the length of the comment; None if there is no such comment."""
    for num_bytes in (_COMMENT_BYTES, _SIGNED_BYTES):
        tail = read_tail(file, END_BYTES + num_bytes)
        found = _COMMENT.fullmatch(tail[END_BYTES:])
        if (
            found is not None
            and tail.startswith(END_SIGNATURE)
            and tail[END_BYTES - 2 : END_BYTES] == num_bytes.to_bytes(2, "little")
        ):
            return Digest(found[1].decode(), int(found[2])), (found[3] or b"").decode(), num_bytes
    return None


def read_tail(file: IO[bytes], num_bytes: int) -> bytes:
    """Return the last bytes of a file."""
    file.seek(max(0, os.fstat(file.fileno()).st_size - num_bytes))
    return file.read(num_bytes)


def hash_to(file: IO[bytes], num_bytes: int) -> Digest:
    """Return the digest of the next bytes of a file."""
    digest, num_left = hashlib.sha256(), num_bytes
    while num_left and (chunk := file.read(min(_CHUNK_BYTES, num_left))):
        digest.update(chunk)
        num_left -= len(chunk)
    return Digest(digest.hexdigest(), num_bytes - num_left)


def hash_listing(listed: Mapping[str, Iterable[Any]]) -> str:
    """Return the digest of the file list of a commit record."""
    return hashlib.sha256(json.dumps(listed, sort_keys=True).encode()).hexdigest()


class _HashingWriter:
    """A file object for torch.save that hashes all bytes, and buffers the last ones to set the comment length."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._digest, self._end, self._num_bytes = file, hashlib.sha256(), b"", 0
        self._failure: OSError | None = None

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        if len(view) >= END_BYTES:
            self._put(self._end)
            self._put(view[:-END_BYTES])
            self._end = bytes(view[-END_BYTES:])
        else:
            joined = self._end + bytes(view)
            self._put(joined[:-END_BYTES])
            self._end = joined[-END_BYTES:]
        return len(view)

    def flush(self) -> None:
        """Do nothing; only the last bytes are buffered, until finish."""

    def finish(self) -> Digest:
        """Write the end of the archive with the digest as its comment.

        Raises:
            OSError: This write or an earlier one failed.
        """
        # Write errors are raised here, because torch's writer keeps writing while an exception propagates.
        assert self._failure is not None or (self._end.startswith(END_SIGNATURE) and self._end.endswith(b"\0\0")), (
            "torch.save writes a zip archive"
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


def write_archive(content: object, file: IO[bytes]) -> Digest:
    """Write an archive of torch.save with its digest as comment, and return the digest."""
    writer = _HashingWriter(file)
    torch.save(content, writer)  # type: ignore[arg-type]
    return writer.finish()
