"""Train tiny models whose frozen weights FSDP2 gathers in e4m3, on two ranks: ``-m tests.callbacks.fp8_shards_worker
<part> <folder>``.

Parts: "cpu" (emulated products) and "gpu". Rank 0 writes what was found to ``<folder>/<part>.pt``.
"""

import gc
import os
import sys
from pathlib import Path
from unittest import mock

import lightning.pytorch as pl
import torch
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import Callback
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from lightning_fastft.activations.checkpointing import OffloadCheckpointing
from lightning_fastft.callbacks.fused_kernels import FusedKernels
from lightning_fastft.core.errors import UnsupportedModelError
from lightning_fastft.hf.sharding.state import gather_state, is_sharded
from lightning_fastft.strategies.registry import register_strategies
from tests.strategies.strategy_worker import (
    STRATEGIES,
    CollectiveCounter,
    batches_of,
    fit,
    make_tuner,
    trained_state,
)  # fmt: skip
from tests.support.rank_exit import leave

EMULATED = "fp8_reference"
# Grouped heads, so that q, k and v have different sizes; several products of layers that read the same rows.
SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "initializer_range": 0.1}
FAMILIES = {
    "qwen3": SIZES,
    "llama": {**SIZES, "model_type": "llama"},
    # 8 layers of 15 million weights.
    "wide": {
        **SIZES,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_attention_heads": 64,
        "num_hidden_layers": 8,
    },
}
# family, policy, whether units stay gathered, adapters.
CASES = [
    ("qwen3", "recompute", "sharded", "replicate"),
    ("qwen3", "keep", "resident", "replicate"),
    ("llama", "keep", "sharded", "shard"),
    ("llama", "recompute", "resident", "replicate"),
]
# Base compute of the fits of one model; None is a fit without FusedKernels.
REFITS = {"fused": ("model_dtype", "model_dtype", None, EMULATED), "unfused": (None, "model_dtype")}


class Watch(Callback):
    """Keeps losses, the gradients of the first window, and the bytes gathered in each micro-batch."""

    def __init__(self):
        self.gradients, self.losses, self.gathered_bytes = {}, [], []

    def on_before_backward(self, trainer, pl_module, loss):
        # Lightning has divided it.
        self.losses.append(loss.detach().cpu() * trainer.accumulate_grad_batches)

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        if self.gradients:
            return
        for name, each in pl_module.model.named_parameters():
            if each.grad is not None:
                whole = each.grad.full_tensor() if isinstance(each.grad, DTensor) else each.grad
                self.gradients[name] = whole.detach().cpu().clone()

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self._counter = CollectiveCounter().__enter__()

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self._counter.__exit__(None, None, None)
        self.gathered_bytes.append(self._counter.num_gathered_bytes)


def make(family, kind="lora", **options):
    seed_everything(5, verbose=False)
    return make_tuner(kind, config=FAMILIES[family], **options)


def run(module, *, policy="recompute", weights="sharded", adapters="replicate", base=EMULATED, name="fsdp", **options):
    """Train two windows; return weights, losses, gradients and what the table said."""
    fused, watch = [] if base is None else [FusedKernels(base_compute=base)], Watch()
    is_resident = weights == "resident" and name == "fsdp"
    activations = OffloadCheckpointing(policy, **({"weights": "resident"} if is_resident else {}))
    strategy = STRATEGIES[name](activations=activations, **({"adapters": adapters} if name == "fsdp" else {}))
    callbacks = [*fused, *options.pop("callbacks", []), watch]
    fit(module, strategy=strategy, callbacks=callbacks, **options)
    return {
        "state": trained_state(module),
        "gradients": watch.gradients,
        "losses": torch.stack(watch.losses),
        "status": [tuple(status) for each in fused for status in each.status() if status.name == "fp8 products"],
        "fused": [tuple(each.status()[0]) for each in fused],
        "gathered_bytes": watch.gathered_bytes,
    }


def whole_state(module):
    """All weights, on the host."""
    model = module.model
    state = gather_state(model, is_trained_only=False) if is_sharded(model) else model.state_dict()
    return {name: value.detach().clone() for name, value in state.items()}


def run_twice(family, **options):
    """Two fits of one model, the second without FusedKernels; its weights after each."""
    module = make(family)
    run(module, **options)
    first = whole_state(module)
    run(module, base=None, **options)
    return [first, whole_state(module)]


def validate(family, *, rank=0, folder=None, name="fsdp"):
    """The loss of a validation before any training, and the weights after it."""
    module, world_size = make(family), 1 if name == "one" else 2
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=world_size,
        strategy=STRATEGIES[name](),
        callbacks=[FusedKernels(base_compute=EMULATED)],
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        use_distributed_sampler=False,
    )
    loader = DataLoader(batches_of(rank, world_size=world_size, num_windows=1), batch_size=None)
    (found,) = trainer.validate(module, loader, verbose=False)
    return {"loss": found["val_loss"], "state": whole_state(module)}


class Inside(Callback):
    """Looks at the model while FSDP2 gathers it in e4m3."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step < 2 or hasattr(self, "state"):
            return
        self.state = whole_state(pl_module)
        ids = torch.ones(1, 4, dtype=torch.int64)
        try:
            with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
                pl_module.model(input_ids=ids)
        except UnsupportedModelError as error:
            self.refusal = str(error)


def look_inside(family, **options):
    module, inside = make(family), Inside()
    run(module, callbacks=[inside], **options)
    return {"state": inside.state, "refusal": inside.refusal, "after": whole_state(module)}


def cpu(rank, folder):
    options = {"rank": rank, "folder": folder}
    found = {}
    for family, policy, weights, adapters in CASES:
        chosen = {"policy": policy, "weights": weights, "adapters": adapters, **options}
        found[family, policy, weights, adapters] = run(make(family), **chosen)
    found["bfloat16"] = run(make("qwen3", dtype="bfloat16"), **options)
    found["model_dtype"] = run(make("qwen3"), base="model_dtype", **options)
    found["twice"] = run_twice("qwen3", **options)
    found["inside"] = look_inside("qwen3", **options)
    found["validated"] = validate("qwen3", **options)
    found["trained"] = run(make("qwen3", "full"), **options)
    with mock.patch("lightning_fastft.activations.budgets.auto_host_bytes", return_value=0):
        found["no host memory"] = run(make("qwen3"), **options)
    return found


def refit(rank, folder):
    """A short first fit of each of two models whose units stay gathered, and later ones with the weights before each."""
    found, options = {}, {"weights": "resident", "rank": rank, "folder": folder}
    for first, (base, *later) in REFITS.items():
        module = make("qwen3")
        found[first] = [run(module, base=base, max_steps=1, **options)]
        found[first] += [{"before": whole_state(module), **run(module, base=base, **options)} for base in later]
    return found


class Memory(Callback):
    """Keeps the device memory between two steps."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.num_bytes = torch.cuda.memory_allocated()


def gpu(rank, folder):
    options = {"rank": rank, "folder": folder, "accelerator": "gpu"}
    found = {}
    for weights in ("sharded", "resident"):
        found[weights] = run(make("qwen3", dtype="bfloat16"), base="fp8", weights=weights, **options)
    for base in ("model_dtype", "fp8"):
        memory = Memory()
        # The run before leaves cycles.
        gc.collect()
        num_bytes = torch.cuda.memory_allocated()
        module = make("wide", dtype="bfloat16")
        run(module, base=base, callbacks=[memory], **options)
        found["memory", base] = memory.num_bytes - num_bytes
        found["frozen", base] = frozen_state(module)
        del module
    return found


def frozen_state(module):
    return {name: value for name, value in whole_state(module).items() if "lora" not in name}


def main(part, folder):
    register_strategies()
    found = {"cpu": cpu, "gpu": gpu, "refit": refit}[part](int(os.environ["RANK"]), folder)
    if os.environ["RANK"] == "0":
        torch.save(found, Path(folder) / f"{part}.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
    leave()
