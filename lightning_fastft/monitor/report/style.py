"""The style of the pages of this package: light and dark, readable on a phone, without a script or a network."""

from __future__ import annotations

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from lightning_fastft.core.errors import inflect

STYLE = """
:root { color-scheme: light dark; --page: #f6f7f9; --card: #fff; --text: #1b1f24; --soft: #57606a; --line: #d8dee4;
  --blue: #2563c9;
  --green: #1a7f4b;
  --orange: #b3590b; --red: #c3262e; --violet: #7a3fc4; --grey: #8c959f; }
@media (prefers-color-scheme: dark) { :root { --page: #101418; --card: #181d23; --text: #e7ebef; --soft: #9aa5b1;
  --line: #303840; --blue: #6ea8ff;
  --green: #4fc98a; --orange: #f0a050; --red: #ff7b80; --violet: #bb94f5; --grey: #6e7781; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--text); font: 16px/1.5 system-ui, -apple-system, "Segoe UI",
  Roboto, sans-serif; overflow-wrap: break-word; }
main { max-width: 1080px; margin: 0 auto; padding: 20px 16px 48px; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: 0; overflow-wrap: anywhere; } h2 { font-size: 1.1rem; margin: 0 0
  10px; }
h3 { font-size: .95rem; margin: 14px 0 6px; }
p { margin: 6px 0; } .soft { color: var(--soft); font-size: .88rem; }
.verdict { margin: 14px 0; padding: 12px 14px; border-radius: 8px; border: 1px solid var(--line); border-left: 6px
  solid var(--green);
  background: var(--card); }
.verdict.warn { border-left-color: var(--orange); } .verdict.bad { border-left-color: var(--red); } .verdict p {
  overflow-wrap: anywhere; }
.tiles { display: grid; grid-template-columns: repeat(4, 1fr); gap: 10px; margin: 14px 0; }
.tile, section { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 12px 14px;
  min-width: 0; }
.tile b { display: block; font-size: 1.25rem; overflow-wrap: anywhere; } .tile span { color: var(--soft); font-size:
  .85rem; }
.cards { display: grid; grid-template-columns: 1fr 1fr; gap: 12px; } .wide { grid-column: 1 / -1; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; width: 100%; font-size: .9rem; }
th, td { text-align: left; vertical-align: top; padding: 5px 12px 5px 0; border-bottom: 1px solid var(--line); } th {
  color: var(--soft);
  font-weight: 600; }
td.number, th.number { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; } td.bar { width:
  55%; min-width: 90px; }
td.best { font-weight: 700; }
td.words, th.words { white-space: normal; overflow-wrap: anywhere; min-width: 76px; max-width: 320px; }
td.text { min-width: 220px; overflow-wrap: anywhere; } .legend.inline { margin: 0; font-size: inherit; }
pre.command { white-space: pre-wrap; overflow-wrap: anywhere; }
pre.answer { white-space: pre-wrap; overflow-wrap: anywhere; border: 1px solid var(--line); border-radius: 6px;
  padding: 8px 12px; margin: 4px 0 8px; } summary { cursor: pointer; padding: 4px 0; }
ul { margin: 6px 0; padding-left: 20px; }
code, pre { font: .84rem/1.4 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; } pre { margin: 8px 0 0; } code
  { overflow-wrap: anywhere; }
svg { display: block; width: 100%; } .ends { display: flex; justify-content: space-between; gap: 12px; color:
  var(--soft); font-size: .82rem; }
.grid { stroke: var(--line); vector-effect: non-scaling-stroke; }
.curve, .dots { fill: none; stroke-width: 2; stroke-linejoin: round; vector-effect: non-scaling-stroke; }
.dots { stroke-width: 7; stroke-linecap: round; } .dashed { stroke-dasharray: 6 4; } .dots.dashed { stroke-dasharray:
  none; }
.line0 { --own: var(--blue); } .line1 { --own: var(--orange); } .line2 { --own: var(--green); } .line3 { --own:
  var(--violet); }
.line4 { --own: var(--red); } .line5 { --own: var(--grey); } .curve, .dots { stroke: var(--own); }
.legend i.line { width: 20px; height: 0; border-top: 3px solid var(--own); vertical-align: middle; } .legend
  i.line.dashed { border-top-style: dashed; }
.chart { display: grid; grid-template-columns: var(--left) minmax(0, 1fr); padding: 6px 14px 0 0; font-size: .78rem;
  color: var(--soft); font-variant-numeric: tabular-nums; }
.chart .y, .chart .plot, .chart .x { position: relative; } .chart .x { grid-column: 2; height: 1.7em; }
.chart .y span { position: absolute; right: 8px; transform: translateY(-50%); white-space: nowrap; }
.chart .x span { position: absolute; top: 3px; transform: translateX(-50%); white-space: nowrap; }
.plot svg { overflow: visible; } .plot { border-left: 1px solid var(--line); border-bottom: 1px solid var(--line); }
.band { position: absolute; top: 0; bottom: 0; } .band:hover { background: linear-gradient(var(--soft), var(--soft))
  var(--at) 0 / 1px 100% no-repeat; }
.band:hover::after { content: attr(data-tip); position: absolute; z-index: 1; top: 4px; left: calc(var(--at) + 8px);
  width: max-content; max-width: 46vw; white-space: pre-wrap; overflow-wrap: anywhere; pointer-events:
  none; font-style: normal; color: var(--text); background:
  var(--card); border: 1px solid var(--line); border-radius: 6px; padding: 3px 8px; box-shadow: 0 2px 8px #0003; }
.band.late:hover::after { left: auto; right: calc(100% - var(--at) + 8px); }
.state { font-weight: 600; } .state.active { color: var(--green); } .state.refused { color: var(--red); }
  .state.inactive { color: var(--soft); }
.fill { height: 14px; border-radius: 3px; background: var(--blue); margin-top: 4px; } .stack { display: flex; height:
  22px; border-radius: 4px;
  overflow: hidden; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 14px; font-size: .85rem; margin: 6px 0; } .legend > span {
  min-width: 0;
  overflow-wrap: anywhere; } .legend i { display:
  inline-block; width: 11px;
  height: 11px;
  border-radius: 2px; margin-right: 5px; }
.layers { display: flex; flex-wrap: wrap; gap: 3px; } .layers i { width: 18px; height: 18px; border-radius: 3px; }
i.forward, .stack .forward, i.kept { background: var(--blue); } rect.forward, rect.compute { fill: var(--blue); }
i.backward, .stack .backward { background: var(--green); } rect.backward { fill: var(--green); }
i.head { background: var(--violet); } rect.head { fill: var(--violet); } i.partly { background: var(--violet); }
i.optimizer, .stack .optimizer, i.host { background: var(--orange); } rect.d2h, rect.h2d { fill: var(--orange); }
i.between, .stack .between { background: var(--red); } i.other, i.recomputed { background: var(--grey); } rect.other {
  fill: var(--grey); }
@media (max-width: 600px) { .cards { grid-template-columns: minmax(0, 1fr); } .tiles { grid-template-columns: repeat(2,
  minmax(0, 1fr)); }
  main { padding: 14px 10px 32px; }
  th, td { padding-right: 8px; } td.text { min-width: 100px; } }
"""


def make_environment() -> Environment:
    """Return the environment of the pages of this package: everything is escaped, and names must be known."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    environment.filters.update(number=show_number, percent=_show_percent, inflect=inflect)
    return environment


def show_number(value: float | None, form: str) -> str:
    """Return a figure as markup; None is unknown."""
    if value is None:
        return "unknown"
    return _show(value, format(value, form))


def _show_percent(share: float) -> str:
    return _show(share, f"{100 * share:.1f} %")


def _show(value: float, text: str) -> str:
    """Return a figure as text in a ``<data>`` element with its full value, as the JSON has it."""
    return Markup('<data value="{}">{}</data>').format(repr(value), text)
