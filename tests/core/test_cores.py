"""Cores that a process may use, and those that are free, on made-up machines."""

import os

import pytest

from lightning_fastft.core import cores
from lightning_fastft.core.cores import FreeCores, count_usable_cores

TICKS = os.sysconf("SC_CLK_TCK")


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Eight cores in a folder of their own, and a clock to set."""
    monkeypatch.setattr(cores, "_affinity", lambda: set(range(8)))
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/job/step\n")
    (tmp_path / "sys/fs/cgroup/job/step").mkdir(parents=True)
    return tmp_path


@pytest.mark.parametrize(
    ("job", "step", "expected"),
    [("max 100000", "max 100000", 8), ("max 100000", "250000 100000", 2), ("300000 100000", "max 100000", 3)],
)
def test_quota_of_a_cgroup_and_of_its_parents_bounds_the_cores(job, step, expected, machine):
    (machine / "sys/fs/cgroup/job/cpu.max").write_text(job + "\n")
    (machine / "sys/fs/cgroup/job/step/cpu.max").write_text(step + "\n")
    assert count_usable_cores(machine) == expected


@pytest.mark.parametrize(("quota", "expected"), [(-1, 8), (150_000, 1), (50_000, 1), (400_000, 4)])
def test_quota_of_the_first_version_of_cgroups_bounds_the_cores(quota, expected, machine):
    (machine / "proc/self/cgroup").write_text("4:memory:/a\n3:cpu,cpuacct:/on/the/host\n0::/\n")
    folder = machine / "sys/fs/cgroup/cpu"
    folder.mkdir()
    (folder / "cpu.cfs_quota_us").write_text(f"{quota}\n")
    (folder / "cpu.cfs_period_us").write_text("100000\n")
    assert count_usable_cores(machine) == expected


def write_stat(machine, idle_seconds):
    rows = [f"cpu{number} 1 1 1 {round(seconds * TICKS)} 0 0 0 0 0 0" for number, seconds in enumerate(idle_seconds)]
    (machine / "proc/stat").write_text("cpu 0 0 0 0 0 0 0 0 0 0\n" + "\n".join(rows) + "\n")


@pytest.mark.parametrize(
    ("idle", "own", "seconds", "expected"),
    [
        # All idle but the one that imports; half of them busy; all busy; and a time too short to tell.
        ([10] * 7 + [0], 10, 10, 8),
        ([10] * 3 + [0] * 5, 10, 10, 4),
        ([0] * 8, 3, 10, 1),
        ([0] * 8, 0.1, 0.1, 8),
        # Cores that are not ours do not count.
        ([0] * 8 + [10] * 8, 10, 10, 1),
    ],
)
def test_free_cores_are_idle_ones_and_our_own_share(idle, own, seconds, expected, machine, monkeypatch):
    write_stat(machine, [5] * len(idle))
    free = FreeCores(machine)
    wall, used = free._begin + seconds, free._own + own
    monkeypatch.setattr(cores.time, "perf_counter", lambda: wall)
    monkeypatch.setattr(cores.time, "process_time", lambda: used)
    write_stat(machine, [5 + value for value in idle])
    assert free.count() == expected


def test_without_proc_all_usable_cores_are_free(machine):
    assert FreeCores(machine).count() == 8
