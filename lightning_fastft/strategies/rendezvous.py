"""Join the other ranks of a job, and report what to check if they do not join."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch import distributed as dist

from lightning_fastft.core.errors import RendezvousError

if TYPE_CHECKING:
    from lightning.fabric.plugins import ClusterEnvironment

# torch itself writes nothing until its time limit, 30 minutes by default.
NOTICE_S = 30.0


@contextlib.contextmanager
def explain_rendezvous(environment: ClusterEnvironment, *, num_ranks: int, num_devices: int) -> Iterator[None]:
    """Warn if the ranks of a job have not met after 30 s, and explain a rendezvous that fails.

    Ctrl-C ends the process at once.

    Raises:
        RendezvousError: Ranks are missing, the head node is not reached, or its port is taken.
    """
    node, local = environment.node_rank(), environment.local_rank()
    place = f"{environment.main_address}:{environment.main_port}"
    where = f"rank {node * num_devices + local} of {num_ranks}, on node {node}, with MASTER_ADDR:MASTER_PORT={place}"
    notice = threading.Timer(NOTICE_S, _warn_of_waiting, [where])
    notice.daemon = True
    if local == 0 and num_ranks > 1:
        notice.start()
    try:
        with _ended_by_interrupts():
            yield
    except dist.DistError as error:
        reason = str(error).partition("\n")[0].rstrip(".")
        raise RendezvousError(f"The ranks of the job did not meet ({where}): {reason}. {_remedy(reason)}") from error
    finally:
        notice.cancel()


@contextlib.contextmanager
def _ended_by_interrupts() -> Iterator[None]:
    """Let SIGINT end the process inside a block: torch waits in C++, where Python's handler does not run.

    No-op in threads, in interactive sessions, and if the program handles SIGINT itself.
    """
    is_interactive = hasattr(sys, "ps1") or bool(sys.flags.interactive)
    is_main = threading.current_thread() is threading.main_thread()
    if is_interactive or not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _warn_of_waiting(where: str) -> None:
    warnings.warn(f"Still waiting for the other ranks of the job ({where}).", stacklevel=1)


def _remedy(reason: str) -> str:
    """Return what to do about the reason that torch gives."""
    if "EADDRINUSE" in reason:
        return "Another process has the port: set another MASTER_PORT on every node."
    if "trying to connect" in reason:
        return (
            "Check that node 0 runs the job, that this is its address and port on every node, and that its firewall "
            "lets them in."
        )
    return (
        "Start the same command on every node, with the same number of nodes and devices and its own node rank; if "
        "nodes start late, give the strategy a longer timeout."
    )
