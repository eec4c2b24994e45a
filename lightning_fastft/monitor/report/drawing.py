"""Charts of a report as inline SVG and plain HTML; they stretch to any width, so their labels are in HTML."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from markupsafe import Markup, escape

# Units of a chart. It is stretched to the width of the page, which would distort text in it.
WIDTH, HEIGHT = 600.0, 150.0
_GIB = 2**30


def draw_curve(points: Sequence[Sequence[float]], *, name: str) -> Markup:
    """Return a line through points (first step, last step, value), each drawn at the middle of its steps.

    Args:
        points: In the order of their steps; at least one.
        name: Title, for screen readers.
    """
    steps = [(first + last) / 2 for first, last, _ in points]
    values = [value for _, _, value in points]
    low, high = min(values), max(values)
    wide, tall = max(steps[-1] - steps[0], 1e-9), max(high - low, 1e-9)
    places = [
        (WIDTH * (step - steps[0]) / wide, HEIGHT - 6 - (HEIGHT - 12) * (value - low) / tall)
        for step, value in zip(steps, values)
    ]
    if len(places) == 1:
        # One point is drawn as a level line.
        places = [(0.0, HEIGHT / 2), (WIDTH, HEIGHT / 2)]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    grid = Markup("").join(
        Markup('<line class="grid" x1="0" x2="{}" y1="{}" y2="{}"/>').format(WIDTH, y, y)
        for y in (6, HEIGHT / 2, HEIGHT - 6)
    )
    return _svg(grid + Markup('<polyline class="curve" points="{}"/>').format(path), name=name)


def draw_columns(
    moments: Sequence[tuple[str, float]], *, top: float, name: str, kind_of: Callable[[str], str]
) -> Markup:
    """Return a bar chart; each bar has a class and a tooltip.

    Args:
        moments: (label, value) from left to right; at least one.
        top: Value of the full height.
        name: Title.
        kind_of: CSS class of a label.
    """
    width = WIDTH / len(moments)
    columns = Markup("")
    for number, (label, value) in enumerate(moments):
        height = HEIGHT * min(1.0, value / max(top, 1e-9))
        columns += Markup(
            '<rect class="{}" x="{:.2f}" y="{:.2f}" width="{:.2f}" height="{:.2f}"><title>{}: {:.2f} GiB</title></rect>'
        ).format(kind_of(label), number * width, HEIGHT - height, width * 0.92, height, label, value / _GIB)
    return _svg(columns, name=name)


def draw_lane(shares: Sequence[float], *, kind: str, name: str) -> Markup:
    """Return a strip of equal time slices; the height of a slice is the share in which the stream is busy.

    Args:
        shares: In [0, 1], from left to right.
        kind: CSS class.
        name: Title.
    """
    width = WIDTH / max(1, len(shares))
    strip = Markup("").join(
        Markup('<rect class="{}" x="{:.2f}" y="{:.2f}" width="{:.2f}" height="{:.2f}"/>').format(
            kind, i * width, 40 * (1 - share), width, 40 * share
        )
        for i, share in enumerate(shares)
        if share > 0
    )
    return _svg(strip, name=name, height=40)


def moment_kind(label: str) -> str:
    """Return the CSS class of a moment of a step: forward, head, backward or other.

    Example:
        >>> moment_kind("backward 3")
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
    ).format(escape(name), WIDTH, height, height, content)
