"""The page of ``fastft data`` shows the figures and examples of the data, and nothing of the data acts in it."""

import json
import re
from html import unescape
from html.parser import HTMLParser

import numpy as np
import pytest

from lightning_fastft.monitor.data_page import render_data_page
from lightning_fastft.packing.rows.rejects import read_rejects
from lightning_fastft.training.data.describe import describe_data
from tests.packing.conftest import UNMARKED, build_tokenizer
from tests.support.training_parts import quiet_data

HOSTILE = "<script>alert(1)</script></pre> {{ 7 * 7 }} & \x1b[31m\u202e"
ALLOWED = {"class", "style", "lang", "charset", "name", "content", "http-equiv", "type", "id", "for", "dir", "checked",
           "aria-label", "value"}  # fmt: skip


class Tags(HTMLParser):
    """Collect tags with their attributes, and the labelled texts."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.names, self.marked, self.is_marked = [], set(), [], False
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.names |= {name for name, _ in attrs}
        self.is_marked = tag == "mark"

    def handle_endtag(self, tag):
        self.is_marked = False

    def handle_data(self, data):
        if self.is_marked:
            self.marked.append(data)


def make_data(rows, **options):
    options = {"max_tokens": 128, "max_reject_share": 0.9, **options}
    data = quiet_data(rows, add_eos=False, **options)
    data.setup("fit")
    return data


def chat(question, answer):
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"messages": turns}


def values_of(page):
    return [float(value) for value in re.findall(r'<data value="([^"]+)">', page)]


def test_nothing_of_the_data_acts_in_the_page(tmp_path):
    path = tmp_path / "<b>a.jsonl"
    rows = [
        {**chat(HOSTILE, HOSTILE.replace("alert", "confirm")), "source": HOSTILE},
        {"messages": HOSTILE},
        {"messages": [], HOSTILE: 1},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    rejected = tmp_path / "rejected.jsonl"
    data = make_data(str(path), tokenizer=build_tokenizer(chat_template=UNMARKED), rejected_path=str(rejected))
    page = render_data_page(data, rejects={"train": (str(rejected), read_rejects(rejected))})
    tags = Tags(page)
    assert {tag for tag, _ in tags.tags}.isdisjoint({"script", "img", "b>a", "a", "link", "iframe"})
    assert tags.names <= ALLOWED
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", page)
    (marked, _) = [text for text in tags.marked if text != "labelled"] + [""]
    assert marked.startswith("<script>confirm(1)</script></pre> {{ 7 * 7 }} & \\x1b[31m\\u202e")
    text = unescape(page)
    assert re.search("columns that are not read: <script>.*, source", text)
    assert "<b>a.jsonl, 2" in text
    assert all(word in text for word in ("empty messages", "wrong type", str(rejected)))
    assert "3 rows read, 2 rejected" in text


@pytest.mark.parametrize("has_tokenizer", [True, False])
def test_figures_are_those_of_the_description(has_tokenizer):
    lengths = np.random.default_rng(0).integers(2, 100, 300).tolist()
    rows = [
        {"input_ids": list(range(7, 7 + length)), "labels": [-100] * (length - 1) + [6 + length]} for length in lengths
    ]
    data = make_data(rows, val_share=0.2, tokenizer=build_tokenizer() if has_tokenizer else None)
    page = render_data_page(data, rejects={}, world_size=2, accumulate=3)
    figures, told = values_of(page), describe_data(data, world_size=2, accumulate=3)
    for split in ("train", "val"):
        subset, packs = data.subset(split), data.packs(split)
        for figure in (len(subset), int(subset.length_N.sum()), len(packs), packs.fill(subset.length_N)):
            assert figure in figures
        histogram = page.split(f"<h2>{split}</h2>")[1].split("Median")[0].split("Lengths of examples")[1]
        assert sum(values_of(histogram)) == len(subset)
    assert next(line for line in told.splitlines() if "an epoch trains" in line) in page
    assert "Held out of the training data" in page
    tags = Tags(page)
    assert sum(tag == "article" for tag, _ in tags.tags) == 50
    # Each page that is turned to is there, and the first one of each split is open.
    ids = [attrs["id"] for tag, attrs in tags.tags if tag == "input"]
    assert len(set(ids)) == len(ids) == 50
    assert {attrs["for"] for tag, attrs in tags.tags if tag == "label"} == set(ids)
    assert [attrs["id"] for tag, attrs in tags.tags if "checked" in attrs] == ["train-1", "val-1"]
    longest = int(data.subset("train").length_N.max())
    first = unescape(re.sub("<[^>]*>", "", page.split("<article>")[1].split("</article>")[0]))
    assert f"the longest and with the smallest labelled share: {longest} tokens, 1 labelled" in " ".join(first.split())
    if not has_tokenizer:
        assert Tags(page.split("<article>")[1]).marked[0] == str(6 + longest)


def test_a_range_of_one_length_is_one_number():
    page = render_data_page(make_data([{"input_ids": [7] * length} for length in (3, 4, 4)]), rejects={})
    lengths = page.split("Lengths of examples")[1].split("Median")[0]
    assert re.findall(r'<td class="number">([^<]*)</td>', lengths) == ["3", "4"]


def test_completions_are_shown_under_their_names():
    pairs = [{"prompt": "two plus", "chosen": " four", "rejected": " five"}] * 3
    data = make_data(pairs, tokenizer=build_tokenizer())
    tags = Tags(render_data_page(data, rejects={}))
    assert tags.marked[1:3] == [" four", " five"]


def test_mixture_is_described(tmp_path):
    for name, num_rows in (("a", 30), ("b", 3)):
        (tmp_path / f"{name}.jsonl").write_text('{"input_ids": [7, 8, 9]}\n' * num_rows)
    data = make_data({str(tmp_path / "a.jsonl"): 1, str(tmp_path / "b.jsonl"): 1})
    page = render_data_page(data, rejects={})
    assert "examples, repeats" in page
    assert "each of 3 examples 10.00 times" in page
