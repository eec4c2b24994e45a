"""The error of a full device, apart from ``errors`` because its base class is of torch."""

import torch

from lightning_fastft.core.errors import FastFTError


class DeviceMemoryError(FastFTError, torch.OutOfMemoryError):
    """The device has not the memory that a step or a save needs; the message has the plan, the peak so far and
    what to set.
    """
