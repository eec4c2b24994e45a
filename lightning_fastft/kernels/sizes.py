"""Arithmetic of launch sizes on the host.

Triton's own functions go through a wrapper that costs several microseconds a call.
"""

from __future__ import annotations


def ceil_div(size: int, block: int) -> int:
    """Return the number of blocks that cover a size.

    Example:
        >>> ceil_div(9, 4)
        3
    """
    return -(-size // block)


def next_power_of_2(size: int) -> int:
    """Return the smallest power of two that is at least a size; 1 for 0.

    Example:
        >>> [next_power_of_2(size) for size in (0, 1, 5, 8)]
        [1, 1, 8, 8]
    """
    return 1 << max(size - 1, 0).bit_length()
