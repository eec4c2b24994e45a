"""Choose between a Triton kernel and its PyTorch reference; shared by every operation with only these two backends."""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import ModuleType
from typing import Any, ParamSpec, TypeVar

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

from lightning_fastft.core.autocast import autocast_off, is_autocast_on
from lightning_fastft.core.checks import check_choice
from lightning_fastft.kernels.launch import current_recorder

_P = ParamSpec("_P")
_T = TypeVar("_T")
BACKENDS = ("auto", "reference")
# Shapes on the meta device are those of a run on a GPU.
GPU_TYPES = ("cuda", "meta")
TRITON_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
FLOATING = (*TRITON_DTYPES, torch.float64)
# Can be entered any number of times.
_NOTHING = nullcontext()
# Tests set it, so that calls inside the package, which pass is_checked=False, validate their arguments too.
_CHECKS_EVERY_CALL = os.environ.get("FASTFT_CHECK_KERNELS") == "1"


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of arithmetic and sums: float64 for float64, else fp32."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def must_check(is_checked: bool) -> bool:
    """Return whether a kernel call validates its arguments: if the caller asks for it, or under FASTFT_CHECK_KERNELS=1.

    Pass is_checked=False only for arguments that are known to be valid.

    Example:
        >>> must_check(True)
        True
    """
    return is_checked or _CHECKS_EVERY_CALL


def no_graph() -> AbstractContextManager[Any]:
    """Return a context manager that disables autograd; a no-op, which saves microseconds, if it is off already.

    Example:
        >>> with no_graph():
        ...     torch.is_grad_enabled()
        False
    """
    return torch.no_grad() if torch.is_grad_enabled() else _NOTHING


def plain_numbers(device_type: str) -> AbstractContextManager[None]:
    """Return a context manager that disables autograd and autocast.

    It is a no-op if both are off already, which saves ten microseconds of host time.

    Example:
        >>> with plain_numbers("cpu"):
        ...     torch.is_grad_enabled()
        False
    """
    return _plain_numbers(device_type) if torch.is_grad_enabled() or is_autocast_on(device_type) else _NOTHING


@contextmanager
def _plain_numbers(device_type: str) -> Iterator[None]:
    with torch.no_grad(), autocast_off(device_type):
        yield


def uses_triton(device: torch.device) -> bool:
    """Return whether Triton kernels run on a device: on CUDA, and on meta while launches are recorded.

    Example:
        >>> uses_triton(torch.device("cpu"))
        False
    """
    return device.type == "cuda" or (device.type == "meta" and current_recorder() is not None)


def one_kernel(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Mark a function of a module ``reference`` that one kernel computes on a GPU.

    A dispatch mode with a method ``run_kernel``, which takes the function and its arguments, sees one call in place of
    the operators inside.

    Example:
        >>> @one_kernel
        ... def double(x):
        ...     return x + x
        >>> double(torch.ones(1))
        tensor([2.])
    """

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        run_kernel = getattr(_get_current_dispatch_mode(), "run_kernel", None)
        return function(*args, **kwargs) if run_kernel is None else run_kernel(function, args, kwargs)

    return call


@functools.cache
def capability_of(device: torch.device) -> tuple[int, int]:
    """Return the CUDA compute capability of a device; Hopper's on the meta device, (0, 0) on others."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device)
    return (9, 0) if device.type == "meta" else (0, 0)


def choose_module(
    reference: ModuleType,
    x: torch.Tensor,
    *,
    dtypes: Collection[torch.dtype] | None = TRITON_DTYPES,
    backend: str = "auto",
) -> ModuleType:
    """Return the module that runs: ``triton`` in the folder of ``reference``, imported on first use, or ``reference``.

    Args:
        reference: Module ``reference`` of the operation's folder.
        x: A tensor with the device and dtype of the operation.
        dtypes: Dtypes that the kernel supports; None if it supports every dtype of its reference.
        backend: "auto" for the kernel if it supports the tensor, else the reference; "reference" for plain PyTorch on
            any device.

    Raises:
        OptionError: The backend is unknown.
    """
    if backend != "auto":
        check_choice("backend", backend, BACKENDS)
        return reference
    is_able = (dtypes is None or x.dtype in dtypes) and uses_triton(x.device)
    return _import_triton(reference.__package__) if is_able else reference


@functools.cache
def _import_triton(package: str | None) -> ModuleType:
    return importlib.import_module(f"{package}.triton")
