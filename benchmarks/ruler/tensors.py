"""Read and write tensors of safetensors files one at a time, so that a model is never in memory twice."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors import safe_open

# Elements of a chunk; 64-bit values computed from them take some ten MB.
PIECE = 2**22
_DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


class TensorFiles(Mapping[str, torch.Tensor]):
    """The tensors of safetensors files by their names; each is read on access.

    Args:
        paths: Files without a common name.
    """

    def __init__(self, paths: Iterable[Path]) -> None:
        self._owners = {}
        for path in paths:
            file = safe_open(path, framework="pt")
            self._owners.update(dict.fromkeys(file.keys(), file))

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._owners[name].get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._owners)

    def __len__(self) -> int:
        return len(self._owners)


def write_tensors(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    """Write a safetensors file from tensors on any device; the host holds one of them at a time.

    The file gets its name when it is complete.

    Source:
        https://github.com/huggingface/safetensors#format; the library's own function holds all bytes on the host.
    """
    header, end = {}, 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    # Values begin at a multiple of eight bytes.
    text += b" " * (-len(text) % 8)
    beside = path.with_name(f"{path.name}.part")
    with beside.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            file.write(tensor.detach().flatten().cpu().view(torch.uint8).numpy().data)
    os.replace(beside, path)


def pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Return the elements of a tensor in order, PIECE of them at a time; views if it is contiguous."""
    return iter(tensor.detach().flatten().split(PIECE))
