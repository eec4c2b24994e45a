"""Checkpoints of shards are written during training: they hold the step in their name, and count only when every rank
has written.
"""

import pytest
import torch

from tests.strategies.save_worker import KINDS
from tests.support.two_ranks import run_two_ranks

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saves")
    run_two_ranks("tests.strategies.save_worker", folder)
    return [torch.load(folder / f"found-{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.mark.parametrize("kind", KINDS)
def test_folder_counts_only_when_the_last_rank_has_written(found, kind):
    for seen in (each[kind, "seen"] for each in found):
        assert seen[3] == {"step=2.ckpt": False}
        # The oldest one is kept until then.
        assert seen[7] == {"step=2.ckpt": True, "step=4.ckpt": True, "step=6.ckpt": False}
    assert found[0][kind, "left"] == ["last.ckpt", "step=4.ckpt", "step=6.ckpt"]


@pytest.mark.parametrize("kind", KINDS)
def test_later_steps_are_not_in_a_save(found, kind):
    whole, resumed = found[0][kind, "whole"], found[0][kind, "resumed"]
    assert whole.keys() == resumed.keys()
    assert all(torch.equal(value, resumed[name]) for name, value in whole.items())


@pytest.mark.parametrize(("case", "kept"), [("failed", []), ("failed at the end", ["step=2.ckpt", "step=4.ckpt"])])
def test_error_of_a_rank_is_raised_on_all(found, case, kept):
    for each in found:
        assert "step=" in each[case]["error"] or "rank 1" in each[case]["error"]
        assert each[case]["names"] == dict.fromkeys(kept)


def test_stopped_run_waits_for_its_checkpoint(found):
    for each in found:
        assert each["stopped"]["damage"] is None
        assert each["stopped"]["step"] in (4, 5)
