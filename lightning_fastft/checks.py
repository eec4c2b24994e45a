"""Checks for public entries: each returns its argument or raises an error that says what is allowed."""

from collections.abc import Collection
from typing import TypeVar

import torch

from lightning_fastft.errors import OptionError, ShapeError

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
    """Return value if it lies within [0, 1]; NaN is refused."""
    return check_float(name, value, low=0.0, high=1.0)


def check_float(name: str, value: float, *, low: float, high: float = float("inf")) -> float:
    """Return value if it is a finite number within [low, high]; NaN is refused."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise OptionError(f"{name} must be a number, got {value!r} ({type(value).__name__}).")
    if not low <= value <= high or value in (float("inf"), float("-inf")):
        raise OptionError(f"{name} must be a finite number between {low} and {high}, got {value}.")
    return value


def check_choice(name: str, value: T, allowed: Collection[T]) -> T:
    """Return value if it is one of the allowed ones."""
    if value not in allowed:
        choices = ", ".join(repr(choice) for choice in allowed)
        raise OptionError(f"{name} must be one of {choices}, got {value!r}.")
    return value


def check_tensor(name: str, tensor: torch.Tensor, *, ndim: int, dtypes: Collection[torch.dtype] | None = None) -> torch.Tensor:
    """Return tensor if it has this many axes and one of these dtypes."""
    if not isinstance(tensor, torch.Tensor):
        raise ShapeError(f"{name} must be a tensor, got {type(tensor).__name__}.")
    if tensor.ndim != ndim:
        raise ShapeError(f"{name} must have {ndim} axes, got shape {tuple(tensor.shape)}.")
    if dtypes is not None and tensor.dtype not in dtypes:
        allowed = ", ".join(str(dtype) for dtype in dtypes)
        raise ShapeError(f"{name} must have dtype {allowed}, got {tensor.dtype}.")
    return tensor
