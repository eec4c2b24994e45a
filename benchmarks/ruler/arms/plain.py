"""The plain arm: transformers and PEFT as users have them, with fp32 adapters, Hugging Face's varlen attention and
loss, 8-bit AdamW and a short loop.

Modes: "recompute" (gradient checkpointing), "keep"; with "+liger" Liger's norms, rotary, SwiGLU and fused loss; with
"+padded" documents in padded rows instead of a pack, for models whose layers would carry state from one document of a
pack into the next; with "+sdpa" transformers' SDPA attention, for heads that flash attention does not take (with
"+padded" only: it would build a mask of the whole pack); with "+torch" linear attention in plain PyTorch instead of
fla-core's kernels. Liger patches the modelling module, so its modes come last in a process.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

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
from benchmarks.ruler.fla_gradient import install_fla_gradient
from benchmarks.ruler.judge import load_start
from benchmarks.ruler.workloads import IGNORED_LABEL, Pack, WorkloadFiles, lora_config

MODES = ("recompute", "keep", "recompute+liger", "keep+liger", "recompute+padded", "keep+padded")


def run(
    cases: list[Case], *, files: WorkloadFiles, log: CaseLog, device: str, recorder: type[CaseRecorder] = CaseRecorder
) -> None:
    """Run the cases on one loaded model; the first case of each label share writes the reference gradients.

    Args:
        cases: Cases of one workload.
        files: The folder of the workload.
        log: Takes the records.
        device: "cuda" or "cpu".
        recorder: Class that records a case.
    """
    is_cuda = device == "cuda"
    packs = files.read_packs()
    if any("torch" in case.mode.split("+") for case in cases):
        # transformers uses fla-core if it can be imported.
        sys.modules["fla"] = None  # type: ignore[assignment]
    elif files.workload.is_hybrid:
        install_fla_gradient()
    model = load_model(files, device=device, attention="sdpa" if "sdpa" in cases[0].mode.split("+") else None)
    start = files.read_trained()
    has_liger = False
    seen_shares: set[float] = set()
    for case in sorted(cases, key=lambda case: "liger" in case.mode):
        # Liger's loss computes the reference only if requested: "plain:reference+liger".
        has_own_loss = "liger" not in case.mode or case.num_steps == 0
        is_reference = case.label_share not in seen_shares and has_own_loss and not case.is_judged
        seen_shares.add(case.label_share)
        one = recorder(case, files=files, packs=packs, is_cuda=is_cuda, is_reference=is_reference)
        wants_liger, apply_liger = "liger" in case.mode, not has_liger
        has_liger = has_liger or wants_liger

        def body(recorder: CaseRecorder, *, apply: bool = wants_liger and apply_liger) -> None:
            if apply:
                _apply_liger(model)
            load_start(model, start)
            set_checkpointing(model, enabled=recorder.case.mode.startswith("recompute"))
            is_padded = "padded" in recorder.case.mode.split("+")
            loop = train_padded if is_padded else train
            loop(model, recorder, device=device, learning_rate=learning_rate_of(files.workload))

        run_case(one, body, log=log)
        model.zero_grad(set_to_none=True)


def load_model(files: WorkloadFiles, *, device: str, attention: str | None = None) -> Any:
    """Load the model as its documentation shows, with PEFT's adapters unless all weights are trained.

    Args:
        files: The workload.
        device: "cuda" or "cpu".
        attention: Name of transformers' attention; None for flash attention on a GPU and SDPA on a CPU.
    """
    from peft import get_peft_model
    from transformers import AutoModelForCausalLM

    is_cuda = device == "cuda"
    quantization = quantization_config(files.workload, is_cuda=is_cuda)
    model = AutoModelForCausalLM.from_pretrained(
        files.model,
        dtype=base_dtype(is_cuda=is_cuda),
        attn_implementation=attention or ("flash_attention_2" if is_cuda else "sdpa"),
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
    """Return the model under PEFT's wrapper, or the model itself if it has no wrapper."""
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


def train_padded(model: Any, recorder: CaseRecorder, *, device: str, learning_rate: float = LEARNING_RATE) -> None:
    """Train on the recorder's packs as padded rows of about equal length, gradients accumulated over a pack."""
    is_cuda = device == "cuda"
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = make_optimizer(parameters, name=recorder.case.optimizer, is_cuda=is_cuda, learning_rate=learning_rate)
    for step in range(recorder.num_total):
        batch = pad_pack(recorder.pack_at(step), share=recorder.case.label_share)
        recorder.batch_arrived(batch)
        # The first token of a row is never a target.
        num_items = int((batch["labels"][:, 1:] != IGNORED_LABEL).sum())
        losses = []
        for rows in equal_rows(batch, max_tokens=recorder.pack_at(step).input_id_T.size):
            on_device = {name: value.to(device, non_blocking=True) for name, value in rows.items()}
            loss = model(**on_device, num_items_in_batch=num_items).loss
            loss.backward()
            losses.append(loss.detach())
        recorder.backward_done(model, loss=torch.stack(losses).sum())
        torch.nn.utils.clip_grad_norm_(parameters, MAX_GRADIENT_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if recorder.step_done():
            break


def pad_pack(pack: Pack, *, share: float) -> dict[str, torch.Tensor]:
    """Return the documents of a pack as rows padded at the right, the longest first.

    Example:
        >>> import numpy as np
        >>> pad_pack(Pack(input_id_T=np.arange(4, 9), lengths=[2, 3]), share=1.0)["input_ids"].tolist()
        [[6, 7, 8], [4, 5, 0]]
    """
    documents = sorted(pack.documents(share), key=lambda document: -len(document[0]))
    ids = [torch.from_numpy(ids) for ids, _ in documents]
    return {
        "input_ids": pad_sequence(ids, batch_first=True),
        "labels": pad_sequence(
            [torch.from_numpy(labels) for _, labels in documents], batch_first=True, padding_value=IGNORED_LABEL
        ),
        "attention_mask": pad_sequence([torch.ones_like(row) for row in ids], batch_first=True),
    }


def equal_rows(batch: dict[str, torch.Tensor], *, max_tokens: int) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the rows of a padded batch, the longest first, in groups of at most max_tokens with their padding.

    Example:
        >>> batch = {"attention_mask": torch.tensor([[1, 1, 1], [1, 0, 0], [1, 0, 0]])}
        >>> [group["attention_mask"].tolist() for group in equal_rows(batch, max_tokens=4)]
        [[[1, 1, 1]], [[1], [1]]]
    """
    lengths = batch["attention_mask"].sum(dim=1).tolist()
    begin = 0
    while begin < len(lengths):
        longest = lengths[begin]
        end = begin + max(1, max_tokens // longest)
        yield {name: value[begin:end, :longest] for name, value in batch.items()}
        begin = end


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
