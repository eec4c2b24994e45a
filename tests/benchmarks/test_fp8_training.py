"""Losses of weights trained in fp8: what the verdict says, and four real steps of every arm."""

import json

import pytest

from benchmarks import fp8_training
from benchmarks.fp8_training import Result


def results(**shifts):
    """Three seeds of plain, 0.02 apart, and arms whose losses are shifted from them."""
    plain = [2.0, 2.01, 2.02]
    return {
        arm: [Result([loss + shift] * 60, loss + shift) for loss in plain]
        for arm, shift in {"plain": 0.0, **shifts}.items()
    }


def test_arms_within_the_seeds_meet_the_bars_if_the_control_is_outside():
    lines, are_met = fp8_training.judge(results(ours=0.0, fp8=-0.015, control=0.1))
    assert are_met
    assert "met: test_loss: fp8 1.9850, 1.9950, 2.0050; on average -0.0150 from plain" in lines
    assert "met: last_loss: control 2.1000, 2.1100, 2.1200; on average +0.1000 from plain" in lines


@pytest.mark.parametrize("missed", [{"ours": 0.03}, {"fp8": -0.03}, {"control": 0.01}, {"fp8": float("nan")}])
def test_an_arm_outside_the_seeds_or_a_control_within_them_misses(missed):
    lines, are_met = fp8_training.judge(results(**{"ours": 0.0, "fp8": 0.0, "control": 0.1, **missed}))
    assert not are_met
    assert [line.split()[2] for line in lines if line.startswith("MISSED")] == [*missed] * 2


def test_rows_are_means_over_seeds_and_how_far_they_are_apart():
    found = results(ours=0.0, fp8=-0.015, control=0.1)
    found["fp8"][1] = Result([2.04] * 60, 2.04)
    rows = fp8_training.result_rows(found, command="", device="cpu")
    values = {(row["system"], row["metric"]): row["value"] for row in rows}
    assert values["plain", "test loss"] == pytest.approx(2.01)
    assert values["plain", "test loss, seeds apart"] == pytest.approx(0.02)
    assert values["fp8", "test loss, seeds apart"] == pytest.approx(0.055)
    assert values["fp8", "mean of the last 50 losses"] == pytest.approx((1.985 + 2.04 + 2.005) / 3)
    assert {row["n"] for row in rows} == {3}


def test_last_losses_are_those_of_the_last_steps():
    assert Result([9.0] * 50 + [1.0] * 50, 0.0).last_loss == 1.0


def test_four_steps_of_every_arm(tmp_path, monkeypatch, capsys):
    small = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 16}
    monkeypatch.setattr(fp8_training, "MODEL", {**fp8_training.MODEL, **small})
    letters = [chr(code) for code in range(33, 127)]
    vocabulary = {token: number for number, token in enumerate(["<|endoftext|>", *letters, "Ġ", "Ċ"])}
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    rows = [{"question": f"What is {number} and 2?", "answer": f"It is {number + 2}."} for number in range(40)]
    for name in ("train", "test"):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    given = ["--data", tmp_path, "--tokenizer", tmp_path, "--out", tmp_path / "out", "--steps", 4, "--seeds", 2]
    words = [*map(str, given), "--max-tokens", "128", "--learning-rate", "0.01"]
    assert fp8_training.main([*words, "--arms", "plain"]) == 0
    assert not (tmp_path / "out" / "verdicts.txt").exists()
    assert not (tmp_path / "out" / "rows.csv").exists()
    fp8_training.main([*words, "--arms", "eager", "ours", "fp8", "control"])
    found = {
        arm: [Result(**json.loads((tmp_path / "out" / f"{arm}_{seed}.json").read_text())) for seed in range(2)]
        for arm in fp8_training.ARMS
    }
    for seed in range(2):
        plain, eager, ours, fp8, control = (found[arm][seed] for arm in fp8_training.ARMS)
        assert eager.losses == pytest.approx(plain.losses, rel=1e-5)
        assert ours.losses == pytest.approx(plain.losses, rel=1e-5)
        assert 1e-6 < abs(fp8.losses[0] - plain.losses[0]) < 0.01 * plain.losses[0]
        # The control starts from the same weights and learns more slowly.
        assert control.losses[0] == ours.losses[0]
        assert control.losses[-1] > max(ours.losses[-1], fp8.losses[-1])
    assert (tmp_path / "out" / "verdicts.txt").read_text() in capsys.readouterr().out
