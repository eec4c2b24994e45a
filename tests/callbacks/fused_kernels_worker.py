"""Train tiny models with FusedKernels under DDP and FSDP2; run by torchrun on two ranks: ``-m
tests.callbacks.fused_kernels_worker <folder>``.
"""

import functools
import os
import sys
from pathlib import Path
from unittest import mock

import torch
from lightning.pytorch import seed_everything
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

from lightning_fastft.activations.checkpointing import OffloadCheckpointing
from lightning_fastft.callbacks.fused_kernels import FusedKernels
from lightning_fastft.graphs.layer_graphs import LayerGraphs
from lightning_fastft.strategies.registry import register_strategies
from tests.graphs.test_layer_graphs import CPU, Repeating
from tests.strategies.strategy_worker import STRATEGIES, fit, make_tuner, trained_state
from tests.support.rank_exit import leave

CASES = [("ddp", "lora", "keep"), ("ddp", "full", "recompute"), ("fsdp", "lora", "recompute"), ("fsdp", "full", "keep")]
BFLOAT16 = [("ddp", "lora"), ("fsdp", "lora")]
# From recordings: adapters, every weight, and with the options of DistributedDataParallel. Packs of two lengths, each
# four times.
RECORDED = [
    ("lora", "keep", ()),
    ("full", "recompute", ()),
    ("lora", "keep", (("gradient_as_bucket_view", False),)),
    ("lora", "keep", (("static_graph", True),)),
]
NUM_RECORDED_STEPS = 4


def train(strategy_name, kind, policy, *, rank=0, folder=None, dtype="float32", is_fused=True, **options):
    """The trained weights of one case, what the table said, and how often an attention layer ran itself."""
    seed_everything(5, verbose=False)
    module, callback = make_tuner(kind, dtype=dtype), FusedKernels()
    own, real = [], Qwen3Attention.forward

    def counted(*args, **options):
        own.append(True)
        return real(*args, **options)

    with mock.patch.object(Qwen3Attention, "forward", counted):
        strategy = STRATEGIES[strategy_name](activations=OffloadCheckpointing(policy))
        fit(module, strategy=strategy, rank=rank, folder=folder, callbacks=[callback] if is_fused else [], **options)
    return {"state": trained_state(module), "status": [tuple(status) for status in callback.status()], "own": len(own)}


def train_recorded(kind, policy, options, *, rank, folder):
    """The trained weights of layers that DDP's ranks repeat from recordings, and what the table said."""
    seed_everything(5, verbose=False)
    module, callback = make_tuner(kind), FusedKernels(cuda_graphs=True)
    strategy = STRATEGIES["ddp"](activations=OffloadCheckpointing(policy), **dict(options))
    with mock.patch(
        "lightning_fastft.graphs.install.LayerGraphs",
        functools.partial(LayerGraphs, recorder=Repeating(), backends=CPU),
    ):
        fit(module, strategy=strategy, rank=rank, folder=folder, max_steps=NUM_RECORDED_STEPS, callbacks=[callback])
    return {
        "state": trained_state(module),
        "replays": callback._graphs[0].num_replays,
        "status": tuple(callback.status()[-1]),
    }


def main(folder):
    register_strategies()
    rank = int(os.environ["RANK"])
    found = {case: train(*case, rank=rank, folder=folder) for case in CASES}
    for strategy, kind in BFLOAT16:
        found[strategy, kind, "bfloat16"] = train(strategy, kind, "keep", rank=rank, folder=folder, dtype="bfloat16")
    for case in RECORDED:
        found[("recorded", *case)] = train_recorded(*case, rank=rank, folder=folder)
    if rank == 0:
        torch.save(found, Path(folder) / "found.pt")


if __name__ == "__main__":
    main(sys.argv[1])
    leave()
