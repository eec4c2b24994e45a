"""Times of micro-batches: what is counted, and what is counted apart."""

import pytest

from lightning_fastft.monitor.report.timing import Batch, BatchTimes


def timed(step, ms, *, set_up=""):
    parts_ms = {"forward": ms / 4, "backward": 3 * ms / 4}
    return Batch(number=step, step=step, num_tokens=100, set_up=set_up, parts_ms=parts_ms)


def test_what_was_made_once_is_no_measure_of_a_step():
    times = BatchTimes(num_warmup=3)
    for step, ms in enumerate((900.0, 500.0, 400.0, 10.0, 300.0, 10.0, 200.0, 20.0)):
        times.add(timed(step, ms, set_up="layers were recorded" if ms >= 200.0 else ""))
    times.finish()
    found = times.to_dict(is_cuda=False)
    assert (found["num_batches"], found["has_warmup"]) == (3, False)
    # Those of the warm-up are left out as ever.
    assert found["set_ups"] == [{"what": "layers were recorded", "num_batches": 2, "ms": 500.0}]
    assert found["parts"][1]["mean_ms"] == pytest.approx(10.0 / 3)
    assert times.rate() == pytest.approx(300 / 0.040)
    assert times.slowest_to_dict()["ms"] == 20.0
    # The curve leaves nothing out.
    assert len(times.tokens_per_s.points()) == 8


def test_a_run_that_only_sets_things_up_counts_its_warmup():
    times = BatchTimes(num_warmup=1)
    times.add(timed(0, 100.0))
    times.add(timed(1, 200.0, set_up="layers were recorded"))
    times.finish()
    assert (times.to_dict(is_cuda=False)["num_batches"], times.has_warmup) == (1, True)
