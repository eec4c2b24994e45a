"""The table of predictions for one GPU: on rows of results.csv whose runs the estimate knows, and on others."""

import csv

import pytest

from benchmarks.plan_error import compare_rows, describe
from benchmarks.results import RESULTS_PATH

WORKLOAD = "qwen3-8b-qlora, packed, 16384 tokens"
SYSTEMS = ("ours recompute", "ours offload", "ours offload1")


@pytest.mark.slow(seconds=4)
def test_each_row_is_predicted_or_said_to_be_left_out(tmp_path):
    with RESULTS_PATH.open(encoding="utf-8") as file:
        table = [row for row in csv.DictReader(file) if row["workload"] == WORKLOAD and row["system"] in SYSTEMS]
    # The same run as if its layers had been Liger's.
    table += [{**row, "system": "ours recompute+liger"} for row in table if row["system"] == "ours recompute"]
    # The same run as if the host had room for 16 of the 35 inputs of 128 MiB.
    table += [{**row, "system": "ours offload:2"} for row in table if row["system"] == "ours offload"]
    table += [{**row, "workload": "another model, packed"} for row in table if row["system"] == "ours offload"]
    rows, skipped = compare_rows(_write(tmp_path / "rows.csv", table))
    assert [(row.system, row.unknown) for row in rows] == [
        ("ours recompute", ""),
        ("ours offload1", ""),
        ("ours offload", ""),
        ("ours recompute+liger", "fused kernels of Liger"),
        ("ours offload:2", ""),
    ]
    assert len(skipped) == 1
    assert "another model" in skipped[0]
    limited = rows.pop()
    assert not any(row.is_off for row in rows)
    assert limited.predicted_gib - rows[2].predicted_gib == pytest.approx(19 * 0.125, rel=0.1)
    # Less memory for activations on the host, and predicted from different segments.
    assert rows[0].predicted_gib > rows[2].predicted_gib + 3
    assert "of which all is known: 3 of 3 steps" in describe(rows, skipped)
    # Older code was slower.
    older = [rows[0]._replace(date="2026-11-01", step_ms=9000.0), *rows]
    assert "of which all is known: 3 of 4 steps" in describe(older, skipped)
    assert "the newest of each setting: 3 of 3 steps" in describe(older, skipped)


@pytest.mark.slow(seconds=4)
def test_a_run_that_fits_only_in_tiles_is_predicted_in_tiles(tmp_path):
    with RESULTS_PATH.open(encoding="utf-8") as file:
        table = [row for row in csv.DictReader(file) if "qwen3-14b-10l" in row["workload"] and "ours" in row["system"]]
    rows, skipped = compare_rows(_write(tmp_path / "rows.csv", table))
    assert skipped == []
    assert [row.system for row in rows] == ["ours auto=33:64+fused, adamw_fused"]
    assert rows[0].predicted_gib < 33


@pytest.mark.slow(seconds=4)
def test_the_step_of_another_optimizer_is_predicted_with_its_launches_and_its_state(tmp_path):
    """Rows with AdamW8bit of bitsandbytes, which waits for the device after each parameter."""
    runs = {
        ("qwen3-0.6b-lora, packed, labels 100%", "ours keep+graphs, adamw_8bit"),
        ("qwen3-8b-full, packed, labels 100%", "ours keep+fused, adamw_8bit"),
        ("qwen3-8b-full, packed, labels 100%", "ours keep+fused, adamw_fused"),
    }
    with RESULTS_PATH.open(encoding="utf-8") as file:
        table = [row for row in csv.DictReader(file) if (row["workload"], row["system"]) in runs]
    rows, skipped = compare_rows(_write(tmp_path / "rows.csv", table))
    assert skipped == []
    assert {(row.workload, row.system) for row in rows} == runs
    assert [row for row in rows if abs(row.step_error) > 0.1 or abs(row.peak_error) > 0.06] == []


def _write(path, table):
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, table[0])
        writer.writeheader()
        writer.writerows(table)
    return path
