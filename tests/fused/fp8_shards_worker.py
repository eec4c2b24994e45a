"""Gather the e4m3 values of one layer over any ranks: ``-m tests.fused.fp8_shards_worker <copies> <parks>``."""

import os
import sys

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from lightning_fastft.core.errors import UnsupportedModelError
from lightning_fastft.core.patcher import ModelPatcher
from lightning_fastft.fused.fp8_base import Fp8Base
from lightning_fastft.fused.fp8_weights import Fp8Weight
from lightning_fastft.hf.sharding.stand_ins import gather_instead, gathered_bytes
from lightning_fastft.kernels.fp8_linear.reference import FP8, quantise_rows
from tests.support.rank_exit import leave

SIZES = (32, 16)
NUM_INPUTS = 48


def build(mesh):
    torch.manual_seed(3)
    layers = nn.Sequential(*(nn.Linear(NUM_INPUTS, size, bias=False, dtype=torch.bfloat16) for size in SIZES))
    layers.requires_grad_(False)
    with torch.no_grad():
        # Scales are powers of 2, and those of rows of one size would be equal.
        for layer in layers:
            layer.weight.mul_(torch.randint(-4, 5, (len(layer.weight), 1)).exp2())
    whole = [layer.weight.detach().clone() for layer in layers]
    return fully_shard(layers, mesh=mesh, reshard_after_forward=True), whole


def gathered(unit):
    """The weights while the unit is gathered."""
    unit.unshard()
    # 16 rows on 3 ranks are padded to 18.
    assert all(layer.weight.untyped_storage().nbytes() < 1.2 * layer.weight.nbytes for layer in unit)
    found = [layer.weight.detach().clone() for layer in unit]
    unit.reshard()
    return found


def main(num_copies, parks):
    torch.distributed.init_process_group("gloo")
    shape = (int(num_copies), int(os.environ["WORLD_SIZE"]) // int(num_copies))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    unit, whole = build(mesh["shard"] if shape[0] == 1 else mesh)
    before = [layer.weight for layer in unit]
    # The unit has buffers for bf16 now.
    assert all(map(torch.equal, gathered(unit), whole))

    patcher = ModelPatcher()
    weight = Fp8Weight(Fp8Base([], read=lambda _: "", find=lambda _: (), is_emulated=True))
    gather_instead(unit, weight.shard(list(unit), patcher), patcher, parks_weights=parks == "parks")
    expected = [quantise_rows(each, factor_I=None, round_scales_to_power_of_2=True) for each in whole]
    for _ in range(2):
        found = gathered(unit)
        assert all(each.dtype is FP8 for each in found)
        assert all(torch.equal(each.float(), rows.values_TI.float()) for each, rows in zip(found, expected))
    assert torch.equal(weight.memory()[0], torch.cat([rows.scale_T for rows in expected]))
    assert gathered_bytes(unit) == sum(each.numel() for each in whole)
    assert all(torch.equal(layer.weight.full_tensor(), each) for layer, each in zip(unit, whole))
    held = [each.to_local().untyped_storage().nbytes() for each in before]
    assert all(held) is (parks != "parks")
    with torch.no_grad():
        unit[0].weight.mul_(2)
    try:
        unit.unshard()
        raise AssertionError("a written weight was gathered in its earlier form")
    except UnsupportedModelError:
        pass

    patcher.undo()
    assert all(layer.weight is each for layer, each in zip(unit, before))
    # The write survives.
    assert all(map(torch.equal, gathered(unit), [2 * whole[0], whole[1]]))
    assert gathered_bytes(unit) == sum(each.nbytes for each in whole)


if __name__ == "__main__":
    main(*sys.argv[1:])
    leave()
