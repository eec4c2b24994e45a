r"""Train every weight of a large model on one GPU: bf16 weights rounded stochastically, 8-bit moments on the host.

    python -m benchmarks.full_one_gpu --model qwen3-32b --steps 12 --accumulate 2 --out runs/full32

Weights are random and drawn on the device, so nothing is read from a disk. Packs are new in every micro-batch: random
tokens in documents of about 1,024, all labelled. The command prints, and writes to result.json, tokens/s of each
optimizer step after the warm-up (p10, p50, p90, mean; CUDA events, no sync inside), peak memory allocated and reserved,
and the losses; rows.csv has rows for results.csv. Host memory: 2.03 bytes per weight times --offload, pinned once,
about a second per GiB.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, Trainer

from benchmarks.results import append_rows
from lightning_fastft.activations.checkpointing import OffloadCheckpointing
from lightning_fastft.callbacks.finite_guard import FiniteGuard
from lightning_fastft.callbacks.fused_kernels import FusedKernels
from lightning_fastft.packing.collate import Document, PackedBatch, collate
from lightning_fastft.strategies.single_device import FastFTStrategy
from lightning_fastft.training.fine_tuner import FineTuner
from lightning_fastft.training.optimizer import FusedAdamW

_QWEN3 = {"model_type": "qwen3", "head_dim": 128, "num_key_value_heads": 8, "tie_word_embeddings": False}
_QWEN3 |= {"vocab_size": 151936, "rms_norm_eps": 1e-6, "rope_theta": 1000000, "max_position_embeddings": 40960}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3-32b": {
        **_QWEN3,
        "hidden_size": 5120,
        "intermediate_size": 25600,
        "num_hidden_layers": 64,
        "num_attention_heads": 64,
    },
    "qwen3-14b": {
        **_QWEN3,
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
    },
    "tiny": {
        "model_type": "qwen3",
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
    },
}


class Packs(torch.utils.data.IterableDataset[PackedBatch]):
    """An endless stream of new packs of random tokens."""

    def __init__(self, *, num_tokens: int, document_tokens: int, vocab_size: int) -> None:
        self.num_tokens, self.document_tokens, self.vocab_size = num_tokens, document_tokens, vocab_size

    def __iter__(self) -> Iterator[PackedBatch]:
        random = np.random.default_rng(0)
        while True:
            documents: list[Document] = []
            left = self.num_tokens
            while left:
                length = min(left, int(random.integers(self.document_tokens // 2, 3 * self.document_tokens // 2 + 1)))
                ids = random.integers(0, self.vocab_size, length)
                documents.append(Document(ids, ids.copy()))
                left -= length
            yield collate(documents, pad_to=self.num_tokens)


class StepClock(Callback):
    """Record the end of every optimizer step and the losses on the device."""

    def __init__(self) -> None:
        self.marks: list[Any] = []
        self.losses: list[torch.Tensor] = []
        self._num_steps = 0

    def on_before_backward(self, trainer: Trainer, pl_module: Any, loss: torch.Tensor) -> None:
        """Store a loss."""
        self.losses.append(loss.detach().clone())

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *args: Any) -> None:
        """Record a mark after a step."""
        if trainer.global_step == self._num_steps:
            return
        self._num_steps = trainer.global_step
        if torch.cuda.is_available():
            mark = torch.cuda.Event(enable_timing=True)
            mark.record()
            self.marks.append(mark)
        else:
            self.marks.append(time.perf_counter())

    def step_ms(self) -> list[float]:
        """Return the milliseconds from each mark to the next; syncs with the device."""
        if not torch.cuda.is_available():
            return [1e3 * (end - begin) for begin, end in zip(self.marks, self.marks[1:])]
        torch.cuda.synchronize()
        return [begin.elapsed_time(end) for begin, end in zip(self.marks, self.marks[1:])]


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Train, and return the figures."""
    config = MODELS[options.model]
    factory = functools.partial(
        FusedAdamW, optim_bits=8, rounding=options.rounding, offload=options.offload, weight_decay=0.0
    )
    tuner = FineTuner(
        config,
        init="random",
        dtype="bfloat16",
        optimizer=factory,
        learning_rate=1e-5,
        scheduler="constant",
        warmup_share=0.0,
    )
    activations = OffloadCheckpointing(options.policy, vram_budget=options.vram_gib, host_budget=options.host_gib)
    clock = StepClock()
    trainer = Trainer(
        accelerator="gpu" if torch.cuda.is_available() else "cpu",
        devices=1,
        strategy=FastFTStrategy(activations=activations),
        callbacks=[FusedKernels(), FiniteGuard(), clock],
        max_steps=options.steps,
        accumulate_grad_batches=options.accumulate,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    packs = Packs(num_tokens=options.tokens, document_tokens=options.document_tokens, vocab_size=config["vocab_size"])
    begin = time.perf_counter()
    trainer.fit(tuner, train_dataloaders=torch.utils.data.DataLoader(packs, batch_size=None))
    times = clock.step_ms()[options.warmup :]
    tokens = options.tokens * options.accumulate
    speeds = np.array([1e3 * tokens / each for each in times])
    figures: dict[str, Any] = {
        "model": options.model,
        "tokens_per_step": tokens,
        "policy": options.policy,
        "offload": options.offload,
        "step_ms": [round(each, 1) for each in times],
        "tokens_per_s": {f"p{share}": float(np.percentile(speeds, share).round(1)) for share in (10, 50, 90)},
        "mean_tokens_per_s": float((1e3 * tokens * len(times) / sum(times)).__round__(1)),
        "losses": [round(float(loss), 4) for loss in clock.losses],
        "seconds_in_all": round(time.perf_counter() - begin, 1),
    }
    if torch.cuda.is_available():
        figures["gpu"] = torch.cuda.get_device_name()
        figures["peak_allocated_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
        figures["peak_reserved_gib"] = round(torch.cuda.max_memory_reserved() / 2**30, 2)
    return figures


def result_rows(figures: dict[str, Any], *, options: argparse.Namespace, command: str) -> list[dict[str, Any]]:
    """Return rows for results.csv."""
    place = f"{100 * options.offload:.0f} % of the moments on the host"
    shared = {
        "benchmark": "full_one_gpu",
        "workload": f"{options.model}, every weight, {options.accumulate} packs of {options.tokens} tokens a step",
        "system": f"ours {options.policy}+fused, moments in 8 bits, {place}, {options.rounding} rounding",
        "version": f"torch {torch.__version__.partition('+')[0]}",
        "n": len(figures["step_ms"]),
        "command": command,
        "device": figures.get("gpu", "cpu"),
    }
    low, middle, high = (float(np.percentile(figures["step_ms"], share)) for share in (10, 50, 90))
    peaks = [kind for kind in ("allocated", "reserved") if f"peak_{kind}_gib" in figures]
    return [
        {**shared, "metric": "step", "value": middle, "p10": low, "p90": high, "unit": "ms"},
        {**shared, "metric": "tokens", "value": figures["tokens_per_s"]["p50"], "unit": "tokens/s"},
        *({**shared, "metric": f"peak {kind}", "value": figures[f"peak_{kind}_gib"], "unit": "GiB"} for kind in peaks),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-32b", choices=tuple(MODELS))
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of a pack")
    parser.add_argument("--document-tokens", type=int, default=1024)
    parser.add_argument("--accumulate", type=int, default=2, help="packs of an optimizer step")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--warmup", type=int, default=2, help="untimed steps after the first")
    parser.add_argument("--policy", default="recompute", choices=("auto", "recompute", "offload", "keep"))
    parser.add_argument("--vram-gib", type=lambda text: text if text == "auto" else float(text), default="auto")
    parser.add_argument("--host-gib", type=lambda text: text if text == "auto" else float(text), default="auto")
    parser.add_argument("--offload", type=float, default=1.0, help="share of the moments on the host")
    parser.add_argument("--rounding", default="stochastic", choices=("stochastic", "nearest"))
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    figures = run(options)
    options.out.mkdir(parents=True, exist_ok=True)
    command = "python -m benchmarks.full_one_gpu " + " ".join(sys.argv[1:] if arguments is None else arguments)
    append_rows(result_rows(figures, options=options, command=command), path=options.out / "rows.csv")
    (options.out / "result.json").write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(figures, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
