"""Train tiny models under activation policies on two ranks; run by torchrun: ``-m tests.strategies.offload_worker
<file>``.

Every rank has packs of its own lengths, so that nothing may depend on what only one rank sees. Each rank writes what it
found to ``<file>.<rank>``.
"""

import os
import sys
from pathlib import Path

import torch
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import Callback
from torch.utils.data import DataLoader

from lightning_fastft.activations.checkpointing import OffloadCheckpointing
from lightning_fastft.packing.collate import collate
from lightning_fastft.strategies.registry import register_strategies
from tests.strategies.strategy_worker import CLIP_NORM, NUM_RANKS, STRATEGIES, make_tuner, trained_state
from tests.support.rank_exit import leave
from tests.support.token_weighting_worker import ragged_examples
from tests.support.training_parts import quiet_trainer
from tests.support.two_ranks import run_two_ranks

ACCUMULATE, NUM_WINDOWS = 3, 4
# GiB: room for everything; "held in part" lies between what recompute needs (1.2e-3 to 1.4e-3) and what keeping
# everything takes (2.2e-3).
LARGE_BUDGET = 1.0
POLICIES = {
    "keep": ("keep", {}),
    "recompute": ("recompute", {}),
    "offload": ("offload", {}),
    "auto": ("auto", {"vram_budget": LARGE_BUDGET}),
    "auto, held in part": ("auto", {"vram_budget": 1.6e-3, "host_budget": 0}),
    "auto without a budget": ("auto", {}),
    "streamed": ("recompute", {"weights": "stream", "host_budget": LARGE_BUDGET}),
}
CASES = {
    "ddp": [
        ("lora", "offload"),
        ("lora", "auto"),
        ("lora", "auto, held in part"),
        ("full", "offload"),
        ("nf4", "auto"),
        ("lora", "auto without a budget"),
        ("nf4", "streamed"),
    ],
    "fsdp": [
        ("full", "offload"),
        ("full", "auto"),
        ("full", "auto, held in part"),
        ("lora", "auto"),
    ],
}


class WatchPlan(Callback):
    """Notes what each segment does, and how often ranks were asked for a plan."""

    def __init__(self):
        self.plans, self.num_asked, self.num_planned, self.on_host = [], 0, 0, 0

    def on_train_start(self, trainer, pl_module):
        for stack in trainer.strategy.checkpointing.stacks:
            agree = stack.environment.agree

            def count(plan, agree=agree):
                self.num_asked += 1
                return agree(plan)

            stack.environment = stack.environment._replace(agree=count)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        stacks = trainer.strategy.checkpointing.stacks
        if stacks:
            (stack,) = stacks
            self.plans.append(
                [(plan.is_kept, plan.input_place, plan.values) for plan in (segment.plan for segment in stack.segments)]
            )
            self.on_host = max(self.on_host, 0 if stack.engine is None else stack.engine.slab.num_bytes)


def batches_of(rank, *, world_size, is_grown):
    """Windows of ACCUMULATE packs per rank; each pack has another length, and where it is grown, one rank's later
    packs are longer than its first.
    """
    documents = sorted(ragged_examples(), key=lambda document: len(document.input_ids))
    # The longest pack first: every rank plans once. Or one rank meets its longest at the second and at the seventh
    # forward.
    found = []
    for window in range(NUM_WINDOWS):
        sizes = [[9, 5, 3], [8, 4, 6]]
        if is_grown:
            sizes = [[3, 5, 3], [4, 4, 3]] if window == 0 else [[3, 4, 3], [4 + 2 * window, 4, 3]]
        packs = [[documents[len(documents) - size : len(documents)] for size in row] for row in sizes]
        num_items = sum(
            int((document.labels[1:] != -100).sum()) for row in packs for pack in row for document in pack
        ) / (ACCUMULATE * NUM_RANKS)
        rows = [[collate(pack, num_items=num_items) for pack in row] for row in packs]
        found += rows[rank] if world_size == NUM_RANKS else [batch for pair in zip(*rows) for batch in pair]
    return found


def train(kind, policy, strategy_name, *, rank=0, is_grown=False, folder=None):
    """The trained weights of one case, and what its plans were."""
    world_size = 1 if strategy_name == "one" else NUM_RANKS
    seed_everything(5, verbose=False)
    name, options = POLICIES[policy]
    strategy = STRATEGIES[strategy_name](activations=OffloadCheckpointing(name, **options))
    watch = WatchPlan()
    trainer = quiet_trainer(
        folder,
        strategy=strategy,
        devices=world_size,
        max_steps=NUM_WINDOWS,
        gradient_clip_val=CLIP_NORM,
        use_distributed_sampler=False,
        accumulate_grad_batches=ACCUMULATE * NUM_RANKS // world_size,
        callbacks=[watch],
    )
    module = make_tuner(kind)
    trainer.fit(module, DataLoader(batches_of(rank, world_size=world_size, is_grown=is_grown), batch_size=None))
    assert trainer.global_step == NUM_WINDOWS
    assert strategy.checkpointing.stacks == []
    if policy == "streamed":
        # Outside of fit, Lightning broadcasts what it would not find in DDP.
        (found,) = trainer.validate(
            module, DataLoader(batches_of(rank, world_size=world_size, is_grown=False), batch_size=None), verbose=False
        )
        assert 0 < found["val_loss"] < 10
    return {"state": trained_state(module), "plans": watch.plans, "asked": watch.num_asked, "on host": watch.on_host}


def run_on_two_ranks(folder):
    """What each rank found."""
    # A deadlock is the fault that this is for: it must not take longer than it would take to look for it.
    run_two_ranks("tests.strategies.offload_worker", folder / "found", timeout_s=120)
    return [torch.load(folder / f"found.{rank}", weights_only=True) for rank in range(NUM_RANKS)]


def main(path):
    register_strategies()
    rank = int(os.environ["RANK"])
    found = {}
    for strategy_name, cases in CASES.items():
        for kind, policy in cases:
            found[strategy_name, kind, policy] = train(kind, policy, strategy_name, rank=rank, folder=Path(path).parent)
        found[strategy_name, "grown"] = train(
            "full", "auto", strategy_name, rank=rank, is_grown=True, folder=Path(path).parent
        )
    torch.save(found, f"{path}.{rank}")


if __name__ == "__main__":
    main(sys.argv[1])
    leave()
