"""The facts of a report that do not come from the run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import lightning_fastft

ROOT = Path(lightning_fastft.__file__).parents[1]
SCRIPT = "from lightning_fastft.monitor.report.facts import describe_command\nprint(describe_command())\n"


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["-m", "package", "fit", "a b"], "python -m package fit 'a b'"),
        (["-m", "package.module", "fit"], "python -m package.module fit"),
        (["package/module.py", "fit"], "package/module.py fit"),
    ],
)
def test_command_is_one_that_a_shell_runs(tmp_path, words, shown):
    (tmp_path / "package").mkdir()
    for name in ("__init__", "__main__", "module"):
        (tmp_path / f"package/{name}.py").write_text("" if name == "__init__" else SCRIPT)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *words], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.stdout == f"{shown}\n", done.stderr
