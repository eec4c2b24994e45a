"""Arithmetic of launch sizes on the host: triton's own functions pass a wrapper that costs several microseconds a
call.
"""

from __future__ import annotations


def ceil_div(size: int, block: int) -> int:
    """Return how many blocks a size fills.

    Example:
        >>> ceil_div(9, 4)
        3
    """
    return -(-size // block)


def next_power_of_2(size: int) -> int:
    """Return the least power of two that is not below a size; 1 for 0.

    Example:
        >>> [next_power_of_2(size) for size in (0, 1, 5, 8)]
        [1, 1, 8, 8]
    """
    return 1 << max(size - 1, 0).bit_length()
