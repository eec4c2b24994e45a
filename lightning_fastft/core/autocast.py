"""Autocast by device type, for devices that have none: torch raises on the meta device, where steps are estimated."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


def is_autocast_on(device_type: str) -> bool:
    """Return whether autocast is enabled for a device type.

    Example:
        >>> is_autocast_on("meta")
        False
    """
    return device_type != "meta" and torch.is_autocast_enabled(device_type)


def autocast_off(device_type: str) -> AbstractContextManager[None]:
    """Return a context manager that disables autocast for a device type.

    Example:
        >>> with torch.autocast("cpu"), autocast_off("cpu"):
        ...     is_autocast_on("cpu")
        False
    """
    return nullcontext() if device_type == "meta" else torch.autocast(device_type, enabled=False)
