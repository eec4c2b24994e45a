"""bitsandbytes is imported without torch's compiler on a GPU, and nothing of the process stays changed."""

import os
import sys

import pytest
import torch

from lightning_fastft.hf.quick_import import import_bitsandbytes

NAME = "TORCHDYNAMO_DISABLE"


@pytest.fixture
def imported(tmp_path, monkeypatch):
    """Import another module of its name and return what it saw; an import by an earlier test stays as it is."""

    def run(*, has_gpu, content="import os\nfound = os.environ.get('TORCHDYNAMO_DISABLE')\n"):
        (tmp_path / "bitsandbytes.py").write_text(content)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "bitsandbytes", raising=False)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
        import_bitsandbytes()
        return sys.modules["bitsandbytes"].found

    return run


@pytest.mark.parametrize(("has_gpu", "seen"), [(True, "1"), (False, None)])
def test_the_compiler_is_disabled_for_the_import_alone(imported, monkeypatch, has_gpu, seen):
    monkeypatch.delenv(NAME, raising=False)
    assert imported(has_gpu=has_gpu) == seen
    assert NAME not in os.environ


def test_a_variable_that_is_set_stays(imported, monkeypatch):
    monkeypatch.setenv(NAME, "0")
    assert imported(has_gpu=True) == "0"
    assert os.environ[NAME] == "0"


def test_a_failing_import_leaves_no_variable(imported, monkeypatch):
    monkeypatch.delenv(NAME, raising=False)
    with pytest.raises(OSError, match="broken"):
        imported(has_gpu=True, content="raise OSError('broken')\n")
    assert NAME not in os.environ
