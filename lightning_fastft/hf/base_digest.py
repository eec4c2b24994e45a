"""A cheap digest of base weights, which identifies the base of adapters in their checkpoint."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import nn

# Blocks read per file: the beginning with the safetensors header, the end, and blocks at equal distances in between.
NUM_BLOCKS, BLOCK_BYTES = 16, 16 * 1024
_LARGEST_HEADER_BYTES = 100 * 2**20
# Values read per tensor in memory.
NUM_VALUES = 64


def digest_files(paths: Sequence[str | Path]) -> str:
    """Return a digest of weight files: sizes, headers and sampled blocks, independent of their names and order.

    It detects another model, other weights of the same model, and a truncated or shifted file. It does not detect a
    change of a few bytes between the sampled blocks. The same weights split into other files have another digest.

    Cost:
        Reads the header and at most 16 blocks of 16 KiB of each file.

    Example:
        >>> digest_files([__file__]) == digest_files([__file__])
        True
    """
    return "files:" + _join(_digest_file(Path(path)) for path in paths)


def digest_tensors(model: nn.Module, *, is_trained_too: bool) -> str:
    """Return a digest of dtypes, shapes and sampled values of the floating-point parameters in memory; an empty string
    without parameters.

    The model is that before adapters and before the first step; is_trained_too counts parameters that require gradients
    to the base.

    Cost:
        One copy of 64 values per tensor to the host, and one host sync.
    """
    names: list[str] = []
    samples: list[torch.Tensor] = []
    for name, parameter in model.named_parameters():
        is_base = is_trained_too or not parameter.requires_grad
        if (
            is_base
            and type(parameter) is nn.Parameter
            and parameter.is_floating_point()
            and parameter.numel()
            and not parameter.is_meta
        ):
            samples.append(_sample(parameter).float())
            names.append(f"{name} {parameter.dtype} {tuple(parameter.shape)}")
    if not names:
        return ""
    return "tensors:" + hashlib.sha256("\n".join(names).encode() + _join_samples(samples)).hexdigest()


def digest_values(model: nn.Module, *, file_dtype: torch.dtype | None = None) -> str:
    """Return digests of names, shapes and sampled values, separated by spaces, to compare a model that was given with
    files.

    "values" is the same in fp32 and bf16, and "halves" in fp32 and fp16. A bf16 model has "halves" only if file_dtype,
    that of its files, is bf16: its values are otherwise rounded before they are compared. The string is empty if a
    parameter is quantised, empty, on the meta device or of another dtype, if fp16 and bf16 are mixed, or if the model
    has adapters.

    Cost:
        Two copies of 64 values per tensor to the host, and two host syncs.
    """
    parameters = dict(model.named_parameters())
    are_known = all(
        type(parameter) is nn.Parameter and parameter.numel() and not parameter.is_meta
        for parameter in parameters.values()
    )
    if not parameters or not are_known or hasattr(model, "peft_config"):
        return ""
    names = "\n".join(f"{name} {tuple(parameter.shape)}" for name, parameter in parameters.items()).encode()
    dtypes = {parameter.dtype for parameter in parameters.values()}
    exact = {torch.float32, torch.float16} | ({torch.bfloat16} & {file_dtype})
    kinds = {"values": (torch.bfloat16, {torch.float32, torch.bfloat16}), "halves": (torch.float16, exact)}
    digests: list[str] = []
    for kind, (dtype, comparable) in kinds.items():
        if dtypes <= comparable:
            samples = [_sample(parameter).to(dtype).float() for parameter in parameters.values()]
            digests.append(f"{kind}:{hashlib.sha256(names + _join_samples(samples)).hexdigest()}")
    return " ".join(digests)


def _sample(parameter: nn.Parameter) -> torch.Tensor:
    flat_N = parameter.detach().reshape(-1)
    return flat_N[:: max(1, flat_N.numel() // NUM_VALUES)][:NUM_VALUES]


def _join_samples(samples: Sequence[torch.Tensor]) -> bytes:
    # A model may be on several devices.
    return torch.cat([sample_N.to(samples[0].device) for sample_N in samples]).cpu().numpy().tobytes()


def _digest_file(path: Path) -> str:
    num_bytes = path.stat().st_size
    digest = hashlib.sha256(f"{num_bytes}\n".encode())
    with path.open("rb") as file:
        header_bytes = min(8 + int.from_bytes(file.read(8), "little"), _LARGEST_HEADER_BYTES, num_bytes)
        file.seek(0)
        digest.update(file.read(header_bytes))
        last = max(header_bytes, num_bytes - BLOCK_BYTES)
        for number in range(NUM_BLOCKS):
            file.seek(header_bytes + (last - header_bytes) * number // (NUM_BLOCKS - 1))
            digest.update(file.read(BLOCK_BYTES))
    return digest.hexdigest()


def _join(digests: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(sorted(digests)).encode()).hexdigest()
