"""Defaults of a DataModule on this machine."""

import os
import pwd
import sys

import pytest

from lightning_fastft.core.errors import OptionError
from lightning_fastft.training.data.options import find_cache_dir


@pytest.mark.skipif(sys.platform != "linux", reason="XDG_CACHE_HOME")
def test_a_user_without_a_home_is_told_where_a_cache_can_be(monkeypatch):
    """A container with a user id of its own, and no HOME."""

    def find(number):
        raise KeyError(number)

    monkeypatch.setattr(pwd, "getpwuid", find)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    with pytest.raises(OptionError, match=r"HOME, .*--data\.cache_dir"):
        find_cache_dir()
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert find_cache_dir() == os.path.join("/caches", "lightning_fastft")
