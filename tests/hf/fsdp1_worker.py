"""Train a tiny model in torch's first FSDP, layers recorded and as ever; run by torchrun on two ranks: ``-m
tests.hf.fsdp1_worker <folder>``.
"""

import sys
from pathlib import Path

import torch
from torch.distributed.fsdp import FullyShardedDataParallel

from lightning_fastft.activations.checkpointing import OffloadCheckpointing
from lightning_fastft.core.patcher import ModelPatcher
from lightning_fastft.patches.packed import install_packed_training
from tests.graphs.test_layer_graphs import PACKS, install
from tests.support.layer_pairs import build, fuse
from tests.support.packs import make_batch
from tests.support.rank_exit import leave


def train(*, is_recorded, use_orig_params, rank):
    torch.manual_seed(0)
    model = build("qwen3", "full")
    if is_recorded:
        graphs, _ = install(model)
    else:
        fuse(model)
        install_packed_training(model, ModelPatcher(), checkpointing=OffloadCheckpointing("keep"))
    sharded, losses = (
        FullyShardedDataParallel(model, use_orig_params=use_orig_params, device_id=torch.device("cpu")),
        [],
    )
    for number, lengths in enumerate(PACKS[:6]):
        loss = sharded(**make_batch(lengths, seed=2 * number + rank)).loss
        loss.backward()
        losses.append(loss.item())
        with torch.no_grad():
            for parameter in sharded.parameters():
                if parameter.grad is not None:
                    parameter -= 0.05 * parameter.grad
        sharded.zero_grad()
    return (
        {"losses": losses, "replays": graphs.num_replays, "reasons": sorted(graphs.reasons)}
        if is_recorded
        else {"losses": losses}
    )


def main(folder):
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    for use_orig_params in (True, False):
        for is_recorded in (False, True):
            found = train(is_recorded=is_recorded, use_orig_params=use_orig_params, rank=rank)
            if rank == 0:
                torch.save(found, Path(folder) / f"{use_orig_params}-{is_recorded}.pt")


if __name__ == "__main__":
    main(sys.argv[1])
    leave()
