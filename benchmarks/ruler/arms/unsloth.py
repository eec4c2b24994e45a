"""The Unsloth arm, through its public functions only: FastLanguageModel and the SFTTrainer it prepares.

Modes: "unsloth" (its default checkpointing with offload), "off" (no checkpointing), "skip-auto" and "skip-max" (its
default, with layers skipped by its planner). Full fine-tuning follows its documentation, full_finetuning=True without
get_peft_model, and has the first two modes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

# Unsloth asks to be imported before everything it patches, and prints a warning otherwise.
import unsloth  # noqa: F401
from unsloth import FastLanguageModel

from benchmarks.ruler.arms import sft
from benchmarks.ruler.cases import Case, CaseLog, CaseRecorder, base_dtype
from benchmarks.ruler.fla_gradient import install_fla_gradient
from benchmarks.ruler.workloads import TARGET_MODULES, Workload, WorkloadFiles

MODES: dict[str, dict[str, Any]] = {
    "unsloth": {"use_gradient_checkpointing": "unsloth"},
    "off": {"use_gradient_checkpointing": False},
    "skip-auto": {"use_gradient_checkpointing": "unsloth", "checkpoint_skip_layers": "auto"},
    "skip-max": {"use_gradient_checkpointing": "unsloth", "checkpoint_skip_layers": "max"},
}


def add_adapters(model: Any, workload: Workload, *, target_modules: Sequence[str], mode: Mapping[str, Any]) -> Any:
    """Return the model with adapters as Unsloth's documentation adds them; mode is one of MODES."""
    return FastLanguageModel.get_peft_model(
        model,
        r=workload.lora_rank,
        lora_alpha=workload.lora_alpha,
        lora_dropout=0,
        bias="none",
        target_modules=list(target_modules),
        random_state=3407,
        max_seq_length=workload.max_tokens,
        **mode,
    )


def run(
    cases: list[Case], *, files: WorkloadFiles, log: CaseLog, device: str, recorder: type[CaseRecorder] = CaseRecorder
) -> None:
    """Run cases of one mode on one trainer."""
    from trl import SFTConfig, SFTTrainer

    workload, is_cuda, mode = files.workload, device == "cuda", MODES[cases[0].mode]
    if workload.is_full and "checkpoint_skip_layers" in mode:
        raise ValueError(
            f"{cases[0].mode!r} leaves layers out by an option of get_peft_model, which is not called where all "
            "weights are trained."
        )
    if workload.is_hybrid:
        install_fla_gradient()
    model, tokenizer = FastLanguageModel.from_pretrained(
        str(files.model),
        max_seq_length=workload.max_tokens,
        load_in_4bit=workload.quantization is not None,
        dtype=base_dtype(is_cuda=is_cuda),
        local_files_only=True,
        **({"full_finetuning": True, **mode} if workload.is_full else {}),
    )
    arguments = sft.training_arguments(cases[0], files=files, is_cuda=is_cuda)
    if workload.is_full:
        if not mode["use_gradient_checkpointing"]:
            # TRL's own default, which would switch it on again when training begins.
            arguments["gradient_checkpointing"] = False
    else:
        model = add_adapters(model, workload, target_modules=TARGET_MODULES, mode=mode)
    trainer = SFTTrainer(
        model=model,
        processing_class=tokenizer,
        train_dataset=sft.seed_documents(),
        args=SFTConfig(**arguments, dataset_text_field="text", dataset_num_proc=1),
    )
    sft.run_cases(cases, trainer=trainer, files=files, log=log, is_cuda=is_cuda, recorder=recorder)
