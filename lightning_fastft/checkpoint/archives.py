"""Check the memory that a checkpoint archive needs before it is unpickled."""

from __future__ import annotations

import os
import pickletools
import zipfile
from collections.abc import Iterator
from typing import IO

from lightning_fastft.core.errors import UnsafeCheckpointError

_PUTS = ("BINPUT", "LONG_BINPUT", "MEMOIZE", "PUT")
_GETS = ("BINGET", "LONG_BINGET", "GET")
_TEXTS = ("BINUNICODE", "SHORT_BINUNICODE")
_BYTEARRAY = "builtins bytearray"


def check_sizes(file: IO[bytes], *, name: str) -> None:
    """Reject an archive that needs more memory than its size.

    ``torch.save`` stores records uncompressed. Compressed or overlapping records come from another program: a few MiB
    can expand to TiB. A pickle of a few bytes can allocate a bytearray of any length.

    Raises:
        UnsafeCheckpointError: A record is compressed, the records are larger than the file, or the pickle allocates an
            empty buffer.
        zipfile.BadZipFile: The file is not a zip archive.

    Cost:
        Reads the directory of the archive and its pickle: milliseconds, for any size of the tensors.
    """
    num_bytes = os.fstat(file.fileno()).st_size
    file.seek(0)
    with zipfile.ZipFile(file) as archive:
        records = archive.infolist()
        packed = next(
            (
                record
                for record in records
                if record.compress_type != zipfile.ZIP_STORED or record.file_size != record.compress_size
            ),
            None,
        )
        if packed is not None:
            raise UnsafeCheckpointError(
                f"{name} is not loaded: its record {packed.filename[:80]!r} is compressed from {packed.file_size} to "
                f"{packed.compress_size} bytes. torch.save stores records as they are; write the file again with it."
            )
        claimed = sum(record.file_size for record in records)
        if claimed > num_bytes:
            raise UnsafeCheckpointError(
                f"{name} is not loaded: it has {num_bytes} bytes, but its records claim {claimed}, so they overlap."
            )
        for record in records:
            if record.filename.endswith("/data.pkl") and _asks_for_buffer(archive.read(record)):
                raise UnsafeCheckpointError(
                    f"{name} is not loaded: its pickle allocates an empty buffer of arbitrary length."
                )


def _asks_for_buffer(pickled: bytes) -> bool:
    """Return whether a pickle calls bytearray with an argument other than text; Python pickles a bytearray as text."""
    operations = _operations(pickled)
    places: set[object] = set()
    is_class = False
    for number, (name, argument) in enumerate(operations):
        if name in _PUTS:
            continue
        is_class = argument == _BYTEARRAY if name == "GLOBAL" else name in _GETS and argument in places
        if not is_class:
            continue
        if operations[number + 1 : number + 2] and operations[number + 1][0] in _PUTS:
            places.add(operations[number + 1][1])
        rest = [entry[0] for entry in operations[number + 1 : number + 9] if entry[0] not in _PUTS]
        is_text = (
            rest[:1]
            and rest[0] in _TEXTS
            and rest[1:2]
            and rest[1] in (*_TEXTS, *_GETS)
            and rest[2:4] == ["TUPLE2", "REDUCE"]
        )
        if not is_text and rest[:2] != ["EMPTY_TUPLE", "REDUCE"]:
            return True
    return False


def _operations(pickled: bytes) -> list[tuple[str, object]]:
    """Return the operations of a pickle up to the first invalid one, where unpickling fails too."""

    def read() -> Iterator[tuple[str, object]]:
        try:
            for operation, argument, _ in pickletools.genops(pickled):
                yield operation.name, argument
        except ValueError:
            return

    return list(read())
