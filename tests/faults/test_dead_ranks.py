"""R17: a job in which a rank is dead, stopped, hung or out of step ends in time, with the rank and the step named."""

import pytest

from tests.faults.ranks import HURT_STEP, run_job

# More than a step takes on a busy machine; who is dead is found long before.
TIMEOUT_S = 5.0
FIVE = ("kill", "error", "stop", "collective", "uneven")
CASES = [
    *(pytest.param("fastft_ddp", kind, id=f"fastft_ddp-{kind}") for kind in ("kill", "stop", "uneven")),
    *(
        pytest.param(strategy, kind, id=f"{strategy}-{kind}", marks=pytest.mark.fault)
        for strategy, kinds in (
            ("fastft_ddp", ("error", "collective", "sleep", "lock")),
            ("fastft_fsdp", (*FIVE, "sleep", "lock")),
            ("ddp", (*FIVE, "sleep", "lock")),
        )
        for kind in kinds
    ),
]
BLAMED = {
    "kill": "rank 1 is dead: killed",
    "error": "rank 1 is dead after ValueError: planted",
    "stop": "rank 1 is stopped (SIGSTOP)",
    # Both wait, each in a collective of its own: the report says in which.
    "collective": "ranks 0, 1 made no progress",
    "sleep": "rank 1 made no progress",
    "lock": "rank 1 made no progress",
}


@pytest.mark.parametrize(("strategy", "kind"), CASES)
def test_job_with_a_hurt_rank_ends_in_time(tmp_path, strategy, kind):
    num_batches = (24, 22) if kind == "uneven" else (24, 24)
    end = run_job(tmp_path, kind=kind, strategy=strategy, timeout_s=TIMEOUT_S, num_batches=num_batches)
    print(f"R17: {strategy}, {kind}: exit codes {end.codes} after {end.seconds:.1f} s (timeout_s={TIMEOUT_S:g})")
    assert None not in end.codes, end.said[-4000:]
    assert 0 not in end.codes
    assert list(tmp_path.glob(".watchdog-*")) == []
    if kind == "uneven":
        # Before the first step, on both ranks.
        assert (
            end.said.count(
                "DataError: The ranks have different numbers of training batches per epoch (rank 0: 24, rank 1: 22)"
            )
            >= 2
        )
        assert "micro-batch 0 of this run" in end.report
        return
    assert f"Watchdog: {BLAMED[kind]}" in end.report
    assert f"at optimizer step {HURT_STEP} (micro-batch 7 of this run)" in end.report
    assert f"Watchdog: {BLAMED[kind]}" in end.said
    if kind == "collective":
        assert "in barrier" in end.report
        assert "called by collective" in end.report


def test_dead_rank_ends_one_that_hears_nothing_of_it_long_before_the_timeout(tmp_path):
    end = run_job(tmp_path, kind="kill_beside_one_that_is_busy", timeout_s=3600.0)
    assert end.codes == [-9, -9], end.said[-4000:]
    assert "rank 1 is dead: killed" in end.report
    assert "rank 0 when it was killed" in end.report


@pytest.mark.fault
def test_dead_rank_ends_one_whose_watchdog_starts_late(tmp_path):
    end = run_job(tmp_path, kind="kill_beside_one_that_is_busy", timeout_s=3600.0, slow_watchdog=0, limit_s=60.0)
    assert end.codes == [-9, -9], end.said[-4000:]
    assert "rank 1 is dead: killed" in end.report


def test_rank_killed_in_a_save_is_blamed_alone_where_its_end_takes_another_one_along(tmp_path):
    end = run_job(tmp_path, kind="kill_in_a_save", timeout_s=3600.0)
    assert end.codes == [-6, -9], end.said[-4000:]
    assert "Watchdog: rank 1 is dead" in end.report


@pytest.mark.fault
@pytest.mark.parametrize("kind", ["sleep", "stop"])
def test_job_of_one_rank_that_stands_still_is_ended(tmp_path, kind):
    end = run_job(tmp_path, kind=kind, strategy="one", num_ranks=1, rank=0, timeout_s=TIMEOUT_S)
    assert end.codes == [-9], end.said[-4000:]
    assert f"at optimizer step {HURT_STEP} (micro-batch 7 of this run)" in end.report


@pytest.mark.fault
@pytest.mark.parametrize("kind", ["stop", "sleep"])
def test_the_same_job_without_a_watchdog_does_not_end(tmp_path, kind):
    assert run_job(tmp_path, kind=kind, watched=False, limit_s=TIMEOUT_S + 10).codes == [None, None]
