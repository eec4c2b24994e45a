"""Batches of documents padded to the longest, and ours on the same documents: the processes of ``benchmarks.published
traditional``.

Recorder, gradient check and clock are the ruler's (benchmarks/ruler/cases.py); the model is a 7B Llama with random
weights.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.published_arms import BriefRecorder, PublishedFiles, fit
from benchmarks.ruler import judge as judging
from benchmarks.ruler.arms import ours, plain
from benchmarks.ruler.cases import Case, CaseLog, CaseRecorder, base_dtype, run_case
from benchmarks.ruler.plans import least_warmup, parse_mode
from benchmarks.ruler.workloads import FIRST_WORD, TOKENIZER_WORDS, WORKLOADS, Pack, Workload, lora_config, read_lengths
from lightning_fastft.strategies.single_device import FastFTStrategy
from lightning_fastft.training.fine_tuner import FineTuner

_LLAMA_7B = {
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}
_TINY_LLAMA = {**WORKLOADS["tiny"].model_config, "num_key_value_heads": 4}


class Padding(NamedTuple):
    """Batches of the padded loop.

    Args:
        batch_size: Documents in a batch.
        longest: Tokens after which a document is cut, as in trainers.
        pack_tokens: Tokens of a pack if ours fills packs.
    """

    batch_size: int
    longest: int
    pack_tokens: int


# A 7B Llama, and a small one for CPU runs. They are not in the ruler, whose workloads are packed for every system.
TRADITIONAL = {
    "llama-7b-lora": (Workload("llama-7b-lora", "llama", _LLAMA_7B, None), Padding(8, 2048, 8192)),
    "tiny-llama": (
        Workload(
            "tiny-llama",
            "llama",
            _TINY_LLAMA,
            None,
            max_tokens=256,
            length_divisor=16,
            num_packs=8,
            lora_rank=4,
            lora_alpha=4,
        ),
        Padding(4, 128, 256),
    ),
}


def read_documents(workload: Workload, *, longest: int) -> list[np.ndarray]:
    """Return token ids of the stored list's documents, cut as in trainers."""
    lengths = [min(longest, max(2, length // workload.length_divisor)) for length in read_lengths()["lengths"]]
    highest = min(int(workload.model_config["vocab_size"]), TOKENIZER_WORDS)
    return [
        np.random.default_rng([17, number]).integers(FIRST_WORD, highest, size=length, dtype=np.int64)
        for number, length in enumerate(lengths)
    ]


def group_documents(documents: Sequence[np.ndarray], padding: Padding, *, is_filled: bool) -> Iterator[Pack]:
    """Yield the documents of each step in order: batches of equal size, or packs with as many tokens as fit.

    The first step, which is judged, has the documents of the first batch in both cases.
    """
    group: list[np.ndarray] = []
    is_first = True
    for document in documents:
        num_tokens = sum(len(one) for one in group)
        is_full = (
            num_tokens + len(document) > padding.pack_tokens
            if is_filled and not is_first
            else len(group) == padding.batch_size
        )
        if is_full:
            yield Pack(input_id_T=np.concatenate(group), lengths=[len(one) for one in group])
            group, is_first = [], False
        group.append(document)


def pad_documents(pack: Pack, tokenizer: Any) -> dict[str, torch.Tensor]:
    """Return the documents of a pack as a padded batch by transformers' DataCollatorWithPadding; padding is not
    trained.
    """
    from transformers import DataCollatorWithPadding

    batch = DataCollatorWithPadding(tokenizer)(
        [{"input_ids": pack.input_id_T[start:end].tolist()} for start, end in pack.borders()]
    )
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    return {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"], "labels": labels}


def run_padded(cases: Sequence[Case], *, files: PublishedFiles, log: CaseLog, device: str) -> None:
    """Run the loop of transformers and PEFT on padded batches: fp32 adapters on bf16 weights, SDPA, no Liger;
    "padded+recompute" or "padded+keep".
    """
    from peft import get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    is_cuda, adapter = device == "cuda", files.read_adapter()
    workload, padding = TRADITIONAL[files.workload.name]
    groups = list(group_documents(read_documents(workload, longest=padding.longest), padding, is_filled=False))
    tokenizer = AutoTokenizer.from_pretrained(files.model)
    model = AutoModelForCausalLM.from_pretrained(
        files.model,
        dtype=base_dtype(is_cuda=is_cuda),
        attn_implementation="sdpa",
        device_map={"": 0 if is_cuda else "cpu"},
    )
    model.config.use_cache = False
    model = get_peft_model(model, lora_config(workload)).train()
    for case in cases:
        name = case.mode.partition("+")[2]
        if name not in ("recompute", "keep"):
            raise ValueError(f"The padded loop runs as padded+recompute or padded+keep; got {case.mode!r}.")
        recorder = BriefRecorder(
            case,
            files=files,
            packs=groups,
            is_cuda=is_cuda,
            is_reference=not files.reference(case.label_share).exists(),
        )

        def body(recorder: CaseRecorder, *, is_recomputed: bool = name == "recompute") -> None:
            judging.load_adapter(model, adapter)
            plain.set_checkpointing(model, enabled=is_recomputed)
            _train_padded(
                model, recorder, make_batch=functools.partial(pad_documents, tokenizer=tokenizer), device=device
            )

        run_case(recorder, body, log=log)
        model.zero_grad(set_to_none=True)


def _train_padded(
    model: Any, recorder: CaseRecorder, *, make_batch: Callable[[Pack], dict[str, torch.Tensor]], device: str
) -> None:
    # Collated before the loop, as by workers of a data loader.
    rows = [make_batch(recorder.pack_at(step)) for step in range(recorder.num_total)]
    real = sum(int(row["attention_mask"].sum()) for row in rows)
    recorder.record["real_share"] = real / sum(row["input_ids"].numel() for row in rows)
    plain.train_rows(model, rows, recorder, device=device)


def run_packed(cases: Sequence[Case], *, files: PublishedFiles, log: CaseLog, device: str) -> None:
    """Run ours on the documents of the padded loop: each batch as one pack, or with "@full" packs filled with the
    documents in their order.
    """
    is_cuda, adapter = device == "cuda", files.read_adapter()
    workload, padding = TRADITIONAL[files.workload.name]
    documents = read_documents(workload, longest=padding.longest)
    held: dict[str, FineTuner] = {}

    def body(recorder: CaseRecorder) -> None:
        if not held:
            gc.collect()
            held["tuner"] = ours.make_tuner(files, optimizer=recorder.case.optimizer, is_cuda=is_cuda)
        mode = parse_mode(recorder.case.mode.partition("@")[0])
        measure = ours.MeasuringCallback(recorder, adapter=adapter, mode=mode, is_cuda=is_cuda)
        fit(
            held["tuner"],
            recorder,
            measure,
            strategy=FastFTStrategy(activations=mode.checkpointing),
            callbacks=mode.callbacks(),
            is_cuda=is_cuda,
        )
        held["tuner"].zero_grad(set_to_none=True)

    for case in cases:
        case = replace(case, num_warmup=max(case.num_warmup, least_warmup(case.mode)))
        groups = list(group_documents(documents, padding, is_filled=case.mode.endswith("@full")))
        recorder = BriefRecorder(case, files=files, packs=groups, is_cuda=is_cuda)
        if "error" in run_case(recorder, body, log=log):
            # Do not reuse the state that a failed fit left.
            held.clear()
