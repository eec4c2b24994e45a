"""Charts: ticks are round numbers inside the axis, and the pointer finds every value."""

import re

import numpy as np
import pytest

from lightning_fastft.monitor.report.drawing import MOST_BANDS, WIDTH, draw_chart, find_ticks


def bands_of(chart):
    """Left end and width of each band in per cent, and the lines of what it shows."""
    found = re.findall(r'left:([\d.]+)%;width:([\d.]+)%;--at:\d+%" data-tip="([^"]*)"', chart)
    return [(float(left), float(width), tip.split("\n")) for left, width, tip in found]


@pytest.mark.parametrize("low", [-3.2, 0.0, 1e-7, 0.13, 4.56, 1999.0])
@pytest.mark.parametrize("span", [1e-5, 0.004, 0.09, 1.0, 37.0, 512.0, 2.4e6])
@pytest.mark.parametrize("most", [3, 5, 6])
def test_ticks_are_round_even_and_inside(low, span, most):
    ticks = find_ticks(low, low + span, most=most)
    assert 2 <= len(ticks) <= most or (len(ticks) == 1 and most == 3)
    assert all(low - 1e-9 * span <= tick <= low + span + 1e-9 * span for tick in ticks)
    if len(ticks) > 1:
        steps = np.diff(ticks)
        assert steps == pytest.approx(steps[0], rel=1e-3)
        assert f"{float(f'{steps[0]:.1e}'):e}"[0] in "125"


def test_ticks_of_steps_are_whole():
    assert find_ticks(0, 2, most=6, is_whole=True) == [0, 1, 2]
    assert find_ticks(7, 2400, most=6, is_whole=True) == [500, 1000, 1500, 2000]
    assert find_ticks(5, 5, most=6) == [5]
    # Rounding errors are not a range.
    assert find_ticks(1999.0, 1999.0 + 1e-8, most=6) == [1999.0]


def test_bands_cover_the_plot_and_show_each_point():
    points = [(step, step, value) for step, value in enumerate([3.0, 2.5, 2.25, 7.0])]
    bands = bands_of(draw_chart([("", points)], name="x", form=".4g"))
    assert [tip for *_, tip in bands] == [[f"step {step}: {value:.4g}"] for step, _, value in points]
    assert bands[0][0] == 0
    for (left, width, _), after in zip(bands, [*(band[0] for band in bands[1:]), 100.0]):
        assert left + width == pytest.approx(after, abs=0.011)
    # A point lies in its band.
    assert all(left <= 100 * step / 3 <= left + width + 0.01 for step, (left, width, _) in enumerate(bands))


def test_a_band_shows_the_nearest_point_of_each_line():
    chart = draw_chart([("a", [(0, 0, 1.0), (10, 19, 2.0)]), ("b <i>", [(13, 13, 0.5)])], name="x", form=".4g")
    assert [tip for *_, tip in bands_of(chart)] == [
        ["a, step 0: 1", "b &lt;i&gt;, step 13: 0.5"],
        ["a, steps 10 to 19: 2", "b &lt;i&gt;, step 13: 0.5"],
        ["a, steps 10 to 19: 2", "b &lt;i&gt;, step 13: 0.5"],
    ]
    assert chart.count("<polyline") == 2
    assert chart.count('class="line line') == 2


def test_curve_of_many_points_has_few_bands_and_all_points():
    points = [(step, step, float(step % 7)) for step in range(512)]
    chart = draw_chart([("", points)], name="x", form=".4g")
    bands = bands_of(chart)
    assert 100 < len(bands) <= MOST_BANDS + 1
    assert bands[-1][2] == ["step 511: 0"]
    (places,) = re.findall(r'<polyline class="curve line0" points="([^"]*)"', chart)
    assert len(places.split()) == 512
    assert places.split()[-1].startswith(f"{WIDTH:.1f},")
    assert "dots" not in chart


@pytest.mark.parametrize("points", [[(4, 4, 2.0)], [(0, 3, 1.0), (4, 7, 1.0)]])
def test_a_level_curve_has_one_tick_in_the_middle(points):
    chart = draw_chart([("", points)], name="x", form=".4g")
    assert re.findall(r'<span style="top:([\d.]+)%">([^<]*)</span>', chart) == [("50.0", f"{points[0][2]:.0f}")]
