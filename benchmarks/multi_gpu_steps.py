"""The packs and measurements of every step, the same for each system of benchmarks/multi_gpu.py."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from benchmarks.ruler.measure import StepClock, peak_memory_gib, summarise_ms
from benchmarks.ruler.workloads import IGNORED_LABEL, WORKLOADS, Pack, Workload, make_packs
from lightning_fastft.packing.collate import Document, PackedBatch, collate
from lightning_fastft.packing.packs import Packs
from lightning_fastft.packing.step_plan import BALANCE_POOL_MICRO_BATCHES, StepPlan

CONTEXT, EXPERTS = "context", "experts"
LORA_LEARNING_RATE, FULL_LEARNING_RATE = 3e-4, 1e-4


def find_rank() -> tuple[int, int]:
    """Return the rank of this process and the number of ranks, as torchrun sets them."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def make_workload(options: argparse.Namespace, *, num_step_packs: int) -> Workload:
    """Return the workload of the command line, with as many packs as its steps need."""
    # Whole pools, so that short and long runs take the same packs.
    num_pool_steps = -(-options.steps // BALANCE_POOL_MICRO_BATCHES) * BALANCE_POOL_MICRO_BATCHES
    return replace(
        WORKLOADS[options.workload],
        max_tokens=options.tokens,
        num_packs=num_step_packs * (1 + (options.steps if num_step_packs == 1 else num_pool_steps)),
        document_lengths=(options.tokens,) if options.one_document else None,
    )


def make_share(
    workload: Workload, options: argparse.Namespace, *, num_step_packs: int, rank: int, num_ranks: int
) -> Share:
    """Return the packs of one rank."""
    packs = make_packs(workload)
    return Share(
        [*packs[:num_step_packs], *balance(packs[num_step_packs:], num_step_packs=num_step_packs)],
        rank=rank,
        num_ranks=num_ranks,
        accumulate=options.accumulate,
        num_warmup=options.warmup,
    )


def balance(packs: Sequence[Pack], *, num_step_packs: int) -> list[Pack]:
    """Return packs in the order in which PackedDataModule trains them: those of a step have similar attention cost."""
    if num_step_packs == 1:
        return list(packs)
    length_N = np.concatenate([pack.lengths for pack in packs])
    starts = np.cumsum([0, *(len(pack.lengths) for pack in packs)])
    size = num_step_packs * BALANCE_POOL_MICRO_BATCHES
    order: list[int] = []
    for begin in range(0, len(packs), size):
        part = starts[begin : begin + size + 1]
        own = Packs(
            document_N=np.arange(part[0], part[-1]), start_P1=part - part[0], max_tokens=packs[0].input_id_T.size
        )
        plan = StepPlan(
            own, length_N=length_N, num_labelled_N=length_N - 1, seed=0, world_size=num_step_packs, accumulate=1
        )
        order += (begin + plan.epoch(0).pack_MR.reshape(-1)).tolist()
    return [packs[number] for number in order]


class Share:
    """The packs of one rank, their losses divided by the tokens of the whole optimizer step.

    Args:
        packs: Packs of the warm-up steps, which repeat them, then of each timed step.
        rank: Rank of the share, or the group if ranks share packs.
        num_ranks: Ranks, or groups.
        accumulate: Micro-batches of a rank in one step.
        num_warmup: Warm-up steps.
    """

    def __init__(self, packs: Sequence[Pack], *, rank: int, num_ranks: int, accumulate: int, num_warmup: int) -> None:
        self._packs, self._num_warmup = packs, num_warmup
        self._rank, self._num_ranks, self._accumulate = rank, num_ranks, accumulate

    def packs_of(self, step: int) -> Sequence[Pack]:
        """Return the packs of all ranks in a step: those of the first micro-batch in the order of the ranks, and so on."""
        num_packs = self._num_ranks * self._accumulate
        begin = max(0, step - self._num_warmup + 1) * num_packs
        return self._packs[begin : begin + num_packs]

    def batch(self, number: int) -> PackedBatch:
        """Return a micro-batch of this rank by its number."""
        step, micro = divmod(number, self._accumulate)
        packs = self.packs_of(step)
        num_labelled = sum(int((pack.label_T(1.0) != IGNORED_LABEL).sum()) for pack in packs)
        pack = packs[micro * self._num_ranks + self._rank]
        return collate(
            [Document(ids, labels) for ids, labels in pack.documents(1.0)], num_items=num_labelled / len(packs)
        )


def new_record(options: argparse.Namespace, *, num_ranks: int, num_sharing: int = 1) -> dict[str, Any]:
    """Return the record of a run before it starts."""
    from benchmarks.ruler.cases import versions

    return {
        "title": options.title,
        "workload": options.workload,
        "strategy": options.strategy,
        "num_ranks": num_ranks,
        "accumulate": options.accumulate,
        "num_tokens": options.tokens,
        "num_warmup": options.warmup,
        "optim_bits": options.optim_bits,
        "num_sharing": num_sharing,
        "is_one_document": options.one_document,
        "mode": options.mode,
        "adapters": options.adapters,
        "versions": versions(),
        "reason": "",
    }


class StepLog:
    """Losses, step times and memory of one rank.

    Args:
        record: Filled on every rank, written by rank 0.
        is_cuda: Whether steps run on a GPU.
    """

    def __init__(self, record: dict[str, Any], *, is_cuda: bool) -> None:
        self._record, self._is_cuda = record, is_cuda
        self._clock = StepClock(is_cuda=is_cuda)
        self._losses: list[torch.Tensor] = []
        self._num_done = 0

    def keep_loss(self, loss: torch.Tensor) -> None:
        """Store the loss of a micro-batch, already divided by the accumulation; no host sync."""
        self._losses.append(loss.detach().float())

    def step_done(self) -> None:
        """Record the end of an optimizer step; peaks of memory count from the end of the warm-up."""
        self._num_done += 1
        if self._num_done == self._record["num_warmup"] and self._is_cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        if self._num_done >= self._record["num_warmup"]:
            self._clock.mark()

    def finish(self) -> None:
        """Combine the records of all ranks, a collective."""
        record, step_ms, peak = self._record, self._clock.read_ms(), peak_memory_gib(is_cuda=self._is_cuda)
        summary = summarise_ms(step_ms)
        # The mean over the ranks, the sum over the micro-batches of a step.
        losses = torch.stack(self._losses).view(self._num_done, -1).sum(dim=1)
        if record["num_ranks"] > 1:
            torch.distributed.all_reduce(losses)
            losses /= record["num_ranks"]
        num_packs = record["num_ranks"] // record["num_sharing"] * record["accumulate"]
        record.update(
            ms=step_ms,
            summary=summary,
            losses=losses.tolist(),
            peak_gib=self.gather(peak["allocated"]),
            reserved_gib=self.gather(peak["reserved"]),
            tokens_per_s=record["num_tokens"] * num_packs / summary["median"] * 1e3,
        )

    def gather(self, value: float) -> list[float]:
        """Return the value of every rank."""
        if self._record["num_ranks"] == 1:
            return [value]
        values: list[Any] = [None] * self._record["num_ranks"]
        torch.distributed.all_gather_object(values, value)
        return values
