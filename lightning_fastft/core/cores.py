"""Count the CPU cores that this process may use, and those that other processes leave free."""

from __future__ import annotations

import os
import time
from pathlib import Path

# A shorter measurement is inaccurate: /proc/stat counts in hundredths of a second.
SHORTEST_SECONDS = 0.3


def count_usable_cores(root: Path = Path("/")) -> int:
    """Return the cores that affinity and the cgroup's CPU quota allow, at least one.

    Example:
        >>> count_usable_cores() >= 1
        True
    """
    quotas = [quota for folder in _cgroup_folders(root) if (quota := _read_quota(folder)) is not None]
    return max(1, int(min([len(_affinity()), *quotas])))


class FreeCores:
    """Measure how many cores other processes leave free, from the construction to ``count``.

    Example:
        >>> FreeCores().count() >= 1
        True
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._begin, self._own, self._idle = time.perf_counter(), time.process_time(), self._read_idle()

    def count(self) -> int:
        """Return the free cores, this process's own share included: at least one, at most the usable ones.

        If the time was too short, or there is no ``/proc/stat``, all usable cores count as free.
        """
        usable, idle = count_usable_cores(self._root), self._read_idle()
        seconds = time.perf_counter() - self._begin
        if seconds < SHORTEST_SECONDS or idle is None or self._idle is None:
            return usable
        own = time.process_time() - self._own
        return max(1, min(usable, round((idle - self._idle + own) / seconds)))

    def _read_idle(self) -> float | None:
        """Return the seconds that our cores have been idle since boot, in all."""
        try:
            lines = (self._root / "proc/stat").read_text(encoding="ascii").splitlines()
        except OSError:
            return None
        rows = {row[0]: row for line in lines if len(row := line.split()) > 5}
        ours = [rows[name] for number in _affinity() if (name := f"cpu{number}") in rows]
        # Idle, and waiting for a disk.
        ticks = sum(int(row[4]) + int(row[5]) for row in ours)
        return ticks / os.sysconf("SC_CLK_TCK") if ours else None


def _affinity() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def _cgroup_folders(root: Path) -> list[Path]:
    """Return the folders of this process's cgroups for CPU time, versions 1 and 2, with their parents."""
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    folders = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        base = root / "sys/fs/cgroup" / ("cpu" if controllers else "")
        folder = base / path.strip("/")
        # Inside a container the path may be the one of the host, and only the base exists.
        folders += [place for place in (folder, *folder.parents) if place == base or base in place.parents]
    return folders


def _read_quota(folder: Path) -> float | None:
    """Return the cores of a cgroup's quota; None for no limit."""
    try:
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text(encoding="ascii").split()
        else:
            quota, period = (
                (folder / f"cpu.cfs_{name}_us").read_text(encoding="ascii").strip() for name in ("quota", "period")
            )
    except (OSError, ValueError):
        return None
    return int(quota) / int(period) if quota not in ("max", "-1") else None
