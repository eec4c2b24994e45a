"""R17: a job that loses a node ends in time, names the node, and continues from its newest intact checkpoint.

Each rank is a node with its own watchdog, and a lost node loses its watchdog too.
"""

import re

import pytest

from lightning_fastft.monitor.rank_watch.watch import LISTEN_S, SETTLE_S
from tests.faults.ranks import HURT_AT, HURT_STEP, run_job

TIMEOUT_S = 5.0
# A silent rank is found at the next check, and then has some time to end with its own error.
LIMIT_S = TIMEOUT_S + LISTEN_S + SETTLE_S + 10.0
LOST = r"Watchdog: node 1 \(.+\) is lost: rank 1 gave no sign of life for \d+ s"


@pytest.mark.fault
@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("lose_node", LOST),
        ("stop_node", LOST),
        ("lose_node_in_a_save", LOST),
        ("lose_node_in_the_first_step", LOST),
        ("sleep", r"Watchdog: on node 1 \(.+\) rank 1 made no progress for \d+ s"),
    ],
)
def test_a_lost_node_is_named_in_time_and_the_run_goes_on(tmp_path, kind, said):
    end = run_job(tmp_path, kind=kind, timeout_s=TIMEOUT_S, are_nodes=True, limit_s=LIMIT_S)
    print(f"lost node: {kind}: exit codes {end.codes} after {end.seconds:.1f} s (timeout_s={TIMEOUT_S:g})")
    # A machine that is stopped ends nothing.
    assert end.codes[0] not in (0, None), end.said[-4000:]
    assert (end.codes[1] is None) == (kind == "stop_node")
    assert re.search(said, end.report), end.report + end.said[-4000:]
    # A watchdog writes once a second where its node is, so the others know an earlier step.
    (step,) = re.findall(r"at optimizer step (\d+) ", end.report)
    assert int(step) <= (1 if "first_step" in kind else HURT_AT + 1)
    for path in tmp_path.rglob("watchdog-*.txt"):
        path.unlink()
    again = run_job(tmp_path, kind="none", timeout_s=60.0, are_nodes=True)
    assert again.codes == [0, 0], again.said[-4000:]
    assert sorted(path.name for path in (tmp_path / "runs").glob("*.ckpt")) == ["last.ckpt", "step=12.ckpt"]
    (begun,) = {int(step) for step in re.findall(r"begins after step (\d+)", again.said)}
    # The save in which the node was lost, that of step HURT_STEP - 1, does not count.
    saved = {"lose_node_in_the_first_step": 0, "lose_node_in_a_save": HURT_STEP - 2}
    assert begun == saved.get(kind, HURT_AT)


@pytest.mark.fault
def test_a_slow_node_is_named_once(tmp_path):
    end = run_job(tmp_path, kind="slow", timeout_s=60.0, are_nodes=True, num_batches=(160, 160), max_steps=160)
    assert end.codes == [0, 0], end.said[-4000:]
    (line,) = re.findall(r"Watchdog: node .* is slow.*", end.said)
    own_ms, others_ms = map(int, re.findall(r"(\d+) ms", line))
    assert line.startswith("Watchdog: node 1 (")
    assert own_ms >= 100 > others_ms >= 20
