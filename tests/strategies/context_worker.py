"""Compare the parts of packs on several ranks with whole packs on one: ``-m tests.strategies.context_worker <cases,
more, faults or gpu> <folder>``. Every rank computes the whole packs too; rank 0 writes the differences.
"""

import contextlib
import copy
import os
import sys
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

from lightning_fastft.activations.checkpointing import OffloadCheckpointing
from lightning_fastft.core.patcher import ModelPatcher
from lightning_fastft.packing import context as contexts
from lightning_fastft.packing.collate import collate
from lightning_fastft.packing.context import BatchContext
from lightning_fastft.patches import part_exchange
from lightning_fastft.patches.packed import install_packed_training
from tests.support.layer_pairs import LONGROPE, add_lora, fuse
from tests.support.packs import make_documents
from tests.support.tiny_models import build_tiny
from tests.support.truth import relative_error

# Packs of 32 tokens, padded where they are shorter; with two ranks they are cut at 16, with four at 8, 16 and 24. A
# document crosses the cut, ends there, fills the pack; a part has no label.
PACKS = ((7, 1, 12, 9, 2), (2, 1, 13, 1, 14, 1), (32,), (15, 2, 15))
ROTARY = {"rope_parameters": {**LONGROPE, "original_max_position_embeddings": 8}, "head_dim": 8}
DYNAMIC = {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}}
# Name -> family, overrides, what is done to the model. Llama has four query heads and two key/value heads.
CASES = {
    "llama, three key/value heads": (
        "llama",
        {"num_key_value_heads": 3, "num_attention_heads": 12, "hidden_size": 48},
        (),
    ),
    "llama, fused": ("llama", {}, ("fused",)),
    "llama, lora, fused, recompute": ("llama", {}, ("lora", "fused", "recompute")),
    "gemma2": ("gemma2", {}, ()),
    "gpt_oss": ("gpt_oss", {}, ()),
    "phi3 longrope, fused": ("phi3", ROTARY, ("fused",)),
}
MORE_CASES = {
    "llama": ("llama", {}, ()),
    "llama, recompute": ("llama", {}, ("recompute",)),
    "llama, lora": ("llama", {}, ("lora",)),
    "llama, lora, recompute": ("llama", {}, ("lora", "recompute")),
    "llama, one key/value head": ("llama", {"num_key_value_heads": 1}, ()),
    "llama, dynamic": ("llama", {**DYNAMIC, "max_position_embeddings": 8}, ()),
    "qwen3": ("qwen3", {"tie_word_embeddings": True}, ("fused", "recompute")),
    "gemma2, fused": ("gemma2", {}, ("fused",)),
    "gemma3, lora, fused": ("gemma3_text", {}, ("lora", "fused")),
    "gemma4": ("gemma4_shared", {}, ()),
    "gpt_oss, lora, fused, recompute": ("gpt_oss", {}, ("lora", "fused", "recompute")),
    "deepseek_v3": ("deepseek_v3", {}, ()),
    "ministral3": ("ministral3", {}, ("fused",)),
    "qwen3_moe": ("qwen3_moe", {}, ("fused",)),
}
# Flash attention with grouped heads, LoRA and sinks.
GPU_CASES = ("llama, three key/value heads", "llama, lora, fused, recompute", "gpt_oss")


def skip_the_last_label():
    """The last row of a part has no label: it is searched in the part alone."""
    real = contexts.find_labelled_rows
    return mock.patch.object(contexts, "find_labelled_rows", lambda label_T: real(label_T[:-1]))


def restart_positions():
    """The positions of every part start at 0."""
    real = BatchContext._join_whole

    def join(context):
        real(context)
        context.position_T = context.position_T - context.position_T[0]

    return mock.patch.object(BatchContext, "_join_whole", join)


def average_parts():
    """The gradients of parts are averaged, as if each part were a pack."""
    return mock.patch.object(part_exchange, "_loss_gradient", lambda d_total, part: d_total)


def tile_heads():
    """Key/value heads are repeated one after the other instead of each by itself."""
    return mock.patch.object(torch.Tensor, "repeat_interleave", lambda x, times, dim: x.repeat(1, times, 1))


FAULTS = (skip_the_last_label, restart_positions, average_parts, tile_heads)


def prepare(family, overrides, changes):
    """A tiny model in training mode with packed training."""
    model = build_tiny(family, **overrides).train()
    if "lora" in changes:
        model = add_lora(model, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])
    if "fused" in changes:
        fuse(model)
    policy = OffloadCheckpointing("recompute") if "recompute" in changes else None
    install_packed_training(model, ModelPatcher(), checkpointing=policy)
    return model


def packs_of(num_parts):
    documents = [make_documents(lengths, seed=number) for number, lengths in enumerate(PACKS)]
    for document in documents[3][:1]:
        # The first part has no label.
        document.labels[:] = -100
    num_items = sum(int((document.labels[1:] != -100).sum()) for pack in documents for document in pack)
    return [collate(pack, pad_to_multiple_of=num_parts, num_items=num_items) for pack in documents]


def run(model, batches):
    """Losses of some micro-batches, and the sum of their gradients."""
    model.zero_grad(set_to_none=True)
    losses = []
    for batch in batches:
        loss = model(**batch).loss
        loss.backward()
        losses.append(loss.detach())
    return torch.stack(losses), {
        name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None
    }


def compare(case, *, rank, num_parts, fault=contextlib.nullcontext, device="cpu", dtype=torch.float32):
    """Relative errors of losses, gradients and the numbers of an evaluation."""
    model = prepare(*case).to(device, dtype)
    whole_model = copy.deepcopy(model)
    packs = packs_of(num_parts)
    whole = [batch.to(device) for batch in packs]
    true_loss, true_gradients = run(whole_model, whole)
    with fault():
        parts = [batch.cut(rank, num_parts=num_parts, group=dist.group.WORLD).to(device) for batch in packs]
        loss, gradients = run(model, parts)
    for gradient in gradients.values():
        # As data parallelism does.
        dist.all_reduce(gradient)
        gradient /= num_parts
    errors = {name: relative_error(gradients[name], true_gradients[name]) for name in true_gradients}
    assert gradients.keys() == true_gradients.keys()
    with torch.no_grad():
        evaluated = torch.stack([model(**batch).loss for batch in parts])
    return {
        "loss": relative_error(loss, true_loss),
        "evaluation": relative_error(evaluated, true_loss),
        "gradients": max(errors.values()),
        "worst": max(errors, key=errors.get),
        "reads": all(batch.context.num_reads > 0 for batch in parts),
    }


def main(cases, folder):
    rank, num_parts = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if cases == "gpu":
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if cases == "gpu" else "gloo")
    sizes = {"rank": rank, "num_parts": num_parts}
    if cases == "faults":
        case = CASES["llama, three key/value heads"]
        found = {fault.__name__: compare(case, **sizes, fault=fault) for fault in FAULTS}
    elif cases == "gpu":
        found = {
            (name, dtype): compare(CASES[name], **sizes, device=f"cuda:{rank}", dtype=getattr(torch, dtype))
            for name in GPU_CASES
            for dtype in ("float32", "bfloat16")
        }
    else:
        chosen = CASES if cases == "cases" else {**CASES, **MORE_CASES}
        found = {name: compare(case, **sizes) for name, case in chosen.items()}
    if rank == 0:
        torch.save(found, Path(folder) / "found.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
