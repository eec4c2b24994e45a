"""Charts of a report as inline SVG and plain HTML; they stretch to any width, so their labels are in HTML."""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from markupsafe import Markup

# Units of a chart. It is stretched to the width of the page, which would distort text in it.
WIDTH, HEIGHT = 600.0, 150.0
# Colours of lines; further lines are dashed.
NUM_COLOURS = 6
MOST_BANDS = 128
# Lines of at most this many points have dots.
_MOST_DOTS = 40
_GIB = 2**30


def find_ticks(low: float, high: float, *, most: int, is_whole: bool = False) -> list[float]:
    """Return at most this many evenly spaced round numbers in [low, high]: multiples of 1, 2 or 5 times a power of 10.

    Example:
        >>> find_ticks(0.13, 2.4, most=5)
        [0.5, 1.0, 1.5, 2.0]
        >>> find_ticks(0, 3, most=10, is_whole=True)
        [0.0, 1.0, 2.0, 3.0]
    """
    if not _is_wide(low, high):
        return [low]
    power = math.floor(math.log10((high - low) / most))
    for size in (10.0**place * factor for place in (power, power + 1) for factor in (1, 2, 5)):
        first, last = math.ceil(low / size - 1e-9), math.floor(high / size + 1e-9)
        if last - first < most and not (is_whole and size < 1):
            return [float(f"{number * size:.12g}") for number in range(first, last + 1)]
    return [low]


def draw_chart(series: Sequence[tuple[str, Sequence[Sequence[float]]]], *, name: str, form: str) -> Markup:
    """Return a line chart with ticks on both axes, a legend for several lines, and values shown on hover.

    It needs no script: a band of the plot shows its values while the pointer is on it.

    Args:
        series: (label, points) of each line; a point is (first step, last step, value), drawn at the middle of its
            steps. At least one line, and at least one point in each.
        name: Title, for screen readers.
        form: Format of the values, for example ".4g".
    """
    lines = [(label, [((first + last) / 2, value) for first, last, value in points]) for label, points in series]
    all_steps = [step for _, points in lines for step, _ in points]
    all_values = [value for _, points in lines for _, value in points]
    x = _Axis(min(all_steps), max(all_steps), margin=0.0)
    y = _Axis(min(all_values), max(all_values), margin=0.06)
    y_ticks = find_ticks(y.low, y.high, most=5) if y.is_wide else [min(all_values)]
    x_ticks = find_ticks(x.low, x.high, most=6, is_whole=True) if x.is_wide else [min(all_steps)]
    grid = Markup("").join(
        Markup('<line class="grid" x1="0" x2="{0}" y1="{1:.1f}" y2="{1:.1f}"/>').format(
            WIDTH, HEIGHT * (1 - y.share(tick))
        )
        for tick in y_ticks
    )
    curves = Markup("").join(_draw_line(points, x, y, number=number) for number, (_, points) in enumerate(lines))
    labels = _tick_labels(y_ticks)
    left = Markup("").join(
        Markup('<span style="top:{:.1f}%">{}</span>').format(100 * (1 - y.share(tick)), label)
        for tick, label in zip(y_ticks, labels)
    )
    below = Markup("").join(
        Markup('<span style="left:{:.1f}%">{}</span>').format(100 * x.share(tick), label)
        for tick, label in zip(x_ticks, _tick_labels(x_ticks))
    )
    legend = Markup("").join(
        Markup('<span><i class="line{}"></i>{}</span>').format(_line_class(number), label)
        for number, (label, _) in enumerate(lines)
    )
    return Markup(
        '{}<div class="chart" style="--left:{}ch"><div class="y">{}</div><div class="plot">{}{}</div>'
        '<div class="x">{}</div></div>'
    ).format(
        Markup('<div class="legend">{}</div>').format(legend) if len(lines) > 1 else "",
        max(map(len, labels)) + 1,
        left,
        _svg(grid + curves, name=name),
        _draw_bands(series, x, form=form),
        below,
    )


def _is_wide(low: float, high: float) -> bool:
    """Return whether labels of 12 digits can tell the ends of an axis apart."""
    return high - low > 1e-9 * max(abs(low), abs(high))


class _Axis:
    """Places of values on an axis, as shares of its length."""

    def __init__(self, low: float, high: float, *, margin: float) -> None:
        self.is_wide = _is_wide(low, high)
        rim = margin * (high - low) if self.is_wide else 1.0
        self.low, self.high = low - rim, high + rim

    def share(self, value: float) -> float:
        """Return the place of a value in [0, 1]."""
        return (value - self.low) / (self.high - self.low)


def _draw_line(points: Sequence[tuple[float, float]], x: _Axis, y: _Axis, *, number: int) -> Markup:
    """Return a line through points, and dots on them if they are few."""
    places = [(WIDTH * x.share(step), HEIGHT * (1 - y.share(value))) for step, value in points]
    kind = _line_class(number)
    drawn = Markup('<polyline class="curve{}" points="{}"/>').format(
        kind, " ".join(f"{left:.1f},{top:.1f}" for left, top in places)
    )
    if len(places) <= _MOST_DOTS:
        # Strokes without length: they stay round however the chart is stretched.
        drawn += Markup('<path class="dots{}" d="{}"/>').format(
            kind, " ".join(f"M{left:.1f} {top:.1f}h0" for left, top in places)
        )
    return drawn


def _line_class(number: int) -> str:
    """Return the CSS classes of a line: a colour, and dashes after the last colour."""
    return f" line{number % NUM_COLOURS}" + (" dashed" if number >= NUM_COLOURS else "")


def _tick_labels(ticks: Sequence[float]) -> list[str]:
    """Return the shortest labels that tell ticks apart.

    Example:
        >>> _tick_labels([0.5, 1.0]), _tick_labels([0.0, 2000.0]), _tick_labels([1e-5, 2e-5])
        (['0.5', '1.0'], ['0', '2,000'], ['1e-05', '2e-05'])
    """
    largest = max(map(abs, ticks))
    if largest and not 1e-3 <= largest < 1e7:
        return [f"{tick:.3g}" for tick in ticks]
    texts = [f"{tick:.10g}".partition(".")[2] for tick in ticks]
    digits = min(6, max(map(len, texts)))
    return [f"{tick:,.{digits}f}" for tick in ticks]


def _draw_bands(series: Sequence[tuple[str, Sequence[Sequence[float]]]], x: _Axis, *, form: str) -> Markup:
    """Return the bands over a plot that show the values of the nearest point of each line."""
    all_middles = sorted({(first + last) / 2 for _, points in series for first, last, _ in points})
    # More bands would be narrower than a pointer can find.
    stride = math.ceil(len(all_middles) / MOST_BANDS)
    middles = [*all_middles[:-1:stride], all_middles[-1]]
    ends = [x.low, *((one + other) / 2 for one, other in pairwise(middles)), x.high]
    bands = Markup("")
    for middle, (begin, end) in zip(middles, pairwise(ends)):
        tips = [
            f"{label}, {near}" if len(series) > 1 else near
            for label, points in series
            for near in [_describe_nearest(points, middle, form=form)]
        ]
        bands += Markup('<i class="band{}" style="left:{:.2f}%;width:{:.2f}%;--at:{:.0f}%" data-tip="{}"></i>').format(
            " late" if x.share(middle) > 0.5 else "",
            100 * x.share(begin),
            100 * (x.share(end) - x.share(begin)),
            100 * (middle - begin) / (end - begin),
            "\n".join(tips),
        )
    return bands


def _describe_nearest(points: Sequence[Sequence[float]], step: float, *, form: str) -> str:
    """Return steps and value of the point that is nearest to a step."""
    middles = [(first + last) / 2 for first, last, _ in points]
    after = bisect.bisect_left(middles, step)
    place = min(range(max(0, after - 1), min(len(points), after + 1)), key=lambda index: abs(middles[index] - step))
    first, last, value = points[place]
    return f"{f'step {first:,}' if first == last else f'steps {first:,} to {last:,}'}: {value:{form}}"


def draw_columns(moments: Sequence[tuple[str, float]], *, top: float, name: str) -> Markup:
    """Return a bar chart of the memory at the moments of a step; each bar has a tooltip."""
    width = WIDTH / len(moments)
    columns = Markup("")
    for number, (label, value) in enumerate(moments):
        height = HEIGHT * min(1.0, value / max(top, 1e-9))
        columns += Markup(
            '<rect class="{}" x="{:.2f}" y="{:.2f}" width="{:.2f}" height="{:.2f}"><title>{}: {:.2f} GiB</title></rect>'
        ).format(_moment_kind(label), number * width, HEIGHT - height, width * 0.92, height, label, value / _GIB)
    return _svg(columns, name=name)


def draw_lane(shares: Sequence[float], *, kind: str, name: str) -> Markup:
    """Return a strip of equal time slices; the height of a slice is the share in which the stream is busy."""
    width = WIDTH / max(1, len(shares))
    strip = Markup("").join(
        Markup('<rect class="{}" x="{:.2f}" y="{:.2f}" width="{:.2f}" height="{:.2f}"/>').format(
            kind, i * width, 40 * (1 - share), width, 40 * share
        )
        for i, share in enumerate(shares)
        if share > 0
    )
    return _svg(strip, name=name, height=40)


def _moment_kind(label: str) -> str:
    """Return the CSS class of a moment of a step: forward, head, backward or other.

    Example:
        >>> _moment_kind("backward 3")
        'backward'
    """
    kind = label.split()[0] if label else ""
    return kind if kind in ("forward", "head", "backward") else "other"


def layer_kind(layer: Mapping[str, Any]) -> str:
    """Return the CSS class of the treatment of a layer's activations."""
    if layer["is_kept"]:
        return "kept"
    places = {layer["input"], *layer["values"].values()}
    return "host" if "host" in places else "partly" if layer["values"] else "recomputed"


def _svg(content: Markup, *, name: str, height: float = HEIGHT) -> Markup:
    return Markup(
        '<svg role="img" aria-label="{}" viewBox="0 0 {:g} {:g}" preserveAspectRatio="none" '
        'style="height:{:g}px">{}</svg>'
    ).format(name, WIDTH, height, height, content)
