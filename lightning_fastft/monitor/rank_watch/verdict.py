"""Which ranks are to blame for the end of a run, which node is slow, and the text that says so."""

import re
import statistics
from pathlib import Path
from typing import Any

from lightning_fastft.monitor.rank_watch.beats import Phase

# A node is slow if its micro-batches take this many times as long as those of the other nodes, in two consecutive
# checks.
SLOW_RATIO = 1.3
_FRAME = re.compile(r'File "(.*)", line (\d+) in (.*)')
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


def find_slow_node(states: list[dict[str, Any]]) -> tuple[int, str, float, float] | None:
    """Return the slowest node if its micro-batches take SLOW_RATIO times as long as those of the other nodes (medians):
    its number, its host, its seconds and those of the others. None if a time is unknown.
    """
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
    return slowest, nodes[slowest][0]["host"], times[slowest], others_s


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
