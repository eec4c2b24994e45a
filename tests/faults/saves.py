"""Children that save and are killed: made by fork, so that none of them has to load torch again."""

import gc
import os
import sys
import tempfile
import traceback

import torch

from lightning_fastft.checkpoint.atomic import part_beside
from lightning_fastft.checkpoint.files import commit_folder, replace_folder, save_file


def fork(action):
    """Run action(write end of a pipe) in a child; its process id, and the read end. It exits with 0, with the
    code of a SystemExit, or with 1.
    """
    read, write = os.pipe()
    child = os.fork()
    if child:
        os.close(write)
        return child, read
    # Garbage of earlier tests may hold a process group of gloo, whose end waits for threads that a fork does not have.
    gc.freeze()
    code = 1
    try:
        os.close(read)
        action(write)
        code = 0
    except SystemExit as stop:
        code = stop.code
    finally:
        if isinstance(sys.exc_info()[1], Exception):
            traceback.print_exc()
            sys.stderr.flush()
        os._exit(code)


def save_one(path, number, *, is_folder):
    """A checkpoint that says which one it is, in a file or in the folder of two ranks."""
    content = {"number": number, "weight": torch.full((30_000,), float(number))}
    if not is_folder:
        save_file(content, path)
        return
    with part_beside(path, is_folder=True) as part:
        for rank in range(2):
            save_file(content, part / f"__{rank}_0.distcp")
        commit_folder(part)
        replace_folder(part, path)


def save_until_killed(path, write, *, begin, temporary, is_folder):
    """Save over and over to one path, and tell the parent of each save that has returned."""
    os.environ["TMPDIR"] = temporary
    tempfile.tempdir = None
    # Below 2^24, where every number is one in fp32.
    for number in range(begin, begin + 10_000):
        save_one(path, number, is_folder=is_folder)
        os.write(write, number.to_bytes(4, "little"))
