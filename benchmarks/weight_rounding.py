r"""Compare bf16 weights with stochastic rounding to bf16 weights with fp32 masters, on real text.

    python -m benchmarks.weight_rounding --data train.jsonl --out runs/rounding

A Llama of two layers, drawn at random, is trained in full on bytes of text for 300 steps with 8-bit moments: with fp32
masters from three seeds (weights and order of the text); with stochastic rounding from the same seeds; and rounded to
nearest, which loses changes below half a unit. Bar: for each seed, the mean of the last 20 losses with stochastic
rounding differs from that of masters by at most the largest difference between seeds of masters. The run rounded to
nearest is a control: it must miss the bar, or the learning rate is too large for the test to be meaningful. Masters
with fp32 moments show what 8-bit moments change. Data: lines of JSON with "question" and "answer" (GSM8K).
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.results import append_rows
from lightning_fastft.training.optimizer import FusedAdamW

NUM_LAST = 20
ARMS: dict[str, dict[str, Any]] = {
    "masters": {"master_weights": True, "optim_bits": 8},
    "stochastic": {"rounding": "stochastic", "optim_bits": 8},
    "nearest": {"optim_bits": 8},
    "masters, fp32 moments": {"master_weights": True},
}
_SIZES = {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
}


def read_bytes(data: Path) -> torch.Tensor:
    """Return all text as one row of byte values."""
    rows = [json.loads(line) for line in data.read_text(encoding="utf-8").splitlines()]
    text = "\n\n".join(f"{row['question']}\n{row['answer']}" for row in rows)
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long()


def train(arm: str, text: torch.Tensor, *, seed: int, options: argparse.Namespace) -> list[float]:
    """Return the loss of every step; arms of one seed see the same weights and the same text."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**_SIZES)).to(options.device, torch.bfloat16)
    own = {"rounding_seed": seed} if "rounding" in ARMS[arm] else {}
    optimizer = FusedAdamW(model.parameters(), lr=options.learning_rate, weight_decay=0.0, **ARMS[arm], **own)
    starts = torch.randint(len(text) - options.length, (options.steps, options.rows))
    losses = []
    for start_B in starts:
        batch_BT = torch.stack([text[start : start + options.length] for start in start_B]).to(options.device)
        loss = model(input_ids=batch_BT, labels=batch_BT).loss
        loss.backward()
        optimizer.clip_next(1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
    return [float(loss) for loss in losses]


def judge(curves: dict[str, list[list[float]]]) -> tuple[list[str], bool]:
    """Return a line for each arm, and whether stochastic rounding meets the bar and rounding to nearest misses it."""
    finals = {arm: [sum(run[-NUM_LAST:]) / NUM_LAST for run in runs] for arm, runs in curves.items()}
    masters = finals["masters"]
    spread = max(masters) - min(masters)
    lines = [f"masters: final losses {', '.join(f'{loss:.4f}' for loss in masters)}; spread {spread:.4f}"]
    is_within = {}
    for arm, losses in finals.items():
        if arm != "masters":
            furthest = max((one - other for one, other in zip(losses, masters)), key=abs)
            is_within[arm] = abs(furthest) <= spread
            shown = ", ".join(f"{loss:.4f}" for loss in losses)
            lines.append(
                f"{arm}: final losses {shown}; at most {furthest:+.4f} from masters of the same seed, "
                f"{'within' if is_within[arm] else 'outside'} the spread"
            )
    return lines, is_within["stochastic"] and not is_within["nearest"]


def result_rows(curves: dict[str, list[list[float]]], *, command: str, device: str) -> list[dict[str, Any]]:
    """Return rows for results.csv, each arm's mean final loss and largest distance from masters of its seed."""
    finals = {arm: [sum(run[-NUM_LAST:]) / NUM_LAST for run in runs] for arm, runs in curves.items()}
    masters, rows = finals["masters"], []
    for arm, losses in finals.items():
        shared = {
            "benchmark": "weight_rounding",
            "workload": f"llama of 2 layers, every weight, {len(curves[arm][0])} steps",
            "system": arm,
            "version": f"torch {torch.__version__.partition('+')[0]}",
            "n": len(losses),
            "unit": "nats",
            "command": command,
            "device": device,
        }
        rows.append({**shared, "metric": f"mean of the last {NUM_LAST} losses", "value": sum(losses) / len(losses)})
        if arm == "masters":
            further = "seeds apart", max(losses) - min(losses)
        else:
            further = "furthest from masters", max(abs(one - other) for one, other in zip(losses, masters))
        rows.append({**shared, "metric": further[0], "value": further[1]})
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, write the curves, and print the verdicts; return 1 if the bar or the control is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder for losses.csv, verdicts.txt and rows.csv")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=8, help="rows of a step")
    parser.add_argument("--length", type=int, default=128, help="bytes of a row")
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--device", default="cpu", choices=("cuda", "cpu"))
    options = parser.parse_args(arguments)
    text = read_bytes(options.data)
    curves = {arm: [train(arm, text, seed=seed, options=options) for seed in range(options.seeds)] for arm in ARMS}
    lines, is_met = judge(curves)
    options.out.mkdir(parents=True, exist_ok=True)
    device = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
    command = "python -m benchmarks.weight_rounding " + " ".join(sys.argv[1:] if arguments is None else arguments)
    append_rows(result_rows(curves, command=command, device=device), path=options.out / "rows.csv")
    (options.out / "verdicts.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    with (options.out / "losses.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        names = itertools.chain.from_iterable([f"{arm}, seed {seed}" for seed in range(options.seeds)] for arm in ARMS)
        writer.writerow(["step", *names])
        runs = list(itertools.chain.from_iterable(curves.values()))
        writer.writerows([step, *(f"{run[step]:.6f}" for run in runs)] for step in range(options.steps))
    print("\n".join(lines))
    return int(not is_met)


if __name__ == "__main__":
    sys.exit(main())
