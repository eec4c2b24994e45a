"""Curves of quality: packs keep the labels of answers, the evaluation counts what it says, and systems agree."""

import csv
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from benchmarks import quality
from benchmarks.quality import Example, fill_packs

VOCABULARY = 12


def test_packs_are_full_and_train_answers_only():
    examples = [Example([1, 2, 3, 4], 2, 3), Example([5, 6, 7, 8], 1, 3), Example([9, 10], 1, 1)]
    (pack,) = fill_packs(examples, max_tokens=6)
    assert pack.input_id_T.tolist() == [1, 2, 3, 4, 5, 6]
    assert pack.lengths == [4, 2]
    assert pack.label_T(0.3).tolist() == [-100, -100, 3, 4, -100, 6]
    assert [labels.tolist() for _, labels in pack.documents(1.0)] == [[-100, -100, 3, 4], [-100, 6]]


class Oracle:
    """A model that predicts the next token of its input with a given logit, but for some tokens."""

    def __init__(self, *, logit, never=()):
        self.logit, self.never = logit, never

    def eval(self):
        pass

    def __call__(self, *, input_ids, attention_mask, use_cache):
        logits = torch.zeros(*input_ids.shape, VOCABULARY)
        for row, place in np.ndindex(input_ids.shape[0], input_ids.shape[1] - 1):
            token = int(input_ids[row, place + 1])
            logits[row, place, 0 if token in self.never else token] = self.logit
        return SimpleNamespace(logits=logits)


@pytest.mark.parametrize(
    ("never", "exact", "num_wrong"), [((), 1.0, 0), ((3,), 1.0, 1), ((4,), 0.5, 1), ((1, 5), 1.0, 0), ((4, 7), 0.0, 2)]
)
def test_loss_is_of_answers_and_exact_match_of_final_numbers(never, exact, num_wrong):
    # Answers 3 4 and 6 7 8; final numbers 4 and 7 8.
    examples = [Example([1, 2, 3, 4], 2, 3), Example([5, 6, 7, 8], 1, 2)]
    loss, found = quality.evaluate(Oracle(logit=3.0, never=never), examples, device="cpu")
    other = np.log(np.exp(3.0) + VOCABULARY - 1)
    assert found == exact
    assert loss == pytest.approx(other - 3.0 * (5 - num_wrong) / 5, abs=1e-6)


def test_a_summary_has_the_end_of_every_curve():
    curves = [
        {"system": "ours", "mode": "keep", "seed": seed, "step": step, "seconds": step / 2, "loss": 3 - step + seed, "exact": 0.5}
        for seed in (0, 1)
        for step in (0, 1)
    ]  # fmt: skip
    assert quality.summarise(curves) == [
        "ours keep: 1 steps in 0.5 s; loss 2.5000 (2.0000 to 3.0000), exact 50.0% (50.0% to 50.0%)"
    ]
    rows = quality.result_rows(
        curves, command="x", workload=quality.make_workload("tiny", max_tokens=8, learning_rate=1)
    )
    assert [(row["system"], row["value"]) for row in rows if row["metric"] == "validation loss"] == [
        ("ours keep, seed 0", 2), ("ours keep, seed 1", 3)
    ]  # fmt: skip


@pytest.mark.slow
def test_ours_and_plain_have_one_curve(tmp_path, monkeypatch):
    letters = [chr(code) for code in range(33, 127)]
    (tmp_path / "vocab.json").write_text(
        json.dumps({t: n for n, t in enumerate(["<|endoftext|>", *letters, "Ġ", "Ċ"])})
    )
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    rows = [{"question": f"What is {n} and 2?", "answer": f"{n}+2={n + 2}\n#### {n + 2}"} for n in range(60)]
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))

    def in_this_process(arms, *, root, raw, device, **_):
        for cases in arms:
            words = ["arm", "--cases", json.dumps([vars(case) for case in cases]), "--root", str(root)]
            quality.main([*words, "--raw", str(raw), "--device", device])

    monkeypatch.setattr(quality, "run_arms", in_this_process)
    words = ["--data", str(tmp_path), "--tokenizer", str(tmp_path), "--out", str(tmp_path / "out"), "--size", "tiny"]
    words += ["--root", str(tmp_path), "--device", "cpu", "--seeds", "1", "--base-steps", "2", "--steps", "4"]
    assert quality.main([*words, "--max-tokens", "96", "--test-rows", "4", "--systems", "ours", "plain"]) == 0
    with (tmp_path / "out/curves.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    curves = {name: [float(row["loss"]) for row in rows if row["system"] == name] for name in ("ours", "plain")}
    assert len(curves["ours"]) >= 4
    assert curves["ours"] == pytest.approx(curves["plain"], abs=2e-5)
    assert curves["ours"][-1] < curves["ours"][0]
    assert (tmp_path / "out/quality.svg").read_text().count("final number exact") == 1
