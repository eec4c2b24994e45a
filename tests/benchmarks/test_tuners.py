"""The benchmark of tuners: rows that are the same in every run, and one arm of ours end to end."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks import tuners
from benchmarks.ruler.building import build
from benchmarks.ruler.workloads import WORKLOADS


@pytest.mark.parametrize("task", ["dpo", "grpo", "distill"])
def test_rows_are_seeded_and_have_their_lengths(task):
    rows = tuners.make_rows(task)
    assert rows[:5] == tuners.make_rows(task)[:5]
    _, mean = tuners.MEAN_LENGTHS[task]
    texts = [
        row["chosen"] if task == "dpo" else row["completions"][0] if task == "grpo" else row["text"] for row in rows
    ]
    lengths = [len(text.split()) for text in texts]
    assert 0.85 * mean < sum(lengths) / len(lengths) < 1.15 * mean


@pytest.mark.fault
def test_an_arm_is_measured_and_written(tmp_path, monkeypatch, capsys):
    build(WORKLOADS["tiny"], root=tmp_path, device="cpu", dtype=torch.float32)
    monkeypatch.setenv("PYTHONPATH", str(Path(tuners.__file__).parents[1]))
    arguments = ["--task", "dpo", "--workload", "tiny", "--root", str(tmp_path), "--device", "cpu", "--steps", "2"]
    assert tuners.main(["run", *arguments, "--out", str(tmp_path / "out"), "--arms", "ours:keep", "none:keep"]) == 0
    good, bad = (json.loads(line) for line in (tmp_path / "out" / "raw.jsonl").read_text().splitlines())
    assert good["examples_per_s"] > 0
    assert good["gradient_norm"] > 0
    assert abs(good["check"] - 0.69) < 0.02
    assert "error" in bad
    assert "ours:keep" in capsys.readouterr().out
    assert (tmp_path / "out" / "rows.csv").read_text().count(",ours:keep,") == 6
    assert good["host_waits"] == 0
