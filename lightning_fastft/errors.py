"""The error family: one class per cause, all under FastFTError.

A message says what was given, what is allowed, where (file, line, row, step, rank) and what to do next.
"""

import torch


class FastFTError(Exception):
    """Base of every error that lightning_fastft raises for a user."""


class ShapeError(FastFTError, ValueError):
    """A tensor has a shape, dtype, device or layout that the operation does not take."""


class OptionError(FastFTError, ValueError):
    """An option has a value that is not allowed, or does not fit another option."""


class DataError(FastFTError, ValueError):
    """A data set, file or row cannot be used for training."""


class ResumeError(FastFTError, RuntimeError):
    """A saved position does not fit the data, the plan or the ranks of this run."""


class DamagedCheckpointError(FastFTError, RuntimeError):
    """A checkpoint is damaged or incomplete; nothing of it was read but its bytes."""


class UnsafeCheckpointError(FastFTError, RuntimeError):
    """A checkpoint holds more than tensors and plain types, or lies where it is not loaded from."""


class CheckpointNotSavedError(FastFTError, OSError):
    """A checkpoint could not be written; what stood at its path before stands there still."""


class ContextError(FastFTError, RuntimeError):
    """A packed batch and a model do not fit: the model never read the batch context."""


class UnsupportedModelError(FastFTError, RuntimeError):
    """A model family cannot be served exactly; the message names the reason and the alternative."""


class HostMemoryError(FastFTError, RuntimeError):
    """The host cannot give or pin the memory that offloaded tensors need."""


class DeviceMemoryError(FastFTError, torch.OutOfMemoryError):
    """The device has not the memory that a step or a save needs; the message has the plan, the peak so far and what to set."""


class BackendError(FastFTError, RuntimeError):
    """An attention or kernel backend cannot do what was asked; the message names those that can."""


class SwapError(FastFTError, RuntimeError):
    """A module swap matched nothing, or cannot be made at this point of a run."""


class NotTrainingError(FastFTError, RuntimeError):
    """A run does not train: gradients are missing, zero or not finite, or parameters do not move."""


class MissingDependencyError(FastFTError, ImportError):
    """An optional package is needed for what was asked and is not installed."""
