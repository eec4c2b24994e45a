"""One start of one system for benchmarks/first_step.py: from its imports to some steps, as in its documentation.

All systems get the same model folder and the same file of texts. Their own code tokenises and packs the texts.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.ruler.workloads import WorkloadFiles

# The mark at the end of each phase that the package logs.
_PHASE_MARKS = {"loading the model": "loaded", "planning packs": "tokenised"}


class Marks:
    """Times since the parent started the process, and the end of each step.

    Args:
        start: ``time.monotonic()`` of the parent; Linux has one such clock for all processes.
        num_steps: Steps of the run.
        is_cuda: Whether steps run on a GPU.
    """

    def __init__(self, *, start: float, num_steps: int, is_cuda: bool) -> None:
        self.seconds: dict[str, float] = {}
        self.phases: list[tuple[str, float, float | None]] = []
        self.num_steps = num_steps
        self._start = start
        self._is_cuda = is_cuda
        self._ends: list[Any] = []

    def elapsed(self) -> float:
        """Return the seconds since the parent started the process."""
        return time.monotonic() - self._start

    def note(self, name: str) -> None:
        """Record a time, unless it is recorded already."""
        self.seconds.setdefault(name, self.elapsed())

    def step_ends(self) -> bool:
        """Record the end of a step; return whether it was the last. Only the first and last steps sync."""
        if self._is_cuda:
            import torch

            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._ends.append(event)
            if len(self._ends) in (1, self.num_steps):
                torch.cuda.synchronize()
        else:
            self._ends.append(time.monotonic())
        self.note("first_step")
        return len(self._ends) >= self.num_steps

    def step_seconds(self) -> list[float]:
        """Return the end of each step in seconds since the process was started, after the last one."""
        first = self.seconds["first_step"]
        if self._is_cuda:
            return [first + self._ends[0].elapsed_time(end) / 1e3 for end in self._ends]
        return [first + end - self._ends[0] for end in self._ends]


class _PhaseMarks(logging.Handler):
    """Record the phases that the package logs."""

    def __init__(self, marks: Marks) -> None:
        super().__init__(logging.INFO)
        self._marks = marks

    def emit(self, record: logging.LogRecord) -> None:
        name, seconds = record.getMessage(), getattr(record, "seconds", None)
        self._marks.phases.append((name, self._marks.elapsed(), seconds))
        if seconds is not None and name in _PHASE_MARKS:
            self._marks.note(_PHASE_MARKS[name])


def run_ours(files: WorkloadFiles, options: argparse.Namespace, marks: Marks) -> None:
    """Train by the shipped config of the workload, without held-out data, accumulation, logger and checkpoints."""
    from lightning.pytorch import Callback

    from benchmarks.ruler.workloads import SHIPPED_CONFIGS
    from lightning_fastft.cli.lightning_cli import FastFTCLI
    from lightning_fastft.core.phases import LOGGER

    class MarkSteps(Callback):
        """Record the start of the first step and the end of each step."""

        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            marks.note("prepared")

        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if marks.step_ends():
                trainer.should_stop = True

    LOGGER.addHandler(_PhaseMarks(marks))
    LOGGER.setLevel(logging.INFO)
    with tempfile.TemporaryDirectory() as folder:
        values = {
            "--config": SHIPPED_CONFIGS[options.workload],
            "--trainer.max_steps": marks.num_steps,
            "--trainer.max_epochs": -1,
            "--trainer.accumulate_grad_batches": 1,
            "--trainer.default_root_dir": folder,
            "--trainer.logger": "false",
            "--trainer.enable_checkpointing": "false",
            "--trainer.accelerator": "gpu" if options.device == "cuda" else "cpu",
            "--data.paths": options.texts,
            "--data.max_tokens": options.max_tokens,
            "--data.val_share": 0.0,
            "--model.model": options.model,
            "--model.lora.r": files.workload.lora_rank,
        }
        cli = FastFTCLI([str(word) for pair in values.items() for word in pair], run=False, callbacks=[MarkSteps()])
        marks.note("imports")
        cli.trainer.fit(cli.model, datamodule=cli.datamodule)


def run_plain(files: WorkloadFiles, options: argparse.Namespace, marks: Marks) -> None:
    """Train by the loop that transformers documents, on packs filled in the order of the texts."""
    import peft  # noqa: F401
    from transformers import AutoTokenizer, DataCollatorWithFlattening

    from benchmarks.ruler.arms.plain import load_model, make_optimizer, set_checkpointing
    from benchmarks.ruler.cases import LEARNING_RATE, MAX_GRADIENT_NORM

    marks.note("imports")
    import torch

    # The model is read before the tokenizer, as in transformers' examples.
    files.model = options.model
    model = load_model(files, device=options.device)
    set_checkpointing(model, enabled=True)
    marks.note("loaded")
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    rows = [json.loads(line)["text"] for line in options.texts.read_text(encoding="utf-8").splitlines()]
    packs = fill_packs(tokenizer(rows)["input_ids"], max_tokens=options.max_tokens)
    marks.note("tokenised")
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    name, is_cuda = "adamw_8bit", options.device == "cuda"
    optimizer = make_optimizer(parameters, name=name, is_cuda=is_cuda, learning_rate=LEARNING_RATE)
    collator = DataCollatorWithFlattening()
    for step in range(marks.num_steps):
        batch = collator([{"input_ids": ids} for ids in packs[step % len(packs)]])
        batch = {key: value.to(options.device) for key, value in batch.items() if hasattr(value, "to")}
        marks.note("prepared")
        model(**batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, MAX_GRADIENT_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        marks.step_ends()


def fill_packs(ids_N: list[list[int]], *, max_tokens: int) -> list[list[list[int]]]:
    """Return documents in packs of at most max_tokens, in their order.

    Example:
        >>> fill_packs([[1, 2], [3], [4, 5]], max_tokens=3)
        [[[1, 2], [3]], [[4, 5]]]
    """
    packs: list[list[list[int]]] = [[]]
    for ids in ids_N:
        if packs[-1] and sum(map(len, packs[-1])) + len(ids) > max_tokens:
            packs.append([])
        packs[-1].append(ids[:max_tokens])
    return packs


def run_unsloth(files: WorkloadFiles, options: argparse.Namespace, marks: Marks) -> None:
    """Train with FastLanguageModel and the SFTTrainer that it prepares, in its default mode."""
    import unsloth  # noqa: F401
    from trl import SFTConfig, SFTTrainer
    from unsloth import FastLanguageModel

    from benchmarks.ruler.arms.unsloth import MODES, add_adapters
    from benchmarks.ruler.cases import base_dtype
    from benchmarks.ruler.workloads import TARGET_MODULES

    marks.note("imports")
    workload = files.workload
    model, tokenizer = FastLanguageModel.from_pretrained(
        str(options.model),
        max_seq_length=options.max_tokens,
        load_in_4bit=workload.quantization is not None,
        dtype=base_dtype(is_cuda=options.device == "cuda"),
        local_files_only=True,
    )
    model = add_adapters(model, workload, target_modules=TARGET_MODULES, mode=MODES["unsloth"])
    marks.note("loaded")
    _train_sft(SFTTrainer, SFTConfig, files, options, marks, model=model, processing_class=tokenizer)


def run_trl(files: WorkloadFiles, options: argparse.Namespace, marks: Marks) -> None:
    """Train with TRL's SFTTrainer and its defaults, packing on."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    from benchmarks.ruler.cases import base_dtype, quantization_config
    from benchmarks.ruler.workloads import lora_config

    marks.note("imports")
    is_cuda = options.device == "cuda"
    quantization = quantization_config(files.workload, is_cuda=is_cuda)
    model = AutoModelForCausalLM.from_pretrained(
        options.model,
        dtype=base_dtype(is_cuda=is_cuda),
        attn_implementation="flash_attention_2" if is_cuda else "sdpa",
        device_map={"": 0} if is_cuda else {"": "cpu"},
        **({"quantization_config": quantization} if quantization else {}),
    )
    marks.note("loaded")
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    parts = {"model": model, "processing_class": tokenizer, "peft_config": lora_config(files.workload)}
    _train_sft(SFTTrainer, SFTConfig, files, options, marks, **parts)


def _train_sft(
    trainer_class: Any, config_class: Any, files: WorkloadFiles, options: argparse.Namespace, marks: Marks, **parts: Any
) -> None:
    """Train with an SFTTrainer on the texts."""
    from datasets import load_dataset
    from transformers import TrainerCallback

    from benchmarks.ruler.arms.sft import training_arguments
    from benchmarks.ruler.cases import Case

    class MarkSteps(TrainerCallback):
        """Record the start of the first step and the end of each step."""

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            marks.note("prepared")

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
            control.should_training_stop = marks.step_ends()
            return control

    case = Case(options.workload, options.system, "", num_warmup=0, num_steps=marks.num_steps)
    arguments = training_arguments(case, files=files, is_cuda=options.device == "cuda")
    arguments |= {"max_length": options.max_tokens, "dataset_text_field": "text", "max_steps": marks.num_steps}
    trainer = trainer_class(
        train_dataset=load_dataset("json", data_files=str(options.texts), split="train"),
        args=config_class(**arguments),
        **parts,
    )
    marks.note("tokenised")
    trainer.add_callback(MarkSteps())
    trainer.train()


SYSTEMS: dict[str, Callable[[WorkloadFiles, argparse.Namespace, Marks], None]] = {
    "ours": run_ours,
    "plain": run_plain,
    "unsloth": run_unsloth,
    "trl": run_trl,
}


def count_compilations(record: dict[str, Any]) -> None:
    """Count the Triton kernels that this process compiles (with their seconds), and those read from a cache."""
    from triton import knobs

    record.update(num_compiled=0, compile_s=0.0, num_found=0)

    def listen(*, times: Any, cache_hit: bool, **_: Any) -> None:
        if cache_hit:
            record["num_found"] += 1
        else:
            record["num_compiled"] += 1
            record["compile_s"] += times.total / 1e6

    knobs.compilation.listener = listen


def main() -> int:
    """Run one start and append its record to a file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workload", required=True)
    parser.add_argument("--system", required=True, choices=SYSTEMS)
    parser.add_argument("--device", required=True)
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--texts", type=Path, required=True)
    parser.add_argument("--max-tokens", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--start", type=float, required=True)
    parser.add_argument("--record", type=Path, required=True)
    parser.add_argument("--profile", type=Path)
    options = parser.parse_args()
    marks = Marks(start=options.start, num_steps=options.steps, is_cuda=options.device == "cuda")
    record: dict[str, Any] = {}
    if options.device == "cuda" and importlib.util.find_spec("triton") is not None:
        count_compilations(record)
    if options.system == "unsloth":
        # Unsloth patches torch and transformers on import, so it must be imported first.
        import unsloth  # noqa: F401
    from benchmarks.ruler.workloads import WORKLOADS, WorkloadFiles

    run = SYSTEMS[options.system]
    files = WorkloadFiles(options.root, WORKLOADS[options.workload])
    if options.profile is None:
        run(files, options, marks)
    else:
        _profile(lambda: run(files, options, marks), options.profile)
    record.update(marks=marks.seconds, step_ends=marks.step_seconds(), phases=marks.phases)
    from benchmarks.ruler.cases import versions

    record["versions"] = versions()
    options.record.write_text(json.dumps(record), encoding="utf-8")
    return 0


def _profile(run: Callable[[], None], path: Path) -> None:
    """Write the profile of the calling thread to a text file, by cumulative and by own time."""
    import cProfile
    import pstats

    profile = cProfile.Profile()
    try:
        profile.runcall(run)
    finally:
        with path.open("w", encoding="utf-8") as file:
            stats = pstats.Stats(profile, stream=file)
            stats.sort_stats("cumulative").print_stats(220)
            stats.sort_stats("tottime").print_stats(60)


if __name__ == "__main__":
    sys.exit(main())
