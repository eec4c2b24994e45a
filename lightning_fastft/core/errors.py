"""The error family, one class per cause, all under FastFTError; and the wording that messages share.

A message says what was given, what is allowed, where (file, line, row, step, rank) and what to do next.
"""

import re

MAX_NAMES_IN_MESSAGE = 8
# Control characters of a terminal, characters that turn the direction of text, line ends other than a line feed, and
# halves of characters.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str, *, keeps_lines: bool = False) -> str:
    r"""Return text as it is safe to show: control characters as escapes, so that data and file names cannot steer a
    terminal.

    With keeps_lines line feeds stay; a name that has one would forge a line of a log.

    Example:
        >>> print(printable("a\x1b[2Jb"))
        a\x1b[2Jb
    """
    shown = _UNPRINTABLE.sub(lambda found: ascii(found.group())[1:-1], text)
    return shown if keeps_lines else shown.replace("\n", "\\n")


def list_names(names: list[str]) -> str:
    """Return the first names and the number of the others, for a message.

    Example:
        >>> list_names(["a", "b"])
        'a, b'
    """
    more = len(names) - MAX_NAMES_IN_MESSAGE
    return ", ".join(names[:MAX_NAMES_IN_MESSAGE]) + (f" and {more} more" if more > 0 else "")


def count(number: int, noun: str) -> str:
    """Return a number with its noun, for a message.

    Example:
        >>> count(1, "pack"), count(2000, "watched batch")
        ('1 pack', '2,000 watched batches')
    """
    return f"{number:,} {inflect(number, noun)}"


def inflect(number: int, noun: str) -> str:
    """Return the noun in the singular for 1, otherwise in the plural."""
    return noun if number == 1 else noun + ("es" if noun.endswith("ch") else "s")


def describe_mismatch(error: RuntimeError) -> str:
    """Return what ``load_state_dict`` refused: counts and the first names instead of all names; "" for other errors.

    Example:
        >>> import torch
        >>> try:
        ...     torch.nn.Linear(2, 3).load_state_dict({"weight": torch.zeros(3, 4)})
        ... except RuntimeError as error:
        ...     print(describe_mismatch(error))
        1 weight is missing (bias), 1 weight has another shape (weight: [3, 4], the model has [3, 2])
    """
    text = str(error)
    if "loading state_dict" not in text:
        return ""
    parts = []
    for words, verb in (("Missing key(s)", ("is", "are", "missing")), ("Unexpected key(s)", ("is", "are", "unknown"))):
        found = re.search(rf"{re.escape(words)} in state_dict: (.*)", text)
        if found:
            parts.append(_count_names(re.findall(r'"([^"]+)"', found[1]), *verb))
    shapes = [
        f"{name}: {held}, the model has {own}"
        for name, held, own in re.findall(
            r"size mismatch for (\S+): copying a param with shape torch\.Size\((.*?)\) from checkpoint, the shape in "
            r"current model is torch\.Size\((.*?)\)",
            text,
        )
    ]
    parts += [_count_names(shapes, "has", "have", "another shape", most=1)] if shapes else []
    return ", ".join(parts) or text


def _count_names(names: list[str], one: str, several: str, state: str, *, most: int = 2) -> str:
    """Return a count of weights with their first names."""
    shown = ", ".join(names[:most]) + (", ..." if len(names) > most else "")
    return f"{len(names):,} {f'weight {one}' if len(names) == 1 else f'weights {several}'} {state} ({shown})"


class FastFTError(Exception):
    """Base of every error that lightning_fastft raises for a user."""

    def __str__(self) -> str:
        return printable(super().__str__(), keeps_lines=True)


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
    """A checkpoint holds more than tensors and plain types, or is at a place that is never loaded from."""


class CheckpointNotSavedError(FastFTError, OSError):
    """A checkpoint could not be written; the file that was at its path before is unchanged."""


class ContextError(FastFTError, RuntimeError):
    """A packed batch and a model do not fit: the model never read the batch context."""


class UnsupportedModelError(FastFTError, RuntimeError):
    """A model family cannot be served exactly; the message names the reason and the alternative."""


class HostMemoryError(FastFTError, RuntimeError):
    """The host cannot allocate or pin the memory for offloaded tensors."""


class BackendError(FastFTError, RuntimeError):
    """An attention or kernel backend cannot serve the request; the message names backends that can."""


class SwapError(FastFTError, RuntimeError):
    """A module swap matched nothing, or cannot be made at this point of a run."""


class NotTrainingError(FastFTError, RuntimeError):
    """A run does not train: gradients are missing, zero or not finite, or parameters do not move."""


class RendezvousError(FastFTError, RuntimeError):
    """The ranks of a job did not meet: some are missing, or the head node is not reached."""


class MissingDependencyError(FastFTError, ImportError):
    """An optional package is required and not installed."""
