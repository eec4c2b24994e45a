"""One rank of our runs in benchmarks/multi_gpu.py: FineTuner, a strategy of ours and Lightning's Trainer."""

from __future__ import annotations

import argparse
import functools
import time
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer

from benchmarks.multi_gpu_steps import (
    CONTEXT,
    EXPERTS,
    FULL_LEARNING_RATE,
    LORA_LEARNING_RATE,
    StepLog,
    find_rank,
    make_share,
    make_workload,
    new_record,
)
from benchmarks.ruler.arms.ours import make_trainer
from benchmarks.ruler.cases import CaseLog
from benchmarks.ruler.measure import peak_memory_gib
from benchmarks.ruler.plans import describe_plan, parse_mode
from benchmarks.ruler.workloads import WORKLOADS, Workload, WorkloadFiles, lora_config
from lightning_fastft.callbacks.bincount_router import BincountRouter
from lightning_fastft.strategies.ddp import FastFTDDPStrategy
from lightning_fastft.strategies.fsdp2 import FastFTFSDPStrategy
from lightning_fastft.strategies.single_device import FastFTStrategy
from lightning_fastft.training.fine_tuner import FineTuner
from lightning_fastft.training.optimizer import FusedAdamW

STRATEGIES = {
    "one": FastFTStrategy,
    "ddp": FastFTDDPStrategy,
    "fsdp": FastFTFSDPStrategy,
    # All ranks share each pack.
    CONTEXT: FastFTDDPStrategy,
    # Ranks own the experts in shares.
    EXPERTS: FastFTFSDPStrategy,
}


def run(options: argparse.Namespace) -> int:
    """Train as one rank; rank 0 writes the record."""
    is_cuda = options.device == "cuda"
    rank, num_ranks = find_rank()
    num_sharing = num_ranks if options.strategy == CONTEXT else 1
    num_step_packs = num_ranks // num_sharing * options.accumulate
    workload = make_workload(options, num_step_packs=num_step_packs)
    torch.manual_seed(0)
    record = new_record(options, num_ranks=num_ranks, num_sharing=num_sharing)
    num_steps = options.warmup + options.steps
    tuner = make_tuner(workload, options)
    mode = parse_mode(options.mode)
    follow = RankCallback(record, is_cuda=is_cuda)
    trainer = make_trainer(
        make_strategy(options, mode.checkpointing, num_ranks=num_ranks, num_sharing=num_sharing),
        follow,
        max_steps=num_steps,
        is_cuda=is_cuda,
        devices=num_ranks,
        accumulate_grad_batches=options.accumulate,
        max_epochs=-1,
    )
    trainer.callbacks.extend(mode.callbacks(is_cuda=is_cuda))
    if workload.num_experts:
        trainer.callbacks.append(BincountRouter())
    share = make_share(
        workload, options, num_step_packs=num_step_packs, rank=rank // num_sharing, num_ranks=num_ranks // num_sharing
    )
    rows = range(num_steps * options.accumulate)
    loader = torch.utils.data.DataLoader(
        rows, batch_size=None, shuffle=False, collate_fn=share.batch, pin_memory=is_cuda
    )
    follow.begin = time.monotonic()
    trainer.fit(tuner, train_dataloaders=loader)
    if rank == 0:
        CaseLog(options.out / "raw.jsonl").write(record)
    return 0


def make_strategy(options: argparse.Namespace, checkpointing: Any, *, num_ranks: int, num_sharing: int) -> Any:
    """Return the strategy of the command line."""
    num_owners = options.expert_parallel or num_ranks
    sizes = {
        CONTEXT: {"context_parallel": num_sharing},
        # Ranks that share a set of experts share one copy of all weights.
        EXPERTS: {"expert_parallel": num_owners, "shard": num_owners},
    }
    kind = STRATEGIES[options.strategy]
    choices = {"adapters": options.adapters} if kind is FastFTFSDPStrategy else {}
    return kind(activations=checkpointing, **choices, **sizes.get(options.strategy, {}))


def make_tuner(workload: Workload, options: argparse.Namespace) -> FineTuner:
    """Return a FineTuner: every weight trained, or adapters on a frozen base, random or read from the built workload."""
    is_cuda = options.device == "cuda"
    model: Any = {"model_type": workload.model_type, **workload.model_config}
    choices: dict[str, Any] = {"init": "random"}
    if options.full:
        choices |= {
            "learning_rate": FULL_LEARNING_RATE,
            "master_dtype": options.master_dtype if is_cuda else "auto",
            "optimizer": functools.partial(FusedAdamW, optim_bits=options.optim_bits),
        }
    else:
        choices |= {"learning_rate": LORA_LEARNING_RATE, "quantization": workload.quantization}
        if options.root is None:
            lora = lora_config(workload)
            lora.init_lora_weights = False
            choices["lora"] = lora
        else:
            files = WorkloadFiles(options.root, WORKLOADS[options.workload])
            model = str(files.model)
            choices |= {"init": "pretrained", "adapter": str(files.adapter)}
    return FineTuner(
        model, dtype="bfloat16" if is_cuda else "float32", scheduler="constant", warmup_share=0.0, **choices
    )


class RankCallback(Callback):
    """Record the run of one rank.

    Args:
        record: Filled on every rank, written by rank 0.
        is_cuda: Whether steps run on a GPU.
    """

    def __init__(self, record: dict[str, Any], *, is_cuda: bool) -> None:
        self.begin = 0.0
        self._record, self._is_cuda = record, is_cuda
        self._log = StepLog(record, is_cuda=is_cuda)
        self._num_done = 0
        self._setup = 0.0

    def setup(self, trainer: Trainer, pl_module: FineTuner, stage: str) -> None:
        """Called when the devices are known and the model is not built."""
        self._setup = time.monotonic()

    def on_fit_start(self, trainer: Trainer, pl_module: FineTuner) -> None:
        """Called when the model is built."""
        if self._is_cuda:
            torch.cuda.synchronize()
        self._record["build_s"] = time.monotonic() - self._setup
        self._record["launch_s"] = self._setup - self.begin
        self._record["peak_gib_build"] = self._log.gather(peak_memory_gib(is_cuda=self._is_cuda)["allocated"])

    def on_train_start(self, trainer: Trainer, pl_module: FineTuner) -> None:
        """Record the statuses."""
        self._record["statuses"] = [
            f"{status.name}: {status.state}: {status.reason}" for status in trainer.strategy.statuses()
        ]
        self._record["num_trained"] = sum(
            parameter.numel() for parameter in pl_module.parameters() if parameter.requires_grad
        )

    def on_before_backward(self, trainer: Trainer, pl_module: FineTuner, loss: torch.Tensor) -> None:
        """Store the loss."""
        self._log.keep_loss(loss)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: FineTuner, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Record the end of an optimizer step."""
        if trainer.global_step > self._num_done:
            self._num_done = trainer.global_step
            self._log.step_done()

    def on_train_end(self, trainer: Trainer, pl_module: FineTuner) -> None:
        """Combine the records of all ranks, a collective."""
        self._log.finish()
        self._record["description"] = describe_plan(trainer.strategy.checkpointing)
