"""The out-of-memory error; not in ``errors``, because its base class needs torch."""

import torch

from lightning_fastft.core.errors import FastFTError


class DeviceMemoryError(FastFTError, torch.OutOfMemoryError):
    """The device ran out of memory in a step or a save; the message has the plan, the peak and the option to change.

    Args:
        message: What ran out of memory, its effect, and the remedy.
        where: The part of the step, for example "backward".
    """

    def __init__(self, message: str, *, where: str = "") -> None:
        super().__init__(message)
        self.where = where
