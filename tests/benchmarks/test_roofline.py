"""The share of the roofline: operations from shapes, the newest and fastest steps, and what is left out."""

import pytest

from benchmarks import roofline
from benchmarks.roofline import PRODUCT_FLOPS, Step, StepWork, fastest_steps, render, step_work
from benchmarks.ruler.workloads import WORKLOADS, make_packs

TINY = WORKLOADS["tiny"]


def row(
    system, value, *, workload="tiny, packed, labels 100%", benchmark="train_step", metric="step", device="NVIDIA H200"
):
    return {
        "benchmark": benchmark,
        "workload": workload,
        "system": system,
        "metric": metric,
        "value": f"{value}",
        "device": device,
    }


def test_operations_are_those_of_the_shapes():
    config, packs = TINY.model_config, make_packs(TINY)
    hidden, inner, layers = config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"]
    queries, keys = (config[name] * config["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))
    shapes = [
        (hidden, queries),
        (hidden, keys),
        (hidden, keys),
        (queries, hidden),
        (hidden, inner),
        (hidden, inner),
        (inner, hidden),
    ]
    frozen, trained = (sum(count) for count in zip(*((a * b, TINY.lora_rank * (a + b)) for a, b in shapes)))
    expected = 0.0
    for pack in packs:
        lengths = [end - start for start, end in pack.borders()]
        tokens, labelled = sum(lengths), sum(lengths) - len(lengths)
        expected += (
            layers * tokens * (4 * (frozen + trained) + 2 * trained) + 4 * config["vocab_size"] * hidden * labelled
        )
        expected += layers * sum(3 * 4 * queries * length**2 / 2 for length in lengths)
    work = step_work(TINY)
    assert work.flops == pytest.approx(expected / len(packs))
    # Attention is slower than products.
    assert work.flops / PRODUCT_FLOPS < work.least_seconds < 3 * work.flops / PRODUCT_FLOPS


def test_attention_takes_the_time_of_documents_that_long():
    times = [roofline._seconds_per_attention_flop(length) for length in (1, 2048, 2049, 16_384, 32_768, 100_000)]
    assert times[0] == times[1] > times[2] > times[3] > times[4] == times[5]
    assert times[3] == pytest.approx((1 / 673e12 + 2 / 579e12) / 3)


def test_the_newest_row_of_a_mode_and_the_fastest_mode_of_a_system_count():
    rows = [
        row("ours keep, adamw", 10),
        row("ours keep, adamw", 30),
        row("ours recompute, adamw", 20),
        row("ours keep+fp8, adamw", 5),
        row("unsloth off, adamw", 40, workload="tiny, packed, labels 100%, busiest tenth 11%", benchmark="moe"),
        # Other metrics, labels, workloads, devices and batches.
        row("ours keep, adamw", 1, metric="forward"),
        row("ours keep, adamw", 1, workload="tiny, packed, labels 30%"),
        row("ours keep, adamw", 1, workload="tiny-long, packed, labels 100%"),
        row("ours keep, adamw", 1, device="cpu"),
        row("ours keep, adamw", 1, benchmark="compare"),
        row("unsloth off+padded8, adamw", 1),
    ]
    found = [(step.system, step.milliseconds) for step in fastest_steps(rows, "tiny")]
    assert found == [("ours keep+fp8, adamw", 5.0), ("ours recompute, adamw", 20.0), ("unsloth off, adamw", 40.0)]


def test_the_table_has_utilisation_of_the_peak_and_share_of_the_products():
    steps = [
        Step("ours keep", 100.0, "NVIDIA H200"),
        Step("ours keep+fp8", 50.0, "NVIDIA H200"),
        Step("ours keep", 100.0, "unknown"),
    ]
    text = render({"tiny": (StepWork(flops=0.5 * 989.5e12 * 0.1, least_seconds=0.075), steps)})
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()[2:]]
    assert [line[-2:] for line in cells] == [["50%", "75%"], ["100%", ""], ["", "75%"]]
    assert cells[0][:3] == ["tiny", "49", "75"]


def test_the_command_prints_the_table_of_the_stored_rows(capsys):
    assert roofline.main(["--workloads", "tiny"]) == 0
    assert capsys.readouterr().out.startswith("| workload | TFLOP a step |")
