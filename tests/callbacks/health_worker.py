"""Train under FSDP2 with GradientHealth on two ranks: ``-m tests.callbacks.health_worker <folder>``; each rank writes
what every case ended with to ``<folder>/<rank>.json``.
"""

import json
import os
import sys
from pathlib import Path

import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.utils.data import DataLoader

from lightning_fastft.callbacks.gradient_health import GradientHealth
from lightning_fastft.callbacks.packed_training import PackedTraining
from lightning_fastft.core.errors import NotTrainingError
from lightning_fastft.strategies.fsdp2 import FastFTFSDPStrategy
from lightning_fastft.training.fine_tuner import FineTuner
from tests.support.rank_exit import leave
from tests.support.token_weighting_worker import CONFIG, micro_batches
from tests.support.training_parts import quiet_trainer

LORA = {"r": 2}
NUM_STEPS = 4
CASES = {
    "every weight": {},
    # The root holds its weights whole after the sanity check.
    "every weight, validated": {"is_validated": True},
    "every weight, validated, Lightning's strategy": {"is_validated": True, "is_lightnings": True},
    "sharded adapters": {"lora": LORA, "adapters": "shard"},
    "whole adapters": {"lora": LORA, "adapters": "replicate"},
    "too small a rate": {"dtype": "bfloat16", "master_dtype": "bfloat16", "learning_rate": 1e-9},
    # Its gradient is zero on the rank that holds its first half.
    "half a weight": {"half": True},
    "a broken gradient on one rank": {"broken": True},
}


class HalfFrozen(FineTuner):
    """Only the second half of a weight gets a gradient, or its gradient is NaN there."""

    value = 0.0

    def on_after_backward(self):
        weight = self.model.model.layers[0].mlp.down_proj.weight
        if torch.distributed.get_rank() == 0:
            weight.grad._local_tensor.fill_(self.value)


def run(
    folder, name, *, adapters="replicate", half=False, broken=False, is_validated=False, is_lightnings=False, **options
):
    options = {"dtype": "float32", "learning_rate": 1e-2, **options}
    kind = HalfFrozen if half or broken else FineTuner
    module = kind(dict(CONFIG), init="random", warmup_share=0.0, scheduler="constant", **options)
    if broken:
        module.value = float("nan")
    rank = int(os.environ["RANK"])
    batches = micro_batches(accumulate=1, world_size=2, rank=rank) * NUM_STEPS
    loader = DataLoader(batches, batch_size=None, collate_fn=lambda batch: batch)
    health = GradientHealth(num_steps=NUM_STEPS)
    strategy, callbacks = FastFTFSDPStrategy(adapters=adapters), [health]
    if is_lightnings:
        strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
        callbacks = [PackedTraining(), health]
    trainer = quiet_trainer(folder, strategy=strategy, devices=2, max_steps=NUM_STEPS, callbacks=callbacks)
    try:
        trainer.fit(module, loader, loader if is_validated else None)
    except NotTrainingError as error:
        return str(error)
    return health.status().reason


def main(folder):
    found = {name: run(folder, name, **options) for name, options in CASES.items()}
    (Path(folder) / f"{os.environ['RANK']}.json").write_text(json.dumps(found))
    leave()


if __name__ == "__main__":
    main(sys.argv[1])
