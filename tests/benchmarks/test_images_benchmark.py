"""The benchmark of images: rows that are the same in every run, and one arm of ours end to end."""

import json
from pathlib import Path

import pytest

pytest.importorskip("PIL")

from benchmarks import images


def test_rows_are_seeded_and_processed_to_the_tokens_of_their_image(tmp_path):
    for name in ("one", "two"):
        images.write_rows(tmp_path / name, divisor=16)
    assert (tmp_path / "one" / "train.jsonl").read_text() == (tmp_path / "two" / "train.jsonl").read_text()
    assert (tmp_path / "one" / "3.png").read_bytes() == (tmp_path / "two" / "3.png").read_bytes()
    processor = images.make_processor(images.WORKLOADS["tiny"])
    parts = [{"type": "image"}, {"type": "text", "text": "w1 w2"}]
    text = processor.apply_chat_template([{"role": "user", "content": parts}], tokenize=False)
    found = processor(text=[text], images=[str(tmp_path / "one" / "0.png")], return_tensors="pt")
    image_id = processor.tokenizer.convert_tokens_to_ids("<|image_pad|>")
    # 28 x 28 pixels at 8 pixels a token, rounded to whole tokens.
    assert (found["input_ids"] == image_id).sum() == found["image_grid_thw"].prod() // 4


@pytest.mark.fault
def test_an_arm_is_measured_and_written(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(images.__file__).parents[1]))
    options = ["--workload", "tiny", "--root", str(tmp_path), "--device", "cpu"]
    assert images.main(["build", *options]) == 0
    assert images.main(["run", *options, "--steps", "2", "--out", str(tmp_path / "out"), "--arms", "ours:keep"]) == 0
    (record,) = (json.loads(line) for line in (tmp_path / "out" / "raw.jsonl").read_text().splitlines())
    assert record["tokens_per_s"] > record["examples_per_s"] > 0
    assert record["gradient_norm"] > 0
    assert abs(record["check"] - 9.014) < 0.01
