"""The TRL arm: SFTTrainer with packing, Hugging Face's varlen attention and Liger's layers, on a PEFT model, or on all
weights.

Modes: "recompute+liger", "keep+liger", and the same without "+liger".
"""

from __future__ import annotations

from benchmarks.ruler.arms import sft
from benchmarks.ruler.cases import Case, CaseLog, CaseRecorder, base_dtype, quantization_config
from benchmarks.ruler.workloads import WorkloadFiles, lora_config

MODES = ("recompute+liger", "keep+liger", "recompute", "keep")


def run(
    cases: list[Case], *, files: WorkloadFiles, log: CaseLog, device: str, recorder: type[CaseRecorder] = CaseRecorder
) -> None:
    """Run cases of one mode on one trainer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    is_cuda = device == "cuda"
    mode = cases[0].mode
    quantization = quantization_config(files.workload, is_cuda=is_cuda)
    model = AutoModelForCausalLM.from_pretrained(
        files.model,
        dtype=base_dtype(is_cuda=is_cuda),
        attn_implementation="flash_attention_2" if is_cuda else "sdpa",
        device_map={"": 0} if is_cuda else {"": "cpu"},
        **({"quantization_config": quantization} if quantization else {}),
    )
    trainer = SFTTrainer(
        model=model,
        processing_class=AutoTokenizer.from_pretrained(files.model),
        train_dataset=sft.seed_documents(),
        peft_config=lora_config(files.workload),
        args=SFTConfig(
            **sft.training_arguments(cases[0], files=files, is_cuda=is_cuda),
            gradient_checkpointing=mode.startswith("recompute"),
            use_liger_kernel="liger" in mode,
        ),
    )
    sft.run_cases(cases, trainer=trainer, files=files, log=log, is_cuda=is_cuda, recorder=recorder)
