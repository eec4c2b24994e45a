"""TeacherStore: what a teacher says about the labelled tokens of a data set, on disk, one row of each array per token.

Axes: L labelled tokens of a data set, N examples, R labelled rows of a pack, W values of an array per token.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch

from lightning_fastft.core.errors import DataError, OptionError
from lightning_fastft.kernels.logit_rows import Head
from lightning_fastft.packing.store.dataset import digest_file, digest_meta, replace_file

HEAD_FILE, META_FILE = "head.safetensors", "meta.json"
_VERSION = 1


class TeacherRows(NamedTuple):
    """What a teacher says about the documents of a pack.

    Args:
        numbers: Number of each document in its data set.
        arrays: Values by name, each (R, W), with a row for each labelled token in the order of the pack.
        head: Output layer of the teacher; None if the arrays need none.
    """

    numbers: Sequence[int]
    arrays: Mapping[str, torch.Tensor]
    head: Head | None


class TeacherStore:
    """Write the rows of a teacher once, and read them memory-mapped; rows of an example are consecutive.

    Args:
        root: Folder of all stores; each key has a folder of its own inside it.
        key: What the rows depend on, by name: data, teacher, and options.
        witnesses: Digests of what the key only names, such as the teacher's weights; "" is not compared.
        num_labelled_N: Labelled tokens of each example.
    """

    def __init__(
        self, root: Path, *, key: Mapping[str, Any], witnesses: Mapping[str, str], num_labelled_N: np.ndarray
    ) -> None:
        content = json.dumps(key, sort_keys=True)
        self.folder = root / hashlib.sha256(content.encode()).hexdigest()[:32]
        self._key = dict(key)
        self._witnesses = dict(witnesses)
        self._start_N1 = np.concatenate([[0], np.cumsum(num_labelled_N)])
        self._arrays: dict[str, torch.Tensor] = {}
        self._head: Mapping[str, Any] | None = None

    @property
    def num_rows(self) -> int:
        """Labelled tokens of the data set."""
        return int(self._start_N1[-1])

    @property
    def is_written(self) -> bool:
        """Whether the store was written to its end."""
        return (self.folder / META_FILE).is_file()

    @property
    def head_digest(self) -> str | None:
        """Digest of the file of the teacher's output layer; None if there is none, or before ``open``."""
        return None if self._head is None else str(self._head["sha256"])

    # Writing.

    def write(self, packs: Iterable[TeacherRows]) -> None:
        """Write the rows of all examples, in packs of any order.

        Raises:
            OptionError: The folder cannot be written, or the disk is full.

        Cost:
            A host sync for each pack.
        """
        head: Head | None = None
        shapes: dict[str, tuple[str, int]] = {}
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with ExitStack() as stack:
                files: dict[str, BinaryIO] = {}
                for rows in packs:
                    head = rows.head
                    for name, value_RW in rows.arrays.items():
                        if name not in files:
                            files[name] = stack.enter_context((self.folder / f"{name}.bin").open("wb"))
                            shapes[name] = str(value_RW.dtype).removeprefix("torch."), value_RW.shape[1]
                        self._write_rows(files[name], rows.numbers, value_RW.cpu().contiguous())
            head_facts = None if head is None else self._write_head(head)
        except OSError as error:
            raise OptionError(
                f"The teacher's store {self.folder} cannot be written: {error.strerror or error}. Free the disk, or "
                "give another folder: --model.store FOLDER."
            ) from error
        meta = {
            "version": _VERSION, "key": self._key, "witnesses": self._witnesses, "num_rows": self.num_rows,
            "arrays": shapes, "head": head_facts,
        }  # fmt: skip
        # Last: a folder that has it is complete.
        replace_file(self.folder / META_FILE, json.dumps({**meta, "own_sha256": digest_meta(meta)}).encode())

    def _write_rows(self, file: BinaryIO, numbers: Sequence[int], value_RW: torch.Tensor) -> None:
        row, row_bytes = 0, value_RW.shape[1] * value_RW.element_size()
        for begin, end in self._places(numbers):
            # Not through a memory map, in which a full disk would kill the process.
            file.seek(begin * row_bytes)
            file.write(value_RW[row : row + end - begin].view(torch.uint8).numpy().data)
            row += end - begin

    def _write_head(self, head: Head) -> dict[str, Any]:
        from safetensors.torch import save_file

        tensors = {"weight": head.weight_VD, "bias": head.bias_V}
        path = self.folder / HEAD_FILE
        save_file({name: value.cpu().contiguous() for name, value in tensors.items() if value is not None}, path)
        return {"sha256": digest_file(path), "scale": head.scale, "softcap": head.softcap}

    def _places(self, numbers: Sequence[int]) -> list[tuple[int, int]]:
        """Return the first row and the end of each example."""
        return [(int(self._start_N1[number]), int(self._start_N1[number + 1])) for number in numbers]

    # Reading.

    def open(self) -> None:
        """Map the files into memory.

        Raises:
            DataError: The store is missing, damaged, or of other data, another teacher or another tokenizer.

        Cost:
            Reads the output layer once for its digest; of the other files only the size.
        """
        if not self.is_written:
            raise DataError(
                f"The teacher's store {self.folder} is missing on this machine, where another rank has it: give store "
                "a folder that all machines share."
            )
        try:
            meta = json.loads((self.folder / META_FILE).read_text(encoding="utf-8"))
            if meta["version"] != _VERSION or meta["own_sha256"] != digest_meta(meta):
                raise DataError(f"{META_FILE} is damaged or of another version")
            self._compare(meta)
            for name, (dtype_name, width) in meta["arrays"].items():
                dtype: torch.dtype = getattr(torch, dtype_name)
                path, num_values = self.folder / f"{name}.bin", self.num_rows * width
                if path.stat().st_size != num_values * dtype.itemsize:
                    raise DataError(f"{path.name} has {path.stat().st_size} bytes of {num_values * dtype.itemsize}")
                values = torch.from_file(str(path), shared=False, size=num_values, dtype=dtype)
                self._arrays[name] = values.view(-1, width)
            self._head = meta["head"]
            if self._head is not None and digest_file(self.folder / HEAD_FILE) != self._head["sha256"]:
                raise DataError(f"{HEAD_FILE} is damaged")
        except (DataError, OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise DataError(
                f"The teacher's store {self.folder} cannot be used: {error}. Delete the folder and run the same "
                "command again, which writes it anew."
            ) from error

    def _compare(self, meta: Mapping[str, Any]) -> None:
        """Raise DataError if the store belongs to something else."""
        for name in self._key.keys() | meta["key"].keys():
            found, wanted = meta["key"].get(name), self._key.get(name)
            if found != wanted:
                raise DataError(f"it was written for {name} {found!s:.40}, and this run has {wanted!s:.40}")
        for name, wanted in self._witnesses.items():
            found = meta["witnesses"].get(name, "")
            if found and wanted and found != wanted:
                raise DataError(f"{name} has changed since it was written (digest {found[:12]}, now {wanted[:12]})")
        if meta["num_rows"] != self.num_rows:
            raise DataError(f"it has {meta['num_rows']} labelled tokens, and the data has {self.num_rows}")

    def load_head(self, device: torch.device) -> Head:
        """Return the teacher's output layer on a device, without states."""
        from safetensors.torch import load_file

        assert self._head is not None
        tensors = load_file(self.folder / HEAD_FILE, device=str(device))
        weight_VD = tensors["weight"]
        return Head(
            weight_VD.new_empty(0, weight_VD.shape[1]),
            weight_VD,
            tensors.get("bias"),
            self._head["scale"],
            self._head["softcap"],
        )

    def read(self, numbers: Sequence[int], *, num_padded: int, device: torch.device) -> dict[str, torch.Tensor]:
        """Return the rows of the documents of a pack on a device, each (R, W); 0 in padding rows.

        Cost:
            One copy of the rows into pinned memory, and an asynchronous copy to the device.
        """
        found: dict[str, torch.Tensor] = {}
        for name, value_LW in self._arrays.items():
            width, is_pinned = value_LW.shape[1], device.type == "cuda"
            value_RW = torch.empty(num_padded, width, dtype=value_LW.dtype, pin_memory=is_pinned)
            row = 0
            for begin, end in self._places(numbers):
                value_RW[row : row + end - begin] = value_LW[begin:end]
                row += end - begin
            value_RW[row:] = 0
            found[name] = value_RW.to(device, non_blocking=True)
        return found
