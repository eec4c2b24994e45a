"""fastft doctor without a config: devices, packages and extras of this machine."""

import subprocess

import pytest

from lightning_fastft.cli import machine
from lightning_fastft.core.extras import EXTRAS


@pytest.fixture
def smi(monkeypatch):
    """What nvidia-smi is made to answer."""

    def answer(text, returncode=0):
        monkeypatch.setattr(machine.shutil, "which", lambda name: f"/bin/{name}")
        done = subprocess.CompletedProcess([], returncode, stdout=text)
        monkeypatch.setattr(machine.subprocess, "run", lambda *args, **kwargs: done)

    return answer


def test_gpus_and_what_they_can_do(smi, monkeypatch):
    smi("NVIDIA H200, 143771, 9.0, 570.86\nNVIDIA GeForce RTX 2080, 8192, 7.5, 570.86\n")
    versions = {"torch": "2.11.0", "triton": "3.6.0"}
    monkeypatch.setattr(machine, "version_of", lambda name: versions.get(name, ""))
    text = machine.describe_machine()
    assert "GPU 0: NVIDIA H200, 140 GiB, compute capability 9.0, driver 570.86" in text
    rows = {line.split("  ")[0]: line for line in text.splitlines()}
    assert "active" in rows["Triton kernels"]
    # The least capable card decides.
    assert "needs 8.0" in rows["flash attention"]
    assert "needs 9.0" in rows["grouped GEMM of torch"]


def test_gpu_without_a_build_of_torch_for_it_is_refused(smi, monkeypatch):
    smi("NVIDIA H200, 143771, 9.0, 570.86\n")
    monkeypatch.setattr(machine, "version_of", lambda name: "2.13.0+cpu")
    assert "GPU training  refused   torch 2.13.0+cpu is a build for the CPU" in machine.describe_machine()


@pytest.mark.parametrize("answer", ["No devices were found\n", "", "x, [N/A], 9.0, 1\n"])
def test_odd_answers_of_the_driver_are_no_gpus(answer, smi):
    smi(answer)
    assert machine.find_gpus() == []
    smi("NVIDIA H200, 143771, 9.0, 570.86\n", returncode=9)
    assert machine.find_gpus() == []


def test_every_extra_has_its_row_and_a_missing_one_its_command(monkeypatch):
    monkeypatch.setattr(machine, "missing_modules", lambda name: ["cudnn"] if name == "hopper" else [])
    text = machine.describe_machine()
    assert all(f"[{name}]" in text for name in EXTRAS)
    assert text.count("pip install 'lightning-fastft[") == 1
    assert "-> pip install 'lightning-fastft[hopper]'" in text
