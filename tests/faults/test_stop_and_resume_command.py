"""The command line: SIGTERM ends in a checkpoint and exit code 143, and settings that contradict the checkpoint
are said or refused.
"""

import signal
import subprocess
import sys
import time

import pytest

from lightning_fastft.checkpoint.files import check_file
from lightning_fastft.demo.files import write_demo_files
from lightning_fastft.demo.generator import generate_rows
from tests.cli.test_command import tiny_words


def start(folder, words):
    return subprocess.Popen(
        [sys.executable, "-m", "lightning_fastft", "fit", *words],
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.fault
def test_stopped_run_is_resumed_and_contradictions_are_said(tmp_path):
    words = tiny_words(
        write_demo_files(generate_rows(num_train=40, num_validation=4), tmp_path / "demo", vocab_size=320)
    )
    words += [
        "--trainer.default_root_dir",
        "out",
        "--trainer.enable_checkpointing=true",
        "--trainer.callbacks+=lightning.pytorch.callbacks.ModelCheckpoint",
    ]
    words += [
        "--trainer.callbacks.dirpath=out",
        "--trainer.callbacks.every_n_train_steps=1",
        "--model.learning_rate=0.001",
    ]
    run = start(tmp_path, [*words, "--trainer.max_steps=100000"])
    while not list((tmp_path / "out").glob("*.ckpt")):
        assert run.poll() is None, run.stderr.read()
        time.sleep(0.1)
    run.send_signal(signal.SIGTERM)
    told = run.communicate(timeout=60)[1]
    assert run.returncode == 143, told
    (stopped,) = (tmp_path / "out").glob("stopped-step=*.ckpt")
    assert check_file(stopped)
    assert f"Resume with ckpt_path={stopped.relative_to(tmp_path)}" in told.replace(str(tmp_path) + "/", "")

    end = int(stopped.stem.partition("=")[2]) + 1
    run = start(tmp_path, [*words, f"--ckpt_path={stopped}", f"--trainer.max_steps={end}", "--model.learning_rate=0.5"])
    told = run.communicate(timeout=120)[1]
    assert run.returncode == 0, told
    assert "learning_rate was 0.001 and is 0.5" in told
    assert f"max_steps was 100000 and is {end}" in told

    run = start(tmp_path, [*words, f"--ckpt_path={stopped}", f"--trainer.max_steps={end}", "--data.max_tokens=512"])
    told = run.communicate(timeout=120)[1]
    assert run.returncode == 1
    assert "max_tokens was 1024 and is 512" in told
