"""The run report as one HTML page: no script, no network, light and dark, readable on a phone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from lightning_fastft.monitor.report.drawing import draw_columns, draw_curve, draw_lane, layer_kind, moment_kind

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
  Roboto, sans-serif; }
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
td.text { min-width: 220px; overflow-wrap: anywhere; } .legend.inline { margin: 0; font-size: inherit; }
code, pre { font: .84rem/1.4 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; } pre { margin: 8px 0 0; } code
  { overflow-wrap: anywhere; }
svg { display: block; width: 100%; } .ends { display: flex; justify-content: space-between; gap: 12px; color:
  var(--soft); font-size: .82rem; }
.grid { stroke: var(--line); vector-effect: non-scaling-stroke; }
.curve { fill: none; stroke: var(--blue); stroke-width: 2; vector-effect: non-scaling-stroke; }
.state { font-weight: 600; } .state.active { color: var(--green); } .state.refused { color: var(--red); }
  .state.inactive { color: var(--soft); }
.fill { height: 14px; border-radius: 3px; background: var(--blue); margin-top: 4px; } .stack { display: flex; height:
  22px; border-radius: 4px;
  overflow: hidden; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 14px; font-size: .85rem; margin: 6px 0; } .legend i { display:
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
  td.text { min-width: 170px; } }
"""

_BODY = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>Run report: {{ head.name }}</title><style>{{ style }}</style></head>
<body><main>
<h1>{{ head.name }}</h1>
<p class="soft">{{ head.method }} &middot; {{ head.device }}{% if head.num_ranks > 1 %} &middot; {{ head.num_ranks }}
  ranks{% endif %} &middot;
  {{ head.started }}</p>
{% if validation %}<p>Last validation, after step {{ validation.step | number(",d") }}:{% for metric in
  validation.metrics
%} {{ metric.name }} <b>{{ metric.value | number(".4g") }}</b>{{ "" if loop.last else "," }}{% endfor %}</p>{% endif %}
<div class="verdict {{ outcome.level }}">{% for sentence in outcome.verdict %}<p>{{ sentence }}</p>{% endfor %}
{% if outcome.error %}<p><code>{{ outcome.error.type }}: {{ outcome.error.message }}</code></p>{% endif %}</div>
<div class="tiles">
<div class="tile"><b>{{ head.tokens_per_s | number(",.0f") }}</b><span>tokens/s{% if head.num_ranks > 1 %}, all ranks{%
  endif %}</span></div>
<div class="tile"><b>{{ head.peak_memory_gib | number(",.2f") }} GiB</b><span>peak memory ({{ head.memory_of
  }})</span></div>
<div class="tile"><b>{{ head.final_loss | number(".4g") }}</b><span>loss{% if head.first_loss is not none %},
mean of the last {{ head.num_loss_steps | number("d") }}
{{ "step" if head.num_loss_steps == 1 else "steps" }}; of the first {{ head.first_loss | number(".4g") }}{% endif
  %}</span></div>
<div class="tile"><b>{{ head.num_steps | number(",d") }}</b><span>optimizer steps in {{ head.seconds | number(",.0f")
  }} s{% if resumed %}, from step
{{ resumed.step | number(",d") }} on{% endif %}</span></div>
</div>
<div class="cards">

<section class="wide"><h2>What is active, and why not</h2>{% if statuses %}<div class="scroll"><table>
<tr><th>optimisation</th><th>state</th><th>reason</th></tr>
{% for status in statuses %}<tr><td>{{ status.name }}</td><td class="state {{ status.state }}">{{ status.state }}</td>
<td class="text">{{ status.reason }}{% if status.remedy %}<br><b>What to do:</b> {{ status.remedy }}{% endif
  %}</td></tr>{% endfor %}
</table></div>{% else %}<p>Neither the strategy nor a callback reports any.</p>{% endif %}</section>

{% for title, value, form, curve in (("Loss", "optimizer step", ".4g", curves.loss),
  ("Tokens per second", "micro-batch", ",.0f", curves.tokens_per_s)) %}
<section><h2>{{ title }}</h2>{% if curve.points %}
<div class="ends"><span>highest {{ curve.points | map("last") | max | number(form) }}</span>
<span>lowest {{ curve.points | map("last") | min | number(form) }}</span><span>last {{ curve.points[-1][2] |
  number(form) }}</span></div>
{{ draw_curve(curve.points, name=title) }}
<div class="ends"><span>step {{ curve.points[0][0] | number("d") }}</span><span>step {{ curve.points[-1][1] |
  number("d") }}</span></div>
<p class="soft">{% if curve.values_per_point == 1 %}Each point is one {{ value }}.{% else %}Each point is the mean of
{{ curve.values_per_point | number("d") }}
{{ value }}{{ "s" if title == "Loss" else "es" }} that follow each other; none is left out.{% endif %}
{% if title == "Loss" and curve.num_not_finite %}
<b>{{ curve.num_not_finite | number("d") }} micro-batches had a loss that is not finite</b>; their steps are not
  drawn.{% endif %}
{% if head.num_ranks > 1 %}{% if title != "Loss" %}Of rank 0.{% elif curve.why_alone %}Of rank {{ curve.ranks[0] }}
  alone, scaled by its share of the
labels, as are the first and the last loss above: {{ curve.why_alone }}.{% else %}The mean over all {{ curve.ranks |
  length }} ranks, weighted
by their labelled tokens as in training.{% endif %}{% endif %}</p>
{% else %}<p>{{ curve.why_not }}</p>{% endif %}</section>{% endfor %}

{% for values in logged %}<section><h2>{{ values.name }}</h2>{% if values.points %}
<div class="ends"><span>first {{ values.first | number(".4g") }}</span><span>final {{ values.final | number(".4g")
  }}</span></div>
{{ draw_curve(values.points, name=values.name) }}
<div class="ends"><span>step {{ values.points[0][0] | number("d") }}</span><span>step {{ values.points[-1][1] |
  number("d") }}</span></div>
<p class="soft">Means over {{ head.num_loss_steps | number("d") }} {{ "step" if head.num_loss_steps == 1 else "steps"
  }} each{% if head.num_ranks > 1 %}, of rank 0{% endif %}.</p>
{% else %}<p>No optimizer step ended with a number.</p>{% endif %}</section>{% endfor %}

<section class="wide"><h2>Where the time of a step goes</h2>{% if times.num_batches %}
<div class="stack">{% for part in times.parts %}
<div class="{{ part.kind }}" style="width:{{ (100 * part.share) | round(2) }}%" title="{{ part.name }}"></div>{% endfor
  %}</div>
<div class="scroll"><table><tr><th>part</th><th class="number">mean</th><th class="number">share</th></tr>
{% for part in times.parts %}<tr><td><span class="legend inline"><span><i class="{{ part.kind }}"></i>{{ part.name
  }}</span></span></td>
<td class="number">{{ part.mean_ms | number(",.2f") }} ms</td>
<td class="number">{{ part.share | percent }}</td></tr>{% endfor %}</table></div>
<p>A micro-batch takes {{ times.p50_ms | number(",.2f") }} ms (median; 10 % are under {{ times.p10_ms | number(",.2f")
  }} ms, 10 % over
{{ times.p90_ms | number(",.2f") }} ms).</p>
<p class="soft">Over {{ times.num_batches | number(",d") }} micro-batches, by {{ times.clock }}{% if times.has_warmup
  %}; the first steps, which
set things up, are
part of it: the run was too short to leave them out{% else %}, the first steps left out{% endif %}.{% for made in
  times.set_ups
%} Another {{ made.num_batches | number("d") }}, in which {{ made.what }}, took {{ made.ms | number(",.0f") }} ms
together; nothing here counts them.{% endfor %}</p>
{% if slowest %}<h3>The slowest pack</h3><p>Micro-batch {{ slowest.batch | number(",d") }} of step {{ slowest.step |
  number(",d") }} took
{{ slowest.ms | number(",.2f") }} ms,
{{ slowest.times_median | number(".2f") }} times the median{% if slowest.num_tokens is not none %}: {{
  slowest.num_tokens | number(",d") }}
tokens{% if slowest.num_documents is not none %} in
{{ slowest.num_documents | number(",d") }} documents, the longest of {{ slowest.longest_document | number(",d") }}{%
  endif %}{% endif %}
.</p>{% endif %}
{% else %}<p>No micro-batch was timed.</p>{% endif %}</section>

{% for plan in plans %}<section class="wide"><h2>Memory plan</h2>
<p>Predicted: peak {{ plan.peak_gib | number(".2f") }} GiB, {{ plan.step_ms | number(",.1f") }} ms a step, {{
  plan.exposed_ms | number(",.1f") }}
ms of it waiting for copies,
{{ plan.host_gib | number(".2f") }} GiB of pinned host memory.</p>
{% for note in plan.notes %}<p><b>Note:</b> {{ note }}</p>{% endfor %}
<h3>What becomes of each layer's activations</h3>
<div class="layers">{% for layer in plan.layers %}<i class="{{ layer_kind(layer) }}"
  title="layer {{ loop.index0 }}: {{ layer.text }}">
</i>{% endfor %}</div>
<div class="legend"><span><i class="kept"></i>kept</span><span><i class="partly"></i>partly kept</span><span><i
  class="host"></i>on the host</span>
<span><i class="recomputed"></i>computed again</span></div>
<h3>Device memory over the layers</h3>
<div class="ends"><span>full height {{ plan.peak_gib | number(".2f") }} GiB</span></div>
{{ draw_columns(plan.memory, top=plan.peak_gib * 2**30, name="device memory over a step", kind_of=moment_kind) }}
<div class="ends"><span>first layer, forward</span><span>first layer, backward</span></div>
<div class="legend"><span><i class="forward"></i>forward</span><span><i class="head"></i>head and loss</span><span><i
  class="backward">
</i>backward</span></div>
<details><summary>The plan as text</summary><div class="scroll"><pre>{{ plan.text }}</pre></div></details></section>{%
  endfor %}

<section><h2>Packing</h2>{% if packing %}
<p>{% if packing.fill is not none %}Packs of {{ packing.max_tokens | number(",d") }} tokens are <b>{{ packing.fill |
  percent }}</b> full:
{% else %}<b>{{ packing.padding | percent }}</b> of the tokens in the packs are padding:
{% endif %}{{ packing.num_real_tokens | number(",d") }} tokens of
{{ packing.num_documents | number(",d") }} documents in
{{ packing.num_packs | number(",d") }} packs; {{ packing.num_labelled | number(",d") }} tokens were trained on.</p>
<h3>Document lengths, in tokens</h3><div class="scroll"><table>
{% set most = packing.lengths | map(attribute="count") | max if packing.lengths else 1 %}
{% for range in packing.lengths %}<tr><td class="number">{{ range.low | number(",d") }} &ndash; {{ range.high |
  number(",d") }}</td>
<td class="bar"><div class="fill" style="width:{{ (100 * range.count / most) | round(1) }}%"></div></td>
<td class="number">{{ range.count | number(",d") }}</td></tr>{% endfor %}
</table></div><p class="soft">Mean {{ packing.mean_document_tokens | number(",.0f") }}, longest
{{ packing.longest_document_tokens | number(",d") }}. Of the packs of rank 0, repeats of later epochs included.</p>
{% else %}<p>No batch was packed.</p>{% endif %}
{% for line in data %}<p class="soft">{{ line }}</p>{% endfor %}</section>

<section><h2>Memory of each rank</h2><div class="scroll"><table><tr><th class="number">rank</th><th
  class="number">peak</th>
<th class="number">tokens/s</th></tr>
{% for rank in ranks %}<tr><td class="number">{{ rank.rank | number("d") }}</td><td class="number">{{
  rank.peak_memory_gib | number(",.2f") }}
GiB</td>
<td class="number">{{ rank.tokens_per_s | number(",.0f") }}</td></tr>{% endfor %}</table></div>
{% if ranks | length < head.num_ranks %}<p>The other ranks could not be asked: the run ended early.</p>{% endif
  %}</section>

<section class="wide"><h2>One profiled step</h2>{% if profile.step is not none %}
<p>Step {{ profile.step | number(",d") }}, its last micro-batch with the optimizer: {{ profile.step_ms | number(",.2f")
  }} ms, of which
{{ profile.busy_ms | number(",.2f") }} ms with work.</p>
{% if profile.has_copies %}<p>Copies of at least 1 MiB took {{ profile.copy_ms | number(",.2f") }} ms ({{
  profile.d2h_gib | number(".2f") }} GiB
to the host, {{ profile.h2d_gib | number(".2f") }} GiB to the device).
<b>{{ profile.hidden_share | percent }}</b> of that time was hidden; compute waited {{ profile.exposed_ms |
  number(",.2f") }} ms for copies, and
{{ profile.late_host_ms | number(",.2f") }} ms for a host that was late.</p>{% endif %}
{% for lane in profile.lanes %}<h3>{{ lane.name }}</h3>{{ draw_lane(lane.shares, kind=lane.kind, name=lane.name) }}{%
  endfor %}
<div class="ends"><span>0 ms</span><span>{{ profile.step_ms | number(",.2f") }} ms</span></div>
<h3>What took longest</h3><div class="scroll"><table><tr><th class="number">ms</th><th class="number">times</th><th>{{
  profile.work }}</th></tr>
{% for row in profile.longest %}<tr><td class="number">{{ row.ms | number(",.3f") }}</td><td class="number">{{
  row.count | number(",d") }}</td>
<td class="text"><code>{{ row.name }}</code></td></tr>{% endfor %}
</table></div>{% else %}<p>{{ profile.why_not }}</p>{% endif %}</section>

<section class="wide"><h2>Where the host waits for the device</h2>{% if waits.num_steps %}
{% if waits.rows %}<p>Waits per step: {{ waits.per_step | number("g") }}, over {{ waits.num_steps | number("d") }}
  watched
{{ "step" if waits.num_steps == 1 else "steps" }}.</p>
<div class="scroll"><table><tr><th class="number">a step</th><th>line</th><th>what to do</th></tr>
{% for row in waits.rows %}<tr><td class="number">{{ row.per_step | number("g") }}</td><td class="text"><code>{{
  row.place }}</code><br>
<code>{{ row.text }}</code><br>
<span class="soft">{{ row.call }}{% if row.library %}, called in {{ row.library }}{% endif %}</span></td><td
  class="text">{{ row.remedy }}</td>
</tr>{% endfor %}
</table></div>{% else %}<p>Nowhere: no wait in {{ waits.num_steps | number("d") }} watched
{{ "step" if waits.num_steps == 1 else "steps" }}.</p>{% endif %}
{% if waits.is_prediction %}<p class="soft">The run was on a CPU: these are the waits that the same code would have on
  a GPU.</p>{% endif %}
{% else %}<p>{{ waits.why_not }}</p>{% endif %}</section>

<section class="wide"><h2>How it was run</h2><div class="scroll"><pre>{{ command }}</pre></div>
{% for title, values in options.items() %}<h3>{{ title }}</h3><div class="scroll"><table>{% for name, value in
  values.items() %}
<tr><td>{{ name }}</td><td class="text"><code>{{ value }}</code></td></tr>{% endfor %}</table></div>{% endfor %}
<h3>versions</h3><div class="scroll"><table>{% for name, value in versions.items() %}<tr><td>{{ name }}</td><td
  class="text">{{ value }}</td>
</tr>{% endfor %}</table></div></section>
</div>
<p class="soft">The same figures are in the JSON file beside this page ({{ schema }}, version {{ schema_version }}).
  This page loads nothing from
anywhere.</p>
</main></body></html>
"""


def render_page(data: Mapping[str, Any]) -> str:
    """Return the page of a report.

    Every figure is in a ``<data>`` element with its full value, so that page and JSON can be compared. All texts are
    escaped.

    Args:
        data: The JSON of ``RunReport``.

    Returns:
        A self-contained HTML page without scripts, links or network addresses.
    """
    environment = make_environment()
    environment.globals.update(
        draw_curve=draw_curve,
        draw_columns=draw_columns,
        draw_lane=draw_lane,
        layer_kind=layer_kind,
        moment_kind=moment_kind,
    )
    return environment.from_string(_BODY).render(**data, style=Markup(STYLE))  # noqa: S704 - a constant of this file


def make_environment() -> Environment:
    """Return the environment of the pages of this package: everything is escaped, and names must be known."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    environment.filters.update(number=_show_number, percent=_show_percent)
    return environment


def _show_number(value: float | None, form: str) -> str:
    if value is None:
        return "unknown"
    return _show(value, format(value, form))


def _show_percent(share: float) -> str:
    return _show(share, f"{100 * share:.1f} %")


def _show(value: float, text: str) -> str:
    """A figure as text, with its value in the JSON."""
    return Markup('<data value="{}">{}</data>').format(repr(value), text)
