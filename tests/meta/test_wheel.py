"""The wheel and the sdist hold the package, and a fresh environment outside of the clone runs it."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BUILD = """
import sys
from setuptools import build_meta
folder = sys.argv[1]  # a build replaces sys.argv
print(build_meta.build_sdist(folder), build_meta.build_wheel(folder))
"""
# Files of the package that are not modules.
DATA = {
    "lightning_fastft/py.typed",
    *(f"lightning_fastft/configs/{path.name}" for path in (ROOT / "lightning_fastft/configs").glob("*.yaml")),
}


def run(*command, folder):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The sdist and the wheel, built from a copy."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(
        ROOT / "lightning_fastft", source / "lightning_fastft", ignore=shutil.ignore_patterns("__pycache__")
    )
    names = run(sys.executable, "-c", BUILD, str(out), folder=source).splitlines()[-1].split()
    return [out / name for name in names]


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory):
    """The programs of a fresh environment with the wheel, which finds all else in the packages of this one."""
    folder = tmp_path_factory.mktemp("fresh")
    venv.create(folder / "venv", with_pip=False, symlinks=True)
    python = folder / "venv/bin/python"
    run(
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(python),
        "install",
        "--no-deps",
        "--no-index",
        "--no-compile",
        str(built[1]),
        folder=folder,
    )
    (packages,) = (folder / "venv").glob("lib/python*/site-packages")
    # A folder of a .pth file is searched, but its own .pth files, such as that of an editable install, are not read.
    (packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder, python.parent


def test_wheel_and_sdist_hold_every_module_and_config(built):
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "lightning_fastft").rglob("*.py")}
    with tarfile.open(built[0]) as sdist, zipfile.ZipFile(built[1]) as wheel:
        in_sdist = {name.partition("/")[2] for name in sdist.getnames()}
        in_wheel = set(wheel.namelist())
    assert modules | DATA <= in_sdist
    assert {name for name in in_wheel if ".dist-info/" not in name} == modules | DATA
    assert any(name.endswith("licenses/LICENSE") for name in in_wheel)


@pytest.mark.slow(seconds=5)
def test_first_command_of_the_readme_runs_from_the_wheel(installed):
    folder, programs = installed
    command = (
        (ROOT / "README.md").read_text().partition("pip install 'lightning-fastft[")[2].splitlines()[1].split("#")[0]
    )
    assert command.split() == ["fastft", "doctor"]
    assert "GPU training" in run(programs / "fastft", "doctor", folder=folder)
    place = run(
        programs / "python",
        "-c",
        "import sys; sys.argv[0] = 'fastft'; import lightning_fastft as package; print(package.__file__)",
        folder=folder,
    )
    assert Path(place.strip()).is_relative_to(folder)
    assert "qlora_qwen3_8b" in run(programs / "fastft", "--help", folder=folder)
