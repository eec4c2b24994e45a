"""Launch Triton kernels, and skip what Triton repeats at every launch of a kernel that is compiled already.

Launches on the meta device can be recorded, to compile their kernels before a run launches them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

# Products and sums are fused unless a kernel says otherwise. Without this option Triton 3.9 fuses them with a warning,
# and 3.10 does not fuse them.
DEFAULT_OPTIONS = {"enable_fp_fusion": True}
# Attribute of a kernel: what it was compiled to, by the kinds of its arguments.
_ATTRIBUTE = "fastft_compiled"


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """Launch a kernel on the current stream, compiled at its first launch with arguments of these kinds.

    ``kernel[grid](*arguments, **options)`` also binds the arguments to the parameters by name, makes a text of the
    options, and reads Triton's settings from the environment, every time. Changed settings do not compile a kernel
    again here.

    Args:
        kernel: A function under ``triton.jit``, whose parameters end with its compile-time constants.
        grid: Number of programs along each axis.
        arguments: Tensors on the current device, numbers and None, for all other parameters.
        options: Values of the compile-time constants, and options such as num_warps.

    Cost:
        Half the host time of Triton's own launch: 12 instead of 25 microseconds for 21 arguments.
    """
    compiled: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = vars(kernel).setdefault(_ATTRIBUTE, {})
    # Triton compiles code of its own for 1, and for numbers and addresses that 16 divides; each device loads its own.
    key = (*options, *options.values(), *_kinds(arguments))
    found = compiled.get(key)
    if found is not None:
        made, constants = found
        made[(*grid, 1, 1)](*arguments, *constants)
        return
    recorder = current_recorder()
    if recorder is not None:
        recorder.launches.setdefault((kernel, *key), Launch(kernel, arguments, options))
        return
    made = kernel[grid](*arguments, **{**DEFAULT_OPTIONS, **options})
    # Triton's interpreter compiles nothing. On AMD the size of a tensor matters too.
    if made is not None and torch.version.hip is None:
        compiled[key] = made, tuple(options[name] for name in kernel.arg_names[len(arguments) :])


class Launch(NamedTuple):
    """A launch that was recorded, with its arguments as in ``launch``; tensors are on the meta device."""

    kernel: Any
    arguments: tuple[Any, ...]
    options: dict[str, Any]

    def compile(self) -> None:
        """Compile the kernel for the current CUDA device, build Triton's launcher for it, and load both."""
        made = self.kernel.warmup(*self.arguments, grid=(1,), **{**DEFAULT_OPTIONS, **self.options})
        # Prepares a launch, and launches nothing.
        _ = made[1, 1, 1]


class LaunchRecorder(TorchDispatchMode):
    """Record launches of operations on the meta device, which then choose their Triton kernels as on CUDA.

    Attributes:
        launches: One launch for each code that Triton compiles, in the order of the first launches.

    Example:
        >>> with LaunchRecorder() as recorder:
        ...     current_recorder() is recorder
        True
    """

    def __init__(self) -> None:
        super().__init__()
        self.launches: dict[Any, Launch] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run operators as without the mode."""
        return run_on_meta(function, args, kwargs or {})


def run_on_meta(function: Any, args: Any, kwargs: Any) -> Any:
    """Run an operator on the meta device; PyTorch 2.11 mistakes the dtype of one product for a factor."""
    return kwargs["out"] if function is torch.ops.aten.addmm.dtype_out else function(*args, **kwargs)


def current_recorder() -> LaunchRecorder | None:
    """Return the recorder of launches in whose block this thread is, else None."""
    mode = _get_current_dispatch_mode()
    return mode if isinstance(mode, LaunchRecorder) else None


def contiguous_rows(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose last axis is contiguous: the tensor itself if it is, else a copy.

    Example:
        >>> x = torch.zeros(2, 3)
        >>> contiguous_rows(x) is x, contiguous_rows(x.t()).stride()
        (True, (2, 1))
    """
    return x if x.stride(-1) == 1 else x.contiguous()


def aligned_rows(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor that kernels read 16 bytes at a time: the tensor itself if its rows allow it, else a copy.

    Triton does so if elements of a row are contiguous and all other strides are multiples of 16. Rows inside a wider
    buffer usually are; a rank of 8 beside them gives other strides.

    Example:
        >>> wide, odd = torch.zeros(2, 48)[:, :32], torch.zeros(2, 40)[:, :32]
        >>> aligned_rows(wide) is wide, aligned_rows(odd) is odd
        (True, False)
    """
    *strides, last = x.stride()
    return x.contiguous() if last != 1 or any(stride & 15 for stride in strides) else x


def _kinds(arguments: tuple[Any, ...]) -> list[Any]:
    """Return what Triton compiles separate code for, in one loop, because every launch passes here."""
    kinds: list[Any] = []
    tensor = None
    for argument in arguments:
        kind = type(argument)
        if kind is int:
            kinds.append(-1 if argument == 1 else (argument & 15 == 0) + 2 * (argument.bit_length() >> 5))
        elif kind is float or kind is bool or argument is None:
            kinds.append(kind)
        elif kind is tuple:
            kinds.append(tuple(_kinds(argument)))
        else:
            tensor = argument
            kinds += (argument.dtype, argument.data_ptr() & 15)
    if tensor is not None:
        # All tensors are on one device.
        kinds.append(tensor.get_device())
    return kinds
