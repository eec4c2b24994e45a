"""The run report as one HTML page: no script, no network, light and dark, readable on a phone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from markupsafe import Markup

from lightning_fastft.monitor.report.charts import make_charts
from lightning_fastft.monitor.report.drawing import draw_chart, draw_columns, draw_lane, layer_kind
from lightning_fastft.monitor.report.style import STYLE, make_environment

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
<div class="tile"><b>{{ head.peak_memory_gib | number(",.2f") }} GiB</b><span>peak memory{%
  if head.reserved_memory_gib %}, {{ head.reserved_memory_gib | number(",.2f") }} reserved{% endif %}
  ({{ head.memory_of }})</span></div>
<div class="tile"><b>{{ head.final_loss | number(".4g") }}</b><span>loss{% if head.first_loss is not none %},
mean of the last {{ head.num_loss_steps | number("d") }}
{{ head.num_loss_steps | inflect(head.unit) }}; of the first {{ head.first_loss | number(".4g") }}{% endif
  %}</span></div>
<div class="tile"><b>{{ head.num_steps | number(",d") }}</b><span>optimizer steps in {{ head.seconds | number(",.0f")
  }} s{% if resumed %}, from step
{{ resumed.step | number(",d") }} on{% endif %}</span></div>
</div>
<div class="cards">

{% for chart in charts %}<section{% if loop.first and charts | length is odd %} class="wide"{% endif %}><h2>{{
  chart.title }}</h2>
{% if chart.figures %}<div class="ends">{% for label, value in chart.figures %}<span>{{ label }} {{ value |
  number(chart.form) }}</span>{% endfor %}</div>{% endif %}
{{ draw_chart(chart.lines, name=chart.title, form=chart.form) }}
{% if chart.notes %}<p class="soft">{% for note in chart.notes %}{{ note }} {% endfor %}</p>{% endif
  %}</section>{% endfor %}

{% if samples %}<section class="wide"><h2>Answers</h2>{% for prompt in samples.prompts %}
<h3>{{ prompt.prompt }}</h3>
{% for answer in prompt.answers %}<p class="soft">Step {{ answer.step | number(",d") }}</p>
<pre class="answer" dir="auto">{{ answer.text }}</pre>{% if loop.first and not loop.last %}<details><summary>Earlier
  answers</summary>{% endif
  %}{% if loop.last and not loop.first %}</details>{% endif %}{% endfor %}{% endfor %}
<p class="soft">Greedy answers of the model at validations, at most {{ samples.max_new_tokens | number(",d") }} tokens
  each{% if samples.num_left %}; {{ samples.num_left | number(",d") }} validations between the first and the last ones
  are not shown{% endif %}.</p></section>{% endif %}

{% if statuses %}<section class="wide"><h2>What is active, and why not</h2><div class="scroll"><table>
<tr><th>optimisation</th><th>state</th><th>reason</th></tr>
{% for status in statuses %}<tr><td>{{ status.name }}</td><td class="state {{ status.state }}">{{ status.state }}</td>
<td class="text">{{ status.reason }}{% if status.remedy %}<br><b>What to do:</b> {{ status.remedy }}{% endif
  %}</td></tr>{% endfor %}
</table></div></section>{% endif %}

{% if times.num_batches %}<section class="wide"><h2>Where the time of a step goes</h2>
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
<p class="soft">{{ times.num_batches | number(",d") }} micro-batches, timed by {{ times.clock }}{% if times.has_warmup
  %}, with the first steps, which set things up, because the run was short{% else %}, without the first steps{% endif
  %}.{% for made in times.set_ups %} Not counted: {{ made.num_batches | number("d") }} in which {{ made.what }}, {{
  made.ms | number(",.0f") }} ms in all.{% endfor %}</p>
{% if slowest %}<h3>The slowest pack</h3><p>Micro-batch {{ slowest.batch | number(",d") }} of step {{ slowest.step |
  number(",d") }} took
{{ slowest.ms | number(",.2f") }} ms,
{{ slowest.times_median | number(".2f") }} times the median{% if slowest.num_tokens is not none %}: {{
  slowest.num_tokens | number(",d") }}
tokens{% if slowest.num_documents is not none %} in
{{ slowest.num_documents | number(",d") }} documents, the longest of {{ slowest.longest_document | number(",d") }}{%
  endif %}{% endif %}
.</p>{% endif %}
</section>{% endif %}

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
{{ draw_columns(plan.memory, top=plan.peak_gib * 2**30, name="device memory over a step") }}
<div class="ends"><span>first layer, forward</span><span>first layer, backward</span></div>
<div class="legend"><span><i class="forward"></i>forward</span><span><i class="head"></i>head and loss</span><span><i
  class="backward">
</i>backward</span></div>
<details><summary>The plan as text</summary><div class="scroll"><pre>{{ plan.text }}</pre></div></details></section>{%
  endfor %}

{% if packing or data %}<section{% if ranks | length == 1 %} class="wide"{% endif
  %}><h2>{{ "Packing" if packing else "Data" }}</h2>{% if packing %}
<p>{% if packing.fill is not none %}Packs of {{ packing.max_tokens | number(",d") }} tokens are <b>{{ packing.fill |
  percent }}</b> full:
{% else %}<b>{{ packing.padding | percent }}</b> of the tokens in the packs are padding:
{% endif %}{{ packing.num_real_tokens | number(",d") }} tokens of
{{ packing.num_documents | number(",d") }} documents in
{{ packing.num_packs | number(",d") }} packs; {{ packing.num_labelled | number(",d") }} tokens were trained on.</p>
<h3>Document lengths, in tokens</h3><div class="scroll"><table>
{% set most = packing.lengths | map(attribute="count") | max if packing.lengths else 1 %}
{% for range in packing.lengths %}<tr><td class="number">{{ range.low | number(",d") }}{% if range.high != range.low
  %} &ndash; {{ range.high | number(",d") }}{% endif %}</td>
<td class="bar"><div class="fill" style="width:{{ (100 * range.count / most) | round(1) }}%"></div></td>
<td class="number">{{ range.count | number(",d") }}</td></tr>{% endfor %}
</table></div><p class="soft">Mean {{ packing.mean_document_tokens | number(",.0f") }}, longest
{{ packing.longest_document_tokens | number(",d") }}. Of the packs of {% if packing.num_ranks > 1 %}all
ranks{% else %}rank 0{% endif %}, repeats of later epochs included.</p>
{% endif %}
{% for line in data %}<p class="soft">{{ line }}</p>{% endfor %}</section>{% endif %}

{% if ranks | length > 1 %}<section{% if not (packing or data) %} class="wide"{% endif
  %}><h2>Memory of each rank</h2>
<div class="scroll"><table><tr><th class="number">rank</th><th
  class="number">peak</th>
<th class="number">tokens/s</th></tr>
{% for rank in ranks %}<tr><td class="number">{{ rank.rank | number("d") }}</td><td class="number">{{
  rank.peak_memory_gib | number(",.2f") }}
GiB</td>
<td class="number">{{ rank.tokens_per_s | number(",.0f") }}</td></tr>{% endfor %}</table></div>
</section>{% endif %}

{% if profile.step is not none %}<section class="wide"><h2>One profiled step</h2>
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
</table></div></section>{% endif %}

{% if waits.num_steps %}<section class="wide"><h2>Where the host waits for the device</h2>
{% if waits.rows %}<p>Waits per {{ head.unit }}: {{ waits.per_step | number("g") }}, over
{{ waits.num_steps | number("d") }} watched {{ waits.num_steps | inflect(head.unit) }}.</p>
<div class="scroll"><table><tr><th class="number">a {{ head.unit }}</th><th>line</th><th>what to do</th></tr>
{% for row in waits.rows %}<tr><td class="number">{{ row.per_step | number("g") }}</td><td class="text"><code>{{
  row.place }}</code><br>
<code>{{ row.text }}</code><br>
<span class="soft">{{ row.call }}{% if row.library %}, called in {{ row.library }}{% endif %}</span></td><td
  class="text">{{ row.remedy }}</td>
</tr>{% endfor %}
</table></div>{% else %}<p>Nowhere: no wait in {{ waits.num_steps | number("d") }} watched
{{ waits.num_steps | inflect(head.unit) }}.</p>{% endif %}
{% if waits.is_prediction %}<p class="soft">The run was on a CPU: these are the waits that the same code would have on
  a GPU.</p>{% endif %}
</section>{% endif %}

{% if missing %}<section class="wide"><h2>Not measured</h2><ul>
{% for what, reason in missing %}<li>{{ what }}: {{ reason }}</li>{% endfor %}</ul></section>{% endif %}

<section class="wide"><h2>How it was run</h2><pre class="command">{{ command }}</pre>
{% for title, values in (options.items() | list) + [("versions", versions)] %}<details><summary>{{ title
  }}</summary><div class="scroll"><table>{% for name, value in values.items() %}
<tr><td>{{ name }}</td><td class="text"><code>{{ value }}</code></td></tr>{% endfor %}</table></div></details>{%
  endfor %}</section>
</div>
<p class="soft">The same figures are in the JSON file next to this page ({{ schema }}, version {{ schema_version }}).
  This page loads nothing from
anywhere.</p>
</main></body></html>
"""


def render_page(data: Mapping[str, Any]) -> str:
    """Return the page of a report.

    Every figure outside of the charts is in a ``<data>`` element with its full value, so that page and JSON can be
    compared. All texts are escaped. A part without content has no card; "Not measured" says why.

    Returns:
        A self-contained HTML page without scripts, links or network addresses.
    """
    environment = make_environment()
    environment.globals.update(
        draw_chart=draw_chart, draw_columns=draw_columns, draw_lane=draw_lane, layer_kind=layer_kind
    )
    return environment.from_string(_BODY).render(
        **data,
        charts=make_charts(data),
        missing=_find_missing(data),
        style=Markup(STYLE),  # noqa: S704 - a constant of this package
    )


def _find_missing(data: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return what a run did not measure, and why."""
    curves, head = data["curves"], data["head"]
    found = {
        "loss": "" if curves["loss"]["points"] else curves["loss"]["why_not"],
        "tokens per second": "" if curves["tokens_per_s"]["points"] else curves["tokens_per_s"]["why_not"],
        **{
            values["name"]: "" if values["points"] else "no optimizer step ended with a number."
            for values in data["logged"]
        },
        "times of a step": "" if data["times"]["num_batches"] else "no micro-batch was timed.",
        "packing": "" if data["packing"] else "no batch was packed.",
        "memory of other ranks": "the run ended before they could be asked."
        if len(data["ranks"]) < head["num_ranks"]
        else "",
        "one profiled step": "" if data["profile"]["step"] is not None else data["profile"]["why_not"],
        "host syncs": "" if data["waits"]["num_steps"] else data["waits"]["why_not"],
    }
    return [(what, reason) for what, reason in found.items() if reason]
