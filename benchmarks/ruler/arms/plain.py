"""The plain arm: transformers and PEFT as a user has them - fp32 adapters, Hugging Face's varlen attention and loss,
8-bit AdamW, a short loop.

Modes: "recompute" (gradient checkpointing), "keep"; with "+liger" Liger's norms, rotary, SwiGLU and fused loss. Liger
    patches the modelling module,
so its modes come last in a process.
"""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.ruler.cases import (
    LEARNING_RATE,
    MAX_GRADIENT_NORM,
    Case,
    CaseLog,
    CaseRecorder,
    base_dtype,
    learning_rate_of,
    make_optimizer,
    quantization_config,
    run_case,
)
from benchmarks.ruler.judge import load_start
from benchmarks.ruler.workloads import WorkloadFiles, lora_config

MODES = ("recompute", "keep", "recompute+liger", "keep+liger")


def run(cases: list[Case], *, files: WorkloadFiles, log: CaseLog, device: str) -> None:
    """Run the cases on one loaded model; the first case of each label share leaves the reference gradients.

    Args:
        cases: All of one workload.
        files: Its folder.
        log: Where records go.
        device: "cuda" or "cpu".
    """
    is_cuda = device == "cuda"
    packs = files.read_packs()
    model = load_model(files, device=device)
    start = files.read_trained()
    has_liger = False
    seen_shares: set[float] = set()
    for case in sorted(cases, key=lambda case: "liger" in case.mode):
        is_reference = case.label_share not in seen_shares and "liger" not in case.mode and not case.is_judged
        seen_shares.add(case.label_share)
        recorder = CaseRecorder(case, files=files, packs=packs, is_cuda=is_cuda, is_reference=is_reference)
        wants_liger, apply_liger = "liger" in case.mode, not has_liger
        has_liger = has_liger or wants_liger

        def body(recorder: CaseRecorder, *, apply: bool = wants_liger and apply_liger) -> None:
            if apply:
                _apply_liger(model)
            load_start(model, start)
            set_checkpointing(model, enabled=recorder.case.mode.startswith("recompute"))
            train(model, recorder, device=device, learning_rate=learning_rate_of(files.workload))

        run_case(recorder, body, log=log)
        model.zero_grad(set_to_none=True)


def load_model(files: WorkloadFiles, *, device: str) -> Any:
    """Load the model the way its documentation does, with PEFT's adapters unless all weights are trained."""
    from peft import get_peft_model
    from transformers import AutoModelForCausalLM

    is_cuda = device == "cuda"
    quantization = quantization_config(files.workload, is_cuda=is_cuda)
    model = AutoModelForCausalLM.from_pretrained(
        files.model,
        dtype=base_dtype(is_cuda=is_cuda),
        attn_implementation="flash_attention_2" if is_cuda else "sdpa",
        device_map={"": 0} if is_cuda else {"": "cpu"},
        **({"quantization_config": quantization} if quantization else {}),
    )
    model.config.use_cache = False
    lora = lora_config(files.workload)
    return (model if lora is None else get_peft_model(model, lora)).train()


def set_checkpointing(model: Any, *, enabled: bool) -> None:
    """Switch transformers' own activation checkpointing on or off."""
    base = _base_of(model)
    if enabled:
        base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        base.enable_input_require_grads()
    else:
        base.gradient_checkpointing_disable()
        base.disable_input_require_grads()


def _apply_liger(model: Any) -> None:
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    base = _base_of(model)
    MODEL_TYPE_TO_APPLY_LIGER_FN[base.config.model_type](model=base)


def _base_of(model: Any) -> Any:
    """Return the model under PEFT's wrapper, or the model itself where there is none."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def train(model: Any, recorder: CaseRecorder, *, device: str, learning_rate: float = LEARNING_RATE) -> None:
    """Train on the recorder's packs, collated as transformers documents it for flash attention."""
    from transformers import DataCollatorWithFlattening

    collator = DataCollatorWithFlattening()
    share = recorder.case.label_share
    # Collated before the loop, as workers of a data loader would: the collator builds Python lists, which must not
    # count as training time.
    rows = [
        collator(
            [
                {"input_ids": ids.tolist(), "labels": labels.tolist()}
                for ids, labels in recorder.pack_at(step).documents(share)
            ]
        )
        for step in range(recorder.num_total)
    ]
    train_rows(model, rows, recorder, device=device, learning_rate=learning_rate)


def train_rows(
    model: Any, rows: list[Any], recorder: CaseRecorder, *, device: str, learning_rate: float = LEARNING_RATE
) -> None:
    """Train on collated batches in the loop that transformers documents: loss of the model, clipping, step."""
    is_cuda = device == "cuda"
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = make_optimizer(parameters, name=recorder.case.optimizer, is_cuda=is_cuda, learning_rate=learning_rate)
    for batch in torch.utils.data.DataLoader(rows, batch_size=None, pin_memory=is_cuda):  # type: ignore[arg-type]
        recorder.batch_arrived(batch)
        batch = {key: value.to(device, non_blocking=True) for key, value in batch.items()}
        loss = model(**batch).loss
        loss.backward()
        recorder.backward_done(model, loss=loss.detach())
        torch.nn.utils.clip_grad_norm_(parameters, MAX_GRADIENT_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if recorder.step_done():
            break
