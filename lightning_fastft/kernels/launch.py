"""Launch Triton kernels, and skip what Triton repeats at every launch of a kernel that is compiled already."""

from __future__ import annotations

from typing import Any

import torch

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
    key = (*options, *options.values(), *map(_kind, arguments))
    found = compiled.get(key)
    if found is not None:
        made, constants = found
        made[(*grid, 1, 1)](*arguments, *constants)
        return
    made = kernel[grid](*arguments, **options)
    # Triton's interpreter compiles nothing. On AMD the size of a tensor matters too.
    if made is not None and torch.version.hip is None:
        compiled[key] = made, tuple(options[name] for name in kernel.arg_names[len(arguments) :])


def _kind(argument: Any) -> Any:
    """Return what code of its own is compiled for."""
    kind = type(argument)
    if kind is float or kind is bool or argument is None:
        return kind
    if kind is int:
        return argument == 1 or (argument & 15 == 0, argument.bit_length() >> 5)
    if kind is tuple:
        return tuple(map(_kind, argument))
    return argument.dtype, argument.data_ptr() & 15, argument.get_device()
