"""The Unsloth arm, through public functions only: FastLanguageModel and the SFTTrainer that it prepares.

Modes: "unsloth" (its default checkpointing with offload), "off" (no checkpointing), "skip-auto" and "skip-max" (its
default, with layers skipped by its planner), each with "+paddedN" for models that it never packs: length-grouped
batches of N documents, padded at the right (benchmarks/ruler/arms/padded.py). "+fp8" at the end of a mode loads the
base in fp8, load_in_fp8=True, in place of NF4 or bf16. Full fine-tuning follows its documentation,
full_finetuning=True without get_peft_model, and has the first two modes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

# Unsloth must be imported before the libraries that it patches, or it prints a warning.
import unsloth  # noqa: F401
from unsloth import FastLanguageModel

from benchmarks.ruler.arms import sft
from benchmarks.ruler.arms.padded import parse_unsloth_mode, run_padded_cases
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

    name, batch_size = parse_unsloth_mode(cases[0].mode.removesuffix("+fp8"))
    is_fp8 = cases[0].mode.endswith("+fp8")
    workload, is_cuda, mode = files.workload, device == "cuda", MODES[name]
    if workload.is_full and "checkpoint_skip_layers" in mode:
        raise ValueError(
            f"{cases[0].mode!r} leaves layers out by an option of get_peft_model, which is not called where all "
            "weights are trained."
        )
    if workload.is_full and is_fp8:
        raise ValueError(f"{cases[0].mode!r} holds frozen weights in fp8, and this workload trains all weights.")
    if workload.is_hybrid:
        install_fla_gradient()
    model, tokenizer = FastLanguageModel.from_pretrained(
        str(files.model),
        max_seq_length=workload.max_tokens,
        load_in_4bit=workload.quantization is not None and not is_fp8,
        dtype=base_dtype(is_cuda=is_cuda),
        local_files_only=True,
        **({"load_in_fp8": True} if is_fp8 else {}),
        **({"full_finetuning": True, **mode} if workload.is_full else {}),
    )
    arguments = {**sft.training_arguments(cases[0], files=files, is_cuda=is_cuda), "packing": not batch_size}
    if workload.is_full:
        if not mode["use_gradient_checkpointing"]:
            # TRL's own default, which would enable it again when training begins.
            arguments["gradient_checkpointing"] = False
    else:
        model = add_adapters(model, workload, target_modules=TARGET_MODULES, mode=mode)
    trainer = SFTTrainer(
        model=model,
        processing_class=tokenizer,
        train_dataset=sft.seed_documents(),
        args=SFTConfig(**arguments, dataset_text_field="text", dataset_num_proc=1),
    )
    given: dict[str, Any] = {"trainer": trainer, "files": files, "log": log, "is_cuda": is_cuda, "recorder": recorder}
    if batch_size:
        run_padded_cases(cases, batch_size=batch_size, **given)
    else:
        sft.run_cases(cases, **given)
