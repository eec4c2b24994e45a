"""R2: damage is noticed before anything of a checkpoint is unpickled, in files and in folders."""

import random
import shutil

import pytest
import torch

from lightning_fastft.checkpoint.files import RECORD, check_folder, commit_folder, load_file, save_file
from lightning_fastft.core.errors import DamagedCheckpointError

NUM_DAMAGES = [pytest.param(125, id="125 damages"), pytest.param(1250, id="1250 damages", marks=pytest.mark.fault)]


def flip(path, chance):
    data = bytearray(path.read_bytes())
    bit = chance.randrange(8 * len(data))
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def truncate(path, chance):
    data = path.read_bytes()
    path.write_bytes(data[: chance.randrange(len(data))])


def swap(path, chance):
    """Another file of the folder, of the same kind, in its place."""
    others = [other for other in path.parent.iterdir() if other != path]
    path.write_bytes(chance.choice(others).read_bytes())


def delete(path, chance):
    path.unlink()


@pytest.mark.parametrize("num_damages", NUM_DAMAGES)
def test_every_damage_is_refused(tmp_path, num_damages):
    chance = random.Random(num_damages)
    file, folder = tmp_path / "file.ckpt", tmp_path / "folder.ckpt"
    content = {"weight": torch.randn(4000), "step": 7}
    good = tmp_path / "good"
    good.mkdir()
    save_file(content, good / "file.ckpt")
    for number in range(3):
        save_file({"piece": number, **content}, good / "folder.ckpt" / f"__{number}_0.distcp")
    commit_folder(good / "folder.ckpt")
    num_refused = 0
    for trial in range(num_damages):
        is_file = trial % 2 == 0
        shutil.copy(good / "file.ckpt", file)
        shutil.copytree(good / "folder.ckpt", folder, dirs_exist_ok=True)
        hurt = file if is_file else chance.choice(sorted(folder.iterdir()))
        damage = chance.choice([flip] * 8 + ([truncate] * 2 if is_file else [truncate, swap, delete]))
        damage(hurt, chance)
        try:
            load_file(file) if is_file else check_folder(folder)
        except DamagedCheckpointError as error:
            num_refused += str(file if is_file else folder) in str(error)
        else:
            print(f"accepted: {damage.__name__} of {hurt.name}")
    print(f"R2: {num_refused} of {num_damages} damaged checkpoints refused")
    assert num_refused == num_damages
    assert (folder / RECORD).name in {"commit.json"}
