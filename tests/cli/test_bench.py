"""``fastft bench``: which workload it takes, where it finds the comparison, and what it runs."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks.ruler.workloads import WORKLOADS
from lightning_fastft.cli import bench, main
from lightning_fastft.core.errors import MissingDependencyError, OptionError


@pytest.fixture
def gpu(monkeypatch):
    """Return a function that puts a GPU of some memory into this machine, or none."""

    def install(memory_gib):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: memory_gib > 0)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA Test")
        monkeypatch.setattr(
            torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=int(memory_gib * 2**30))
        )

    return install


@pytest.fixture
def commands(monkeypatch):
    """Return the commands that were started, and where they look first; none of them runs."""
    started = []

    def run(command, *, env, check):
        started.append((command, Path(env["PYTHONPATH"].partition(os.pathsep)[0])))
        return SimpleNamespace(returncode=3)

    monkeypatch.setattr(bench.subprocess, "run", run)
    return started


@pytest.mark.parametrize(
    ("memory_gib", "workload"),
    [
        (139.8, "qwen3-14b-qlora"),
        (47.4, "qwen3-14b-qlora"),
        (31.4, "qwen3-8b-qlora"),
        (23.6, "qwen3-0.6b-lora"),
        (0, "tiny"),
    ],
)
def test_the_largest_workload_that_fits_is_taken(memory_gib, workload, gpu):
    gpu(memory_gib)
    name, reason = bench.choose_workload()
    assert name == workload
    assert name in WORKLOADS
    assert (f"NVIDIA Test has {memory_gib:.1f} GiB" if memory_gib else "there is no GPU here") in reason


def test_a_gpu_that_is_too_small_is_refused_with_what_to_do(gpu):
    gpu(7.6)
    with pytest.raises(
        OptionError,
        match=r"NVIDIA Test has 7\.6 GiB; the smallest workload, qwen3-0\.6b-lora, asks for 20.*--workload "
        r"qwen3-0\.6b-lora",
    ):
        bench.choose_workload()


@pytest.mark.parametrize("options", [[], ["--out", "runs/here"]])
def test_results_that_cannot_be_written_are_refused_at_once(options, gpu, commands, folder, capsys):
    gpu(0)
    (folder / "runs").write_text("a file")
    assert main(["bench", *options]) == 1
    assert "cannot write to runs/" in (text := capsys.readouterr().err)
    assert "--out FOLDER" in text
    assert not commands


def test_bench_says_what_it_runs_and_why(gpu, commands, folder, capsys):
    gpu(139.8)
    assert main(["bench", "--out", "results", "--arms", "ours", "plain"]) == 3
    assert "fastft bench: qwen3-14b-qlora on cuda: NVIDIA Test has 139.8 GiB" in capsys.readouterr().out
    ((command, place),) = commands
    assert command[1:] == [
        "-m",
        "benchmarks.compare",
        "--workload",
        "qwen3-14b-qlora",
        "--device",
        "cuda",
        "--out",
        "results",
        "--arms",
        "ours",
        "plain",
    ]
    assert (place / "benchmarks" / "compare.py").is_file()


def test_a_named_workload_is_taken_as_it_is(gpu, commands, folder):
    gpu(0)
    assert main(["bench", "--workload=tiny-long"]) == 3
    assert commands[0][0][3:] == ["--workload", "tiny-long", "--device", "cpu"]


def test_the_comparison_is_found_beside_an_editable_install_or_in_the_current_folder(folder, monkeypatch):
    installed = folder / "site-packages" / "lightning_fastft" / "__init__.py"
    monkeypatch.setattr(bench.lightning_fastft, "__file__", str(installed))
    with pytest.raises(
        MissingDependencyError,
        match=r"neither in .*site-packages nor in .*Clone the repository of lightning_fastft, run `pip install -e",
    ):
        bench.find_repository()
    (folder / "benchmarks").mkdir()
    (folder / "benchmarks" / "compare.py").touch()
    assert bench.find_repository() == folder
    beside = folder / "site-packages" / "benchmarks"
    beside.mkdir(parents=True)
    (beside / "compare.py").touch()
    assert bench.find_repository() == folder / "site-packages"


def test_a_wheel_without_benchmarks_ends_in_one_line(folder, answer, monkeypatch):
    monkeypatch.setattr(
        bench.lightning_fastft, "__file__", str(folder / "elsewhere" / "lightning_fastft" / "__init__.py")
    )
    status, text = answer(["bench"])
    assert status == 1
    assert text.startswith("error: MissingDependencyError: fastft bench runs benchmarks/compare.py of the repository")
