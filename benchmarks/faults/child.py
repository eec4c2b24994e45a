"""One trial in a child process: forked, so that nothing has to be imported again, with limits, and with its
output in a file.
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from tests.faults.saves import fork

LOG = "children.log"


class End(NamedTuple):
    """How a child ended: its exit code (minus the signal that killed it, None where the time was over), and what
    it answered, if it did.
    """

    code: int | None
    answer: Any


def start(folder: Path, action: Callable[[int], object]) -> tuple[int, int]:
    """Run action(write end of a pipe) in a child that exits as Python would; return its process id and the read end.

    Args:
        folder: Where the child's output goes, behind that of earlier ones.
        action: May raise SystemExit.
    """

    def act(write: int) -> None:
        log = os.open(folder / LOG, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        sys.stdin = Path(os.devnull).open()  # noqa: SIM115 - of a process that ends soon
        # Not what a test runner put in their place.
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
        try:
            action(write)
        except SystemExit as stop:
            # As the interpreter takes it: none is 0, a text is 1.
            raise SystemExit(stop.code if isinstance(stop.code, int) else int(stop.code is not None)) from None
        finally:
            sys.stdout.flush()
            sys.stderr.flush()

    return fork(act)


def run(folder: Path, action: Callable[[], object], *, limit_s: float = 120.0, limit_bytes: int | None = None) -> End:
    """Run action() in a child and return how it ended; what it returns comes back as JSON.

    Args:
        folder: As in start.
        action: What to do.
        limit_s: A child that is still there then is killed, with everything below it.
        limit_bytes: Limit of its address space.
    """

    def act(write: int) -> None:
        os.setsid()
        if limit_bytes is not None:
            resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, limit_bytes))
        text = json.dumps(action()).encode()
        while text:
            text = text[os.write(write, text) :]

    child, read = start(folder, act)
    parts, deadline, is_over = [], time.monotonic() + limit_s, False
    while not is_over:
        is_over = not select.select([read], [], [], max(0.0, deadline - time.monotonic()))[0]
        if not is_over:
            parts.append(os.read(read, 1 << 16))
            is_over = not parts[-1]
    os.close(read)
    text = b"".join(parts)
    code = wait(child, max(0.0, deadline - time.monotonic()))
    return End(code, json.loads(text) if text and code == 0 else None)


def wait(child: int, limit_s: float) -> int | None:
    """Return the exit code of a child; None where it had to be killed because the time was over."""
    deadline = time.monotonic() + limit_s
    while True:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            kill(child)
            os.waitpid(child, 0)
            return None
        time.sleep(0.005)


def kill(child: int) -> None:
    """Kill a child, and what is below it where it has a session of its own."""
    if os.getpgid(child) == child:
        os.killpg(child, signal.SIGKILL)
    else:
        os.kill(child, signal.SIGKILL)
