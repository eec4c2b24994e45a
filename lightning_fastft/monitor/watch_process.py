"""Watchdog process of a rank: end the job if a rank is dead, stopped or hung.

It is a process, because a thread stops with its rank under SIGSTOP or while other code holds the GIL. It is run by its
path and imports only the standard library, so it starts fast and uses about ten MiB. A rank writes its state to shared
memory, without a system call per step. The watchdogs of all ranks exchange their states in files, one write per second,
because a torch.distributed store would be inside one of the ranks.
"""

import contextlib
import json
import mmap
import os
import re
import select
import shutil
import signal
import socket
import statistics
import struct
import sys
import time
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

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
# A node is slow if its micro-batches take this many times as long as those of the other nodes, in two consecutive
# checks.
SLOW_RATIO = 1.3
_MOST_TEXT = 400
_LAYOUT = struct.Struct("<QQQBBddH")
_FRAME = re.compile(r'File "(.*)", line (\d+) in (.*)')
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


_WORDS = {
    Phase.PAUSED: "outside of the training batches (start, validation or save)",
    Phase.FORWARD: "in the forward",
    Phase.BACKWARD: "in the backward",
    Phase.BACKWARD_DONE: "after the backward",
    Phase.OPTIMIZER: "in the optimizer step",
    Phase.BETWEEN: "between two batches",
    Phase.LEAVING: "ending on request",
    Phase.FAILED: "ending after an error",
    Phase.DONE: "done",
}
_TIMED = range(Phase.FORWARD, Phase.LEAVING)


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
        node = -1 if found is None else found.node
        if found is not None and node == self._slow_node and node not in self._reported:
            self._reported.add(node)
            _say(
                f"Watchdog: node {node} ({found.host}) is slow: a micro-batch takes {found.own_s * 1e3:.0f} ms until "
                f"the backward (loading and forward), and {found.others_s * 1e3:.0f} ms on the other nodes, which wait "
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


def find_blamed(states: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the ranks to blame: first to die without an error, else on a lost node, else stopped, else first to fail,
    else with the least progress.
    """
    dead = [state for state in states if state["condition"] == "gone" and state["phase"] != Phase.FAILED]
    lost = [state for state in states if state["condition"] == "lost"]
    if lost and not dead:
        return lost
    stopped = [state for state in states if state["condition"] == "stopped"]
    # An error is often caused by the death of another rank.
    failed = [state for state in states if state["phase"] == Phase.FAILED]
    if dead:
        # The death of a rank may abort others, because their libraries lose a peer.
        first_s = min(state["gone_at_s"] for state in dead)
        return [state for state in dead if state["gone_at_s"] == first_s]
    if stopped or failed:
        return stopped or [min(failed, key=lambda state: state["failed_at_s"])]
    # A paused rank has started no batch since; ranks that wait for it are not to blame.
    least = min((state["num_batches"], state["phase"]) for state in states)
    tied = [state for state in states if (state["num_batches"], state["phase"]) == least]
    # A rank that waits for others does so inside torch.
    outside = [state for state in tied if state["frames"] and not _is_in_torch(state["frames"][0])]
    return outside or tied


class SlowNode(NamedTuple):
    """A node whose micro-batches take longer than those of the other nodes (medians)."""

    node: int
    host: str
    own_s: float
    others_s: float


def find_slow_node(states: list[dict[str, Any]]) -> SlowNode | None:
    """Return the slowest node if it takes SLOW_RATIO times as long as the other nodes; None if a time is unknown."""
    nodes: dict[int, list[dict[str, Any]]] = {}
    for state in states:
        nodes.setdefault(state["node"], []).append(state)
    if len(nodes) < 2 or any(not state["own_s"] for state in states):
        return None
    times = {node: statistics.median(state["own_s"] for state in found) for node, found in nodes.items()}
    slowest = max(times, key=times.__getitem__)
    others_s = statistics.median(time for node, time in times.items() if node != slowest)
    if times[slowest] <= SLOW_RATIO * others_s:
        return None
    return SlowNode(slowest, nodes[slowest][0]["host"], times[slowest], others_s)


def read_frames(stacks: str) -> list[str]:
    """Return the frames of the main thread in a faulthandler dump as "function (path:line)", innermost first.

    Example:
        >>> read_frames('(most recent call first):   File "/a/b.py", line 3 in work')
        ['work (/a/b.py:3)']
    """
    # The main thread is the oldest one and comes last.
    main_thread = stacks.rpartition("most recent call first")[2]
    return [f"{name} ({path}:{line})" for path, line, name in _FRAME.findall(main_thread)]


def _is_in_torch(frame: str) -> bool:
    return "/torch/" in frame


def _describe_frames(frames: list[str]) -> str:
    """Return the innermost function of a rank, and its caller outside of torch."""
    if not frames:
        return ""
    caller = next((frame for frame in frames if not _is_in_torch(frame)), frames[0])
    return f"; in {frames[0]}" + (f", called by {caller}" if caller != frames[0] else "")


def describe(blamed: list[dict[str, Any]], states: list[dict[str, Any]], *, timeout_s: float, report: Path) -> str:
    """Return the report: the blamed ranks, the step, and the state of every rank."""
    first, many = blamed[0], len(blamed) > 1
    names = ", ".join(str(state["rank"]) for state in blamed)
    what = f"{'ranks' if many else 'rank'} {names} {_describe_condition(first, is_plural=many)}"
    if len({state["node"] for state in states}) > 1:
        nodes = {state["node"]: state["host"] for state in blamed}
        where = ", ".join(f"node {node} ({host})" for node, host in nodes.items())
        what = (
            f"{where} {'are' if len(nodes) > 1 else 'is'} lost: {what}"
            if first["condition"] == "lost"
            else (f"on {where} {what}")
        )
    heard = "last heard " if first["condition"] == "lost" else ""
    lines = [
        f"Watchdog: {what}, {heard}at optimizer step {first['step']} (micro-batch {first['num_batches']} of this run), "
        f"{_WORDS[Phase(first['phase'])]}. "
        f"The job is ended (timeout_s={timeout_s:g}; this report: {report}).",
        *(_describe_state(state) for state in states),
    ]
    return "\n".join(lines) + "\n"


def _describe_condition(state: dict[str, Any], *, is_plural: bool) -> str:
    if state["condition"] == "gone":
        after = f" after {state['text']}" if state["text"] else ": killed, crashed, or ended by its own code"
        return f"{'are' if is_plural else 'is'} dead{after}"
    if state["condition"] == "lost":
        return (
            f"gave no sign of life for {state['idle_s']:.0f} s, because the machine or its network is down, or it is "
            "stopped"
        )
    if state["condition"] == "cut off":
        return "lost the folder of the run, because its node is cut off or the other nodes went on without it"
    if state["phase"] == Phase.FAILED:
        return f"failed with {state['text']}"
    if state["condition"] == "stopped":
        return f"{'are' if is_plural else 'is'} stopped (SIGSTOP)"
    return f"made no progress for {state['idle_s']:.0f} s"


def _describe_state(state: dict[str, Any]) -> str:
    idle = f", no progress for {state['idle_s']:.0f} s" if state["idle_s"] >= 1 else ""
    place = f"{_WORDS[Phase(state['phase'])]}, optimizer step {state['step']}, micro-batch {state['num_batches']}"
    frames = _describe_frames(state["frames"])
    return (
        f"  rank {state['rank']} (process {state['pid']} on {state['host']}): {state['condition']}, "
        f"{place}{idle}{frames}"
    )


def descendants(pid: int) -> list[int]:
    """Return all descendants of a process except watchdogs; none without /proc."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            if Path(__file__).name.encode() not in (entry / "cmdline").read_bytes():
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


if __name__ == "__main__":
    main(sys.argv[1])
