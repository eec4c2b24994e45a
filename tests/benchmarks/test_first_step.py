"""The time to the first step: what is taken from the ends of steps, what a start reads, and that every start ends."""

import csv
import json

import pytest

from benchmarks.first_step import find_steady, main, make_inputs, render_table, result_rows
from benchmarks.first_step_arms import fill_packs
from benchmarks.ruler.workloads import WORKLOADS, WorkloadFiles


def record_of(system, start, *, first, steady):
    marks = dict.fromkeys(("imports", "loaded", "tokenised", "prepared"), 1.0)
    marks |= {"first_step": first, "steady": steady}
    record = {"workload": "tiny", "system": system, "start": start, "reason": "", "marks": marks, "versions": {}}
    return {**record, "steady_step_s": 0.1, "num_to_steady": 3}


@pytest.mark.parametrize(("num_slow", "place"), [(0, 0), (2, 0), (3, 1), (5, 3)])
def test_steady_begins_where_most_of_five_steps_take_the_time_of_the_last(num_slow, place):
    ends = [10.0]
    for seconds in [2.0] * num_slow + [1.0] * 8:
        ends.append(ends[-1] + seconds)
    assert find_steady(ends) == (1.0, place)


def test_packs_hold_every_document_in_order():
    documents = [[1] * 3, [2] * 3, [3] * 9, [4]]
    assert fill_packs(documents, max_tokens=6) == [[[1] * 3, [2] * 3], [[3] * 6], [[4]]]


def test_ratios_are_those_of_the_same_caches():
    records = [
        record_of("ours", "cold", first=10.0, steady=12.0),
        record_of("ours", "warm", first=4.0, steady=5.0),
        record_of("unsloth", "cold", first=40.0, steady=48.0),
        {"workload": "tiny", "system": "unsloth", "start": "warm", "reason": "exit code 1"},
    ]
    table = render_table(records).splitlines()
    assert table[-1] == "ours / unsloth, cold: first step 0.25, steady 0.25"
    assert "exit code 1" in table[3]
    rows = result_rows(records, command="x")
    assert {row["system"] for row in rows} == {"ours, cold caches", "ours, warm caches", "unsloth, cold caches"}
    assert [row["value"] for row in rows if row["metric"] == "time to first step"] == [10.0, 4.0, 40.0]


@pytest.mark.fault
def test_a_start_is_measured_or_says_why_not(tmp_path):
    root, out = tmp_path / "root", tmp_path / "out"
    words = ["--workload", "tiny", "--device", "cpu", "--root", str(root), "--out", str(out), "--steps", "8"]
    # Unsloth does not run without a GPU, and its start must not end the others.
    assert main([*words, "--systems", "unsloth", "plain", "--data", str(tmp_path / "none")]) == 1
    records = [json.loads(line) for line in (out / "raw.jsonl").read_text().splitlines()]
    assert [(record["system"], record["start"]) for record in records] == [
        (system, start) for start in ("cold", "warm") for system in ("unsloth", "plain")
    ]
    assert all(record["reason"] for record in records[::2])
    for record in records[1::2]:
        marks = record["marks"]
        assert 0 < marks["imports"] < marks["loaded"] < marks["tokenised"] < marks["prepared"] < marks["first_step"]
        assert len(record["step_ends"]) == 8
        assert record["step_ends"] == sorted(record["step_ends"])
    with (out / "rows.csv").open(newline="") as file:
        assert {row["system"] for row in csv.DictReader(file)} == {"plain, cold caches", "plain, warm caches"}


def test_texts_are_made_up_where_there_is_no_data(tmp_path):
    files = WorkloadFiles(tmp_path, WORKLOADS["tiny"])
    files.model.mkdir(parents=True)
    (files.model / "tokenizer.json").write_text("{}")
    texts = make_inputs(files, data=tmp_path / "none", folder=tmp_path / "first")
    rows = [json.loads(line)["text"] for line in texts.read_text().splitlines()]
    assert len(rows) == 2000
    assert all(word.startswith("w") for word in rows[0].split())
    assert (texts.parent / "model" / "tokenizer.json").read_text() == "{}"
