"""Training curves: what the verdict says, and three real steps of every arm."""

import json

import numpy as np
import pytest

from benchmarks import training_curves
from lightning_fastft.packing.collate import Document


def curves(*, ours, second=0.1, num_steps=40):
    plain = np.linspace(3.0, 2.0, num_steps)
    return {"plain, seed 0": list(plain), "ours, fused": list(plain + ours), "plain, seed 1": list(plain + second)}


def test_a_curve_inside_the_spread_of_two_seeds_meets_the_bars():
    told, verdict = training_curves.judge(curves(ours=1e-6))
    assert told.startswith("plain: loss 3.000 to 2.2436")
    assert verdict.startswith("met: ours, fused: at most 1.00e-06 from plain")
    assert "outside at 0 of 40 steps" in verdict


@pytest.mark.parametrize(
    ("ours", "second", "reason"), [(0.05, 0.01, "outside at 40 of 40"), (0.05, 0.2, "final losses differ by 2.2286")]
)
def test_a_curve_outside_or_with_another_end_misses_them(ours, second, reason):
    _, verdict = training_curves.judge(curves(ours=ours, second=second))
    assert verdict.startswith("MISSED")
    assert reason in verdict


def test_a_control_has_no_bar():
    given = curves(ours=0.05, second=0.01)
    given["control, another order"] = given.pop("ours, fused")
    _, verdict = training_curves.judge(given)
    assert verdict.startswith("control: another order: at most 5.00e-02 from plain")


def test_packs_hold_whole_documents_in_an_order_of_the_seed():
    documents = [Document(np.full(length, length), np.full(length, length)) for length in range(3, 40)]
    first, again, other = (
        training_curves.make_packs(documents, num_packs=3, max_tokens=64, seed=seed) for seed in (0, 0, 1)
    )
    for pack in first:
        assert pack["input_ids"].shape == (1, 64)
        assert sum(set(pack["input_ids"][0].tolist()) - {0}) == pack.context.num_real_tokens
    assert all((one["input_ids"] == two["input_ids"]).all() for one, two in zip(first, again))
    assert any((one["input_ids"] != two["input_ids"]).any() for one, two in zip(first, other))
    with pytest.raises(ValueError, match="3 documents fill"):
        training_curves.make_packs(documents[:3], num_packs=3, max_tokens=64, seed=0)


def test_three_steps_of_every_arm(tmp_path, monkeypatch, capsys):
    small = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    monkeypatch.setattr(training_curves, "FAMILIES", {"qwen3": {**training_curves.FAMILIES["qwen3"], **small}})
    letters = [chr(code) for code in range(33, 127)]
    vocabulary = {token: number for number, token in enumerate(["<|endoftext|>", *letters, "Ġ", "Ċ"])}
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    rows = [{"question": f"What is {number} and 2?", "answer": f"It is {number + 2}."} for number in range(40)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    given = [
        "--data",
        str(tmp_path / "rows.jsonl"),
        "--tokenizer",
        str(tmp_path),
        "--out",
        str(tmp_path / "out"),
        "--steps",
        "3",
    ]
    assert training_curves.main([*given, "--families", "qwen3", "--max-tokens", "128"]) == 0
    told = capsys.readouterr().out
    assert "qwen3: met: ours, fused" in told
    assert "qwen3: control: plain with eager attention: at most" in told
    lines = (tmp_path / "out" / "qwen3.csv").read_text().splitlines()
    assert lines[0] == 'step,"plain, seed 0","control, plain with eager attention","ours, fused","plain, seed 1"'
    assert len(lines) == 4
    assert len({line.split(",")[1] for line in lines}) == 4
