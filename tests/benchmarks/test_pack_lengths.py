"""Packs of many lengths from graphs, padded and without: real arms on the CPU, and what the table says of one that fails."""

import pytest

from benchmarks import pack_lengths


def test_packs_have_different_lengths():
    packs = pack_lengths.draw_packs(pack_lengths.WORKLOADS["qwen3-0.6b-lora"], num_packs=200)
    assert len({pack.input_id_T.size for pack in packs}) == 200
    assert all(6000 <= pack.input_id_T.size == sum(pack.lengths) <= 8192 and min(pack.lengths) > 1 for pack in packs)


@pytest.mark.slow
def test_arms_train_on_equal_losses_and_one_that_fails_is_told(tmp_path, monkeypatch, capsys):
    def start_arm(arm, options, *, seconds):
        if "padded" in arm:
            return {"arm": arm, "error": "stopped after 1 s"}
        return pack_lengths.run_arm(arm, options)

    monkeypatch.setattr(pack_lengths, "start_arm", start_arm)
    words = ["--device", "cpu", "--workload", "tiny", "--steps", "7", "--warmup", "5", "--out", str(tmp_path)]
    assert pack_lengths.main(words) == 1
    out = capsys.readouterr().out
    assert "FAILED: stopped after 1 s" in out
    assert "losses of lengths from graphs and lengths without graphs over 7 steps: equal" in out
    assert "[256, 16, " in out
    rows = (tmp_path / "rows.csv").read_text()
    assert "lengths from graphs" in rows
    assert "padded from graphs" not in rows
