"""``faulty://``, a file system of fsspec that keeps its objects in local folders and fails where a test says so."""

import os
import shutil
import signal
from pathlib import Path

import fsspec
from fsspec.implementations.local import LocalFileSystem


class DriverError(Exception):
    """What a storage driver raises that derives its errors from Exception alone, as botocore does."""


class FaultyFiles(LocalFileSystem):
    """A local file system under a name of its own, with a hook at each write and removal.

    ``steps`` has the names of all that happened. ``fault`` is called with that list and raises, kills or returns a
    word: "truncate", "drop", "flip" or "half" (half of a file, then DriverError) for a write,
    "flip" or "cut" for a read.
    """

    protocol = ("faulty",)
    cachable = False
    steps: list = []
    fault = staticmethod(lambda steps: None)

    @classmethod
    def reset(cls):
        cls.steps, cls.fault = [], staticmethod(lambda steps: None)

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(os.fspath(path).removeprefix("faulty://"))

    def _step(self, name):
        self.steps.append(name)
        return type(self).fault(self.steps)

    def put_file(self, path1, path2, callback=None, **kwargs):
        """Write half of a file, then the other half, as uploads do to file systems that are no object stores."""
        word = self._step(f"begin {Path(path2).name}")
        if word == "drop":
            return
        content = Path(path1).read_bytes()
        half = len(content) // 2
        with open(path2, "wb") as file:
            file.write(content[:half])
            file.flush()
            self._step(f"half {Path(path2).name}")
            if word == "half":
                raise DriverError("the connection is gone")
            rest = content[half:] if word != "flip" else bytes([content[half] ^ 1]) + content[half + 1 :]
            file.write(b"" if word == "truncate" else rest)
        self._step(f"end {Path(path2).name}")

    def get_file(self, path1, path2, callback=None, **kwargs):
        word = self._step(f"get {Path(path1).name}")
        shutil.copyfile(self._strip_protocol(path1), path2)
        content = bytearray(Path(path2).read_bytes())
        if word == "flip":
            content[len(content) // 2] ^= 1
        Path(path2).write_bytes(content[:-10] if word == "cut" else content)

    def rm_file(self, path):
        self._step(f"remove {Path(path).name}")
        super().rm_file(path)
        self._step(f"removed {Path(path).name}")


def register():
    fsspec.register_implementation("faulty", FaultyFiles, clobber=True)


def fail_at(number, action):
    """Return a fault that does something at the step of this number, from 0."""
    return lambda steps: action() if len(steps) - 1 == number else None


def at(name, word, *, nth=1):
    """Return a fault that answers a word at the nth step of a name."""
    return lambda steps: word if steps[-1] == name and steps.count(name) == nth else None


def kill():
    os.kill(os.getpid(), signal.SIGKILL)
