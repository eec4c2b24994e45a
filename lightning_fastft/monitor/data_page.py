"""The page of ``fastft data``: what would be trained, in the style of the run report, without a script or a network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from markupsafe import Markup

from lightning_fastft.core.errors import count, printable
from lightning_fastft.monitor.report.style import STYLE, make_environment
from lightning_fastft.packing.packs import Packs
from lightning_fastft.packing.rows.rejects import Reject
from lightning_fastft.training.data.describe import (
    count_lengths,
    describe_named,
    describe_split_epoch,
    name_segments,
    split_runs,
)

if TYPE_CHECKING:
    from lightning_fastft.packing.loader import DocumentSubset
    from lightning_fastft.training.data.splits import SplitDataModule

TITLE = "Data: "
# Examples to page through, by split: the longest and others of note first, then evenly spaced ones.
NUM_EXAMPLES = {"train": 40, "val": 10, "test": 10}
MAX_SHOWN_TOKENS = 2048
MAX_SOURCES = 40
_NUM_SHARES = 10

_STYLE = """
main > h2 { font-size: 1.25rem; margin: 28px 0 10px; }
mark { background: color-mix(in srgb, var(--green) 26%, transparent); color: inherit; border-radius: 3px;
  box-decoration-break: clone; -webkit-box-decoration-break: clone; }
.pager { position: relative; } .pager > input { position: absolute; top: 0; left: 0; opacity: 0; }
.pager > article { display: none; } .pager > input:checked + article { display: block; }
.pager > input:focus-visible + article .turn label { outline: 2px solid var(--blue); }
.turn { display: flex; gap: 8px; align-items: center; flex-wrap: wrap; margin: 10px 0 0; }
.turn label, .turn span.off { border: 1px solid var(--line); border-radius: 6px; padding: 4px 12px; cursor: pointer; }
.turn label:hover { border-color: var(--blue); } .turn span.off { color: var(--grey); cursor: default; }
pre.example { white-space: pre-wrap; overflow-wrap: anywhere; unicode-bidi: isolate; border: 1px solid var(--line);
  border-radius: 6px; padding: 10px 12px; margin: 6px 0 0; }
"""

_BODY = """{% macro bars(title, rows, note) %}<section><h2>{{ title }}</h2><table>
{% set most = rows | map(attribute="count") | max %}
{% for row in rows %}<tr><td class="number">{{ row.name }}</td>
<td class="bar"><div class="fill" style="width:{{ (100 * row.count / most) | round(1) }}%"></div></td>
<td class="number">{{ row.count | number(",d") }}</td></tr>{% endfor %}</table>
<p class="soft">{{ note }}</p></section>{% endmacro %}
<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{{ title }}{{ name }}</title><style>{{ style }}</style></head>
<body><main>
<h1>{{ name }}</h1>
<p class="soft">What would be trained, packed to {{ max_tokens | number(",d") }} tokens.</p>
<div class="verdict {{ level }}">{% for line in verdict %}<p>{{ line }}</p>{% endfor %}</div>
{% for split in splits %}
<h2>{{ split.name }}</h2>
<div class="tiles">
<div class="tile"><b>{{ split.num_documents | number(",d") }}</b><span>examples{% if split.is_repeated %}, repeats
  included{% endif %}</span></div>
<div class="tile"><b>{{ split.num_tokens | number(",d") }}</b><span>tokens, longest example {{ split.longest |
  number(",d") }}</span></div>
<div class="tile"><b>{{ split.labelled_share | percent }}</b><span>of the tokens are labelled</span></div>
<div class="tile"><b>{{ split.fill | percent }}</b><span>fill of {{ split.num_packs | number(",d") }} packs</span></div>
</div>
<p class="soft">{{ split.epoch }}</p>
<div class="cards">
{{ bars("Lengths of examples, in tokens", split.lengths, "Median " ~ split.median ~ ", mean " ~ split.mean ~ ".") }}
{{ bars("Fill of packs", split.fills, split.documents_per_pack ~ " examples in a pack on average.") }}
{{ bars("Labelled share of examples", split.shares, "Labelled tokens are those that the loss is a mean over.") }}
<section><h2>Sources</h2>{% if split.sources %}<div class="scroll"><table>
<tr><th>source</th><th class="number">rows</th></tr>
{% for source, rows in split.sources %}<tr><td class="text"><code>{{ source }}</code></td><td class="number">{{ rows |
  number(",d") }}</td></tr>{% endfor %}</table></div>
{% if split.num_more_sources %}<p class="soft">And {{ split.num_more_sources | number(",d") }} more.</p>{% endif %}
<p class="soft">Formats: {{ split.formats }}.</p>{% else %}<p>Held out of the training data.</p>{% endif %}
{% if split.mixture %}<h3>Mixture of an epoch</h3>{% for line in split.mixture %}<p>{{ line }}</p>{% endfor %}
{% endif %}
{% if split.named %}<h3>By name</h3>{% for line in split.named %}<p>{{ line }}</p>{% endfor %}
{% endif %}
</section>
{% if split.rejects %}<section class="wide"><h2>Rejected rows</h2><div class="scroll"><table>
<tr><th>reason</th><th class="number">rows</th><th>the first of them</th></tr>
{% for reject in split.rejects %}<tr><td>{{ reject.reason }}</td><td class="number">{{ reject.count | number(",d")
  }}</td>
<td class="text">{% if reject.first %}<span class="soft">{{ reject.first.file }}, {{ reject.first.line }}</span>{% if
  reject.first.detail %}<br>{{ reject.first.detail }}{% endif %}<br><code>{{ reject.first.first_bytes }}</code>{% endif
  %}</td></tr>{% endfor %}</table></div>
<p class="soft">All of them are in {{ split.rejected_path }}.</p></section>{% endif %}
{% if split.notes %}<section class="wide"><h2>Notes</h2>{% for note in split.notes %}<p>{{ note }}</p>{% endfor
  %}</section>{% endif %}
<section class="wide"><h2>Examples</h2><p class="soft">{{ split.examples | length | number(",d") }} of {{
  split.num_documents | number(",d") }}; <mark>labelled</mark> tokens are marked. The arrow keys turn pages, too.</p>
<div class="pager">
{% for example in split.examples %}{% set id = split.name ~ "-" ~ loop.index %}
<input type="radio" name="{{ split.name }}" id="{{ id }}" aria-label="example {{ loop.index }}"{% if loop.first %}
  checked{% endif %}><article>
<div class="turn">{% if loop.first %}<span class="off">previous</span>{% else %}<label for="{{ split.name }}-{{
  loop.index - 1 }}">previous</label>{% endif %}
<span>{{ loop.index | number("d") }} / {{ split.examples | length | number("d") }}</span>
{% if loop.last %}<span class="off">next</span>{% else %}<label for="{{ split.name }}-{{ loop.index + 1
  }}">next</label>{% endif %}</div>
<p>Example {{ example.number | number(",d") }}{% if example.why %}, {{ example.why }}{% endif %}: {{ example.num_tokens
  | number(",d") }} tokens, {{ example.num_labelled | number(",d") }} labelled.</p>
{% for segment in example.segments %}{% if segment.name %}<h3>{{ segment.name }}</h3>{% endif %}
<pre class="example" dir="auto">{% for is_labelled, text in segment.runs %}{% if is_labelled %}<mark>{{ text
  }}</mark>{% else %}{{ text }}{% endif %}{{ "" if has_text or loop.last else " " }}{% endfor %}</pre>
{% if segment.num_left %}<p class="soft">{{ segment.num_left | number(",d") }} more tokens are not shown.</p>{% endif %}
{% endfor %}</article>
{% endfor %}</div></section>
</div>
{% endfor %}
<p class="soft">This page loads nothing from anywhere.</p>
</main></body></html>
"""


def render_data_page(
    datamodule: SplitDataModule,
    *,
    rejects: Mapping[str, tuple[str, Sequence[Reject]]],
    world_size: int = 1,
    accumulate: int = 1,
) -> str:
    """Return the page on the data of a data module: lengths, fill, labelled share, rejects, and marked examples.

    All texts are escaped, and control characters are shown as escapes.

    Returns:
        A self-contained HTML page without scripts, links or network addresses.
    """
    splits = []
    for name in NUM_EXAMPLES:
        subset, packs = datamodule.subset(name), datamodule.packs(name)
        if subset is None or packs is None:
            continue
        content = _describe_documents(name, subset, packs, tokenizer=datamodule.tokenizer)
        content["epoch"] = describe_split_epoch(datamodule, name, world_size=world_size, accumulate=accumulate)
        content["named"] = describe_named(datamodule, name, world_size=world_size)
        content["mixture"] = [printable(str(source)) for source in datamodule.mixture] if name == "train" else []
        content |= _describe_rows(datamodule.report(name), *rejects.get(name, ("", ())))
        splits.append(content)
    environment = make_environment()
    # Constants of this package.
    style = Markup(STYLE + _STYLE)  # noqa: S704
    verdict, level = _judge(splits)
    return (
        environment.from_string(_BODY)
        .render(
            title=TITLE,
            name=_name(splits),
            style=style,
            max_tokens=splits[0]["max_tokens"],
            verdict=verdict,
            level=level,
            splits=splits,
            has_text=datamodule.tokenizer is not None,
        )
        .lstrip()
    )


def _name(splits: Sequence[Mapping[str, Any]]) -> str:
    sources = splits[0]["sources"]
    num_more = len(sources) - 1 + splits[0]["num_more_sources"]
    return f"{sources[0][0]}" + (f" and {num_more} more" if num_more > 0 else "") if sources else "data"


def _judge(splits: Sequence[Mapping[str, Any]]) -> tuple[list[str], str]:
    """Return sentences on the whole, and the level of the box that they are in."""
    lines, level = [], ""
    for split in splits:
        if not split["sources"]:
            continue
        num_rejected = sum(reject["count"] for reject in split["rejects"])
        lines.append(
            f"{split['name']}: {count(split['num_rows'], 'row')} read, "
            + (f"{num_rejected} rejected" if num_rejected else "none rejected")
            + (f"; {count(len(split['notes']), 'note')} below." if split["notes"] else ".")
        )
        level = "warn" if num_rejected or split["notes"] else level
    return lines, level


def _describe_documents(name: str, subset: DocumentSubset, packs: Packs, *, tokenizer: Any) -> dict[str, Any]:
    """Return the figures and examples of a split."""
    length_N = subset.length_N
    share_N = subset.num_labelled_N / length_N
    return {
        "name": name,
        "max_tokens": packs.max_tokens,
        "num_documents": len(subset),
        "is_repeated": subset.index_N is not None and len(np.unique(subset.index_N)) < len(subset.index_N),
        "num_tokens": int(length_N.sum()),
        "longest": int(length_N.max()),
        "median": f"{np.median(length_N):,.0f}",
        "mean": f"{length_N.mean():,.0f}",
        "labelled_share": float(subset.num_labelled_N.sum() / length_N.sum()),
        "num_packs": len(packs),
        "fill": packs.fill(length_N),
        "documents_per_pack": f"{len(subset) / len(packs):,.1f}",
        "lengths": [
            {"name": f"{low:,}" if low == high else f"{low:,} \u2013 {high:,}", "count": number}
            for low, high, number in count_lengths(length_N)
        ],
        "fills": _count_shares(packs.sum_per_pack(length_N) / packs.max_tokens),
        "shares": _count_shares(share_N),
        "examples": [
            _describe_example(subset, number, why=why, tokenizer=tokenizer)
            for number, why in _choose_examples(subset, share_N=share_N, most=NUM_EXAMPLES[name]).items()
        ],
    }


def _describe_rows(report: Any, path: str, rejects: Sequence[Reject]) -> dict[str, Any]:
    """Return what the ingest report says on the rows of a split; empty for a held-out part."""
    sources = [] if report is None else sorted(report.rows_per_source.items(), key=lambda item: -item[1])
    first = {reject.reason: reject for reject in reversed(rejects)}
    reasons = {} if report is None else report.rejects
    return {
        "num_rows": 0 if report is None else report.num_rows,
        "sources": [(printable(name), number) for name, number in sources[:MAX_SOURCES]],
        "num_more_sources": max(0, len(sources) - MAX_SOURCES),
        "formats": "" if report is None else ", ".join(sorted(report.rows_per_format)),
        "notes": [] if report is None else [*map(printable, _remark(report))],
        "rejected_path": path,
        "rejects": [
            {"reason": reason, "count": number, "first": _show_reject(first.get(reason))}
            for reason, number in sorted(reasons.items(), key=lambda item: (-item[1], item[0]))
        ],
    }


def _remark(report: Any) -> list[str]:
    notes = [f"columns that are not read: {', '.join(report.unread_columns)}"] if report.unread_columns else []
    notes += report.notes
    if report.num_duplicates:
        notes.append(f"{count(report.num_duplicates, 'example')} with the same tokens and labels as another one, kept")
    if report.num_too_long:
        notes.append(
            f"{count(report.num_too_long, 'row')} longer than a pack: {report.num_truncated} truncated, "
            f"{report.num_split} split; the longest has {report.longest} tokens ({report.longest_place})"
        )
    return notes


def _show_reject(reject: Reject | None) -> Mapping[str, Any] | None:
    if reject is None:
        return None
    return {name: printable(str(value)) for name, value in reject._asdict().items()}


def _count_shares(share_N: np.ndarray) -> list[dict[str, Any]]:
    """Return counts of shares in ranges of ten per cent."""
    counts, edges = np.histogram(np.clip(share_N, 0.0, 1.0), bins=_NUM_SHARES, range=(0.0, 1.0))
    ends = np.rint(100 * edges).astype(int).tolist()
    return [
        {"name": f"{low} \u2013 {high} %", "count": number}
        for low, high, number in zip(ends, ends[1:], counts.tolist())
    ]


def _choose_examples(subset: DocumentSubset, *, share_N: np.ndarray, most: int) -> dict[int, str]:
    """Return numbers of documents to show, with what is special about each: "" for evenly spaced ones."""
    special: dict[int, str] = {}
    for number, why in (
        (int(subset.length_N.argmax()), "the longest"),
        (int(subset.length_N.argmin()), "the shortest"),
        (int(share_N.argmin()), "with the smallest labelled share"),
    ):
        special[number] = f"{special[number]} and {why}" if number in special else why
    spaced = np.linspace(0, len(subset) - 1, num=min(most - len(special), len(subset)), dtype=np.int64).tolist()
    return special | dict.fromkeys((number for number in spaced if number not in special), "")


def _describe_example(subset: DocumentSubset, number: int, *, why: str, tokenizer: Any) -> dict[str, Any]:
    segments = name_segments(subset[number], formats=subset.documents.report.rows_per_format)
    most = max(1, MAX_SHOWN_TOKENS // len(segments))
    return {
        "number": 1 + int(number if subset.index_N is None else subset.index_N[number]),
        "why": why,
        "num_tokens": int(subset.length_N[number]),
        "num_labelled": int(subset.num_labelled_N[number]),
        "segments": [
            {
                "name": name,
                "runs": split_runs(id_T[:most], is_trained_T[:most], tokenizer),
                "num_left": max(0, len(id_T) - most),
            }
            for name, id_T, is_trained_T in segments
        ],
    }
