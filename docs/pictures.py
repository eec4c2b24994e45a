"""Draw docs/pictures/*.svg: one picture per idea, and the chart of the README from benchmarks/results.csv.

Command: python docs/pictures.py        (a test compares its output with the files)
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

FOLDER = Path(__file__).parent / "pictures"
RESULTS = Path(__file__).parents[1] / "benchmarks" / "results.csv"
WIDTH = 760
# Fill of each kind of box on a light and on a dark page. An image follows the colour scheme of the page around it.
COLOURS = {
    "ink": ("#1f2328", "#e6edf3"),
    "soft": ("#57606a", "#9da7b3"),
    "blue": ("#b6d4fe", "#1f4d8f"),
    "green": ("#b4e3bf", "#1f6337"),
    "amber": ("#fbdca4", "#7a5411"),
    "red": ("#f6c1bd", "#7d2f2a"),
    "grey": ("#e3e7eb", "#343b44"),
    "bold": ("#1a66d6", "#4c94ff"),
}
# Stroke of the curves of each system.
CURVES = {
    "ours": ("#1a66d6", "#4c94ff"),
    "unsloth": ("#b45309", "#f0a94e"),
    "trl": ("#2e7d46", "#6cc784"),
    "plain": ("#6b7280", "#a3acb8"),
}
# The workloads of the chart; all bars of one are of one run (NAMED_RUNS of docs/named_runs.py).
CHART = (
    ("14b-plain", "Qwen3-14B QLoRA"),
    ("0.6b", "Qwen3-0.6B LoRA"),
)
# Label, system, and setting; without one, the fastest.
BARS = (
    ("lightning_fastft", "ours", ""),
    ("Unsloth, fastest", "unsloth", ""),
    ("Unsloth, default", "unsloth", "unsloth"),
    ("TRL, packed, fastest", "trl", ""),
    ("transformers + PEFT, fastest", "plain", ""),
)


class Drawing:
    """Boxes, text and arrows of one picture.

    Args:
        title: What the picture shows, for readers that do not see it.
        height: In pixels.
    """

    def __init__(self, title: str, *, height: int) -> None:
        self._title, self._height, self._parts = title, height, []

    def box(self, x: float, y: float, width: float, height: float, kind: str, label: str = "") -> None:
        """Draw a box with a label in its middle."""
        self._parts.append(f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4"/>')
        if label:
            self.text(x + width / 2, y + height / 2 + 4.5, label, anchor="middle")

    def text(self, x: float, y: float, words: str, *, kind: str = "ink", anchor: str = "start", size: int = 13) -> None:
        """Write one line; y is its base line."""
        self._parts.append(
            f'<text class="{kind}" x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-size="{size}">{escape(words)}</text>'
        )

    def line(
        self, x: float, y: float, to_x: float, to_y: float, *, is_arrow: bool = False, is_dashed: bool = False
    ) -> None:
        """Draw a line, dashed or with an arrowhead."""
        head = ' marker-end="url(#head)"' if is_arrow else ""
        dashes = ' stroke-dasharray="4 3"' if is_dashed else ""
        self._parts.append(f'<path class="line" d="M {x:g} {y:g} L {to_x:g} {to_y:g}"{head}{dashes}/>')

    def curve(self, points: Sequence[tuple[float, float]], kind: str, *, is_dashed: bool = False) -> None:
        """Draw a line through points, in the stroke of a kind."""
        path = " L ".join(f"{x:.1f} {y:.1f}" for x, y in points)
        dashes = ' stroke-dasharray="4 3"' if is_dashed else ""
        self._parts.append(f'<path class="curve {kind}-curve" d="M {path}"{dashes}/>')

    def render(self) -> str:
        """Return the SVG text."""
        fills = [[f".{name} {{ fill: {pair[number]} }}" for name, pair in COLOURS.items()] for number in range(2)]
        strokes = [
            f".line {{ stroke: {COLOURS['soft'][number]}; fill: none }} "
            + " ".join(f".{name}-curve {{ stroke: {pair[number]} }}" for name, pair in CURVES.items())
            for number in range(2)
        ]
        style = (
            "text { font-family: system-ui, sans-serif } .curve { fill: none; stroke-width: 2 }\n"
            f"{' '.join(fills[0])} {strokes[0]}\n"
            f"@media (prefers-color-scheme: dark) {{ {' '.join(fills[1])} {strokes[1]} }}"
        )
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self._height}" width="{WIDTH}" '
            f'height="{self._height}" role="img">\n<title>{escape(self._title)}</title>\n<style>\n{style}\n</style>\n'
            '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            'orient="auto"><path class="soft" d="M 0 0 L 8 4 L 0 8 z"/></marker></defs>\n'
            + "\n".join(self._parts)
            + "\n</svg>\n"
        )


def draw_pack() -> Drawing:
    """Draw padded rows, and the same documents in one pack."""
    lengths, kinds, unit = (10, 4, 7, 3), ("blue", "green", "amber", "red"), 28
    drawing = Drawing("Four documents padded to the longest, and the same documents in one pack", height=300)
    longest, num_tokens = max(lengths), sum(lengths)
    padding = 1 - num_tokens / (longest * len(lengths))
    drawing.text(0, 18, f"Padded: {padding:.0%} of the computed tokens are padding")
    for number, (length, kind) in enumerate(zip(lengths, kinds)):
        y = 30 + 30 * number
        drawing.box(0, y, longest * unit, 24, "grey")
        drawing.box(0, y, length * unit, 24, kind, f"document {number + 1}")
    drawing.text(longest * unit + 12, 77, "grey: padding", kind="soft")
    drawing.text(0, 190, "Packed: one row, no padding between documents")
    start = 0
    for number, (length, kind) in enumerate(zip(lengths, kinds)):
        drawing.box(start * unit, 202, length * unit - 2, 28, kind, f"document {number + 1}")
        drawing.line(start * unit, 234, start * unit, 246)
        drawing.text(start * unit + 3, 258, str(start), kind="soft")
        start += length
    drawing.text(start * unit + 3, 258, str(start), kind="soft")
    drawing.text(
        0, 284, "The offsets are built once per batch. Every layer reads them: no token sees another document."
    )
    return drawing


def draw_plan() -> Drawing:
    """Draw which activations are kept, offloaded or recomputed under a budget."""
    drawing = Drawing("Activations of each layer are kept, offloaded or recomputed within a memory budget", height=250)
    drawing.text(0, 18, "After three measured steps the planner decides what becomes of each layer's activations:")
    plan = ("amber",) * 3 + ("green",) * 4 + ("blue",) * 5
    width = 60
    for number, kind in enumerate(plan):
        drawing.box(number * width, 34, width - 6, 44, kind, f"{number + 1}")
    drawing.text(0, 98, "first layer", kind="soft")
    drawing.text(len(plan) * width - 6, 98, "last layer: its backward comes first", kind="soft", anchor="end")
    rows = (
        ("amber", "recomputed", "cheap to compute again: takes time in the backward, no memory"),
        ("green", "offloaded", "copied to pinned host memory while other layers compute: hidden by the compute"),
        ("blue", "kept", "stays in device memory, as far as the budget reaches"),
    )
    for number, (kind, name, words) in enumerate(rows):
        y = 118 + 28 * number
        drawing.box(0, y, 96, 22, kind, name)
        drawing.text(108, y + 15.5, words)
    drawing.text(0, 232, "Gradients are bit-equal under every plan. vram_budget sets the budget in GiB.")
    return drawing


def draw_overlap() -> Drawing:
    """Draw the backward with and without prefetched activations."""
    drawing = Drawing("Copies of offloaded activations overlap with the backward of the layer before", height=270)
    width, copy, x = 90, 70, 110
    for y, title in ((40, "without prefetch"), (160, "with prefetch")):
        drawing.text(0, y - 14, f"Backward {title}")
        drawing.text(0, y + 18, "compute", kind="soft")
        drawing.text(0, y + 50, "copy stream", kind="soft")
    for number in range(4):
        begin = x + number * (width + copy)
        drawing.box(begin, 40, width - 3, 26, "blue", f"layer {4 - number}")
        if number < 3:
            drawing.box(begin + width, 72, copy - 3, 26, "green", f"copy {3 - number}")
            drawing.box(begin + width, 40, copy - 3, 26, "grey", "wait")
        begin = x + number * width
        drawing.box(begin, 160, width - 3, 26, "blue", f"layer {4 - number}")
        if number < 3:
            drawing.box(begin, 192, copy - 3, 26, "green", f"copy {3 - number}")
            drawing.line(begin + copy, 205, begin + width + 4, 190, is_arrow=True)
    drawing.text(0, 250, "When the backward of a layer starts, the copy for the next one is already under way.")
    return drawing


def draw_graphs() -> Drawing:
    """Draw a launch-bound layer, and the same layer as one CUDA graph."""
    drawing = Drawing("Many small launches leave the GPU idle; a CUDA graph launches a layer at once", height=262)
    x, pitch, kernel = 70, 64, 30
    drawing.text(0, 18, "Launch-bound: the host queues each kernel, and the GPU waits for the next one")
    drawing.text(0, 48, "host", kind="soft")
    drawing.text(0, 82, "GPU", kind="soft")
    for number in range(10):
        drawing.box(x + number * pitch, 30, pitch - 4, 26, "amber", "launch" if number < 9 else "...")
        drawing.box(x + number * pitch + pitch - 4, 64, kernel, 26, "blue")
        drawing.box(x + number * pitch + pitch - 4 + kernel, 64, pitch - kernel, 26, "grey")
    drawing.text(x + pitch, 110, "blue: a kernel runs; grey: idle", kind="soft")
    drawing.text(0, 150, "CUDA graph: the layer is recorded once, then launched as a whole")
    drawing.text(0, 180, "host", kind="soft")
    drawing.text(0, 214, "GPU", kind="soft")
    drawing.box(x, 162, pitch - 4, 26, "amber", "launch")
    for number in range(10):
        drawing.box(x + pitch - 4 + number * (kernel + 2), 196, kernel, 26, "blue")
    drawing.text(
        0, 250, "Layers of one shape replay their recordings; cuda_graphs='auto' records only what is launch-bound."
    )
    return drawing


def draw_chart() -> Drawing:
    """Draw the milliseconds per step of the README's workloads, without a base in fp8."""
    from docs.entries import fastest, read_entries, short_device
    from docs.named_runs import find_named_run

    entries = read_entries(RESULTS)
    groups = []
    for name, title in CHART:
        run = [e for e in find_named_run(entries, name) if "fp8" not in e.label]
        bars = [
            (label, fastest(found).figures["ms"])
            for label, system, setting in BARS
            if (found := [e for e in run if e.system == system and setting in ("", e.setting)])
        ]
        groups.append((f"{title}, one {short_device(run[0].device)}, {run[0].date}", bars))
    drawing = Drawing("Milliseconds per training step of several systems", height=_chart_height(groups))
    drawing.text(
        0, 18, "ms per step of 8,192 tokens, less is better; all bars of a group come from one run", kind="soft"
    )
    y = 28.0
    for title, bars in groups:
        drawing.text(0, y + 18, title, size=14)
        longest = max(ms for _, ms in bars)
        for number, (label, ms) in enumerate(bars):
            top, width = y + 28 + _PITCH * number, 440 * ms / longest
            drawing.text(210, top + 18, label, anchor="end", kind="bold" if number == 0 else "ink")
            drawing.box(220, top, width, 24, "bold" if number == 0 else "grey")
            drawing.text(228 + width, top + 18, f"{ms:,.0f}")
        y += _GROUP + _PITCH * len(bars)
    return drawing


# Of a bar, and of the title of a group with the space above the next.
_PITCH, _GROUP = 30, 44


def _chart_height(groups: Sequence[tuple[str, Sequence[object]]]) -> int:
    return 28 + sum(_GROUP + _PITCH * len(bars) for _, bars in groups)


def draw_quality() -> Drawing:
    """Draw validation loss and exact match of four systems over the seconds of training."""
    from docs.numbers_page import SYSTEM_NAMES, read_quality

    curves = read_quality()
    drawing = Drawing("Validation loss and exact match over wall time, by four systems", height=400)
    longest = max(row.seconds for row in curves)
    for panel, (name, title, shown) in enumerate(
        (
            ("loss", "validation loss of the answers", "{:.2f}"),
            ("exact", "final number exact, given the solution", "{:.0%}"),
        )
    ):
        left, width, top, height = 48 + 384 * panel, 316, 40, 240
        values = [getattr(row, name) for row in curves]
        low, high = min(values), max(values)
        drawing.text(left, 22, title, size=14)
        drawing.line(left, top + height, left + width, top + height)
        drawing.line(left, top, left, top + height)
        for value in (low, high):
            y = top + height - height * (value - low) / (high - low)
            drawing.text(left - 4, y + 4, shown.format(value), kind="soft", anchor="end", size=11)
        for second in range(0, int(longest) + 1, 5):
            drawing.text(
                left + width * second / longest, top + height + 16, str(second), kind="soft", anchor="middle", size=11
            )
        for system, seed in dict.fromkeys((row.system, row.seed) for row in curves):
            points = [
                (
                    left + width * row.seconds / longest,
                    top + height - height * (getattr(row, name) - low) / (high - low),
                )
                for row in curves
                if (row.system, row.seed) == (system, seed)
            ]
            drawing.curve(points, system, is_dashed=seed == 0)
    drawing.text(
        48, 318, "seconds of training; dashed: the first start, which compiles; solid: two more seeds", kind="soft"
    )
    for number, system in enumerate(dict.fromkeys(row.system for row in curves)):
        x, y = 48 + 384 * (number % 2), 346 + 26 * (number // 2)
        drawing.curve([(x, y - 4), (x + 28, y - 4)], system)
        drawing.text(x + 36, y, SYSTEM_NAMES[system])
    return drawing


PICTURES: dict[str, Callable[[], Drawing]] = {
    "pack": draw_pack,
    "plan": draw_plan,
    "overlap": draw_overlap,
    "graphs": draw_graphs,
    "chart": draw_chart,
    "quality": draw_quality,
}


def main() -> None:
    """Write the pictures."""
    FOLDER.mkdir(exist_ok=True)
    for name, draw in PICTURES.items():
        (FOLDER / f"{name}.svg").write_text(draw().render())


if __name__ == "__main__":
    sys.path.insert(0, str(FOLDER.parents[1]))
    main()
