r"""Time updates of preference, policy and distillation tuners, and compare them with TRL and Unsloth.

    python -m benchmarks.train_step build --workload qwen3-8b-lora --root /dev/shm/fastft
    python -m benchmarks.tuners run --task dpo --workload qwen3-8b-lora --root /dev/shm/fastft --out runs/dpo \
        --arms ours:keep+fused ours:keep+fused+copies trl:4 trl:4+recompute unsloth:4
    python -m benchmarks.tuners run --task grpo --workload qwen3-8b-lora --root /dev/shm/fastft --out runs/grpo \
        --arms ours:keep+fused trl:16 trl:16+recompute
    python -m benchmarks.tuners run --task distill --workload qwen3-8b-lora --root /dev/shm/fastft --out runs/distill \
        --arms sft:keep+fused forward:keep+fused live:keep+fused stored:keep+fused

An arm is one process. Tasks: "dpo" has prompts of mean 512 and completions of mean 256 tokens, "grpo" prompts of mean
1,024 and groups of 8 completions of mean 256 with given rewards (no sampling is timed), "distill" documents of mean 512
and a teacher of the student's shape; "forward" is the time of the student's loss without a gradient. Ours trains one
pack of the workload's max_tokens in a step; "+copies" repeats prompts instead of sharing them. TRL and Unsloth train N
rows in a step (``trl:N``); a row is a pair, or a completion of a group. Every system starts from the same adapters and
prints a check: the mean loss of the same first examples, for "grpo" the gradient norm of the first two groups ("trl:16"
trains just these in its first step). Figures count only if checks agree. Steps end at CUDA events; 4 warm-up steps,
then 20. Ours also counts host syncs in the last warm-up step, by torch's debug mode.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("UNSLOTH_DISABLE_STATISTICS", "1")

NUM_WARMUP, NUM_TIMED = 4, 20
NUM_EXAMPLES, NUM_CHECKED, NUM_CHECKED_GROUPS = 800, 8, 2
GROUP_SIZE = 8
MEAN_LENGTHS = {"dpo": (512, 256), "grpo": (1024, 256), "distill": (0, 512)}
SIGMA = 0.6
BETA, LEARNING_RATE = 0.1, 1e-5
# Names and units of a record's figures in results.csv.
METRICS = {
    "step_ms": ("step", "ms"),
    "examples_per_s": ("examples", "examples/s"),
    "tokens_per_s": ("tokens", "tokens/s"),
    "allocated_gib": ("peak allocated", "GiB"),
    "reserved_gib": ("peak reserved", "GiB"),
    "check": ("check", "1"),
    "host_waits": ("host waits, whole step", "per step"),
}
# This mark separates records from the log.
RECORD = "RECORD "


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    return {"run": _run, "arm": _arm}[options.command](options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("run", "arm"):
        command = commands.add_parser(name)
        command.add_argument("--task", required=True, choices=tuple(MEAN_LENGTHS))
        command.add_argument("--workload", required=True)
        command.add_argument("--root", type=Path, required=True)
        command.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
        command.add_argument("--steps", type=int, default=NUM_TIMED)
        command.add_argument("--out", type=Path, required=True)
        if name == "run":
            command.add_argument("--arms", nargs="+", required=True)
            command.add_argument("--arm-s", type=float, default=240.0)
        else:
            command.add_argument("--arm", required=True)
    return parser


def _run(options: argparse.Namespace) -> int:
    arm_options = ("--task", options.task, "--workload", options.workload)
    return run_arms(options, benchmark="tuners", arm_options=arm_options, workload=f"{options.task} {options.workload}")


def run_arms(options: argparse.Namespace, *, benchmark: str, arm_options: Sequence[str], workload: str) -> int:
    """Run each arm in its own process, print its line, and write its figures to ``options.out``.

    Args:
        options: Has arms, root, device, steps, out and arm_s.
        benchmark: Name of the script in this folder, whose command ``arm`` prints a line that begins with RECORD.
        arm_options: Further options of that command.
        workload: Workload in the rows.
    """
    from benchmarks.results import append_rows

    options.out.mkdir(parents=True, exist_ok=True)
    records = []
    for arm in options.arms:
        command = [
            sys.executable, "-m", f"benchmarks.{benchmark}", "arm", "--arm", arm, *arm_options,
            "--root", str(options.root), "--device", options.device, "--steps", str(options.steps),
            "--out", str(options.out),
        ]  # fmt: skip
        start = time.perf_counter()
        with (options.out / "log.txt").open("a") as log:
            log.write(f"\n=== {arm}\n")
            log.flush()
            try:
                done = subprocess.run(
                    command, stdout=subprocess.PIPE, stderr=log, text=True, timeout=options.arm_s, check=False
                )
                log.write(done.stdout)
                lines = [line for line in done.stdout.splitlines() if line.startswith(RECORD)]
                record = json.loads(lines[-1].removeprefix(RECORD)) if lines else {"error": f"exit {done.returncode}"}
            except subprocess.TimeoutExpired:
                record = {"error": f"over {options.arm_s:.0f} s"}
        if "error" in record:
            last = [line for line in (options.out / "log.txt").read_text(errors="replace").splitlines() if line.strip()]
            record["error"] += f": {last[-1][:200]}"
        record["arm"] = arm
        records.append(record)
        print(_line(record), f"({time.perf_counter() - start:.0f} s)", flush=True)
        (options.out / "raw.jsonl").open("a").write(json.dumps(record) + "\n")
    command_line = f"python -m benchmarks.{benchmark} " + " ".join(sys.argv[1:])
    append_rows(
        [
            {
                "benchmark": benchmark,
                "workload": workload,
                "system": record["arm"],
                "version": record["version"],
                "metric": metric,
                "value": record[key],
                "n": options.steps,
                "unit": unit,
                "command": command_line,
                "device": record["device"],
            }
            for record in records
            if "error" not in record
            for key, (metric, unit) in METRICS.items()
            if key in record
        ],
        path=options.out / "rows.csv",
    )
    return 0


def _line(record: dict[str, Any]) -> str:
    if "error" in record:
        return f"{record['arm']:28} {record['error']}"
    tokens = f"{record['tokens_per_s']:9,.0f} tokens/s " if "tokens_per_s" in record else ""
    return (
        f"{record['arm']:28} {record['examples_per_s']:8.2f} examples/s {tokens}{record['step_ms']:8.1f} ms a step "
        f"{record['allocated_gib']:6.1f} / {record['reserved_gib']:6.1f} GiB  check {record['check']:.5f}  "
        f"gradient {record['gradient_norm']:.3g}"
    )


def _arm(options: argparse.Namespace) -> int:
    from benchmarks.ruler.workloads import WORKLOADS, WorkloadFiles

    files = WorkloadFiles(options.root, WORKLOADS[options.workload])
    system, _, mode = options.arm.partition(":")
    run = {"trl": _run_trl, "unsloth": _run_trl}.get(system, _run_ours)
    record = run(options, files=files, system=system, mode=mode)
    print_record(record, is_cuda=options.device == "cuda")
    return 0


def print_record(record: dict[str, Any], *, is_cuda: bool) -> None:
    """Print the figures of an arm for ``run_arms``, with the device and its peak memory."""
    import torch

    record |= {
        "device": torch.cuda.get_device_name() if is_cuda else "cpu",
        "allocated_gib": torch.cuda.max_memory_allocated() / 2**30 if is_cuda else 0.0,
        "reserved_gib": torch.cuda.max_memory_reserved() / 2**30 if is_cuda else 0.0,
    }
    print(RECORD + json.dumps(record), flush=True)


def make_rows(task: str, *, divisor: int = 1, num_words: int = 8000) -> list[dict[str, Any]]:
    """Return seeded rows: texts of the word tokenizer, with lengths from log-normal distributions.

    Example:
        >>> [sorted(row) for row in make_rows("dpo", divisor=16)[:1]]
        [['chosen', 'prompt', 'rejected']]
    """
    import numpy as np

    draws = np.random.default_rng(0)
    prompt_mean, completion_mean = MEAN_LENGTHS[task]

    def words(mean: int) -> str:
        length = int(np.clip(draws.lognormal(np.log(mean) - SIGMA**2 / 2, SIGMA), 16, 2 * mean)) // divisor
        return " ".join(f"w{number}" for number in draws.integers(4, num_words, max(2, length)))

    if task == "dpo":
        return [
            {"prompt": words(prompt_mean), "chosen": words(completion_mean), "rejected": words(completion_mean)}
            for _ in range(NUM_EXAMPLES)
        ]
    if task == "grpo":
        return [
            {
                "prompt": words(prompt_mean),
                "completions": [words(completion_mean) for _ in range(GROUP_SIZE)],
                "rewards": draws.normal(size=GROUP_SIZE).round(4).tolist(),
            }
            for _ in range(NUM_EXAMPLES // GROUP_SIZE)
        ]
    return [{"text": words(completion_mean)} for _ in range(NUM_EXAMPLES)]


def _rows_of(options: argparse.Namespace, files: Any) -> list[dict[str, Any]]:
    from benchmarks.ruler.workloads import TOKENIZER_WORDS

    num_words = min(TOKENIZER_WORDS, files.workload.model_config["vocab_size"])
    return make_rows(options.task, divisor=files.workload.length_divisor, num_words=num_words)


class StepClock:
    """Times of steps, examples in them, and the norm of the first gradients."""

    def __init__(self, *, num_steps: int, is_cuda: bool) -> None:
        self.num_timed, self.num_total = num_steps, NUM_WARMUP + num_steps
        self.num_examples: list[int] = []
        self.gradient_norm = 0.0
        self.host_waits: int | None = None
        self.host_wait_places: list[str] = []
        self._waits: Any = None
        self._is_cuda = is_cuda
        self._marks: list[Any] = []

    def step_begins(self) -> None:
        """Count host syncs in the last warm-up step, until it is done."""
        from benchmarks.ruler.measure import HostWaits

        if len(self._marks) == NUM_WARMUP - 1:
            self._waits = HostWaits(is_cuda=self._is_cuda)
            self._waits.__enter__()

    def note_gradients(self, parameters: Any) -> None:
        """Store the norm of the first step's gradients."""
        import torch

        if not self.gradient_norm:
            norms = [p.grad.detach().float().norm() for p in parameters if p.grad is not None]
            self.gradient_norm = float(torch.stack(norms).norm())

    def step_done(self, num_examples: int) -> bool:
        """Record the end of a step, and return whether it was the last."""
        import torch

        if self._waits is not None:
            self._waits.__exit__(None, None, None)
            self.host_waits, self.host_wait_places, self._waits = self._waits.count, self._waits.places, None
        if self._is_cuda:
            mark = torch.cuda.Event(enable_timing=True)
            mark.record()
            if len(self._marks) == NUM_WARMUP - 1:
                torch.cuda.reset_peak_memory_stats()
        else:
            mark = time.perf_counter()
        self._marks.append(mark)
        self.num_examples.append(num_examples)
        return len(self._marks) >= self.num_total

    def record(self) -> dict[str, Any]:
        """Return time per step and examples per second of the timed steps, and host syncs if they were counted."""
        import torch

        first, last = self._marks[NUM_WARMUP - 1], self._marks[-1]
        if self._is_cuda:
            torch.cuda.synchronize()
            seconds = first.elapsed_time(last) / 1e3
        else:
            seconds = last - first
        timed = self.num_examples[NUM_WARMUP:]
        counted = {"host_waits": self.host_waits, "host_wait_places": self.host_wait_places}
        return {
            **({} if self.host_waits is None else counted),
            "step_ms": 1e3 * seconds / len(timed),
            "examples_per_s": sum(timed) / seconds,
            "gradient_norm": self.gradient_norm,
        }


# Ours.


def _run_ours(options: argparse.Namespace, *, files: Any, system: str, mode: str) -> dict[str, Any]:
    import torch

    import lightning_fastft
    from benchmarks.ruler.plans import parse_mode
    from lightning_fastft import PackedDataModule

    is_cuda, workload = options.device == "cuda", files.workload
    plan = parse_mode(mode.replace("+copies", ""))
    rows = _rows_of(options, files)
    data = {
        "max_tokens": workload.max_tokens,
        "share_prompts": "+copies" not in mode,
        "separator": " ",
        "cache_dir": None,
        "show_progress": False,
        "too_long": "truncate",
    }
    tuner = _make_tuner(options, files=files, system=system, is_cuda=is_cuda)
    clock = StepClock(num_steps=options.steps, is_cuda=is_cuda)
    make_trainer = functools.partial(plan.make_trainer, is_cuda=is_cuda)
    start = files.read_trained()
    if options.task == "grpo":
        # On policy the loss does not depend on the model, so the gradient of one step is compared.
        first = StepClock(num_steps=NUM_TIMED, is_cuda=False)
        make_trainer(_clock_callback(first, start=start), max_epochs=1, accumulate_grad_batches=NUM_CHECKED).fit(
            tuner, PackedDataModule(rows[:NUM_CHECKED_GROUPS], **data)
        )
        checked = first.gradient_norm
    else:
        checked = make_trainer(_load_callback(start)).validate(
            tuner, PackedDataModule(None, val_paths=rows[:NUM_CHECKED], **data), verbose=False
        )[0]["val_loss"]
    if system == "forward":
        trainer = make_trainer(_forward_callback(clock, start=start), limit_val_batches=clock.num_total)
        trainer.validate(tuner, PackedDataModule(None, val_paths=rows, **data), verbose=False)
    else:
        trainer = make_trainer(_clock_callback(clock, start=start), max_steps=clock.num_total)
        trainer.fit(tuner, PackedDataModule(rows, **data))
    torch.cuda.empty_cache() if is_cuda else None
    return {"check": checked, "version": lightning_fastft.__version__, **clock.record()}


def _make_tuner(options: argparse.Namespace, *, files: Any, system: str, is_cuda: bool) -> Any:
    from benchmarks.ruler.workloads import lora_config
    from lightning_fastft import DistillationTuner, FineTuner, PolicyTuner, PreferenceTuner

    common = {
        "quantization": files.workload.quantization,
        "lora": lora_config(files.workload),
        "dtype": "bfloat16" if is_cuda else "float32",
        "learning_rate": LEARNING_RATE,
    }
    if system == "ours":
        kind = {"dpo": PreferenceTuner, "grpo": PolicyTuner}[options.task]
        return kind(str(files.model), **({"beta": BETA} if options.task == "dpo" else {}), **common)
    if system in ("sft", "forward"):
        return FineTuner(str(files.model), **common)
    if system in ("live", "stored"):
        store = {"store": str(options.out / "teacher")} if system == "stored" else {}
        return DistillationTuner(str(files.model), teacher=str(files.model), **store, **common)
    raise ValueError(
        f"{system!r} is no system of this benchmark; it has ours, sft, forward, live, stored, trl and unsloth."
    )


def _load_callback(start: Any) -> Any:
    from lightning.pytorch import Callback

    from benchmarks.ruler.judge import load_start

    class Load(Callback):
        def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
            load_start(pl_module.model, start)
            if pl_module.low_precision_adapters is not None:
                pl_module.low_precision_adapters.refresh()

        on_train_start = on_validation_start

    return Load()


def _clock_callback(clock: StepClock, *, start: Any) -> Any:
    class Measure(type(_load_callback(start))):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            clock.step_begins()

        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            clock.note_gradients(pl_module.parameters())

        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            trainer.should_stop = clock.step_done(_num_examples(batch)) or trainer.should_stop

    return Measure()


def _forward_callback(clock: StepClock, *, start: Any) -> Any:
    class Measure(type(_load_callback(start))):
        def on_validation_batch_end(
            self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
        ) -> None:
            clock.step_done(_num_examples(batch))

    return Measure()


def _num_examples(batch: Any) -> int:
    completions = batch.context.completions
    return batch.context.num_documents if completions is None else completions.num_examples


# TRL and Unsloth.


def _run_trl(options: argparse.Namespace, *, files: Any, system: str, mode: str) -> dict[str, Any]:
    if system == "unsloth":
        # Unsloth must be imported before the libraries that it patches.
        import unsloth  # noqa: F401
    from datasets import Dataset
    from transformers import TrainerCallback

    from benchmarks.ruler.judge import load_start

    is_cuda = options.device == "cuda"
    rows = _rows_of(options, files)
    batch_size, _, rest = mode.partition("+")
    model, tokenizer = _load_peer(files, system=system, is_cuda=is_cuda, recomputes=rest == "recompute")
    clock = StepClock(num_steps=options.steps, is_cuda=is_cuda)
    num_examples = int(batch_size) // (GROUP_SIZE if options.task == "grpo" else 1)
    common = {
        "output_dir": str(files.folder / "trainer_output"),
        "per_device_train_batch_size": int(batch_size),
        "per_device_eval_batch_size": NUM_CHECKED,
        "max_steps": clock.num_total,
        "learning_rate": LEARNING_RATE,
        # Norms are recorded after clipping there.
        "max_grad_norm": 1e9,
        "logging_steps": 100_000,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "bf16": is_cuda,
        "gradient_checkpointing": rest == "recompute",
        "optim": "adamw_torch_fused" if is_cuda else "adamw_torch",
        **({} if is_cuda else {"use_cpu": True}),
    }
    make = {"dpo": _dpo_trainer, "grpo": _grpo_trainer}[options.task]
    trainer = make(model, tokenizer, rows, Dataset=Dataset, common=common, max_tokens=files.workload.max_tokens)
    load_start(trainer.model, files.read_trained())

    class Measure(TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            clock.note_gradients(trainer.model.parameters())

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            clock.step_done(num_examples)

    checked = trainer.evaluate()["eval_loss"] if options.task == "dpo" else None
    trainer.add_callback(Measure())
    trainer.train()
    import trl

    version = __import__("unsloth").__version__ if system == "unsloth" else trl.__version__
    measured = clock.record()
    return {"check": clock.gradient_norm if checked is None else checked, "version": version, **measured}


def _load_peer(files: Any, *, system: str, is_cuda: bool, recomputes: bool) -> tuple[Any, Any]:
    """Return a model with adapters, built as in each system's documentation, and its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from benchmarks.ruler.cases import base_dtype, quantization_config
    from benchmarks.ruler.workloads import lora_config

    if system == "unsloth":
        from unsloth import FastLanguageModel

        model, tokenizer = FastLanguageModel.from_pretrained(
            str(files.model), max_seq_length=files.workload.max_tokens, dtype=base_dtype(is_cuda=is_cuda),
            load_in_4bit=files.workload.quantization is not None, local_files_only=True,
        )  # fmt: skip
        from benchmarks.ruler.arms.unsloth import add_adapters
        from benchmarks.ruler.workloads import TARGET_MODULES

        mode = {"use_gradient_checkpointing": "unsloth" if recomputes else False}
        return add_adapters(model, files.workload, target_modules=TARGET_MODULES, mode=mode), tokenizer
    from peft import get_peft_model

    quantization = quantization_config(files.workload, is_cuda=is_cuda)
    model = AutoModelForCausalLM.from_pretrained(
        files.model, dtype=base_dtype(is_cuda=is_cuda),
        attn_implementation="flash_attention_2" if is_cuda else "sdpa",
        device_map={"": 0} if is_cuda else {"": "cpu"},
        **({"quantization_config": quantization} if quantization else {}),
    )  # fmt: skip
    return get_peft_model(model, lora_config(files.workload)), AutoTokenizer.from_pretrained(files.model)


def _dpo_trainer(
    model: Any, tokenizer: Any, rows: list[dict[str, Any]], *, Dataset: Any, common: dict[str, Any], max_tokens: int
) -> Any:
    from trl import DPOConfig, DPOTrainer

    spaced = [{**row, "prompt": row["prompt"] + " "} for row in rows]
    return DPOTrainer(
        model=model,
        args=DPOConfig(**common, beta=BETA, max_length=max_tokens),
        train_dataset=Dataset.from_list(spaced),
        eval_dataset=Dataset.from_list(spaced[:NUM_CHECKED]),
        processing_class=tokenizer,
    )


def _grpo_trainer(
    model: Any, tokenizer: Any, rows: list[dict[str, Any]], *, Dataset: Any, common: dict[str, Any], max_tokens: int
) -> Any:
    from trl import GRPOConfig, GRPOTrainer

    texts = {row["prompt"]: row for row in rows}
    rewards = {
        tuple(_completion_ids(tokenizer, text)): reward
        for row in rows
        for text, reward in zip(row["completions"], row["rewards"], strict=True)
    }

    def rollout(prompts: list[str], *_: Any, **__: Any) -> dict[str, Any]:
        seen: dict[str, int] = {}
        chosen = []
        for prompt in prompts:
            place = seen.get(prompt, 0)
            seen[prompt] = place + 1
            chosen.append(texts[prompt]["completions"][place % GROUP_SIZE])
        completion_ids = [_completion_ids(tokenizer, text) for text in chosen]
        return {
            "prompt_ids": [tokenizer(prompt)["input_ids"] for prompt in prompts],
            "completion_ids": completion_ids,
            "logprobs": None,
        }

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [rewards[tuple(ids)] for ids in completion_ids]

    return GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=GRPOConfig(
            **common,
            num_generations=GROUP_SIZE,
            max_completion_length=2 * MEAN_LENGTHS["grpo"][1] + 1,
            loss_type="grpo",
            shuffle_dataset=False,
        ),
        train_dataset=Dataset.from_list([{"prompt": row["prompt"]} for row in rows]),
        processing_class=tokenizer,
        rollout_func=rollout,
    )


def _completion_ids(tokenizer: Any, text: str) -> list[int]:
    return [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]


if __name__ == "__main__":
    sys.exit(main())
