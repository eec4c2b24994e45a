"""Checks for public entries: each returns its argument or raises an error that says what is allowed."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from lightning_fastft.core.errors import OptionError, ShapeError, UnsafeCheckpointError

if TYPE_CHECKING:
    import torch

T = TypeVar("T")


def check_int(name: str, value: int, *, low: int, high: int | None = None) -> int:
    """Return value if it is an int within [low, high]; booleans and floats are refused."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise OptionError(f"{name} must be a whole number, got {value!r} ({type(value).__name__}).")
    if value < low or (high is not None and value > high):
        allowed = f"at least {low}" if high is None else f"between {low} and {high}"
        raise OptionError(f"{name} must be {allowed}, got {value}.")
    return value


def check_share(name: str, value: float) -> float:
    """Return value if it is within [0, 1]; refuse NaN."""
    return check_float(name, value, low=0.0, high=1.0)


def check_float(name: str, value: float, *, low: float, high: float = float("inf")) -> float:
    """Return value if it is a finite number within [low, high]; NaN is refused."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise OptionError(f"{name} must be a number, got {value!r} ({type(value).__name__}).")
    # A whole number may be larger than any float.
    if not low <= value <= min(high, sys.float_info.max):
        raise OptionError(f"{name} must be a finite number between {low} and {high}, got {value}.")
    return value


def check_bool(name: str, value: bool) -> bool:
    """Return value if it is True or False; numbers and strings that read like one are refused."""
    if not isinstance(value, bool):
        raise OptionError(f"{name} must be True or False, got {value!r} ({type(value).__name__}).")
    return value


def check_string(name: str, value: str, *, may_be_empty: bool = False) -> str:
    """Return value if it is a string with something in it."""
    if not isinstance(value, str) or not (value.strip() or may_be_empty):
        raise OptionError(
            f"{name} must be a string{'' if may_be_empty else ' that is not empty'}, got {value!r} "
            f"({type(value).__name__})."
        )
    return value


def check_path(name: str, value: str | os.PathLike[str]) -> str | os.PathLike[str]:
    """Return value if it can name a file or folder."""
    if isinstance(value, os.PathLike):
        return value
    if "\0" in check_string(name, value):
        raise OptionError(f"{name} must be a path, got {value!r}, which holds a NUL character.")
    return value


def local_path(path: str | Path, *, use: str) -> Path:
    """Return the path of a local file or folder.

    Raises:
        UnsafeCheckpointError: The path is a URL.

    Example:
        >>> local_path("file:///tmp/a.ckpt", use="loaded from")
        PosixPath('/tmp/a.ckpt')
    """
    text = str(path)
    scheme, separator, rest = text.partition("://")
    if separator and scheme == "file":
        return Path(rest)
    # Path("s3://a") loses a slash.
    if separator or (":/" in text and not Path(text).exists() and text.partition(":/")[0].isalnum()):
        raise UnsafeCheckpointError(
            f"Here checkpoints are {use} local or mounted folders only, got {text!r}. A Trainer with strategy='fastft' "
            "or 'fastft_ddp' accepts URLs as str (a Path loses a slash). Otherwise copy the checkpoint first."
        )
    return Path(text).expanduser()


def check_replaceable(name: str, path: Path, *, is_ours: Callable[[bytes], bool]) -> Path:
    """Return path if there is no file, an empty one, or one that a run wrote; files of others and links are not
    replaced.

    Args:
        name: What is to be written, for the message.
        path: Where.
        is_ours: Judges the first 64 KiB of a file that is there.

    Raises:
        OptionError: Something else is there.
    """
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise OptionError(
            f"{name} cannot be written to {path}: it is a link or no file, and is not replaced. Name another file, or "
            "remove it."
        )
    if path.exists():
        with path.open("rb") as file:
            head = file.read(2**16)
        if head and not is_ours(head):
            raise OptionError(
                f"{name} would replace {path}, which no run wrote. Name another file, or move this one away."
            )
    return path


def check_tokenizer(tokenizer: object) -> None:
    """Check that a tokenizer is None, a name, a folder or a callable."""
    if isinstance(tokenizer, str):
        check_string("tokenizer", tokenizer)
    elif tokenizer is not None and not callable(tokenizer):
        raise OptionError(
            f"tokenizer must be a hub id, a folder, a tokenizer, a processor or None, got {tokenizer!r} "
            f"({type(tokenizer).__name__})."
        )


def is_processor(tokenizer: object) -> bool:
    """Return whether a tokenizer is a processor of texts and images, which holds its tokenizer."""
    return hasattr(tokenizer, "image_processor") and hasattr(tokenizer, "tokenizer")


def tokenizer_of(given: Any) -> Any:
    """Return the tokenizer that a processor holds, or what was given if it is none."""
    return given.tokenizer if is_processor(given) else given


def check_choice(name: str, value: T, allowed: Collection[T]) -> T:
    """Return value if it is one of the allowed ones; 1 is not True."""
    if not any(
        isinstance(value, type(choice)) and isinstance(value, bool) is isinstance(choice, bool) and value == choice
        for choice in allowed
    ):
        choices = ", ".join(repr(choice) for choice in allowed)
        raise OptionError(f"{name} must be one of {choices}, got {value!r}.")
    return value


def refuse_unread(name: str, value: object, *, default: object, is_read: bool, reader: str) -> None:
    """Refuse a value of an option that only another choice reads.

    Raises:
        OptionError: The option is not read, and its value is not the default.
    """
    if not is_read and value != default:
        raise OptionError(
            f"{name}={value!r} has no effect: only {reader} reads it. Give {name}={default!r} (default) or {reader}."
        )


def check_tensor(
    name: str, tensor: torch.Tensor, *, ndim: int, dtypes: Collection[torch.dtype] | None = None
) -> torch.Tensor:
    """Return tensor if it has this many axes and one of these dtypes."""
    # Imported on use, because the command line answers mistakes without torch.
    import torch

    if not isinstance(tensor, torch.Tensor):
        raise ShapeError(f"{name} must be a tensor, got {type(tensor).__name__}.")
    if tensor.ndim != ndim:
        raise ShapeError(f"{name} must have {ndim} axes, got shape {tuple(tensor.shape)}.")
    if dtypes is not None and tensor.dtype not in dtypes:
        allowed = ", ".join(str(dtype) for dtype in dtypes)
        raise ShapeError(f"{name} must have dtype {allowed}, got {tensor.dtype}.")
    return tensor


def check_layout(
    name: str,
    tensor: torch.Tensor,
    shape: Sequence[int | None],
    *,
    dtypes: Collection[torch.dtype] | None = None,
    like: torch.Tensor | None = None,
    num_strided: int = 0,
) -> torch.Tensor:
    """Return tensor if a kernel can read it.

    Args:
        name: Name of the argument, for the message.
        tensor: Value of the argument.
        shape: Size of each axis; None for any size.
        dtypes: Allowed dtypes; None for the dtype of ``like``, or for any dtype without it.
        like: A tensor on the required device; None for any device.
        num_strided: Number of first axes that may have any stride; the others must be contiguous.

    Raises:
        ShapeError: The tensor has another dtype, shape or device, or is not contiguous.
    """
    check_tensor(name, tensor, ndim=len(shape), dtypes=(like.dtype,) if dtypes is None and like is not None else dtypes)
    is_wrong = any(size is not None and size != given for size, given in zip(shape, tensor.shape))
    if is_wrong or (like is not None and tensor.device != like.device):
        sizes = ", ".join("any" if size is None else str(size) for size in shape) + "," * (len(shape) == 1)
        place = "" if like is None else f" on {like.device}"
        raise ShapeError(f"{name} is {tuple(tensor.shape)} on {tensor.device}; it must be ({sizes}){place}.")
    step = 1
    for size, stride in reversed(list(zip(tensor.shape, tensor.stride()))[num_strided:]):
        if size > 1 and stride != step and tensor.numel():
            axes = f"the axes after the first {num_strided}" if num_strided else "all axes"
            raise ShapeError(
                f"{name} has strides {tensor.stride()}; {axes} must be contiguous: call .contiguous() on it."
            )
        step *= size
    return tensor


def check_rows_apart(name: str, tensor: torch.Tensor) -> None:
    """Refuse an output in which one row would be written over another."""
    if tensor.shape[0] > 1 and tensor.stride(0) < tensor.shape[1]:
        raise ShapeError(
            f"The rows of {name} overlap: strides {tensor.stride()} with {tensor.shape[1]} columns. Give memory with a "
            "place for each row."
        )


def check_out(
    out: torch.Tensor,
    *,
    like: torch.Tensor,
    shape: Sequence[int] | None = None,
    may_be: Mapping[str, torch.Tensor | None],
    must_not_meet: Iterable[torch.Tensor | None],
) -> None:
    """Refuse an ``out`` of another layout than rows like a tensor, and memory in which one program would write what
    another one has still to read: overlapping rows, other inputs, a part of what it may be.
    """
    check_layout("out", out, like.shape if shape is None else shape, like=like, num_strided=1)
    check_rows_apart("out", out)
    others = [other for other in must_not_meet if other is not None]
    others += [other for other in may_be.values() if other is not None and not is_same_memory(out, other)]
    begin, end = _byte_range(out)
    if any(begin < other_end and other_begin < end for other_begin, other_end in map(_byte_range, others)):
        allowed = f"{' or '.join(may_be)} itself, memory" if may_be else "memory"
        raise ShapeError(f"out shares memory with an input or with a part of one. Give {allowed} of its own, or None.")


def is_same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether each element of two tensors of one shape has one place."""
    if one is other:
        return True
    if one.data_ptr() != other.data_ptr() or one.stride() != other.stride():
        return False
    # On the meta device the address of a tensor is its offset in its storage.
    return not one.is_meta or one.untyped_storage()._cdata == other.untyped_storage()._cdata


def do_ranges_overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether the bytes from the first to the last element of two tensors meet."""
    (one_begin, one_end), (other_begin, other_end) = _byte_range(one), _byte_range(other)
    return one_begin < other_end and other_begin < one_end


def _byte_range(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the addresses of the first and of one past the last byte; the meta device has none."""
    if tensor.numel() == 0 or tensor.is_meta:
        return 0, 0
    begin, num_elements = tensor.data_ptr(), 1
    # A loop: this runs for each input of every kernel that writes where it is told, and a sum over a generator takes
    # twice as long.
    for size, stride in zip(tensor.shape, tensor.stride()):
        num_elements += (size - 1) * stride
    return begin, begin + num_elements * tensor.element_size()
