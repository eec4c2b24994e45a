r"""Compare packs of many lengths from CUDA graphs with padded packs, and with packs of many lengths without graphs.

    python -m benchmarks.pack_lengths --out runs/pack_lengths

Every pack has another length, at least 73 % of the longest (6,000 to 8,192 tokens), and new documents. Arms: "lengths
from graphs" and "lengths without graphs" use the packs as they are (``pad_to_max=False``), "padded from graphs" pads
them. Each arm is a separate process with ``FineTuner``, ``PackedDataModule``, ``FastFTStrategy`` and
``FusedKernels``, on the same random weights. Losses of all arms must agree in every step. Steps end at CUDA events.
Memory is that of the whole process, recordings and warm-up included. The table has the error of a failed arm, with
its measurements up to then. On a CPU (``--device cpu --workload tiny``) the recorded work is repeated, as in the tests.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")

import numpy as np
import torch
from lightning.pytorch import Callback

from benchmarks.dora import LOSS_TOLERANCE
from benchmarks.results import append_rows
from benchmarks.ruler.arms.ours import RulerData, make_trainer
from benchmarks.ruler.cases import case_failures, versions
from benchmarks.ruler.measure import StepClock
from benchmarks.ruler.workloads import FIRST_WORD, TOKENIZER_WORDS, WORKLOADS, Pack, Workload, read_lengths
from lightning_fastft.activations.checkpointing import OffloadCheckpointing
from lightning_fastft.callbacks.fused_kernels import FusedKernels
from lightning_fastft.strategies.single_device import FastFTStrategy
from lightning_fastft.training.fine_tuner import FineTuner

# Whether packs are padded, and whether layers run from graphs.
ARMS = {
    "lengths from graphs": (False, True),
    "padded from graphs": (True, True),
    "lengths without graphs": (False, False),
}
# Shortest pack relative to the longest.
SHORTEST = 6000 / 8192
# Targets: the step and its tokens relative to padded packs, GiB reserved with Qwen3-0.6B, seconds of recording.
MOST_RATIO, MOST_GIB, MOST_RECORDING_S = 1.05, 12.0, 1.0
LEAST_SECONDS = 10.0


def draw_packs(workload: Workload, *, num_packs: int) -> list[Pack]:
    """Return packs of different lengths, as long as there are enough, with the documents of the ruler's list."""
    shortest = round(SHORTEST * workload.max_tokens)
    generator = np.random.default_rng(11)
    num_lengths = workload.max_tokens + 1 - shortest
    rounds = -(-num_packs // num_lengths)
    lengths = shortest + np.concatenate([generator.permutation(num_lengths) for _ in range(rounds)])[:num_packs]
    documents = itertools.cycle(max(2, length // workload.length_divisor) for length in read_lengths()["lengths"])
    highest = min(workload.model_config["vocab_size"], TOKENIZER_WORDS)
    packs = []
    for num_tokens in lengths.tolist():
        plan: list[int] = []
        while (num_left := num_tokens - sum(plan)) > 0:
            length = min(next(documents), num_left)
            # A document of one token would be rejected, because it has nothing to predict.
            plan.append(length + (num_left - length == 1))
        packs.append(Pack(input_id_T=generator.integers(FIRST_WORD, highest, num_tokens), lengths=plan))
    return packs


class Measure(Callback):
    """Record the time, the loss and the tokens of each step, and write them with the memory when training ends."""

    def __init__(self, fused: FusedKernels, *, num_warmup: int, is_cuda: bool) -> None:
        self._fused, self._num_warmup, self._is_cuda = fused, num_warmup, is_cuda
        self._clock = StepClock(is_cuda=is_cuda)
        self._losses: list[torch.Tensor] = []
        self._tokens: list[int] = []
        self._num_replays = 0
        self._sizes: list[list[int]] = []
        self._begin = time.perf_counter()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Mark the end of a step."""
        self._clock.mark()
        self._losses.append(outputs["loss"].detach())
        self._tokens.append(batch.context.num_real_tokens)
        # The graphs no longer exist when training ends.
        self._sizes = [[*bucket.size] for graphs in self._fused._graphs for bucket in graphs.pack_buckets]
        if len(self._tokens) == self._num_warmup:
            self._num_replays = sum(graphs.num_replays for graphs in self._fused._graphs)

    def read(self) -> dict[str, Any]:
        """Return all measurements so far."""
        step_ms, graphs = self._clock.read_ms()[self._num_warmup - 1 :], self._fused._graphs
        tokens = self._tokens[self._num_warmup :]
        num_layers = sum(len(each._layers) for each in graphs)
        measured: dict[str, Any] = {
            "ms": step_ms,
            "tokens": tokens,
            "losses": torch.stack(self._losses).tolist() if self._losses else [],
            "run_s": time.perf_counter() - self._begin,
            "recording_s": sum(each.recording_seconds for each in graphs),
            "num_recordings": self._fused.num_recordings / num_layers if graphs else 0,
            "sizes": self._sizes,
            "statuses": [f"{status.name}: {status.state}, {status.reason}" for status in self._fused.status()],
        }
        if tokens and graphs:
            num_replays = sum(each.num_replays for each in graphs) - self._num_replays
            measured["share_from_graphs"] = num_replays / (num_layers * len(tokens))
        if self._is_cuda:
            measured["reserved_gib"] = torch.cuda.max_memory_reserved() / 2**30
            measured["allocated_gib"] = torch.cuda.max_memory_allocated() / 2**30
        return measured


@contextlib.contextmanager
def repeated_work() -> Iterator[None]:
    """Repeat recorded work on devices without CUDA graphs."""
    from lightning_fastft.graphs.layer_graphs import LayerGraphs
    from tests.graphs.test_layer_graphs import CPU, Repeating

    made = functools.partial(LayerGraphs, recorder=Repeating(), backends=CPU)
    with mock.patch("lightning_fastft.graphs.install.LayerGraphs", made):
        yield


def run_arm(arm: str, options: argparse.Namespace) -> dict[str, Any]:
    """Train one arm in this process; return its measurements, also if training fails."""
    is_cuda, workload = options.device == "cuda", WORKLOADS[options.workload]
    is_padded, has_graphs = ARMS[arm]
    torch.manual_seed(1)
    lora = {
        "r": workload.lora_rank,
        "lora_alpha": workload.lora_alpha,
        "target_modules": [*workload.target_modules],
        "init_lora_weights": False,
    }
    # By its configuration, so that kernels are compiled ahead as in any run.
    tuner = FineTuner(
        {"model_type": workload.model_type, **workload.model_config}, init="random", tokenizer=None, lora=lora,
        dtype="bfloat16" if is_cuda else "float32", learning_rate=1e-4, scheduler="constant", warmup_share=0.0,
    )  # fmt: skip
    packs = draw_packs(workload, num_packs=options.steps)
    data = RulerData(packs, max_tokens=workload.max_tokens, pad_to_max=is_padded)
    fused = FusedKernels(cuda_graphs=has_graphs)
    measure = Measure(fused, num_warmup=options.warmup, is_cuda=is_cuda)
    strategy = FastFTStrategy(activations=OffloadCheckpointing(options.activations))
    trainer = make_trainer(strategy, measure, max_steps=options.steps, is_cuda=is_cuda)
    trainer.callbacks.append(fused)  # type: ignore[attr-defined]
    error = ""
    with contextlib.nullcontext() if is_cuda else repeated_work():
        try:
            trainer.fit(tuner, datamodule=data)
        except (*case_failures(), SystemExit, KeyboardInterrupt) as caught:
            error = f"{type(caught).__name__}: {str(caught)[:400]}"
    return {"arm": arm, "error": error, "versions": versions(), **measure.read()}


def start_arm(arm: str, options: argparse.Namespace, *, seconds: float) -> dict[str, Any]:
    """Run one arm in its own process, and return its record; a failed one has a reason."""
    record = options.out / f"{arm.replace(' ', '_')}.json"
    record.unlink(missing_ok=True)
    words = [sys.executable, "-m", "benchmarks.pack_lengths", "--arm", arm, "--out", str(options.out)]
    for name in ("workload", "device", "steps", "warmup", "activations"):
        words += [f"--{name}", str(getattr(options, name))]
    with (options.out / "log.txt").open("a", encoding="utf-8") as log:
        process = subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT)
        try:
            process.wait(seconds)
            last = (options.out / "log.txt").read_text(encoding="utf-8").strip().rpartition("\n")[2]
            reason = f"its process ended with {process.returncode} and wrote no record: {last[:300]}"
        except subprocess.TimeoutExpired:
            reason = f"stopped after {seconds:.0f} s"
        finally:
            # On SIGTERM a process writes its measurements.
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(LEAST_SECONDS)
            process.kill()
    stored = json.loads(record.read_text()) if record.exists() else {"arm": arm, "error": reason}
    return {**stored, "error": reason if reason.startswith("stopped") else stored["error"]}


def render(records: Sequence[dict[str, Any]]) -> str:
    """Return the table of the arms, their results for the targets, and the differences of the losses."""
    head = ("arm", "ms", "p90", "ms/1k tokens", "reserved", "allocated", "recording s", "recorded", "from graphs", "n")
    lines = [" | ".join(f"{word:>12}" if number else f"{word:22}" for number, word in enumerate(head))]
    by_arm = {record["arm"]: record for record in records}
    for record in records:
        cells = [
            _cell(value, digits)
            for value, digits in (
                (median_ms(record), 2), (_p90(record), 2), (per_thousand(record), 3), (record.get("reserved_gib"), 2),
                (record.get("allocated_gib"), 2), (record.get("recording_s"), 2), (record.get("num_recordings"), 1),
                (record.get("share_from_graphs"), 3), (len(record.get("ms", [])) or None, 0),
            )
        ]  # fmt: skip
        lines.append(" | ".join([f"{record['arm']:22}", *cells]))
        lines += [f"    {status}" for status in record.get("statuses", ()) if status.startswith("layer graphs")]
        if record.get("sizes"):
            lines.append(f"    tokens, documents, longest document: {record['sizes']}")
        if record["error"]:
            lines.append(f"    FAILED: {record['error']}")
    ours, padded, plain = (by_arm.get(arm, {}) for arm in ARMS)
    for name, function in (("a step", median_ms), ("1,000 tokens", per_thousand)):
        own, other = function(ours), function(padded)
        if own and other:
            lines.append(f"{name}, lengths / padded, from graphs: {own / other:.4f} (target {MOST_RATIO})")
    if ours.get("reserved_gib"):
        lines.append(f"reserved, lengths from graphs: {ours['reserved_gib']:.2f} GiB (target {MOST_GIB})")
    if "recording_s" in ours:
        lines.append(f"recording, lengths from graphs: {ours['recording_s']:.2f} s (target {MOST_RECORDING_S})")
    lines += [
        compare_losses(record, plain) for record in (ours, padded) if record.get("losses") and plain.get("losses")
    ]
    return "\n".join(lines)


def compare_losses(record: dict[str, Any], plain: dict[str, Any]) -> str:
    """Return the largest difference of an arm's losses from those without graphs."""
    pairs = list(zip(record["losses"], plain["losses"]))
    worst = max(abs(own / other - 1) for own, other in pairs)
    state = "equal" if worst <= LOSS_TOLERANCE else "NOT EQUAL"
    return f"losses of {record['arm']} and {plain['arm']} over {len(pairs)} steps: {state}, at most {worst:.2e} apart"


def median_ms(record: dict[str, Any]) -> float | None:
    """Return the median time of a step in ms."""
    return statistics.median(record["ms"]) if record.get("ms") else None


def _p90(record: dict[str, Any]) -> float | None:
    return float(np.percentile(record["ms"], 90)) if record.get("ms") else None


def per_thousand(record: dict[str, Any]) -> float | None:
    """Return the median time of 1,000 tokens without padding, in ms."""
    pairs = list(zip(record.get("ms", ()), record.get("tokens", ())))
    return statistics.median(1e3 * step_ms / num_tokens for step_ms, num_tokens in pairs) if pairs else None


def _cell(value: float | None, digits: int) -> str:
    return f"{'-':>12}" if value is None else f"{value:12.{digits}f}"


def rows_of(records: Sequence[dict[str, Any]], *, workload: str, command: str) -> list[dict[str, Any]]:
    """Return rows of results.csv for the arms that did not fail."""
    rows = []
    for record in records:
        if record["error"] or not record.get("ms"):
            continue
        packages = record["versions"]
        shared = {
            "benchmark": "pack_lengths",
            "workload": f"{workload}, {min(record['tokens'])} to {max(record['tokens'])} tokens",
            "system": record["arm"],
            "version": "; ".join(f"{name} {packages[name]}" for name in ("torch", "transformers") if name in packages),
            "n": len(record["ms"]),
            "command": command,
            "device": packages.get("device", "cpu"),
        }
        p10, p90 = np.percentile(record["ms"], [10, 90]).tolist()
        rows.append({**shared, "metric": "step", "value": median_ms(record), "p10": p10, "p90": p90, "unit": "ms"})
        for metric, value, unit in (
            ("1,000 real tokens", per_thousand(record), "ms"),
            ("peak reserved", record.get("reserved_gib"), "GiB"),
            ("peak allocated", record.get("allocated_gib"), "GiB"),
            ("recording", record["recording_s"], "s"),
            ("recordings of all layers", record["num_recordings"], "1"),
        ):
            rows += [] if value is None else [{**shared, "metric": metric, "value": value, "unit": unit}]
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the arms one after the other; print a table of the measured ones, also after an error."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", default="qwen3-0.6b-lora", choices=tuple(WORKLOADS))
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--steps", type=int, default=130, help="steps of an arm, warm-up included")
    parser.add_argument("--warmup", type=int, default=50, help="steps before the first timed one")
    parser.add_argument("--activations", default="auto", choices=("keep", "recompute", "auto"))
    parser.add_argument("--out", type=Path, default=Path("runs/pack_lengths"), help="folder of records, log and rows")
    parser.add_argument("--budget-s", type=float, default=150.0, help="seconds of the whole call")
    parser.add_argument("--arms", nargs="+", default=tuple(ARMS), choices=tuple(ARMS))
    parser.add_argument("--arm", choices=tuple(ARMS), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    # On SIGTERM a process runs its finally blocks.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if options.arm:
        record = run_arm(options.arm, options)
        (options.out / f"{options.arm.replace(' ', '_')}.json").write_text(json.dumps(record))
        return int(bool(record["error"]))
    deadline = time.monotonic() + options.budget_s
    records: list[dict[str, Any]] = []
    try:
        for number, arm in enumerate(options.arms):
            left = deadline - time.monotonic() - LEAST_SECONDS
            # An arm that hangs leaves time for the others; the first one compiles kernels.
            seconds = min(left, 1.5 * left / (len(options.arms) - number))
            is_late = seconds < LEAST_SECONDS
            records.append(
                {"arm": arm, "error": "no time left"} if is_late else start_arm(arm, options, seconds=seconds)
            )
            print(render(records[-1:]).partition("\n")[2], flush=True)
    finally:
        command = "python -m benchmarks.pack_lengths " + " ".join(sys.argv[1:] if arguments is None else arguments)
        table = render(records)
        (options.out / "table.txt").write_text(table + "\n", encoding="utf-8")
        append_rows(rows_of(records, workload=options.workload, command=command), path=options.out / "rows.csv")
        print(table, flush=True)
    return int(any(record["error"] for record in records))


if __name__ == "__main__":
    raise SystemExit(main())
