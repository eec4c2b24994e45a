"""TokenizedDataset: examples as tokens, in memory or memory-mapped, and the folder on disk that holds them.

A folder is written beside its place and renamed: it is there in full or not at all.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import socket
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np

from lightning_fastft.errors import DataError
from lightning_fastft.packing.context import IGNORED_LABEL, Document
from lightning_fastft.packing.report import IngestReport

# Raise it with every change that makes other tokens out of the same rows, or other files out of the same tokens.
FORMAT_VERSION = 1
# Type of the numbers in each file of a folder.
DTYPES = {"ids": np.int32, "trained": np.uint8, "start": np.int64, "num_labelled": np.int64}
_PART = ".part-"


class TokenizedDataset:
    """Examples as tokens, in memory or in memory-mapped files.

    Flat ids, one bit per token for "trained", and offsets. Pickling one that lies in files takes only its path along.

    Args:
        id_T: Ids of all examples one behind the other, int32.
        trained_bits: One bit per token, highest bit first, uint8.
        start_N1: Offset of each example, and the token count, int64.
        num_labelled_N: Trained tokens of each example after its first token, int64.
        report: What became of the rows.
        fingerprint: Changes when rows, tokenizer or options do.
        path: Folder that holds the arrays; None if they are in memory.
    """

    def __init__(
        self,
        *,
        id_T: np.ndarray,
        trained_bits: np.ndarray,
        start_N1: np.ndarray,
        num_labelled_N: np.ndarray,
        report: IngestReport,
        fingerprint: str,
        path: Path | None = None,
    ) -> None:
        self.report = report
        self.fingerprint = fingerprint
        self.path = path
        self.num_labelled_N = num_labelled_N
        self.length_N = np.diff(start_N1)
        self._id_T = id_T
        self._trained_bits = trained_bits
        self._start_N1 = start_N1
        self._content_digest: str | None = None

    @classmethod
    def open(cls, path: str | Path) -> TokenizedDataset:
        """Return the data set of a cache entry, memory-mapped.

        Args:
            path: The folder of the entry.

        Raises:
            DataError: The entry is not whole, or of another version of this code.
        """
        path = Path(path)
        try:
            meta = json.loads((path / "meta.json").read_text(encoding="utf-8"))
            sizes = {name: (path / f"{name}.bin").stat().st_size for name in DTYPES}
        except (OSError, ValueError) as error:
            raise DataError(f"The cache entry {path} is not whole: {error}. Delete the folder; the data is tokenised again.") from error
        if meta.get("version") != FORMAT_VERSION or sizes != meta.get("sizes"):
            raise DataError(f"The cache entry {path} is of another version or cut short. Delete the folder; the data is tokenised again.")
        arrays = {name: np.memmap(path / f"{name}.bin", dtype=dtype, mode="r") for name, dtype in DTYPES.items()}
        return cls(
            id_T=arrays["ids"],
            trained_bits=arrays["trained"],
            start_N1=np.asarray(arrays["start"]),
            num_labelled_N=np.asarray(arrays["num_labelled"]),
            report=IngestReport.from_dict(meta["report"]),
            fingerprint=meta["fingerprint"],
            path=path,
        )

    @property
    def content_digest(self) -> str:
        """Digest of the tokens and of which are trained, whatever they were made of and wherever they are kept.

        Cost:
            One pass over the tokens, once.
        """
        if self._content_digest is None:
            arrays = {"ids": self._id_T, "trained": self._trained_bits, "start": self._start_N1, "num_labelled": self.num_labelled_N}
            parts = [hashlib.sha256(arrays[name].data).hexdigest() for name in DTYPES]
            self._content_digest = hashlib.sha256(json.dumps(parts).encode()).hexdigest()
        return self._content_digest

    def __len__(self) -> int:
        return len(self.length_N)

    def __getitem__(self, index: int) -> Document:
        if not -len(self) <= index < len(self):
            raise IndexError(f"Example {index} of {len(self)}.")
        index %= len(self)
        begin, end = int(self._start_N1[index]), int(self._start_N1[index + 1])
        ids = self._id_T[begin:end].astype(np.int64)
        bits = np.unpackbits(self._trained_bits[begin // 8 : -(-end // 8)])
        is_trained = bits[begin % 8 : begin % 8 + len(ids)].astype(bool)
        return Document(ids, np.where(is_trained, ids, IGNORED_LABEL))

    def __iter__(self) -> Iterator[Document]:
        return (self[index] for index in range(len(self)))

    def __reduce__(self) -> tuple[Callable[..., TokenizedDataset], tuple[Any, ...]]:
        if self.path is not None:
            return TokenizedDataset.open, (self.path,)
        return _rebuild, (self._id_T, self._trained_bits, self._start_N1, self.num_labelled_N, self.report, self.fingerprint)


def _rebuild(
    id_T: np.ndarray, trained_bits: np.ndarray, start_N1: np.ndarray, num_labelled_N: np.ndarray, report: IngestReport, fingerprint: str
) -> TokenizedDataset:
    return TokenizedDataset(
        id_T=id_T, trained_bits=trained_bits, start_N1=start_N1, num_labelled_N=num_labelled_N, report=report, fingerprint=fingerprint
    )


@contextmanager
def write_beside(target: Path) -> Iterator[Path]:
    """Yield a new folder beside target that takes its place at the end; nothing is left of it after an error."""
    target.parent.mkdir(parents=True, exist_ok=True)
    _sweep(target.parent)
    part = target.parent / f"{_PART}{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex}"
    part.mkdir()
    try:
        yield part
        try:
            part.rename(target)
        except OSError:
            # Another process was first with the same content.
            if not target.is_dir():
                raise
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _sweep(folder: Path) -> None:
    """Take away what processes of this machine left behind when they were killed."""
    for part in folder.glob(f"{_PART}{socket.gethostname()}-*-*"):
        try:
            os.kill(int(part.name.rsplit("-", 2)[1]), 0)
        except (ProcessLookupError, ValueError):
            shutil.rmtree(part, ignore_errors=True)
        except PermissionError:
            continue


def replace_file(path: Path, content: bytes) -> None:
    """Write a file beside its place and rename it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{_PART}{path.name}-{uuid.uuid4().hex}")
    try:
        write_file(part, content)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def write_file(path: Path, content: bytes) -> None:
    """Write a file through to the disk."""
    with path.open("wb") as file:
        file.write(content)
        sync_file(file)


def sync_file(file: IO[bytes]) -> None:
    """Wait until what was written to a file is on the disk."""
    file.flush()
    os.fsync(file.fileno())
