"""Watch one rank from a process of its own, and end the rank if it or another rank makes no progress."""

import contextlib
import json
import mmap
import os
import select
import shutil
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

from lightning_fastft.monitor.rank_watch.beats import RECORD_BYTES, Job, Phase, read_beat
from lightning_fastft.monitor.rank_watch.verdict import describe, find_blamed, find_slow_node, read_frames

POLL_S = 0.25
PUBLISH_S = 1.0
# The states of other ranks are up to date after two of their writes.
SETTLE_S = 2 * PUBLISH_S + POLL_S
# A node is lost if its watchdogs write nothing for this long, or for timeout_s if that is less. A busy file server may
# pause for seconds.
SILENT_S = 30.0
# Interval of reading the states of other nodes: every rank reads those of all others from one file server.
LISTEN_S = 5.0
# Time for a rank to end with its own error after another rank died.
GRACE_S = 3.0
# In the command line of a watchdog.
_ENTRY = b"rank_watch/__main__.py"
_TIMED = range(Phase.FORWARD, Phase.LEAVING)


class RankWatch:
    """Watch one rank, and end it if it or another rank makes no progress."""

    def __init__(self, job: Job, memory: mmap.mmap) -> None:
        self.job, self.memory = job, memory
        self.beat = read_beat(memory)
        self.condition = "runs"
        # Counted in polls of this process, so that a suspended machine or frozen container does not count.
        self.idle_s = self.stopped_s = 0.0
        # Wall-clock time at which the rank was found dead.
        self.gone_at_s = 0.0
        self._since_publish_s = PUBLISH_S
        # File descriptors that become readable when the rank ends: its pipe, and its pidfd. Loader workers may keep the
        # pipe open longer.
        self._signs = [0, *_open_process(job.pid)]
        self._stacks = ""
        self._num_published = 0
        # Last state of each other rank, and seconds of this process since it was new.
        self._others: dict[int, dict[str, Any]] = {}
        self._silent_s: dict[int, float] = {}
        self._unread_s = 0.0
        # Seconds for which the folder of the states has been missing.
        self._apart_s = 0.0
        # The node that was slow at the last check, and those that were reported.
        self._slow_node = -1
        self._reported: set[int] = set()

    def run(self) -> None:
        """Say that the watch has begun, then watch until the rank is done, dead or killed."""
        # Before the rank goes on: the watchdog that leaves last removes the folder and the verdict in it.
        self._publish()
        os.close(1)
        while True:
            self._wait(POLL_S)
            if self.beat.phase == Phase.DONE:
                self._leave()
                return
            if self._verdict_path.exists():
                self._end_rank(0.0 if self._is_due() else GRACE_S)
                return
            if self.condition == "gone":
                self._end_watch()
                return
            if self._lost_nodes() or self._is_cut_off():
                self._judge()
                return
            if self._is_due():
                self._read_stacks()
                self._settle()
                # Meanwhile the rank may have continued, or another watchdog may have written the verdict.
                if self._is_due() and not self._verdict_path.exists():
                    self._judge()
                    return
                self._stacks = ""

    def _end_watch(self) -> None:
        """Report that the rank is dead, unless it ended on request or because of another rank."""
        if self.beat.phase == Phase.LEAVING:
            self._leave(keep=True)
            return
        # The watchdog of a rank that died first has written its verdict by then, on a busy machine too.
        if self.beat.phase == Phase.FAILED and self.job.num_ranks > 1:
            # A lost node may have caused the error, which shows only later.
            self._note_others()
            self._settle()
            self._note_others()
            while not self._verdict_path.exists() and self._are_silent() and not self._lost_nodes():
                self._wait(PUBLISH_S)
                self._note_others()
        else:
            self._wait(2 * POLL_S)
        if self._verdict_path.exists():
            self._leave()
        else:
            self._judge()

    # Observe the rank.

    def _wait(self, seconds: float) -> None:
        """Wait for a time or until the rank ends; then update its state."""
        begin = time.monotonic()
        # Without descriptors this only sleeps.
        ready, _, _ = select.select(self._signs, [], [], seconds)
        self._signs = [sign for sign in self._signs if sign not in ready or (sign == 0 and os.read(0, 1))]
        elapsed = min(time.monotonic() - begin, 2 * seconds)
        before, self.beat = self.beat, read_beat(self.memory)
        self.condition = self._look_at_process()
        if self.condition == "gone" and not self.gone_at_s:
            self.gone_at_s = time.time()
        self.idle_s = 0.0 if self.beat.num_beats != before.num_beats else self.idle_s + elapsed
        self.stopped_s = self.stopped_s + elapsed if self.condition == "stopped" else 0.0
        self._since_publish_s += elapsed
        self._unread_s += elapsed
        if self.job.num_nodes > 1 and self._unread_s >= min(LISTEN_S, self._silent_limit_s / 2):
            self._note_others()
            self._compare_nodes()
        if self._since_publish_s >= PUBLISH_S or before.phase != self.beat.phase or self.condition == "gone":
            self._publish()

    def _settle(self) -> None:
        for _ in range(int(SETTLE_S / POLL_S)):
            self._wait(POLL_S)

    def _look_at_process(self) -> str:
        # The parent pid changes as soon as the rank ends, even if it is a zombie.
        if os.getppid() != self.job.pid:
            return "gone"
        return "stopped" if _process_state(self.job.pid) == "T" else "runs"

    def _is_due(self) -> bool:
        """Return whether the rank made no progress for too long."""
        if self.condition == "gone" or self.stopped_s >= self.job.timeout_s:
            return True
        if self.beat.phase not in _TIMED:
            return False
        limit = self.job.first_timeout_s if self.beat.is_first else self.job.timeout_s
        if self.idle_s < limit:
            return False
        # A rank that waits for another rank's save or validation has more time.
        is_other_paused = any(
            state["phase"] == Phase.PAUSED and state["condition"] == "runs" for state in self._read_others()
        )
        return not is_other_paused or self.idle_s >= self.job.first_timeout_s

    # Exchange states.

    @property
    def _verdict_path(self) -> Path:
        return Path(self.job.meeting) / "verdict"

    def _state_path(self, rank: int) -> Path:
        return Path(self.job.meeting) / f"rank-{rank}"

    def _state(self) -> dict[str, Any]:
        return {
            "rank": self.job.rank,
            "node": self.job.node,
            "num_published": self._num_published,
            "pid": self.job.pid,
            "host": socket.gethostname(),
            "condition": "cut off" if self._is_cut_off() else self.condition,
            "gone_at_s": self.gone_at_s,
            "idle_s": max(self.idle_s, self.stopped_s),
            "frames": read_frames(self._stacks),
            **self.beat._asdict(),
        }

    def _publish(self) -> None:
        self._since_publish_s = 0.0
        self._num_published += 1
        path = self._state_path(self.job.rank)
        part = path.with_suffix(".part")
        # Keep watching if the folder is missing or full for a moment.
        with contextlib.suppress(OSError):
            part.write_text(json.dumps(self._state()))
            part.replace(path)

    def _read_others(self) -> list[dict[str, Any]]:
        """Return the last states of the other ranks, without ranks that are done or use another folder.

        The condition of ranks on a lost node is "lost".
        """
        self._note_others()
        lost = self._lost_nodes()
        return [
            {**state, "condition": "lost", "idle_s": self._silent_s[rank]} if state["node"] in lost else state
            for rank, state in sorted(self._others.items())
        ]

    def _note_others(self) -> None:
        """Read the states of the other ranks, and note for how long each has been the same."""
        elapsed_s, self._unread_s = self._unread_s, 0.0
        self._apart_s = 0.0 if Path(self.job.meeting).is_dir() else self._apart_s + elapsed_s
        for rank in range(self.job.num_ranks):
            if rank == self.job.rank:
                continue
            try:
                state = json.loads(self._state_path(rank).read_text())
            except FileNotFoundError:
                self._others.pop(rank, None)
                continue
            except (OSError, ValueError):
                state = self._others.get(rank)
            if state is None:
                continue
            is_new = rank not in self._others or state["num_published"] != self._others[rank]["num_published"]
            # A rank that has ended writes no more states.
            is_silent = not is_new and state["condition"] != "gone"
            self._silent_s[rank] = self._silent_s[rank] + elapsed_s if is_silent else 0.0
            self._others[rank] = state

    @property
    def _silent_limit_s(self) -> float:
        return max(SETTLE_S, min(SILENT_S, self.job.timeout_s))

    def _is_cut_off(self) -> bool:
        """Return whether this node lost the shared folder, or the other nodes have removed it and left."""
        return self.job.num_nodes > 1 and self.condition != "gone" and self._apart_s >= self._silent_limit_s

    def _compare_nodes(self) -> None:
        """Report a slow node once; the first rank does it for all."""
        if self.job.rank != 0:
            return
        found = find_slow_node([self._state(), *self._others.values()])
        node, host, own_s, others_s = found or (-1, "", 0.0, 0.0)
        if found is not None and node == self._slow_node and node not in self._reported:
            self._reported.add(node)
            _say(
                f"Watchdog: node {node} ({host}) is slow: a micro-batch takes {own_s * 1e3:.0f} ms until "
                f"the backward (loading and forward), and {others_s * 1e3:.0f} ms on the other nodes, which wait "
                "for it in every step.\n"
            )
        self._slow_node = node

    def _are_silent(self) -> bool:
        """Return whether a rank of another node has written nothing since its state was last read."""
        return any(self._silent_s[rank] > 0.0 for rank, state in self._others.items() if state["node"] != self.job.node)

    def _lost_nodes(self) -> set[int]:
        """Return the other nodes all of whose watchdogs are silent."""
        silent: set[int] = set()
        heard = {self.job.node}
        for rank, state in self._others.items():
            (silent if self._silent_s[rank] >= self._silent_limit_s else heard).add(state["node"])
        return silent - heard

    def _leave(self, *, keep: bool = False) -> None:
        """Remove the state file; that of a rank that left early stays until the last rank leaves."""
        if not keep:
            self._state_path(self.job.rank).unlink(missing_ok=True)
        if all(
            state["condition"] == "lost" or (state["condition"] == "gone" and state["phase"] == Phase.LEAVING)
            for state in self._read_others()
        ):
            shutil.rmtree(self.job.meeting, ignore_errors=True)

    # End the rank.

    def _judge(self) -> None:
        """Find the blamed ranks and end this rank; only one watchdog writes the report."""
        states = sorted([self._state(), *self._read_others()], key=lambda state: state["rank"])
        blamed = find_blamed(states)
        path = Path(self.job.folder) / f"watchdog-step={blamed[0]['step']}.txt"
        text = describe(blamed, states, timeout_s=self.job.timeout_s, report=path)
        is_first = False
        with contextlib.suppress(OSError):
            descriptor = os.open(self._verdict_path, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
            is_first = True
            os.write(descriptor, str(path).encode())
            os.close(descriptor)
        # Also if the folder no longer exists, so that no verdict could be written.
        if is_first or not self._verdict_path.exists():
            _say(text)
            with contextlib.suppress(OSError):
                path.write_text(text)
        is_blamed = any(state["rank"] == self.job.rank for state in blamed)
        self._end_rank(0.0 if is_blamed or self._is_due() else GRACE_S)

    def _end_rank(self, grace_s: float) -> None:
        """Kill the rank and its child processes, after some time to end with its own error."""
        waited_s = 0.0
        while self._is_there() and waited_s < (
            self.job.timeout_s if self.beat.phase in (Phase.LEAVING, Phase.FAILED) else grace_s
        ):
            self._wait(POLL_S)
            waited_s += POLL_S
        if self._is_there():
            self._read_stacks()
            _say(f"Watchdog: rank {self.job.rank} (process {self.job.pid}) is killed.\n{self._stacks}")
            with contextlib.suppress(OSError), open(self._verdict_path.read_text(), "a", encoding="utf-8") as report:
                report.write(
                    f"\nStacks of rank {self.job.rank} when it was killed:\n"
                    f"{self._stacks or '(no stack: the process does not answer)'}\n"
                )
            below = descendants(self.job.pid)
            for pid in (self.job.pid, *below):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self._leave()

    def _is_there(self) -> bool:
        return self.condition != "gone" and self.beat.phase != Phase.DONE

    def _read_stacks(self) -> None:
        """Request the stacks of the rank once; faulthandler answers without the GIL."""
        if self._stacks or not self.job.stacks_signal or self.condition != "runs":
            return
        written = os.fstat(self.job.stacks_fd).st_size
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.job.pid, self.job.stacks_signal)
        time.sleep(POLL_S)
        self._stacks = os.pread(self.job.stacks_fd, 2**16, written).decode(errors="replace")
        self._publish()


def descendants(pid: int) -> list[int]:
    """Return all descendants of a process except watchdogs; none without /proc."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            if _ENTRY not in (entry / "cmdline").read_bytes():
                children.setdefault(parent, []).append(int(entry.name))
    found, left = [], [pid]
    while left:
        below = children.get(left.pop(), [])
        found += below
        left += below
    return found


def _open_process(pid: int) -> list[int]:
    """Return a pidfd, which becomes readable when the process ends; none if it ended or pidfds are unsupported."""
    if not hasattr(os, "pidfd_open"):
        return []
    with contextlib.suppress(OSError):
        return [os.pidfd_open(pid)]
    return []


def _process_state(pid: int) -> str:
    """Return the state letter of a process, "T" if it is stopped; "" without /proc."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def _say(text: str) -> None:
    # The rank's stderr, whose reader may be gone.
    with contextlib.suppress(OSError):
        sys.stderr.write(text)
        sys.stderr.flush()


def main(argument: str) -> None:
    """Watch the rank of a job given as JSON."""
    # SLURM signals all processes of a job. The rank handles the signals to stop, and the watchdog ends with it.
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    job = Job(**json.loads(argument))
    with mmap.mmap(job.record_fd, RECORD_BYTES) as memory:
        RankWatch(job, memory).run()
