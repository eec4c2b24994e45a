"""State of a rank in shared memory, and the arguments of its watchdog process."""

import mmap
import struct
from enum import IntEnum
from typing import NamedTuple

_MOST_TEXT = 400
_LAYOUT = struct.Struct("<QQQBBddH")
RECORD_BYTES = _LAYOUT.size + _MOST_TEXT


class Phase(IntEnum):
    """Phase of a rank in a micro-batch, in order, and how it ended."""

    PAUSED = 0
    FORWARD = 1
    BACKWARD = 2
    BACKWARD_DONE = 3
    OPTIMIZER = 4
    BETWEEN = 5
    LEAVING = 6
    FAILED = 7
    DONE = 8


class Beat(NamedTuple):
    """State of a rank in shared memory.

    Args:
        num_beats: Number of hooks called so far.
        num_batches: Number of started micro-batches of this run.
        step: Optimizer step, from 1.
        phase: Phase in the micro-batch.
        is_first: Whether this is one of the first steps of the run.
        failed_at_s: Wall-clock time of an error.
        own_s: Median time of the last micro-batches until the backward, in which ranks do not wait for each other;
            0 if it is not known.
        text: The error message.
    """

    num_beats: int = 0
    num_batches: int = 0
    step: int = 0
    phase: int = Phase.PAUSED
    is_first: bool = True
    failed_at_s: float = 0.0
    own_s: float = 0.0
    text: str = ""


class Job(NamedTuple):
    """Arguments of a watchdog process, passed on its command line as JSON."""

    rank: int
    num_ranks: int
    # The rank's machine, and how many there are.
    node: int
    num_nodes: int
    pid: int
    timeout_s: float
    first_timeout_s: float
    record_fd: int
    stacks_fd: int
    stacks_signal: int
    # Folder of reports, and folder in which the watchdogs exchange states.
    folder: str
    meeting: str


def write_beat(memory: mmap.mmap, beat: Beat) -> None:
    """Write the state of this rank; the text only if there is one."""
    text = beat.text.encode()[:_MOST_TEXT]
    if text:
        memory[_LAYOUT.size : _LAYOUT.size + len(text)] = text
    _LAYOUT.pack_into(memory, 0, *beat[:-1], len(text))


def read_beat(memory: mmap.mmap) -> Beat:
    """Return the state of the rank."""
    num_beats, num_batches, step, phase, is_first, failed_at_s, own_s, length = _LAYOUT.unpack_from(memory, 0)
    text = memory[_LAYOUT.size : _LAYOUT.size + length].decode(errors="replace")
    return Beat(num_beats, num_batches, step, phase, bool(is_first), failed_at_s, own_s, text)
