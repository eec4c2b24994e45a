"""Two real ranks agree: on a failure of one of them, and on a signal that one of them got."""

import os

import pytest
import torch.distributed as dist

from lightning_fastft.checkpoint.ranks import RankVote, on_all_ranks
from lightning_fastft.core.errors import CheckpointNotSavedError
from tests.faults.saves import fork


def run_two(tmp_path, action):
    """What action(rank) returns on each of two ranks, as text."""

    def begin(rank, write):
        dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=rank, world_size=2)
        os.write(write, str(action(rank)).encode())

    children = [fork(lambda write, rank=rank: begin(rank, write)) for rank in range(2)]
    answers = [os.read(read, 10_000).decode() for _, read in children]
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child, _ in children] == [0, 0]
    for _, read in children:
        os.close(read)
    return answers


def save_where_the_disk_is_full_on_one(rank):
    def save():
        if rank == 1:
            raise OSError("no room")
        return rank

    results = on_all_ranks(lambda: 10 + rank, error=CheckpointNotSavedError)
    try:
        on_all_ranks(save, error=CheckpointNotSavedError)
    except OSError as error:
        return f"{results} {type(error).__name__}: {error}"
    return results


def vote(rank):
    ranks = RankVote()
    ranks.open()
    # Rank 1 gets a signal between step 1 and step 2.
    answers = [ranks.agree(10 if rank == 1 and step >= 2 else 0) for step in range(5)]
    alike = [ranks.everywhere(is_so) for is_so in (True, rank == 0, False)]
    ranks.close()
    return [*answers, *alike]


def test_failure_of_one_rank_is_raised_on_all(tmp_path):
    assert run_two(tmp_path, save_where_the_disk_is_full_on_one) == [
        "[10, 11] CheckpointNotSavedError: rank 1: OSError: no room",
        "[10, 11] OSError: no room",
    ]


def test_signal_of_one_rank_is_answered_on_all_at_the_same_step(tmp_path):
    assert run_two(tmp_path, vote) == ["[0, 0, 0, 10, 10, True, False, False]"] * 2


def test_one_rank_needs_no_agreement():
    vote = RankVote()
    vote.open()
    assert [vote.agree(number) for number in (0, 15)] == [0, 15]
    assert [vote.everywhere(is_so) for is_so in (True, False)] == [True, False]
    vote.close()
    with pytest.raises(OSError, match="no room"):
        on_all_ranks(lambda: (_ for _ in ()).throw(OSError("no room")), error=CheckpointNotSavedError)
