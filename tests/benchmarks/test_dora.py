"""DoRA against LoRA: three real arms on the CPU, and what is said about their losses."""

import pytest

from benchmarks import dora


@pytest.mark.slow
def test_arms_train_and_the_two_forwards_of_dora_have_equal_losses(capsys):
    assert dora.main(["--workload", "tiny-qlora", "--steps", "1", "--peft-steps", "2", "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert "losses of dora and peft over 2 steps: equal" in out
    assert "PEFT's forward is measured" in out.partition('"arm": "peft"')[2]


def test_other_losses_are_seen():
    arms = {"lora": [2.0, 2.0], "dora": [2.0, 2.1], "peft": [2.0]}
    records = [{"arm": arm, "ms": 10.0, "losses": losses} for arm, losses in arms.items()]
    assert dora.compare(records)[-1] == "losses of dora and peft over 1 steps: equal, at most 0.00e+00 apart"
    records[2]["losses"] = [2.0, 2.0]
    assert "NOT EQUAL" in dora.compare(records)[-1]
