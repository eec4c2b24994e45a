"""TokenizedDataset: examples as tokens, in memory or memory-mapped from a folder.

A folder is written under a temporary name and renamed, so that it is complete if it exists.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import shutil
import socket
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from lightning_fastft.core.errors import DataError, OptionError
from lightning_fastft.core.files import sync_file
from lightning_fastft.packing.document import IGNORED_LABEL, Document
from lightning_fastft.packing.images import ImageStore
from lightning_fastft.packing.step_plan import mix_bits
from lightning_fastft.packing.store.completion_store import CompletionStore
from lightning_fastft.packing.store.report import IngestReport

# Increase it if the same tokens give other files; ``_FINGERPRINT_VERSION`` is for rows that give other tokens.
FORMAT_VERSION = 3
# Dtype of each file of a folder.
DTYPES = {"ids": np.int32, "trained": np.uint8, "start": np.int64, "num_labelled": np.int64}
_ALL_DTYPES = {**DTYPES, **ImageStore.DTYPES, **CompletionStore.DTYPES}
META = "meta.json"
_PART = ".part-"
_BLOCK_BYTES = 2**20
_NUM_SAMPLED, _BLOCK_ROWS = 6, 2**16


class TokenizedDataset:
    """Store examples as tokens, in memory or in memory-mapped files.

    The storage is flat ids, one trained bit per token, and offsets. A memory-mapped data set is pickled as its path.
    Images are stored in encoded form, or as paths. Either all examples have completions, or none has.

    Args:
        id_T: Concatenated ids of all examples, int32.
        trained_bits: One bit per token, highest bit first, uint8.
        start_N1: Offset of each example, and the token count, int64.
        num_labelled_N: Trained tokens of each example after its first token, int64.
        report: Counts of the ingested rows.
        fingerprint: Digest of rows, tokenizer and options.
        content_digest: Value of the property if it is known.
        path: Folder of the arrays; None if they are in memory.
        images: The images of the examples; None if there are none.
        completions: The completions of the examples; None if there are none.
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
        content_digest: str | None = None,
        path: Path | None = None,
        images: ImageStore | None = None,
        completions: CompletionStore | None = None,
    ) -> None:
        self.images = images
        self.completions = completions
        self.report = report
        self.fingerprint = fingerprint
        self.path = path
        self.num_labelled_N = num_labelled_N
        self.length_N = np.diff(start_N1)
        self._id_T = id_T
        self._trained_bits = trained_bits
        self._start_N1 = start_N1
        self._content_digest = content_digest

    @classmethod
    def open(cls, path: str | Path, *, is_checked: bool = True) -> TokenizedDataset:
        """Return the data set of a cache entry, memory-mapped.

        is_checked verifies the digests of all files.

        Raises:
            DataError: The entry is incomplete, damaged, or of another version.

        Cost:
            One pass over the files, about 1.2 GB/s; unchecked, only the metadata.
        """
        path = Path(path)
        try:
            return cls._open(path, is_checked=is_checked)
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise DataError(
                f"The cache entry {path} is damaged: {error}. Delete the folder, and the data is tokenised again."
            ) from error

    @classmethod
    def _open(cls, path: Path, *, is_checked: bool) -> TokenizedDataset:
        meta = json.loads((path / META).read_text(encoding="utf-8"))
        if meta["version"] != FORMAT_VERSION:
            raise DataError(f"it has version {meta['version']}, and this release reads {FORMAT_VERSION}")
        digests = meta["sha256"]
        if meta["own_sha256"] != digest_meta(meta):
            raise DataError(f"{META} is damaged")
        for name in digests if is_checked else ():
            if digest_file(path / name) != digests[name]:
                raise DataError(f"{name} is damaged")
        arrays = {
            name: np.memmap(path / f"{name}.bin", dtype=dtype, mode="r")
            for name, dtype in _ALL_DTYPES.items()
            if name in DTYPES or f"{name}.bin" in digests
        }
        images = {name: arrays[name] for name in ImageStore.DTYPES if name in arrays}
        completions = {name: arrays[name] for name in CompletionStore.DTYPES if name in arrays}
        dataset = cls(
            id_T=arrays["ids"],
            trained_bits=arrays["trained"],
            start_N1=np.asarray(arrays["start"]),
            num_labelled_N=np.asarray(arrays["num_labelled"]),
            report=IngestReport.from_dict(meta["report"]),
            fingerprint=str(meta["fingerprint"]),
            content_digest=combine_digests(digests),
            path=path,
            images=ImageStore(images) if images else None,
            completions=CompletionStore(completions) if completions else None,
        )
        dataset.check_bounds()
        if is_checked and not 0 <= int(arrays["ids"].min()) <= int(arrays["ids"].max()) <= dataset.report.highest_id:
            raise DataError(f"its ids are outside of 0 to {dataset.report.highest_id}")
        return dataset

    @property
    def content_digest(self) -> str:
        """Digest of the tokens and their trained bits, independent of their source and storage.

        Cost:
            Nothing for a cache entry; one pass over the tokens, once, if they are in memory.
        """
        if self._content_digest is None:
            arrays = {
                "ids": self._id_T,
                "trained": self._trained_bits,
                "start": self._start_N1,
                "num_labelled": self.num_labelled_N,
                **({} if self.images is None else self.images.arrays),
                **({} if self.completions is None else self.completions.arrays),
            }
            self._content_digest = combine_digests(
                {f"{name}.bin": hashlib.sha256(array.data).hexdigest() for name, array in arrays.items()}
            )
        return self._content_digest

    def has_prompt_of_next(self) -> np.ndarray:
        """Return whether each example has the prompt of the next one (the last: of the first), bool, shape (N,).

        Raises:
            DataError: The examples have no prompts.
        """
        if self.completions is None:
            raise DataError("The examples have no completions, and so no prompts.")
        length_N = self.completions.num_prompt_tokens_N
        is_same_N = length_N == np.roll(length_N, -1)
        for number in np.flatnonzero(is_same_N).tolist():
            one, other = (int(self._start_N1[place]) for place in (number, (number + 1) % len(self)))
            length = int(length_N[number])
            is_same_N[number] = np.array_equal(self._id_T[one : one + length], self._id_T[other : other + length])
        return is_same_N

    def hash_samples(self, number_N: np.ndarray) -> np.ndarray:
        """Return a hash of the length and of six tokens of each example, uint64, which equal examples share.

        Cost:
            About 0.3 s for a million examples.
        """
        share_K = np.arange(1, _NUM_SAMPLED + 1) / (_NUM_SAMPLED + 1)
        factor_K = mix_bits(np.arange(_NUM_SAMPLED), seed=0, stream=0)
        hash_N = self.length_N[number_N].astype(np.uint64)
        for begin in range(0, len(number_N), _BLOCK_ROWS):
            block = slice(begin, begin + _BLOCK_ROWS)
            place_NK = (share_K * self.length_N[number_N[block], None]).astype(np.int64)
            id_NK = self._id_T[place_NK + self._start_N1[number_N[block], None]]
            hash_N[block] += (id_NK.astype(np.uint64) * factor_K).sum(axis=1)
        return hash_N

    def hash_tokens(self, number_N: np.ndarray) -> np.ndarray:
        """Return a hash of all tokens of each example, uint64.

        Cost:
            About 1 s for a million examples of 100 tokens.
        """
        factor_T = mix_bits(np.arange(int(self.length_N[number_N].max(initial=0))), seed=0, stream=1)
        return np.array(
            [
                (self._id_T[begin:end].astype(np.uint64) * factor_T[: end - begin]).sum()
                for begin, end in zip(self._start_N1[number_N].tolist(), self._start_N1[number_N + 1].tolist())
            ],
            dtype=np.uint64,
        )

    def check_bounds(self) -> None:
        """Raise DataError if offsets, counts and ids are inconsistent, which would cause reads out of bounds."""
        num_tokens, num_examples = len(self._id_T), len(self)
        if len(self._trained_bits) != -(-num_tokens // 8) or len(self.num_labelled_N) != num_examples:
            raise DataError("its files are of different lengths")
        if num_examples and (
            self._start_N1[0] != 0 or self._start_N1[-1] != num_tokens or int(self.length_N.min()) < 1
        ):
            raise DataError("its offsets are not ascending")
        if self.report.num_documents != num_examples or self.report.num_tokens != num_tokens:
            raise DataError("its report has the counts of other examples")
        if self.images is not None:
            self.images.check_bounds(num_examples=num_examples)
        if self.completions is not None:
            self.completions.check_bounds(length_N=self.length_N)

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
        images = () if self.images is None else self.images[index]
        document = Document(ids, np.where(is_trained, ids, IGNORED_LABEL), images)
        if self.completions is None:
            return document
        return document._replace(**self.completions.read(index, start=begin)._asdict())

    def __iter__(self) -> Iterator[Document]:
        return (self[index] for index in range(len(self)))

    def __reduce__(self) -> tuple[Callable[..., TokenizedDataset], tuple[Any, ...]]:
        if self.path is not None:
            # This process has verified the entry.
            return functools.partial(TokenizedDataset.open, is_checked=False), (self.path,)
        held = functools.partial(
            TokenizedDataset,
            id_T=self._id_T,
            trained_bits=self._trained_bits,
            start_N1=self._start_N1,
            num_labelled_N=self.num_labelled_N,
            report=self.report,
            fingerprint=self.fingerprint,
            content_digest=self._content_digest,
            images=self.images,
            completions=self.completions,
        )
        return held, ()


def combine_digests(digests: Mapping[str, str]) -> str:
    """Return one digest of the token files of an entry, and of those of its images and completions if it has any."""
    names = (f"{name}.bin" for name in _ALL_DTYPES)
    return hashlib.sha256(json.dumps([digests[name] for name in names if name in digests]).encode()).hexdigest()


def digest_meta(meta: Mapping[str, Any]) -> str:
    """Return the digest of an entry's metadata, without the digest itself."""
    return hashlib.sha256(
        json.dumps({name: value for name, value in meta.items() if name != "own_sha256"}, sort_keys=True).encode()
    ).hexdigest()


def digest_file(path: Path) -> str:
    """Return the SHA-256 of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


@contextmanager
def write_beside(target: Path) -> Iterator[Path]:
    """Yield a temporary folder that is renamed to target at the end, and removed after an error.

    Raises:
        OptionError: The folder cannot be written, or the disk is full.
    """
    part = target.parent / f"{_PART}{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex}"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _sweep(target.parent)
        part.mkdir()
        yield part
        try:
            part.rename(target)
        except OSError:
            # Another process was first with the same content.
            if not target.is_dir():
                raise
    except OSError as error:
        raise OptionError(
            f"The cache folder {target.parent} cannot be written: {error.strerror or error}. Give another one with "
            "--data.cache_dir FOLDER, or keep the tokens in memory with --data.cache_dir null."
        ) from error
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _sweep(folder: Path) -> None:
    """Remove temporary folders of killed processes of this machine."""
    for part in folder.glob(f"{_PART}{socket.gethostname()}-*-*"):
        try:
            os.kill(int(part.name.rsplit("-", 2)[1]), 0)
        except (ProcessLookupError, ValueError):
            shutil.rmtree(part, ignore_errors=True)
        except PermissionError:
            continue


def replace_file(path: Path, content: bytes) -> None:
    """Write a file atomically: under a temporary name, then renamed.

    Raises:
        OptionError: The folder cannot be written, or the disk is full.
    """
    part = path.with_name(f"{_PART}{path.name}-{uuid.uuid4().hex}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            write_file(part, content)
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        raise OptionError(
            f"{path} cannot be written: {error.strerror or error}. Give another file or free the disk."
        ) from error


def write_file(path: Path, content: bytes) -> None:
    """Write a file and sync it to the disk."""
    with path.open("wb") as file:
        file.write(content)
        sync_file(file)
