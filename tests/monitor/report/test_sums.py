"""Statistics in bounded memory: curves, spreads of times, lengths of documents."""

import numpy as np
import pytest

from lightning_fastft.monitor.report.sums import Curve, PackSums, Spread
from lightning_fastft.packing.collate import Document, collate


def test_curve_loses_no_value_and_stays_bounded():
    curve, values = Curve(max_points=8), np.random.default_rng(0).normal(size=1001)
    for step, value in enumerate(values):
        curve.add(step, float(value))
        assert len(curve.points()) <= 8
    points = curve.points()
    assert (points[0][0], points[-1][1]) == (0, 1000)
    for (first, last, value), after in zip(points, [*points[1:], None]):
        assert value == pytest.approx(values[first : last + 1].mean())
        assert after is None or after[0] == last + 1
    assert {last - first + 1 for first, last, _ in points[:-1]} == {curve.values_per_point}


def test_spread_is_right_to_a_percent():
    spread, values = Spread(), np.random.default_rng(0).lognormal(3, 1, size=5000)
    for value in values:
        spread.add(float(value))
    for percent in (10, 50, 90, 100):
        assert spread.percentile(percent) == pytest.approx(np.percentile(values, percent), rel=0.01)


@pytest.mark.parametrize(("low", "high"), [(70, 120), (3, 9000), (1, 1), (40, 44)])
def test_lengths_of_documents_are_seen_in_bins_over_those_that_occur(low, high):
    lengths = np.random.default_rng(0).integers(low, high + 1, size=400)
    lengths[:2] = low, high
    sums = PackSums()
    for part in np.split(lengths, 20):
        sums.add(
            collate(
                [Document(np.ones(length, dtype=np.int64), np.ones(length, dtype=np.int64)) for length in part]
            ).context
        )
    bars = sums.to_dict(max_tokens=None)["lengths"]
    assert min(7, high - low + 1) <= len(bars) <= 12
    assert (bars[0]["low"], bars[-1]["high"]) == (low, high)
    assert [bar["low"] for bar in bars[1:]] == [bar["high"] + 1 for bar in bars[:-1]]
    assert [bar["count"] for bar in bars] == [
        int(((lengths >= bar["low"]) & (lengths <= bar["high"])).sum()) for bar in bars
    ]


@pytest.mark.parametrize(("num_alike", "factor"), [(1, 2), (2, 1)], ids=["other packs", "parts of one pack"])
def test_packs_of_ranks_add_up_unless_they_are_the_same(num_alike, factor):
    alone, sums = PackSums(), PackSums()
    for found in (alone, sums):
        found.add(collate([Document(np.arange(1, length + 1), np.arange(1, length + 1)) for length in (3, 2)]).context)
    sums.take_sums(np.stack([sums.to_array()] * 2), np.stack([sums.count_lengths(3)] * 2), num_alike=num_alike)
    before, after = alone.to_dict(max_tokens=8), sums.to_dict(max_tokens=8)
    assert after["num_ranks"] == 2
    assert (after["num_packs"], after["num_documents"]) == (factor, 2 * factor)
    assert [bar["count"] for bar in after["lengths"]] == [factor, factor]
    assert {name: after[name] for name in ("fill", "padding", "longest_document_tokens", "mean_document_tokens")} == {
        name: before[name] for name in ("fill", "padding", "longest_document_tokens", "mean_document_tokens")
    }
