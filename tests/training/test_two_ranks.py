"""Workers on two ranks: whatever a rank does, it is run once, a failure is one, and no process is left."""

import pytest

from tests.support.processes import is_there
from tests.support.two_ranks import run_two_ranks


@pytest.mark.parametrize(("end", "said"), [("1", "exit code 1"), ("abort", "SIGABRT"), ("hang", "in wait_for_ever")])
def test_a_failure_is_one_and_leaves_no_process(tmp_path, end, said):
    with pytest.raises(pytest.fail.Exception, match=said):
        run_two_ranks("tests.support.two_ranks_worker", tmp_path, end, timeout_s=5 if end == "hang" else 300)
    started = [path.name.split(".") for path in tmp_path.iterdir()]
    assert sorted({rank for rank, _ in started}) == ["0", "1"]
    assert len(started) == 2
    assert not any(is_there(pid) for _, pid in started)


def test_ranks_that_end_well_are_no_failure(tmp_path):
    run_two_ranks("tests.support.two_ranks_worker", tmp_path, "0")
