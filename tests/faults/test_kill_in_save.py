"""R1: a finished save is never lost to kill -9, none is torn, and the next start leaves nothing behind."""

import os
import random
import signal
import time

import pytest

from lightning_fastft.checkpoint.atomic import sweep
from lightning_fastft.checkpoint.files import check_folder, load_file
from tests.faults.saves import fork, save_until_killed

NUM_KILLS = [pytest.param(10, id="10 kills"), pytest.param(200, id="200 kills", marks=pytest.mark.fault)]


@pytest.mark.parametrize("num_kills", NUM_KILLS)
def test_no_save_is_torn_or_lost(tmp_path, num_kills):
    chance = random.Random(num_kills)
    num_torn = num_lost = num_leftover = num_parts = 0
    for trial in range(num_kills):
        is_folder, is_elsewhere = trial % 4 >= 2, trial % 2 == 1
        folder = tmp_path / ("folders" if is_folder else "files")
        path = folder / "last.ckpt"
        temporary = "/dev/shm" if is_elsewhere and os.path.isdir("/dev/shm") else str(tmp_path)
        folder.mkdir(exist_ok=True)
        child, read = fork(
            lambda write, p=path, t=temporary, f=is_folder, n=trial: save_until_killed(
                p, write, begin=n * 10_000, temporary=t, is_folder=f
            )
        )
        acknowledged = int.from_bytes(os.read(read, 4), "little")
        # A save takes milliseconds: the kill comes anywhere in one of the next.
        time.sleep(chance.uniform(0, 0.03))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        while rest := os.read(read, 4):
            acknowledged = int.from_bytes(rest, "little")
        os.close(read)
        num_parts += len(list(folder.iterdir())) > 1
        sweep(folder)
        num_leftover += len([place for place in folder.iterdir() if place != path])
        if is_folder:
            check_folder(path)
        contents = [load_file(file) for file in (sorted(path.glob("__*")) if is_folder else [path])]
        num_torn += any(float(content["weight"][-1]) != content["number"] for content in contents)
        num_lost += any(content["number"] < acknowledged for content in contents)
    print(
        f"R1: {num_torn} of {num_kills} torn, {num_lost} acknowledged saves lost, {num_leftover} left behind; "
        f"{num_parts} kills came inside a save"
    )
    assert (num_torn, num_lost, num_leftover) == (0, 0, 0)
    assert num_parts >= num_kills // 5
