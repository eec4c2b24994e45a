"""Workers on two ranks: one that torch aborts is run once more, with a warning; any other failure is one."""

import warnings

import pytest

from tests.two_ranks import run_two_ranks


@pytest.mark.parametrize(("ends", "num_tries"), [(["1", "0"], 1), (["abort", "1"], 2), (["abort", "abort"], 2)], ids=str)
def test_a_failure_is_one(tmp_path, ends, num_tries):
    with warnings.catch_warnings(record=True) as told, pytest.raises(AssertionError):
        run_two_ranks("tests.two_ranks_worker", tmp_path, *ends)
    assert len(told) == num_tries - 1
    assert max(path.suffix for path in tmp_path.iterdir()) == f".{num_tries - 1}"


def test_an_aborted_rank_gets_a_second_try(tmp_path):
    with pytest.warns(UserWarning, match="aborted by torch"):
        run_two_ranks("tests.two_ranks_worker", tmp_path, "abort", "0")
